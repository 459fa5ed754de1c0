"""An edge on the real kernel for tests: private home, the built programs, the checkout's base image, records in memory."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.daemon import STORE

from dsec.api import token
from dsec.api.control import StartBatch, StartResult, StartSandbox, StopSandboxes
from dsec.api.dataplane import Message
from dsec.api.ids import EdgeCode, new_process_id, new_sandbox_id
from dsec.api.types import Kind, SandboxRecord, SandboxSpec, State
from dsec.edge.config import EdgeConfig
from dsec.edge.edge import Edge
from dsec.edge.ports import Change
from dsec.images.catalog import Catalog
from dsec.paths import Paths

CODE = EdgeCode("aaaa")
KEY = b"k" * 32
MIB = 1 << 20


class Records:
    """A RecordSink that remembers: `records` by id, `events` in order."""

    def __init__(self) -> None:
        self.records: dict[str, SandboxRecord] = {}
        self.events: list[tuple[str, str]] = []
        self.deaf = False
        """Whether it behaves as a store that cannot be reached."""

    async def changed(self, changes: Sequence[Change]) -> None:
        if self.deaf:
            raise OSError("the store cannot be reached")
        for record, event, _ in changes:
            self.records[record.id] = record
            self.events.append((record.id, event))

    async def known(self, edge: str) -> list[SandboxRecord]:
        return [record for record in self.records.values() if not record.state.ended]


class Rig:
    """A home and what an edge in it needs; `edge()` runs one."""

    def __init__(self, home: Path) -> None:
        found = Paths.discover(home)
        self.paths = Paths(
            home=found.home,
            instance=found.instance,
            images_dir=STORE.images_dir,
            bin_dir=STORE.bin_dir,
            run_dir=found.run_dir,
        )
        self.records = Records()
        self.catalog = Catalog(STORE.images_dir)
        self.layers = self.catalog.resolve("debian:12").layers

    @asynccontextmanager
    async def edge(self, **options: Any) -> AsyncIterator[Edge]:
        """A running edge; leaving it lets go of its sandboxes."""
        config = EdgeConfig(code=CODE, paths=self.paths, token_key=KEY, **{"pool_target": 4, **options})
        async with Edge(config, sink=self.records, layer_path=self.catalog.layers.path) as edge:
            yield edge

    def batch(self, count: int = 1, *, wait: bool = True, within_s: float = 60.0, **fields: Any) -> StartBatch:
        """A request for `count` sandboxes; `fields` replace those of the spec."""
        wanted: dict[str, Any] = {
            "kind": Kind.CONTAINER,
            "image": "debian:12",
            "layers": self.layers,
            "cpus": 1.0,
            "memory_bytes": 256 * MIB,
            "disk_bytes": 64 * MIB,
            "pids": 128,
            "disk_backing": "auto",
            "idle_timeout_s": 300.0,
            "max_lifetime_s": 3600.0,
        }
        spec = SandboxSpec(**{**wanted, **fields})
        items = tuple(StartSandbox(record=self._record(spec), spec=spec) for _ in range(count))
        return StartBatch(items=items, deadline=time.time() + within_s, wait=wait)

    async def start(self, edge: Edge, count: int = 1, **fields: Any) -> list[str]:
        """Start `count` sandboxes, all of which must run."""
        results = await collect(edge, self.batch(count, **fields))
        assert all(result.error is None for result in results), [result.error for result in results]
        return [result.id for result in results]

    def _record(self, spec: SandboxSpec) -> SandboxRecord:
        now = time.time()
        return SandboxRecord(
            id=new_sandbox_id(CODE),
            project="default",
            principal="tester",
            edge=CODE,
            epoch=0,
            kind=spec.kind,
            state=State.CREATING,
            image=spec.image,
            layers=spec.layers,
            cpus=spec.cpus,
            memory=spec.memory_bytes,
            disk=spec.disk_bytes,
            pids=spec.pids,
            created_at=now,
            idle_timeout=spec.idle_timeout_s,
            max_lifetime=spec.max_lifetime_s,
            expires_at=None if spec.max_lifetime_s is None else now + spec.max_lifetime_s,
        )


async def collect(edge: Edge, batch: StartBatch) -> list[StartResult]:
    """All results of a batch."""
    found: list[StartResult] = []
    async with aclosing(edge.start_batch(batch)) as results:  # type: ignore[type-var]
        async for part in results:
            found += part
    return found


def ticket(sandbox: str, *, project: str = "default", operations: int = token.ALL) -> str:
    """A stream token as an apiserver mints it."""
    return token.TokenKey(KEY).mint(project=project, sandbox=sandbox, operations=operations, now_s=time.time())


def command(shell: str, **fields: Any) -> dict[str, Any]:
    """The OPEN map of an exec."""
    base = {
        "m": "exec",
        "id": new_process_id(),
        "shell": shell.encode(),
        "env": {},
        "stdin": False,
        "cap": 10 * MIB,
        "start": False,
    }
    return {**base, "timeout_ms": 60_000, **fields}


async def run(edge: Edge, sandbox: str, shell: str, **fields: Any) -> dict[str, Any]:
    """Run a command to its end and return the result map."""
    return (await edge.call(ticket(sandbox), command(shell, **fields))).fields


async def answer(edge: Edge, sandbox: str, **params: Any) -> Message:
    """Call a method of the guest."""
    return await edge.call(ticket(sandbox), params)


async def stop_all(edge: Edge, sandboxes: Sequence[str]) -> None:
    """Stop these, which must succeed."""
    for result in await edge.stop(StopSandboxes(ids=tuple(sandboxes))):
        assert result.error is None, result.error


def open_descriptors() -> int:
    """Descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))
