"""`dsec demo`: a real job from its start to its end. Sandboxes in one batch, in each an agent that mends a project; then nothing is left.

The agent is scripted: it looks at files, runs the tests, reads what they say, changes the source, and runs them again until they pass.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsec.api.errors import DsecError, ImageError, InternalError
from dsec.cli import demo_project as project
from dsec.cli import output
from dsec.cli.instance import find
from dsec.paths import Paths

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from dsec.sdk import AsyncClient, AsyncSandbox

_MAX_RUNS = 5
_AT_ONCE_PER_CPU = 6
"""Agents at work: enough to keep the processors busy, few enough for latencies that mean something."""
_TIMEOUT_S = 60.0
_FOLDER = "/work"


@dataclass(slots=True)
class Figures:
    """What was measured, in seconds."""

    created: list[float] = field(default_factory=list)
    execs: list[float] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    test_runs: int = 0
    failures: list[str] = field(default_factory=list)


def demo(count: int, *, as_json: bool) -> int:
    """Run the job with `count` sandboxes; 0 if all projects were mended and nothing is left."""
    started = time.monotonic()
    paths = Paths.discover()
    figures = Figures()
    label = secrets.token_hex(4)
    with _daemon(paths, quiet=as_json) as own:
        asyncio.run(_job(count, label, figures, quiet=as_json))
    left = _left_behind(paths) if own else []
    seconds = time.monotonic() - started
    _tell(figures, count, left, seconds, own=own, as_json=as_json)
    return 1 if figures.failures or left or len(figures.totals) != count else 0


@contextmanager
def _daemon(paths: Paths, *, quiet: bool) -> Iterator[bool]:
    """Use the running daemon, or start one and stop it at the end; yields whether it is our own."""
    from dsec.cli import down, up

    running = find(paths)
    if running is not None:
        running.close()
        yield False
        return
    if not quiet:
        output.say("Starting dsec ...")
    with _silent():
        up.detached(0, as_json=True)
    try:
        yield True
    finally:
        if not quiet:
            output.say("Stopping dsec ...")
        with _silent():
            down.down(keep=False, as_json=True)


@contextmanager
def _silent() -> Iterator[None]:
    """Keep the daemon commands' own answers off stdout."""
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()):
        yield


async def _job(count: int, label: str, figures: Figures, *, quiet: bool) -> None:
    from dsec.sdk import AsyncClient

    async with AsyncClient() as client:
        with _progress(count, quiet=quiet) as show:
            try:
                await _work(client, count, label, figures, show)
            finally:
                stopped = await client.stop_many(labels={"demo": label})
                show.stopped(len(stopped))
        page = await client.list(labels={"demo": label})
        if page.items:
            raise InternalError(f"{len(page.items)} sandboxes are left")


async def _work(client: AsyncClient, count: int, label: str, figures: Figures, show: _Show) -> None:
    """Create the sandboxes by one request; each agent begins as soon as its sandbox is there."""
    import os

    at_once = asyncio.Semaphore(_AT_ONCE_PER_CPU * (os.cpu_count() or 1))
    archive = project.archive()
    image = await _image(client)
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        async for item in client.create_many(
            count, image=image, labels={"demo": label}, memory="256MiB", disk="64MiB", disk_backing="tmpfs"
        ):
            if isinstance(item, DsecError):
                figures.failures.append(item.message)
                continue
            figures.created.append(time.monotonic() - began)
            show.created()
            group.create_task(_agent(item, archive, figures, show, at_once))


async def _image(client: AsyncClient) -> str:
    """The base image of this host's Debian release."""
    names = [image.name for image in await client.images.list()]
    for name in ("debian:12", "debian:13", *names):
        if name in names:
            return name
    raise ImageError("there is no image: run `dsec image bootstrap debian`")


async def _agent(
    sandbox: AsyncSandbox, archive: bytes, figures: Figures, show: _Show, at_once: asyncio.Semaphore
) -> None:
    async with at_once:
        began = time.monotonic()
        try:
            await _mend(sandbox, archive, figures, show)
        except DsecError as error:
            figures.failures.append(f"{sandbox.id}: {error.message}")
            return
        figures.totals.append(time.monotonic() - began)
        show.green()


