"""Control messages between apiserver and edges. They cross the bus; bulk data never does."""

from __future__ import annotations

import msgspec

from dsec.api.errors import ErrorBody
from dsec.api.types import SandboxRecord, SandboxSpec, Usage


class StartSandbox(msgspec.Struct, kw_only=True, frozen=True):
    """One sandbox to start: its record as stored (state `creating`) and its checked spec."""

    record: SandboxRecord
    spec: SandboxSpec


class StartBatch(msgspec.Struct, kw_only=True, frozen=True):
    """Sandboxes to start on one edge. `deadline` is absolute (epoch seconds); `wait`: queue for room until then."""

    items: tuple[StartSandbox, ...]
    deadline: float
    wait: bool = True


class StartResult(msgspec.Struct, kw_only=True, frozen=True):
    """Outcome for one item of a StartBatch: `record` (running) or `error`."""

    id: str
    record: SandboxRecord | None = None
    error: ErrorBody | None = None


class StopSandboxes(msgspec.Struct, kw_only=True, frozen=True):
    """Stop these sandboxes (of `project`); those being created are cancelled. `reason` goes into the record."""

    ids: tuple[str, ...]
    reason: str = "requested"


class StopResult(msgspec.Struct, kw_only=True, frozen=True):
    """Outcome for one id of StopSandboxes; stopping an ended sandbox succeeds."""

    id: str
    record: SandboxRecord | None = None
    error: ErrorBody | None = None


class SetTimeouts(msgspec.Struct, kw_only=True, frozen=True):
    """New TTLs for a sandbox (both values as they shall be)."""

    id: str
    idle_timeout_s: float | None
    max_lifetime_s: float | None


class UsageQuery(msgspec.Struct, kw_only=True, frozen=True):
    """Ask for a sandbox's usage. Neither resumes it nor counts as activity."""

    id: str


class UsageReply(msgspec.Struct, kw_only=True, frozen=True):
    """Answer to UsageQuery."""

    usage: Usage


class NodeQuery(msgspec.Struct, kw_only=True, frozen=True):
    """Ask an edge what it is and how full."""
