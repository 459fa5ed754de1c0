"""What run, start, output and their kin promise, whichever twin is used."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.contract.sdk.reference_server import ReferenceServer

import dsec


async def test_exit_codes_signals_and_streams(box: Any) -> None:
    result = await box.run("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.signal, result.reason) == (3, None, "exit")
    assert (result.stdout, result.stderr, result.text) == (b"out\n", b"err\n", "out\n")
    assert not result.truncated
    killed = await box.run("kill -TERM $$")
    assert (killed.exit_code, killed.signal, killed.reason) == (143, 15, "signal")


async def test_argv_is_not_for_the_shell(box: Any) -> None:
    result = await box.run(["printf", "%s", "$HOME `id`"])
    assert result.stdout == b"$HOME `id`"


async def test_check_raises_with_the_result(box: Any) -> None:
    with pytest.raises(dsec.CommandFailed, match="exit code 4: boom") as caught:
        await box.run("echo boom >&2; exit 4", check=True)
    assert caught.value.result.exit_code == 4
    assert caught.value.sandbox_survived


async def test_timeout_has_the_partial_output(box: Any) -> None:
    with pytest.raises(dsec.ExecTimeout) as caught:
        await box.run("echo begun; sleep 60", timeout=0.3)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.result.stdout == b"begun\n"
    assert caught.value.result.reason == "timeout"
    assert (await box.run("echo usable")).text == "usable\n"


async def test_what_cannot_start_is_an_error(box: Any) -> None:
    with pytest.raises(dsec.CommandNotStarted):
        await box.run(["/no/such/program"])
    for bad in ([], b"ls", [b"ls"]):
        with pytest.raises(dsec.InvalidRequest):
            await box.run(bad)
    with pytest.raises(dsec.InvalidRequest, match="cannot be sent"):
        await box.run(["echo", "\udcff"])


async def test_stdin_as_bytes_text_and_streams(box: Any) -> None:
    assert (await box.run("cat", stdin=b"\x00\xff")).stdout == b"\x00\xff"
    assert (await box.run("cat", stdin="text")).text == "text"
    assert (await box.run("cat; echo end")).text == "end\n"
    assert (await box.run("wc -c", stdin=(b"a" * 1000 for _ in range(10)))).text.strip() == "10000"

    async def pieces() -> AsyncIterator[bytes]:
        yield b"one "
        await asyncio.sleep(0.01)
        yield b"two"

    assert (await box.run("cat", stdin=pieces())).text == "one two"


async def test_large_stdin_and_output_both_ways(box: Any) -> None:
    data = bytes(range(256)) * 40_000
    result = await box.run("cat", stdin=data, output_limit="64MiB")
    assert hashlib.sha256(result.stdout).digest() == hashlib.sha256(data).digest()
    assert result.stdout_total == len(data)
    assert not result.truncated


async def test_streamed_output_is_cut_as_the_server_cuts(box: Any) -> None:
    script = "import sys; sys.stdout.buffer.write(bytes(range(250)) * 4000)"
    direct = await box.run(["python3", "-c", script], output_limit=1000)
    streamed = await box.run(["python3", "-c", script], output_limit=1000, stdin=iter([b"x"]))
    assert direct.truncated
    assert (streamed.stdout, streamed.stdout_gap, streamed.stdout_total) == (
        direct.stdout,
        direct.stdout_gap,
        direct.stdout_total,
    )


async def test_stdin_that_never_ends_does_not_hold_the_command(box: Any) -> None:
    async def never() -> AsyncIterator[bytes]:
        await asyncio.sleep(3600)
        yield b""

    began = time.monotonic()
    assert (await box.run(["echo", "hi"], stdin=never())).text == "hi\n"
    assert time.monotonic() - began < 2
    with pytest.raises(dsec.ExecTimeout):
        await box.run(["sleep", "60"], stdin=never(), timeout=0.3)


async def test_a_broken_input_is_the_callers_error(box: Any) -> None:
    def broken() -> Any:
        yield b"a"
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        await box.run("cat >/dev/null; sleep 0.2", stdin=broken())


async def test_cap_counts_bytes_and_keeps_characters_whole(box: Any) -> None:
    script = "import sys; sys.stdout.buffer.write('\u20ac'.encode()*100000)"
    result = await box.run(["python3", "-c", script], output_limit=100_000)
    assert result.truncated
    text = result.text
    assert len(text.encode()) <= 100_000
    assert "\ufffd" not in text
    head, mark, tail = text.partition("\n[... ")
    assert mark
    assert set(head) == {"\u20ac"}
    assert set(tail.split(" bytes dropped ...]\n")[1]) == {"\u20ac"}


async def test_processes_live_in_the_background(box: Any) -> None:
    process = await box.start("echo one; sleep 0.2; echo two; exit 5")
    found = [item.id for item in await box.processes()]
    assert found == [process.id]
    again = await box.attach(process.id)
    assert again.pid == process.pid
    chunks = [chunk async for chunk in again.output()]
    assert b"".join(chunk.data for chunk in chunks) == b"one\ntwo\n"
    assert chunks[0].stream == "stdout"
    assert chunks[-1].offset == 4
    assert await process.wait(timeout=5) == 5
    assert process.result.reason == "exit"
    later = [chunk async for chunk in again.output(since=4)]
    assert b"".join(chunk.data for chunk in later) == b"two\n"


async def test_output_without_follow_ends_while_the_process_runs(box: Any) -> None:
    async with await box.start("echo one; sleep 60") as process:
        first = b""
        while first != b"one\n":
            first = b"".join([chunk.data async for chunk in process.output(follow=False)])
        assert process.position == (4, 0)
        with pytest.raises(dsec.DeadlineExceeded):
            await process.wait(timeout=0.05)
    assert (await box.attach(process.id)).state in ("running", "ended")
    assert await process.wait(timeout=5) == 137


async def test_stdin_of_a_process(box: Any) -> None:
    process = await box.start("read line; echo got $line; cat", stdin=True)
    await process.write("hello\n")
    await process.write(b"rest")
    await process.close_stdin()
    await process.close_stdin()
    assert b"".join([chunk.data async for chunk in process.output()]) == b"got hello\nrest"
    with pytest.raises(dsec.Conflict):
        await process.write("late")
    await process.aclose()


async def test_signals_by_name_and_number(box: Any) -> None:
    process = await box.start("trap 'exit 9' TERM; while :; do sleep 0.05; done")
    await asyncio.sleep(0.2)
    await process.signal("SIGTERM")
    assert await process.wait(timeout=5) == 9
    other = await box.start(["sleep", "60"])
    await other.signal(9)
    assert await other.wait(timeout=5) == 137
    await other.kill()


async def test_a_stream_is_resumed_by_offset(box: Any, server: ReferenceServer) -> None:
    server.faults["STREAM"] = 3
    process = await box.start("for i in $(seq 40); do echo line $i; sleep 0.02; done")
    whole = b"".join([chunk.data async for chunk in process.output()])
    assert whole == b"".join(b"line %d\n" % number for number in range(1, 41))
    assert server.faults["STREAM"] == 0


async def test_a_lost_answer_runs_nothing_twice(box: Any, server: ReferenceServer) -> None:
    server.faults["POST /v1/sandboxes/" + box.id + "/exec"] = 2
    result = await box.run("echo x >> count; cat count")
    assert result.text == "x\n"
    server.faults["POST /v1/sandboxes/" + box.id + "/processes"] = 1
    process = await box.start("echo y >> count2; cat count2")
    assert await process.wait(timeout=5) == 0
    assert (await box.run("cat count2")).text == "y\n"


async def test_usage_and_timeouts(box: Any) -> None:
    assert (await box.usage()).memory_limit == 256 << 20
    record = await box.set_timeout(idle=600, max_lifetime=None)
    assert (record.idle_timeout, record.max_lifetime) == (600, None)


async def test_what_later_releases_bring_is_refused(client: Any, box: Any) -> None:
    for call in (box.pause, box.resume, box.snapshot, box.fork, box.audit, box.shell):
        with pytest.raises(dsec.Unsupported, match="not part of this release"):
            await call()
    with pytest.raises(dsec.Unsupported):
        await box.pack_diff("x:1")
    with pytest.raises(dsec.Unsupported):
        await box.start("true", pty=(24, 80))
    with pytest.raises(dsec.Unsupported):
        await client.fncall("print(1)")
    with pytest.raises(dsec.Unsupported):
        box.forward(80)
    with pytest.raises(dsec.Unsupported):
        _ = box.screen.screenshot
    with pytest.raises(dsec.Unsupported):
        _ = client.jobs.list
    with pytest.raises(dsec.Unsupported):
        dsec.function(image="debian:12")
    assert issubclass(dsec.Unsupported, NotImplementedError)
