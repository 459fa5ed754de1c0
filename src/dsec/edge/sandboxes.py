"""All living sandboxes of an edge: performs what their lifecycles decide, and takes in what the launcher and the channels report.

Owns the boxes, the kills that are out and the memory of those that ended. Starting is `starts.py`'s work. Everything here is
synchronous and runs in the loop's thread: one turn, one message to the launcher, one journal write, however many sandboxes.
"""

from __future__ import annotations

import asyncio
import logging
import select
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

from dsec.api import wire
from dsec.api.control import StartResult
from dsec.api.dataplane import Message
from dsec.api.errors import DsecError, InternalError, NoCapacity
from dsec.api.types import EndReason, SandboxRecord, State
from dsec.edge.box import Box, Stage
from dsec.edge.cgroups import Cgroups
from dsec.edge.channel import Channel
from dsec.edge.journal import Journal, Kept
from dsec.edge.launcher import Launcher
from dsec.edge.launchwire import Connection, Exited, Killed, Refused, Spawned, close_all
from dsec.edge.lifecycle import Action, Actions
from dsec.edge.poller import Poller
from dsec.edge.publisher import Publisher
from dsec.edge.timers import Timers

log = logging.getLogger(__name__)

_ENDED_KEPT: Final = 10_000
"""Ended sandboxes whose reason is remembered here; the store knows them all."""
_LOSS_GRACE_S: Final = 1.0
"""A channel closes a moment before the launcher reports the exit, which tells why; after this nobody will."""
_KEEP_GATHER_S: Final = 0.002
_EVENTS: Final = {state: f"sandbox.{state.value}" for state in State}
_KILL_RETRY_S: Final = 0.5
_KILL_TRIES: Final = 60


class Rooms(Protocol):
    """Who wants to know that there is room again, and gets sandboxes back that the launcher had no room for."""

    def pump(self) -> None:
        """Start what waits."""

    def again(self, box: Box) -> None:
        """Put `box` back in front of the queue, to be tried a little later."""


