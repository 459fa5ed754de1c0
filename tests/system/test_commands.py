"""Commands: how they end, what happens to their children, and what becomes of their output."""

from __future__ import annotations

import asyncio
import os

import pytest
from tests.support import procfs
from tests.support.daemon import Daemon
from tests.support.fixtures import BoxFactory
from tests.support.programs import install_programs
from tests.support.timing import Stopwatch, eventually, scaled

import dsec

pytestmark = [pytest.mark.system, pytest.mark.root]

DOUBLE_FORK = """
import os, sys, time
def escape(depth):
    if os.fork(): return
    os.setsid()
    if depth: escape(depth - 1)
    try: os.setpgid(0, 0)
    except OSError: pass
    os.execvp('sleep', ['sleep', sys.argv[1]])
escape(0); escape(1); escape(2)
time.sleep(600)
"""


async def no_process(sandbox: dsec.AsyncSandbox, prefix: str) -> None:
    """Wait until no process of the sandbox has a command line that starts with `prefix`."""

    async def gone() -> bool:
        return (await sandbox.run(["pcount", prefix])).text == "0\n"

    await eventually(gone, within_s=5, what=f"no {prefix!r} in the sandbox")


async def test_a_timeout_kills_new_sessions_and_double_forks(box: BoxFactory) -> None:
    sandbox = await box()
    await install_programs(sandbox)
    with Stopwatch() as watch, pytest.raises(dsec.ExecTimeout):
        await sandbox.run(["python3", "-c", DOUBLE_FORK, "4801"], timeout=1.5)
    assert watch.seconds >= 1.5
    watch.assert_below(3)
    await no_process(sandbox, "sleep 4801")
    assert (await sandbox.run("echo usable")).text == "usable\n"


async def test_a_timeout_kills_a_tree_that_keeps_forking(box: BoxFactory) -> None:
    sandbox = await box()
    await install_programs(sandbox)
    with pytest.raises(dsec.ExecTimeout):
        # Each generation lives 20 ms and has a child in a new session: a kill by pid list would always come too late.
        await sandbox.run('f() { setsid bash -c "$(declare -f f); sleep 0.02; f" & }; f; sleep 600', timeout=1)
    await asyncio.sleep(0.5)
    await no_process(sandbox, "bash -c f ()")
    with Stopwatch() as watch:
        assert (await sandbox.run("ps ax 2>/dev/null | wc -l; echo ok")).text.endswith("ok\n")
    watch.assert_below(2)


async def test_children_of_a_command_that_ended_live_on(box: BoxFactory) -> None:
    sandbox = await box()
    await install_programs(sandbox)
    await sandbox.run("sleep 4802 & setsid sleep 4802 & (sleep 4802 &); echo started")
    # A timeout of another command has nothing to do with them.
    with pytest.raises(dsec.ExecTimeout):
        await sandbox.run("sleep 4803", timeout=0.3)
    assert (await sandbox.run(["pcount", "sleep 4802"])).text == "3\n"


async def test_held_pipes_do_not_delay_the_result_and_their_late_output_is_kept(box: BoxFactory) -> None:
    sandbox = await box()
    with Stopwatch() as watch:
        result = await sandbox.run("(sleep 2; echo late) & echo early; echo error >&2", timeout=30)
    assert (result.stdout, result.stderr) == (b"early\n", b"error\n")
    watch.assert_below(1.5)
    process = await sandbox.attach(result.process_id)
    await asyncio.sleep(2.5)
    late = b"".join([chunk.data async for chunk in process.output(since=0, follow=False) if chunk.stream == "stdout"])
    assert late == b"early\nlate\n"


async def test_stdin_is_dev_null_unless_given(box: BoxFactory) -> None:
    sandbox = await box()
    result = await sandbox.run("readlink /proc/self/fd/0; cat; echo end", timeout=scaled(5))
    assert result.text == "/dev/null\nend\n"
    process = await sandbox.start("cat; echo end")
    assert await process.wait(timeout=scaled(5)) == 0


@pytest.mark.parametrize("number", [1, 2, 6, 9, 11, 13, 14, 15])
async def test_death_by_signal_is_told_apart_from_exit_codes(box: BoxFactory, number: int) -> None:
    sandbox = await box()
    reset = "" if number == 9 else f"signal.signal({number}, signal.SIG_DFL);"
    died = await sandbox.run(["python3", "-c", f"import os,signal;{reset}os.kill(os.getpid(),{number})"])
    assert (died.reason, died.signal, died.exit_code) == ("signal", number, 128 + number)
    exited = await sandbox.run(["sh", "-c", f"exit {128 + number}"])
    assert (exited.reason, exited.signal, exited.exit_code) == ("exit", None, 128 + number)


