"""Bounded keeping of a process's output: head and tail, as the guest does it."""

from __future__ import annotations


class OutputCollector:
    """Keeps the head and the tail of one output stream, at most `limit` bytes together; the guest cuts in the same way."""

    def __init__(self, limit: int) -> None:
        self._head_room = limit - limit // 2
        self._tail_room = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._tail_start = 0
        self.total = 0

    def add(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self.total += len(data)
        missing = self._head_room - len(self._head)
        if missing > 0 and self._tail_start == len(self._head):
            self._head += data[:missing]
            data = data[missing:]
            self._tail_start = len(self._head)
        if not data:
            return
        self._tail += data
        # Trimming at twice the room keeps the cost of moving bytes constant for each byte taken.
        if len(self._tail) > 2 * self._tail_room + 65_536:
            self._trim()

    def skip(self, count: int) -> None:
        """Note that `count` bytes of the stream are lost: they, and what the tail held before them, make the gap."""
        self.total += count
        self._tail.clear()
        self._tail_start = self.total

    def _trim(self) -> None:
        excess = len(self._tail) - self._tail_room
        if excess > 0:
            del self._tail[:excess]
            self._tail_start += excess

    def finish(self) -> tuple[bytes, tuple[int, int] | None]:
        """What was kept, and the range of offsets that is missing."""
        self._trim()
        gap = (len(self._head), self._tail_start) if self._tail_start > len(self._head) else None
        return bytes(self._head + self._tail), gap
