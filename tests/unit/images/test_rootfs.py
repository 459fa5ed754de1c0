"""Cleaning a fresh root."""

import os
import time
from pathlib import Path

import pytest

from dsec.images.rootfs import clean, installed_packages

_PACKAGED_S = 1_700_000_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for folder in ("etc/apt/sources.list.d", "var/log/apt", "var/lib/apt/lists", "run/lock", "tmp", "dev", "usr/lib"):
        (root / folder).mkdir(parents=True)
    for name in (
        "etc/apt/sources.list",
        "etc/apt/sources.list.d/x.sources",
        "var/log/apt/term.log",
        "etc/passwd-",
        "tmp/x",
    ):
        (root / name).write_text("http://archive.invalid/")
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/bash\n")
    (root / "etc/shadow").write_text("root:*:20700:0:99999:7:::\nuser:!::0:99999:7:::\n")
    (root / "etc/shadow").chmod(0o640)
    module = root / "usr/lib/module.py"
    module.write_text("pass")
    os.utime(module, (_PACKAGED_S, _PACKAGED_S))
    return root


def test_nothing_of_the_host_stays(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    (root / "etc/resolv.conf").symlink_to(outside)
    clean(root, built_since_s=time.time() - 60)
    texts = [path.read_text() for path in root.rglob("*") if path.is_file()]
    assert not any("archive.invalid" in text for text in texts)
    assert (root / "etc/resolv.conf").read_text() == ""
    assert not (root / "etc/resolv.conf").is_symlink()
    assert outside.read_text() == "untouched"
    assert "127.0.0.1 localhost" in (root / "etc/hosts").read_text()
    assert (root / "run/lock").is_dir()
    assert (root / "etc/passwd").exists()


def test_packaged_times_stay_and_new_ones_settle(root: Path) -> None:
    clean(root, built_since_s=time.time() - 60)
    times = {path.lstat().st_mtime for path in root.rglob("*")}
    assert times == {_PACKAGED_S}


def test_installed_packages_are_read_from_dpkg(tmp_path: Path) -> None:
    status = tmp_path / "var/lib/dpkg/status"
    status.parent.mkdir(parents=True)
    status.write_text(
        "Package: bash\nStatus: install ok installed\nVersion: 5.2-1\nDescription: shell\n Version: not this\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n\n"
    )
    assert installed_packages(tmp_path) == {"bash": "5.2-1"}


def test_passwords_have_no_date_of_the_build(root: Path) -> None:
    clean(root, built_since_s=time.time() - 60)
    shadow = root / "etc/shadow"
    assert shadow.read_text() == "root:*:19723:0:99999:7:::\nuser:!::0:99999:7:::\n"
    assert shadow.stat().st_mode & 0o777 == 0o640