async def test_the_middle_of_long_output_is_dropped_and_marked(box: BoxFactory) -> None:
    sandbox = await box()
    limit = 100_000
    code = "import sys\nfor i in range(200000): sys.stdout.write(f'{i:09d}\\n')"
    result = await sandbox.run(["python3", "-c", code], output_limit=limit)
    assert result.truncated
    assert result.stdout_total == 2_000_000
    gap = result.stdout_gap
    assert gap is not None
    start, end = gap
    whole = b"".join(f"{i:09d}\n".encode() for i in range(200_000))
    assert result.stdout[:start] == whole[:start]
    assert result.stdout[start:] == whole[end:]
    assert len(result.stdout) <= limit
    assert min(start, len(whole) - end) >= 0.4 * limit
    assert "bytes dropped" in result.text
    assert result.stderr_gap is None


async def test_the_default_limit_is_ten_mebibytes_a_stream(box: BoxFactory) -> None:
    sandbox = await box()
    exact = await sandbox.run(f"head -c {10 << 20} /dev/zero; head -c {10 << 20} /dev/zero >&2")
    assert not exact.truncated
    assert (len(exact.stdout), len(exact.stderr)) == (10 << 20, 10 << 20)
    more = await sandbox.run(f"head -c {(10 << 20) + 1} /dev/zero")
    assert more.truncated
    assert more.stdout_total == (10 << 20) + 1


async def test_a_reader_holds_the_process_back_and_loses_nothing(box: BoxFactory) -> None:
    sandbox = await box()
    code = (
        "import os,sys,time\n"
        "print('ready',flush=True)\n"
        "while not os.path.exists('/tmp/go'): time.sleep(0.01)\n"
        "for i in range(4000000):\n"
        "  sys.stdout.write(f'{i:09d}\\n')\n"
        "  if i % 100000 == 0:\n"
        "    open('/tmp/at','w').write(str(i))\n"
    )
    process = await sandbox.start(["python3", "-c", code], output_limit=1 << 20)
    expected = 0
    paused = False
    async for chunk in process.output():
        assert chunk.dropped == 0
        assert chunk.offset == expected
        expected += len(chunk.data)
        if expected == len(b"ready\n"):
            await sandbox.files.write(
                "/tmp/go", b""
            )  # only now, with this reader attached, comes what must not be lost
        if expected > (1 << 20) and not paused:
            paused = True
            await asyncio.sleep(2)
            before = await sandbox.files.read("/tmp/at")
            await asyncio.sleep(1)
            assert await sandbox.files.read("/tmp/at") == before, "the process ran on while its reader did not read"
    assert expected == 40_000_000 + len(b"ready\n")
    assert await process.wait(timeout=scaled(5)) == 0


async def test_since_that_is_gone_yields_a_marked_gap(box: BoxFactory) -> None:
    sandbox = await box()
    process = await sandbox.start("head -c 1000000 /dev/zero; echo end", output_limit=100_000)
    assert await process.wait(timeout=scaled(10)) == 0
    chunks = [chunk async for chunk in process.output(since=200_000)]
    assert chunks[0].dropped > 0
    assert chunks[0].offset == 200_000
    assert sum(len(chunk.data) + chunk.dropped for chunk in chunks) == 1_000_004 - 200_000
    assert chunks[-1].data.endswith(b"end\n")
    at = 200_000
    for chunk in chunks:
        assert chunk.offset == at
        at += len(chunk.data) + chunk.dropped


async def test_many_clients_may_attach_and_each_sees_all(box: BoxFactory, daemon: Daemon) -> None:
    sandbox = await box()
    process = await sandbox.start("for i in $(seq 1000); do echo $i; done; sleep 1; echo end")
    expected = b"".join(b"%d\n" % number for number in range(1, 1001)) + b"end\n"

    async def read() -> bytes:
        async with daemon.client() as client:
            attached = await (await client.get(sandbox.id)).attach(process.id)
            return b"".join([chunk.data async for chunk in attached.output()])

    async with asyncio.TaskGroup() as group:
        readers = [group.create_task(read()) for _ in range(4)]
    assert all(reader.result() == expected for reader in readers)


