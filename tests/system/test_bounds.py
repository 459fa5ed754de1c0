"""Limits of a sandbox: what fills up stays inside, neighbours do not notice, and the sandbox still takes commands."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.daemon import Daemon
from tests.support.fixtures import BoxFactory
from tests.support.timing import Stopwatch, eventually, scaled

import dsec

pytestmark = [pytest.mark.system, pytest.mark.root]

BOMB = ":(){ :|:& };:"
MEMORY_HOG = "b=[]\nwhile True: b.append(b'x'*(16<<20))"


async def assert_at_ease(sandbox: dsec.AsyncSandbox) -> None:
    """The sandbox answers quickly and can write."""
    with Stopwatch() as watch:
        assert (await sandbox.run("echo fine > /tmp/fine && cat /tmp/fine", timeout=scaled(10))).text == "fine\n"
        await sandbox.files.write("/fine", b"fine")
        assert await sandbox.files.read("/fine") == b"fine"
    watch.assert_below(3)


async def test_fork_bombs_do_not_reach_the_neighbour(box: BoxFactory, daemon: Daemon) -> None:
    bombed, neighbour = await box(pids=200), await box()
    bomb = await bombed.start(["bash", "-c", f"{BOMB}; sleep 600"])
    await eventually(lambda: len(daemon.sandbox_pids()) > 120, within_s=20, what="the bomb fills its limit")
    await assert_at_ease(neighbour)
    with Stopwatch() as watch:
        assert (await bombed.run("echo still here", timeout=scaled(15))).text == "still here\n"
    watch.assert_below(10)
    assert (await bombed.usage()).pids <= 200
    await bomb.kill()
    await bombed.stop()


async def test_two_bombs_at_once_leave_room_for_a_command(box: BoxFactory, daemon: Daemon) -> None:
    """Each run has a limit below the sandbox's: a single one cannot take all of it, two must not either for ever."""
    bombed = await box(pids=128)
    with pytest.raises(dsec.ExecTimeout):
        await bombed.run(["bash", "-c", f"{BOMB}; sleep 600"], timeout=2)
    await assert_at_ease(bombed)


async def test_out_of_memory_has_its_reason_and_ends_one_command(box: BoxFactory) -> None:
    hungry, neighbour = await box(memory="128MiB"), await box(memory="128MiB")
    other = await hungry.start("sleep 600")
    result = await hungry.run(["python3", "-c", MEMORY_HOG], timeout=60)
    assert (result.reason, result.signal, result.exit_code) == ("oom", 9, 137)
    assert (await hungry.usage()).oom_kills >= 1
    # An exit code of 137, or a SIGKILL, without memory running out is just that, even after an earlier out of memory.
    assert (await hungry.run("exit 137")).reason == "exit"
    assert (await hungry.run("kill -9 $$")).reason == "signal"
    await assert_at_ease(hungry)
    await assert_at_ease(neighbour)
    assert other.id in [entry.id for entry in await hungry.processes() if entry.state == "running"]


async def test_out_of_memory_in_a_grandchild_is_told_too(box: BoxFactory) -> None:
    hungry = await box(memory="128MiB")
    result = await hungry.run(["bash", "-c", 'python3 -c "$1"; exit $?', "bash", MEMORY_HOG], timeout=60)
    assert (result.reason, result.exit_code) == ("oom", 137)


async def test_memory_limit_holds_over_many_processes_and_tmpfs(box: BoxFactory) -> None:
    hungry = await box(memory="128MiB")
    code = "import os,time\nfor i in range(8):\n  if os.fork()==0:\n    b=b'x'*(64<<20);time.sleep(30);os._exit(0)\ntime.sleep(5)"
    await hungry.run(["python3", "-c", code], timeout=60)
    await hungry.run("head -c 1G /dev/zero > /dev/shm/x; head -c 1G /dev/zero > /dev/shm/y", timeout=60)
    assert (await hungry.usage()).memory_peak <= (128 << 20) * 1.05
    await hungry.run("rm -f /dev/shm/*")
    await assert_at_ease(hungry)


