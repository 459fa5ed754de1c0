"""Two daemons on one host: neither disturbs, sees or sweeps the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.support import raw_http
from tests.support.daemon import Daemon
from tests.support.timing import eventually, scaled

import dsec

# One worker runs them all: a host has room for 14 instances, and each test has one or two of its own.
pytestmark = [
    pytest.mark.system,
    pytest.mark.root,
    pytest.mark.timeout(scaled(180)),
    pytest.mark.xdist_group("instances"),
]


async def test_two_daemons_side_by_side(fresh_daemon: Callable[..., Daemon]) -> None:
    one, two = fresh_daemon(), fresh_daemon()
    assert one.instance != two.instance
    async with one.client() as first, two.client() as second:
        mine, theirs = await first.create("container"), await second.create("container")
        assert {entry.id for entry in (await first.list()).items} == {mine.id}
        assert {entry.id for entry in (await second.list()).items} == {theirs.id}
        with pytest.raises(dsec.NotFound):
            await second.get(mine.id)
        process = await theirs.start("sleep 600")
        answer = await raw_http.request(two.paths.api_socket, "GET", "/v1/sandboxes", key=one.key)
        assert answer.status == 401
        before = set(two.sandbox_pids())
        # Neither restarts with their sweeps, nor an orderly end of one, touch what the other has.
        await asyncio.to_thread(one.kill_edge)
        await asyncio.to_thread(one.start)
        assert (await mine.run("echo alive")).text == "alive\n"
        await asyncio.to_thread(one.kill_edge)
        await asyncio.to_thread(one.kill_launcher)
        await asyncio.to_thread(one.start)
        assert set(two.sandbox_pids()) == before
        await asyncio.to_thread(one.stop)
        assert set(two.sandbox_pids()) == before
        assert (await theirs.run("echo alive")).text == "alive\n"
        assert process.id in [entry.id for entry in await theirs.processes() if entry.state == "running"]


async def test_the_host_sweep_finds_the_dead_only(fresh_daemon: Callable[..., Daemon]) -> None:
    """A sweep reclaims what a dead instance left, and nothing of a living one."""
    dead, living = fresh_daemon(), fresh_daemon()
    async with dead.client() as first, living.client() as second:
        await (await first.create("container")).start("sleep 600")
        kept = await second.create("container")
        await asyncio.to_thread(dead.kill_edge)
        await asyncio.to_thread(dead.kill_launcher)
        before = set(living.sandbox_pids())
        await asyncio.to_thread(dead.clean_host, grace_s=60)
        await eventually(lambda: not dead.remains_in_kernel(), within_s=10, what="the dead one is swept")
        assert set(living.sandbox_pids()) == before
        assert (await kept.run("echo alive")).text == "alive\n"


async def test_the_sweep_leaves_sandboxes_whose_launcher_lives(fresh_daemon: Callable[..., Daemon]) -> None:
    """An edge that is only being restarted is not dead: its launcher still holds the sandboxes."""
    daemon = fresh_daemon()
    async with daemon.client() as client:
        sandbox = await client.create("container")
    await asyncio.to_thread(daemon.kill_edge)
    before = set(daemon.sandbox_pids())
    await asyncio.to_thread(daemon.clean_host, grace_s=60)
    assert set(daemon.sandbox_pids()) == before
    await asyncio.to_thread(daemon.start)
    async with daemon.client() as client:
        assert (await (await client.get(sandbox.id)).run("echo alive")).text == "alive\n"
