"""The same request id acts once: create, run, start, write; also across an edge restart."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable

import pytest
from tests.support import raw_http
from tests.support.daemon import Daemon
from tests.support.fixtures import BoxFactory
from tests.support.timing import eventually

import dsec

pytestmark = [pytest.mark.system, pytest.mark.root]


def request_id() -> str:
    """A fresh request id."""
    return "t" + secrets.token_hex(10)


async def post(daemon: Daemon, target: str, fields: dict[str, object]) -> raw_http.Answer:
    """One POST by hand: the SDK would make ids of its own."""
    body = json.dumps(fields).encode()
    return await raw_http.request(daemon.paths.api_socket, "POST", target, key=daemon.key, body=body, timeout_s=30)


async def test_create_with_the_same_id_makes_one_sandbox(daemon: Daemon, client: dsec.AsyncClient) -> None:
    same, label = request_id(), {"test": secrets.token_hex(6)}
    fields: dict[str, object] = {"request_id": same, "labels": label}
    async with asyncio.TaskGroup() as group:
        posts = [group.create_task(post(daemon, "/v1/sandboxes", fields)) for _ in range(5)]
    answers = [task.result() for task in posts]
    good = [answer for answer in answers if answer.status < 300]
    assert good
    # A repeat while the first is under way may be told so, but never makes another.
    assert all(answer.status == 409 for answer in answers if answer.status >= 300)
    assert len({answer.json["id"] for answer in good}) == 1
    assert (await post(daemon, "/v1/sandboxes", fields)).json["id"] == good[0].json["id"]
    assert len((await client.list(labels=label)).items) == 1
    changed = await post(daemon, "/v1/sandboxes", {**fields, "memory": "1GiB"})
    assert changed.status in (200, 201, 400, 409)
    await (await client.get(good[0].json["id"])).stop()
    assert not (await client.list(labels=label)).items


async def test_run_and_start_with_the_same_id_act_once(daemon: Daemon, box: BoxFactory) -> None:
    sandbox = await box()
    fields: dict[str, object] = {"request_id": request_id(), "command": "echo ran >> /ran; sleep 0.5; echo done"}
    target = f"/v1/sandboxes/{sandbox.id}/exec"
    async with asyncio.TaskGroup() as group:
        posts = [group.create_task(post(daemon, target, fields)) for _ in range(4)]
    again = await post(daemon, target, fields)
    answers = [*(task.result().json for task in posts), again.json]
    assert len({json.dumps(answer, sort_keys=True) for answer in answers}) == 1
    assert await sandbox.files.read("/ran") == b"ran\n"
    fields = {"request_id": request_id(), "command": "echo started >> /started; sleep 60"}
    target = f"/v1/sandboxes/{sandbox.id}/processes"
    pids = {(await post(daemon, target, fields)).json["pid"] for _ in range(3)}
    assert len(pids) == 1
    assert await sandbox.files.read("/started") == b"started\n"


async def test_append_with_the_same_id_appends_once(daemon: Daemon, box: BoxFactory) -> None:
    sandbox = await box()
    same = request_id()
    for _ in range(3):
        answer = await raw_http.request(
            daemon.paths.api_socket,
            "PUT",
            f"/v1/sandboxes/{sandbox.id}/files?path=/log&append=true",
            key=daemon.key,
            body=b"line\n",
            headers={"Content-Type": "application/octet-stream", "Idempotency-Key": same},
        )
        assert answer.status == 200
    assert await sandbox.files.read("/log") == b"line\n"


async def test_repeats_across_an_edge_restart_act_once(fresh_daemon: Callable[..., Daemon]) -> None:
    daemon = fresh_daemon()
    create: dict[str, object] = {"request_id": request_id()}
    first = (await post(daemon, "/v1/sandboxes", create)).json
    target = f"/v1/sandboxes/{first['id']}"
    run: dict[str, object] = {"request_id": request_id(), "command": "echo ran >> /ran; echo out"}
    start: dict[str, object] = {"request_id": request_id(), "command": "echo started >> /started; sleep 60"}
    ran, started = await post(daemon, f"{target}/exec", run), await post(daemon, f"{target}/processes", start)
    # One is under way when the edge dies: its answer is lost, the repeat gets it.
    late: dict[str, object] = {"request_id": request_id(), "command": "echo late >> /late; sleep 2; echo late"}
    lost = asyncio.ensure_future(post(daemon, f"{target}/exec", late))
    async with daemon.client() as client:
        sandbox = await client.get(first["id"])
        await eventually(lambda: sandbox.files.exists("/late"), within_s=10, what="the command runs")
    await asyncio.to_thread(daemon.kill_edge)
    await asyncio.wait([lost])
    assert lost.exception() is not None
    await asyncio.to_thread(daemon.start)
    assert (await post(daemon, "/v1/sandboxes", create)).json["id"] == first["id"]
    again = (await post(daemon, f"{target}/exec", run)).json
    assert (again["process_id"], again["stdout"]) == (ran.json["process_id"], ran.json["stdout"])
    assert (await post(daemon, f"{target}/processes", start)).json["pid"] == started.json["pid"]
    answer = await post(daemon, f"{target}/exec", late)
    assert answer.status == 200
    async with daemon.client() as client:
        sandbox = await client.get(first["id"])
        for name in ("ran", "started", "late"):
            assert await sandbox.files.read(f"/{name}") == f"{name}\n".encode()
        assert len((await client.list()).items) == 1