async def _mend(sandbox: AsyncSandbox, archive: bytes, figures: Figures, show: _Show) -> None:
    await sandbox.files.write(f"{_FOLDER}/project.tar", archive)
    await _timed(sandbox, ["tar", "-xf", "project.tar"], figures, check=True)
    names = [entry.path for entry in await sandbox.files.list(_FOLDER, depth=3) if entry.is_file]
    if f"{_FOLDER}/{project.SOURCE}" not in names:
        raise InternalError(f"the project was not unpacked: {names}")
    for _ in range(_MAX_RUNS):
        result = await _timed(sandbox, project.TEST_COMMAND, figures, check=False)
        figures.test_runs += 1
        show.ran()
        if result.exit_code == 0:
            return
        source = (await sandbox.files.read(f"{_FOLDER}/{project.SOURCE}")).decode()
        patched = project.mended(source, result.stderr_text)
        if patched is None:
            raise InternalError(f"the agent does not know what to do about: {result.stderr_text[-300:]}")
        await sandbox.files.write(f"{_FOLDER}/{project.SOURCE}", patched)
    raise InternalError(f"the tests still fail after {_MAX_RUNS} runs")


async def _timed(sandbox: AsyncSandbox, command: list[str], figures: Figures, *, check: bool) -> Any:
    began = time.monotonic()
    result = await sandbox.run(command, cwd=_FOLDER, timeout=_TIMEOUT_S, check=check)
    figures.execs.append(time.monotonic() - began)
    return result


class _Show:
    """Live progress; silent without a bar."""

    def __init__(self, bar: Progress | None, count: int) -> None:
        self._bar = bar
        self._tasks: dict[str, TaskID] = {}
        if bar is not None:
            for name in ("created", "test runs", "tests pass", "destroyed"):
                self._tasks[name] = bar.add_task(name, total=count * (3 if name == "test runs" else 1))

    def _step(self, name: str, by: int = 1) -> None:
        if self._bar is not None:
            self._bar.advance(self._tasks[name], by)

    def created(self) -> None:
        """A sandbox is there."""
        self._step("created")

    def ran(self) -> None:
        """Tests were run."""
        self._step("test runs")

    def green(self) -> None:
        """A project's tests pass."""
        self._step("tests pass")

    def stopped(self, count: int) -> None:
        """Sandboxes are gone."""
        self._step("destroyed", count)


@contextmanager
def _progress(count: int, *, quiet: bool) -> Iterator[_Show]:
    if quiet:
        yield _Show(None, count)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=output.console(),
    )
    with bar:
        yield _Show(bar, count)


def _left_behind(paths: Paths) -> list[str]:
    """What of the instance is still in the kernel or on disk after its end."""
    root, name = Path("/sys/fs/cgroup"), f"dsec-{paths.instance}"
    found = [str(path) for path in (*root.glob(name), *root.glob(f"*/{name}")) if path.is_dir()]
    found += [str(path) for path in (paths.api_socket, paths.launch_socket) if path.exists()]
    if paths.storage_dir.is_dir():
        found += [str(path) for path in paths.storage_dir.iterdir() if path.suffix == ".img"]
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and paths.instance.encode() in _cmdline(entry):
            found.append(f"process {entry.name}")
    return found


def _cmdline(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""


def quantile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie; 0 for none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def _tell(figures: Figures, count: int, left: list[str], seconds: float, *, own: bool, as_json: bool) -> None:
    rows = [("create", figures.created), ("exec", figures.execs), ("total", figures.totals)]
    if as_json:
        output.print_json(
            {
                "sandboxes": count,
                "mended": len(figures.totals),
                "test_runs": figures.test_runs,
                "seconds": seconds,
                "failures": figures.failures,
                "left_behind": left,
                "ms": {
                    name: {"n": len(values), "p50": quantile(values, 0.5) * 1e3, "p99": quantile(values, 0.99) * 1e3}
                    for name, values in rows
                },
            }
        )
        return
    output.say("")
    output.print_table(
        ("", "n", "p50", "p99"),
        [(name, len(values), _ms(quantile(values, 0.5)), _ms(quantile(values, 0.99))) for name, values in rows],
    )
    for failure in figures.failures[:5]:
        output.note(failure)
    for item in left:
        output.note(f"left behind: {item}")
    gone = "nothing is left behind" if own and not left else "all sandboxes are gone"
    sys.stdout.write(
        f"\n{len(figures.totals)} of {count} projects mended in {figures.test_runs} test runs, {seconds:.1f} s in all; "
        f"{gone if not left else 'see above for what is left'}.\n"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


if __name__ == "__main__":
    from dsec.cli.app import app

    app(["demo", *sys.argv[1:]])
