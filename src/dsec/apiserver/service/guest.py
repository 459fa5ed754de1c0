"""The way to a sandbox: who owns it, which edge has it, a token for the operation, and the guest's errors in our words."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from dsec.api.dataplane import DataPlane, GuestReset, GuestStream, Message
from dsec.api.errors import (
    CommandNotStarted,
    Conflict,
    ConnectionFailed,
    DirectoryNotEmpty,
    DsecError,
    FileDenied,
    FileError,
    FileExists,
    FileIsDirectory,
    FileNotDirectory,
    FileNotFound,
    InternalError,
    InvalidPath,
    InvalidRequest,
    NoCapacity,
    NoSpace,
    NotFound,
    NotRegularFile,
    SandboxGone,
    Unsupported,
)
from dsec.api.ids import home_edge, is_sandbox_id
from dsec.api.token import DEFAULT_LIFE_S, TokenKey
from dsec.api.types import SandboxRecord
from dsec.iam import Action, Principal, Resource, authorize
from dsec.store import Store

_CACHED_PLACES = 65_536
_PLACE_FRESH_S = 60.0
"""A sandbox's owner never changes; that it moved is noticed at the latest after this (or at once, by its edge's refusal)."""
_CACHED_TOKENS = 8_192

_FILE_ERRORS: Mapping[str, type[DsecError]] = {
    "not_found": FileNotFound,
    "permission": FileDenied,
    "is_directory": FileIsDirectory,
    "not_directory": FileNotDirectory,
    "exists": FileExists,
    "no_space": NoSpace,
    "not_empty": DirectoryNotEmpty,
    "not_regular": NotRegularFile,
    "loop": InvalidPath,
    "name_too_long": InvalidPath,
    "invalid": InvalidPath,
    "io": FileError,
}
_EXEC_ERRORS: Mapping[str, type[DsecError]] = dict.fromkeys(
    (
        "not_found permission is_directory not_directory exists not_empty not_regular loop name_too_long exec_failed io"
        " no_space"
    ).split(),
    CommandNotStarted,
)
_COMMON_ERRORS: Mapping[str, type[DsecError]] = {
    "not_found": NotFound,
    "no_process": NotFound,
    "bad_state": Conflict,
    "busy": Conflict,
    "too_many": NoCapacity,
    "invalid": InvalidRequest,
    "no_space": NoSpace,
    "unsupported": Unsupported,
}


def translated(error: GuestReset, *, sandbox_id: str, method: str) -> DsecError:
    """The guest's refusal as an error of ours. What the guest says is shown, never trusted."""
    table: Mapping[str, type[DsecError]] = {"file": _FILE_ERRORS, "exec": _EXEC_ERRORS}.get(method, {})
    code = error.guest_code
    found = table.get(code) or _COMMON_ERRORS.get(code, InternalError)
    message = error.message or code.replace("_", " ")
    details = {name: error.details.get(name) for name in ("errno", "path")}
    if found is InternalError:
        return InternalError(f"the sandbox's guest failed: {message}", sandbox_id=sandbox_id, guest_code=code)
    return found(message, sandbox_id=sandbox_id, sandbox_survived=True, **details)


class Place(NamedTuple):
    """Whose a sandbox is and which edge has it."""

    project: str
    edge: str
    until: float


