"""The launch protocol's client against a peer that answers as a launcher would, descriptors included."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from tests.unit.edge.peer import until

from dsec.api.errors import InternalError, NoCapacity
from dsec.edge.launchwire import Connection, Exited, Killed, Listed, Refused, Spawned, close_all


class Log:
    """LaunchEvents that remembers."""

    def __init__(self) -> None:
        self.spawned_results: list[Spawned | Refused] = []
        self.killed_results: list[Killed] = []
        self.exits: list[Exited] = []
        self.losses = 0

    def spawned(self, results: Sequence[Spawned | Refused]) -> None:
        self.spawned_results += results

    def killed(self, results: Sequence[Killed]) -> None:
        self.killed_results += results

    def exited(self, event: Exited) -> None:
        self.exits.append(event)

    def launcher_lost(self, connection: Connection) -> None:
        self.losses += 1


class Launcher:
    """The other end."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock

    async def asked(self) -> dict[str, Any]:
        async with asyncio.timeout(5):
            packet = await asyncio.get_running_loop().sock_recv(self.sock, 1 << 20)
        fields: dict[str, Any] = msgspec.msgpack.decode(packet)
        return fields

    def answer(self, fields: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        self.sock.sendmsg([msgspec.msgpack.encode(fields)], rights)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Connection, Launcher, Log]]:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    log = Log()
    connection = Connection(ours, log)
    try:
        yield connection, Launcher(theirs), log
    finally:
        connection.close()
        theirs.close()
        for result in log.spawned_results:
            if isinstance(result, Spawned):
                close_all((result.pidfd, result.channel))
    assert len(os.listdir("/proc/self/fd")) == before, "descriptors leaked"  # noqa: PTH208


def devices(count: int) -> list[int]:
    return [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]


def success(index: int, name: str) -> dict[str, Any]:
    return {"i": index, "id": name, "pid": 100 + index, "slot": index, "hello": b"h", "us": {}}


async def test_spawn_results_come_with_their_descriptors_in_any_order() -> None:
    async with connected() as (connection, launcher, log):
        common = msgspec.Raw(msgspec.msgpack.encode({"project": "p"}))
        connection.spawn(common, [{"id": name} for name in "abc"])
        asked = await launcher.asked()
        assert (asked["t"], asked["common"], [item["id"] for item in asked["items"]]) == (
            "spawn",
            {"project": "p"},
            ["a", "b", "c"],
        )
        ours = devices(4)
        refusal = {"i": 1, "id": "b", "error": {"code": "no_memory", "msg": "full", "errno": 12}}
        launcher.answer({"t": "spawned", "seq": asked["seq"], "results": [success(2, "c"), refusal]}, ours[:2])
        launcher.answer({"t": "spawned", "seq": asked["seq"], "results": [success(0, "a")]}, ours[2:])
        close_all(ours)
        await until(lambda: len(log.spawned_results) == 3)
        c, b, a = log.spawned_results
        assert isinstance(c, Spawned)
        assert isinstance(a, Spawned)
        assert (c.id, c.pid, c.slot, c.hello, a.id) == ("c", 102, 2, b"h", "a")
        assert isinstance(b, Refused)
        assert isinstance(b.error, NoCapacity)
        assert connection._asked == {}


async def test_many_items_go_in_messages_that_fit() -> None:
    async with connected() as (connection, launcher, log):
        connection.spawn(
            msgspec.Raw(msgspec.msgpack.encode({})), [{"id": f"s{n}", "files": "x" * 2000} for n in range(300)]
        )
        seen: list[str] = []
        while len(seen) < 300:
            asked = await launcher.asked()
            assert len(asked["items"]) <= 120
            seen += [item["id"] for item in asked["items"]]
            launcher.answer({"t": "error", "seq": asked["seq"], "code": "kernel", "msg": "no"})
        assert seen == [f"s{n}" for n in range(300)]
        await until(lambda: len(log.spawned_results) == 300)
        assert all(
            isinstance(result, Refused) and isinstance(result.error, InternalError) for result in log.spawned_results
        )


