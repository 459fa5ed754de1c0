"""The HTTP table, over a peer edge: requests as clients make them, answers as docs/http.md says."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.unit.apiserver.conftest import Plane

from dsec.api.types import EndReason, ExecResponse
from dsec.apiserver.service import processes

CREATE = "/v1/sandboxes"


async def test_create_get_list_stop(plane: Plane) -> None:
    made = await plane.json("POST", CREATE, status=201, json={"labels": {"run": "7"}, "env": {"A": "1"}})
    assert made["state"] == "running"
    assert made["memory"] == 512 << 20
    assert made["layers"] == ["sha256:1"]
    assert made["expires_at"] == pytest.approx(made["created_at"] + 86400)
    box = made["id"]
    assert await plane.json("GET", f"{CREATE}/{box}") == made
    assert [r["id"] for r in (await plane.json("GET", CREATE))["items"]] == [box]
    assert [r["id"] for r in (await plane.json("GET", f"{CREATE}?label=run%3D7&state=running"))["items"]] == [box]
    assert (await plane.json("GET", f"{CREATE}?label=run=8"))["items"] == []
    stopped = await plane.json("DELETE", f"{CREATE}/{box}")
    assert (stopped["state"], stopped["reason"]) == ("stopped", "requested")
    assert (await plane.json("DELETE", f"{CREATE}/{box}"))["state"] == "stopped"
    assert (await plane.json("GET", f"{CREATE}/{box}"))["state"] == "stopped"
    assert (await plane.json("GET", CREATE))["items"] == []
    assert len((await plane.json("GET", f"{CREATE}?state=all"))["items"]) == 1
    gone = await plane.json("POST", f"{CREATE}/{box}/exec", status=410, json={"argv": ["true"]})
    assert (gone["code"], gone["details"]["reason"]) == ("sandbox_gone", "requested")


async def test_what_was_created_is_seen_at_once_though_the_edge_tells_late(plane: Plane) -> None:
    plane.edge.lag = True
    box = await plane.box()
    assert (await plane.json("GET", f"{CREATE}/{box}"))["state"] == "running"
    await plane.json("DELETE", f"{CREATE}/{box}")
    assert (await plane.json("GET", f"{CREATE}/{box}"))["state"] == "stopped"
    await plane.edge.catch_up()
    types = [e["type"] for e in (await plane.json("GET", "/v1/events"))["items"]]
    assert types == ["sandbox.created", "sandbox.running", "sandbox.stopped"]


async def test_an_unknown_field_is_named_beside_those_there_are(plane: Plane) -> None:
    error = await plane.json("POST", CREATE, status=400, json={"mem": "1GiB"})
    assert "`mem`" in error["message"]
    assert ", memory, " in error["message"]
    error = await plane.json("POST", f"{CREATE}:batch", status=400, json={"count": 1, "sandbox": {"mem": 1}})
    assert "`mem`" in error["message"]
    assert "on_shortage" not in error["message"]


async def test_paging(plane: Plane) -> None:
    names = [item["sandbox"]["id"] for item in await _batch(plane, 25)]
    seen: list[str] = []
    cursor = ""
    while True:
        page = await plane.json("GET", f"{CREATE}?limit=10{cursor}")
        seen += [record["id"] for record in page["items"]]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert sorted(seen) == sorted(names)
    assert len(seen) == 25


async def _batch(plane: Plane, count: int, **fields: Any) -> list[Any]:
    body = {"count": count, "sandbox": fields}
    async with plane.http.post("http://dsec/v1/sandboxes:batch", json=body) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "application/x-ndjson"
        return [json.loads(line) async for line in response.content]


async def test_batch_comes_in_groups_and_failures_stand_beside_successes(plane: Plane) -> None:
    plane.edge.room = 20
    items = await _batch(plane, 30)
    assert sorted(item["index"] for item in items) == list(range(30))
    good = [item for item in items if "sandbox" in item]
    bad = [item for item in items if "error" in item]
    assert len(good) == 20
    assert {item["error"]["code"] for item in bad} == {"no_capacity"}
    assert len((await plane.json("GET", CREATE))["items"]) == 20
    stopped = await plane.json(
        "POST", "/v1/sandboxes:stop", json={"ids": [i["sandbox"]["id"] for i in good] + ["aaaanothing"]}
    )
    assert [r.get("state") for r in stopped["results"]] == ["stopped"] * 20 + [None]
    assert stopped["results"][-1]["error"]["code"] == "not_found"


async def test_stop_by_labels_and_by_request(plane: Plane) -> None:
    await _batch(plane, 3, labels={"run": "a"})
    await _batch(plane, 2, labels={"run": "b"}, request_id="r-b")
    stopped = await plane.json("POST", "/v1/sandboxes:stop", json={"labels": {"run": "a"}})
    assert len(stopped["results"]) == 3
    stopped = await plane.json("POST", "/v1/sandboxes:stop", json={"request_id": "r-b"})
    assert [r["state"] for r in stopped["results"]] == ["stopped"] * 2
    bodies: list[dict[str, Any]] = [{}, {"ids": ["x"], "request_id": "y"}, {"labels": {}}]
    for body in bodies:
        assert (await plane.json("POST", "/v1/sandboxes:stop", status=400, json=body))["code"] == "invalid_request"


async def test_the_same_request_id_acts_once(plane: Plane) -> None:
    body = {"request_id": "once"}
    first = await plane.json("POST", CREATE, status=201, json=body)
    assert (await plane.json("POST", CREATE, status=201, json=body))["id"] == first["id"]
    by_header = await plane.json("POST", CREATE, status=201, json={}, headers={"Idempotency-Key": "once"})
    assert by_header["id"] == first["id"]
    assert len(plane.edge.started) == 1
    conflict = await plane.json("POST", CREATE, status=409, json={"request_id": "once", "pids": 99})
    assert conflict["code"] == "conflict"
    async with plane.other.post(f"http://dsec{CREATE}", json=body) as response:
        assert response.status == 201
        assert (await response.json())["id"] != first["id"]


async def test_a_repeat_waits_for_what_is_under_way(plane: Plane) -> None:
    plane.edge.hold.clear()
    body = {"count": 5, "sandbox": {"request_id": "both"}}

    async def ask() -> set[str]:
        async with plane.http.post("http://dsec/v1/sandboxes:batch", json=body) as response:
            items = [json.loads(line) async for line in response.content]
            assert all("sandbox" in item for item in items), items
            return {item["sandbox"]["id"] for item in items}

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask()) for _ in range(4)]
        await _until(lambda: len(plane.edge.started) == 5)
        plane.edge.hold.set()
    assert len({frozenset(task.result()) for task in tasks}) == 1
    assert len(plane.edge.started) == 5


async def _until(condition: Any, *, within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - the condition is about another process or task that tells nobody
            await asyncio.sleep(0.005)


async def test_a_client_that_goes_away_leaves_nothing(plane: Plane) -> None:
    plane.edge.hold.clear()
    asks: list[tuple[dict[str, int], str]] = [({}, CREATE), ({"count": 8}, "/v1/sandboxes:batch")]
    for body, path in asks:
        asking = asyncio.ensure_future(plane.http.post(f"http://dsec{path}", json=body))
        before = len(plane.edge.started)
        await _until(lambda before=before: len(plane.edge.started) > before)
        asking.cancel()
        await asyncio.wait([asking])
        if asking.done() and not asking.cancelled() and asking.exception() is None:
            asking.result().close()
    await _until(lambda: not plane.edge.alive())
    plane.edge.hold.set()
    await _until(lambda: len([b for b in plane.edge.boxes.values() if b.record.reason is EndReason.CANCELLED]) == 9)
    assert (await plane.json("GET", CREATE))["items"] == []


async def test_a_batch_cancelled_half_way_keeps_what_was_delivered(plane: Plane) -> None:
    plane.edge.group = 4
    async with plane.http.post("http://dsec/v1/sandboxes:batch", json={"count": 8}) as response:
        for _ in range(4):
            await response.content.readline()
            plane.edge.hold.clear()
        response.close()
    plane.edge.hold.set()
    # Four or all eight were delivered, as the edge was quick; never anything that nobody heard of.
    await asyncio.sleep(0.2)
    assert len(plane.edge.alive()) in (4, 8)


async def test_cancel_by_request_id_while_creating_and_before_it_came(plane: Plane) -> None:
    plane.edge.hold.clear()
    asking = asyncio.ensure_future(plane.json("POST", CREATE, status=503, json={"request_id": "c1"}))
    await _until(lambda: plane.edge.started)
    await plane.json("POST", "/v1/sandboxes:stop", json={"request_id": "c1"})
    plane.edge.hold.set()
    await asking
    assert plane.edge.alive() == []
    await plane.json("POST", "/v1/sandboxes:stop", json={"request_id": "c2"})
    assert (await plane.json("POST", CREATE, status=409, json={"request_id": "c2"}))["code"] == "conflict"


@pytest.mark.parametrize(
    ("body", "status", "code", "says"),
    [
        ({"kind": "pod"}, 400, "invalid_request", "container"),
        ({"kind": "microvm"}, 422, "unsupported", "later"),
        ({"kind": "fullvm"}, 422, "unsupported", "later"),
        ({"image": "nope"}, 422, "image_error", "debian:12"),
        ({"memory": -1}, 400, "invalid_request", "memory"),
        ({"memory": "lots"}, 400, "invalid_request", "512MiB"),
        ({"memory": "1MiB"}, 400, "invalid_request", "memory"),
        ({"memory": "1PiB"}, 400, "invalid_request", "memory"),
        ({"memory": "100GiB"}, 503, "no_capacity", "memory"),
        ({"cpus": 0}, 400, "invalid_request", "cpus"),
        ({"cpus": 64}, 503, "no_capacity", "cpus"),
        ({"pids": 1}, 400, "invalid_request", "pids"),
        ({"disk": 1}, 400, "invalid_request", "disk"),
        ({"disk_backing": "tape"}, 400, "invalid_request", "disk_backing"),
        ({"disk_backing": "tmpfs"}, 400, "invalid_request", "half"),
        ({"labels": {"": "x"}}, 400, "invalid_request", "label"),
        ({"labels": {f"k{n}": "" for n in range(65)}}, 400, "invalid_request", "64"),
        ({"env": {"A=B": ""}}, 400, "invalid_request", "env"),
        ({"env": {"A": "x" * (2 << 20)}}, 400, "invalid_request", "env"),
        ({"env": {"A": "x" * (50 << 10)}}, 400, "invalid_request", "file"),
        ({"env": {f"v{n}": "" for n in range(8000)}}, 400, "invalid_request", "file"),
        ({"timeout": 0}, 400, "invalid_request", "timeout"),
        ({"idle_timeout": -1}, 400, "invalid_request", "idle_timeout"),
        ({"max_lifetime": 0}, 400, "invalid_request", "max_lifetime"),
        ({"user": ""}, 400, "invalid_request", "user"),
        ({"workdir": "x"}, 400, "invalid_request", "workdir"),
        ({"project": "other"}, 404, "not_found", "other"),
        ({"request_id": "\n"}, 400, "invalid_request", "request_id"),
        ({"workspace": "w"}, 422, "unsupported", "workspace"),
        ({"toolkits": ["t"]}, 422, "unsupported", "toolkits"),
        ({"snapshot": "s"}, 422, "unsupported", "snapshot"),
        ({"network": {"pypi": True}}, 422, "unsupported", "network"),
        ({"on_idle": "pause"}, 422, "unsupported", "on_idle"),
        ({"on_idle": "burn"}, 400, "invalid_request", "on_idle"),
        ({"on_node_loss": "recreate"}, 422, "unsupported", "on_node_loss"),
        ({"policy": "strict"}, 422, "unsupported", "policy"),
        ({"colour": 1}, 400, "invalid_request", "colour"),
        ({"cpus": "two"}, 400, "invalid_request", "cpus"),
        ([], 400, "invalid_request", "CreateSandbox"),
    ],
)
async def test_bad_creates(plane: Plane, body: Any, status: int, code: str, says: str) -> None:
    answer = await plane.json("POST", CREATE, status=status, json=body)
    assert answer["code"] == code
    assert says in answer["message"]
    assert plane.edge.started == []


@pytest.mark.parametrize("count", [0, -1, 32_769, "many", 1.5])
async def test_bad_counts(plane: Plane, count: Any) -> None:
    answer = await plane.json("POST", "/v1/sandboxes:batch", status=400, json={"count": count})
    assert "count" in answer["message"]


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"{", "application/json"),
        (b"\xff\xfe", "application/json"),
        (b'{"labels": {"a": "\xff"}}', "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"cpus": NaN}', "application/json"),
        (b'{"cpus": 1e999}', "application/json"),
        (b"\xc1", "application/msgpack"),
        (msgspec.msgpack.encode({"cpus": float("nan")}), "application/msgpack"),
        (msgspec.msgpack.encode({"cpus": float("inf")}), "application/msgpack"),
        (msgspec.msgpack.encode({"timeout": float("nan")}), "application/msgpack"),
        (msgspec.msgpack.encode({"max_lifetime": float("nan")}), "application/msgpack"),
        (msgspec.msgpack.encode({"memory": 2**63}), "application/msgpack"),
    ],
)
async def test_bodies_that_are_none(plane: Plane, raw: bytes, kind: str) -> None:
    answer = await plane.json("POST", CREATE, status=400, data=raw, headers={"Content-Type": kind})
    assert answer["code"] == "invalid_request"
    assert len(answer["message"]) > 20


async def test_other_refusals(plane: Plane) -> None:
    async def code(method: str, path: str, status: int, **more: Any) -> str:
        return str((await plane.json(method, path, status=status, **more))["code"])

    box = await plane.box()
    assert await code("GET", "/v1/nothing", 404) == "not_found"
    assert await code("PUT", CREATE, 405) == "invalid_request"
    assert await code("GET", f"{CREATE}?colour=1", 400) == "invalid_request"
    assert await code("GET", f"{CREATE}?limit=0", 400) == "invalid_request"
    assert await code("GET", f"{CREATE}?limit=x", 400) == "invalid_request"
    assert await code("GET", f"{CREATE}?state=odd", 400) == "invalid_request"
    assert await code("GET", f"{CREATE}?cursor=odd", 400) == "invalid_request"
    assert await code("GET", f"{CREATE}?label=odd", 400) == "invalid_request"
    assert await code("GET", f"{CREATE}/aaaaaaaaaaaaaaaaaaaa", 404) == "not_found"
    assert await code("GET", f"{CREATE}/%00%ff", 404) == "not_found"
    assert await code("POST", CREATE, 415, data=b"x", headers={"Content-Type": "text/plain"}) == "invalid_request"
    assert await code("POST", CREATE, 413, data=b"x" * (5 << 20)) == "invalid_request"
    for path in ("pause", "resume", "snapshot", "fork", "pack_diff", "network", "audit", "ports/80"):
        assert await code("POST", f"{CREATE}/{box}/{path}", 422) == "unsupported"
    for path in ("fncall", "jobs/x", "projects", "keys", "environments"):
        assert await code("GET", f"/v1/{path}", 422) == "unsupported"


async def test_keys_and_projects(plane: Plane) -> None:
    box = await plane.box()
    for headers in ({"Authorization": "Bearer dsec_wrong"}, {"Authorization": "Basic x"}, {"Authorization": ""}):
        answer = await plane.json("GET", CREATE, status=401, headers=headers)
        assert answer["code"] == "unauthenticated"
    for method, path in (
        ("GET", ""), ("DELETE", ""), ("PATCH", ""), ("GET", "/usage"), ("GET", "/processes"), ("POST", "/exec"),
        ("GET", "/files?path=/x"), ("PUT", "/files?path=/x"), ("GET", "/files:list?path=/"),
    ):  # fmt: skip
        body = {"argv": ["true"]} if path == "/exec" else {} if method == "PATCH" else None
        async with plane.other.request(method, f"http://dsec{CREATE}/{box}{path}", json=body) as response:
            assert response.status == 404, (method, path)
            assert (await response.json())["code"] == "not_found"
    async with plane.other.post("http://dsec/v1/sandboxes:stop", json={"ids": [box]}) as response:
        assert (await response.json())["results"][0]["error"]["code"] == "not_found"
    async with plane.other.get(f"http://dsec{CREATE}?state=all") as response:
        assert (await response.json())["items"] == []
    async with plane.other.get("http://dsec/v1/events") as response:
        assert (await response.json())["items"] == []
    assert len(plane.edge.alive()) == 1


async def test_exec(plane: Plane) -> None:
    box = await plane.box()
    path = f"{CREATE}/{box}/exec"
    done = await plane.json("POST", path, json={"command": "echo out; echo err >&2; exit 3"})
    assert base64.b64decode(done["stdout"]) == b"out\n"
    assert base64.b64decode(done["stderr"]) == b"err\n"
    assert (done["exit_code"], done["reason"], done.get("signal")) == (3, "exit", None)
    done = await plane.json("POST", path, json={"command": "kill -TERM $$"})
    assert (done["exit_code"], done["reason"], done["signal"]) == (143, "signal", 15)
    done = await plane.json("POST", path, json={"command": "echo part; sleep 60", "timeout": 0.3})
    assert done["reason"] == "timeout"
    assert base64.b64decode(done["stdout"]) == b"part\n"
    bad = await plane.json("POST", path, status=400, json={"argv": ["/no/such"]})
    assert (bad["code"], bad["details"]["path"]) == ("command_not_started", "/no/such")


@pytest.mark.parametrize("size", [0, 1, 65_536, 200_000, 5 << 20])
async def test_exec_stdin_and_large_output(plane: Plane, size: int) -> None:
    box = await plane.box()
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    body = msgspec.msgpack.encode({"argv": ["cat"], "stdin": data})
    headers = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
    async with plane.http.post(f"http://dsec{CREATE}/{box}/exec", data=io.BytesIO(body), headers=headers) as response:
        done = msgspec.msgpack.decode(await response.read(), type=ExecResponse)
    assert done.stdout == data
    assert done.exit_code == 0


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "invalid_request"),
        ({"argv": ["a"], "command": "b"}, 400, "invalid_request"),
        ({"argv": ["a\0"]}, 400, "invalid_request"),
        ({"argv": [""]}, 400, "command_not_started"),
        ({"argv": ["a"], "cwd": "x"}, 400, "invalid_request"),
        ({"argv": ["a"], "pty": [1, 2]}, 422, "unsupported"),
        ({"argv": ["a"], "timeout": 0}, 400, "invalid_request"),
        ({"argv": ["a"], "output_limit": "1GiB"}, 400, "invalid_request"),
        ({"argv": ["a"], "stdin": "no base64!"}, 400, "invalid_request"),
        ({"argv": ["a"], "stdin_open": True}, 400, "invalid_request"),
        ({"argv": ["a"], "colour": 1}, 400, "invalid_request"),
    ],
)
async def test_bad_execs(plane: Plane, body: Any, status: int, code: str) -> None:
    box = await plane.box()
    assert (await plane.json("POST", f"{CREATE}/{box}/exec", status=status, json=body))["code"] == code


async def test_exec_with_a_request_id_goes_on_and_acts_once(plane: Plane) -> None:
    box = await plane.box()
    body = {"command": "sleep 0.3; echo x >> $PWD/log; cat $PWD/log", "request_id": "e1"}
    asking = asyncio.ensure_future(plane.http.post(f"http://dsec{CREATE}/{box}/exec", json=body))
    await _until(lambda: "exec" in plane.edge.calls)
    asking.cancel()
    await asyncio.wait([asking])
    done = await plane.json("POST", f"{CREATE}/{box}/exec", json=body)
    assert base64.b64decode(done["stdout"]) == b"x\n"
    info = await plane.json("GET", f"{CREATE}/{box}/processes/req:e1")
    assert info["id"] == done["process_id"]


async def test_an_agent_that_does_not_keep_the_timeout_is_not_waited_for(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await plane.box()
    monkeypatch.setattr(processes, "_GUEST_GRACE_S", -4.8)
    body = {"command": "sleep 60", "timeout": 5}
    error = await plane.json("POST", f"{CREATE}/{box}/exec", status=504, json=body)
    assert error["code"] == "deadline_exceeded"


async def test_exec_without_a_request_id_is_killed_with_its_client(plane: Plane) -> None:
    box = await plane.box()
    body = {"command": "sleep 600"}
    asking = asyncio.ensure_future(plane.http.post(f"http://dsec{CREATE}/{box}/exec", json=body))
    await _until(lambda: plane.edge.boxes[box].processes)
    asking.cancel()
    await asyncio.wait([asking])
    (process,) = plane.edge.boxes[box].processes.values()
    await _until(lambda: process.process is not None and process.process.returncode is not None)


async def test_a_kill_that_overtakes_its_command(plane: Plane) -> None:
    box = await plane.box()
    await plane.json("POST", f"{CREATE}/{box}/processes/req:k1/signal", json={"signal": "KILL", "tree": True})
    answer = await plane.json("POST", f"{CREATE}/{box}/exec", status=409, json={"argv": ["true"], "request_id": "k1"})
    assert answer["code"] == "conflict"


async def test_processes(plane: Plane) -> None:
    box = await plane.box()
    base = f"{CREATE}/{box}/processes"
    info = await plane.json("POST", base, status=201, json={"argv": ["sleep", "600"]})
    assert "state" not in info  # the default, running
    assert [p["id"] for p in (await plane.json("GET", base))["processes"]] == [info["id"]]
    assert (await plane.json("GET", f"{base}/{info['pid']}"))["id"] == info["id"]
    assert (await plane.json("GET", f"{base}/{info['id']}/wait?timeout=0.05")).get("result") is None
    assert (await plane.json("POST", f"{base}/{info['id']}/signal", status=400, json={"signal": "ODD"}))["code"]
    assert (await plane.json("POST", f"{base}/{info['id']}/signal", status=400, json={"signal": 99}))["code"]
    assert await plane.json("POST", f"{base}/{info['id']}/signal", json={"signal": "TERM"}) == {}
    ended = await plane.json("GET", f"{base}/{info['pid']}/wait?timeout=10")
    assert (ended["state"], ended["result"]["signal"]) == ("ended", 15)
    for method, path in (("GET", "/px"), ("GET", "/999999999"), ("GET", "/px/wait"), ("GET", "/px/stream")):
        headers = {"Upgrade": "websocket", "Connection": "upgrade"}
        if path.endswith("stream"):
            headers |= {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
        answer = await plane.json(method, base + path, status=404, headers=headers)
        assert answer["code"] == "not_found", path
    headers = {"Upgrade": "websocket", "Connection": "upgrade"}
    assert (await plane.json("GET", f"{base}/{info['id']}/stream", status=400, headers=headers))["code"]
    assert (await plane.json("GET", f"{base}/{info['id']}/stream", status=400))["code"] == "invalid_request"


async def test_stream(plane: Plane) -> None:
    box = await plane.box()
    base = f"http://dsec{CREATE}/{box}/processes"
    info = await plane.json("POST", f"{CREATE}/{box}/processes", status=201, json={"argv": ["cat"], "stdin_open": True})
    async with plane.http.ws_connect(f"{base}/{info['id']}/stream") as socket:
        await socket.send_bytes(b"hello ")
        await socket.send_bytes(b"world")
        got = b""
        while len(got) < 11:
            message = await socket.receive(timeout=10)
            assert message.type is aiohttp.WSMsgType.BINARY
            channel, offset = struct.unpack_from("<BQ", message.data)
            assert (channel, offset) == (1, len(got))
            got += message.data[9:]
        assert got == b"hello world"
        await socket.send_str('{"odd": 1}')
        assert "error" in json.loads((await socket.receive(timeout=10)).data)
        await socket.send_str('{"stdin":"close"}')
        assert json.loads((await socket.receive(timeout=10)).data)["result"]["exit_code"] == 0
        assert (await socket.receive(timeout=10)).type is aiohttp.WSMsgType.CLOSE
    async with plane.http.ws_connect(f"{base}/{info['id']}/stream?since_stdout=6&follow=false") as socket:
        assert (await socket.receive(timeout=10)).data[9:] == b"world"
        assert "result" in json.loads((await socket.receive(timeout=10)).data)


async def test_a_client_that_only_writes_reads_no_output(plane: Plane) -> None:
    box = await plane.box()
    base = f"{CREATE}/{box}/processes"
    info = await plane.json("POST", base, status=201, json={"argv": ["cat"], "stdin_open": True})
    beyond = 1 << 62
    url = f"http://dsec{base}/{info['id']}/stream?since_stdout={beyond}&since_stderr={beyond}&follow=true"
    async with plane.http.ws_connect(url) as socket:
        await socket.send_bytes(b"x" * 100_000)
        await socket.send_str('{"stdin":"close"}')
        assert json.loads((await socket.receive(timeout=10)).data)["result"]["exit_code"] == 0
    assert "output" not in plane.edge.calls
    assert len(plane.edge.boxes[box].processes[info["id"]].output[0]) == 100_000


async def test_a_slow_reader_holds_the_stream_back(plane: Plane) -> None:
    box = await plane.box()
    base = f"{CREATE}/{box}/processes"
    size = 8_000_000
    info = await plane.json("POST", base, status=201, json={"command": f"head -c {size} /dev/zero"})
    async with plane.http.ws_connect(f"http://dsec{base}/{info['id']}/stream", max_msg_size=0) as socket:
        await asyncio.sleep(0.3)
        total = 0
        async for message in socket:
            if message.type is aiohttp.WSMsgType.BINARY:
                total += len(message.data) - 9
    assert total == size


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 3_000_000])
async def test_files_round_trip(plane: Plane, size: int) -> None:
    box = await plane.box()
    data = bytes(n * 7 & 255 for n in range(size))
    path = f"{CREATE}/{box}/files?path=/d/a%0Ab%ff"
    assert await plane.json("PUT", path + "&mode=0600", data=data) == {"size": size}
    async with plane.http.get(f"http://dsec{path}") as response:
        assert response.status == 200
        assert response.content_type == "application/octet-stream"
        assert await response.read() == data
    async with plane.http.get(f"http://dsec{path}&offset=2&limit=5") as response:
        assert await response.read() == data[2:7]
    listed = (await plane.json("GET", f"{CREATE}/{box}/files:list?path=/d"))["entries"]
    assert len(listed) == 1
    assert listed[0]["name"] == "a\nb\ufffd"
    assert base64.b64decode(listed[0]["name_bytes"]) == b"a\nb\xff"
    assert (listed[0]["mode"], listed[0]["size"]) == (0o600, size)


async def test_file_errors_and_changes(plane: Plane) -> None:
    box = await plane.box()
    base = f"{CREATE}/{box}/files"

    async def code(method: str, path: str, status: int, **more: Any) -> str:
        return str((await plane.json(method, base + path, status=status, **more))["code"])

    missing = await plane.json("GET", f"{base}?path=/x", status=404)
    assert (missing["code"], missing["details"]["errno"]) == ("file_not_found", 2)
    assert await plane.json("POST", f"{base}:mkdir?path=/d/e&parents=true") == {}
    assert await code("PUT", "?path=/d", 409, data=b"x") == "file_is_directory"
    assert await code("POST", ":remove?path=/d", 409) == "directory_not_empty"
    assert await plane.json("PUT", f"{base}?path=/f", data=b"x") == {"size": 1}
    assert await plane.json("PUT", f"{base}?path=/f&append=true", data=b"y") == {"size": 1}
    assert await plane.json("POST", f"{base}:move?path=/f&to=/g") == {}
    assert await plane.json("POST", f"{base}:chmod?path=/g&mode=0700") == {}
    assert (await plane.json("GET", f"{base}:stat?path=/g"))["mode"] == 0o700
    assert await plane.json("POST", f"{base}:remove?path=/d&recursive=true") == {}
    report = await plane.json("PUT", f"{base}:archive?path=/", data=b"x" * 10)
    assert (report["entries"], report["refused"]) == (10, ["../x"])
    assert await code("GET", "", 400) == "invalid_request"
    assert await code("GET", "?path=", 400) == "invalid_path"
    assert await code("GET", "?path=x", 400) == "invalid_path"
    assert await code("GET", "?path=/%00", 400) == "invalid_path"
    assert await code("GET", "?path=/" + "a" * 4096, 400) == "invalid_path"
    assert await code("GET", "?path=/g&offset=-1", 400) == "invalid_request"
    assert await code("PUT", "?path=/g&mode=9", 400, data=b"") == "invalid_request"
    assert await code("PUT", "?path=/g&mode=777777", 400, data=b"") == "invalid_request"
    assert await code("GET", ":list?path=/&depth=0", 400) == "invalid_request"
    assert await code("GET", ":archive?path=/", 422) == "unsupported"
    assert await code("PUT", "?path=/big", 507, data=_endless(80 << 20)) == "no_space"


async def _endless(size: int) -> Any:
    for _ in range(size >> 20):
        yield b"z" * (1 << 20)


async def test_timeouts_and_usage(plane: Plane) -> None:
    box = await plane.box()
    record = await plane.json("PATCH", f"{CREATE}/{box}", json={"max_lifetime": None})
    assert (record["idle_timeout"], record["max_lifetime"]) == (300.0, None)
    record = await plane.json("PATCH", f"{CREATE}/{box}", json={"idle_timeout": 5})
    assert (record["idle_timeout"], record["max_lifetime"]) == (5.0, None)
    assert (await plane.json("GET", f"{CREATE}/{box}/usage"))["memory_limit"] == 512 << 20
    for bad in ({"idle_timeout": 0}, {"idle_timeout": "x"}, {"colour": 1}):
        assert (await plane.json("PATCH", f"{CREATE}/{box}", status=400, json=bad))["code"] == "invalid_request"
    await plane.json("DELETE", f"{CREATE}/{box}")
    assert (await plane.json("GET", f"{CREATE}/{box}/usage", status=410))["code"] == "sandbox_gone"
    del plane.edge.boxes[box]
    assert (await plane.json("GET", f"{CREATE}/{box}/usage", status=410))["code"] == "sandbox_gone"
    answer = await plane.json("POST", f"{CREATE}/{box}/exec", status=410, json={"argv": ["true"]})
    assert answer["details"]["reason"] == "requested"


async def test_events(plane: Plane) -> None:
    box = await plane.box()
    page = await plane.json("GET", "/v1/events")
    assert [e["type"] for e in page["items"]] == ["sandbox.created", "sandbox.running"]
    assert {e["sandbox_id"] for e in page["items"]} == {box}
    assert (await plane.json("GET", f"/v1/events?since={page['next_since']}"))["items"] == []
    assert len((await plane.json("GET", "/v1/events?type=sandbox.running"))["items"]) == 1
    async with plane.http.get(f"http://dsec/v1/events?follow=true&since={page['next_since']}&limit=3") as response:
        await plane.json("DELETE", f"{CREATE}/{box}")
        other = await plane.box()
        lines = [json.loads(line) async for line in response.content]
    assert [(e["type"], e["sandbox_id"]) for e in lines] == [
        ("sandbox.stopped", box),
        ("sandbox.created", other),
        ("sandbox.running", other),
    ]
    assert lines[0]["data"] == {"reason": "requested"}


async def test_the_rest(plane: Plane) -> None:
    async with aiohttp.ClientSession() as anonymous:
        async with anonymous.get(f"http://127.0.0.1:{plane.port}/healthz") as response:
            assert (await response.json())["status"] == "ok"
        async with anonymous.get(f"http://127.0.0.1:{plane.port}/openapi.json") as response:
            document = await response.json()
        async with anonymous.get(f"http://127.0.0.1:{plane.port}/metrics") as response:
            assert response.status == 401
    assert document["openapi"] == "3.1.0"
    box = await plane.box()
    await plane.json("POST", f"{CREATE}/{box}/exec", json={"argv": ["true"]})
    assert (await plane.json("GET", "/v1/images"))["images"][0]["size"] == 7
    assert (await plane.json("GET", "/v1/nodes"))["nodes"][0]["sandboxes"] == 1
    async with plane.http.get("http://dsec/metrics") as response:
        text = await response.text()
    assert 'dsec_sandboxes_created_total{kind="container"} 1.0' in text
    assert 'dsec_execs_total{reason="exit"} 1.0' in text
    assert 'dsec_sandboxes_alive{edge="aaaa"} 1.0' in text
    assert box not in text
    assert plane.socket.stat().st_mode & 0o777 == 0o600


async def test_heads_that_are_no_http_get_an_answer_in_our_form(plane: Plane) -> None:
    for raw in (
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n\r\n",
    ):
        reader, writer = await asyncio.open_unix_connection(str(plane.socket))
        writer.write(raw)
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")), answer[:80]
        assert b"invalid_request" in answer
        writer.close()
        await writer.wait_closed()


async def test_expect_100_continue(plane: Plane) -> None:
    box = await plane.box()
    reader, writer = await asyncio.open_unix_connection(str(plane.socket))
    head = f"PUT {CREATE}/{box}/files?path=/e HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {plane.key}\r\n"
    writer.write((head + "Content-Length: 3\r\nExpect: 100-continue\r\n\r\n").encode())
    assert await asyncio.wait_for(reader.readline(), 10) == b"HTTP/1.1 100 Continue\r\n"
    await reader.readline()
    writer.write(b"abc")
    assert await asyncio.wait_for(reader.readline(), 10) == b"HTTP/1.1 200 OK\r\n"
    writer.close()
    await writer.wait_closed()


async def test_a_fault_of_ours_has_an_incident(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    box = await plane.box()
    plane.edge.break_usage = True
    answer = await plane.json("GET", f"{CREATE}/{box}/usage", status=500)
    assert answer["code"] in ("internal",)
    incident = answer["details"]["incident"]
    assert incident in answer["message"]
    assert any(getattr(record, "incident", None) == incident for record in caplog.records)


async def test_file_changes_with_the_same_id_act_once(plane: Plane) -> None:
    box = await plane.box()
    base = f"{CREATE}/{box}/files"
    for _ in range(3):
        done = await plane.json("PUT", f"{base}?path=/log&append=true", data=b"x", headers={"Idempotency-Key": "a"})
        assert done == {"size": 1}
    assert (await plane.json("GET", f"{base}:stat?path=/log"))["size"] == 1
    for _ in range(2):
        assert await plane.json("POST", f"{base}:move?path=/log&to=/new", headers={"Idempotency-Key": "b"}) == {}
        assert await plane.json("POST", f"{base}:mkdir?path=/d", headers={"Idempotency-Key": "c"}) == {}
        assert await plane.json("POST", f"{base}:remove?path=/new", headers={"Idempotency-Key": "d"}) == {}
    # What failed may be tried again, under another id it is another request.
    assert (await plane.json("POST", f"{base}:mkdir?path=/d", status=409, headers={"Idempotency-Key": "e"}))["code"]
    assert await plane.json("POST", f"{base}:remove?path=/d") == {}
    assert await plane.json("POST", f"{base}:mkdir?path=/d", headers={"Idempotency-Key": "e"}) == {}


async def test_an_append_that_was_cut_off_is_unknown(plane: Plane) -> None:
    box = await plane.box()
    path = f"{CREATE}/{box}/files?path=/log&append=true"
    sent = asyncio.Event()

    async def stalled() -> Any:
        yield b"x" * 100
        sent.set()
        await asyncio.sleep(600)

    asking = asyncio.ensure_future(
        plane.http.put(f"http://dsec{path}", data=stalled(), headers={"Idempotency-Key": "u"})
    )
    await sent.wait()
    await _until(lambda: "file:write" in plane.edge.calls)
    asking.cancel()
    await asyncio.wait([asking])
    answer = await plane.json("PUT", path, status=502, data=b"x", headers={"Idempotency-Key": "u"})
    assert answer["code"] == "outcome_unknown"
