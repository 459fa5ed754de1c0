"""Behaviour cases of area timeout."""

from __future__ import annotations

import asyncio
import os

import pytest
from tests.support import procfs
from tests.support.daemon import Daemon
from tests.support.fixtures import BoxFactory
from tests.support.programs import install_programs
from tests.support.timing import Stopwatch, scaled
from tests.system.cases.kinds import case

import dsec


@case("timeout-child-holds-pipes")
async def test_timeout_child_holds_pipes(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    await install_programs(sandbox)
    with Stopwatch() as watch, pytest.raises(dsec.ExecTimeout):
        await sandbox.run("sleep 4712 & sleep 4713", timeout=1)
    assert watch.seconds >= 1.0
    watch.assert_below(3)
    await asyncio.sleep(2)
    assert (await sandbox.run("pcount 'sleep 4712'; pcount 'sleep 4713'")).text == "0\n0\n"


@case("timeout-busy-loop-gone")
async def test_timeout_busy_loop_gone(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    await install_programs(sandbox)
    with Stopwatch() as watch, pytest.raises(dsec.ExecTimeout):
        await sandbox.run(["python3", "-c", "while True: pass", "loop4714"], timeout=1)
    watch.assert_below(3)
    await asyncio.sleep(3)
    assert (await sandbox.run("pcount 'python3 -c while True: pass loop4714'")).text == "0\n"
    with Stopwatch() as watch:
        await sandbox.run("cut -d' ' -f1 /proc/loadavg")
    watch.assert_below(2)


@case("timeout-sigterm-ignored")
async def test_timeout_sigterm_ignored(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    with Stopwatch() as watch, pytest.raises(dsec.ExecTimeout):
        await sandbox.run("trap '' TERM INT HUP; while :; do sleep 0.2; echo x >> /tmp/tick; done", timeout=1)
    watch.assert_below(12)
    await asyncio.sleep(10)
    probe = "a=$(wc -c </tmp/tick); sleep 2; b=$(wc -c </tmp/tick); [ $a = $b ] && echo stopped || echo running"
    assert (await sandbox.run(probe)).text == "stopped\n"


@case("timeout-50ms-tree")
async def test_timeout_50ms_tree(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    await install_programs(sandbox)
    with Stopwatch() as watch, pytest.raises(dsec.ExecTimeout):
        await sandbox.run('sh -c \'sh -c "sleep 4716" & sh -c "sleep 4717; :"; :\'', timeout=0.05)
    watch.assert_below(2)
    await asyncio.sleep(2)
    counts = "pcount 'sleep 4716'; pcount 'sleep 4717'; pcount 'sh -c sleep'"
    assert (await sandbox.run(counts)).text == "0\n0\n0\n"


@case("timeout-50-times-pids-baseline")
async def test_timeout_50_times_pids_baseline(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    await install_programs(sandbox)
    count = "ls -d /proc/[0-9]* | wc -l"
    before = int((await sandbox.run(count)).text)
    for _ in range(50):
        with pytest.raises(dsec.ExecTimeout):
            await sandbox.run("sleep 4720 | sleep 4721", timeout=0.2)
    await asyncio.sleep(3)
    assert int((await sandbox.run(count)).text) <= before + 1
    zombies = "grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l"
    assert (await sandbox.run(f"pcount 'sleep 4720'; pcount 'sleep 4721'; {zombies}")).text == "0\n0\n0\n"


@case("timeout-keeps-sandbox-and-neighbours")
async def test_timeout_keeps_sandbox_and_neighbours(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    identity = "cat /proc/sys/kernel/random/boot_id /proc/1/stat | cut -d' ' -f1,22"
    await sandbox.run(
        "echo keep > /tmp/keep; (python3 -m http.server 18081 --bind 127.0.0.1 >/dev/null 2>&1 &) ; sleep 1; "
        f"{identity} > /tmp/id1",
        check=True,
    )
    with pytest.raises(dsec.ExecTimeout):
        await sandbox.run("sleep 600", timeout=1)
    probe = "import urllib.request as u;print(u.urlopen('http://127.0.0.1:18081/',timeout=5).status)"
    result = await sandbox.run(f'cat /tmp/keep; {identity} | cmp - /tmp/id1 && echo same; python3 -c "{probe}"')
    assert result.text == "keep\nsame\n200\n"


@case("timeout-is-own-error-type", fncall=True)
async def test_timeout_is_own_error_type(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    with pytest.raises(dsec.ExecTimeout) as caught:
        await sandbox.run(["sleep", "10"], timeout=1)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.result.reason == "timeout"
    assert caught.value.sandbox_survived is True
    result = await sandbox.run("exit 255")
    assert (result.exit_code, result.reason) == (255, "exit")


@case("timeout-fires-at-two-not-five")
async def test_timeout_fires_at_two_not_five(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    with Stopwatch() as watch, pytest.raises(dsec.ExecTimeout):
        await sandbox.run("echo 'sleep 5; echo hello > /tmp/late' | sh", timeout=2)
    assert watch.seconds >= 1.9
    watch.assert_below(3)
    await asyncio.sleep(5)
    result = await sandbox.run("ls /tmp/late 2>&1")
    assert result.exit_code != 0
    assert "No such file" in result.text


@case("timeout-returns-partial-output", fncall=True)
async def test_timeout_returns_partial_output(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    with pytest.raises(dsec.ExecTimeout) as caught:
        await sandbox.run("echo first; echo warn >&2; sleep 60", timeout=1)
    assert (caught.value.result.stdout, caught.value.result.stderr) == (b"first\n", b"warn\n")


@case("timeout-endless-yes-capped")
async def test_timeout_endless_yes_capped(kind: str, client: dsec.AsyncClient, box: BoxFactory, daemon: Daemon) -> None:
    sandbox = await box(kind)
    await install_programs(sandbox)
    launcher = daemon.launcher_pid
    assert launcher is not None

    def memory() -> int:
        return sum(procfs.rss_bytes(pid) for pid in (os.getpid(), daemon.edge_pid, launcher, *daemon.guest_pids()))

    before = memory()

    with Stopwatch() as watch:
        call = asyncio.ensure_future(sandbox.run("yes", timeout=10, output_limit=1 << 20))
        while not call.done():
            await asyncio.wait([call], timeout=1)
            assert memory() <= before + (64 << 20)
    with pytest.raises(dsec.ExecTimeout) as caught:
        await call
    assert watch.seconds >= 10
    watch.assert_below(12)
    assert len(caught.value.result.stdout) <= 1 << 20
    assert caught.value.result.truncated
    await asyncio.sleep(scaled(2))
    assert (await sandbox.run("pgrep -x yes || pcount 'yes'")).text == "0\n"
    assert (await sandbox.run("echo ok")).text == "ok\n"