@pytest.mark.parametrize("backing", ["local", "tmpfs"])
async def test_a_full_disk_stays_inside(box: BoxFactory, backing: str) -> None:
    full, neighbour = await box(disk="128MiB", disk_backing=backing, memory="512MiB"), await box()
    result = await full.run("cat /dev/zero > /fill", timeout=100)
    assert "No space left on device" in result.stderr_text
    await assert_at_ease(neighbour)
    assert (await full.run("echo still", timeout=scaled(5))).text == "still\n"
    df = (await full.run("df -B1 --output=size,avail / | tail -n 1")).text.split()
    assert int(df[0]) <= (128 << 20) * 1.01
    assert int(df[1]) < 1 << 20
    with pytest.raises(dsec.NoSpace):
        await full.files.write("/more", b"x" * 1_000_000)
    await full.run("rm /fill", check=True)
    await assert_at_ease(full)


async def test_full_disk_and_shm_in_memory_leave_room_for_commands(box: BoxFactory) -> None:
    full = await box(disk="128MiB", disk_backing="tmpfs", memory="256MiB")
    await full.run("cat /dev/zero > /dev/shm/fill; cat /dev/zero > /fill", timeout=60)
    assert (await full.run("echo still", timeout=scaled(5))).text == "still\n"
    await full.run("rm /fill /dev/shm/fill", check=True)
    await assert_at_ease(full)


@pytest.mark.parametrize("backing", ["local", "tmpfs"])
async def test_exhausted_inodes_stay_inside(box: BoxFactory, backing: str) -> None:
    full, neighbour = await box(disk="64MiB", disk_backing=backing), await box()
    code = (
        "import os\nos.mkdir('/i')\nn=0\n"
        "try:\n  while n<3000000:\n    os.close(os.open(f'/i/{n}',os.O_CREAT|os.O_WRONLY)); n+=1\n"
        "except OSError as e: print(e.errno)\n"
    )
    result = await full.run(["python3", "-c", code], timeout=110)
    assert (result.text, result.reason) == ("28\n", "exit")
    await assert_at_ease(neighbour)
    assert (await full.run("echo still", timeout=scaled(5))).text == "still\n"
    with pytest.raises(dsec.NoSpace):
        await full.files.write("/more", b"x")
    await full.run(["rm", "-rf", "/i"], timeout=60, check=True)
    await assert_at_ease(full)


async def test_nproc_df_and_free_tell_what_was_given(box: BoxFactory) -> None:
    sandbox = await box(cpus=0.5, disk="300MiB", memory="200MiB")
    assert (await sandbox.run("nproc")).text == "1\n"
    size = int((await sandbox.run("df -B1 --output=size / | tail -n 1")).text)
    assert 0.85 * (300 << 20) <= size <= 1.01 * (300 << 20)
    usage = await sandbox.usage()
    assert (usage.memory_limit, usage.disk_limit) == (200 << 20, 300 << 20)


async def test_half_a_cpu_is_half_a_cpu(box: BoxFactory) -> None:
    sandbox = await box(cpus=0.5)
    code = "import time\ne=time.time()+4\nwhile time.time()<e: pass\nprint(time.process_time())"
    async with asyncio.TaskGroup() as group:
        runs = [group.create_task(sandbox.run(["python3", "-c", code])) for _ in range(2)]
    assert sum(float(run.result().text) for run in runs) <= 4 * 0.5 * 1.25


async def test_tmpfs_above_half_of_the_memory_is_refused(client: dsec.AsyncClient) -> None:
    with pytest.raises(dsec.InvalidRequest, match="half"):
        await client.create("container", memory="256MiB", disk="200MiB", disk_backing="tmpfs")


async def test_output_floods_of_many_processes_do_not_stop_a_neighbour(box: BoxFactory) -> None:
    flooding, neighbour = await box(), await box()
    floods = [await flooding.start("yes | tr y z") for _ in range(30)]
    for _ in range(5):
        await assert_at_ease(neighbour)
    with Stopwatch() as watch:
        assert (await flooding.run("echo here", timeout=scaled(20))).text == "here\n"
    watch.assert_below(10)
    for flood in floods:
        await flood.kill()
