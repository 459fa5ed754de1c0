"""The edge with the real launcher, guest and kernel."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import aclosing
from pathlib import Path

import pytest
from tests.support import census, procfs
from tests.support.timing import eventually, scaled
from tests.system.edge.rig import MIB, Rig, answer, collect, command, open_descriptors, run, stop_all, ticket

from dsec.api import token
from dsec.api.control import NodeQuery, SetTimeouts, StopSandboxes, UsageQuery
from dsec.api.dataplane import Data, Message
from dsec.api.errors import NotFound, PermissionDenied, SandboxGone
from dsec.api.types import EndReason, State
from dsec.edge.edge import Edge

pytestmark = [pytest.mark.root, pytest.mark.system]


def launchers(rig: Rig) -> list[int]:
    """Launchers of the instance, without the children that are on their way to become sandboxes."""
    found = [
        pid
        for pid in procfs.with_word(rig.paths.instance)
        if (words := procfs.cmdline(pid)) and Path(words[0]).name == "dsec-launch"
    ]
    return [pid for pid in found if procfs.parent(pid) not in found]


def guests(rig: Rig) -> list[int]:
    """First processes of the instance's sandboxes: in a slot's agent group."""
    groups = [path / "cgroup.procs" for path in census.cgroups_of(rig.paths.instance) if path.name == "agent"]
    return [int(pid) for group in groups if group.exists() for pid in group.read_text().split()]


async def ended(edge: Edge, rig: Rig, sandbox: str, *, within_s: float) -> tuple[State, EndReason | None]:
    await eventually(
        lambda: sandbox in rig.records.records and rig.records.records[sandbox].state.ended,
        within_s=within_s,
        what=f"{sandbox} ends",
    )
    record = rig.records.records[sandbox]
    return record.state, record.reason


async def test_a_batch_runs_commands_and_ends_without_a_trace(rig: Rig) -> None:
    async with rig.edge() as edge:
        first = await rig.start(edge)
        await stop_all(edge, first)
        before = open_descriptors()
        boxes = await rig.start(edge, 8, env={"GREETING": "hi"}, image_env={"BASE": "deb"}, workdir="/tmp")
        results = await asyncio.gather(*(run(edge, box, 'echo "$GREETING $BASE $(pwd) $(hostname)"') for box in boxes))
        assert [result["out"].decode() for result in results] == [f"hi deb /tmp {box}\n" for box in boxes]
        assert len(guests(rig)) == 8
        await stop_all(edge, boxes)
        assert guests(rig) == []
        assert open_descriptors() == before
    assert [event for box, event in rig.records.events if box == boxes[0]] == ["sandbox.running", "sandbox.stopped"]
    await eventually(lambda: launchers(rig) == [], within_s=5, what="the launcher, which nobody needs, has ended")


async def test_what_a_sandbox_sees_is_what_it_was_given(rig: Rig) -> None:
    async with rig.edge() as edge:
        (box,) = await rig.start(edge, memory_bytes=512 * MIB, disk_bytes=100 * MIB)
        text = (
            await run(
                edge,
                box,
                "nproc; cat /sys/devices/system/cpu/online; df -Pk / | tail -n1 | awk '{print $2}'; stat -c %a /dev/shm; df -Pk /dev/shm | "
                "tail -n1 | awk '{print $2}'; ulimit -c; cat /etc/hostname; grep -c $(hostname) /etc/hosts; ls /sys/fs/cgroup | wc -l; "
                "echo x > /proc/sys/kernel/hostname 2>/dev/null; echo $?",
            )
        )["out"].decode()
        assert text.split()[-1] != "0"
        assert text.split()[:9] == ["1", "0", "102400", "1777", str(256 * 1024), "0", box, "1", "0"]
        await stop_all(edge, [box])


@pytest.mark.parametrize("backing", ["tmpfs", "local"])
async def test_the_disk_is_bounded(rig: Rig, backing: str) -> None:
    async with rig.edge() as edge:
        (box,) = await rig.start(edge, disk_bytes=64 * MIB, disk_backing=backing)
        result = await run(edge, box, "dd if=/dev/zero of=/x bs=1M count=200 2>&1; rm /x; echo z > /z && cat /z")
        assert b"No space left" in result["out"]
        assert result["out"].endswith(b"z\n")
        await stop_all(edge, [box])


async def test_errors_of_a_batch_name_the_reason(rig: Rig) -> None:
    async with rig.edge() as edge:
        cases = [
            (rig.batch(memory_bytes=1 << 50), "no_capacity", "memory"),
            (rig.batch(pids=1 << 23), "no_capacity", "pids"),
            (rig.batch(disk_backing="tmpfs", disk_bytes=200 * MIB), "invalid_request", "half of memory"),
            (rig.batch(layers=("0" * 64,)), "image_error", ""),
        ]
        for request, code, word in cases:
            (result,) = await collect(edge, request)
            assert result.error is not None
            assert result.error.code == code
            assert word in result.error.message
            assert await ended(edge, rig, result.id, within_s=5) == (State.FAILED, EndReason.ADMISSION)


async def test_tokens_and_states_are_checked(rig: Rig) -> None:
    async with rig.edge() as edge:
        (box,) = await rig.start(edge)
        with pytest.raises(NotFound):
            await edge.call(ticket(box, project="another"), {"m": "ps"})
        with pytest.raises(NotFound):
            await edge.call(ticket("aaaa" + "z" * 16), {"m": "ps"})
        with pytest.raises(PermissionDenied):
            await edge.call(ticket(box, operations=token.READ), command("true"))
        with pytest.raises(PermissionDenied):
            await edge.open(ticket(box), {"m": "config", "config": {}}, fin=True)
        running = asyncio.create_task(run(edge, box, "sleep 60"))
        await eventually(lambda: len(guests(rig)) == 1, within_s=5, what="the guest")
        await stop_all(edge, [box])
        with pytest.raises(SandboxGone) as caught:
            await running
        assert caught.value.reason == "requested"
        with pytest.raises(SandboxGone):
            await edge.call(ticket(box), {"m": "ps"})
        (again,) = await edge.stop(StopSandboxes(ids=(box,)))
        assert again.record is not None
        assert again.record.state is State.STOPPED


async def test_streams_carry_output_and_input(rig: Rig) -> None:
    async with rig.edge() as edge:
        (box,) = await rig.start(edge)
        async with await edge.open(ticket(box), command("sha256sum; sleep 0.05", stdin=True), fin=False) as stream:
            await stream.send(bytes(3 * MIB), fin=True)
            message = await stream.receive()
            assert isinstance(message, Message)
            assert (
                message.fields["out"].split()[0] == b"bbd05cf6097ac9b1f89ea29d2542c1b7b67ee46848393895f5a9e43fa1f621e5"
            )
        async with await edge.open(ticket(box), command("head -c 4000000 /dev/zero"), fin=True) as stream:
            total = 0
            while (item := await stream.receive()) is not None:
                total += len(item.payload) - 9 if isinstance(item, Data) else 0
            assert total == 4_000_000
        await stop_all(edge, [box])


async def test_a_cancelled_call_kills_its_command(rig: Rig) -> None:
    async with rig.edge() as edge:
        (box,) = await rig.start(edge)
        call = asyncio.create_task(run(edge, box, "sleep 61.5"))
        await eventually(lambda: _sleeping("61.5"), within_s=5, what="the command runs")
        call.cancel()
        await eventually(lambda: not _sleeping("61.5"), within_s=5, what="the command is gone")
        await stop_all(edge, [box])


async def test_usage_and_node(rig: Rig) -> None:
    async with rig.edge() as edge:
        (box,) = await rig.start(edge)
        await run(
            edge,
            box,
            "head -c 20000000 /dev/zero > /x; python3 -c 'import time\nwhile time.process_time() < 0.4: pass'",
        )
        usage = (await edge.usage(UsageQuery(id=box))).usage
        assert usage.cpu_s >= 0.35
        assert usage.memory >= 20_000_000
        assert 19_000_000 < usage.disk < 64 * MIB
        assert (usage.memory_limit, usage.disk_limit, usage.pids_limit) == (256 * MIB, 64 * MIB, 128)
        node = await edge.node(NodeQuery())
        assert (node.edge, node.sandboxes, node.kinds) == ("aaaa", 1, ["container"])
        await stop_all(edge, [box])


async def test_lifetime_ends_a_running_call(rig: Rig) -> None:
    async with rig.edge() as edge:
        (box,) = await rig.start(edge, max_lifetime_s=1.5)
        with pytest.raises(SandboxGone) as caught:
            await run(edge, box, "sleep 30")
        assert caught.value.reason == "lifetime"
        assert await ended(edge, rig, box, within_s=5) == (State.STOPPED, EndReason.LIFETIME)
        record = rig.records.records[box]
        assert record.ended_at is not None
        assert 1.4 <= record.ended_at - record.created_at < scaled(4.0)


async def test_idle_waits_for_calls_and_started_processes(rig: Rig) -> None:
    async with rig.edge() as edge:
        quiet, busy, background = await rig.start(edge, 3, idle_timeout_s=0.6)
        call = asyncio.create_task(run(edge, busy, "sleep 2; echo done"))
        started = await answer(edge, background, **command("sleep 2", start=True))
        assert started.fields["pid"] > 0
        assert await ended(edge, rig, quiet, within_s=1.9) == (State.STOPPED, EndReason.IDLE)
        await edge.usage(UsageQuery(id=busy))
        assert (await call)["out"] == b"done\n"
        for box in (busy, background):
            assert await ended(edge, rig, box, within_s=3.0) == (State.STOPPED, EndReason.IDLE)
            record = rig.records.records[box]
            assert record.ended_at is not None
            assert record.ended_at - (record.started_at or 0) >= 2.5


async def test_timeouts_can_be_changed(rig: Rig) -> None:
    async with rig.edge() as edge:
        (box,) = await rig.start(edge)
        record = await edge.set_timeouts(SetTimeouts(id=box, idle_timeout_s=0.3, max_lifetime_s=None))
        assert (record.idle_timeout, record.max_lifetime, record.expires_at) == (0.3, None, None)
        assert await ended(edge, rig, box, within_s=3) == (State.STOPPED, EndReason.IDLE)
        with pytest.raises(SandboxGone, match="idle"):
            await edge.set_timeouts(SetTimeouts(id=box, idle_timeout_s=None, max_lifetime_s=None))


async def test_a_killed_guest_fails_its_sandbox_alone(rig: Rig) -> None:
    async with rig.edge() as edge:
        victim, neighbour = await rig.start(edge, 2)
        call = asyncio.create_task(run(edge, victim, "sleep 30"))
        await asyncio.sleep(0.1)
        info = await answer(edge, victim, m="ps")
        assert len(info.fields["processes"]) == 1
        os.kill(_guest_of(edge, victim), signal.SIGKILL)
        with pytest.raises(SandboxGone) as caught:
            await call
        assert caught.value.reason == "crashed"
        assert await ended(edge, rig, victim, within_s=5) == (State.FAILED, EndReason.CRASHED)
        assert (await run(edge, neighbour, "echo ok"))["out"] == b"ok\n"
        await stop_all(edge, [neighbour])


async def test_out_of_memory_is_told_and_survived(rig: Rig) -> None:
    async with rig.edge() as edge:
        (box,) = await rig.start(edge, memory_bytes=64 * MIB, disk_bytes=16 * MIB)
        result = await run(edge, box, "exec python3 -c \"b = b'x' * (1 << 30); print(len(b))\"")
        assert result["reason"] == "oom"
        assert (await run(edge, box, "echo alive"))["out"] == b"alive\n"
        await stop_all(edge, [box])


async def test_a_reader_that_goes_away_stops_what_it_did_not_get(rig: Rig) -> None:
    async with rig.edge(max_starting=4) as edge:
        got: list[str] = []
        async with aclosing(edge.start_batch(rig.batch(40))) as results:  # type: ignore[type-var]
            async for part in results:
                got += [result.id for result in part]
                if len(got) >= 4:
                    break
        await eventually(lambda: edge_living(edge) <= len(got), within_s=20, what="the others are stopped")
        reasons = {
            record.reason for box, record in rig.records.records.items() if box not in got and record.state.ended
        }
        assert reasons <= {EndReason.CANCELLED}
        await edge.drain()
        assert guests(rig) == []


async def test_stop_cancels_those_being_created(rig: Rig) -> None:
    async with rig.edge(max_starting=2) as edge:
        request = rig.batch(30)
        collecting = asyncio.create_task(collect(edge, request))
        await asyncio.sleep(0.02)
        stopped = await edge.stop(StopSandboxes(ids=tuple(item.record.id for item in request.items)))
        assert all(result.error is None for result in stopped)
        results = await collecting
        assert len(results) == 30
        assert edge_living(edge) == 0
        assert guests(rig) == []


async def test_room_is_waited_for_or_refused(rig: Rig) -> None:
    async with rig.edge(max_sandboxes=2) as edge:
        boxes = await rig.start(edge, 2)
        (refused,) = await collect(edge, rig.batch(wait=False))
        assert refused.error is not None
        assert refused.error.code == "no_capacity"
        assert refused.error.details["retry_after"] > 0
        (late,) = await collect(edge, rig.batch(within_s=0.3))
        assert late.error is not None
        assert late.error.code == "no_capacity"
        waiting = asyncio.create_task(collect(edge, rig.batch(2)))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await stop_all(edge, boxes)
        assert all(result.record is not None for result in await waiting)
        await edge.drain()


async def test_a_restarted_edge_adopts_and_goes_on(rig: Rig) -> None:
    async with rig.edge() as edge:
        boxes = await rig.start(edge, 5)
        epoch = edge.epoch
        started = await answer(edge, boxes[0], **command("sleep 1; echo late", start=True, id="pkeep"))
    pids = guests(rig)
    assert len(pids) == 5
    async with rig.edge() as edge:
        assert edge.epoch == epoch + 1
        assert sorted(guests(rig)) == sorted(pids)
        await eventually(
            lambda: {rig.records.records[box].epoch for box in boxes} == {epoch + 1},
            within_s=5,
            what="the store hears of the new epoch",
        )
        assert (await run(edge, boxes[1], "echo again"))["out"] == b"again\n"
        waited = await answer(edge, boxes[0], m="wait", id="pkeep", timeout_ms=10_000)
        assert (waited.fields["exit"], waited.fields["pid"]) == (0, started.fields["pid"])
        await stop_all(edge, boxes)


async def test_a_killed_launcher_is_replaced_and_sandboxes_run_on(rig: Rig) -> None:
    async with rig.edge() as edge:
        boxes = await rig.start(edge, 4)
        pids = guests(rig)
        call = asyncio.create_task(run(edge, boxes[0], "sleep 1; echo through"))
        (launcher,) = launchers(rig)
        os.kill(launcher, signal.SIGKILL)
        assert (await call)["out"] == b"through\n"
        fresh = await rig.start(edge, 4)
        assert launchers(rig) != [launcher]
        assert set(pids) <= set(guests(rig))
        await stop_all(edge, [*boxes, *fresh])
        assert guests(rig) == []


async def test_a_launcher_killed_under_load_loses_nothing(rig: Rig) -> None:
    async with rig.edge(max_starting=8) as edge:
        collecting = asyncio.create_task(collect(edge, rig.batch(60)))
        for _ in range(3):
            await asyncio.sleep(0.15)
            for pid in launchers(rig):
                os.kill(pid, signal.SIGKILL)
        results = await collecting
        assert len({result.id for result in results}) == 60
        running = [result.id for result in results if result.record is not None]
        outputs = await asyncio.gather(*(run(edge, box, "echo ok") for box in running))
        assert all(output["out"] == b"ok\n" for output in outputs)
        assert len(guests(rig)) == len(running)
        await edge.drain()
        assert guests(rig) == []


async def test_both_killed_ends_everything_as_crashed(rig: Rig) -> None:
    async with rig.edge() as edge:
        boxes = await rig.start(edge, 3)
    (launcher,) = launchers(rig)
    os.kill(launcher, signal.SIGKILL)
    async with rig.edge() as edge:
        for box in boxes:
            assert await ended(edge, rig, box, within_s=5) == (State.FAILED, EndReason.CRASHED)
        assert guests(rig) == []
        with pytest.raises(SandboxGone, match="crashed"):
            await edge.call(ticket(boxes[0]), {"m": "ps"})


async def test_an_end_that_the_store_did_not_hear_of_is_told_again(rig: Rig) -> None:
    async with rig.edge() as edge:
        boxes = await rig.start(edge, 2)
        await eventually(lambda: len(rig.records.records) == 2, within_s=5, what="the store knows them")
        rig.records.deaf = True
        await stop_all(edge, boxes[:1])
        edge.give_up_flushing_after_s = 0.1
    rig.records.deaf = False
    async with rig.edge() as edge:
        assert await ended(edge, rig, boxes[0], within_s=5) == (State.STOPPED, EndReason.REQUESTED)
        assert (await run(edge, boxes[1], "echo ok"))["out"] == b"ok\n"
        await edge.drain()


async def test_what_nobody_knows_is_ended(rig: Rig) -> None:
    async with rig.edge() as edge:
        boxes = await rig.start(edge, 2)
    rig.records.records.clear()
    (rig.paths.state_dir / "edge.journal").unlink()
    async with rig.edge() as edge:
        await eventually(lambda: guests(rig) == [], within_s=5, what="the unknown are ended")
        with pytest.raises(NotFound):
            await edge.call(ticket(boxes[0]), {"m": "ps"})


async def test_the_edge_needs_little_time_for_a_sandbox(rig: Rig) -> None:
    """Not a promise (those are the benches'): a bound that only a blunder exceeds."""
    async with rig.edge() as edge:
        await stop_all(edge, await rig.start(edge, 16))
        before = time.process_time()
        for _ in range(10):
            await stop_all(edge, await rig.start(edge, 16))
        each_s = (time.process_time() - before) / 160
        assert each_s < scaled(0.003)


def edge_living(edge: Edge) -> int:
    return len(edge._sandboxes.boxes)


def _guest_of(edge: Edge, box: str) -> int:
    return edge._sandboxes.boxes[box].pid


def _sleeping(seconds: str) -> bool:
    return any(procfs.cmdline(pid)[-2:] == ["sleep", seconds] for pid in procfs.all_pids())
