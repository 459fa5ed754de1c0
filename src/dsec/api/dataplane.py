"""The seam between who talks to a sandbox (apiserver) and who holds its channel (edge): streams of the guest protocol.

docs/protocols.md defines frames and methods. In one process the edge's multiplexer implements these protocols directly; between
hosts the same interface runs over one connection, relaying frames without parsing their payload.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, Self

import msgspec

from dsec.api.errors import DsecError


class GuestReset(DsecError):
    """The guest ended a stream with RESET; `guest_code` is the protocol's code, `details` its other fields (errno, path)."""

    code = "guest_reset"

    def __init__(self, guest_code: str, message: str, **details: Any) -> None:
        super().__init__(message, **details)
        self.guest_code = guest_code


class Data(msgspec.Struct, frozen=True):
    """A DATA frame's payload."""

    payload: bytes


class Message(msgspec.Struct, frozen=True):
    """A MSG frame's map; `last` if it carried FIN."""

    fields: dict[str, Any]
    last: bool


class GuestStream(Protocol):
    """One stream to the guest. Use with `async with`, which resets it unless both sides have finished."""

    async def send(self, payload: bytes | memoryview, *, fin: bool = False) -> None:
        """Send bytes of any length as DATA frames, waiting for credit; `fin` marks the last."""

    async def finish(self) -> None:
        """Say that nothing more will be sent (FIN without data)."""

    async def receive(self) -> Data | Message | None:
        """The next frame, or None after the guest's FIN. Grants credit for what was handed out.

        Raises GuestReset if the guest ended the stream, SandboxGone if the sandbox ended.
        """

    async def aclose(self) -> None:
        """Reset the stream unless it has ended. Idempotent."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...


class DataPlane(Protocol):
    """Opens streams to sandboxes. `token` (see `StreamToken`) proves that the caller may."""

    async def open(self, token: str, params: Mapping[str, Any], *, fin: bool) -> GuestStream:
        """Open a stream with the OPEN map `params`; `fin`: nothing follows from our side.

        Raises NotFound, SandboxGone, Conflict (wrong state), PermissionDenied (bad or expired token, or a method it does not cover).
        """

    async def call(self, token: str, params: Mapping[str, Any]) -> Message:
        """Open with FIN and return the final message: the short way for exchanges without DATA. Raises as `open` and `receive` do.

        DATA frames and earlier messages are an error (InternalError): use `open` for methods that send them.
        """
