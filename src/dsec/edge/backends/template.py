"""Disk templates: one empty ext4 file system for each size, sparse (about 150 KiB on disk), which every sandbox gets a copy of."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

from dsec.api.errors import InternalError, InvalidRequest
from dsec.edge.process import run

_MIN_BYTES: Final = 4 << 20
"""Smaller than this, ext4 has more metadata than room."""
_FEATURES: Final = (
    "none,filetype,extent,large_file,huge_file,flex_bg,dir_index,extra_isize,sparse_super,dir_nlink,ext_attr,uninit_bg"
)
"""No journal: the disk dies with its sandbox. No checksums: they cost time and protect nothing here."""
_MKFS_S: Final = 60.0


async def disk_template(folder: Path, disk_bytes: int) -> Path:
    """The template of `disk_bytes` in `folder`, made if missing (4 ms). Raises InvalidRequest below 4 MiB, InternalError if mkfs fails."""
    if disk_bytes < _MIN_BYTES:
        raise InvalidRequest(f"disk must be at least {_MIN_BYTES >> 20} MiB, not {disk_bytes} bytes")
    path = folder / f"ext4-{disk_bytes}.img"
    fresh = await asyncio.to_thread(_sparse, path, disk_bytes)
    if fresh is not None:
        try:
            await _mkfs(fresh)
            await asyncio.to_thread(fresh.rename, path)
        finally:
            await asyncio.to_thread(fresh.unlink, missing_ok=True)
    return path


def _sparse(path: Path, size: int) -> Path | None:
    """A new sparse file beside `path` under a name of this process, or None if `path` is there."""
    if path.exists():
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)
    return fresh


async def _mkfs(path: Path) -> None:
    # -G packs the groups' metadata together, so that the copy has few extents. A sparse file is zero already: telling mkfs so marks
    # the inode tables as written, or else the kernel would zero them in the background of every mount. Before e2fsprogs 1.47 the
    # option is unknown and the launcher's mount has to say noinit_itable.
    argv = ["mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-G", "4096", "-O", _FEATURES, "-E"]
    result = await run([*argv, "nodiscard,lazy_itable_init=0,assume_storage_prezeroed=1", str(path)], timeout_s=_MKFS_S)
    if result.status != 0:
        result = await run([*argv, "nodiscard,lazy_itable_init=1", str(path)], timeout_s=_MKFS_S)
    if result.status != 0:
        raise InternalError(f"mke2fs failed with {result.status}: {result.output.strip()}")
