"""The multiplexer, against a peer on a real SEQPACKET socket."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable

import pytest
from tests.unit.edge.peer import channel_and_peer, gone, until

from dsec.api import wire
from dsec.api.dataplane import Data, GuestReset, Message
from dsec.api.errors import Conflict, DeadlineExceeded, InternalError, InvalidRequest, NoCapacity, SandboxGone
from dsec.edge.channel import MAX_STREAMS, Stream


async def test_calls_get_their_own_answers_in_any_order() -> None:
    async with channel_and_peer() as (channel, peer, _), asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(channel.call({"m": "ps", "n": n})) for n in range(20)]
        opened = [await peer.opened() for _ in range(20)]
        peer.say(*(wire.map_frame(s, wire.MSG | wire.FIN, {"n": fields["n"]}) for s, fields in reversed(opened)))
        assert [(await call).fields["n"] for call in calls] == list(range(20))
        assert channel.streams == 0


async def test_a_reset_becomes_the_guests_error() -> None:
    async with channel_and_peer() as (channel, peer, _), asyncio.TaskGroup() as tasks:
        call = tasks.create_task(_caught(channel.call({"m": "file"})))
        stream, _fields = await peer.opened()
        peer.say(
            wire.map_frame(
                stream, wire.RESET, {"code": "not_found", "msg": "no /a", "errno": 2, "path": b"/a\xff", "x": 1}
            )
        )
        error = await call
        assert isinstance(error, GuestReset)
        assert (error.guest_code, error.message, error.details) == ("not_found", "no /a", {"errno": 2, "path": "/a�"})


async def test_a_guest_that_gives_no_sign_of_life_fails_its_calls() -> None:
    async with channel_and_peer() as (channel, peer, lost), asyncio.TaskGroup() as tasks:
        assert not channel.watch(0.0, patience_s=60.0)  # nobody waits for anything
        call = tasks.create_task(_caught(channel.call({"m": "wait"})))
        stream, _fields = await peer.opened()
        assert not channel.watch(5.0, patience_s=60.0)
        assert (await peer.frame())[1] == wire.PING
        # Silence between a PING and its answer is measured, not that between a call and its end.
        peer.say(wire.frame(0, wire.PONG, b"watch"))
        await asyncio.sleep(0.05)
        assert not channel.watch(100.0, patience_s=60.0)
        assert not channel.watch(159.0, patience_s=60.0)
        assert channel.watch(160.0, patience_s=60.0)
        error = await call
        assert isinstance(error, DeadlineExceeded)
        assert error.sandbox_survived
        assert channel.streams == 0
        assert lost == []
        assert [(await peer.frame())[:2] for _ in range(2)] == [(0, wire.PING), (stream, wire.RESET)]


async def test_a_cancelled_call_resets_its_stream() -> None:
    async with channel_and_peer() as (channel, peer, _):
        call = asyncio.create_task(channel.call({"m": "exec"}))
        stream, _fields = await peer.opened()
        call.cancel()
        assert await peer.frame() == (
            stream,
            wire.RESET,
            wire.map_frame(stream, wire.RESET, {"code": "cancelled", "msg": ""})[9:],
        )
        with pytest.raises(asyncio.CancelledError):
            await call
        peer.say(wire.map_frame(stream, wire.MSG | wire.FIN, {}))  # dropped silently
        assert channel.streams == 0


async def test_data_where_an_answer_is_due_is_the_guests_fault() -> None:
    async with channel_and_peer() as (channel, peer, lost), asyncio.TaskGroup() as tasks:
        call = tasks.create_task(_caught(channel.call({"m": "ps"})))
        stream, _fields = await peer.opened()
        peer.say(wire.frame(stream, wire.DATA, b"x"))
        assert isinstance(await call, InternalError)
        assert lost == []


async def test_a_stream_hands_out_everything_and_then_none() -> None:
    async with channel_and_peer() as (channel, peer, _):
        ended: list[int] = []
        async with channel.open({"m": "file"}, fin=True, on_end=lambda: ended.append(1)) as stream:
            number, _fields = await peer.opened()
            peer.say(wire.frame(number, wire.DATA, b"a"), wire.map_frame(number, wire.MSG | wire.FIN, {"size": 1}))
            assert await stream.receive() == Data(b"a")
            assert await stream.receive() == Message({"size": 1}, True)
            assert await stream.receive() is None
        assert ended == [1]
        assert channel.streams == 0


async def test_the_sender_waits_for_credit_and_the_receiver_grants_it() -> None:
    total = 3 * wire.WINDOW_BYTES + 12_345
    async with (
        channel_and_peer() as (channel, peer, _),
        asyncio.TaskGroup() as tasks,
        channel.open({"m": "file"}, fin=False) as stream,
    ):
        number, _fields = await peer.opened()
        sending = tasks.create_task(stream.send(os.urandom(total), fin=True))
        received = 0
        while received < wire.WINDOW_BYTES:
            received += len((await peer.frame())[2])
        assert received == wire.WINDOW_BYTES
        await asyncio.sleep(0.02)
        assert not sending.done()
        kind = wire.DATA
        while not kind & wire.FIN:
            peer.say(wire.credit_frame(number, wire.MAX_PAYLOAD_BYTES))
            _, kind, payload = await peer.frame()
            received += len(payload)
        assert received == total
        peer.say(wire.map_frame(number, wire.MSG | wire.FIN, {"size": total}))
        assert (await stream.receive()) == Message({"size": total}, True)


async def test_consumed_bytes_are_granted_again() -> None:
    async with channel_and_peer() as (channel, peer, _), channel.open({"m": "output"}, fin=True) as stream:
        number, _fields = await peer.opened()
        granted = 0
        for _ in range(16):
            peer.say(wire.frame(number, wire.DATA, bytes(65_536)))
            assert len((await stream.receive()).payload) == 65_536  # type: ignore[union-attr]
            granted += wire.credit_of((await peer.frame())[2])
        assert granted == 16 * 65_536


async def test_a_guest_that_ignores_the_window_loses_its_stream() -> None:
    async with channel_and_peer() as (channel, peer, lost), channel.open({"m": "output"}, fin=True) as stream:
        number, _fields = await peer.opened()
        for _ in range(5):
            await asyncio.get_running_loop().sock_sendall(peer.sock, wire.frame(number, wire.DATA, bytes(65_536)))
        await until(lambda: channel.streams == 0)
        assert isinstance(await _caught(_drain(stream)), InternalError)
        assert lost == []


async def test_a_guest_that_does_not_read_holds_the_sender_back_and_loses_nothing() -> None:
    async with channel_and_peer() as (channel, peer, _), asyncio.TaskGroup() as tasks:
        streams = [channel.open({"m": "file", "n": n}, fin=False) for n in range(4)]
        sending = [
            tasks.create_task(stream.send(bytes([n]) * wire.WINDOW_BYTES, fin=True)) for n, stream in enumerate(streams)
        ]
        await asyncio.sleep(0.02)
        assert not all(task.done() for task in sending)
        got: dict[int, bytearray] = {}
        finished = 0
        while finished < 4:
            number, kind, payload = await peer.frame()
            if kind & ~wire.FIN == wire.DATA:
                got.setdefault(number, bytearray()).extend(payload)
                finished += bool(kind & wire.FIN)
        assert [bytes(data) for _, data in sorted(got.items())] == [bytes([n]) * wire.WINDOW_BYTES for n in range(4)]
        for stream in streams:
            await stream.aclose()


async def test_sending_ends_when_the_guest_has_finished() -> None:
    async with (
        channel_and_peer() as (channel, peer, _),
        channel.open({"m": "exec", "stdin": True}, fin=False) as stream,
    ):
        number, _fields = await peer.opened()
        peer.say(wire.map_frame(number, wire.MSG | wire.FIN, {"exit": 0}))
        assert await stream.receive() == Message({"exit": 0}, True)
        with pytest.raises(Conflict):
            await stream.send(bytes(10 * wire.WINDOW_BYTES))


async def test_closing_ends_everything_with_the_reason() -> None:
    async with channel_and_peer() as (channel, _peer, _), asyncio.TaskGroup() as tasks:
        stream = channel.open({"m": "output"}, fin=False)
        waits = [tasks.create_task(_caught(stream.receive())), tasks.create_task(_caught(channel.call({"m": "wait"})))]
        await asyncio.sleep(0)
        channel.close(gone)
        for wait in waits:
            error = await wait
            assert isinstance(error, SandboxGone)
            assert error.reason == "requested"
        with pytest.raises(SandboxGone):
            await stream.send(b"x")


async def test_end_of_file_is_told_once_and_streams_wait_for_the_reason() -> None:
    async with channel_and_peer() as (channel, peer, lost), asyncio.TaskGroup() as tasks:
        call = tasks.create_task(_caught(channel.call({"m": "wait"})))
        await peer.opened()
        peer.sock.close()
        await until(lambda: bool(lost))
        assert len(lost) == 1
        assert not call.done()
        channel.close(gone)
        assert isinstance(await call, SandboxGone)


async def test_nonsense_loses_the_channel_not_the_edge() -> None:
    async with channel_and_peer() as (_channel, peer, lost):
        peer.say(b"\xff\xff\xff\xff\x00\x00\x00\x00\x02")
        await until(lambda: bool(lost))
        assert "protocol" in lost[0]


async def test_a_new_epoch_drops_what_was_said_before_its_answer() -> None:
    async with channel_and_peer() as (channel, peer, _), asyncio.TaskGroup() as tasks:
        peer.say(
            wire.map_frame(1, wire.MSG | wire.FIN, {"old": 1}), wire.map_frame(0, wire.HELLO, {"proto": 1, "epoch": 6})
        )
        hello = tasks.create_task(channel.hello(7, None, timeout_s=5))
        assert wire.fields_of((await peer.frame())[2]) == {"proto": 1, "epoch": 7}
        peer.say(wire.map_frame(1, wire.MSG | wire.FIN, {"old": 2}))
        peer.say(wire.map_frame(0, wire.HELLO, {"proto": 1, "epoch": 7, "version": "t"}))
        assert (await hello)["version"] == "t"
        call = tasks.create_task(channel.call({"m": "ps"}))
        stream, _fields = await peer.opened()
        peer.say(wire.map_frame(stream, wire.MSG | wire.FIN, {"new": 1}))
        assert (await call).fields == {"new": 1}


async def test_the_guests_pings_are_echoed() -> None:
    async with channel_and_peer() as (_channel, peer, _):
        peer.say(wire.frame(0, wire.PING, b"hello"))
        assert await peer.frame() == (0, wire.PONG, b"hello")


async def test_bounds_of_a_channel() -> None:
    async with channel_and_peer() as (channel, _peer, _):
        with pytest.raises(InvalidRequest):
            await channel.call({"m": "exec", "env": {"a": "x" * 70_000}})
        waits = [channel.ask({"m": "wait"}) for _ in range(MAX_STREAMS)]
        with pytest.raises(NoCapacity):
            channel.open({"m": "output"}, fin=True)
        channel.close(gone)
        for wait in waits:
            assert isinstance(wait.exception(), SandboxGone)


async def _caught(work: Awaitable[object]) -> object:
    try:
        return await work
    except Exception as error:
        return error


async def _drain(stream: Stream) -> None:
    while await stream.receive() is not None:
        pass
