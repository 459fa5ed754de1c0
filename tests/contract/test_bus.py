"""The contract of dsec.bus.Bus, run over every implementation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dsec.api.control import NodeQuery
from dsec.api.errors import Conflict, ConnectionFailed, DeadlineExceeded, NotFound
from dsec.api.types import NodeInfo
from dsec.bus import Bus, LocalBus

NODE = NodeInfo(edge="aaaa", epoch=1, kinds=["container"], sandboxes=0, cpus=1, memory=1, memory_available=1)


@pytest.fixture(params=["local"])
async def bus(request: pytest.FixtureRequest) -> Bus:
    return LocalBus()


async def answer(_: NodeQuery) -> NodeInfo:
    return NODE


async def test_call(bus: Bus) -> None:
    async with bus.serve("edge.aaaa.node", answer):
        assert await bus.call("edge.aaaa.node", NodeQuery(), NodeInfo, timeout=5) == NODE
        with pytest.raises(Conflict):
            async with bus.serve("edge.aaaa.node", answer):
                pass
        assert await bus.call("edge.aaaa.node", NodeQuery(), NodeInfo, timeout=5) == NODE
    with pytest.raises(ConnectionFailed):
        await bus.call("edge.aaaa.node", NodeQuery(), NodeInfo, timeout=5)


async def test_errors_reach_the_caller(bus: Bus) -> None:
    async def fail(_: NodeQuery) -> NodeInfo:
        raise NotFound("no such thing", sandbox_id="x")

    async with bus.serve("s", fail):
        with pytest.raises(NotFound) as caught:
            await bus.call("s", NodeQuery(), NodeInfo, timeout=5)
    assert caught.value.sandbox_id == "x"


async def test_a_call_has_a_deadline(bus: Bus) -> None:
    async def sleep(_: NodeQuery) -> NodeInfo:
        await asyncio.sleep(60)
        return NODE

    async with bus.serve("s", sleep):
        with pytest.raises(DeadlineExceeded):
            await bus.call("s", NodeQuery(), NodeInfo, timeout=0.02)


async def test_streams_come_in_order_and_end(bus: Bus) -> None:
    async def count(_: NodeQuery) -> AsyncIterator[list[int]]:
        for n in range(5):
            await asyncio.sleep(0)
            yield [n]

    async with bus.serve("s", stream=count):
        assert [r async for r in bus.stream("s", NodeQuery(), list, timeout=5)] == [[n] for n in range(5)]
    with pytest.raises(ConnectionFailed):
        async for _ in bus.stream("s", NodeQuery(), list, timeout=5):
            pass


async def test_a_stream_has_a_deadline_and_is_closed(bus: Bus) -> None:
    closed = asyncio.Event()

    async def stall(_: NodeQuery) -> AsyncIterator[list[int]]:
        try:
            yield [1]
            await asyncio.sleep(60)
        finally:
            closed.set()

    async with bus.serve("s", stream=stall):
        replies = bus.stream("s", NodeQuery(), list, timeout=0.05)
        assert await anext(replies) == [1]
        with pytest.raises(DeadlineExceeded):
            await anext(replies)
    await asyncio.wait_for(closed.wait(), 5)


async def test_notices_reach_those_who_listen(bus: Bus) -> None:
    bus.publish("events.default", 0)
    async with bus.subscribe("events.default") as exact, bus.subscribe("events.>") as all_of_them:
        bus.publish("events.default", 1)
        bus.publish("events.other", 2)
        bus.publish("nodes", 3)
        assert await exact.next(timeout=5) == 1
        assert [await all_of_them.next(timeout=5) for _ in range(2)] == [1, 2]
        with pytest.raises(TimeoutError):
            await exact.next(timeout=0.01)
        with pytest.raises(TimeoutError):
            await all_of_them.next(timeout=0.01)


async def test_a_slow_listener_loses_the_oldest_and_knows(bus: Bus) -> None:
    async with bus.subscribe("s") as listener:
        for n in range(3000):
            bus.publish("s", n)
        for _ in range(100):
            await asyncio.sleep(0)
            if listener.dropped:
                break
        first = await listener.next(timeout=5)
        assert first == listener.dropped > 0
        listener.clear()
        bus.publish("s", "new")
        assert await listener.next(timeout=5) == "new"