class Sandboxes:
    """The living sandboxes, by id, and recently ended ones. Implements `LaunchEvents`."""

    def __init__(
        self,
        *,
        poller: Poller,
        journal: Journal,
        publisher: Publisher,
        cgroups: Cgroups,
        clock: Callable[[], float],
        on_launcher_lost: Callable[[], None],
    ) -> None:
        self.boxes: dict[str, Box] = {}
        self.ended: OrderedDict[str, SandboxRecord] = OrderedDict()
        self.unacknowledged: dict[str, SandboxRecord] = {}
        """Ended ones that the store has not confirmed: the journal keeps them."""
        self.starting = 0
        self.queued = 0
        self.launcher: Launcher | None = None
        self.rooms: Rooms | None = None
        self.clock = clock
        self._poller = poller
        self._journal = journal
        self._publisher = publisher
        self._cgroups = cgroups
        self._on_launcher_lost = on_launcher_lost
        self._kills: list[str] = []
        self._turn_planned = False
        self._keeping_planned = False
        self._kept_at = 0.0
        self._timers: Timers[Box] = Timers(self._tick, clock)

    @property
    def epoch(self) -> int:
        """This run's number."""
        return self._journal.epoch

    def kept(self) -> list[Kept]:
        """What the journal has to hold now."""
        living = [Kept(b.life.record, b.slot) for b in self.boxes.values() if b.stage is Stage.LIVE]
        return living + [Kept(record) for record in self.unacknowledged.values()]

    def committed(self, ids: list[str]) -> None:
        """The store knows that these have ended."""
        for sandbox in ids:
            self.unacknowledged.pop(sandbox, None)
        self._journal.forget(ids)
        self._plan_keeping()

    def add(self, box: Box) -> None:
        """Take in a box that is to be started."""
        self.boxes[box.id] = box
        self.queued += 1

    def stop(self, box: Box, reason: EndReason, detail: str | None = None) -> None:
        """Stop a sandbox in whatever state; one that only waits to be started ends at once."""
        actions = box.life.stop(reason, detail)
        if box.stage is Stage.QUEUED:
            actions = box.life.failed(self.clock(), reason, detail)
        self.act(box, actions)

    def fail(self, box: Box, reason: EndReason, error: DsecError) -> None:
        """End a sandbox that could not be started; its batch gets `error`."""
        self._deliver(box, error)
        self.act(box, box.life.failed(self.clock(), reason, error.message))

    def act(self, box: Box, actions: Actions, event: str | None = None) -> None:
        """Perform what the lifecycle decided."""
        for action in actions:
            if action is Action.PUBLISH:
                self._publish(box, event)
            elif action is Action.KILL:
                if box.channel is not None:
                    box.channel.close(box.gone)
                    box.channel = None
                self._kills.append(box.id)
                self._plan_turn()
            elif action is Action.ASK_GUEST:
                self._ask_guest(box)
            else:
                self._release(box)

    def retell(self, box: Box) -> None:
        """Tell the store again of an end that it may not have heard of."""
        self.ended[box.id] = box.life.record
        self._publish(box, None)

    def watch_time(self, box: Box) -> None:
        """Schedule the sandbox's next deadline."""
        self._timers.schedule(box, box.life.next_deadline(self.clock()))

    def attach(self, box: Box, channel: int, pidfd: int) -> Channel:
        """Make `box` the owner of its kernel objects."""
        box.stage = Stage.LIVE
        box.pidfd = pidfd
        box.channel = Channel(self._poller, channel, on_lost=partial(self._channel_lost, box))
        return box.channel

    # What the launcher reports.

    def spawned(self, results: Sequence[Spawned | Refused]) -> None:
        """Sandboxes run, or could not be started."""
        now = self.clock()
        for result in results:
            box = self.boxes.get(result.id)
            if isinstance(result, Refused):
                if box is not None and box.stage is Stage.SENT:
                    self._refused(box, result.error)
                continue
            if box is None or box.stage is not Stage.SENT:
                log.error("the launcher started a sandbox that nobody asked for", extra={"sandbox_id": result.id})
                close_all((result.pidfd, result.channel))
                self._kills.append(result.id)
                self._plan_turn()
                continue
            self._runs(box, result, now)
        self._journal.flush()  # before anybody hears of it: readers wake after this
        if self.rooms is not None:
            self.rooms.pump()

    def killed(self, results: Sequence[Killed]) -> None:
        """Sandboxes are gone, as asked."""
        now = self.clock()
        for result in results:
            box = self.boxes.get(result.id)
            if box is None:
                continue
            if box.stage is Stage.SENT:
                self._unsent(box)
            elif result.error is not None and result.error.details.get("launch_code") != "not_found":
                self._kill_failed(box, result.error)
            else:
                self.act(box, box.life.killed(now, out_of_memory=result.oom_kills > 0))
        self._journal.flush()
        if self.rooms is not None:
            self.rooms.pump()

    def exited(self, event: Exited) -> None:
        """A sandbox's first process has ended by itself."""
        box = self.boxes.get(event.id)
        if box is None or box.stage is not Stage.LIVE:
            return
        if event.oom_kills and event.status in (None, -9, 137):
            reason, detail = EndReason.OOM, "the guest was killed for want of memory"
        elif event.status is not None and event.status < 0:
            reason, detail = EndReason.CRASHED, f"the guest was killed by signal {-event.status}"
        else:
            reason, detail = EndReason.CRASHED, f"the guest ended with {event.status}"
        self.act(box, box.life.failed(self.clock(), reason, detail))
        if self.rooms is not None:
            self.rooms.pump()

    def launcher_lost(self, connection: Connection) -> None:
        """The launcher is gone; a successor is to be started."""
        assert self.launcher is not None
        if self.launcher.connection is connection:
            self.launcher.connection = None
            self._on_launcher_lost()

    def after_launcher(self) -> None:
        """Settle what was out at a launcher that died; its stray processes have been killed by their cgroups."""
        now = self.clock()
        for box in list(self.boxes.values()):
            if box.stage is Stage.SENT:
                self._unsent(box)
            elif box.life.record.state is State.STOPPING:
                self.act(box, box.life.killed(now))
        self._kills.clear()

    def after_reconnect(self) -> None:
        """Settle what was out when the connection was lost: whatever was being started or ended is to be ended at the launcher.

        `killed` then starts the former anew; the launcher reports the end of what it has not (any more) too.
        """
        self._kills += [
            box.id for box in self.boxes.values() if box.stage is Stage.SENT or box.life.record.state is State.STOPPING
        ]
        self._plan_turn()

    def close(self) -> None:
        """Close every descriptor; the sandboxes run on. Calls that are out fail as their channel closes."""
        self._timers.close()
        self._journal.flush()
        self._publisher.kick()
        for box in self.boxes.values():
            box.close()

    def _runs(self, box: Box, result: Spawned, now: float) -> None:
        self.starting -= 1
        box.pid = result.pid
        box.slot = result.slot
        self.attach(box, result.channel, result.pidfd)
        self.act(box, box.life.started(now, epoch=self.epoch))
        if box.life.record.state is not State.RUNNING:
            return  # it was to be stopped meanwhile
        if not _says_hello(result.hello, self.epoch):
            self.stop(box, EndReason.CHANNEL_LOST, "the guest did not answer as the protocol says")
            return
        box.item = None
        self.watch_time(box)
        if (batch := box.batch) is not None:
            box.batch = None
            batch.deliver(StartResult(id=box.id, record=box.snapshot()))

    def _unsent(self, box: Box) -> None:
        """What was sent to the launcher came to nothing: the sandbox is to be started anew, unless it was to be stopped."""
        self.starting -= 1
        box.stage = Stage.QUEUED
        self.queued += 1
        if box.life.stop_reason is not None:
            self.act(box, box.life.failed(self.clock(), EndReason.CRASHED, None))
        elif box.attempts >= 3:
            self.fail(box, EndReason.CRASHED, InternalError("the launcher was lost three times while starting it"))
        elif self.rooms is not None:
            self.rooms.again(box)

    def _refused(self, box: Box, error: DsecError) -> None:
        self.starting -= 1
        box.stage = Stage.QUEUED
        self.queued += 1
        if isinstance(error, NoCapacity) and box.patient and box.life.stop_reason is None and self.rooms is not None:
            self.rooms.again(box)
            return
        error.sandbox_id, error.sandbox_survived = box.id, False
        reason = EndReason.ADMISSION if isinstance(error, NoCapacity) else EndReason.CRASHED
        self.fail(box, reason, error)

    def _publish(self, box: Box, event: str | None) -> None:
        record = box.snapshot()
        if record.state.ended:
            self.unacknowledged[record.id] = record
        self._journal.put(record, slot=box.slot)
        data: dict[str, Any] = {} if record.reason is None else {"reason": record.reason.value}
        self._publisher.put((record, event or _EVENTS[record.state], data))
        self._plan_keeping()

    def _release(self, box: Box) -> None:
        record = box.life.record
        self._deliver(box, None)
        box.close()
        if box.stage is Stage.QUEUED:
            self.queued -= 1
        self._timers.schedule(box, float("inf"))
        del self.boxes[record.id]
        self.ended[record.id] = record
        if len(self.ended) > _ENDED_KEPT:
            self.ended.popitem(last=False)
        for ending in box.enders:
            ending.one_ended()

    def _deliver(self, box: Box, error: DsecError | None) -> None:
        if (batch := box.batch) is not None:
            box.batch = None
            batch.deliver(StartResult(id=box.id, error=(error or box.gone()).body()))

    def _kill_failed(self, box: Box, error: DsecError) -> None:
        box.kill_tries += 1
        log.warning("a sandbox could not be ended yet", extra={"sandbox_id": box.id, "error": error.message})
        if box.slot >= 0:
            self._cgroups.kill(box.slot)
        if box.kill_tries >= _KILL_TRIES:
            self.act(box, box.life.killed(self.clock()))
            return
        asyncio.get_running_loop().call_later(_KILL_RETRY_S, self._kill_again, box)

    def _kill_again(self, box: Box) -> None:
        if self.boxes.get(box.id) is box:
            self._kills.append(box.id)
            self._plan_turn()

    def _plan_turn(self) -> None:
        if not self._turn_planned:
            self._turn_planned = True
            asyncio.get_running_loop().call_soon(self._send_kills)

    def _plan_keeping(self) -> None:
        # At once when it is quiet; in a crowd, what comes within 2 ms is one write and one commit.
        if not self._keeping_planned:
            self._keeping_planned = True
            loop = asyncio.get_running_loop()
            wait_s = self._kept_at + _KEEP_GATHER_S - loop.time()
            if wait_s <= 0.0:
                loop.call_soon(self._keep)
            else:
                loop.call_later(wait_s, self._keep)

    def _keep(self) -> None:
        self._keeping_planned = False
        self._kept_at = asyncio.get_running_loop().time()
        self._journal.flush()
        self._publisher.kick()

    def _send_kills(self) -> None:
        self._turn_planned = False
        if self._kills and self.launcher is not None and self.launcher.connection is not None:
            kills, self._kills = self._kills, []
            self.launcher.connection.kill(kills)

    # Channels and time.

    def _channel_lost(self, box: Box, reason: str) -> None:
        if box.life.record.state is State.RUNNING and box.loss is None:
            box.loss = asyncio.get_running_loop().call_later(_LOSS_GRACE_S, self._give_up, box, reason)

    def _give_up(self, box: Box, reason: str) -> None:
        box.loss = None
        if self.launcher is None or self.launcher.connection is None:
            box.loss = asyncio.get_running_loop().call_later(_LOSS_GRACE_S, self._give_up, box, reason)
        elif box.pidfd >= 0 and _has_ended(box.pidfd):
            self.stop(box, EndReason.CRASHED, "the guest ended")
        else:
            self.stop(box, EndReason.CHANNEL_LOST, reason)

    def _tick(self, boxes: list[Box]) -> None:
        now = self.clock()
        for box in boxes:
            self.act(box, box.life.tick(now))
            self._timers.schedule(box, box.life.next_deadline(now))

    def _ask_guest(self, box: Box) -> None:
        if box.channel is None:
            return
        try:
            answer = box.channel.ask({"m": "ps"})
        except NoCapacity:
            return
        answer.add_done_callback(partial(self._guest_answered, box))

    def _guest_answered(self, box: Box, answer: asyncio.Future[Message]) -> None:
        if answer.cancelled() or answer.exception() is not None or box.channel is None:
            return
        running, last_end = 0, 0.0
        for process in answer.result().fields.get("processes") or ():
            if process.get("state") == "running":
                try:
                    ended = box.channel.ask({"m": "wait", "id": process["id"], "timeout_ms": None})
                except NoCapacity:
                    continue
                ended.add_done_callback(partial(self._process_ended, box))
                running += 1
            elif (result := process.get("result")) is not None:
                last_end = max(last_end, process["started_ms"] / 1000 + result["dur_us"] / 1e6)
        self.act(box, box.life.idle_checked(self.clock(), running=running, last_end=last_end))
        self.watch_time(box)

    def _process_ended(self, box: Box, ended: asyncio.Future[Message]) -> None:
        if not ended.cancelled():
            ended.exception()  # any answer means that it runs no more
        box.life.process_ended(self.clock())
        if box.channel is not None:
            self.watch_time(box)


def _says_hello(packet: bytes, epoch: int) -> bool:
    try:
        for stream, kind, payload in wire.frames(memoryview(packet)):
            return stream == 0 and kind == wire.HELLO and wire.fields_of(payload).get("epoch") == epoch
    except wire.WireError:
        pass
    return False


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
