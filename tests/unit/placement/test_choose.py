"""Placement's decisions."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from dsec.api.control import NodeQuery
from dsec.api.errors import NoCapacity, Unsupported
from dsec.api.types import NodeInfo
from dsec.bus import LocalBus
from dsec.placement import NodeView, Overlay, PlacementRequest, Placer, Refusal, choose
from dsec.placement.choose import OVERLAY_S

GIB = 1 << 30


def node(edge: str = "aaaa", *, healthy: bool = True, **fields: Any) -> NodeView:
    values: dict[str, Any] = {
        "edge": edge, "epoch": 1, "kinds": ["container"], "sandboxes": 0, "cpus": 4, "memory": 16 * GIB,
        "memory_available": 16 * GIB,
    }  # fmt: skip
    return NodeView(info=NodeInfo(**(values | fields)), healthy=healthy)


def request(**fields: Any) -> PlacementRequest:
    values: dict[str, Any] = {"kind": "container", "cpus": 1.0, "memory_bytes": GIB}
    return PlacementRequest(**(values | fields))


def refusal(nodes: list[NodeView], asked: PlacementRequest) -> Any:
    outcome = choose(nodes, asked, overlay=Overlay(), rng=random.Random(1))
    assert isinstance(outcome, Refusal)
    return outcome.error


def test_one_node_that_can_is_taken() -> None:
    chosen = choose([node()], request(), overlay=Overlay(), rng=random.Random(1))
    assert isinstance(chosen, NodeInfo)
    assert chosen.edge == "aaaa"


def test_refusals_say_why() -> None:
    assert isinstance(refusal([], request()), NoCapacity)
    assert isinstance(refusal([node(healthy=False)], request()), NoCapacity)
    assert isinstance(refusal([node()], request(kind="microvm")), Unsupported)
    memory = refusal([node()], request(memory_bytes=17 * GIB))
    assert isinstance(memory, NoCapacity)
    assert memory.details["resource"] == "memory"
    assert not memory.retryable
    cpus = refusal([node()], request(cpus=5.0))
    assert cpus.details["resource"] == "cpus"
    assert "5" in str(cpus)


def test_own_choices_count_until_the_nodes_say_so() -> None:
    nodes, overlay, rng = [node("aaaa"), node("bbbb")], Overlay(), random.Random(1)
    counts = {"aaaa": 0, "bbbb": 0}
    for _ in range(40):
        chosen = choose(nodes, request(), overlay=overlay, rng=rng)
        assert isinstance(chosen, NodeInfo)
        overlay.add(chosen.edge, request(), now=0.0)
        counts[chosen.edge] += 1
    assert counts == {"aaaa": 20, "bbbb": 20}
    overlay.expire(now=OVERLAY_S)
    assert (overlay.sandboxes("aaaa"), overlay.memory("bbbb")) == (0, 0)


def test_sampling_spreads_over_many_nodes() -> None:
    nodes, overlay, rng = [node(f"n{n:03}") for n in range(50)], Overlay(), random.Random(1)
    for _ in range(1000):
        chosen = choose(nodes, request(memory_bytes=1), overlay=overlay, rng=rng)
        assert isinstance(chosen, NodeInfo)
        overlay.add(chosen.edge, request(memory_bytes=1), now=0.0)
    counts = [overlay.sandboxes(f"n{n:03}") for n in range(50)]
    assert min(counts) > 10
    assert max(counts) < 30


def test_the_fuller_node_is_not_taken() -> None:
    nodes = [node("aaaa", memory_available=2 * GIB), node("bbbb", memory_available=12 * GIB, sandboxes=50)]
    chosen = choose(nodes, request(), overlay=Overlay(), rng=random.Random(1))
    assert isinstance(chosen, NodeInfo)
    assert chosen.edge == "bbbb"


async def test_callers_that_come_at_once_share_the_first_answer() -> None:
    bus, asked = LocalBus(), 0

    async def say(_: NodeQuery) -> NodeInfo:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.01)
        return node().info

    async with bus.serve("edge.aaaa.node", say):
        placer = Placer(bus, ["aaaa"])
        async with asyncio.TaskGroup() as group:
            for _ in range(10):
                group.create_task(placer.place(kind="container", cpus=1.0, memory_bytes=1, count=1))
        assert asked == 1
    assert await placer.nodes() == []
    with pytest.raises(NoCapacity, match="no node is up"):
        await placer.place(kind="container", cpus=1.0, memory_bytes=1, count=1)
