"""Starting sandboxes: batches, the queue in front of the launcher, and room.

A sandbox waits here for its turn (so many at the launcher at once) and, if its batch is patient, for room. The rule a reader could
break: every box of a batch ends up in exactly one result, whatever happens to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

from dsec.api.control import StartBatch, StartResult, StartSandbox
from dsec.api.errors import DeadlineExceeded, DsecError, InternalError, NoCapacity
from dsec.api.types import EndReason
from dsec.edge.admission import Admission
from dsec.edge.backends.base import Backend
from dsec.edge.box import Box, Stage, copy_record
from dsec.edge.sandboxes import Sandboxes

log = logging.getLogger(__name__)

_AGAIN_S: Final = 0.25
"""How soon the queue looks for room again after the launcher or the host had none."""
_GATHER_S: Final = 0.002
"""Results of a batch that come within this go to its reader together."""
_BACKLOG: Final = 100_000
"""Changes that the store may be behind before nothing more is started."""


class Batch:
    """The results of one batch on their way to its one reader.

    The first result goes out at once, later ones gather for a moment: waking a reader that encodes and sends costs more than a
    start does. The last one does not wait.
    """

    __slots__ = ("_closes", "_deadline", "_loop", "_results", "_timer", "_waiter", "expired", "missing", "open")

    def __init__(self, *, timeout_s: float) -> None:
        self.open: dict[str, Box] = {}
        """Sandboxes without a result that the reader has got."""
        self.missing = 0
        """Those without a result."""
        self.expired = False
        """Whether the deadline has passed."""
        self._loop = asyncio.get_running_loop()
        self._results: list[StartResult] = []
        self._waiter: asyncio.Future[None] | None = None
        self._closes = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = self._loop.call_later(max(0.0, timeout_s), self._expire)

    def add(self, box: Box) -> None:
        """A result for `box` will be delivered."""
        self.open[box.id] = box
        self.missing += 1

    def deliver(self, result: StartResult) -> None:
        """Add a result."""
        self._results.append(result)
        self.missing -= 1
        if self._waiter is not None and self._timer is None:
            wait_s = self._closes - self._loop.time()
            if self.missing <= 0 or wait_s <= 0.0:
                self._wake()
            else:
                self._timer = self._loop.call_later(wait_s, self._wake)
        elif self.missing <= 0:
            self._wake()

    def close(self) -> None:
        """Cancel the timers."""
        self._deadline.cancel()
        if self._timer is not None:
            self._timer.cancel()

    @property
    def waiting(self) -> bool:
        """Whether there are results to take."""
        return bool(self._results)

    def take(self) -> list[StartResult]:
        """The results that came since the last time."""
        results, self._results = self._results, []
        return results

    async def ready(self) -> None:
        """Return when there are results or the deadline has passed."""
        if (self._results and self.missing <= 0) or self.expired:
            return
        self._waiter = self._loop.create_future()
        if self._results and self._timer is None:
            self._timer = self._loop.call_later(max(0.0, self._closes - self._loop.time()), self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            self._closes = self._loop.time() + _GATHER_S

    def _expire(self) -> None:
        self.expired = True
        self._wake()

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Starts:
    """The queue. `prepare` makes what a batch's sandboxes share (layers mounted, templates, slots) and may raise."""

    def __init__(
        self,
        *,
        sandboxes: Sandboxes,
        backend: Backend,
        admission: Admission,
        backlog: Callable[[], int],
        prepare: Callable[[StartSandbox], Awaitable[None]],
        max_starting: int,
        max_queued: int,
    ) -> None:
        self._sandboxes = sandboxes
        self._backend = backend
        self._admission = admission
        self._backlog = backlog
        self._prepare = prepare
        self._max_starting = max_starting
        self._max_queued = max_queued
        self._queue: deque[Box] = deque()
        self._again: asyncio.TimerHandle | None = None
        self.closed = False

    async def run(self, request: StartBatch) -> AsyncIterator[list[StartResult]]:
        """Start a batch and yield results as they come. A reader that goes away stops what it has not got."""
        batch = Batch(timeout_s=request.deadline - time.time())
        try:
            await self._submit(request, batch)
            while batch.open or batch.waiting:
                await batch.ready()
                if batch.expired:
                    self._expire(batch)
                results = batch.take()
                if results:
                    yield results
                for result in results:
                    batch.open.pop(result.id, None)
        finally:
            batch.close()
            for box in list(batch.open.values()):
                box.batch = None
                self._sandboxes.stop(box, EndReason.CANCELLED)

    def again(self, box: Box) -> None:
        """See `Rooms`."""
        self._queue.appendleft(box)
        self._later()

    def pump(self) -> None:
        """Send to the launcher what may be started now, in one message for each shape."""
        sandboxes = self._sandboxes
        launcher = sandboxes.launcher
        if not self._queue or self._again is not None or launcher is None or launcher.connection is None:
            return
        occupied = len(sandboxes.boxes) - sandboxes.queued
        room = min(self._max_starting - sandboxes.starting, self._admission.max_sandboxes - occupied)
        if room <= 0:
            return  # whatever ends pumps again
        if not self._admission.has_memory():
            self._later()
            return
        chosen: list[Box] = []
        items: list[StartSandbox] = []
        while self._queue and len(chosen) < room:
            box = self._queue.popleft()
            if box.item is not None and not box.life.record.state.ended:
                chosen.append(box)
                items.append(box.item)
        for box in chosen:
            box.stage = Stage.SENT
            box.attempts += 1
        sandboxes.queued -= len(chosen)
        sandboxes.starting += len(chosen)
        for group in self._backend.groups(items, epoch=sandboxes.epoch):
            launcher.connection.spawn(group.common, group.items)

    def close(self) -> None:
        """Start nothing more."""
        self.closed = True
        if self._again is not None:
            self._again.cancel()
        self._queue.clear()

    async def _submit(self, request: StartBatch, batch: Batch) -> None:
        boxes: list[Box] = []
        for item in request.items:
            if item.record.id in self._sandboxes.boxes or item.record.id in self._sandboxes.ended:
                error = InternalError(f"sandbox {item.record.id} was started before", sandbox_id=item.record.id)
                batch.missing += 1
                batch.deliver(StartResult(id=item.record.id, error=error.body()))
                continue
            box = Box(copy_record(item.record), item, batch, patient=request.wait)
            boxes.append(box)
            batch.add(box)
            self._sandboxes.add(box)
        await self._admit(boxes)
        self.pump()

    async def _admit(self, boxes: Sequence[Box]) -> None:
        last: tuple[str, object] | None = None
        refusal: DsecError | None = None
        for box in boxes:
            item = box.item
            if item is None or box.life.record.state.ended:
                continue  # stopped while others were prepared
            shape = (item.record.project, item.spec)
            if last is None or last != shape:
                last, refusal = shape, await self._refusal(item)
            error = refusal or self._no_room(box)
            if error is None:
                self._queue.append(box)  # one that was stopped meanwhile is passed over by `pump`
            elif box.batch is not None:
                self._sandboxes.fail(box, EndReason.ADMISSION, error)

    async def _refusal(self, item: StartSandbox) -> DsecError | None:
        """Why no sandbox of this shape can be started here, or None when everything is ready for it."""
        try:
            self._admission.check(item.spec)
            self._backend.check(item)
            await self._prepare(item)
        except DsecError as error:
            return error
        except Exception as error:
            log.exception("preparing a start failed")
            return InternalError(f"the node could not prepare the sandbox: {error}")
        return None

    def _no_room(self, box: Box) -> DsecError | None:
        if self.closed:
            return NoCapacity("the edge is stopping", resource="edge", retry_after=5.0)
        if len(self._queue) >= self._max_queued or self._backlog() > _BACKLOG:
            return NoCapacity(
                f"{len(self._queue)} sandboxes wait already; try later", resource="queue", retry_after=5.0
            )
        if box.patient:
            return None
        living = len(self._sandboxes.boxes) - self._sandboxes.queued + len(self._queue)
        if living >= self._admission.max_sandboxes:
            return NoCapacity(
                f"sandboxes: the node holds {living}, its limit (descriptors); stop some or wait",
                resource="sandboxes",
                retry_after=2.0,
            )
        return None

    def _expire(self, batch: Batch) -> None:
        for box in list(batch.open.values()):
            if box.batch is None:
                continue
            error: DsecError = DeadlineExceeded(
                "the sandbox was not started within its timeout", sandbox_id=box.id, sandbox_survived=False
            )
            if box.stage is Stage.QUEUED:
                error = NoCapacity(
                    "no room for the sandbox within its timeout",
                    sandbox_id=box.id,
                    resource="sandboxes",
                    retry_after=2.0,
                )
            box.batch = None
            batch.deliver(StartResult(id=box.id, error=error.body()))
            self._sandboxes.stop(box, EndReason.TIMEOUT, error.message)

    def _later(self) -> None:
        if self._again is None and not self.closed:
            self._again = asyncio.get_running_loop().call_later(_AGAIN_S, self._try_again)

    def _try_again(self) -> None:
        self._again = None
        self.pump()
