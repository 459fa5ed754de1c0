"""Layers: directories packed into EROFS files that never change, named by the SHA-256 of the file.

Owns `layers/` and `staging/` of an image store. Does not mount anything: that is the launcher's work. The one rule: a file
under `layers/` is complete from the moment it has its name, so readers need no lock.
"""

import contextlib
import errno
import fcntl
import hashlib
import math
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from dsec.api.errors import Conflict, ImageError, NoSpace

# The file system's UUID and build time say nothing about a layer; fixed ones make equal trees equal files.
_FIXED_UUID: Final = "00000000-0000-4000-8000-000000000000"
_DIGEST_PREFIX: Final = "sha256:"
_HASH_CHUNK_BYTES: Final = 1 << 20
# Below this much room a failed tool is told as a full disk: tools do not agree on how they report ENOSPC.
_FULL_DISK_BYTES: Final = 8 << 20


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer as its metadata file records it: `size` is bytes on disk, `created_at` seconds since the epoch."""

    digest: str
    size: int
    created_at: float
    source: str
    packages: dict[str, str] = {}


class LayerStore:
    """The layers below `images_dir`. Reading needs no lock; whoever adds or removes holds `writing()`."""

    def __init__(self, images_dir: Path) -> None:
        self._images_dir = images_dir
        self._layers_dir = images_dir / "layers"

    def path(self, digest: str) -> Path:
        """Return the EROFS file of a layer; raises `ImageError` if it is not in the store."""
        path = self._file(digest, ".erofs")
        if not path.is_file():
            raise ImageError(f"layer {digest} is not in the image store {self._images_dir}; make the image again")
        return path

    def info(self, digest: str) -> Layer:
        """Return the metadata of a layer; raises `ImageError` if it is missing or unreadable."""
        try:
            return msgspec.json.decode(self._file(digest, ".json").read_bytes(), type=Layer)
        except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ImageError(f"layer {digest} has no readable metadata: {error}") from error

    def digests(self) -> set[str]:
        """Return the digests of all layers in the store."""
        return {_DIGEST_PREFIX + path.stem for path in self._layers_dir.glob("*.erofs")}

    @contextlib.contextmanager
    def writing(self) -> Iterator[Path]:
        """Hold the store's writer lock and yield an empty staging directory, removed at the end.

        What an interrupted writer left in the staging area is removed first. Raises `Conflict` while another writer is at work.
        """
        self._layers_dir.mkdir(parents=True, exist_ok=True)
        staging_root = self._images_dir / "staging"
        with (self._images_dir / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise Conflict(f"another image is being made in {self._images_dir}; wait for it to end") from error
            if staging_root.exists():
                shutil.rmtree(staging_root)
            staging_root.mkdir(mode=0o700)
            try:
                yield staging_root
            finally:
                shutil.rmtree(staging_root, ignore_errors=True)

    def add(self, tree: Path, staging: Path, *, source: str, packages: dict[str, str], compress: bool = False) -> Layer:
        """Pack the directory `tree` and add it; the same content added again is the same layer.

        Raises `NoSpace` when the disk is full and `ImageError` when mkfs.erofs is missing or fails; the store is then unchanged.
        """
        packed = staging / "layer.erofs"
        _run_mkfs(tree, packed, compress=compress)
        with _disk_errors(self._images_dir):
            digest = _DIGEST_PREFIX + _hash_and_sync(packed)
            layer = Layer(
                digest=digest, size=packed.stat().st_size, created_at=time.time(), source=source, packages=packages
            )
            packed.chmod(0o444)
            # Metadata first: a layer with its name always has it.
            write_atomically(self._file(digest, ".json"), msgspec.json.format(msgspec.json.encode(layer)))
            packed.replace(self._file(digest, ".erofs"))
            sync_directory(self._layers_dir)
        return layer

    def remove(self, digest: str) -> None:
        """Remove a layer's files; sandboxes that have it mounted keep it until they end."""
        self._file(digest, ".erofs").unlink(missing_ok=True)
        self._file(digest, ".json").unlink(missing_ok=True)

    def _file(self, digest: str, suffix: str) -> Path:
        hexadecimal = digest.removeprefix(_DIGEST_PREFIX)
        if len(hexadecimal) != 64 or not set(hexadecimal) <= set("0123456789abcdef"):
            raise ImageError(f"{digest!r} is not a layer digest")
        return self._layers_dir / (hexadecimal + suffix)


def write_atomically(target: Path, data: bytes) -> None:
    """Replace `target` by a file with this content, durable when it returns; readers see the old or the new one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".new-", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_directory(target.parent)


def sync_directory(directory: Path) -> None:
    """Make renames in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def raise_if_full(directory: Path, what: str) -> None:
    """Raise `NoSpace` if the disk of `directory` is full, which then explains why `what` failed."""
    room = os.statvfs(directory)
    if room.f_bavail * room.f_frsize < _FULL_DISK_BYTES or (room.f_files and room.f_favail < 16):
        raise NoSpace(f"the disk of {directory} is full: {what}", path=str(directory))


def _run_mkfs(tree: Path, target: Path, *, compress: bool) -> None:
    # -T would give all files one time, and Python would find all its compiled modules stale, for they record those of their sources. The
    # reproducible builds' variable sets the build time and only bounds those of files: with the newest one every file keeps its own.
    try:
        newest_s = math.ceil(max(path.lstat().st_mtime for path in (tree, *tree.rglob("*"))))
    except FileNotFoundError as error:
        raise ImageError(f"{tree} cannot be packed: {error}") from error
    command = ["mkfs.erofs", "--quiet", f"-U{_FIXED_UUID}"]
    if compress:
        command += ["-zlz4hc"]
    try:
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(newest_s)}
        done = subprocess.run(
            [*command, str(target), str(tree)], capture_output=True, text=True, check=False, env=environment
        )
    except FileNotFoundError as error:
        raise ImageError("mkfs.erofs is missing: install erofs-utils") from error
    if done.returncode != 0:
        raise_if_full(target.parent, "the layer could not be packed")
        raise ImageError(f"mkfs.erofs failed: {(done.stderr or done.stdout).strip()[-500:]}")


def _hash_and_sync(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
        os.fsync(file.fileno())
    return digest.hexdigest()


@contextlib.contextmanager
def _disk_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(f"the disk of {directory} is full: {error}", path=str(directory)) from error
        raise ImageError(f"cannot write to the image store {directory}: {error}") from error
