"""The life of sandboxes through the SDK: create, batch, list, timeouts, events, ends, and both clients."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator

import pytest
from tests.support import raw_http
from tests.support.daemon import Daemon
from tests.support.fixtures import BoxFactory
from tests.support.timing import Stopwatch, eventually, scaled

import dsec

pytestmark = [pytest.mark.system, pytest.mark.root]


def unique_label() -> dict[str, str]:
    """A label no other test uses."""
    return {"test": secrets.token_hex(6)}


async def test_create_run_stop_and_the_record_after(client: dsec.AsyncClient) -> None:
    async with await client.create("container", labels={"a": "1"}) as sandbox:
        assert (await sandbox.run("echo hi")).text == "hi\n"
        assert len(sandbox.id) <= 40
        assert sandbox.id.isalnum()
    ended = await client.get(sandbox.id)
    assert (ended.state, ended.record.reason) == ("stopped", "requested")
    assert ended.record.ended_at is not None
    with pytest.raises(dsec.SandboxGone) as caught:
        await ended.run("true")
    assert (caught.value.reason, caught.value.sandbox_id) == ("requested", sandbox.id)
    assert caught.value.sandbox_survived is False
    with pytest.raises(dsec.SandboxGone):
        await ended.files.read("/etc/passwd")
    await ended.stop()  # stopping twice is harmless


async def test_the_block_ends_the_sandbox_on_exceptions_and_cancellation(client: dsec.AsyncClient) -> None:
    label = unique_label()
    with pytest.raises(ZeroDivisionError):
        async with await client.create("container", labels=label):
            _ = 1 // 0

    async def sleeper() -> None:
        async with await client.create("container", labels=label) as sandbox:
            await sandbox.run("sleep 60")

    task = asyncio.ensure_future(sleeper())

    async def listed() -> bool:
        return bool((await client.list(labels=label)).items)

    await eventually(listed, within_s=10, what="it is there")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not (await client.list(labels=label)).items


async def test_a_batch_comes_as_it_becomes_ready(client: dsec.AsyncClient) -> None:
    label = unique_label()
    boxes = []
    async for item in client.create_many(24, "container", memory="64MiB", disk="64MiB", labels=label):
        assert isinstance(item, dsec.AsyncSandbox), item
        boxes.append(item)
    assert len({sandbox.id for sandbox in boxes}) == 24
    async with asyncio.TaskGroup() as group:
        for sandbox in boxes:
            group.create_task(sandbox.run("true", check=True))
    async with asyncio.TaskGroup() as group:
        for sandbox in boxes:
            group.create_task(sandbox.stop())
    assert not (await client.list(labels=label)).items


async def test_a_batch_left_half_way_stops_the_rest(client: dsec.AsyncClient) -> None:
    label = unique_label()
    kept = []
    batch = client.create_many(40, "container", memory="64MiB", disk="64MiB", labels=label)
    async for item in batch:
        assert isinstance(item, dsec.AsyncSandbox)
        kept.append(item)
        if len(kept) == 5:
            break
    assert isinstance(batch, AsyncGenerator)
    await batch.aclose()

    async def only_kept() -> bool:
        page = await client.list(labels=label, limit=1000)
        return {entry.id for entry in page.items} <= {sandbox.id for sandbox in kept}

    await eventually(only_kept, within_s=15, what="what was not delivered is stopped")
    for sandbox in kept:
        await sandbox.stop()


async def test_a_cancelled_batch_leaves_nothing(client: dsec.AsyncClient) -> None:
    label = unique_label()

    async def consume() -> None:
        async for _ in client.create_many(60, "container", memory="64MiB", disk="64MiB", labels=label):
            pass

    for delay_s in (0.0, 0.01, 0.03, 0.1):
        task = asyncio.ensure_future(consume())
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.wait([task])
        # What was handed to the caller before the cancellation is the caller's: it is found by its label.
        for entry in (await client.list(labels=label, limit=1000)).items:
            await (await client.get(entry.id)).stop()

        async def nothing() -> bool:
            return not (await client.list(labels=label)).items

        await eventually(nothing, within_s=15, what="nothing is left")


async def test_on_shortage_fail_reports_what_did_not_fit(client: dsec.AsyncClient) -> None:
    label = unique_label()
    boxes: list[dsec.AsyncSandbox] = []
    errors: list[dsec.DsecError] = []
    async for item in client.create_many(
        30, "container", memory="4GiB", disk="64MiB", labels=label, on_shortage="fail"
    ):
        if isinstance(item, dsec.AsyncSandbox):
            boxes.append(item)
        else:
            errors.append(item)
    assert len(boxes) + len(errors) == 30
    assert all(isinstance(error, dsec.NoCapacity) for error in errors)
    for sandbox in boxes:
        await sandbox.stop()


async def test_listing_filters_and_pages(client: dsec.AsyncClient) -> None:
    label = unique_label()
    boxes = [
        await client.create(
            "container", memory="64MiB", disk="64MiB", labels={**label, "n": str(number % 2)}, job=f"j{number % 3}"
        )
        for number in range(9)
    ]
    try:
        ids = [sandbox.id for sandbox in boxes]
        page = await client.list(labels=label, limit=4)
        seen = [entry.id for entry in page.items]
        assert len(seen) == 4
        while page.next_cursor:
            page = await client.list(labels=label, limit=4, cursor=page.next_cursor)
            seen += [entry.id for entry in page.items]
        assert seen == ids[::-1]
        odd = await client.list(labels={**label, "n": "1"})
        assert {entry.id for entry in odd.items} == set(ids[1::2])
        await boxes[0].stop()
        living = {entry.id for entry in (await client.list(labels=label)).items}
        assert living == set(ids[1:])
        stopped = {entry.id for entry in (await client.list(labels=label, state="stopped")).items}
        assert stopped == {ids[0]}
        everything = {entry.id for entry in (await client.list(labels=label, state="all")).items}
        assert everything == set(ids)
        assert not (await client.list(labels={**label, "n": "2"})).items
    finally:
        for sandbox in boxes:
            await sandbox.stop()


async def test_idle_sandboxes_end_and_looking_is_no_use(client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(idle_timeout=2)
    with Stopwatch() as watch:
        while (await client.get(sandbox.id)).state == "running":
            await client.list()
            with contextlib.suppress(dsec.SandboxGone):  # it may end between the two
                await sandbox.usage()
            await asyncio.sleep(0.2)
            watch.assert_below(6)
    assert watch.seconds >= 1.8

    async def ended() -> bool:
        return (await client.get(sandbox.id)).record.reason == "idle"

    await eventually(ended, within_s=5, what="it ended as idle")


async def test_use_and_background_processes_keep_it_from_idling(client: dsec.AsyncClient, box: BoxFactory) -> None:
    used, busy = await box(idle_timeout=2), await box(idle_timeout=2)
    process = await busy.start("sleep 60")
    for _ in range(8):
        await used.files.write("/tmp/x", b"x")
        await asyncio.sleep(0.6)
    assert (await client.get(used.id)).state == "running"
    assert (await client.get(busy.id)).state == "running"
    await process.kill()

    async def ended() -> bool:
        return (await client.get(busy.id)).record.reason == "idle"

    await eventually(ended, within_s=8, what="it idles once its process ended")


async def test_timeouts_can_be_changed(client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(idle_timeout=2, max_lifetime=3)
    await sandbox.set_timeout(idle=None, max_lifetime=60)
    await asyncio.sleep(4)
    assert (await client.get(sandbox.id)).state == "running"
    await sandbox.set_timeout(max_lifetime=0.5)

    async def ended() -> bool:
        return (await client.get(sandbox.id)).record.reason == "lifetime"

    await eventually(ended, within_s=5, what="it ended by its lifetime")


async def test_events_tell_the_story_in_order(client: dsec.AsyncClient, daemon: Daemon) -> None:
    async with await client.create("container") as sandbox:
        await sandbox.run("true")
    answer = await raw_http.request(daemon.paths.api_socket, "GET", f"/v1/events?sandbox={sandbox.id}", key=daemon.key)
    events = answer.json["items"]
    assert [event["seq"] for event in events] == sorted(event["seq"] for event in events)
    types = " ".join(event["type"] for event in events)
    assert "creat" in types
    assert "stopped" in types
    assert all(event["sandbox_id"] == sandbox.id for event in events)
    later = await raw_http.request(
        daemon.paths.api_socket, "GET", f"/v1/events?sandbox={sandbox.id}&since={events[-1]['seq']}", key=daemon.key
    )
    assert later.json["items"] == []


async def test_metrics_are_prometheus_text(client: dsec.AsyncClient, daemon: Daemon, box: BoxFactory) -> None:
    sandbox = await box()
    await sandbox.run("true")
    answer = await raw_http.request(daemon.paths.api_socket, "GET", "/metrics", key=daemon.key)
    assert answer.status == 200
    lines = answer.body.decode().splitlines()
    assert any(line.startswith("# HELP dsec_") for line in lines)
    assert any(line.startswith("dsec_") and "sandbox" in line for line in lines)
    assert not any(sandbox.id in line for line in lines)


async def test_a_create_beyond_its_own_timeout_is_an_error_and_leaves_nothing(client: dsec.AsyncClient) -> None:
    label = unique_label()
    try:
        sandbox = await client.create("container", labels=label, timeout=0.001)
    except (dsec.DeadlineExceeded, dsec.NoCapacity, dsec.OutcomeUnknown, dsec.ConnectionFailed):
        pass
    else:
        await sandbox.stop()

    async def nothing() -> bool:
        return not (await client.list(labels=label)).items

    await eventually(nothing, within_s=5, what="nothing is left")


def test_the_sync_client_does_the_same(daemon: Daemon) -> None:
    with dsec.Client(url=daemon.url, key=daemon.key) as client, client.create("container") as sandbox:
        assert sandbox.run("echo hi").text == "hi\n"
        sandbox.files.write("/a", b"x")
        assert sandbox.files.read("/a") == b"x"
        process = sandbox.start("echo one; echo two")
        assert b"".join(chunk.data for chunk in process.output()) == b"one\ntwo\n"
        assert process.wait(timeout=scaled(5)) == 0
        with pytest.raises(dsec.ExecTimeout):
            sandbox.run("sleep 5", timeout=0.2)


async def test_sandboxes_are_separate(box: BoxFactory) -> None:
    first, second = await box(), await box()
    await first.run("echo secret > /secret; echo secret > /tmp/secret; echo x > /dev/shm/secret; sleep 4806 &")
    assert (await second.run("ls /secret /tmp/secret /dev/shm/secret 2>/dev/null")).stdout == b""
    assert "sleep" not in (await second.run("cat /proc/[0-9]*/comm")).text
    names = [(await sandbox.run("hostname")).text for sandbox in (first, second)]
    assert names[0] != names[1]


async def test_a_container_has_loopback_only(box: BoxFactory) -> None:
    sandbox = await box()
    code = (
        "import socket\n"
        "print(sorted(name for _, name in socket.if_nameindex()))\n"
        "s=socket.create_server(('127.0.0.1',80));c=socket.create_connection(('127.0.0.1',80));print('loopback')\n"
        "try: socket.create_connection(('198.18.0.1',80),timeout=3)\n"
        "except OSError as e: print(e.errno)\n"
    )
    assert (await sandbox.run(["python3", "-c", code])).text == "['lo']\nloopback\n101\n"
