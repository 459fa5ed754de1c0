"""Hostile tar streams never write outside their target, and an archive that fails leaves nothing."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from dsec.api.errors import InvalidPath
from dsec.sdk import _archives


def tar_of(*entries: tuple[str, bytes, str]) -> io.BytesIO:
    """An archive of (name, type, content or link name)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind, content in entries:
            member = tarfile.TarInfo(name)
            member.type = kind
            member.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
            if kind == tarfile.REGTYPE:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content.encode()))
            else:
                member.linkname = content
                tar.addfile(member)
    buffer.seek(0)
    return buffer


FILE, LINK, HARD, FOLDER = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


def names_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_names_that_lead_out_are_left_out(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    source = tar_of(
        ("x", LINK, str(victim)),
        ("x/pwn", FILE, "1"),
        ("../up", FILE, "1"),
        (f"{victim}/abs", FILE, "1"),
        ("a/../../b", FILE, "1"),
        ("ok", FILE, "fine"),
    )
    report = _archives.unpack(source, tmp_path / "out" / "t")
    # `x` is left out, so that `x/pwn` makes a folder of its own.
    assert (tmp_path / "out" / "t" / "ok").read_text() == "fine"
    assert (tmp_path / "out" / "t" / "x" / "pwn").is_file()
    assert report.skipped == ["x", "../up", f"{victim}/abs", "a/../../b"]
    assert list(victim.iterdir()) == []
    assert names_below(tmp_path / "out") == {"t", "t/ok", "t/x", "t/x/pwn"}


def test_links_in_steps_do_not_lead_out(tmp_path: Path) -> None:
    source = tar_of(
        ("sub", LINK, "."),
        ("climb", LINK, "sub/../.."),
        ("deep/up", LINK, ".."),
        ("deep/two", LINK, "../.."),
        ("deep/up/file", FILE, "through a link"),
        ("hard", HARD, "../../etc/passwd"),
        ("hard2", HARD, "deep/up"),
    )
    report = _archives.unpack(source, tmp_path / "t")
    assert report.skipped == ["climb", "deep/two", "deep/up/file", "hard", "hard2"]
    assert names_below(tmp_path / "t") == {"sub", "deep", "deep/up"}


def test_a_link_in_the_target_is_not_a_way_out(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    target = tmp_path / "t"
    target.mkdir()
    (target / "d").symlink_to(victim)
    with pytest.raises(NotADirectoryError):
        _archives.unpack(tar_of(("d", FOLDER, ""), ("d/pwn", FILE, "1")), target)
    assert list(victim.iterdir()) == []


def test_special_files_and_setuid_are_not_made(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind in (("fifo", tarfile.FIFOTYPE), ("dev", tarfile.CHRTYPE)):
            member = tarfile.TarInfo(name)
            member.type = kind
            tar.addfile(member)
        member = tarfile.TarInfo("suid")
        member.mode = 0o6755
        tar.addfile(member, io.BytesIO())
    buffer.seek(0)
    report = _archives.unpack(buffer, tmp_path / "t")
    assert report.skipped == ["fifo", "dev"]
    assert (tmp_path / "t" / "suid").stat().st_mode & 0o7777 == 0o755


def test_a_later_entry_replaces_an_earlier_one(tmp_path: Path) -> None:
    source = tar_of(("a", FILE, "old"), ("b", HARD, "a"), ("a", FILE, "new"))
    _archives.unpack(source, tmp_path / "t")
    assert ((tmp_path / "t" / "a").read_text(), (tmp_path / "t" / "b").read_text()) == ("new", "old")


def test_read_only_folders_keep_their_entries(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        folder = tarfile.TarInfo("ro")
        folder.type, folder.mode = FOLDER, 0o555
        tar.addfile(folder)
        tar.addfile(tarfile.TarInfo("ro/file"), io.BytesIO())
    buffer.seek(0)
    _archives.unpack(buffer, tmp_path / "t")
    assert names_below(tmp_path / "t") == {"ro", "ro/file"}
    assert (tmp_path / "t" / "ro").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("cut", [700, 1500])
def test_a_damaged_archive_leaves_nothing(tmp_path: Path, cut: int) -> None:
    whole = tar_of(("a", FILE, "x" * 600), ("b", FILE, "y" * 600)).read()
    with pytest.raises(InvalidPath):
        _archives.unpack(io.BytesIO(whole[:cut]), tmp_path / "out" / "t")
    assert list((tmp_path / "out").iterdir()) == []


def test_packing_and_unpacking_agree(tmp_path: Path) -> None:
    source = tmp_path / "s"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / ("n" * 255)).write_text("long")
    (source / "odd\udcff").write_text("x")
    (source / "exe").write_text("x")
    (source / "exe").chmod(0o750)
    (source / "dangling").symlink_to("nowhere")
    os.mkfifo(source / "pipe")
    buffer = io.BytesIO()
    assert _archives.pack(source, buffer) == ["pipe"]
    buffer.seek(0)
    report = _archives.unpack(buffer, tmp_path / "t")
    assert report.skipped == []
    assert names_below(tmp_path / "t") == names_below(source) - {"pipe"}
    assert (tmp_path / "t" / "exe").stat().st_mode & 0o777 == 0o750
