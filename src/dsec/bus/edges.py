"""The subjects on which an edge answers, and what it must be able to do for that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from dsec.api.control import (
    NodeQuery,
    SetTimeouts,
    StartBatch,
    StartResult,
    StopResult,
    StopSandboxes,
    UsageQuery,
    UsageReply,
)
from dsec.api.types import NodeInfo, SandboxRecord
from dsec.bus.interface import Bus


class EdgeControl(Protocol):
    """What an edge does when asked over the bus."""

    def start_batch(self, batch: StartBatch) -> AsyncIterator[list[StartResult]]:
        """Start sandboxes; results come in groups as they become ready."""

    async def stop(self, request: StopSandboxes) -> list[StopResult]:
        """Stop sandboxes; returns when they are gone."""

    async def set_timeouts(self, request: SetTimeouts) -> SandboxRecord:
        """Set the TTLs of a sandbox."""

    async def usage(self, query: UsageQuery) -> UsageReply:
        """What a sandbox uses."""

    async def node(self, query: NodeQuery) -> NodeInfo:
        """What this edge is and how full."""


def start_subject(edge: str) -> str:
    """Takes StartBatch, streams lists of StartResult."""
    return f"edge.{edge}.start"


def stop_subject(edge: str) -> str:
    """Takes StopSandboxes, answers with a list of StopResult."""
    return f"edge.{edge}.stop"


def timeouts_subject(edge: str) -> str:
    """Takes SetTimeouts, answers with the SandboxRecord."""
    return f"edge.{edge}.timeouts"


def usage_subject(edge: str) -> str:
    """Takes UsageQuery, answers with UsageReply."""
    return f"edge.{edge}.usage"


def node_subject(edge: str) -> str:
    """Takes NodeQuery, answers with NodeInfo."""
    return f"edge.{edge}.node"


@asynccontextmanager
async def serve_edge(bus: Bus, code: str, edge: EdgeControl) -> AsyncIterator[None]:
    """Answer for `edge` on the bus while the context is open."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(bus.serve(start_subject(code), stream=edge.start_batch))
        await stack.enter_async_context(bus.serve(stop_subject(code), edge.stop))
        await stack.enter_async_context(bus.serve(timeouts_subject(code), edge.set_timeouts))
        await stack.enter_async_context(bus.serve(usage_subject(code), edge.usage))
        await stack.enter_async_context(bus.serve(node_subject(code), edge.node))
        yield
