"""Behaviour cases of area files."""

from __future__ import annotations

import hashlib
import io
import random
import tarfile
from pathlib import Path

import pytest
from tests.support import raw_http
from tests.support.daemon import Daemon
from tests.support.fixtures import BoxFactory, HostName
from tests.support.timing import Stopwatch
from tests.system.cases.kinds import case

import dsec


@case("files-sizes-around-18k")
async def test_files_sizes_around_18k(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    await sandbox.run("mkdir -p /data/up", check=True)
    sizes = (0, 1, 17407, 17408, 17409, 18431, 18432, 18433, 19456, 65535, 65536, 65537)
    contents = {f"f_{size}": random.Random(size).randbytes(size) for size in sizes}
    for name, data in contents.items():
        await sandbox.files.write(f"/data/up/{name}", data)
    lines = (await sandbox.run("cd /data/up && sha256sum f_*")).text.splitlines()
    sums = {line.split()[1]: line.split()[0] for line in lines}
    assert sums == {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    for name, data in contents.items():
        assert await sandbox.files.read(f"/data/up/{name}") == data
    assert len(await sandbox.files.list("/data/up")) == len(sizes)


@case("files-planted-symlink-leaf")
async def test_files_planted_symlink_leaf(
    kind: str, client: dsec.AsyncClient, box: BoxFactory, host_name: HostName
) -> None:
    secret, absent = host_name("hostonly_4750"), host_name("hostonly_4751")
    secret.write_text("HOSTSECRET")
    before = secret.stat()
    sandbox = await box(kind)
    await sandbox.run(f"mkdir -p /data; ln -s {secret} /data/l1; ln -s {absent} /data/l2", check=True)
    with pytest.raises(FileNotFoundError):
        await sandbox.files.read("/data/l1")
    entries = {entry.name: entry.type for entry in await sandbox.files.list("/data")}
    assert entries == {"l1": "symlink", "l2": "symlink"}
    for link in ("/data/l1", "/data/l2"):
        try:
            await sandbox.files.write(link, b"x")
        except dsec.FileError:
            continue
        assert await sandbox.files.read(link) == b"x"
    after = secret.stat()
    assert secret.read_text() == "HOSTSECRET"
    assert (after.st_mode, after.st_uid, after.st_gid, after.st_mtime_ns) == (
        before.st_mode,
        before.st_uid,
        before.st_gid,
        before.st_mtime_ns,
    )
    assert not absent.exists()


@case("files-symlinked-parent-new-leaf")
async def test_files_symlinked_parent_new_leaf(
    kind: str, client: dsec.AsyncClient, box: BoxFactory, tmp_path: Path, host_name: HostName
) -> None:
    target, tree = host_name("hostdir_4752"), tmp_path / "tree"
    target.mkdir()
    tree.mkdir()
    (tree / "leaf").write_text("pwn")
    sandbox = await box(kind)
    await sandbox.run(f"mkdir -p /data; ln -s {target} /data/d", check=True)
    for _ in range(2):  # first with a link to nowhere, then with one to a directory of the sandbox's own
        try:
            await sandbox.files.write("/data/d/new.txt", b"pwn")
            assert await sandbox.files.read(f"{target}/new.txt") == b"pwn"
        except dsec.FileError:
            pass
        try:
            await sandbox.files.upload(tree, "/data/d/tree")
            assert await sandbox.files.read(f"{target}/tree/leaf") == b"pwn"
        except dsec.FileError:
            pass
        assert not list(target.iterdir())
        await sandbox.run(["mkdir", "-p", str(target)], check=True)


@case("files-newline-in-name")
async def test_files_newline_in_name(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    make = (
        "import os;os.makedirs('/data/n');open('/data/n/a\\nb','w').write('1');open('/data/n/a','w').write('22');"
        "os.symlink('a','/data/n/ln');os.mkdir('/data/n/sub')"
    )
    await sandbox.run(["python3", "-c", make], check=True)
    entries = {entry.name: entry for entry in await sandbox.files.list("/data/n")}
    assert {name: entry.type for name, entry in entries.items()} == {
        "a\nb": "file",
        "a": "file",
        "ln": "symlink",
        "sub": "directory",
    }
    assert (entries["a\nb"].size, entries["a"].size) == (1, 2)
    assert await sandbox.files.read("/data/n/a\nb") == b"1"
    await sandbox.files.write("/data/n/c\nd", b"333")
    result = await sandbox.run(["python3", "-c", "import os;print(sorted(os.listdir('/data/n')))"])
    assert result.text == "['a', 'a\\nb', 'c\\nd', 'ln', 'sub']\n"


@case("files-read-fifo-does-not-hang")
async def test_files_read_fifo_does_not_hang(
    kind: str, client: dsec.AsyncClient, box: BoxFactory, tmp_path: Path
) -> None:
    sandbox = await box(kind)
    await sandbox.run("mkdir -p /data/s; mkfifo /data/s/p; echo ok > /data/s/f", check=True)
    with Stopwatch() as watch, pytest.raises(dsec.NotRegularFile):
        await sandbox.files.read("/data/s/p")
    watch.assert_below(3)
    with Stopwatch() as watch:
        report = await sandbox.files.download("/data/s", tmp_path / "s")
    watch.assert_below(10)
    assert (tmp_path / "s" / "f").read_text() == "ok\n"
    assert (tmp_path / "s" / "p").is_fifo() or any(name.endswith("p") for name in report.skipped)
    with pytest.raises(dsec.Unsupported):
        await sandbox.snapshot("s")


@case("files-archive-link-then-file")
async def test_files_archive_link_then_file(
    kind: str, client: dsec.AsyncClient, box: BoxFactory, daemon: Daemon, host_name: HostName
) -> None:
    out, victim = host_name("out_4753"), host_name("victim_4753")
    out.mkdir()
    victim.mkdir()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        link = tarfile.TarInfo("x")
        link.type, link.linkname = tarfile.SYMTYPE, str(victim)
        tar.addfile(link)
        for name in ("x/pwn", "../up", f"{victim}/abs", "ok"):
            entry = tarfile.TarInfo("placeholder")
            entry.name, entry.size = name, 3
            tar.addfile(entry, io.BytesIO(b"pwn"))
    sandbox = await box(kind)
    answer = await raw_http.request(
        daemon.paths.api_socket,
        "PUT",
        f"/v1/sandboxes/{sandbox.id}/files:archive?path=/data/a",
        key=daemon.key,
        body=archive.getvalue(),
        headers={"Content-Type": "application/x-tar"},
    )
    assert answer.status == 200
    refused = answer.json["refused"]
    assert any("up" in name for name in refused)
    assert any("abs" in name for name in refused)
    listing = (await sandbox.run(f"ls -A /data/a; ls -A {victim} 2>&1; ls -A /data")).text
    assert "ok" in listing
    assert "up" not in listing.split()
    assert "abs" not in listing.split()
    assert "pwn" not in listing.split()
    assert not list(victim.iterdir())
    await sandbox.run(f"mkdir -p /data/b; ln -s {victim} /data/b/x; echo 1 > /data/b/ok", check=True)
    await sandbox.files.download("/data/b", out / "b")
    assert (out / "b" / "ok").read_text() == "1\n"
    assert not (out / "b" / "x").exists() or (out / "b" / "x").is_symlink()
    assert not list(victim.iterdir())
    assert {path.name for path in out.iterdir()} == {"b"}


@case("files-owner-is-the-exec-user")
async def test_files_owner_is_the_exec_user(
    kind: str, client: dsec.AsyncClient, box: BoxFactory, tmp_path: Path
) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "f").write_text("f")
    for user in ("1000:1000", None):
        sandbox = await box(kind, user=user)
        # Only root may make entries in /: the folder is the user's, as a home or work directory would be.
        await sandbox.run("mkdir /data && chown 1000:1000 /data" if user else "mkdir /data", user="root", check=True)
        await sandbox.files.write("/data/r/.git/config", b"x")
        await sandbox.files.upload(tmp_path / "t", "/data/t")
        result = await sandbox.run(
            "id -u; stat -c %u /data/r /data/r/.git /data/r/.git/config /data/t /data/t/f; "
            "echo y >> /data/r/.git/config && echo writable"
        )
        lines = result.text.split()
        assert lines[-1] == "writable"
        assert lines[:-1] == [("1000" if user else "0")] * 6


@case("files-odd-names-round-trip")
async def test_files_odd_names_round_trip(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    names = [
        "-rf", "*", "a b", "q'\"q", "$(touch INJ)", "`touch INJ`", "a;touch INJ", "\u00e9\u6587\U0001f600", "n" * 255,
        "tab\there", "back\\slash", "50%2e%2e", ".hidden",
    ]  # fmt: skip
    for index, name in enumerate(names):
        await sandbox.files.write(f"/data/o/{name}", str(index).encode())
    assert sorted(entry.name for entry in await sandbox.files.list("/data/o")) == sorted(names)
    for index, name in enumerate(names):
        assert await sandbox.files.read(f"/data/o/{name}") == str(index).encode()
        await sandbox.files.remove(f"/data/o/{name}")
    assert await sandbox.files.list("/data/o") == []
    assert (await sandbox.run("ls -A /data /data/o / | grep -c INJ")).text == "0\n"


@case("files-mode-kept")
async def test_files_mode_kept(kind: str, client: dsec.AsyncClient, box: BoxFactory, tmp_path: Path) -> None:
    folder = tmp_path / "up"
    folder.mkdir()
    (folder / "run.sh").write_text("#!/bin/sh\necho ran")
    (folder / "run.sh").chmod(0o755)
    sandbox = await box(kind)
    await sandbox.files.upload(folder, "/data/up")
    await sandbox.files.write("/data/plain", b"p")
    result = await sandbox.run("/data/up/run.sh; stat -c %a /data/up/run.sh /data/plain; chmod 600 /data/plain")
    assert result.text == "ran\n755\n644\n"
    await sandbox.files.write("/data/plain", b"q")
    assert (await sandbox.run("stat -c %a /data/plain; cat /data/plain")).text == "600\nq"
