"""Who a key belongs to and what they may do. `authorize` is the one gate; it is asked once, at ingress.

What belongs to another project is NotFound, never PermissionDenied: whether it exists is not for others to learn.
"""

from __future__ import annotations

import enum
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass

from dsec.api.errors import InvalidRequest, NotFound, Unauthenticated
from dsec.api.ids import PrincipalId, ProjectId
from dsec.iam.keys import MAX_KEY_CHARS, PREFIX, hash_key
from dsec.store import KeyRow, Store

CACHE_S = 30.0
"""How long a key's row is believed without asking the store: a removed key works at most so long on other instances."""
_CACHE_KEYS = 1024
_CACHE_UNKNOWN_S = 2.0


class Action(enum.StrEnum):
    """What a principal can ask for."""

    CREATE = "create"
    READ = "read"
    EXEC = "exec"
    FILES = "files"
    STOP = "stop"
    UPDATE = "update"
    EVENTS = "events"
    IMAGES = "images"
    NODES = "nodes"
    METRICS = "metrics"


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks: a name within a project."""

    project: ProjectId
    name: PrincipalId


@dataclass(frozen=True, slots=True)
class Resource:
    """What is asked for. `project` None: nothing that belongs to a project, such as nodes."""

    kind: str
    name: str
    project: str | None


def authorize(principal: Principal, action: Action, resource: Resource) -> None:
    """Return if `principal` may do `action` to `resource`. Raises NotFound for other projects' things.

    Within its own project a principal may do everything: roles and policies come with nested projects.
    """
    if resource.project is not None and resource.project != principal.project:
        raise NotFound(
            f"there is no {resource.kind} {resource.name!r} in project {principal.project!r}", action=action.value
        )


@dataclass(slots=True)
class _Cached:
    row: KeyRow | None
    hash: bytes
    until: float
    principal: Principal | None


class Authenticator:
    """Finds the principal of a key, from memory where it can."""

    def __init__(self, store: Store, secret: bytes, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._secret = secret
        self._now = wall_clock
        self._cache: dict[str, _Cached] = {}

    def forget(self) -> None:
        """Ask the store again from now on: keys have changed."""
        self._cache.clear()

    async def authenticate(self, key: str | None) -> Principal:
        """The principal that `key` belongs to. Raises Unauthenticated for a missing, unknown or expired key."""
        if not key:
            raise Unauthenticated(
                "an API key is missing: send it as 'Authorization: Bearer KEY' (the daemon wrote one to api.key)"
            )
        cached = self._cache.get(key)
        if cached is None or cached.until < self._now():
            cached = await self._look_up(key)
        row = cached.row
        if row is None or cached.principal is None:
            raise Unauthenticated("the API key is not known here; check DSEC_API_KEY and which daemon DSEC_URL names")
        if row.expires_at is not None and row.expires_at < self._now():
            raise Unauthenticated("the API key has expired; ask for a new one")
        return cached.principal

    async def _look_up(self, key: str) -> _Cached:
        if len(key) > MAX_KEY_CHARS or not key.startswith(PREFIX):
            return _Cached(None, b"", 0.0, None)
        hashed = hash_key(self._secret, key)
        row = await self._store.key(hashed)
        # The store found it by an index; this comparison does not depend on how much of it agrees.
        if row is not None and not hmac.compare_digest(row.hash, hashed):
            row = None
        principal = Principal(ProjectId(row.project), PrincipalId(row.principal)) if row else None
        entry = _Cached(row, hashed, self._now() + (CACHE_S if row else _CACHE_UNKNOWN_S), principal)
        if len(self._cache) >= _CACHE_KEYS:
            self._cache.clear()
        self._cache[key] = entry
        return entry


def checked_project(principal: Principal, project: str | None) -> ProjectId:
    """The project a request is for: its own, or the one it names. Raises NotFound for another's, InvalidRequest for no name."""
    if project is None:
        return principal.project
    if not project:
        raise InvalidRequest("project must not be empty; leave it out for the key's own project")
    authorize(principal, Action.READ, Resource("project", project, project))
    return principal.project
