"""What create, create_many, list, stop and the client itself promise."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.contract.sdk.reference_server import KEY, ReferenceServer, serve
from tests.support.timing import eventually

import dsec


async def test_a_sandbox_ends_with_its_block(client: Any) -> None:
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the block is what is tested
        async with await client.create(labels={"run": "7"}, memory="1GiB") as box:
            assert box.record.memory == 1 << 30
            assert (await client.get(box.id)).state == "running"
            raise ZeroDivisionError
    ended = await client.get(box.id)
    assert (ended.state, ended.reason) == ("stopped", "requested")
    with pytest.raises(dsec.SandboxGone) as caught:
        await ended.run("true")
    assert caught.value.reason == "requested"
    await box.stop()


async def test_bad_requests_are_typed(client: Any) -> None:
    with pytest.raises(dsec.ImageError):
        await client.create(image="nothing:1")
    with pytest.raises(dsec.Unsupported):
        await client.create("microvm")
    with pytest.raises(dsec.InvalidRequest):
        await client.create(memory="much")
    with pytest.raises(dsec.InvalidRequest):
        await client.create(memory=-1)
    with pytest.raises(dsec.InvalidRequest):
        await client.create(timeout=0)
    with pytest.raises(dsec.NotFound):
        await client.get("nosuch")
    with pytest.raises(LookupError):
        await client.get("nosuch/../x")


async def test_a_wrong_key_and_no_server(server: ReferenceServer, url: str, tmp_path: Path) -> None:
    async with dsec.AsyncClient(url, key="wrong") as client:
        with pytest.raises(dsec.Unauthenticated):
            await client.create()
    async with dsec.AsyncClient(f"unix://{tmp_path}/nowhere.sock", key=KEY) as client:
        with pytest.raises(dsec.ConnectionFailed, match="dsec up"):
            await client.create()
    with pytest.raises(dsec.InvalidRequest):
        dsec.AsyncClient("ftp://x", key=KEY)


async def test_a_batch_is_one_request(client: Any, server: ReferenceServer) -> None:
    made = [item async for item in client.create_many(30, labels={"b": "1"})]
    errors = [item for item in made if isinstance(item, dsec.DsecError)]
    assert len(made) == 30
    assert [type(item) for item in errors] == [dsec.NoCapacity]
    assert sum(call.startswith("POST /v1/sandboxes:batch") for call in server.seen) == 1
    boxes = [item for item in made if not isinstance(item, dsec.DsecError)]
    stopped = await client.stop_many([boxes[0].id, "unknown"])
    assert [(item.state, type(item.error)) for item in stopped] == [("stopped", type(None)), (None, dsec.NotFound)]
    assert len(await client.stop_many(labels={"b": "1"})) == 29
    assert await client.stop_many() == []
    assert (await client.list(labels={"b": "1"})).items == []


@pytest.mark.parametrize("taken", [1, 3])
async def test_a_batch_left_early_leaves_nothing(client: Any, server: ReferenceServer, taken: int) -> None:
    server.slow_create_s = 0.02
    batch = client.create_many(100, labels={"b": "2"})
    kept = [await anext(batch) for _ in range(taken)]
    await batch.aclose()
    await asyncio.sleep(0.1)
    page = await client.list(labels={"b": "2"})
    assert {item.id for item in page.items} == {item.id for item in kept}


async def test_a_batch_cancelled_before_its_first_leaves_nothing(url: str, server: ReferenceServer) -> None:
    server.slow_create_s = 0.05
    async with dsec.AsyncClient(url, key=KEY) as client:
        batch = client.create_many(100)
        task = asyncio.ensure_future(anext(batch))
        await eventually(lambda: bool(server.boxes), within_s=5, what="a sandbox is being made")
        task.cancel()
        await asyncio.wait([task])
        await batch.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(0.2)
        kept = set() if task.cancelled() else {getattr(task.result(), "id", "")}
        assert {item.id for item in (await client.list()).items} == kept


async def test_a_batch_goes_on_over_a_lost_connection(url: str, server: ReferenceServer) -> None:
    server.faults["POST /v1/sandboxes:batch"] = 1
    server.slow_create_s = 0.001
    async with dsec.AsyncClient(url, key=KEY) as client:
        made = [item async for item in client.create_many(20)]
    assert len({item.id for item in made if isinstance(item, dsec.AsyncSandbox)}) == 19


async def test_a_cancelled_create_leaves_nothing(url: str, server: ReferenceServer) -> None:
    server.slow_create_s = 5
    async with dsec.AsyncClient(url, key=KEY) as client:
        task = asyncio.ensure_future(client.create(labels={"c": "1"}))
        await eventually(lambda: bool(server.boxes), within_s=5, what="a sandbox is being made")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await client.list(labels={"c": "1"})).items == []


async def test_a_create_that_is_too_slow_leaves_nothing(
    url: str, server: ReferenceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.slow_create_s = 5
    monkeypatch.setattr("dsec.sdk.client.RECONNECT_S", 0.0)
    async with dsec.AsyncClient(url, key=KEY) as client:
        with pytest.raises(dsec.DeadlineExceeded):
            await client.create(timeout=0.2)
        assert len(server.boxes) == 1
        assert (await client.list()).items == []


async def test_a_cancelled_run_is_killed(url: str, server: ReferenceServer) -> None:
    async with dsec.AsyncClient(url, key=KEY) as client, await client.create() as box:
        task = asyncio.ensure_future(box.run("sleep 60"))
        await eventually(lambda: bool(server.boxes[box.id].processes), within_s=5, what="the command runs")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (process,) = server.boxes[box.id].processes.values()
        async with asyncio.timeout(5):
            await process.child.wait()


async def test_a_lost_create_is_not_made_twice(client: Any, server: ReferenceServer) -> None:
    server.faults["POST /v1/sandboxes"] = 2
    box = await client.create(labels={"once": "1"})
    assert [item.id for item in (await client.list(labels={"once": "1"})).items] == [box.id]


async def test_what_may_have_happened_is_unknown(box: Any, server: ReferenceServer) -> None:
    await box.files.write("/log", b"a")
    server.faults["PUT "] = 1
    with pytest.raises(dsec.OutcomeUnknown):
        await box.files.write("/log", b"b", append=True)
    server.faults["PUT "] = 1
    await box.files.write("/log", b"replaced")
    assert await box.files.read("/log") == b"replaced"


async def test_calls_survive_a_restart(url: str, tmp_path: Path) -> None:
    folder = tmp_path / "boxes"
    folder.mkdir()
    state = ReferenceServer(folder)
    async with dsec.AsyncClient(url, key=KEY) as client:
        async with serve(state, tmp_path / "api.sock"):
            box = await client.create()
        (tmp_path / "api.sock").unlink(missing_ok=True)

        async def restart() -> None:
            await asyncio.sleep(0.5)
            async with serve(state, tmp_path / "api.sock"):
                await asyncio.sleep(3)

        task = asyncio.ensure_future(restart())
        assert (await box.run("echo back")).text == "back\n"
        await box.stop()
        task.cancel()
        await asyncio.wait([task])


async def test_listing_pages(client: Any, server: ReferenceServer) -> None:
    made = [await client.create(labels={"n": str(number % 2)}) for number in range(5)]
    page = await client.list(limit=2)
    assert len(page.items) == 2
    rest = await client.list(limit=10, cursor=page.next_cursor)
    assert [item.id for item in [*page.items, *rest.items]] == [item.id for item in reversed(made)]
    assert rest.next_cursor is None
    assert len([item async for item in client.list_all(labels={"n": "0"})]) == 3
    await made[0].stop()
    assert [item.id for item in (await client.list(state="stopped")).items] == [made[0].id]


async def test_collections(client: Any, server: ReferenceServer) -> None:
    await client.create()
    await client.create()
    assert [image.name for image in await client.images.list()] == ["debian:12"]
    assert [node.kinds for node in await client.nodes.list()] == [["container"]]
    assert [event.seq for event in await client.events.list(since=1)] == [2]
    followed = []
    async for event in client.events.follow(since=0):
        followed.append(event.seq)
        if len(followed) == 2:
            break
    assert followed == [1, 2]


async def test_a_closed_client_says_so(url: str, server: ReferenceServer) -> None:
    client = dsec.AsyncClient(url, key=KEY)
    await client.create()
    await client.aclose()
    await client.aclose()
    with pytest.raises(dsec.ConnectionFailed, match="closed"):
        await client.create()
    sync = dsec.Client(url, key=KEY)
    await asyncio.to_thread(sync.list)
    await asyncio.to_thread(sync.close)
    sync.close()
    with pytest.raises(dsec.ConnectionFailed, match="closed"):
        sync.list()