@pytest.mark.slow
@pytest.mark.timeout(scaled(240))
async def test_yes_for_a_minute_costs_bounded_memory_and_no_disk(box: BoxFactory, daemon: Daemon) -> None:
    sandbox = await box()
    launcher = daemon.launcher_pid
    assert launcher is not None

    def memory() -> int:
        return sum(procfs.rss_bytes(pid) for pid in (os.getpid(), daemon.edge_pid, launcher, *daemon.guest_pids()))

    def disk() -> int:
        return sum(path.stat().st_blocks * 512 for path in daemon.home.rglob("*") if path.is_file())

    memory_before, disk_before = memory(), disk()
    call = asyncio.ensure_future(sandbox.run("yes", timeout=60))
    while not call.done():
        await asyncio.sleep(1)
        assert memory() - memory_before < 64 << 20
        assert disk() - disk_before < 16 << 20
    with pytest.raises(dsec.ExecTimeout) as caught:
        await call
    result = caught.value.result
    assert result.truncated
    assert result.stdout_total > 100 << 20
    assert len(result.stdout) <= 10 << 20


async def test_the_guest_of_a_small_sandbox_survives_its_own_buffers(box: BoxFactory) -> None:
    """What is retained of many commands' output is bounded by the sandbox's memory."""
    sandbox = await box(memory="64MiB", disk_backing="local")
    for _ in range(20):
        result = await sandbox.run("head -c 9000000 /dev/zero", output_limit="10MiB")
        assert result.stdout_total == 9_000_000
    # Side by side they share one budget: the middle goes, not the sandbox.
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(sandbox.run("head -c 9000000 /dev/zero", output_limit="10MiB")) for _ in range(8)]
    results = [call.result() for call in calls]
    assert {result.stdout_total for result in results} == {9_000_000}
    assert any(result.truncated for result in results)
    assert (await sandbox.run("echo alive")).text == "alive\n"


async def test_commands_side_by_side_do_not_mix(box: BoxFactory) -> None:
    sandbox = await box()

    async def one(number: int) -> None:
        result = await sandbox.run(
            f"for i in $(seq 50); do echo out{number}; echo err{number} >&2; done; exit {number}"
        )
        assert result.stdout == b"out%d\n" % number * 50
        assert result.stderr == b"err%d\n" % number * 50
        assert result.exit_code == number

    async with asyncio.TaskGroup() as group:
        for number in range(60):
            group.create_task(one(number))


async def test_who_where_and_with_what_a_command_runs(box: BoxFactory) -> None:
    sandbox = await box(env={"FROM_BOX": "1", "BOTH": "box"}, workdir="/tmp")
    result = await sandbox.run("id -u; pwd; echo $FROM_BOX $BOTH $HOME $USER", env={"BOTH": "call"})
    assert result.text == "0\n/tmp\n1 call /root root\n"
    result = await sandbox.run("id -u; id -g; id -G; echo $HOME; pwd", user="daemon", cwd="/usr")
    assert result.text.splitlines()[:2] == ["1", "1"]
    assert result.text.splitlines()[-1] == "/usr"
    assert (await sandbox.run("id -u; id -g", user="1234:5678")).text == "1234\n5678\n"
    assert (await sandbox.run("id -u", user="0")).text == "0\n"
    assert (
        await sandbox.run(["sh", "-c", "printf '%s|' \"$@\"", "sh", "a b", "$HOME", "*", ""])
    ).text == "a b|$HOME|*||"


async def test_what_cannot_be_started_is_an_error_not_an_exit_code(box: BoxFactory) -> None:
    sandbox = await box()
    await sandbox.files.write("/tmp/not-executable", b"#!/bin/sh\n")
    for options in (
        {"command": ["/no/such/program"]},
        {"command": ["/tmp/not-executable"]},
        {"command": ["/tmp"]},
        {"command": ["true"], "cwd": "/no/such/folder"},
        {"command": "true", "cwd": "/etc/passwd"},
    ):
        with pytest.raises(dsec.CommandNotStarted) as caught:
            await sandbox.run(options.pop("command"), **options)
        assert str(caught.value)
    with pytest.raises((dsec.CommandNotStarted, dsec.InvalidRequest)):
        await sandbox.run("true", user="nobody-of-that-name")
    with pytest.raises(dsec.InvalidRequest):
        await sandbox.run([])
    with pytest.raises(dsec.InvalidRequest):
        await sandbox.run(["a\0b"])
    # The shell's own complaint is an ordinary result.
    assert (await sandbox.run("no-such-program")).exit_code == 127


