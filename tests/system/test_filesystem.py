"""Files through the API: all sizes, all names, links, errors, atomic replacement, trees."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from pathlib import Path

import pytest
from tests.support.fixtures import BoxFactory, HostName
from tests.support.timing import eventually, scaled

import dsec

pytestmark = [pytest.mark.system, pytest.mark.root]


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 65_536, 262_144, 262_145, 1 << 20, (16 << 20) + 3])
async def test_a_file_arrives_and_returns_whole(box: BoxFactory, size: int) -> None:
    sandbox = await box()
    data = random.Random(size).randbytes(size)
    assert await sandbox.files.write("/d/f", data) == size
    assert (await sandbox.run("sha256sum < /d/f")).text.split()[0] == hashlib.sha256(data).hexdigest()
    assert await sandbox.files.read("/d/f") == data
    if size > 10:
        assert await sandbox.files.read("/d/f", offset=5, limit=3) == data[5:8]
        assert await sandbox.files.read("/d/f", offset=size - 2) == data[-2:]
    assert await sandbox.files.read("/d/f", offset=size + 5) == b""


@pytest.mark.slow
@pytest.mark.timeout(scaled(400))
async def test_a_gibibyte_goes_up_and_down_by_hash(box: BoxFactory, tmp_path: Path) -> None:
    sandbox = await box(disk="3GiB", disk_backing="local")
    source, back = tmp_path / "source", tmp_path / "back"
    digest = hashlib.sha256()
    block = random.Random(1).randbytes(1 << 20)
    with source.open("wb") as file:
        for number in range(1024):
            piece = number.to_bytes(8, "little") + block[8:]
            digest.update(piece)
            file.write(piece)
    try:
        await sandbox.files.upload(source, "/big")
        result = await sandbox.run("sha256sum < /big", timeout=scaled(120), check=True)
        assert result.text.split()[0] == digest.hexdigest()
        await sandbox.files.download("/big", back)
        with back.open("rb") as file:
            assert hashlib.file_digest(file, "sha256").digest() == digest.digest()
    finally:
        source.unlink()
        back.unlink(missing_ok=True)


async def test_any_name_but_nul_and_slash(box: BoxFactory) -> None:
    sandbox = await box()
    names = [bytes([byte]) for byte in range(1, 256) if byte not in b"/."]
    names += [b"\xff\xfe\x80", b"\xe2\x82", "\u202e".encode(), b"...", b"--", b"x" * 255]
    texts = [os.fsdecode(name) for name in names]

    async def put(index: int) -> None:
        await sandbox.files.write(f"/n/{texts[index]}", b"%d" % index)

    for start in range(0, len(names), 16):
        async with asyncio.TaskGroup() as group:
            for index in range(start, min(start + 16, len(names))):
                group.create_task(put(index))
    inside = await sandbox.run(["python3", "-c", "import os;print(sorted(os.listdir(b'/n')))"])
    assert inside.text == f"{sorted(names)!r}\n"
    listed = await sandbox.files.list("/n")
    assert [os.fsencode(entry.name) for entry in listed] == sorted(names)
    for index, text in enumerate(texts):
        assert await sandbox.files.read(f"/n/{text}") == b"%d" % index
    with pytest.raises(dsec.DsecError) as caught:
        await sandbox.files.write("/n/a\0b", b"")
    assert isinstance(caught.value, dsec.InvalidPath | dsec.InvalidRequest)
    with pytest.raises(dsec.InvalidPath):
        await sandbox.files.write("/n/" + "y" * 256, b"")


async def test_links_never_lead_out(box: BoxFactory, host_name: HostName) -> None:
    secret = host_name("hostdir")
    secret.mkdir()
    (secret / "file").write_text("HOSTSECRET")
    sandbox = await box()
    up = "../" * 40
    await sandbox.run(
        f"mkdir /l; ln -s {secret} /l/abs; ln -s {up}{str(secret)[1:]} /l/rel; ln -s /proc/1/root /l/proc; "
        f"ln -s /proc/self/root /l/self; ln -s /l/abs /l/twice; ln -s loop /l/loop",
        check=True,
    )
    paths = [f"/l/{link}{middle}{secret if middle else ''}/file" for link, middle in
             (("abs", ""), ("rel", ""), ("twice", ""), ("proc", "/"), ("self", "/"))]  # fmt: skip
    paths += [f"{up}{str(secret)[1:]}/file", f"/l/../{up}{str(secret)[1:]}/file"]
    for path in paths:
        for user in (None, "daemon"):
            with pytest.raises(dsec.FileError):
                await sandbox.files.read(path, user=user)
            for attempt in (
                sandbox.files.write(path, b"x", parents=False, user=user),
                sandbox.files.remove(path, user=user),
                sandbox.files.chmod(path, 0o777, user=user),
                sandbox.files.chown(path, "1:1", user=user),
                sandbox.files.move(path, "/stolen", user=user),
                sandbox.files.list(path.removesuffix("/file"), user=user),
                sandbox.files.mkdir(path + "dir", parents=False, user=user),
            ):
                with pytest.raises(dsec.FileError):
                    await attempt
    with pytest.raises(dsec.InvalidPath):
        await sandbox.files.read("/l/loop")
    assert sorted(path.name for path in secret.iterdir()) == ["file"]
    assert (secret / "file").read_text() == "HOSTSECRET"
    assert (secret / "file").stat().st_mode & 0o777 == 0o644


async def test_each_cause_has_its_own_error(box: BoxFactory) -> None:
    sandbox = await box()
    files = sandbox.files
    await files.write("/d/file", b"x", mode=0o600)
    await files.mkdir("/d/full/sub")
    await sandbox.run("mkfifo /d/fifo; ln -s nowhere /d/dangling; chmod 700 /d", check=True)
    with pytest.raises(dsec.FileNotFound) as missing:
        await files.read("/d/none")
    assert isinstance(missing.value, FileNotFoundError)
    assert missing.value.errno == 2
    assert missing.value.sandbox_survived is not False
    with pytest.raises(dsec.FileNotFound):
        await files.read("/d/dangling")
    with pytest.raises(dsec.FileIsDirectory) as directory:
        await files.read("/d")
    assert isinstance(directory.value, IsADirectoryError)
    with pytest.raises(dsec.FileIsDirectory):
        await files.write("/d/full", b"x")
    with pytest.raises(dsec.FileNotDirectory):
        await files.write("/d/file/below", b"x")
    with pytest.raises(dsec.FileNotDirectory):
        await files.list("/d/file")
    with pytest.raises(dsec.FileDenied) as denied:
        await files.read("/d/file", user="daemon")
    assert isinstance(denied.value, PermissionError)
    with pytest.raises(dsec.FileDenied):
        await files.write("/etc/passwd", b"x", user="daemon")
    with pytest.raises(dsec.FileDenied):
        await files.remove("/d/file", user="daemon")
    with pytest.raises(dsec.DirectoryNotEmpty):
        await files.remove("/d/full")
    with pytest.raises(dsec.FileExists):
        await files.mkdir("/d/full", parents=False)
    with pytest.raises(dsec.FileExists):
        await files.move("/d/file", "/d/fifo", overwrite=False)
    for path in ("/d/fifo", "/dev/null", "/dev/zero"):
        with pytest.raises(dsec.NotRegularFile):
            await files.read(path)
    with pytest.raises(dsec.FileError):
        await files.write("/proc/version", b"x")
    assert (await sandbox.run("echo alive")).text == "alive\n"


async def test_no_space_is_told_and_the_old_file_stays(box: BoxFactory) -> None:
    sandbox = await box(disk="64MiB")
    await sandbox.files.write("/keep", b"old")
    with pytest.raises(dsec.NoSpace) as caught:
        await sandbox.files.write("/keep", random.Random(1).randbytes(100 << 20))
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == 28
    assert await sandbox.files.read("/keep") == b"old"
    assert [entry.name for entry in await sandbox.files.list("/") if entry.name.startswith(".")] == []
    await sandbox.files.write("/new", b"x" * (1 << 20))


async def test_replacement_is_atomic_under_readers(box: BoxFactory) -> None:
    sandbox = await box()
    size = 300_000
    await sandbox.files.write("/a", b"\0" * size)
    code = (
        "import time\n"
        "bad=n=0\n"
        "e=time.time()+5\n"
        "while time.time()<e:\n"
        "  d=open('/a','rb').read()\n"
        "  n+=1\n"
        f"  bad+=len(d)!={size} or len(set(d))!=1\n"
        "print(n>20,bad)\n"
    )
    process = await sandbox.start(["python3", "-c", code])
    done = asyncio.ensure_future(process.wait())
    number = 0
    while not done.done():
        number += 1
        await sandbox.files.write("/a", bytes([number % 256]) * size)
        data = await sandbox.files.read("/a")
        assert len(data) == size
        assert len(set(data)) == 1
    assert await done == 0
    assert b"".join([chunk.data async for chunk in process.output()]) == b"True 0\n"
    assert [entry.name for entry in await sandbox.files.list("/") if entry.name.startswith(".")] == []


async def test_an_interrupted_write_leaves_the_old_file_and_no_other(box: BoxFactory, tmp_path: Path) -> None:
    sandbox = await box()
    await sandbox.files.write("/d/a", b"old")
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(512 << 20)
    before = (await sandbox.usage()).disk
    task = asyncio.ensure_future(sandbox.files.upload(big, "/d/a"))

    async def under_way() -> bool:
        return (await sandbox.usage()).disk > before + (20 << 20)

    await eventually(under_way, within_s=10, every_s=0.01, what="a part has arrived")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    async def cleaned() -> bool:
        names = [entry.name for entry in await sandbox.files.list("/d")]
        return names == ["a"] and (await sandbox.usage()).disk < before + (5 << 20)

    await eventually(cleaned, within_s=5, what="the part is gone")
    assert await sandbox.files.read("/d/a") == b"old"


async def test_the_other_verbs(box: BoxFactory) -> None:
    sandbox = await box()
    files = sandbox.files
    await files.mkdir("/d/e/f")
    await files.write("/d/e/f/g", b"one", mode=0o640)
    await files.write("/d/e/f/g", b"two", append=True)
    assert await files.read("/d/e/f/g") == b"onetwo"
    entry = await files.stat("/d/e/f/g")
    assert (entry.type, entry.size, entry.mode, entry.uid) == ("file", 6, 0o640, 0)
    await files.move("/d/e/f/g", "/d/h")
    await files.chown("/d/h", "daemon:bin")
    await files.chmod("/d/h", 0o4751)  # after the owner: changing that takes the setuid bit
    assert (await sandbox.run("stat -c '%a %U %G' /d/h")).text == "4751 daemon bin\n"
    await sandbox.run("ln -s h /d/link; ln -s /etc/passwd /d/abs", check=True)
    assert (await files.stat("/d/link")).target == "h"
    await files.write("/d/link", b"through")
    assert await files.read("/d/h") == b"through"
    deep = {entry.path for entry in await files.list("/d", depth=3)}
    assert deep == {"/d/abs", "/d/e", "/d/e/f", "/d/h", "/d/link"}
    await files.remove("/d/link")
    assert await files.exists("/d/h")
    await files.remove("/d", recursive=True)
    assert not await files.exists("/d")
    assert (await files.stat("/etc/passwd")).size > 0
    await files.write("/home-of-daemon/x", b"x", parents=True)
    await files.chown("/home-of-daemon", "daemon")
    await files.write("/home-of-daemon/y", b"y", user="daemon")
    assert (await files.stat("/home-of-daemon/y")).uid == 1


async def test_trees_go_up_and_down_unchanged(box: BoxFactory, tmp_path: Path) -> None:
    tree, back = tmp_path / "tree", tmp_path / "back"
    generator = random.Random(7)
    for number in range(300):
        path = tree / f"d{number % 7}" / f"e{number % 3}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(generator.randbytes(generator.choice([0, 1, 511, 512, 513, 20_000])))
        path.chmod(generator.choice([0o644, 0o600, 0o755]))
    (tree / "empty").mkdir()
    (tree / "link").symlink_to("d1/e1")
    (tree / ("long" * 50)).write_text("long name")
    Path(os.fsdecode(os.fsencode(tree) + b"/\xff\xfe")).write_text("bytes")
    sandbox = await box()
    report = await sandbox.files.upload(tree, "/t")
    assert not report.skipped
    report = await sandbox.files.download("/t", back)
    assert not report.skipped

    def picture(root: Path) -> dict[str, object]:
        found: dict[str, object] = {}
        for path in root.rglob("*"):
            name = str(path.relative_to(root))
            if path.is_symlink():
                found[name] = path.readlink()
            elif path.is_dir():
                found[name] = "directory"
            else:
                found[name] = (path.stat().st_mode & 0o777, path.read_bytes())
        return found

    assert picture(back) == picture(tree)
