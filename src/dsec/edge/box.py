"""One sandbox as the edge holds it: its lifecycle and its kernel objects (pidfd, channel), of which it is the one owner."""

from __future__ import annotations

import asyncio
import enum
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from dsec.api.control import StartSandbox
from dsec.api.errors import DsecError, SandboxGone
from dsec.api.types import SandboxRecord
from dsec.edge.channel import Channel
from dsec.edge.lifecycle import Lifecycle

if TYPE_CHECKING:
    from dsec.edge.starts import Batch


copy_record: Final[Callable[[SandboxRecord], SandboxRecord]] = SandboxRecord.__copy__  # type: ignore[attr-defined]
"""A shallow copy of a record. `copy.copy` takes ten times as long to find this same method."""


class Stage(enum.Enum):
    """How far the launcher is with it."""

    QUEUED = "queued"
    SENT = "sent"
    LIVE = "live"


class Box:
    """A living sandbox. `item` is there until it runs; `operations` counts what was asked of it (its sequence number)."""

    __slots__ = (
        "attempts",
        "batch",
        "channel",
        "due",
        "enders",
        "item",
        "kill_tries",
        "life",
        "loss",
        "operations",
        "patient",
        "pid",
        "pidfd",
        "slot",
        "stage",
    )

    def __init__(self, record: SandboxRecord, item: StartSandbox | None, batch: Batch | None, *, patient: bool) -> None:
        self.life = Lifecycle(record)
        self.item = item
        self.batch = batch
        self.patient = patient
        self.stage = Stage.QUEUED
        self.attempts = 0
        self.kill_tries = 0
        self.slot = -1
        self.pid = 0
        self.pidfd = -1
        self.channel: Channel | None = None
        self.operations = 0
        self.due = float("inf")
        self.loss: asyncio.TimerHandle | None = None
        self.enders: list[Ending] = []

    @property
    def id(self) -> str:
        """The sandbox's id."""
        return self.life.record.id

    def snapshot(self) -> SandboxRecord:
        """A copy of the record, for others."""
        return copy_record(self.life.record)

    def gone(self) -> DsecError:
        """The error for calls on it, now that it ends or has ended."""
        return gone_error(self.id, self.life.gone_reason or "channel_lost", self.life.record.detail or self.life.detail)

    def close(self) -> None:
        """Close what it owns; running calls end with `gone()`. Idempotent."""
        if self.loss is not None:
            self.loss.cancel()
            self.loss = None
        if self.channel is not None:
            self.channel.close(self.gone)
            self.channel = None
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Ending:
    """Waits until a number of sandboxes have ended."""

    __slots__ = ("future", "missing")

    def __init__(self) -> None:
        self.missing = 0
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add(self, box: Box) -> None:
        """Wait for `box` too."""
        self.missing += 1
        box.enders.append(self)

    def one_ended(self) -> None:
        """One of them has ended."""
        self.missing -= 1
        if self.missing == 0 and not self.future.done():
            self.future.set_result(None)

    async def wait(self, *, timeout_s: float) -> None:
        """Return when all have ended; raises TimeoutError."""
        if self.missing:
            async with asyncio.timeout(timeout_s):
                await self.future


def gone_error(sandbox: str, reason: str, detail: str | None) -> SandboxGone:
    """The error for calls on a sandbox that has ended."""
    text = f"sandbox {sandbox} has ended: {reason}" + (f" ({detail})" if detail else "")
    details: dict[str, Any] = {"reason": reason}
    return SandboxGone(text, sandbox_id=sandbox, sandbox_survived=False, **details)
