"""Our own loops: AsyncClient over HTTP on the unix socket, as a user has it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from dsec.api.errors import DsecError
from dsec.bench.crun import DISK_BYTES, MEMORY_BYTES, PIDS
from dsec.bench.framework import Bench
from dsec.sdk import AsyncClient

SAME_CONDITIONS: dict[str, Any] = {
    "cpus": 1.0,
    "memory": MEMORY_BYTES,
    "disk": DISK_BYTES,
    "disk_backing": "tmpfs",
    "pids": PIDS,
}
"""What the reference loops give their sandboxes."""


def launch_loop(
    bench: Bench, seconds: float, *, workers: int, alive: int, options: dict[str, Any]
) -> tuple[float, int]:
    """Create and destroy for `seconds` in `workers` tasks, batches of `alive / workers` each; rate and count of creations."""
    return asyncio.run(_launch(bench, seconds, workers, alive // workers, options))


async def _launch(bench: Bench, seconds: float, workers: int, each: int, options: dict[str, Any]) -> tuple[float, int]:
    async with AsyncClient(bench.url, key=bench.key) as client:
        # The first batch fills the launcher's pools, as the references' set-up does outside their window.
        await _cycle(client, bench.image, each, options)
        began = time.monotonic()

        async def work() -> int:
            made = 0
            while time.monotonic() - began < seconds:
                made += await _cycle(client, bench.image, each, options)
            return made

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work()) for _ in range(workers)]
        # Every cycle that began counts whole, and so does its time.
        elapsed = time.monotonic() - began
        count = sum(task.result() for task in tasks)
    return count / elapsed, count


async def _cycle(client: AsyncClient, image: str, count: int, options: dict[str, Any]) -> int:
    boxes = []
    async for item in client.create_many(count, image=image, **options):
        if isinstance(item, DsecError):
            raise item
        boxes.append(item)
    for stopped in await client.stop_many(boxes):
        if stopped.error is not None:
            raise stopped.error
    return count


def exec_samples(bench: Bench, count: int) -> list[float]:
    """Milliseconds of `count` times `run(["true"])`, one at a time, in one sandbox."""
    return asyncio.run(_exec(bench, count))


async def _exec(bench: Bench, count: int) -> list[float]:
    async with (
        AsyncClient(bench.url, key=bench.key) as client,
        await client.create(image=bench.image, **SAME_CONDITIONS) as box,
    ):
        for _ in range(20):
            await box.run(["true"], check=True)
        samples = []
        for _ in range(count):
            began = time.perf_counter()
            result = await box.run(["true"])
            samples.append((time.perf_counter() - began) * 1e3)
            if result.exit_code != 0:
                raise RuntimeError(f"true ended with {result.exit_code}")
        return samples
