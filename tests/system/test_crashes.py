"""kill -9 of every process, in every combination, under load: sandboxes run on or end with a reason, and nothing leaks.

Each test has daemons of its own; `fresh_daemon` asserts at the end that no process, cgroup, mount, loop device or file of them is left.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import resource
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.support import census, procfs
from tests.support.daemon import Daemon
from tests.support.timing import eventually, scaled

import dsec

# One worker runs them all: a host has room for 14 instances, and each test has one or two of its own.
pytestmark = [
    pytest.mark.system,
    pytest.mark.root,
    pytest.mark.timeout(scaled(180)),
    pytest.mark.xdist_group("crashes"),
]

SMALL: dict[str, Any] = {"memory": "64MiB", "disk": "64MiB"}
TICKER = "i=0; while :; do echo t$i; i=$((i+1)); sleep 0.05; done"

FreshDaemon = Callable[..., Daemon]


async def restart(daemon: Daemon) -> None:
    """kill -9 of the edge, and a new one."""
    await asyncio.to_thread(daemon.kill_edge)
    await asyncio.to_thread(daemon.start)


async def test_sandboxes_outlive_the_edge_and_are_adopted(fresh_daemon: FreshDaemon) -> None:
    daemon = fresh_daemon()
    async with daemon.client() as client:
        boxes = [await client.create("container", labels={"n": str(number)}, **SMALL) for number in range(5)]
        boxes.append(await client.create("container", disk_backing="local", disk="64MiB"))
        boxes.append(await client.create("container", disk_backing="tmpfs", disk="16MiB", memory="64MiB"))
        pids = {sandbox.id: (await sandbox.start("sleep 600")).pid for sandbox in boxes}
        for sandbox in boxes:
            await sandbox.files.write("/mark", sandbox.id.encode())
    before, launcher = set(daemon.sandbox_pids()), daemon.launcher_pid
    for _ in range(3):
        await restart(daemon)
    assert set(daemon.sandbox_pids()) == before
    assert daemon.launcher_pid == launcher
    async with daemon.client() as client:
        assert {entry.id for entry in (await client.list()).items} == set(pids)
        for sandbox_id, pid in pids.items():
            sandbox = await client.get(sandbox_id)
            assert sandbox.state == "running"
            assert await sandbox.files.read("/mark") == sandbox_id.encode()
            assert pid in [entry.pid for entry in await sandbox.processes() if entry.state == "running"]
            assert (await sandbox.run("echo alive")).text == "alive\n"
        assert (await sandbox.usage()).memory_limit > 0
        await sandbox.stop()
        new = await client.create("container", **SMALL)
        assert (await new.run("echo new")).text == "new\n"


async def test_an_orderly_restart_keeps_sandboxes_too(fresh_daemon: FreshDaemon) -> None:
    daemon = fresh_daemon()
    async with daemon.client() as client:
        sandbox = await client.create("container", **SMALL)
        process = await sandbox.start("sleep 600")
    before = set(daemon.sandbox_pids())
    await asyncio.to_thread(daemon.stop_keeping)
    assert set(daemon.sandbox_pids()) == before
    await asyncio.to_thread(daemon.start)
    async with daemon.client() as client:
        assert process.id in [entry.id for entry in await (await client.get(sandbox.id)).processes()]


async def test_a_client_goes_on_through_an_edge_restart(fresh_daemon: FreshDaemon) -> None:
    daemon = fresh_daemon()
    async with daemon.client() as client:
        sandbox = await client.create("container")
        process = await sandbox.start(TICKER)
        run = asyncio.ensure_future(sandbox.run("sleep 4; echo ran >> /ran; echo done"))
        expected, received = 0, b""
        restarted: asyncio.Task[None] | None = None
        async for chunk in process.output():
            assert (chunk.offset, chunk.dropped) == (expected, 0)
            expected += len(chunk.data)
            received += chunk.data
            if expected > 40 and restarted is None:
                restarted = asyncio.ensure_future(restart(daemon))
            if restarted is not None and restarted.done() and received.count(b"\n") > 150:
                break
        lines = received.decode().split("\n")[:-1]
        assert lines == [f"t{number}" for number in range(len(lines))]
        assert restarted is not None
        await restarted
        assert (await run).text == "done\n"
        assert await sandbox.files.read("/ran") == b"ran\n"
        await process.kill()


async def test_streams_resume_at_their_offset_after_a_restart(fresh_daemon: FreshDaemon) -> None:
    daemon = fresh_daemon()
    async with daemon.client() as client:
        sandbox = await client.create("container")
        process = await sandbox.start("for i in $(seq 20000); do echo line$i; done; sleep 600", output_limit="4MiB")
        first = b""
        async for chunk in process.output():
            first += chunk.data
            if len(first) > 50_000:
                break
        ids = sandbox.id, process.id
    await restart(daemon)
    async with daemon.client() as client:
        process = await (await client.get(ids[0])).attach(ids[1])
        rest = b""
        async for chunk in process.output(since=(len(first), 0)):
            assert chunk.dropped == 0
            rest += chunk.data
            if b"line20000\n" in rest:
                break
    assert first + rest == b"".join(b"line%d\n" % number for number in range(1, 20_001))


async def test_an_open_stdin_stays_open_through_a_restart(fresh_daemon: FreshDaemon) -> None:
    daemon = fresh_daemon()
    async with daemon.client() as client:
        sandbox = await client.create("container")
        process = await sandbox.start("cat", stdin=True)
        await process.write(b"one\n")
        await process.aclose()
    await restart(daemon)
    async with daemon.client() as client:
        process = await (await client.get(sandbox.id)).attach(process.id)
        assert process.state == "running"
        await process.write(b"two\n")
        await process.close_stdin()
        assert await process.wait(timeout=scaled(5)) == 0
        assert b"".join([chunk.data async for chunk in process.output()]) == b"one\ntwo\n"
        await process.aclose()


async def test_ttls_count_on_while_the_edge_is_dead(fresh_daemon: FreshDaemon) -> None:
    daemon = fresh_daemon()
    async with daemon.client() as client:
        short = await client.create("container", max_lifetime=2, **SMALL)
        long = await client.create("container", **SMALL)
    await asyncio.to_thread(daemon.kill_edge)
    await asyncio.sleep(2.5)
    await asyncio.to_thread(daemon.start)
    async with daemon.client() as client:

        async def ended() -> bool:
            record = (await client.get(short.id)).record
            return (record.state, record.reason) == ("stopped", "lifetime")

        await eventually(ended, within_s=5, what="the short one ended by its lifetime")
        assert (await client.get(long.id)).state == "running"


async def test_sandboxes_that_died_with_the_edge_away_are_failed(fresh_daemon: FreshDaemon) -> None:
    daemon = fresh_daemon()
    async with daemon.client() as client:
        sandbox = await client.create("container", **SMALL)
        guests = daemon.guest_pids()
        assert len(guests) == 1
    await asyncio.to_thread(daemon.kill_edge)
    os.kill(guests[0], signal.SIGKILL)
    await eventually(lambda: not daemon.guest_pids(), within_s=5, what="the guest is dead")
    await asyncio.to_thread(daemon.start)
    async with daemon.client() as client:

        async def failed() -> bool:
            return (await client.get(sandbox.id)).state == "failed"

        await eventually(failed, within_s=5, what="it is failed")
        assert (await client.get(sandbox.id)).reason in ("crashed", "channel_lost")


async def test_the_launcher_is_replaced_and_sandboxes_run_on(fresh_daemon: FreshDaemon) -> None:
    daemon = fresh_daemon()
    async with daemon.client() as client:
        boxes = [await client.create("container", **SMALL) for _ in range(4)]
        process = await boxes[0].start(TICKER)
        before, launcher = set(daemon.guest_pids()), daemon.launcher_pid
        await asyncio.to_thread(daemon.kill_launcher)
        await eventually(lambda: daemon.launcher_pid not in (None, launcher), within_s=10, what="a new launcher")
        assert set(daemon.guest_pids()) == before
        for sandbox in boxes:
            assert (await sandbox.run("echo alive")).text == "alive\n"
        new = await client.create("container", **SMALL)
        assert (await new.run("echo new")).text == "new\n"
        # The new launcher can end the old one's sandboxes, and takes their end by themselves notice.
        await boxes[1].stop()
        await process.kill()
    # And the edge after that finds all of them again.
    await restart(daemon)
    async with daemon.client() as client:
        assert {entry.id for entry in (await client.list()).items} == {boxes[0].id, boxes[2].id, boxes[3].id, new.id}
        for entry in (await client.list()).items:
            assert (await entry.run("echo alive")).text == "alive\n"


async def test_edge_and_launcher_both_killed_ends_all_as_crashed(fresh_daemon: FreshDaemon) -> None:
    daemon = fresh_daemon()
    async with daemon.client() as client:
        ids = [(await client.create("container", **SMALL)).id for _ in range(4)]
        for sandbox_id in ids:
            await (await client.get(sandbox_id)).start("sleep 600")
    await asyncio.to_thread(daemon.kill_edge)
    await asyncio.to_thread(daemon.kill_launcher)
    # Without launcher and edge nobody holds the channels: the guests end by themselves.
    await asyncio.to_thread(daemon.start)
    async with daemon.client() as client:
        assert not (await client.list()).items
        for sandbox_id in ids:
            sandbox = await client.get(sandbox_id)
            assert (sandbox.state, sandbox.reason) == ("failed", "crashed")
            with pytest.raises(dsec.SandboxGone) as caught:
                await sandbox.run("true")
            assert caught.value.reason == "crashed"
        await eventually(lambda: not daemon.sandbox_pids(), within_s=5, what="no process is left")
        assert not [path for path in census.cgroups_of(daemon.instance) if path.name.startswith("run-")]
        new = await client.create("container", **SMALL)
        assert (await new.run("echo new")).text == "new\n"


async def test_a_killed_guest_fails_its_sandbox_with_the_reason(fresh_daemon: FreshDaemon) -> None:
    daemon = fresh_daemon()
    async with daemon.client() as client:
        other = await client.create("container", **SMALL)
        known = set(daemon.guest_pids())
        sandbox = await client.create("container", **SMALL)
        (guest,) = set(daemon.guest_pids()) - known
        run = asyncio.ensure_future(sandbox.run("sleep 60"))
        await eventually(lambda: len(daemon.sandbox_pids()) > 2, within_s=5, what="the command runs")
        os.kill(guest, signal.SIGKILL)
        with pytest.raises(dsec.SandboxGone) as caught:
            await run
        assert caught.value.reason in ("crashed", "channel_lost")
        assert caught.value.sandbox_survived is False

        async def failed() -> bool:
            return (await client.get(sandbox.id)).state == "failed"

        await eventually(failed, within_s=5, what="it is failed")
        assert (await client.get(sandbox.id)).reason == caught.value.reason
        assert {entry.id for entry in (await client.list()).items} == {other.id}
        assert (await other.run("echo alive")).text == "alive\n"


CREATE_AND_HANG = """
import asyncio, sys, dsec

