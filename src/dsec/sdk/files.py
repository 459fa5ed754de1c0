"""A sandbox's files. Paths are resolved inside the sandbox; relative ones begin at its root.

Names are text in which bytes that are not UTF-8 are surrogates (`surrogateescape`), as in `os`. Every call takes `user` (name, uid,
`name:group` or `uid:gid`): files are touched with that user's rights and belong to it; None is the sandbox's own user.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from dsec.api.errors import ConnectionFailed, FileIsDirectory, OutcomeUnknown
from dsec.sdk import _archives, _calls
from dsec.sdk._later import later
from dsec.sdk._transport import CHUNK_BYTES, Transport, lost_errors
from dsec.sdk.results import FileEntry, file_entry

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
LocalPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Transfer:
    """What an upload or download moved: `entries` stored, and the names of those left out (special files, links leading out)."""

    entries: int
    skipped: tuple[str, ...] = ()


class AsyncFiles:
    """`sandbox.files`. All methods raise the `FileError` family, SandboxGone, ConnectionFailed; sizes are bytes."""

    __slots__ = ("_sandbox_id", "_transport")

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id

    async def read(self, path: str, *, offset: int = 0, limit: int | None = None, user: str | None = None) -> bytes:
        """Return the file's bytes from `offset` on, at most `limit` (None: to the end); past the end there are none.

        Raises FileNotFound, FileDenied, FileIsDirectory, NotRegularFile (a fifo, socket or device).
        """
        return await self._transport.call_raw(
            _calls.read_file(self._sandbox_id, path, offset=offset, limit=limit, user=user)
        )

    async def write(
        self,
        path: str,
        data: bytes | bytearray | memoryview | str,
        *,
        mode: int | None = None,
        append: bool = False,
        parents: bool = True,
        user: str | None = None,
    ) -> int:
        """Write the file (text as UTF-8) and return the number of bytes.

        Replacing is atomic: readers see the old or the new file, and a cancelled or failed call leaves the old one. `mode` None: 0644 for
        a new file, else unchanged. `append` adds at the end instead, not atomically. `parents` makes missing folders.

        Raises FileNotFound, FileDenied, FileIsDirectory, FileNotDirectory, NoSpace, InvalidPath; with `append` OutcomeUnknown.
        """
        raw = data.encode() if isinstance(data, str) else bytes(data)
        call = _calls.write_file(self._sandbox_id, path, raw, mode=mode, append=append, parents=parents, user=user)
        return (await self._transport.call(call)).size

    async def stat(self, path: str, *, user: str | None = None) -> FileEntry:
        """Describe what is at `path`, a symlink itself rather than its target. Raises FileNotFound, FileDenied."""
        return file_entry(await self._transport.call(_calls.stat(self._sandbox_id, path, user=user)))

    async def exists(self, path: str, *, user: str | None = None) -> bool:
        """Whether anything, a dangling symlink included, is at `path`."""
        try:
            await self.stat(path, user=user)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    async def list(self, path: str, *, depth: int = 1, user: str | None = None) -> builtins.list[FileEntry]:
        """List a directory's entries, sorted by name; `depth` > 1 adds those of directories below (symlinks are not followed).

        Raises FileNotFound, FileNotDirectory, FileDenied.
        """
        answer = await self._transport.call(_calls.list_files(self._sandbox_id, path, depth=depth, user=user))
        return [file_entry(entry) for entry in answer.entries]

    async def mkdir(self, path: str, *, parents: bool = True, mode: int = 0o755, user: str | None = None) -> None:
        """Make a directory. With `parents` missing ones above too, and one that is there is no error; else FileExists."""
        await self._change("mkdir", path, repeatable=parents, parents=parents, mode=f"{mode:04o}", user=user)

    async def remove(self, path: str, *, recursive: bool = False, user: str | None = None) -> None:
        """Remove a file, symlink or empty directory; `recursive` a whole tree. Raises FileNotFound, DirectoryNotEmpty, FileDenied."""
        await self._change("remove", path, recursive=recursive, user=user)

    async def move(self, source: str, target: str, *, overwrite: bool = True, user: str | None = None) -> None:
        """Rename `source` to `target`, replacing a file there unless `overwrite` is False (FileExists)."""
        await self._change("move", source, to=target, overwrite=overwrite, user=user)

    async def chmod(self, path: str, mode: int, *, user: str | None = None) -> None:
        """Set permission bits."""
        await self._change("chmod", path, repeatable=True, mode=f"{mode:04o}", user=user)

    async def chown(self, path: str, owner: str, *, user: str | None = None) -> None:
        """Set the owner: `name`, `uid`, `name:group` or `uid:gid`. Raises FileDenied unless `user` may."""
        await self._change("chown", path, repeatable=True, owner=owner, user=user)

    async def _change(self, verb: str, path: str, *, repeatable: bool = False, **options: Any) -> None:
        await self._transport.call_raw(
            _calls.change_files(self._sandbox_id, verb, path, repeatable=repeatable, **options)
        )

    async def upload(self, local: LocalPath, remote: str, *, user: str | None = None) -> Transfer:
        """Copy a local file or folder to `remote`, which names the copy itself; streamed, modes kept, owned by `user`.

        A folder's contents are merged into `remote`. Sockets, fifos and devices are left out and named. An interrupted upload of a file
        leaves the old one; of a folder, the files that were complete.

        Raises OSError for the local side, the `FileError` family for the sandbox's, OutcomeUnknown (a lost connection).
        """
        path = Path(local)
        if await asyncio.to_thread(path.is_dir):
            return await self._upload_tree(path, remote, user)
        await asyncio.to_thread(_archives.check_regular, path)
        mode = (await asyncio.to_thread(path.stat)).st_mode & 0o777
        call = _calls.write_file(self._sandbox_id, remote, None, mode=mode, append=False, parents=True, user=user)
        async with _worker() as in_thread:
            source = await in_thread(lambda: path.open("rb"))
            try:
                async with self._transport.stream(call, data=_pieces(source, in_thread)) as answer:
                    await answer.read()
            except lost_errors() as error:
                raise OutcomeUnknown(f"the connection was lost while {path} was sent to {remote}") from error
            finally:
                await in_thread(source.close)
        return Transfer(1)

    async def _upload_tree(self, path: Path, remote: str, user: str | None) -> Transfer:
        call = _calls.put_archive(self._sandbox_id, remote, user=user)
        read_end, write_end = os.pipe()
        async with _worker() as in_thread, _worker() as in_reader:
            source = os.fdopen(read_end, "rb", buffering=0)
            packing = asyncio.ensure_future(in_thread(lambda: _pack(path, write_end)))
            try:
                async with self._transport.stream(call, data=_pieces(source, in_reader)) as answer:
                    report = _calls.decode(call, await answer.read())
                skipped = await packing
            except lost_errors(OutcomeUnknown) as error:
                source.close()
                await _settle(packing)  # a folder that could not be read breaks the stream: that is the error to tell
                raise OutcomeUnknown(f"the connection was lost while {path} was sent to {remote}") from error
            finally:
                source.close()  # ends the packing thread, by EPIPE, if it is still writing
                await asyncio.wait([packing])
        return Transfer(report.entries, (*skipped, *report.refused, *report.skipped))

    async def download(self, remote: str, local: LocalPath, *, user: str | None = None) -> Transfer:
        """Copy a file or directory of the sandbox to `local`, which names the copy itself; missing local folders are made.

        The copy appears when it is complete: an interrupted download leaves nothing. A directory is merged into an existing folder. Links
        leading out of the copied directory, special files and impossible names are left out and named; owners and setuid bits are not kept.

        Raises the `FileError` family for the sandbox's side, OSError for the local one, ConnectionFailed.
        """
        path = Path(local)
        entry = await self.stat(remote, user=user)
        if entry.is_dir:
            return await self._download_tree(remote, path, user)
        try:
            return await self._download_file(remote, path, user, entry.mode)
        except FileIsDirectory:  # a symlink to a directory
            return await self._download_tree(remote, path, user)

    async def _download_file(self, remote: str, path: Path, user: str | None, mode: int) -> Transfer:
        call = _calls.read_file(self._sandbox_id, remote, offset=0, limit=None, user=user)
        async with self._transport.stream(call) as answer, _worker() as in_thread:
            sink = await in_thread(lambda: _Staged(path))
            try:
                async for piece in _content(answer, remote):
                    await in_thread(partial(_write_all, sink.file, piece))
                await in_thread(lambda: sink.commit(mode & 0o777))
            finally:
                await self._transport.shielded(in_thread(sink.discard))
        return Transfer(1)

    async def _download_tree(self, remote: str, path: Path, user: str | None) -> Transfer:
        call = _calls.get_archive(self._sandbox_id, remote, user=user)
        async with self._transport.stream(call) as answer, _worker() as in_thread, _worker() as in_writer:
            read_end, write_end = os.pipe()
            sink = os.fdopen(write_end, "wb", buffering=0)
            gate = _Gate()
            unpacking = asyncio.ensure_future(in_thread(lambda: _unpack(read_end, path, gate)))
            try:
                async for piece in _content(answer, remote):
                    await in_writer(partial(_write_all, sink, piece))
                gate.complete = True
            except BrokenPipeError:
                pass  # the unpacking failed and says why below
            finally:
                sink.close()  # without `complete`, end of file makes the thread discard what it has
                await asyncio.wait([unpacking])
            report = await unpacking
        return Transfer(report.entries, tuple(report.skipped))

    def watch(self, path: str, *, recursive: bool = True) -> AsyncIterator[Any]:
        """Watch for changes. Not part of this release: raises Unsupported."""
        raise later("files.watch")


@asynccontextmanager
async def _worker() -> AsyncIterator[Callable[[Callable[[], Any]], Any]]:
    """A thread of its own for one side of a transfer: the shared pool is small, and two sides waiting for each other could fill it."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="dsec-transfer")
    loop = asyncio.get_running_loop()
    try:
        yield lambda work: loop.run_in_executor(pool, work)
    finally:
        pool.shutdown(wait=False)


