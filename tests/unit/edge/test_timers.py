"""Deadlines of many sandboxes on one timer."""

from __future__ import annotations

import asyncio
import time

from tests.unit.edge.peer import until

from dsec.edge.timers import Timers

NEVER = float("inf")


class Item:
    def __init__(self) -> None:
        self.due = NEVER


async def test_items_fire_in_their_order_and_once() -> None:
    fired: list[Item] = []
    timers: Timers[Item] = Timers(fired.extend, time.monotonic)
    items = [Item() for _ in range(50)]
    now = time.monotonic()
    for number, item in enumerate(reversed(items)):
        timers.schedule(item, now + 0.02 + number * 0.001)
    await until(lambda: len(fired) == 50)
    assert fired == list(reversed(items))
    assert all(item.due == NEVER for item in items)
    timers.close()


async def test_the_last_schedule_counts() -> None:
    fired: list[Item] = []
    timers: Timers[Item] = Timers(fired.extend, time.monotonic)
    early, late, never = Item(), Item(), Item()
    now = time.monotonic()
    timers.schedule(early, now + 60)
    timers.schedule(early, now + 0.01)
    timers.schedule(late, now + 0.01)
    timers.schedule(late, now + 60)
    timers.schedule(never, now + 0.01)
    timers.schedule(never, NEVER)
    await until(lambda: bool(fired))
    await asyncio.sleep(0.02)
    assert fired == [early]
    timers.close()


async def test_a_fault_in_one_firing_does_not_stop_the_next() -> None:
    fired: list[Item] = []

    def fire(items: list[Item]) -> None:
        fired.extend(items)
        if len(fired) == 1:
            raise RuntimeError("boom")

    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))
    timers: Timers[Item] = Timers(fire, time.monotonic)
    first, second = Item(), Item()
    timers.schedule(first, time.monotonic() + 0.005)
    timers.schedule(second, time.monotonic() + 0.02)
    await until(lambda: len(fired) == 2)
    assert len(failures) == 1
    timers.close()


async def test_those_that_never_come_due_do_not_pile_up() -> None:
    timers: Timers[Item] = Timers(lambda items: None, time.monotonic)
    for _ in range(20_000):
        item = Item()
        timers.schedule(item, time.monotonic() + 300)
        timers.schedule(item, NEVER)
    assert len(timers._heap) < 2000
    timers.close()
