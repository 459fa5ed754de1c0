"""Files and archives of sandboxes, over the guest's `file` method. Paths are bytes. Nothing here holds a whole file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from dsec.api import token
from dsec.api.dataplane import Data, GuestReset, GuestStream, Message
from dsec.api.errors import InternalError, InvalidRequest
from dsec.api.types import ArchiveReport, FileEntry, FileList, FileWritten
from dsec.apiserver.service import checks
from dsec.apiserver.service.guest import Guests, translated
from dsec.apiserver.service.outcomes import Outcomes
from dsec.apiserver.service.results import text
from dsec.apiserver.service.tasks import Detached
from dsec.iam import Action, Principal

T = TypeVar("T")

MAX_ENTRIES = 100_000
"""Entries of one listing: about 20 MiB of answer."""
MAX_DEPTH = 64
_MODES = 0o7777


class Files:
    """The files of sandboxes; every method takes the principal who asks."""

    def __init__(self, guests: Guests, tasks: Detached) -> None:
        self._guests = guests
        self._tasks = tasks
        self._outcomes = Outcomes()

    async def once(
        self, principal: Principal, sandbox_id: str, request_id: str | None, work: Callable[[], Awaitable[T]]
    ) -> T:
        """Do `work` unless the same request id did it before: then return what came of it. For appending."""
        checks.check_request_id(request_id)
        if request_id is None:
            return await work()
        return await self._outcomes.once((principal.project, sandbox_id, request_id), work)

    @asynccontextmanager
    async def read(
        self, principal: Principal, sandbox_id: str, path: bytes, *, offset: int, limit: int | None, user: str | None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a file; yields its pieces as an iterator that has checked its first one.

        Raises the FileError family, SandboxGone, NotFound; also in the midst of the pieces.
        """
        if offset < 0 or (limit is not None and limit < 0):
            raise InvalidRequest("offset and limit must not be negative")
        params = self._params("read", path, user) | {"offset": offset, "limit": limit}
        async with self._download(principal, sandbox_id, params) as pieces:
            yield pieces

    @asynccontextmanager
    async def archive(
        self, principal: Principal, sandbox_id: str, path: bytes, *, user: str | None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a tar stream of a tree or file, as `read` does."""
        async with self._download(principal, sandbox_id, self._params("tar_get", path, user)) as pieces:
            yield pieces

    @asynccontextmanager
    async def _download(
        self, principal: Principal, sandbox_id: str, params: dict[str, Any]
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        stream = await self._guests.open(principal, Action.FILES, sandbox_id, token.READ, params, fin=True)
        async with stream:
            first = await self._receive(stream, sandbox_id)
            yield self._pieces(stream, sandbox_id, first)

    async def _pieces(self, stream: GuestStream, sandbox_id: str, item: Data | Message) -> AsyncIterator[bytes]:
        while isinstance(item, Data):
            yield item.payload
            item = await self._receive(stream, sandbox_id)

    @asynccontextmanager
    async def write(
        self,
        principal: Principal,
        sandbox_id: str,
        path: bytes,
        *,
        mode: int | None,
        append: bool,
        parents: bool,
        user: str | None,
    ) -> AsyncIterator[Upload]:
        """Open a file for writing; it appears (whole) when the upload is finished. Left early: nothing has changed."""
        if mode is not None and not 0 <= mode <= _MODES:
            raise InvalidRequest(f"mode must be octal, 0 to 7777, not {mode:o}")
        params = self._params("write", path, user) | {"mode": mode, "append": append, "parents": parents}
        async with self._upload(principal, sandbox_id, params) as upload:
            yield upload

    @asynccontextmanager
    async def unpack(
        self, principal: Principal, sandbox_id: str, path: bytes, *, user: str | None
    ) -> AsyncIterator[Upload]:
        """Open a directory for a tar stream. Left early: what was unpacked stays."""
        params = self._params("tar_put", path, user) | {"parents": True}
        async with self._upload(principal, sandbox_id, params) as upload:
            yield upload

    @asynccontextmanager
    async def _upload(self, principal: Principal, sandbox_id: str, params: dict[str, Any]) -> AsyncIterator[Upload]:
        stream = await self._guests.open(principal, Action.FILES, sandbox_id, token.WRITE, params, fin=False)
        async with stream:
            yield Upload(stream, sandbox_id)

    async def stat(
        self, principal: Principal, sandbox_id: str, path: bytes, *, follow: bool, user: str | None
    ) -> FileEntry:
        """Describe a file; a symlink itself unless `follow`."""
        params = self._params("stat", path, user) | {"follow": follow}
        answer = await self._guests.call(principal, Action.FILES, sandbox_id, token.READ, params)
        return _entry(answer.fields)

    async def list(
        self, principal: Principal, sandbox_id: str, path: bytes, *, depth: int, user: str | None
    ) -> FileList:
        """List a directory, `depth` levels deep, sorted by bytes. Raises InvalidRequest beyond MAX_ENTRIES."""
        if not 1 <= depth <= MAX_DEPTH:
            raise InvalidRequest(f"depth must be 1 to {MAX_DEPTH}, not {depth}")
        params = self._params("list", path, user) | {"depth": depth}
        found: list[dict[str, Any]] = []
        stream = await self._guests.open(principal, Action.FILES, sandbox_id, token.READ, params, fin=True)
        async with stream:
            while True:
                item = await self._receive(stream, sandbox_id)
                if isinstance(item, Data):
                    raise InternalError("the guest sent data for a listing", sandbox_id=sandbox_id)
                entries = item.fields.get("entries")
                if isinstance(entries, list):
                    found += [entry for entry in entries if isinstance(entry, dict)]
                if len(found) > MAX_ENTRIES:
                    raise InvalidRequest(
                        f"there are more than {MAX_ENTRIES} entries; list with a smaller depth, or run find"
                    )
                if item.last:
                    break
        found.sort(key=lambda entry: _raw(entry.get("path")))
        return FileList(entries=[_entry(entry) for entry in found])

    async def mkdir(
        self,
        principal: Principal,
        sandbox_id: str,
        path: bytes,
        *,
        mode: int | None,
        parents: bool,
        user: str | None,
        request_id: str | None = None,
    ) -> None:
        """Make a directory."""
        await self._change(
            principal,
            sandbox_id,
            "mkdir",
            path,
            user,
            request_id,
            mode=0o755 if mode is None else mode,
            parents=parents,
        )

    async def remove(
        self,
        principal: Principal,
        sandbox_id: str,
        path: bytes,
        *,
        recursive: bool,
        user: str | None,
        request_id: str | None = None,
    ) -> None:
        """Remove a file or directory."""
        await self._change(principal, sandbox_id, "remove", path, user, request_id, recursive=recursive)

    async def move(
        self,
        principal: Principal,
        sandbox_id: str,
        path: bytes,
        to: bytes,
        *,
        overwrite: bool,
        user: str | None,
        request_id: str | None = None,
    ) -> None:
        """Rename a file or directory."""
        await self._change(
            principal,
            sandbox_id,
            "move",
            path,
            user,
            request_id,
            to=checks.check_path(to, name="to"),
            overwrite=overwrite,
        )

    async def chmod(self, principal: Principal, sandbox_id: str, path: bytes, *, mode: int, user: str | None) -> None:
        """Change a file's mode."""
        if not 0 <= mode <= _MODES:
            raise InvalidRequest(f"mode must be octal, 0 to 7777, not {mode:o}")
        await self._change(principal, sandbox_id, "chmod", path, user, None, mode=mode)

    async def chown(
        self, principal: Principal, sandbox_id: str, path: bytes, *, owner: str, follow: bool, user: str | None
    ) -> None:
        """Change a file's owner."""
        checks.check_user(owner)
        await self._change(principal, sandbox_id, "chown", path, user, None, owner=owner, follow=follow)

    async def _change(
        self,
        principal: Principal,
        sandbox_id: str,
        op: str,
        path: bytes,
        user: str | None,
        request_id: str | None,
        **more: Any,
    ) -> None:
        params = self._params(op, path, user) | more

        def work() -> Awaitable[Message]:
            return self._guests.call(principal, Action.FILES, sandbox_id, token.WRITE, params)

        if request_id is None:
            await work()
        else:
            # Detached: a client that lost its connection finds the outcome when it asks again.
            await asyncio.shield(self._tasks.start(self.once(principal, sandbox_id, request_id, work)))

    @staticmethod
    def _params(op: str, path: bytes, user: str | None) -> dict[str, Any]:
        checks.check_user(user)
        return {"m": "file", "op": op, "path": checks.check_path(path), "user": user}

    @staticmethod
    async def _receive(stream: GuestStream, sandbox_id: str) -> Data | Message:
        return await _receive(stream, sandbox_id)


class Upload:
    """A file or archive on its way into a sandbox."""

    def __init__(self, stream: GuestStream, sandbox_id: str) -> None:
        self._stream = stream
        self._sandbox_id = sandbox_id

    async def send(self, piece: bytes) -> None:
        """Send a piece, waiting while the guest does not take it. Raises the FileError family."""
        if not piece:
            return
        try:
            await self._stream.send(piece)
        except GuestReset as error:
            raise translated(error, sandbox_id=self._sandbox_id, method="file") from error

    async def _finish(self) -> dict[str, Any]:
        try:
            await self._stream.finish()
        except GuestReset as error:
            raise translated(error, sandbox_id=self._sandbox_id, method="file") from error
        item = await _receive(self._stream, self._sandbox_id)
        if isinstance(item, Data):
            raise InternalError("the guest sent data for an upload", sandbox_id=self._sandbox_id)
        return item.fields

    async def written(self) -> FileWritten:
        """End a file: it is there when this returns."""
        return FileWritten(size=_int((await self._finish()).get("size")))

    async def unpacked(self) -> ArchiveReport:
        """End an archive."""
        fields = await self._finish()
        return ArchiveReport(
            entries=_int(fields.get("entries")),
            refused=_names(fields.get("refused")),
            skipped=_names(fields.get("skipped")),
        )


async def _receive(stream: GuestStream, sandbox_id: str) -> Data | Message:
    try:
        item = await stream.receive()
    except GuestReset as error:
        raise translated(error, sandbox_id=sandbox_id, method="file") from error
    if item is None:
        raise InternalError("the guest ended a file operation without an answer", sandbox_id=sandbox_id)
    return item


def _entry(fields: dict[str, Any]) -> FileEntry:
    name, path, target = _raw(fields.get("name")), _raw(fields.get("path")), fields.get("target")
    return FileEntry(
        name=text(name),
        path=text(path),
        type=str(fields.get("type", "file")),
        size=_int(fields.get("size")),
        mode=_int(fields.get("mode")),
        uid=_int(fields.get("uid")),
        gid=_int(fields.get("gid")),
        mtime=_int(fields.get("mtime_ns")) / 1e9,
        target=text(target) if target is not None else None,
        name_bytes=None if _is_text(name) else name,
        path_bytes=None if _is_text(path) else path,
    )


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _raw(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value or "").encode()


def _names(value: object) -> list[str]:
    return [text(name) for name in value] if isinstance(value, list) else []


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0