async def test_check_raises_with_the_whole_result(box: BoxFactory) -> None:
    sandbox = await box()
    with pytest.raises(dsec.CommandFailed) as caught:
        await sandbox.run("echo out; echo err >&2; exit 7", check=True)
    result = caught.value.result
    assert (result.exit_code, result.stdout, result.stderr) == (7, b"out\n", b"err\n")
    assert caught.value.sandbox_survived is True


async def test_a_started_process_takes_stdin_and_signals(box: BoxFactory) -> None:
    sandbox = await box()
    process = await sandbox.start(
        "trap 'echo term' TERM; while read line; do echo got $line; done; echo eof", stdin=True
    )
    received: list[bytes] = []

    async def collect() -> None:
        async for chunk in process.output():
            received.append(chunk.data)  # noqa: PERF401 - looked at while it grows

    def text() -> bytes:
        return b"".join(received)

    async with asyncio.TaskGroup() as group:
        group.create_task(collect())
        await process.write(b"one\n")
        await eventually(lambda: b"got one\n" in text(), within_s=5, what="the line came back")
        await process.signal("TERM")
        await process.write(b"two\n")
        await eventually(lambda: b"got two\n" in text(), within_s=5, what="the second line came back")
        assert b"term\n" in text()
        await process.close_stdin()
        assert await process.wait(timeout=scaled(5)) == 0
    assert text().endswith(b"eof\n")
    with pytest.raises(dsec.Conflict):
        await process.write(b"three\n")
    await process.aclose()


async def test_a_second_command_can_be_killed_through_its_handle(box: BoxFactory) -> None:
    sandbox = await box()
    await install_programs(sandbox)
    process = await sandbox.start("setsid sleep 4804 & sleep 4804")
    assert process.id in [entry.id for entry in await sandbox.processes() if entry.state == "running"]
    with pytest.raises(dsec.DeadlineExceeded):
        await process.wait(timeout=0.2)
    await process.signal("KILL", tree=True)
    assert await process.wait(timeout=scaled(5)) == 137
    await no_process(sandbox, "sleep 4804")


async def test_a_cancelled_run_kills_its_command(box: BoxFactory) -> None:
    sandbox = await box()
    await install_programs(sandbox)
    task = asyncio.ensure_future(sandbox.run("setsid sleep 4805 & sleep 4805"))

    async def started() -> bool:
        return (await sandbox.run(["pcount", "sleep 4805"])).text == "2\n"

    await eventually(started, within_s=5, what="the command runs")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await no_process(sandbox, "sleep 4805")


async def test_the_result_tells_time_cpu_and_memory(box: BoxFactory) -> None:
    sandbox = await box()
    slept = await sandbox.run("sleep 0.5")
    assert 0.5 <= slept.duration_s < scaled(2)
    assert slept.cpu_s < 0.4
    code = "import time\ne=time.process_time()+0.5\nb=b'x'*(64<<20)\nwhile time.process_time()<e: pass"
    busy = await sandbox.run(["python3", "-c", code])
    assert 0.45 <= busy.cpu_s < 2
    assert busy.peak_memory > 64 << 20
    process = await sandbox.start("sleep 60 & sleep 60")

    async def all_three_run() -> bool:
        return (await sandbox.usage()).pids == 3

    await eventually(all_three_run, within_s=5, what="usage counts the shell and its two children")
    usage = await sandbox.usage()
    assert usage.cpu_s >= 0.45
    assert usage.memory_limit == 512 << 20
    await process.kill()


async def test_later_features_are_refused(box: BoxFactory, client: dsec.AsyncClient) -> None:
    sandbox = await box()
    with pytest.raises(dsec.Unsupported):
        await sandbox.pause()
    with pytest.raises(dsec.Unsupported):
        await sandbox.resume()
    with pytest.raises(dsec.Unsupported):
        await sandbox.snapshot("a")
    with pytest.raises(dsec.Unsupported):
        await sandbox.fork(2)
    with pytest.raises(dsec.Unsupported):
        await sandbox.pack_diff("a:1")
    with pytest.raises(dsec.Unsupported):
        await sandbox.audit()
    with pytest.raises(dsec.Unsupported):
        await sandbox.start("true", pty=(24, 80))
    with pytest.raises(dsec.Unsupported):
        await client.create("container", network={"pypi": True})
    with pytest.raises(dsec.Unsupported):
        await client.create("container", on_idle="pause")
    with pytest.raises(dsec.Unsupported):
        await client.create("container", workspace="w")
    with pytest.raises(dsec.Unsupported):
        await client.create("container", snapshot="s")
    with pytest.raises(dsec.Unsupported):
        await client.fncall("print(1)")
    assert (await sandbox.run("echo alive")).text == "alive\n"
