"""A hostile sandbox against the files API and whatever else reads what it planted."""

from __future__ import annotations

import asyncio
import contextlib
import io
import tarfile
from pathlib import Path

import pytest
from tests.support import raw_http
from tests.support.daemon import Daemon
from tests.support.fixtures import BoxFactory, HostName
from tests.support.timing import Stopwatch, scaled

import dsec

pytestmark = [pytest.mark.system, pytest.mark.attack, pytest.mark.root]

FLIPPER = """
import os, sys
good, evil = sys.argv[1:]
os.makedirs(good, exist_ok=True)
os.symlink(evil, '/r/evil'); os.symlink(good, '/r/good')
while True:
    for name in ('evil', 'good'):
        os.symlink(os.readlink('/r/' + name), '/r/next'); os.rename('/r/next', '/r/flip')
"""

SWAPPER = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
os.makedirs('/r/dir', exist_ok=True); open('/r/dir/file', 'w').write('INSIDE'); os.symlink(sys.argv[1], '/r/link')
while True: libc.renameat2(-100, b'/r/dir', -100, b'/r/link', 2)   # RENAME_EXCHANGE: a directory becomes a link in one step
"""


REPLACE_TOOLS = """
import os, shutil
for tool in 'tar ls cat cp mv rm chmod chown stat id getent find mkdir sh bash dash env'.split():
    path = shutil.which(tool)
    with open('/tmp/evil', 'w') as file: file.write('#!/usr/bin/python3\\nopen("/evil", "w")\\n')
    os.chmod('/tmp/evil', 0o755)
    os.rename('/tmp/evil', path)
