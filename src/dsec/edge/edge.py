"""The edge: the one on a node that knows what runs there. Composes the parts and is what apiservers talk to.

Its methods are bound to the bus by the composition root; streams come through `open` and `call` (the data plane). Leaving the `async
with` lets go of the sandboxes, which run on for the next edge of the instance; `drain` ends them all first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, suppress
from importlib.metadata import version
from types import TracebackType
from typing import Any, Final, Self

from dsec.api.control import (
    NodeQuery,
    SetTimeouts,
    StartBatch,
    StartResult,
    StartSandbox,
    StopResult,
    StopSandboxes,
    UsageQuery,
    UsageReply,
)
from dsec.api.dataplane import Message
from dsec.api.errors import Conflict, DeadlineExceeded, DsecError, InternalError, NotFound, PermissionDenied
from dsec.api.token import TokenKey, operation
from dsec.api.types import EndReason, Kind, NodeInfo, SandboxRecord, State, Usage
from dsec.edge.admission import Admission, meminfo
from dsec.edge.backends.container import ContainerBackend, ContainerConfig, backing_of, host_cpus
from dsec.edge.box import Box, Ending, copy_record, gone_error
from dsec.edge.cgroups import Cgroups, Hierarchies
from dsec.edge.channel import Stream
from dsec.edge.config import EdgeConfig
from dsec.edge.host.cgroups import favour_moves, find_cgroups
from dsec.edge.instance import InstanceLock
from dsec.edge.journal import Journal
from dsec.edge.launcher import Launcher, LauncherConfig
from dsec.edge.poller import Poller
from dsec.edge.ports import LayerPath, RecordSink
from dsec.edge.publisher import Publisher
from dsec.edge.recovery import kill_strays, relaunch, take_over
from dsec.edge.sandboxes import Sandboxes
from dsec.edge.starts import Starts
from dsec.edge.sweep import sweep

log = logging.getLogger(__name__)

_STOP_S: Final = 60.0
"""Killing takes milliseconds; a device that hangs may hold a process for longer than anybody should wait."""
_GUEST_S: Final = 2.0
"""For the disk figures of `usage`."""
_LAYER_S: Final = 30.0
_HOUSEKEEPING_S: Final = 5.0
_SILENCE_S: Final = 60.0
"""A guest that shares a starved CPU quota with a fork bomb still answers within seconds."""
_REASONS: Final = {reason.value: reason for reason in EndReason}
_RELAUNCH_S: Final = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)


class Edge:
    """One node's edge; use with `async with`. Implements `DataPlane`.

    `sink` keeps records and events, `layer_path` finds a layer's EROFS file by digest.
    """

    def __init__(self, config: EdgeConfig, *, sink: RecordSink, layer_path: LayerPath) -> None:
        self.config = config
        self._sink = sink
        self._layer_path = layer_path
        self._stack = AsyncExitStack()
        self._tokens = TokenKey(config.token_key)
        self._layers: dict[str, str] = {}
        self._projects: set[str] = set()
        self._leaving = False
        self._version = version("dsec")
        self.give_up_flushing_after_s = 10.0
        """At the end, the store is waited for so long; what it has not taken by then the next edge tells it."""
        # Steady: a step of the wall clock neither ends a sandbox early nor lets it live on.
        self._clock_base = time.time() - time.monotonic()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving = True
        self._starts.close()
        if not self._sandboxes.boxes:
            await self._launcher.stop(kill=True)
        await self._stack.aclose()

    @property
    def epoch(self) -> int:
        """This run's number: one above the last one's."""
        return self._journal.epoch

    @property
    def code(self) -> str:
        """The edge's code, with which the ids of its sandboxes begin."""
        return self.config.code

    def now(self) -> float:
        """Epoch seconds by a clock that never steps."""
        return self._clock_base + time.monotonic()

    # Control.

    def start_batch(self, request: StartBatch) -> AsyncIterator[list[StartResult]]:
        """Start sandboxes; yields results as they become ready, each id once.

        A reader that closes the iterator, or is cancelled, stops those whose results it has not got. At the deadline, those that are
        not ready fail and are stopped.
        """
        return self._starts.run(request)

    async def stop(self, request: StopSandboxes) -> list[StopResult]:
        """Stop sandboxes and return when all they had is free. One that has ended is a success, an unknown one NotFound."""
        reason = _REASONS.get(request.reason, EndReason.REQUESTED)
        ending = Ending()
        results: dict[str, StopResult] = {}
        boxes: list[Box] = []
        for sandbox in dict.fromkeys(request.ids):
            box = self._sandboxes.boxes.get(sandbox)
            if box is not None:
                ending.add(box)
                boxes.append(box)
            elif (record := self._sandboxes.ended.get(sandbox)) is not None:
                results[sandbox] = StopResult(id=sandbox, record=copy_record(record))
            else:
                results[sandbox] = StopResult(id=sandbox, error=NotFound(f"no sandbox {sandbox} on this node").body())
        for box in boxes:
            self._sandboxes.stop(box, reason)
        with suppress(TimeoutError):
            await ending.wait(timeout_s=_STOP_S)
        late = DeadlineExceeded(f"the sandbox did not end within {_STOP_S:.0f} s; it is being killed still")
        for box in boxes:
            ended = box.life.record.state.ended
            results[box.id] = StopResult(
                id=box.id, record=box.snapshot() if ended else None, error=None if ended else late.body()
            )
        return [results[sandbox] for sandbox in request.ids]

    async def set_timeouts(self, request: SetTimeouts) -> SandboxRecord:
        """Set both time limits. Raises NotFound, SandboxGone, Conflict (not running yet)."""
        box = self._living(request.id)
        actions = box.life.set_timeouts(self.now(), idle_s=request.idle_timeout_s, lifetime_s=request.max_lifetime_s)
        self._sandboxes.act(box, actions, "sandbox.updated")
        self._sandboxes.watch_time(box)
        return box.snapshot()

    async def usage(self, request: UsageQuery) -> UsageReply:
        """What a sandbox uses now. Does not count as activity; disk figures are 0 if the guest does not answer within 2 s."""
        box = self._living(request.id)
        counters = await asyncio.to_thread(self._cgroups.counters, box.slot, box.pid)
        guest: Mapping[str, Any] = {}
        if box.channel is not None:
            with suppress(TimeoutError, DsecError):
                async with asyncio.timeout(_GUEST_S):
                    guest = (await box.channel.call({"m": "usage"})).fields
        record = box.life.record
        return UsageReply(
            usage=Usage(
                cpu_s=counters.cpu_s,
                memory=counters.memory,
                memory_peak=counters.memory_peak,
                memory_limit=record.memory,
                disk=int(guest.get("disk_used", 0)),
                disk_limit=record.disk,
                pids=counters.pids,
                pids_limit=record.pids,
                oom_kills=counters.oom_kills,
            )
        )

    async def node(self, request: NodeQuery) -> NodeInfo:
        """What this node is and how full."""
        return NodeInfo(
            edge=self.code,
            epoch=self.epoch,
            kinds=[Kind.CONTAINER.value],
            sandboxes=len(self._sandboxes.boxes),
            cpus=host_cpus(),
            memory=self._admission.memory_bytes,
            memory_available=meminfo("MemAvailable"),
            load=os.getloadavg()[0],
            version=self._version,
        )

    async def drain(self, *, timeout_s: float = _STOP_S) -> None:
        """Stop every sandbox and the launcher, and wait until the store knows. Raises TimeoutError if that takes longer."""
        self._starts.close()
        async with asyncio.timeout(timeout_s):
            while self._sandboxes.boxes:
                await self.stop(StopSandboxes(ids=tuple(self._sandboxes.boxes)))
            await self._publisher.flushed(timeout_s=timeout_s)

    # Data plane.

    async def open(self, token: str, params: Mapping[str, Any], *, fin: bool) -> Stream:
        """See `DataPlane.open`. The sandbox counts as busy until the stream has ended."""
        box = self._admitted(token, params)
        assert box.channel is not None
        life = box.life
        life.begin()
        try:
            return box.channel.open(params, fin=fin, on_end=lambda: life.done(self.now()))
        except BaseException:
            life.done(self.now())
            raise

    async def call(self, token: str, params: Mapping[str, Any]) -> Message:
        """See `DataPlane.call`. Cancelled: the guest ends the operation (a command's whole tree)."""
        box = self._admitted(token, params)
        assert box.channel is not None
        life = box.life
        life.begin()
        try:
            return await box.channel.call(params)
        finally:
            life.done(self.now())

    def _admitted(self, token: str, params: Mapping[str, Any]) -> Box:
        claim = self._tokens.verify(token, now_s=time.time())
        if operation(params) & ~claim.operations:
            raise PermissionDenied("the stream token does not cover this operation", sandbox_id=claim.sandbox)
        box = self._living(claim.sandbox)
        if box.life.record.project != claim.project:
            raise NotFound(f"no sandbox {claim.sandbox}")
        box.operations += 1
        return box

    def _living(self, sandbox: str) -> Box:
        box = self._sandboxes.boxes.get(sandbox)
        if box is None:
            record = self._sandboxes.ended.get(sandbox)
            if record is None:
                raise NotFound(f"no sandbox {sandbox} on this node")
            raise gone_error(sandbox, (record.reason or EndReason.CRASHED).value, record.detail)
        if box.channel is None or box.life.record.state is not State.RUNNING:
            if box.life.gone_reason is not None:
                raise box.gone()
            raise Conflict(
                f"sandbox {sandbox} is {box.life.record.state.value}", sandbox_id=sandbox, sandbox_survived=True
            )
        return box

    # Starting and keeping going.

    async def _start(self, stack: AsyncExitStack) -> None:
        config, paths = self.config, self.config.paths
        for folder in (paths.run_dir, paths.state_dir, paths.storage_dir):
            await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        self._lock = await asyncio.to_thread(InstanceLock.take, paths.lock_file)
        stack.callback(self._lock.close)
        hierarchies = await asyncio.to_thread(Hierarchies.discover)
        await asyncio.to_thread(sweep, hierarchies, keep=paths.instance)
        slow_moves = await asyncio.to_thread(lambda: favour_moves(find_cgroups()))
        if slow_moves:
            log.warning("commands after a pause will start slowly", extra={"reason": slow_moves})
        self._cgroups = Cgroups(hierarchies, config.cgroup_name)
        self._admission = Admission(
            max_sandboxes=config.max_sandboxes, memory_reserve_bytes=config.memory_reserve_bytes
        )
        self._journal = await asyncio.to_thread(Journal.open, config.journal)
        stack.callback(self._journal.close)
        self._backend = ContainerBackend(self._container_config(hierarchies))
        self._poller = await stack.enter_async_context(Poller())
        self._publisher = Publisher(self._sink, self._committed)
        self._sandboxes = Sandboxes(
            poller=self._poller,
            journal=self._journal,
            publisher=self._publisher,
            cgroups=self._cgroups,
            clock=self.now,
            on_launcher_lost=self._on_launcher_lost,
        )
        self._starts = Starts(
            sandboxes=self._sandboxes,
            backend=self._backend,
            admission=self._admission,
            backlog=lambda: self._publisher.backlog,
            prepare=self._prepare,
            max_starting=config.max_starting,
            max_queued=config.max_queued,
        )
        self._sandboxes.rooms = self._starts
        self._launcher = Launcher(self._launcher_config(), self._sandboxes)
        self._sandboxes.launcher = self._launcher
        stored = await self._sink.known(config.code)
        stack.callback(self._launcher.close)
        found = await self._launcher.connect_or_start(lambda: kill_strays(self._cgroups, set()))
        stack.callback(self._sandboxes.close)
        self._tasks = await stack.enter_async_context(asyncio.TaskGroup())
        running = [self._tasks.create_task(self._publisher.run()), self._tasks.create_task(self._keep_house())]
        self._relaunching: asyncio.Task[None] | None = None
        stack.callback(self._cancel, running)
        stack.push_async_callback(self._flush)
        await take_over(self._sandboxes, self._launcher, stored=stored, kept=self._journal.kept, found=found)
        self._journal.kept = {}

    def _committed(self, ids: list[str]) -> None:
        self._sandboxes.committed(ids)

    def _cancel(self, running: list[asyncio.Task[None]]) -> None:
        for task in running:
            task.cancel()
        if self._relaunching is not None:
            self._relaunching.cancel()

    async def _flush(self) -> None:
        try:
            await self._publisher.flushed(timeout_s=self.give_up_flushing_after_s)
        except TimeoutError:
            log.warning("the store has not taken all changes; the journal tells the next edge")

    def _container_config(self, hierarchies: Hierarchies) -> ContainerConfig:
        paths = self.config.paths
        return ContainerConfig(
            guest=self.config.guest,
            seccomp_blob=paths.seccomp_blob if self.config.seccomp else None,
            storage_dir=paths.storage_dir,
            run_dir=paths.run_dir,
            v1_pids=hierarchies.pids is not None,
            host_cpus=host_cpus(),
        )

    def _launcher_config(self) -> LauncherConfig:
        return LauncherConfig(
            binary=self.config.launcher,
            socket=self.config.paths.launch_socket,
            log_file=self.config.launcher_log,
            uid_blocks=self.config.uid_blocks,
            instance=self.config.paths.instance,
            cgroup_name=self.config.cgroup_name,
        )

    async def _prepare(self, item: StartSandbox) -> None:
        spec = item.spec
        await self._backend.prepare(spec.layers, spec.disk_bytes, backing_of(spec))
        for layer in spec.layers:
            if layer not in self._layers:
                path = str(await asyncio.to_thread(self._layer_path, layer))
                await self._mount_layer(layer, path)
                self._layers[layer] = path
        project = item.record.project
        if project not in self._projects and self.config.pool_target > 0:
            self._projects.add(project)
            await self._fill_pool(project)

    async def _mount_layer(self, layer: str, path: str) -> None:
        connection = self._launcher.connection
        if connection is None:
            raise InternalError("the launcher is being restarted; try again")
        await connection.request("layer", {"name": layer, "path": path}, timeout_s=_LAYER_S)

    async def _fill_pool(self, project: str) -> None:
        if self._launcher.connection is not None:
            fields = {"project": project, "target": min(64, self.config.pool_target)}
            await self._launcher.connection.request("pool", fields, timeout_s=_LAYER_S)

    def _on_launcher_lost(self) -> None:
        if not self._leaving and self._relaunching is None:
            self._relaunching = self._tasks.create_task(self._relaunch())

    async def _relaunch(self) -> None:
        try:
            for attempt in range(1_000_000):
                await asyncio.sleep(_RELAUNCH_S[min(attempt, len(_RELAUNCH_S) - 1)])
                try:
                    await relaunch(self._sandboxes, self._launcher, self._cgroups)
                    for layer, path in self._layers.items():
                        await self._mount_layer(layer, path)
                    for project in self._projects:
                        await self._fill_pool(project)
                    if self._launcher.connection is not None:
                        break  # else that one died too, and its loss was not told since this task runs
                except (DsecError, OSError, TimeoutError):
                    log.exception("the launcher could not be restarted; trying again")
        finally:
            self._relaunching = None
        self._starts.pump()

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            self._lock.touch()
            now = time.monotonic()
            for box in list(self._sandboxes.boxes.values()):
                if box.channel is not None and box.channel.watch(now, patience_s=_SILENCE_S):
                    log.warning("a guest does not answer; its calls have failed", extra={"sandbox_id": box.id})
            if self._journal.wants_compaction:
                self._journal.compact(self._sandboxes.kept())
