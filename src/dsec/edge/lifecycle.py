"""What becomes of a sandbox: events in, actions out. No I/O, no clock: `now` comes with each event.

The machine changes its record's state, reason, times and `seq`; whoever drives it performs the actions, in order. The one rule:
nothing but this module assigns `record.state`.

    creating -> running -> stopping -> stopped(requested | idle | lifetime)
    creating | running -> failed(oom | timeout | channel_lost | crashed | cancelled | ...)

Idle: no request that needs the guest, no running call, no running `start`ed process. The edge counts the first two (`begin`, `done`);
the guest knows the third, so a sandbox whose time is up is asked (ASK_GUEST) before it is stopped.
"""

from __future__ import annotations

import enum
from typing import Final

from dsec.api.types import EndReason, SandboxRecord, State


class Action(enum.Enum):
    """What the driver has to do."""

    PUBLISH = "publish"
    """Journal the record and tell the store."""
    KILL = "kill"
    """End running calls with SandboxGone and have the launcher end the sandbox."""
    ASK_GUEST = "ask_guest"
    """Learn which processes run, then call `idle_checked`."""
    RELEASE = "release"
    """Close what belongs to the sandbox: it has ended."""


Actions = tuple[Action, ...]

_NOTHING: Final[Actions] = ()
_PUBLISH: Final[Actions] = (Action.PUBLISH,)
_KILL: Final[Actions] = (Action.KILL,)
_ASK: Final[Actions] = (Action.ASK_GUEST,)
_ENDED: Final[Actions] = (Action.PUBLISH, Action.RELEASE)

_FOREVER: Final = float("inf")
_STOPS: Final = frozenset({EndReason.REQUESTED, EndReason.IDLE, EndReason.LIFETIME})
"""Reasons of an end that was wanted: it is `stopped`; every other one is `failed`."""
IDLE_CHECK_S: Final = 15.0
"""A guest that was asked about its processes is asked again after this, if it has not answered."""


class Lifecycle:
    """One sandbox's state and time limits. `record` is this machine's own; others get copies."""

    __slots__ = ("busy", "checking_since", "detail", "idle_since", "processes", "record", "stop_reason")

    def __init__(self, record: SandboxRecord) -> None:
        self.record = record
        self.busy = 0
        """Requests and calls that need the guest now."""
        self.processes = 0
        """Started processes that the guest said were running, each with a `wait` out."""
        self.idle_since = record.created_at
        self.checking_since: float | None = None
        self.stop_reason: EndReason | None = None
        self.detail: str | None = None

    @property
    def gone_reason(self) -> str | None:
        """Why calls are refused: the reason of the end, also while it is being stopped; None while it lives."""
        if self.stop_reason is not None:
            return self.stop_reason.value
        return (self.record.reason or EndReason.CRASHED).value if self.record.state.ended else None

    def started(self, now: float, *, epoch: int) -> Actions:
        """The guest has answered: it runs. A sandbox that was to be stopped meanwhile is killed instead."""
        record = self.record
        record.epoch = epoch
        record.started_at = now
        self.idle_since = now
        if self.stop_reason is not None:
            record.state = State.STOPPING
            return _KILL
        record.state = State.RUNNING
        record.seq += 1
        return _PUBLISH

    def adopted(self, now: float, *, epoch: int) -> Actions:
        """A new edge has taken it over. Its idle time counts from now: what happened meanwhile nobody saw."""
        self.idle_since = now
        self.record.epoch = epoch
        self.record.state = State.RUNNING
        self.record.started_at = self.record.started_at or now
        self.record.seq += 1
        return _PUBLISH

    def stop(self, reason: EndReason, detail: str | None = None) -> Actions:
        """Stop it: kills a running one, marks one that is being created (see `started`). Repeats change nothing."""
        state = self.record.state
        if self.stop_reason is not None or state.ended:
            return _NOTHING
        self.stop_reason = reason
        self.detail = detail
        if state is State.RUNNING:
            self.record.state = State.STOPPING
            return _KILL
        return _NOTHING

    def killed(self, now: float, *, out_of_memory: bool = False) -> Actions:
        """The launcher has ended all of it, as asked. `out_of_memory`: the kernel had killed something in it for want of memory."""
        reason = self.stop_reason or EndReason.REQUESTED
        if out_of_memory and reason in (EndReason.CHANNEL_LOST, EndReason.CRASHED):
            reason = EndReason.OOM
        return self._end(now, reason, self.detail)

    def failed(self, now: float, reason: EndReason, detail: str | None) -> Actions:
        """It could not be started, or it ended by itself. One that was to be stopped ends for that reason."""
        if self.stop_reason is not None:
            return self.killed(now)
        return self._end(now, reason, detail)

    def begin(self) -> None:
        """A request that needs the guest starts."""
        self.busy += 1

    def done(self, now: float) -> None:
        """A request that needs the guest has ended."""
        self.busy -= 1
        self.idle_since = now

    def process_ended(self, now: float) -> None:
        """A started process, of those that `idle_checked` told of, has ended."""
        self.processes -= 1
        self.idle_since = max(self.idle_since, now)

    def set_timeouts(self, now: float, *, idle_s: float | None, lifetime_s: float | None) -> Actions:
        """New limits: idle counts anew from now, the lifetime from the creation."""
        record = self.record
        record.idle_timeout = idle_s
        record.max_lifetime = lifetime_s
        record.expires_at = None if lifetime_s is None else record.created_at + lifetime_s
        self.idle_since = now
        record.seq += 1
        return _PUBLISH

    def next_deadline(self, now: float) -> float:
        """When `tick` should be called next (infinite: never); early calls do no harm."""
        record = self.record
        if record.state is not State.RUNNING:
            return _FOREVER
        expires = _FOREVER if record.expires_at is None else record.expires_at
        if record.idle_timeout is None:
            return expires
        if self.checking_since is not None:
            return min(expires, self.checking_since + IDLE_CHECK_S)
        if self.busy or self.processes:
            # Nobody is told when work ends, so look again after the shortest time in which it could be idle for long enough.
            return min(expires, now + record.idle_timeout)
        return min(expires, self.idle_since + record.idle_timeout)

    def tick(self, now: float) -> Actions:
        """Time has passed: what is due."""
        record = self.record
        if record.state is not State.RUNNING:
            return _NOTHING
        if record.expires_at is not None and now >= record.expires_at:
            return self.stop(EndReason.LIFETIME)
        if record.idle_timeout is None or self.busy or self.processes or now < self.idle_since + record.idle_timeout:
            return _NOTHING
        if self.checking_since is not None and now < self.checking_since + IDLE_CHECK_S:
            return _NOTHING
        self.checking_since = now
        return _ASK

    def idle_checked(self, now: float, *, running: int, last_end: float) -> Actions:
        """The guest's answer: `running` processes (each of which will be followed by `process_ended`), the last one ended at `last_end`."""
        self.checking_since = None
        self.processes += running
        self.idle_since = max(self.idle_since, min(last_end, now))
        record = self.record
        if record.state is not State.RUNNING or record.idle_timeout is None or self.busy or self.processes:
            return _NOTHING
        return self.stop(EndReason.IDLE) if now >= self.idle_since + record.idle_timeout else _NOTHING

    def _end(self, now: float, reason: EndReason, detail: str | None) -> Actions:
        record = self.record
        if record.state.ended:
            return _NOTHING
        record.state = State.STOPPED if reason in _STOPS else State.FAILED
        record.reason = reason
        record.detail = detail
        record.ended_at = now
        record.seq += 1
        return _ENDED
