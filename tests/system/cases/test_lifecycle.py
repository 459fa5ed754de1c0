"""Behaviour cases of area lifecycle. They wait long: each is a test of its own, so that workers wait side by side."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.daemon import Daemon
from tests.support.fixtures import BoxFactory
from tests.support.timing import Stopwatch, eventually, scaled
from tests.system.cases.kinds import case

import dsec

CREATE_ONE = """
import asyncio, sys, dsec

async def main(kind, tag):
    async with dsec.AsyncClient() as client:
        await client.list(limit=1)
        print("go", flush=True)
        await client.create(kind, labels={"tag": tag}, max_lifetime=60)
        await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""

CREATE_EIGHT = """
import asyncio, sys, dsec

async def one(client, kind, tag):
    box = await client.create(kind, labels={"tag": tag}, max_lifetime=45)
    print("created", flush=True)
    await box.start(["sleep", "600"])

async def main(kind, tag):
    async with dsec.AsyncClient() as client, asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(one(client, kind, tag))
        group.create_task(asyncio.sleep(600))

asyncio.run(main(*sys.argv[1:]))
"""


def client_process(daemon: Daemon, code: str, *words: str) -> subprocess.Popen[bytes]:
    """A client program in a process of its own, its stdout a pipe."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], env=daemon.client_env, stdout=subprocess.PIPE, cwd="/"
    )


@pytest.mark.slow
@pytest.mark.timeout(scaled(300))
@case("life-client-killed-during-create")
async def test_life_client_killed_during_create(kind: str, client: dsec.AsyncClient, daemon: Daemon) -> None:
    tag = f"r411-{secrets.token_hex(4)}"
    inside = set(daemon.sandbox_pids())

    def kill_after(delay_s: float) -> None:
        with client_process(daemon, CREATE_ONE, kind, tag) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"go\n"
            time.sleep(delay_s)
            process.kill()

    # As in the case, and again with delays that fall into the few milliseconds that a create takes.
    for delay_ms in [*range(20, 401, 20), *range(20)]:
        await asyncio.to_thread(kill_after, delay_ms / 1000)
    last_kill = time.time()
    await asyncio.sleep(scaled(10))
    page = await client.list(labels={"tag": tag}, limit=1000)
    for entry in page.items:
        assert entry.id
        assert entry.state
        assert entry.record.expires_at is not None
        assert entry.record.expires_at - entry.record.created_at <= 60.5
    if page.items:
        victim = await client.get(page.items[0].id)
        await victim.stop()
    await asyncio.sleep(max(0, last_kill + scaled(90) - time.time()))
    assert not (await client.list(labels={"tag": tag})).items
    assert set(daemon.sandbox_pids()) <= inside


@pytest.mark.slow
@pytest.mark.timeout(scaled(300))
@case("life-client-killed-bulk")
async def test_life_client_killed_bulk(kind: str, client: dsec.AsyncClient, daemon: Daemon) -> None:
    tag = f"r982-{secrets.token_hex(4)}"
    inside = set(daemon.sandbox_pids())

    def start_and_kill() -> None:
        with client_process(daemon, CREATE_EIGHT, kind, tag) as process:
            assert process.stdout is not None
            for _ in range(4):
                assert process.stdout.readline() == b"created\n"
            process.kill()

    await asyncio.to_thread(start_and_kill)
    killed = time.monotonic()
    count = -1
    while time.monotonic() < killed + 75:
        count = len((await client.list(labels={"tag": tag}, limit=1000)).items)
        assert count <= 8
        if count == 0 and time.monotonic() > killed + 50:
            break
        await asyncio.sleep(5)
    assert count == 0
    await eventually(lambda: set(daemon.sandbox_pids()) <= inside, within_s=5, what="no process is left")


@case("life-cancel-during-setup")
async def test_life_cancel_during_setup(kind: str, client: dsec.AsyncClient, daemon: Daemon, tmp_path: Path) -> None:
    label = {"tag": f"r5494-{secrets.token_hex(4)}"}
    inside = set(daemon.sandbox_pids())
    for number in range(50):
        (tmp_path / f"f{number}").write_text("x" * 1000)

    async def set_up() -> None:
        async with await client.create(kind, labels=label) as sandbox:
            await sandbox.files.upload(tmp_path, "/data")
            await sandbox.run("sleep 30")

    task = asyncio.ensure_future(set_up())

    async def listed() -> bool:
        return bool((await client.list(labels=label)).items)

    await eventually(listed, within_s=10, what="the sandbox is listed")
    await asyncio.sleep(2)
    task.cancel()
    with Stopwatch() as watch, pytest.raises(asyncio.CancelledError):
        await task
    watch.assert_below(5)

    async def unlisted() -> bool:
        return not await listed()

    await eventually(unlisted, within_s=15, what="the sandbox is gone")
    await eventually(lambda: set(daemon.sandbox_pids()) <= inside, within_s=5, what="no process is left")


@case("life-ttl-ends-during-call")
async def test_life_ttl_ends_during_call(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    with Stopwatch() as watch:
        sandbox = await box(kind, max_lifetime=6)
        await asyncio.sleep(3)
        with pytest.raises(dsec.SandboxGone) as caught:
            await sandbox.run("sleep 30", timeout=60)
    assert caught.value.reason == "lifetime"
    assert watch.seconds >= 5
    watch.assert_below(9)
    with Stopwatch() as watch, pytest.raises(dsec.SandboxGone) as caught:
        await sandbox.files.read("/etc/hostname")
    watch.assert_below(2)
    assert caught.value.reason == "lifetime"
    with Stopwatch() as watch, pytest.raises(dsec.SandboxGone) as caught:
        await sandbox.run("echo hi")
    watch.assert_below(2)
    assert caught.value.reason == "lifetime"

    async def recorded() -> bool:
        record = (await client.get(sandbox.id)).record
        return (record.state, record.reason) == ("stopped", "lifetime")

    await eventually(recorded, within_s=2, what="its record says why it ended")


@pytest.mark.slow
@pytest.mark.timeout(scaled(200))
@case("life-unschedulable-never-overcreates")
async def test_life_unschedulable_never_overcreates(kind: str, client: dsec.AsyncClient, daemon: Daemon) -> None:
    label = {"tag": f"r1215-{secrets.token_hex(4)}"}
    inside = set(daemon.sandbox_pids())
    reasons: list[str] = []

    async def ask() -> None:
        with pytest.raises((dsec.NoCapacity, dsec.InvalidRequest)) as caught:
            await client.create(kind, memory="100TiB", labels=label, timeout=scaled(40))
        reasons.append(str(caught.value))

    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(ask())
        counts = []
        for _ in range(60):
            counts.append(len((await client.list(labels=label, state="all")).items))
            assert set(daemon.sandbox_pids()) <= inside
            await asyncio.sleep(1)
    assert max(counts) <= 3
    assert counts[-1] <= counts[20]
    assert all("memory" in reason for reason in reasons)
    assert not (await client.list(labels=label)).items


@case("life-100-parallel-creates")
async def test_life_100_parallel_creates(kind: str, client: dsec.AsyncClient, daemon: Daemon) -> None:
    label = {"tag": f"r794-{secrets.token_hex(4)}"}
    before = daemon.take_census()
    ids: list[str] = []

    async def one() -> None:
        try:
            sandbox = await client.create(kind, memory="64MiB", disk="64MiB", labels=label)
        except (dsec.NoCapacity, dsec.QuotaExceeded, dsec.DeadlineExceeded):
            return
        async with sandbox:
            ids.append(sandbox.id)
            assert (await sandbox.run("echo $ID", env={"ID": sandbox.id})).text == sandbox.id + "\n"

    async with asyncio.TaskGroup() as group:
        for _ in range(100):
            group.create_task(one())
    assert ids
    assert len(ids) == len(set(ids))
    assert not (await client.list(labels=label)).items
    await eventually(
        lambda: not set(daemon.take_census().processes) - before.processes, within_s=30, what="no process is left"
    )


@case("life-idle-ttl-waits-for-work")
async def test_life_idle_ttl_waits_for_work(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind, idle_timeout=5)
    result = await sandbox.run("sleep 15; echo done", timeout=60)
    assert (result.text, result.exit_code) == ("done\n", 0)
    with Stopwatch() as watch:
        while (record := (await client.get(sandbox.id)).record).state == "running":
            watch.assert_below(12)
            await asyncio.sleep(1)
    assert watch.seconds >= 4.5
    assert (record.state, record.reason) in (("stopped", "idle"), ("stopping", "idle"))


@pytest.mark.slow
@pytest.mark.timeout(scaled(300))
@case("life-reattach-after-minutes")
async def test_life_reattach_after_minutes(
    kind: str, client: dsec.AsyncClient, box: BoxFactory, daemon: Daemon
) -> None:
    async with daemon.client() as first:
        made = await first.create(kind)
        process = await made.start("i=0; while [ $i -lt 400 ]; do echo t$i; i=$((i+1)); sleep 1; done")
        pid, sandbox_id = process.pid, made.id
    await asyncio.sleep(150)
    async with daemon.client() as second:
        sandbox = await second.get(sandbox_id)
        try:
            assert pid in [entry.pid for entry in await sandbox.processes() if entry.state == "running"]
            attached = await sandbox.attach(str(pid))
            numbers: list[int] = []
            text = b""
            try:
                async with asyncio.timeout(3):
                    async for chunk in attached.output(since=0):
                        text += chunk.data
            except TimeoutError:
                pass
            numbers = [int(line[1:]) for line in text.decode().splitlines()]
            assert numbers == list(range(len(numbers)))
            # A second's sleep and a fork each turn: it is somewhat slower than the clock.
            assert 130 <= numbers[-1] <= 160
            await attached.signal("KILL")
            assert await attached.wait(timeout=scaled(5)) in (137, 143)
            assert pid not in [entry.pid for entry in await sandbox.processes() if entry.state == "running"]
        finally:
            await sandbox.stop()
