"""What becomes of a sandbox, on a clock that the test turns."""

from __future__ import annotations

import pytest

from dsec.api.types import EndReason, Kind, SandboxRecord, State
from dsec.edge.lifecycle import IDLE_CHECK_S, Action, Lifecycle


def life(*, idle: float | None = 10.0, lifetime: float | None = 100.0) -> Lifecycle:
    record = SandboxRecord(
        id="aaaa" + "b" * 16, project="p", principal="u", edge="aaaa", epoch=0, kind=Kind.CONTAINER, state=State.CREATING,
        image="i", cpus=1.0, memory=1, disk=1, pids=1, created_at=1000.0, idle_timeout=idle, max_lifetime=lifetime,
        expires_at=None if lifetime is None else 1000.0 + lifetime,
    )  # fmt: skip
    return Lifecycle(record)


def running(*, idle: float | None = 10.0, lifetime: float | None = 100.0) -> Lifecycle:
    machine = life(idle=idle, lifetime=lifetime)
    assert machine.started(1000.0, epoch=3) == (Action.PUBLISH,)
    return machine


def ended(machine: Lifecycle) -> tuple[State, EndReason | None]:
    return machine.record.state, machine.record.reason


def test_started_and_stopped() -> None:
    machine = running()
    assert (machine.record.state, machine.record.epoch, machine.record.seq, machine.gone_reason) == (
        State.RUNNING,
        3,
        1,
        None,
    )
    assert machine.stop(EndReason.REQUESTED) == (Action.KILL,)
    assert machine.stop(EndReason.IDLE) == ()
    assert machine.gone_reason == "requested"
    assert machine.killed(1001.0) == (Action.PUBLISH, Action.RELEASE)
    assert ended(machine) == (State.STOPPED, EndReason.REQUESTED)
    assert machine.record.ended_at == 1001.0
    assert (
        machine.killed(1002.0)
        == machine.failed(1002.0, EndReason.CRASHED, None)
        == machine.stop(EndReason.REQUESTED)
        == ()
    )


def test_a_stop_while_it_is_created_kills_it_when_it_runs() -> None:
    machine = life()
    assert machine.stop(EndReason.CANCELLED) == ()
    assert machine.started(1000.0, epoch=1) == (Action.KILL,)
    assert machine.killed(1001.0) == (Action.PUBLISH, Action.RELEASE)
    assert ended(machine) == (State.FAILED, EndReason.CANCELLED)


def test_a_stop_while_it_is_created_wins_over_the_launchers_error() -> None:
    machine = life()
    machine.stop(EndReason.REQUESTED)
    machine.failed(1000.0, EndReason.CRASHED, "boom")
    assert ended(machine) == (State.STOPPED, EndReason.REQUESTED)


@pytest.mark.parametrize("reason", [EndReason.OOM, EndReason.CRASHED, EndReason.CHANNEL_LOST, EndReason.ADMISSION])
def test_ends_that_nobody_wanted_are_failures(reason: EndReason) -> None:
    machine = running()
    assert machine.failed(1001.0, reason, "why") == (Action.PUBLISH, Action.RELEASE)
    assert ended(machine) == (State.FAILED, reason)
    assert machine.record.detail == "why"
    assert machine.gone_reason == reason.value


def test_a_lost_channel_was_out_of_memory_if_the_kernel_says_so() -> None:
    machine = running()
    machine.stop(EndReason.CHANNEL_LOST, "end of file")
    machine.killed(1001.0, out_of_memory=True)
    assert ended(machine) == (State.FAILED, EndReason.OOM)


def test_the_lifetime_ends_also_a_busy_sandbox() -> None:
    machine = running(idle=None)
    machine.begin()
    assert machine.next_deadline(1000.0) == 1100.0
    assert machine.tick(1099.9) == ()
    assert machine.tick(1100.0) == (Action.KILL,)
    assert machine.gone_reason == "lifetime"


def test_idle_asks_the_guest_and_stops_when_nothing_runs() -> None:
    machine = running()
    assert machine.next_deadline(1000.0) == 1010.0
    assert machine.tick(1009.9) == ()
    assert machine.tick(1010.0) == (Action.ASK_GUEST,)
    assert machine.tick(1010.1) == ()
    assert machine.idle_checked(1010.2, running=0, last_end=0.0) == (Action.KILL,)
    machine.killed(1010.3)
    assert ended(machine) == (State.STOPPED, EndReason.IDLE)


def test_a_running_call_is_not_idle_and_its_end_starts_the_time() -> None:
    machine = running()
    machine.begin()
    assert machine.tick(1050.0) == ()
    machine.done(1055.0)
    assert machine.tick(1060.0) == ()
    assert machine.next_deadline(1060.0) == 1065.0
    assert machine.tick(1065.0) == (Action.ASK_GUEST,)


def test_a_started_process_keeps_it_alive_until_it_has_ended_for_so_long() -> None:
    machine = running()
    machine.tick(1010.0)
    assert machine.idle_checked(1010.1, running=2, last_end=0.0) == ()
    assert machine.tick(1050.0) == ()
    machine.process_ended(1050.0)
    machine.process_ended(1051.0)
    assert machine.next_deadline(1051.0) == 1061.0
    assert machine.tick(1061.0) == (Action.ASK_GUEST,)


def test_a_process_that_ended_lately_counts_from_its_end() -> None:
    machine = running()
    machine.tick(1010.0)
    assert machine.idle_checked(1010.1, running=0, last_end=1008.0) == ()
    assert machine.next_deadline(1010.1) == 1018.0


def test_a_guest_that_lies_about_the_future_gains_nothing() -> None:
    machine = running()
    machine.tick(1010.0)
    machine.idle_checked(1010.1, running=0, last_end=1e12)
    assert machine.next_deadline(1010.1) == pytest.approx(1020.1)


def test_a_guest_that_does_not_answer_is_asked_again() -> None:
    machine = running()
    assert machine.tick(1010.0) == (Action.ASK_GUEST,)
    assert machine.next_deadline(1010.0) == 1010.0 + IDLE_CHECK_S
    assert machine.tick(1010.0 + IDLE_CHECK_S) == (Action.ASK_GUEST,)


def test_an_answer_that_comes_late_does_not_stop_a_sandbox_in_use() -> None:
    machine = running()
    machine.tick(1010.0)
    machine.begin()
    assert machine.idle_checked(1010.1, running=0, last_end=0.0) == ()
    assert machine.record.state is State.RUNNING


def test_new_timeouts_count_from_now_and_from_the_creation() -> None:
    machine = running()
    assert machine.set_timeouts(1005.0, idle_s=50.0, lifetime_s=None) == (Action.PUBLISH,)
    assert machine.next_deadline(1005.0) == 1055.0
    machine.set_timeouts(1006.0, idle_s=None, lifetime_s=20.0)
    assert machine.next_deadline(1006.0) == 1020.0
    machine.set_timeouts(1006.0, idle_s=None, lifetime_s=None)
    assert machine.next_deadline(1006.0) == float("inf")


def test_adopted_counts_its_idle_time_anew() -> None:
    machine = running()
    seq = machine.record.seq
    assert machine.adopted(1009.0, epoch=4) == (Action.PUBLISH,)
    assert (machine.record.epoch, machine.record.seq, machine.record.started_at) == (4, seq + 1, 1000.0)
    assert machine.next_deadline(1009.0) == 1019.0
