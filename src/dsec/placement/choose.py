"""Which node a request goes to: a pure function over what is known of the nodes. It decides; somebody else asks and sends.

The edge has the last word: what is chosen here may still be refused there.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dsec.api.errors import DsecError, NoCapacity, Unsupported
from dsec.api.types import NodeInfo

SAMPLE = 2
"""Nodes compared: two random choices keep the fullest node within a few sandboxes of the emptiest."""
OVERLAY_S = 2.0
"""How long an own choice counts on top of what a node last said: by then its answer contains it."""
_RETRY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node as last heard of."""

    info: NodeInfo
    healthy: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """What is to be placed on one node: `count` sandboxes alike."""

    kind: str
    cpus: float
    memory_bytes: int
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why no node was chosen; `error` is for the client."""

    error: DsecError


@dataclass(slots=True)
class Overlay:
    """Own choices of the last moments, which the nodes' figures do not show yet."""

    _recent: deque[tuple[float, str, int, int]] = field(default_factory=deque)
    _sandboxes: dict[str, int] = field(default_factory=dict)
    _memory: dict[str, int] = field(default_factory=dict)

    def add(self, edge: str, request: PlacementRequest, *, now: float) -> None:
        """Count a choice."""
        memory = request.memory_bytes * request.count
        self._recent.append((now + OVERLAY_S, edge, request.count, memory))
        self._sandboxes[edge] = self._sandboxes.get(edge, 0) + request.count
        self._memory[edge] = self._memory.get(edge, 0) + memory

    def expire(self, *, now: float) -> None:
        """Forget what the nodes' figures contain by now."""
        while self._recent and self._recent[0][0] <= now:
            _, edge, count, memory = self._recent.popleft()
            self._sandboxes[edge] -= count
            self._memory[edge] -= memory

    def sandboxes(self, edge: str) -> int:
        """Sandboxes sent to `edge` lately."""
        return self._sandboxes.get(edge, 0)

    def memory(self, edge: str) -> int:
        """Bytes of memory limits sent to `edge` lately."""
        return self._memory.get(edge, 0)


def choose(
    nodes: Sequence[NodeView], request: PlacementRequest, *, overlay: Overlay, rng: random.Random
) -> NodeInfo | Refusal:
    """The node that takes `request`, or why none does. The caller adds the choice to the overlay."""
    healthy = [node.info for node in nodes if node.healthy]
    if not healthy:
        return Refusal(error=NoCapacity("no node is up; start one with 'dsec up'", retry_after=_RETRY_S))
    able = [info for info in healthy if request.kind in info.kinds]
    if not able:
        return Refusal(
            error=Unsupported(f"no node of this fleet starts sandboxes of kind {request.kind!r}; see GET /v1/nodes")
        )
    large = [info for info in able if request.cpus <= info.cpus]
    if not large:
        most = max(info.cpus for info in able)
        return Refusal(error=_too_large("cpus", f"{request.cpus:g}", f"{most}"))
    large_too = [info for info in large if request.memory_bytes <= info.memory]
    if not large_too:
        most = max(info.memory for info in large)
        return Refusal(error=_too_large("memory", f"{request.memory_bytes} bytes", f"{most} bytes"))
    sample = large_too if len(large_too) <= SAMPLE else rng.sample(large_too, SAMPLE)
    return min(sample, key=lambda info: _fullness(info, overlay))


def _fullness(info: NodeInfo, overlay: Overlay) -> tuple[float, float]:
    """How full a node is, lower is better: by memory really used, then by sandboxes for each CPU."""
    used = info.memory - info.memory_available + overlay.memory(info.edge)
    per_cpu = (info.sandboxes + overlay.sandboxes(info.edge)) / max(info.cpus, 1)
    # Steps of an eighth, so that nodes about equally full are told apart by their sandboxes.
    return (round(8 * used / max(info.memory, 1)), per_cpu)


def _too_large(resource: str, asked: str, most: str) -> NoCapacity:
    error = NoCapacity(
        f"no node has room for {resource}={asked} in one sandbox: the largest has {most}; ask for less",
        resource=resource,
    )
    error.retryable = False  # no wait makes a node larger
    return error