async def test_a_packet_that_cannot_be_understood_leaks_no_descriptor() -> None:
    async with connected() as (connection, launcher, log):
        connection.spawn(msgspec.Raw(msgspec.msgpack.encode({})), [{"id": "a"}, {"id": "b"}])
        asked = await launcher.asked()
        ours = devices(3)
        launcher.answer({"t": "spawned", "seq": asked["seq"], "results": [success(0, "a"), success(1, "b")]}, ours)
        close_all(ours)
        await until(lambda: log.losses == 1)
        assert connection.closed
        assert log.spawned_results == []


async def test_descriptors_nobody_asked_for_are_closed() -> None:
    async with connected() as (_connection, launcher, log):
        ours = devices(6)
        launcher.answer({"t": "spawned", "seq": 99, "results": [success(0, "x")]}, ours[:2])
        launcher.answer({"t": "exited", "id": "x", "status": -9, "oom_kills": 1}, ours[2:])
        close_all(ours)
        await until(lambda: bool(log.exits))
        assert log.exits == [Exited("x", -9, 1)]


async def test_kill_list_and_adopt() -> None:
    async with connected() as (connection, launcher, log), asyncio.TaskGroup() as tasks:
        connection.kill(["a", "b"])
        asked = await launcher.asked()
        assert (asked["ids"], asked["destroy"]) == (["a", "b"], True)
        error = {"code": "not_found", "msg": "no b"}
        launcher.answer({"t": "killed", "seq": asked["seq"], "results": [{"id": "a", "status": -9, "oom_kills": 2}]})
        launcher.answer({"t": "killed", "seq": asked["seq"], "results": [{"id": "b", "error": error}]})
        await until(lambda: len(log.killed_results) == 2)
        assert log.killed_results[0] == Killed("a", 2, None)
        assert log.killed_results[1].error is not None
        assert log.killed_results[1].error.details["launch_code"] == "not_found"

        listing = tasks.create_task(connection.list_sandboxes(timeout_s=5))
        asked = await launcher.asked()
        ours = devices(4)
        part = {"pid": 1, "slot": 2, "spec_tag": b"t"}
        launcher.answer(
            {"t": "listed", "seq": asked["seq"], "more": True, "sandboxes": [{"id": "a", **part}]}, ours[:2]
        )
        launcher.answer(
            {"t": "listed", "seq": asked["seq"], "more": False, "sandboxes": [{"id": "b", **part}]}, ours[2:]
        )
        close_all(ours)
        listed = await listing
        assert [box.id for box in listed] == ["a", "b"]

        adopting = tasks.create_task(connection.adopt(listed, timeout_s=5))
        packet, ancillary, _, _ = await _receive_with_descriptors(launcher.sock)
        assert [box["id"] for box in packet["sandboxes"]] == ["a", "b"]
        assert len(ancillary) == 4
        close_all(ancillary)
        launcher.answer({"t": "ok", "seq": packet["seq"]})
        await adopting
        close_all(number for box in listed for number in (box.pidfd, box.channel))


async def test_a_launcher_that_goes_away_fails_what_waits() -> None:
    async with connected() as (connection, launcher, log):
        request = asyncio.create_task(connection.request("stats", {}, timeout_s=5))
        await launcher.asked()
        launcher.sock.close()
        with pytest.raises(InternalError):
            await request
        assert log.losses == 1
        with pytest.raises(InternalError):
            await connection.request("stats", {}, timeout_s=5)


async def test_a_request_gives_up_at_its_deadline() -> None:
    async with connected() as (connection, launcher, _log):
        with pytest.raises(TimeoutError):
            await connection.request("stats", {}, timeout_s=0.02)
        asked = await launcher.asked()
        launcher.answer({"t": "stats", "seq": asked["seq"]})  # too late: dropped
        assert connection._asked == {}


async def _receive_with_descriptors(sock: socket.socket) -> tuple[dict[str, Any], list[int], int, object]:
    while True:
        try:
            packet, ancillary, flags, address = sock.recvmsg(1 << 20, socket.CMSG_SPACE(1024))
        except BlockingIOError:
            await asyncio.sleep(0.001)
            continue
        numbers = array.array("i")
        for _, _, data in ancillary:
            numbers.frombytes(data)
        return msgspec.msgpack.decode(packet), list(numbers), flags, address


def test_listed_is_a_plain_value() -> None:
    assert Listed("a", 1, 2, b"", 3, 4) == Listed("a", 1, 2, b"", 3, 4)
