"""A small peer that speaks the guest protocol over the other end of a socket pair: what a guest would say, said by a test."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from dsec.api import wire
from dsec.api.errors import SandboxGone
from dsec.edge.channel import Channel
from dsec.edge.poller import Poller


class Peer:
    """The guest's end. Frames that came are taken one by one, with a deadline."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._frames: list[tuple[int, int, bytes]] = []

    async def frame(self) -> tuple[int, int, bytes]:
        """The next frame as (stream, type, payload)."""
        while not self._frames:
            async with asyncio.timeout(5):
                packet = await asyncio.get_running_loop().sock_recv(self.sock, wire.MAX_PACKET_BYTES)
            if not packet:
                raise EOFError
            self._frames = [(stream, kind, bytes(payload)) for stream, kind, payload in wire.frames(memoryview(packet))]
        return self._frames.pop(0)

    async def opened(self) -> tuple[int, dict[str, Any]]:
        """The next frame, which must be OPEN, as (stream, fields)."""
        stream, kind, payload = await self.frame()
        assert kind & ~wire.FIN == wire.OPEN
        return stream, wire.fields_of(payload)

    def say(self, *frames: bytes) -> None:
        """Send frames as one packet."""
        self.sock.send(b"".join(frames))


@asynccontextmanager
async def channel_and_peer() -> AsyncIterator[tuple[Channel, Peer, list[str]]]:
    """A channel, its peer, and the list of reasons for which the channel was lost."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lost: list[str] = []
    async with Poller() as poller:
        channel = Channel(poller, ours.detach(), on_lost=lost.append)
        try:
            yield channel, Peer(theirs), lost
        finally:
            channel.close(gone)
            theirs.close()


def gone() -> SandboxGone:
    """What streams end with in these tests."""
    return SandboxGone("gone", reason="requested")


async def until(condition: Callable[[], bool]) -> None:
    """Return when `condition` holds; fails after 5 s."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)