async def _pieces(source: IO[bytes], in_thread: Callable[[Callable[[], Any]], Any]) -> AsyncIterator[bytes]:
    while piece := await in_thread(lambda: source.read(CHUNK_BYTES)):
        yield piece


async def _content(answer: aiohttp.ClientResponse, remote: str) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.content.iter_any():
            yield piece
    except lost_errors() as error:
        raise ConnectionFailed(f"the connection was lost while {remote} was read") from error


async def _settle(future: asyncio.Future[T]) -> None:
    """Wait for `future` and raise its error, unless that is only the echo of a pipe closed on purpose."""
    try:
        await future
    except BrokenPipeError:
        return


def _pack(path: Path, descriptor: int) -> list[str]:
    with os.fdopen(descriptor, "wb", buffering=0) as sink:
        return _archives.pack(path, sink)


class _Gate:
    """Set `complete` before the end of the stream: an unpacked tree is moved into place only then."""

    complete = False


class _Guarded:
    """A stream whose end is an error unless its gate says that it is complete."""

    def __init__(self, source: IO[bytes], gate: _Gate) -> None:
        self._source = source
        self._gate = gate

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        if not data and size and not self._gate.complete:
            raise ConnectionFailed("the transfer was interrupted")
        return data


def _unpack(descriptor: int, path: Path, gate: _Gate) -> _archives.Unpacked:
    with os.fdopen(descriptor, "rb", buffering=CHUNK_BYTES) as source:
        return _archives.unpack(_Guarded(source, gate), path)  # type: ignore[arg-type]


def _write_all(sink: IO[bytes], data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[sink.write(view) :]


class _Staged:
    """A file written beside its place and renamed when complete."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", dir=path.parent)
        self.file = os.fdopen(descriptor, "wb", buffering=0)
        self._path = path
        self._name: str | None = name

    def commit(self, mode: int) -> None:
        """Put the file in its place. Raises IsADirectoryError where a folder stands."""
        assert self._name is not None
        os.fchmod(self.file.fileno(), mode)
        self.file.close()
        Path(self._name).replace(self._path)
        self._name = None

    def discard(self) -> None:
        """Remove what was not committed. Idempotent."""
        self.file.close()
        if self._name is not None:
            Path(self._name).unlink(missing_ok=True)
            self._name = None