async def main():
    async with dsec.AsyncClient() as client:
        await client.list(limit=1)
        print("go", flush=True)
        async for box in client.create_many(20, memory="64MiB", disk="64MiB", labels={"tag": sys.argv[1]}):
            pass
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_client_killed_between_create_and_answer_leaves_nothing_undelivered(fresh_daemon: FreshDaemon) -> None:
    daemon = fresh_daemon()
    tag = secrets.token_hex(4)

    def kill_after(delay_s: float) -> None:
        with subprocess.Popen(
            [sys.executable, "-c", CREATE_AND_HANG, tag], env=daemon.client_env, stdout=subprocess.PIPE, cwd="/"
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"go\n"
            time.sleep(delay_s)
            process.kill()

    for delay_ms in (0, 1, 2, 5, 10, 20, 50):
        await asyncio.to_thread(kill_after, delay_ms / 1000)
    async with daemon.client() as client:
        settled = [-1]

        async def same_twice() -> bool:
            settled.append(len((await client.list(labels={"tag": tag}, limit=1000)).items))
            return len(settled) > 6 and len(set(settled[-5:])) == 1

        await eventually(same_twice, within_s=15, every_s=0.3, what="the number settles")
        page = await client.list(labels={"tag": tag}, limit=1000)
        assert all(entry.state == "running" for entry in page.items)
        await client.stop_many(labels={"tag": tag})
        assert not (await client.list(labels={"tag": tag})).items


async def load(daemon: Daemon, seed: int, stop: asyncio.Event) -> None:
    """Create, use and drop sandboxes until told to stop; every failure must be one of dsec's errors."""
    chance = random.Random(seed)
    while not stop.is_set():
        try:
            async with daemon.client() as client, asyncio.timeout(30):
                if chance.random() < 0.3:
                    async for item in client.create_many(5, "container", **SMALL):
                        if isinstance(item, dsec.AsyncSandbox) and chance.random() < 0.7:
                            await item.stop()
                else:
                    sandbox = await client.create("container", **SMALL)
                    await sandbox.files.write("/f", b"x" * 100_000)
                    await sandbox.run("cat /f | wc -c; sleep 0.05", timeout=10)
                    await sandbox.start("sleep 600")
                    if chance.random() < 0.8:
                        await sandbox.stop()
        except (dsec.DsecError, TimeoutError, ConnectionError):
            await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(scaled(300))
async def test_kills_in_a_loop_under_load_leak_nothing(fresh_daemon: FreshDaemon) -> None:
    daemon = fresh_daemon()
    chance, stop = random.Random(4711), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for seed in range(4):
            group.create_task(load(daemon, seed, stop))
        try:
            for number in range(12):
                await asyncio.sleep(chance.uniform(0.3, 1.2))
                victim = ("edge", "launcher", "guest", "all")[number % 4]
                guests = daemon.guest_pids()
                if victim in ("guest", "all"):
                    for guest in guests if victim == "all" else guests[:2]:
                        try:
                            os.kill(guest, signal.SIGKILL)
                        except ProcessLookupError:
                            continue
                if victim in ("launcher", "all") and daemon.launcher_pid is not None:
                    await asyncio.to_thread(daemon.kill_launcher)
                if victim in ("edge", "all"):
                    await restart(daemon)
        finally:
            stop.set()
    async with daemon.client() as client:

        async def created() -> bool:
            try:
                async with await client.create("container", **SMALL) as sandbox:
                    return (await sandbox.run("echo fine")).text == "fine\n"
            except dsec.DsecError:
                return False

        await eventually(created, within_s=20, what="the daemon works again")
        while entries := (await client.list(limit=1000)).items:
            await client.stop_many(entries)
        await eventually(lambda: not daemon.sandbox_pids(), within_s=10, what="no process is left")
        stuck = (await client.list(state="creating")).items + (await client.list(state="stopping")).items
        assert not stuck
    counted = daemon.take_census()
    assert not counted.run_cgroups
    assert not counted.loops
    assert len(counted.slot_cgroups) <= census.POOL_MAX
    storage = [name for name in counted.files if "/storage/" in name and not re.search(r"template", name)]
    assert not storage


async def test_stopped_processes_do_not_hang_the_rest(fresh_daemon: FreshDaemon) -> None:
    """A SIGSTOPped guest answers nothing: calls on it end by their timeouts, others go on, and it can be stopped."""
    daemon = fresh_daemon()
    async with daemon.client() as client:
        other = await client.create("container", **SMALL)
        known = set(daemon.guest_pids())
        sandbox = await client.create("container", **SMALL)
        (guest,) = set(daemon.guest_pids()) - known
        os.kill(guest, signal.SIGSTOP)
        call = asyncio.ensure_future(sandbox.run("true"))
        assert (await other.run("echo alive")).text == "alive\n"
        assert not call.done()
        async with asyncio.timeout(scaled(10)):
            await sandbox.stop()
        with pytest.raises(dsec.SandboxGone):
            await call
        assert not procfs.alive(guest)


async def test_down_ends_everything_and_up_starts_clean(fresh_daemon: FreshDaemon) -> None:
    daemon = fresh_daemon()
    async with daemon.client() as client:
        sandbox = await client.create("container", **SMALL)
        await sandbox.start("sleep 600")
        key = daemon.key
    await asyncio.to_thread(daemon.stop)
    assert not census.remains(instance=daemon.instance, home=daemon.home)
    await asyncio.to_thread(daemon.start)
    assert daemon.key == key
    assert daemon.paths.api_key_file.stat().st_mode & 0o777 == 0o600
    async with daemon.client() as client:
        ended = await client.get(sandbox.id)
        assert ended.state == "stopped"
        assert not (await client.list()).items


async def test_a_second_daemon_in_the_same_home_is_refused(fresh_daemon: FreshDaemon) -> None:
    daemon = fresh_daemon()
    async with daemon.client() as client:
        sandbox = await client.create("container", **SMALL)
        second = await asyncio.to_thread(
            subprocess.run,
            [*daemon.up_command],
            env=daemon.env,
            capture_output=True,
            timeout=scaled(30),
            check=False,
            cwd="/",
        )
        assert second.returncode != 0
        assert b"Traceback" not in second.stderr
        assert second.stderr or second.stdout
        assert (await sandbox.run("echo alive")).text == "alive\n"


async def test_an_edge_without_free_descriptors_leaks_no_sandbox(fresh_daemon: FreshDaemon) -> None:
    """Descriptors that the launcher passed are lost with the packet: the edge asks it anew what it has."""
    daemon = fresh_daemon()
    async with daemon.client() as client:
        sandbox = await client.create("container", **SMALL)
        open_now = len(os.listdir(f"/proc/{daemon.edge_pid}/fd"))  # noqa: PTH208
        limits = resource.prlimit(daemon.edge_pid, resource.RLIMIT_NOFILE, (open_now + 1, 20_000))
        create = asyncio.ensure_future(client.create("container", **SMALL))
        await asyncio.sleep(0.5)
        resource.prlimit(daemon.edge_pid, resource.RLIMIT_NOFILE, limits)
        new = await create
        assert (await sandbox.run("echo alive")).text == "alive\n"
        assert (await new.run("echo new")).text == "new\n"
        assert {entry.id for entry in (await client.list()).items} == {sandbox.id, new.id}
        await eventually(lambda: len(daemon.guest_pids()) == 2, within_s=5, what="no guest is left over")


async def test_an_edge_killed_while_sandboxes_start_leaks_none(fresh_daemon: FreshDaemon) -> None:
    """What the launcher was still starting for the dead edge is nobody's, and ends."""
    daemon = fresh_daemon()
    async with daemon.client() as client:
        sandbox = await client.create("container", **SMALL)
    for delay_ms in (2, 10, 20):
        launcher = daemon.launcher_pid
        assert launcher is not None
        async with daemon.client() as client:
            batch = asyncio.ensure_future(_drain(client.create_many(30, "container", **SMALL)))
            await asyncio.sleep(0.01 + delay_ms / 1000)
            os.kill(launcher, signal.SIGSTOP)
            await asyncio.to_thread(daemon.kill_edge)
            start = asyncio.ensure_future(asyncio.to_thread(daemon.start))
            await asyncio.sleep(1.5)  # until the new edge waits for the launcher, too
            os.kill(launcher, signal.SIGCONT)
            await start
            batch.cancel()
            await asyncio.gather(batch, return_exceptions=True)
    async with daemon.client() as client:

        async def agrees() -> bool:
            return len((await client.list(limit=1000)).items) == len(daemon.guest_pids())

        await eventually(agrees, within_s=10, what="every guest is a sandbox that the edge knows")
        assert (await (await client.get(sandbox.id)).run("echo alive")).text == "alive\n"


async def _drain(items: AsyncIterator[object]) -> None:
    async for _ in items:
        pass
