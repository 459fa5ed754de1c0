"""Trees as tar streams: made from and unpacked into local folders. Blocking code, run in threads of its own.

What is unpacked comes from a sandbox and is hostile. The rule: no step follows a link that the archive, or anybody, put there, so no
write can land outside the target; links that would lead readers out are left out and named.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from dsec.api.errors import InvalidPath, NotRegularFile

_COPY_BYTES = 256 * 1024
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class Unpacked:
    """Entries stored, and names of those left out."""

    entries: int = 0
    skipped: list[str] = field(default_factory=list)


def pack(source: Path, sink: IO[bytes]) -> list[str]:
    """Write the contents of the folder `source` as a tar stream to `sink`; return names left out (sockets, fifos, devices).

    Names are relative to `source`; links stay links. Raises OSError for what cannot be read or shrinks meanwhile.
    """
    skipped: list[str] = []

    def keep(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if member.isreg() or member.isdir() or member.issym():
            return member
        skipped.append(member.name)
        return None

    with tarfile.open(
        fileobj=sink,
        mode="w|",
        format=tarfile.GNU_FORMAT,
        encoding="utf-8",
        errors="surrogateescape",
        bufsize=_COPY_BYTES,
    ) as tar:
        for name in sorted(entry.name for entry in source.iterdir()):
            _add(tar, source / name, name, keep)
    return skipped


def _add(tar: tarfile.TarFile, path: Path, name: str, keep: object) -> None:
    """Add a tree. Each hard link is stored as a file of its own: the receiver then needs no earlier entry."""
    stack = [(path, name)]
    while stack:
        here, inside = stack.pop()
        tar.inodes.clear()  # type: ignore[attr-defined]
        tar.add(here, arcname=inside, recursive=False, filter=keep)  # type: ignore[arg-type]
        if not here.is_symlink() and here.is_dir():
            stack += [
                (here / child, f"{inside}/{child}")
                for child in sorted((entry.name for entry in here.iterdir()), reverse=True)
            ]


def unpack(source: IO[bytes], target: Path) -> Unpacked:
    """Unpack the tar stream `source` as the folder `target`, all of it or, after an error, nothing.

    Unpacks beside `target` and moves into place; an existing folder is merged into, file by file. Special files, names that are absolute
    or contain `..`, and links that lead out of the target are left out and named. Owners are not kept, setuid bits neither.
    """
    parent = target.parent
    parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name[:100]}.", dir=parent))
    try:
        report = _unpack_into(source, staging)
        _put_in_place(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return report


def _unpack_into(source: IO[bytes], folder: Path) -> Unpacked:
    root = os.open(folder, _DIRECTORY)
    try:
        unpacker = _Unpacker(root)
        with tarfile.open(
            fileobj=source, mode="r|", encoding="utf-8", errors="surrogateescape", bufsize=_COPY_BYTES
        ) as tar:
            for member in tar:
                unpacker.store(tar, member)
        unpacker.finish()
        # The padding after the end marker must be read, or the sender is left with a broken pipe.
        while source.read(_COPY_BYTES):
            pass
    except tarfile.TarError as error:
        raise InvalidPath(f"the archive cannot be read: {error}") from error
    finally:
        os.close(root)
    return unpacker.report


def _put_in_place(staging: Path, target: Path) -> None:
    umask_mode = stat.S_IMODE(staging.stat().st_mode)
    if umask_mode == 0o700:  # mkdtemp's: nothing in the archive said otherwise
        staging.chmod(0o755)
    if not os.path.lexists(target):
        staging.rename(target)
        return
    _merge(staging, target)


def _merge(source: Path, target: Path) -> None:
    """Move what is in `source` into the folder `target`. A link in place of a folder is an error, not a way through."""
    if target.is_symlink() or not target.is_dir():
        raise NotADirectoryError(f"{target} is not a folder")
    for entry in list(source.iterdir()):
        place = target / entry.name
        if not entry.is_symlink() and entry.is_dir() and os.path.lexists(place):
            _merge(entry, place)
        else:
            entry.replace(place)


class _Unpacker:
    """Stores members beneath a directory descriptor, walking by descriptors and never through a link."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._modes: list[tuple[list[str], int, float]] = []
        self.report = Unpacked()

    def store(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Store one member, or name it as left out."""
        parts = _parts(member.name)
        if parts is None or not self._store(tar, member, parts):
            self.report.skipped.append(member.name)
        else:
            self.report.entries += 1

    def _store(self, tar: tarfile.TarFile, member: tarfile.TarInfo, parts: list[str]) -> bool:
        if member.isdir():
            os.close(self._walk(parts, create=True))
            self._modes.append((parts, member.mode & 0o777, member.mtime))
            return True
        if not parts:
            return False
        try:
            folder = self._walk(parts[:-1], create=True)
        except OSError:
            return False  # a link or a file stands where a folder is needed
        try:
            return self._store_leaf(tar, member, folder, parts)
        finally:
            os.close(folder)

    def _store_leaf(self, tar: tarfile.TarFile, member: tarfile.TarInfo, folder: int, parts: list[str]) -> bool:
        name = parts[-1]
        if member.isreg():
            _remove(folder, name)
            self._copy(tar, member, os.open(name, _NEW_FILE, 0o600, dir_fd=folder))
            return True
        if member.issym() and _stays_inside(member.linkname, depth=len(parts) - 1):
            _remove(folder, name)
            os.symlink(member.linkname, name, dir_fd=folder)
            return True
        if member.islnk():
            return self._hard_link(member, folder, name)
        return False

    def _copy(self, tar: tarfile.TarFile, member: tarfile.TarInfo, descriptor: int) -> None:
        source = tar.extractfile(member)
        with open(descriptor, "wb", buffering=0) as sink:
            if source is not None:
                shutil.copyfileobj(source, sink, _COPY_BYTES)
            os.fchmod(descriptor, member.mode & 0o777)
            os.utime(descriptor, (member.mtime, member.mtime))

    def _hard_link(self, member: tarfile.TarInfo, folder: int, name: str) -> bool:
        source = _parts(member.linkname)
        if not source:
            return False
        try:
            origin = self._walk(source[:-1], create=False)
        except OSError:
            return False
        try:
            if not stat.S_ISREG(os.stat(source[-1], dir_fd=origin, follow_symlinks=False).st_mode):
                return False
            _remove(folder, name)
            os.link(source[-1], name, src_dir_fd=origin, dst_dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        finally:
            os.close(origin)
        return True

    def _walk(self, parts: list[str], *, create: bool) -> int:
        """A descriptor of the folder `parts` beneath the root, made where missing. Raises OSError at a link."""
        here = os.dup(self._root)
        try:
            for part in parts:
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=here)
                below = os.open(part, _DIRECTORY, dir_fd=here)
                os.close(here)
                here = below
        except BaseException:
            os.close(here)
            raise
        return here

    def finish(self) -> None:
        """Give folders their modes and times, deepest first: earlier, a read-only one would refuse its entries."""
        for parts, mode, mtime in sorted(self._modes, key=lambda item: -len(item[0])):
            folder = self._walk(parts, create=False)
            try:
                # The owner's own bits stay: a folder that its owner cannot enter could be neither merged nor removed.
                os.fchmod(folder, mode | 0o700)
                os.utime(folder, (mtime, mtime))
            finally:
                os.close(folder)


def _parts(name: str) -> list[str] | None:
    """The components of a relative name without `..`; None for any other."""
    if name.startswith("/") or "\0" in name:
        return None
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return None if ".." in parts else parts


def _stays_inside(link: str, *, depth: int) -> bool:
    """Whether a link in a folder `depth` below the root leads nowhere else.

    `..` is taken only at the front, where it climbs through real folders: after a name it could climb out of another link's target.
    """
    if link.startswith("/") or not link:
        return False
    parts = [part for part in link.split("/") if part not in ("", ".")]
    climbs = 0
    while climbs < len(parts) and parts[climbs] == "..":
        climbs += 1
    return climbs <= depth and ".." not in parts[climbs:]


def _remove(folder: int, name: str) -> None:
    """Make room for a later entry of the same name. A folder stays, and the entry then fails to be created."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return


def check_regular(path: Path) -> None:
    """Raise NotRegularFile unless `path` is a regular file: reading a fifo could wait for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise NotRegularFile(f"{path} is neither a file nor a folder", path=str(path))