"""


@pytest.mark.parametrize("program", [FLIPPER, SWAPPER], ids=["flipped link", "exchanged directory"])
async def test_a_race_of_links_never_leads_out(box: BoxFactory, host_name: HostName, program: str) -> None:
    host = host_name("hostdir")
    host.mkdir()
    (host / "file").write_text("HOSTSECRET")
    sandbox = await box()
    await sandbox.run("mkdir /r", check=True)
    words = ["/good", str(host)] if program is FLIPPER else [str(host)]
    # Inside, the same path exists too, so that the race has two ends: what is read there is the sandbox's own.
    await sandbox.run(f"mkdir -p /good {host}; echo INSIDE > /good/file; echo INSIDE > {host}/file", check=True)
    race = await sandbox.start(["python3", "-c", program, *words])
    folder = "/r/flip" if program is FLIPPER else "/r/dir"
    with Stopwatch() as watch:
        while watch.seconds < 6:
            for call in (
                sandbox.files.read(f"{folder}/file"),
                sandbox.files.write(f"{folder}/new", b"NEW"),
                sandbox.files.list(folder),
                sandbox.files.chmod(f"{folder}/file", 0o600),
                sandbox.files.move(f"{folder}/new", f"{folder}/moved"),
                sandbox.files.remove(f"{folder}/moved"),
            ):
                try:
                    answer = await call
                except dsec.FileError:
                    continue
                if isinstance(answer, bytes):
                    assert b"HOST" not in answer
    await race.kill()
    assert sorted(path.name for path in host.iterdir()) == ["file"]
    assert (host / "file").read_text() == "HOSTSECRET"
    assert (host / "file").stat().st_mode & 0o777 == 0o644


async def test_a_tree_that_changes_while_it_is_removed_or_fetched(
    box: BoxFactory, host_name: HostName, tmp_path: Path
) -> None:
    host = host_name("hostdir")
    host.mkdir()
    (host / "file").write_text("HOSTSECRET")
    sandbox = await box()
    await sandbox.run("mkdir /r", check=True)
    race = await sandbox.start(["python3", "-c", SWAPPER, str(host)])
    for number in range(20):
        try:
            await sandbox.files.download("/r", tmp_path / f"copy{number}")
        except dsec.FileError:
            continue
    for path in tmp_path.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert "HOST" not in path.read_text()
    with contextlib.suppress(dsec.FileError):
        await sandbox.files.remove("/r", recursive=True)
    await race.kill()
    assert sorted(path.name for path in host.iterdir()) == ["file"]


async def test_an_archive_of_every_trick_is_refused_by_name(
    box: BoxFactory, daemon: Daemon, host_name: HostName
) -> None:
    victim = host_name("victim")
    victim.mkdir()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:

        def add(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", **fields: object) -> None:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, link
            entry.size = 3 if kind == tarfile.REGTYPE else 0
            for field, value in fields.items():
                setattr(entry, field, value)
            tar.addfile(entry, io.BytesIO(b"pwn") if kind == tarfile.REGTYPE else None)

        add("plain")
        add("../up")
        add("a/../../up2")
        add("/absolute")
        add(str(victim / "abs"))
        add("dev", tarfile.CHRTYPE, devmajor=1, devminor=1)
        add("block", tarfile.BLKTYPE, devmajor=8, devminor=0)
        add("out", tarfile.SYMTYPE, str(victim))
        add("out/through")
        add("up", tarfile.SYMTYPE, "../..")
        add("up/through")
        add("hard", tarfile.LNKTYPE, "/etc/passwd")
        add("hard2", tarfile.LNKTYPE, "../../../etc/shadow")
        add("setuid", mode=0o6755)
        add("owned", uid=12345, gid=54321)
        add("long/" * 60 + "name")
        add("negative", mtime=-5)
    sandbox = await box()
    answer = await raw_http.request(
        daemon.paths.api_socket,
        "PUT",
        f"/v1/sandboxes/{sandbox.id}/files:archive?path=/data/a",
        key=daemon.key,
        body=archive.getvalue(),
        headers={"Content-Type": "application/x-tar"},
    )
    assert answer.status == 200, answer.body
    refused = " ".join(answer.json["refused"])
    for name in ("../up", "up2", "absolute", "abs", "dev", "block", "out/through", "up/through"):
        assert name in refused, f"{name} is not named in {refused}"
    found = (
        await sandbox.run(
            "cd /data/a; find . -type f | sort; stat -c %u owned; ls /data; ls -d /up* /absolute 2>/dev/null"
        )
    ).text
    assert "./plain" in found
    assert "./out/through" not in found
    assert "/absolute" not in found
    assert "up2" not in found
    assert (await sandbox.run("grep -c pwn /etc/passwd /etc/shadow; find / -xdev -name through")).text.count(
        "through"
    ) == 0
    assert not list(victim.iterdir())


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 512, b"\0" * 10240, b"junk" * 1000, b"\xff" * 5000, b"x" * 513],
    ids=["empty", "half an end", "end", "junk", "ones", "cut"],
)
async def test_archives_that_are_none(box: BoxFactory, daemon: Daemon, data: bytes) -> None:
    sandbox = await box()
    answer = await raw_http.request(
        daemon.paths.api_socket,
        "PUT",
        f"/v1/sandboxes/{sandbox.id}/files:archive?path=/data/a",
        key=daemon.key,
        body=data,
        headers={"Content-Type": "application/x-tar"},
    )
    assert answer.status in (200, 400, 409, 422), answer.body
    assert (await sandbox.run("echo alive")).text == "alive\n"


async def test_an_archive_with_a_lying_size_ends(box: BoxFactory, daemon: Daemon) -> None:
    header = tarfile.TarInfo("big")
    header.size = 1 << 40
    sandbox = await box()
    answer = await raw_http.request(
        daemon.paths.api_socket,
        "PUT",
        f"/v1/sandboxes/{sandbox.id}/files:archive?path=/data/a",
        key=daemon.key,
        body=header.tobuf() + b"x" * 1024,
        headers={"Content-Type": "application/x-tar"},
        timeout_s=20,
    )
    assert 400 <= answer.status < 600
    assert answer.status != 500
    assert (await sandbox.run("echo alive")).text == "alive\n"


@pytest.mark.parametrize(
    "passwd",
    [
        b"",
        b"root",
        b"root:x:0:0\nroot:x:-5:99999999999999:x:\0\0/:/bin/sh\n",
        b":" * 100_000,
        b"x" * 50_000_000,
        b"root:x:0:0:root:/root\nevil:x:4294967295:4294967295::/:\n",
        b"root:x:0:0::../../../..:/bin/sh\ndaemon:x:1:1:" + b"\xff" * 200 + b":/:/x\n",
    ],
    ids=["empty", "word", "numbers", "colons", "huge", "maximum", "bytes"],
)
async def test_a_hostile_passwd_breaks_nothing(box: BoxFactory, passwd: bytes) -> None:
    sandbox = await box()
    await sandbox.files.write("/etc/passwd", passwd)
    await sandbox.files.write("/etc/group", passwd, user="0")
    for user in ("0", "root", "evil", "daemon", "daemon:evil", "nobody"):
        with Stopwatch() as watch:
            try:
                result = await sandbox.run(["/usr/bin/id", "-u"], user=user, timeout=scaled(10))
                assert result.text.strip() in ("0", "1", "65534")
            except (dsec.InvalidRequest, dsec.FileError):
                pass
        watch.assert_below(8)
    assert (await sandbox.run(["echo", "alive"], user="0")).text == "alive\n"
    await sandbox.files.write("/etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n", user="0")


@pytest.mark.parametrize("kind", ["fifo", "link to a device", "directory", "link to itself", "socket"])
async def test_passwd_that_is_no_file_does_not_hang_commands(box: BoxFactory, kind: str) -> None:
    sandbox = await box()
    make = {
        "fifo": "mkfifo /etc/passwd",
        "link to a device": "ln -s /dev/zero /etc/passwd",
        "directory": "mkdir /etc/passwd",
        "link to itself": "ln -s passwd /etc/passwd",
        "socket": "python3 -c \"import socket;socket.socket(socket.AF_UNIX).bind('/etc/passwd')\"",
    }[kind]
    await sandbox.run(f"rm /etc/passwd; {make}", user="0", check=True)
    for user in ("0", "root", "daemon", None):
        with Stopwatch() as watch:
            try:
                await sandbox.run(["true"], user=user, timeout=scaled(5))
                await sandbox.files.write("/tmp/x", b"x", user=user)
            except (dsec.InvalidRequest, dsec.FileError):
                pass
        watch.assert_below(5)
    assert (await sandbox.run(["echo", "alive"], user="0")).text == "alive\n"


async def test_special_files_are_refused_and_nothing_hangs(box: BoxFactory, tmp_path: Path) -> None:
    sandbox = await box()
    await sandbox.run(
        "mkdir /s; mkfifo /s/fifo; ln -s /dev/zero /s/zero; ln -s /proc/kmsg /s/kmsg; ln -s /dev/tty /s/tty; "
        "python3 -c \"import socket;socket.socket(socket.AF_UNIX).bind('/s/socket')\"; ln -s fifo /s/tofifo",
        check=True,
    )
    for name in ("fifo", "zero", "tty", "socket", "tofifo"):
        with Stopwatch() as watch:
            with pytest.raises(dsec.FileError):
                await sandbox.files.read(f"/s/{name}")
            with pytest.raises(dsec.FileError):
                await sandbox.files.write(f"/s/{name}", b"x", append=True)
        watch.assert_below(3)
    # Commands whose working directory or program is no file or directory.
    for options in ({"command": ["true"], "cwd": "/s/fifo"}, {"command": ["/s/fifo"]}, {"command": ["/s/socket"]}):
        with pytest.raises(dsec.CommandNotStarted):
            await sandbox.run(options.pop("command"), **options)
    await sandbox.files.download("/s", tmp_path / "s")
    assert not (tmp_path / "s" / "socket").exists()


async def test_the_tools_of_the_image_are_never_trusted(box: BoxFactory) -> None:
    """The agent runs no program of the sandbox's own accord: replaced tools change nothing in what the API does."""
    sandbox = await box()
    await sandbox.run(
        ["python3", "-c", REPLACE_TOOLS],
        check=True,
    )
    await sandbox.files.write("/w/a", b"a")
    await sandbox.files.chmod("/w/a", 0o600)
    await sandbox.files.chown("/w/a", "daemon")
    await sandbox.files.move("/w/a", "/w/b")
    assert [entry.name for entry in await sandbox.files.list("/w")] == ["b"]
    assert await sandbox.files.read("/w/b") == b"a"
    await sandbox.files.remove("/w", recursive=True)
    assert not await sandbox.files.exists("/evil")