class Guests:
    """Opens streams to sandboxes for principals. `planes` are the data planes by edge code."""

    def __init__(self, store: Store, planes: Mapping[str, DataPlane], tokens: TokenKey) -> None:
        self._store = store
        self._planes = planes
        self._keys = tokens
        self._places: dict[str, Place] = {}
        self._tokens: dict[tuple[str, str, int], tuple[str, float]] = {}

    def note(self, sandbox_id: str, project: str, edge: str) -> None:
        """Remember a sandbox that was just made, so that its first use asks nobody."""
        if len(self._places) >= _CACHED_PLACES:
            self._places.clear()
        self._places[sandbox_id] = Place(project, edge, time.monotonic() + _PLACE_FRESH_S)

    async def route(self, sandbox_id: str, principal: Principal, action: Action) -> Place:
        """Whose the sandbox is and where it lives: the table of moved ones first, then the id. Raises NotFound."""
        place = self._places.get(sandbox_id)
        if place is None or place.until < time.monotonic():
            place = await self._find(sandbox_id, principal)
        authorize(principal, action, Resource("sandbox", sandbox_id, place.project))
        return place

    async def _find(self, sandbox_id: str, principal: Principal) -> Place:
        record = await self._store.get(sandbox_id) if is_sandbox_id(sandbox_id) else None
        if record is None:
            raise NotFound(f"there is no sandbox {sandbox_id[:64]!r} in project {principal.project!r}")
        moved = await self._store.moved(sandbox_id)
        self.note(sandbox_id, record.project, moved[0] if moved else home_edge(sandbox_id))
        return self._places[sandbox_id]

    async def record(self, sandbox_id: str, principal: Principal, action: Action) -> SandboxRecord:
        """The sandbox's record. Raises NotFound."""
        record = await self._store.get(sandbox_id) if is_sandbox_id(sandbox_id) else None
        if record is None:
            raise NotFound(f"there is no sandbox {sandbox_id[:64]!r} in project {principal.project!r}")
        authorize(principal, action, Resource("sandbox", sandbox_id, record.project))
        return record

    async def open(
        self,
        principal: Principal,
        action: Action,
        sandbox_id: str,
        operation: int,
        params: Mapping[str, Any],
        *,
        fin: bool,
    ) -> GuestStream:
        """Open a stream to the guest. Raises NotFound, SandboxGone, Conflict."""
        place = await self.route(sandbox_id, principal, action)
        try:
            return await self._plane(place).open(self._token(place.project, sandbox_id, operation), params, fin=fin)
        except (NotFound, GuestReset) as error:
            raise await self._explained(error, sandbox_id, params) from error

    async def call(
        self, principal: Principal, action: Action, sandbox_id: str, operation: int, params: Mapping[str, Any]
    ) -> Message:
        """One question, one answer. Raises as `open`, and what the guest refuses."""
        place = await self.route(sandbox_id, principal, action)
        try:
            return await self._plane(place).call(self._token(place.project, sandbox_id, operation), params)
        except (NotFound, GuestReset) as error:
            raise await self._explained(error, sandbox_id, params) from error

    def _plane(self, place: Place) -> DataPlane:
        plane = self._planes.get(place.edge)
        if plane is None:
            raise ConnectionFailed(f"the node {place.edge!r} that has this sandbox cannot be reached")
        return plane

    def _token(self, project: str, sandbox_id: str, operation: int) -> str:
        now = time.time()
        cached = self._tokens.get((project, sandbox_id, operation))
        if cached is not None and cached[1] > now:
            return cached[0]
        if len(self._tokens) >= _CACHED_TOKENS:
            self._tokens.clear()
        token = self._keys.mint(project=project, sandbox=sandbox_id, operations=operation, now_s=now)
        self._tokens[project, sandbox_id, operation] = (token, now + DEFAULT_LIFE_S / 2)
        return token

    async def _explained(self, error: DsecError, sandbox_id: str, params: Mapping[str, Any]) -> DsecError:
        """An edge forgets sandboxes that ended long ago; the store still knows why they ended."""
        if isinstance(error, GuestReset):
            return translated(error, sandbox_id=sandbox_id, method=str(params.get("m")))
        return await self.gone(error, sandbox_id)

    async def gone(self, error: DsecError, sandbox_id: str) -> DsecError:
        """What to answer when its edge does not know a sandbox."""
        self._places.pop(sandbox_id, None)
        record = await self._store.get(sandbox_id)
        if record is None:
            return error
        if record.state.ended:
            reason = record.reason.value if record.reason else "unknown"
            return SandboxGone(
                f"sandbox {sandbox_id} has ended ({reason}); create another",
                sandbox_id=sandbox_id,
                sandbox_survived=False,
                reason=reason,
            )
        return Conflict(
            f"sandbox {sandbox_id} is {record.state.value} and takes no commands yet", sandbox_id=sandbox_id
        )
