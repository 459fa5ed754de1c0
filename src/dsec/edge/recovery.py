"""Taking over after a restart: of the edge (its sandboxes run on at the launcher) or of the launcher (they run on at the edge's descriptors).

Idempotent: killed half-way, the next start begins anew and comes to the same end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

from dsec.api.errors import DsecError
from dsec.api.types import EndReason, SandboxRecord, State
from dsec.edge.box import Box, Stage
from dsec.edge.cgroups import Cgroups
from dsec.edge.journal import Kept
from dsec.edge.launcher import Launcher
from dsec.edge.launchwire import Connection, Listed, close_all
from dsec.edge.sandboxes import Sandboxes

log = logging.getLogger(__name__)

_LIST_S: Final = 30.0
_HELLO_S: Final = 15.0
"""A guest answers within a millisecond; one whose CPU quota is used up may take some periods."""
_HELLOS_AT_ONCE: Final = 256
_STRAYS_S: Final = 5.0


async def take_over(
    sandboxes: Sandboxes, launcher: Launcher, *, stored: Iterable[SandboxRecord], kept: dict[str, Kept], found: bool
) -> None:
    """Adopt what the launcher runs and is known, end what is unknown, and mark what is gone as failed(crashed).

    `stored`: what the store holds for living; `kept`: the journal; `found`: whether the launcher outlived the last edge.
    """
    known = {record.id: Kept(record) for record in stored} | kept
    connection = launcher.connection
    listed = await connection.list_sandboxes(timeout_s=_LIST_S) if found and connection is not None else []
    unknown: list[str] = []
    adopting: list[Box] = []
    for box in listed:
        memory = known.pop(box.id, None)
        if memory is None or memory.record.state.ended:
            if memory is not None:
                known[box.id] = memory
            close_all((box.pidfd, box.channel))
            unknown.append(box.id)
        else:
            adopting.append(_box_of(sandboxes, memory, box))
    if unknown and connection is not None:
        connection.kill(unknown)
    for memory in known.values():
        _mark_gone(sandboxes, memory)
    await _adopt_all(sandboxes, adopting)
    log.info("took over", extra={"adopted": len(adopting), "ended": len(unknown), "gone": len(known)})


async def relaunch(sandboxes: Sandboxes, launcher: Launcher, cgroups: Cgroups) -> None:
    """After the launcher's death: end what nobody holds, start a successor, hand it the sandboxes. Raises if it cannot be started.

    Where only the connection was lost, the same launcher is asked what it has instead.
    """
    living = [
        box for box in sandboxes.boxes.values() if box.channel is not None and box.life.record.state is State.RUNNING
    ]
    found = await launcher.connect_or_start(lambda: kill_strays(cgroups, {box.slot for box in living}))
    connection = launcher.connection
    if found and connection is not None:
        await _reconcile(sandboxes, connection)
        return
    if connection is not None:
        handing = [
            Listed(box.id, box.pid, box.slot, b"", box.pidfd, box.channel.descriptor)
            for box in living
            if box.channel is not None and box.channel.descriptor >= 0
        ]
        await connection.adopt(handing, timeout_s=_LIST_S)
    sandboxes.after_launcher()


async def _reconcile(sandboxes: Sandboxes, connection: Connection) -> None:
    """Settle what was out when the connection to a living launcher was lost: end what nobody here holds, and ask again."""
    unknown: list[str] = []
    for listed in await connection.list_sandboxes(timeout_s=_LIST_S):
        close_all((listed.pidfd, listed.channel))
        if listed.id not in sandboxes.boxes:
            unknown.append(listed.id)
    connection.kill(unknown)
    sandboxes.after_reconnect()


async def kill_strays(cgroups: Cgroups, keep: set[int]) -> None:
    """Kill the processes in slots that no living sandbox has; their groups are the launcher's to reuse."""
    strays = cgroups.strays(keep)
    for slot in strays:
        cgroups.kill(slot)
    deadline = asyncio.get_running_loop().time() + _STRAYS_S
    while any(cgroups.populated(slot) for slot in strays):
        if asyncio.get_running_loop().time() > deadline:
            log.error("processes of dead sandboxes do not end", extra={"slots": strays})
            return
        await asyncio.sleep(0.005)


def _box_of(sandboxes: Sandboxes, memory: Kept, listed: Listed) -> Box:
    box = Box(memory.record, None, None, patient=False)
    box.pid, box.slot = listed.pid, listed.slot
    sandboxes.boxes[box.id] = box
    sandboxes.attach(box, listed.channel, listed.pidfd)
    return box


def _mark_gone(sandboxes: Sandboxes, memory: Kept) -> None:
    box = Box(memory.record, None, None, patient=False)
    box.stage = Stage.LIVE
    if memory.record.state.ended:
        # It ended under the last edge, and the store did not hear of it: told again, unchanged.
        sandboxes.retell(box)
        return
    sandboxes.boxes[box.id] = box
    sandboxes.act(box, box.life.failed(sandboxes.clock(), EndReason.CRASHED, "it was gone when the edge started again"))


async def _adopt_all(sandboxes: Sandboxes, boxes: list[Box]) -> None:
    limit = asyncio.Semaphore(_HELLOS_AT_ONCE)
    async with asyncio.TaskGroup() as tasks:
        for box in boxes:
            tasks.create_task(_adopt(sandboxes, box, limit))


async def _adopt(sandboxes: Sandboxes, box: Box, limit: asyncio.Semaphore) -> None:
    async with limit:
        channel = box.channel
        if channel is None:
            return
        try:
            await channel.hello(sandboxes.epoch, None, timeout_s=_HELLO_S)
        except (TimeoutError, DsecError):
            box.life.record.state = State.RUNNING
            sandboxes.stop(box, EndReason.CHANNEL_LOST, "the guest did not answer the new edge")
            return
    sandboxes.act(box, box.life.adopted(sandboxes.clock(), epoch=sandboxes.epoch), "sandbox.adopted")
    sandboxes.watch_time(box)