async def test_preloaded_code_and_environment_do_not_reach_the_agent(box: BoxFactory) -> None:
    sandbox = await box(env={"LD_PRELOAD": "/evil.so", "LD_LIBRARY_PATH": "/evil", "PYTHONSTARTUP": "/evil"})
    await sandbox.run("echo /evil.so > /etc/ld.so.preload", user="0")
    await sandbox.files.write("/x", b"x")
    assert await sandbox.files.read("/x") == b"x"
    result = await sandbox.run(["/bin/true"])
    assert result.reason == "exit"


async def test_many_file_calls_at_once_meet_a_typed_bound_and_all_succeed_in_the_end(box: BoxFactory) -> None:
    sandbox = await box(memory="128MiB", disk_backing="local")
    data = b"x" * 200_000

    async def one(number: int) -> None:
        for _ in range(100):
            try:
                await sandbox.files.write(f"/many/{number}", data)
                assert await sandbox.files.read(f"/many/{number}") == data
            except dsec.NoCapacity:
                await asyncio.sleep(0.2)
            else:
                return
        raise AssertionError(f"file {number} never had its turn")

    async with asyncio.TaskGroup() as group:
        for number in range(200):
            group.create_task(one(number))
    assert len(await sandbox.files.list("/many")) == 200


async def test_a_listing_of_a_hundred_thousand_names_comes_whole(box: BoxFactory) -> None:
    sandbox = await box()
    code = "import os\nos.mkdir('/m')\nfor i in range(100000): os.close(os.open(f'/m/{i:06d}', os.O_CREAT))"
    await sandbox.run(["python3", "-c", code], check=True, timeout=scaled(60))
    assert len(await sandbox.files.list("/m")) == 100_000
