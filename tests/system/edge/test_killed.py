"""`kill -9` of an edge's process in the middle of its work, and what a sweep takes and leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support import census, procfs
from tests.support.timing import eventually, eventually_sync, scaled
from tests.system.edge.rig import Rig, run
from tests.system.edge.test_edge import edge_living, guests, launchers

from dsec.api.types import State
from dsec.edge.cgroups import Hierarchies
from dsec.edge.instance import InstanceLock
from dsec.edge.sweep import sweep

pytestmark = [pytest.mark.root, pytest.mark.system]
CHECKOUT = Path(__file__).resolve().parents[3]


@contextmanager
def serving(rig: Rig, count: int) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """An edge in a process of its own, under load, and the ids of `count` sandboxes that it keeps."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.system.edge.serve", str(rig.paths.home), str(count)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=CHECKOUT,
    )
    try:
        assert process.stdout is not None
        boxes = process.stdout.readline().split()
        assert len(boxes) == count
        yield process, boxes
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(scaled(10))
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.parametrize("delay_s", [0.0, 0.11, 0.23])
async def test_a_killed_edge_loses_no_sandbox_and_leaks_none(rig: Rig, delay_s: float) -> None:
    with serving(rig, 3) as (process, boxes):
        await asyncio.sleep(delay_s)
        process.kill()
        process.wait(10)
        assert len(guests(rig)) >= 3
        async with rig.edge() as edge:
            # The store knows nothing here: what the journal of the killed edge says is all there is.
            await eventually(
                lambda: set(boxes) <= _living(rig).keys(), within_s=5, what="the kept sandboxes are adopted"
            )
            for box in boxes:
                assert (await run(edge, box, "echo here"))["out"] == b"here\n"
            await eventually(
                lambda: len(guests(rig)) == edge_living(edge),
                within_s=10,
                what="every guest belongs to a sandbox that the edge knows",
            )
            await edge.drain()
        assert guests(rig) == []


async def test_everything_killed_is_swept_at_the_next_start(rig: Rig) -> None:
    with serving(rig, 3) as (process, boxes):
        (launcher,) = launchers(rig)
        process.kill()
        os.kill(launcher, signal.SIGKILL)
        for pid in guests(rig)[:2]:
            # It may have ended already: its channel has.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)
        async with rig.edge() as edge:
            assert guests(rig) == []
            assert edge_living(edge) == 0
            await eventually(lambda: set(boxes) <= rig.records.records.keys(), within_s=5, what="the store is told")
            assert {rig.records.records[box].state for box in boxes} == {State.FAILED}


async def test_a_sweep_takes_the_dead_and_leaves_the_living(rig: Rig, tmp_path: Path) -> None:
    dead = Rig(tmp_path / "dead")
    async with rig.edge() as edge:
        (box,) = await rig.start(edge)
        with serving(dead, 2) as (process, _):
            # Both live: neither is touched.
            assert sweep(Hierarchies.discover(), only=dead.paths.instance, grace_s=0.0) == []
            assert sweep(Hierarchies.discover(), only=rig.paths.instance, grace_s=0.0) == []
            process.kill()
            process.wait(10)
        # Its daemon may be restarting: its launcher and its sandboxes wait for it.
        assert sweep(Hierarchies.discover(), only=dead.paths.instance, grace_s=60.0) == []
        assert len(launchers(dead)) == 1
        # Another daemon that starts on this host right now may be looking at the same lock.
        await eventually(
            lambda: sweep(Hierarchies.discover(), only=dead.paths.instance, grace_s=0.0) == [dead.paths.instance],
            within_s=5,
            what="the dead instance is swept",
        )
        eventually_sync(
            lambda: not census.remains(instance=dead.paths.instance, home=dead.paths.home),
            within_s=10,
            what="nothing is left",
        )
        assert not dead.paths.run_dir.exists()
        assert (await run(edge, box, "echo untouched"))["out"] == b"untouched\n"
        await edge.drain()


def test_a_lock_has_one_holder_and_survives_its_files_removal(tmp_path: Path) -> None:
    path = tmp_path / "instance" / "lock"
    held = InstanceLock.take(path)
    assert InstanceLock.try_take(path) is None
    path.unlink()
    other = InstanceLock.try_take(path)
    assert other is not None, "a new file is a new lock"
    held.close()
    other.close()
    again = InstanceLock.take(path, patience_s=0.1)
    again.close()


async def test_two_instances_run_side_by_side(rig: Rig, tmp_path: Path) -> None:
    other = Rig(tmp_path / "other")
    async with rig.edge() as one, other.edge() as two:
        (here,), (there,) = await rig.start(one), await other.start(two)
        owners = {procfs.read(pid, "status").split(b"Uid:")[1].split()[0] for pid in guests(rig) + guests(other)}
        assert len(owners) == 2, "no two sandboxes share a host uid"
        await two.drain()
        assert (await run(one, here, "echo ok"))["out"] == b"ok\n"
        assert there not in rig.records.records
        await one.drain()


def _living(rig: Rig) -> dict[str, State]:
    return {box: record.state for box, record in rig.records.records.items() if not record.state.ended}
