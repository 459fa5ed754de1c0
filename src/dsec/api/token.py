"""Stream tokens: short-lived proof that its holder may talk to one sandbox. Made by the apiserver after `authorize()`, checked by the edge.

The rule a reader could break: a token is a bearer's secret for its life, so it is never logged and never leaves dsec's own processes.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dsec.api.errors import PermissionDenied

EXEC: Final = 1
"""Start commands, feed and signal them."""
OBSERVE: Final = 2
"""Read output, wait, list processes, usage."""
READ: Final = 4
"""Read and list files."""
WRITE: Final = 8
"""Change files."""
ALL: Final = EXEC | OBSERVE | READ | WRITE
"""Every operation."""

DEFAULT_LIFE_S: Final = 60.0
"""A token opens streams for so long; streams that are open stay open."""
KEY_BYTES: Final = 32
"""Length of a key that is as strong as the digest."""

_DIGEST_BYTES: Final = 16
_METHODS: Final = {
    "exec": EXEC,
    "stdin": EXEC,
    "signal": EXEC,
    "output": OBSERVE,
    "wait": OBSERVE,
    "ps": OBSERVE,
    "usage": OBSERVE,
}
_FILE_READS: Final = frozenset({"read", "stat", "list", "tar_get"})


def operation(params: Mapping[str, Any]) -> int:
    """The operation that opening a stream with the OPEN map `params` needs; one that no token has for unknown methods."""
    method = params.get("m")
    if method == "file":
        return READ if params.get("op") in _FILE_READS else WRITE
    return _METHODS.get(method, ALL + 1) if isinstance(method, str) else ALL + 1


@dataclass(frozen=True, slots=True)
class StreamToken:
    """What a token says: `operations` (a sum of EXEC, OBSERVE, READ, WRITE) on a project's sandbox until `expires_s` (epoch seconds)."""

    project: str
    sandbox: str
    operations: int
    expires_s: int


class TokenKey:
    """Mints and verifies tokens with a key that apiservers and edges share: keyed BLAKE2b, about 3 us each way.

    `key` has 16 to 64 bytes.
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if not 16 <= len(key) <= 64:
            raise ValueError("a token key has 16 to 64 bytes")
        self._key = key

    def mint(self, *, project: str, sandbox: str, operations: int, now_s: float, life_s: float = DEFAULT_LIFE_S) -> str:
        """A token for `operations` on `sandbox` of `project`, good until `now_s + life_s`."""
        body = f"{operations:x}.{int(now_s + life_s):x}.{sandbox}.{project}"
        return f"{self._digest(body)}.{body}"

    def verify(self, token: str, *, now_s: float) -> StreamToken:
        """What `token` says; raises PermissionDenied if it is forged, damaged or expired."""
        digest, _, body = token.partition(".")
        if not hmac.compare_digest(digest.encode(), self._digest(body).encode()):
            raise PermissionDenied("the stream token is not valid")
        operations, expires, sandbox, project = body.split(".", 3)
        expires_s = int(expires, 16)
        if expires_s < now_s:
            raise PermissionDenied("the stream token has expired; ask for a new one")
        return StreamToken(project, sandbox, int(operations, 16), expires_s)

    def _digest(self, body: str) -> str:
        return hashlib.blake2b(body.encode(), key=self._key, digest_size=_DIGEST_BYTES).hexdigest()
