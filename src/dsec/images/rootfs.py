"""Cleans a freshly installed Debian root, so that it holds nothing of the host and equal packages give equal trees."""

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# Made at run time, by the host of the moment, or of no use in a sandbox.
_LEFTOVERS: Final = (
    "etc/apt/apt.conf.d/99mmdebstrap",
    "etc/apt/sources.list",
    "etc/apt/sources.list.d/*",
    "etc/.pwd.lock",
    "etc/*-",
    "var/cache/apt/*",
    "var/cache/debconf/*-old",
    "var/cache/ldconfig/aux-cache",
    "var/lib/apt/lists/*",
    "var/lib/dpkg/*-old",
    "var/lib/systemd/catalog/database",
    "var/log/*",
    "dev/*",
    "run/[!l]*",
    "tmp/*",
)
_FILES: Final = {
    "etc/hostname": "sandbox\n",
    "etc/hosts": "127.0.0.1 localhost\n127.0.1.1 sandbox\n::1 localhost ip6-localhost ip6-loopback\n",
    "etc/machine-id": "",
    "etc/resolv.conf": "",
}

# 1 January 2024, in days: when passwords were last changed, instead of the day of the build.
_LAST_CHANGE_DAY: Final = "19723"


def installed_packages(root: Path) -> dict[str, str]:
    """Return name and version of each package that dpkg has installed in `root`."""
    packages: dict[str, str] = {}
    for record in (root / "var/lib/dpkg/status").read_text(errors="replace").split("\n\n"):
        fields = {
            key: value.strip()
            for key, separator, value in (line.partition(":") for line in record.splitlines())
            if separator and not key.startswith(" ")
        }
        if fields.get("Status", "").endswith(" installed"):
            packages[fields["Package"]] = fields["Version"]
    return packages


def clean(root: Path, *, built_since_s: float) -> None:
    """Remove leftovers, write the few files a sandbox needs, and give what was made since `built_since_s` one settled time."""
    for pattern in _LEFTOVERS:
        for path in root.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    for name, text in _FILES.items():
        path = root / name
        # The package of the root may have made it a link that leads out of the root.
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        path.write_text(text)
        path.chmod(0o644)
    _settle_password_dates(root / "etc/shadow")
    _settle_times(root, built_since_s)


def _settle_password_dates(shadow: Path) -> None:
    """Give every account the same day of its last change."""
    if not shadow.is_file():
        return
    lines = [line.split(":") for line in shadow.read_text().splitlines()]
    for fields in lines:
        if len(fields) > 2 and fields[2]:
            fields[2] = _LAST_CHANGE_DAY
    # In place: owner and mode stay.
    shadow.write_text("".join(":".join(fields) + "\n" for fields in lines))


def _settle_times(root: Path, built_since_s: float) -> None:
    """Set times since the build began to the newest time that a package brought.

    Times that packages brought stay: Python's compiled modules record those of their sources.
    """
    recent: list[Path] = []
    newest_ns = 0
    limit_ns = int(built_since_s) * 1_000_000_000
    for path, status in _walk(root):
        if status.st_mtime_ns >= limit_ns:
            recent.append(path)
        else:
            newest_ns = max(newest_ns, status.st_mtime_ns)
    for path in recent:
        os.utime(path, ns=(newest_ns, newest_ns), follow_symlinks=False)


def _walk(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    pending = [root]
    while pending:
        path = pending.pop()
        status = path.lstat()
        yield path, status
        if stat.S_ISDIR(status.st_mode):
            pending.extend(path.iterdir())
