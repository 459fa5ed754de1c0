"""One client's attachment to a process: its output from an offset on, and its stdin. Output and input have a guest stream each."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, Self

from dsec.api import token
from dsec.api.dataplane import Data, GuestReset, GuestStream, Message
from dsec.api.errors import DsecError, NotFound
from dsec.api.types import ExecResponse
from dsec.apiserver.service.guest import Guests, translated
from dsec.apiserver.service.results import exec_response
from dsec.iam import Action, Principal

STDIN_ONLY_FROM = 1 << 62
"""An offset no stream reaches: a client that gives it for both streams only writes, and must not hold the process's output back."""
_MAX_OFFSET = (1 << 63) - 1
_WAIT_ROUND_MS = 3_600_000
_HEADER = struct.Struct("<BQ")


class Gap(NamedTuple):
    """A range of offsets of a stream (1 stdout, 2 stderr) that is gone."""

    channel: int
    start: int
    end: int


class Ended(NamedTuple):
    """The process has ended and everything was sent."""

    result: ExecResponse


class Running(NamedTuple):
    """All output there is now was sent; the process runs on."""


class Attached:
    """Use with `async with`; leaving it detaches and leaves the process running."""

    def __init__(self, guests: Guests, principal: Principal, sandbox_id: str, process_id: str) -> None:
        self._guests = guests
        self._principal = principal
        self._sandbox_id = sandbox_id
        self._process_id = process_id
        self._output: GuestStream | None = None
        self._stdin: GuestStream | None = None

    @classmethod
    async def open(
        cls,
        guests: Guests,
        principal: Principal,
        sandbox_id: str,
        process_id: str,
        *,
        since: tuple[int, int],
        follow: bool,
    ) -> Self:
        """Attach. Raises NotFound if the guest does not know the process, SandboxGone."""
        attached = cls(guests, principal, sandbox_id, process_id)
        # The output stream says nothing until there is output, so ask first whether there is such a process.
        await attached._call({"m": "wait", "id": process_id, "timeout_ms": 0})
        if follow and min(since) >= STDIN_ONLY_FROM:
            return attached
        params = {
            "m": "output",
            "id": process_id,
            "since_out": min(since[0], _MAX_OFFSET),
            "since_err": min(since[1], _MAX_OFFSET),
            "follow": follow,
        }
        attached._output = await guests.open(principal, Action.EXEC, sandbox_id, token.OBSERVE, params, fin=True)
        return attached

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def receive(self) -> bytes | Gap | Ended | Running:
        """The next piece of output (channel, u64le offset, bytes), a gap, or how the attachment ends: then nothing follows.

        Raises NotFound, SandboxGone.
        """
        if self._output is None:
            return await self._wait()
        try:
            while True:
                item = await self._output.receive()
                if isinstance(item, Data):
                    return item.payload
                if isinstance(item, Message):
                    found = self._said(item)
                    if found is not None:
                        return found
                elif item is None:
                    return Running()
        except GuestReset as error:
            raise self._translated(error) from error

    def _said(self, message: Message) -> Gap | Ended | Running | None:
        gap = message.fields.get("gap")
        if isinstance(gap, list) and len(gap) == 3 and all(isinstance(part, int) for part in gap):
            return Gap(*gap)
        if not message.last:
            return None
        return self._ending(message.fields)

    def _ending(self, fields: dict[str, Any]) -> Ended | Running:
        return Running() if fields.get("running") else Ended(exec_response(self._process_id, fields))

    async def _wait(self) -> Ended:
        while True:
            params = {"m": "wait", "id": self._process_id, "timeout_ms": _WAIT_ROUND_MS}
            answer = await self._call(params)
            ending = self._ending(answer.fields)
            if isinstance(ending, Ended):
                return ending

    async def _call(self, params: dict[str, Any]) -> Message:
        return await self._guests.call(self._principal, Action.EXEC, self._sandbox_id, token.OBSERVE, params)

    async def write(self, data: bytes) -> None:
        """Send bytes to the process's stdin, waiting while it does not read. Raises Conflict (it is closed), NotFound, SandboxGone."""
        if not data:
            return
        try:
            stream = await self._stdin_stream()
            await stream.send(data)
        except GuestReset as error:
            raise self._translated(error) from error

    async def close_stdin(self) -> None:
        """Close the process's stdin; returns when the guest has taken all of it. Closing twice is harmless."""
        try:
            stream = await self._stdin_stream()
            await stream.finish()
            while await stream.receive() is not None:
                pass
        except GuestReset as error:
            if error.guest_code == "bad_state":
                return
            raise self._translated(error) from error

    async def _stdin_stream(self) -> GuestStream:
        if self._stdin is None:
            params = {"m": "stdin", "id": self._process_id, "offset": None}
            self._stdin = await self._guests.open(
                self._principal, Action.EXEC, self._sandbox_id, token.EXEC, params, fin=False
            )
        return self._stdin

    def _translated(self, error: GuestReset) -> DsecError:
        if error.guest_code == "no_process":
            return NotFound(
                f"there is no process {self._process_id!r} in sandbox {self._sandbox_id}",
                sandbox_id=self._sandbox_id,
                sandbox_survived=True,
            )
        return translated(error, sandbox_id=self._sandbox_id, method="process")

    async def aclose(self) -> None:
        """Detach. Idempotent."""
        streams, self._output, self._stdin = (self._output, self._stdin), None, None
        for stream in streams:
            if stream is not None:
                await stream.aclose()
