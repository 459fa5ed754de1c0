"""What files.* promises: names, errors, trees, and that hostile trees stay where they belong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.contract.sdk.reference_server import ReferenceServer

import dsec

ODD_NAMES = [
    "-rf",
    "*",
    "a b",
    "q'\"q",
    "$(touch INJ)",
    "é文😀",
    "tab\there",
    "back\\slash",
    "50%2e%2e",
    ".hidden",
    "a\nb",
    "bad\udcffbyte",
    "#?&=+;",
]


async def test_odd_names_round_trip(box: Any) -> None:
    for index, name in enumerate(ODD_NAMES):
        assert await box.files.write(f"/o/{name}", str(index)) == len(str(index))
    listed = await box.files.list("/o")
    assert sorted(entry.name for entry in listed) == sorted(ODD_NAMES)
    assert {entry.path for entry in listed} == {f"/o/{name}" for name in ODD_NAMES}
    for index, name in enumerate(ODD_NAMES):
        assert await box.files.read(f"/o/{name}") == str(index).encode()
        await box.files.remove(f"/o/{name}")
    assert await box.files.list("/o") == []


@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 3_000_000])
async def test_sizes(box: Any, size: int) -> None:
    data = os.urandom(size)
    await box.files.write("/f", data)
    assert await box.files.read("/f") == data
    assert await box.files.read("/f", offset=size // 2, limit=10) == data[size // 2 :][:10]


async def test_errors_are_the_builtin_ones_too(box: Any) -> None:
    await box.files.mkdir("/d/e")
    with pytest.raises(FileNotFoundError) as caught:
        await box.files.read("/none")
    assert isinstance(caught.value, dsec.FileNotFound)
    assert caught.value.errno == 2
    with pytest.raises(IsADirectoryError):
        await box.files.read("/d")
    with pytest.raises(FileExistsError):
        await box.files.mkdir("/d", parents=False)
    with pytest.raises(dsec.DirectoryNotEmpty):
        await box.files.remove("/d")
    await box.run("mkfifo p", cwd="/d")
    with pytest.raises(dsec.NotRegularFile):
        await box.files.read("/d/p")
    await box.files.remove("/d", recursive=True)
    assert not await box.files.exists("/d")


async def test_modes_moves_and_stat(box: Any) -> None:
    await box.files.write("/s.sh", "#!/bin/sh\n", mode=0o755)
    assert (await box.files.stat("/s.sh")).mode == 0o755
    await box.files.chmod("/s.sh", 0o600)
    await box.files.move("/s.sh", "/t.sh")
    entry = await box.files.stat("/t.sh")
    assert (entry.type, entry.mode, entry.size, entry.is_file) == ("file", 0o600, 10, True)
    await box.files.write("/t.sh", b"more", append=True)
    assert (await box.files.stat("/t.sh")).size == 14


def make_tree(folder: Path) -> None:
    (folder / "sub" / "deep").mkdir(parents=True)
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "sub" / "data").write_bytes(os.urandom(300_000))
    (folder / "sub" / "deep" / "odd\udcff name").write_text("x")
    (folder / "link").symlink_to("sub/data")
    os.mkfifo(folder / "pipe")
    os.link(folder / "run.sh", folder / "same.sh")


async def test_a_tree_goes_up_and_down(box: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    make_tree(source)
    sent = await box.files.upload(source, "/tree")
    assert sent.skipped == ("pipe",)
    got = await box.files.download("/tree", target)
    assert got.skipped == ()
    assert (target / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (target / "same.sh").read_text() == "#!/bin/sh\n"
    assert (target / "sub" / "data").read_bytes() == (source / "sub" / "data").read_bytes()
    assert (target / "sub" / "deep" / "odd\udcff name").read_text() == "x"
    assert (target / "link").readlink() == Path("sub/data")
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")) == []


async def test_single_files_go_up_and_down(box: Any, tmp_path: Path) -> None:
    data = os.urandom(2_000_000)
    (tmp_path / "one").write_bytes(data)
    (tmp_path / "one").chmod(0o640)
    await box.files.upload(tmp_path / "one", "/up/one")
    assert (await box.files.stat("/up/one")).mode == 0o640
    await box.files.download("/up/one", tmp_path / "new" / "two")
    assert (tmp_path / "new" / "two").read_bytes() == data
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == ["two"]
    with pytest.raises(FileNotFoundError):
        await box.files.download("/up/none", tmp_path / "three")
    with pytest.raises(FileNotFoundError):
        await box.files.upload(tmp_path / "none", "/up/none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(dsec.NotRegularFile):
        await box.files.upload(tmp_path / "pipe", "/up/pipe")


async def test_an_interrupted_download_leaves_nothing(box: Any, server: ReferenceServer, tmp_path: Path) -> None:
    await box.files.write("/t/a", os.urandom(2_000_000))
    await box.files.write("/t/b", os.urandom(2_000_000))
    server.faults["ARCHIVE"] = 1
    with pytest.raises(dsec.ConnectionFailed):
        await box.files.download("/t", tmp_path / "out" / "t")
    assert list((tmp_path / "out").iterdir()) == []


async def test_a_download_merges_into_a_folder(box: Any, tmp_path: Path) -> None:
    (tmp_path / "t" / "sub").mkdir(parents=True)
    (tmp_path / "t" / "mine").write_text("mine")
    (tmp_path / "t" / "sub" / "old").write_text("old")
    await box.files.write("/t/sub/new", "new")
    await box.files.download("/t", tmp_path / "t")
    assert {str(path.relative_to(tmp_path / "t")) for path in (tmp_path / "t").rglob("*")} == {
        "mine",
        "sub",
        "sub/old",
        "sub/new",
    }


async def test_links_out_of_a_downloaded_tree_are_left_out(box: Any, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    await box.run(f"mkdir -p b/in; ln -s {victim} b/x; ln -s ../../up b/y; ln -s ../ok b/in/z; echo 1 > b/ok")
    got = await box.files.download("/b", tmp_path / "out")
    assert sorted(got.skipped) == ["x", "y"]
    assert (tmp_path / "out" / "ok").read_text() == "1\n"
    assert (tmp_path / "out" / "in" / "z").read_text() == "1\n"
    assert list(victim.iterdir()) == []
