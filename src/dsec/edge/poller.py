"""One epoll instance for all of an edge's channels, nested in the event loop's own.

Registering a descriptor with a loop costs a handle and several objects each (about 8 us with uvloop); with thousands of sandboxes
coming and going that is a good part of the edge's time. Here it is one system call, and one wake-up of the loop serves all
channels that are ready. Works with any loop that has `add_reader`.
"""

from __future__ import annotations

import asyncio
import logging
import select
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from dsec.api.wire import MAX_PACKET_BYTES

log = logging.getLogger(__name__)

Ready = Callable[[int], None]
"""Called with the epoll events of a descriptor."""

READ: Final = select.EPOLLIN
WRITE: Final = select.EPOLLOUT
_EVENTS_A_TURN: Final = 256
"""Channels served before other work of the loop gets its turn."""


class Poller:
    """Calls back when a descriptor is ready. The descriptors stay the property of who registers them."""

    __slots__ = ("_epoll", "_loop", "_ready", "buffers", "view")

    def __init__(self) -> None:
        buffer = bytearray(MAX_PACKET_BYTES + 1)
        self.buffers = (buffer,)
        """Where channels read into, one packet at a time (for `os.readv`): valid until the callback returns."""
        self.view = memoryview(buffer)
        self._epoll = select.epoll()
        self._ready: dict[int, Ready] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._epoll.fileno(), self._turn)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop is not None
        self._loop.remove_reader(self._epoll.fileno())
        self._ready.clear()
        self._epoll.close()

    def register(self, descriptor: int, ready: Ready) -> None:
        """Call `ready` whenever `descriptor` can be read (level-triggered), until `unregister`."""
        self._epoll.register(descriptor, READ)
        self._ready[descriptor] = ready

    def interest(self, descriptor: int, events: int) -> None:
        """Watch for `events` (READ, WRITE or both) from now on."""
        self._epoll.modify(descriptor, events)

    def unregister(self, descriptor: int) -> None:
        """Forget `descriptor`; to be called before it is closed. Idempotent."""
        if self._ready.pop(descriptor, None) is not None and not self._epoll.closed:
            self._epoll.unregister(descriptor)

    def _turn(self) -> None:
        for descriptor, events in self._epoll.poll(0, _EVENTS_A_TURN):
            ready = self._ready.get(descriptor)
            if ready is None:
                continue  # unregistered by a callback of this same turn
            try:
                ready(events)
            except Exception:
                log.exception("a channel's callback failed")
