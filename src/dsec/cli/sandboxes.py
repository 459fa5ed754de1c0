"""Commands that a client of any server has: create, run, exec, cp, ps, events, stop."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsec.api.errors import DsecError, ExecTimeout, FileIsDirectory
from dsec.cli import options as o
from dsec.cli import output
from dsec.cli.errors import NOT_RUN, WrongUse, reports_errors

if TYPE_CHECKING:
    from dsec.api.types import SandboxRecord
    from dsec.sdk import AsyncClient, AsyncProcess, AsyncSandbox

_STDIN_PIECE = 65_536
_PASS_THROUGH = {"allow_interspersed_args": False}


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(create)
    app.command(context_settings=_PASS_THROUGH)(run)
    app.command("exec", context_settings=_PASS_THROUGH)(exec_)
    app.command()(cp)
    app.command()(ps)
    app.command()(events)
    app.command()(stop)


def _client() -> AsyncClient:
    from dsec.sdk import AsyncClient

    return AsyncClient()


@reports_errors
def create(
    kind: o.Kind = "container",
    count: Annotated[int, typer.Option("--count", "-n", help="How many, by one request.")] = 1,
    image: o.Image = "debian:12",
    cpus: o.Cpus = 1.0,
    memory: o.Memory = "512MiB",
    disk: o.Disk = "2GiB",
    disk_backing: o.DiskBacking = "auto",
    pids: o.Pids = 512,
    user: o.User = None,
    env: o.Env = [],  # noqa: B006 - read only
    label: o.Labels = [],  # noqa: B006
    idle_timeout: Annotated[float, typer.Option(help="Seconds without use after which it ends; 0: never.")] = 300.0,
    max_lifetime: Annotated[float, typer.Option(help="Seconds after which it ends; 0: never.")] = 86_400.0,
    json: o.Json = False,
) -> int:
    """Create sandboxes and print their ids, each as it becomes ready."""
    arguments: dict[str, Any] = {
        "kind": kind,
        "image": image,
        "cpus": cpus,
        "memory": memory,
        "disk": disk,
        "disk_backing": disk_backing,
        "pids": pids,
        "user": user,
        "env": o.pairs(env, what="--env"),
        "labels": o.pairs(label, what="--label"),
        "idle_timeout": idle_timeout or None,
        "max_lifetime": max_lifetime or None,
    }
    if count < 1:
        raise WrongUse("--count must be at least 1")
    return asyncio.run(_create(count, arguments, as_json=json))


async def _create(count: int, arguments: dict[str, Any], *, as_json: bool) -> int:
    failed = 0
    async with _client() as client:
        if count == 1:
            with output.working("creating a sandbox"):
                made = await client.create(**arguments)
            _tell_made(made, as_json=as_json)
            return 0
        async for item in client.create_many(count, **arguments):
            if isinstance(item, DsecError):
                failed += 1
                if as_json:
                    output.print_json({"error": item.body()})
                else:
                    output.note(item.message)
            else:
                _tell_made(item, as_json=as_json)
    return 1 if failed else 0


def _tell_made(sandbox: AsyncSandbox, *, as_json: bool) -> None:
    if as_json:
        output.print_json(sandbox.record)
    else:
        output.say(sandbox.id)


@reports_errors
def run(
    command: Annotated[
        list[str], typer.Argument(help="One word is shell text; several are argv. Options of run come before it.")
    ],
    kind: o.Kind = "container",
    image: o.Image = "debian:12",
    cpus: o.Cpus = 1.0,
    memory: o.Memory = "512MiB",
    disk: o.Disk = "2GiB",
    pids: o.Pids = 512,
    user: o.User = None,
    cwd: o.Cwd = None,
    env: o.Env = [],  # noqa: B006
    timeout: o.Timeout = None,
    stdin: o.WithStdin = False,
    json: o.Json = False,
) -> int:
    """Run a command in a sandbox of its own, which ends with it.

    The exit code is the command's (128 + n after signal n); 125 if dsec could not run it, or killed it at its timeout.
    """
    made = {"kind": kind, "image": image, "cpus": cpus, "memory": memory, "disk": disk, "pids": pids, "user": user}
    return asyncio.run(_run(made, _command(command), _how(cwd, env, timeout, None), with_stdin=stdin, as_json=json))


async def _run(
    made: dict[str, Any], command: str | list[str], how: dict[str, Any], *, with_stdin: bool, as_json: bool
) -> int:
    async with _client() as client:
        with output.working("creating a sandbox"):
            sandbox = await client.create(**made)
        async with sandbox:
            return await _execute(sandbox, command, how, with_stdin=with_stdin, as_json=as_json)


@reports_errors
def exec_(
    sandbox: Annotated[str, typer.Argument(help="The sandbox's id.")],
    command: Annotated[list[str], typer.Argument(help="One word is shell text; several are argv.")],
    user: o.User = None,
    cwd: o.Cwd = None,
    env: o.Env = [],  # noqa: B006
    timeout: o.Timeout = None,
    stdin: o.WithStdin = False,
    json: o.Json = False,
) -> int:
    """Run a command in a sandbox. Exit codes are those of `dsec run`."""
    return asyncio.run(_exec(sandbox, _command(command), _how(cwd, env, timeout, user), with_stdin=stdin, as_json=json))


async def _exec(
    sandbox_id: str, command: str | list[str], how: dict[str, Any], *, with_stdin: bool, as_json: bool
) -> int:
    async with _client() as client:
        sandbox = await client.get(sandbox_id)
        return await _execute(sandbox, command, how, with_stdin=with_stdin, as_json=as_json)


def _command(words: list[str]) -> str | list[str]:
    if words[0] == "--":  # after a positional argument, the parser leaves it in
        words = words[1:]
    if not words:
        raise WrongUse("say which command to run")
    return words[0] if len(words) == 1 else words


def _how(cwd: str | None, env: list[str], timeout: float | None, user: str | None) -> dict[str, Any]:
    return {"cwd": cwd, "env": o.pairs(env, what="--env"), "timeout": timeout, "user": user}


async def _execute(
    sandbox: AsyncSandbox, command: str | list[str], how: dict[str, Any], *, with_stdin: bool, as_json: bool
) -> int:
    if as_json:
        return await _execute_json(sandbox, command, how, with_stdin=with_stdin)
    async with await sandbox.start(command, stdin=with_stdin, **how) as process:
        feeding = asyncio.ensure_future(_feed(process)) if with_stdin else None
        try:
            async for chunk in process.output():
                stream = sys.stdout.buffer if chunk.stream == "stdout" else sys.stderr.buffer
                stream.write(chunk.data or chunk.text.encode())
                stream.flush()
        finally:
            if feeding is not None:
                feeding.cancel()
                await asyncio.wait([feeding])
        code = await process.wait()
        if process.result is not None and process.result.reason == "timeout":
            output.note(f"the command was killed after {how['timeout']} s")
            return NOT_RUN
        if process.result is not None and process.result.reason == "oom":
            output.note("the sandbox ran out of memory")
        return code


async def _execute_json(
    sandbox: AsyncSandbox, command: str | list[str], how: dict[str, Any], *, with_stdin: bool
) -> int:
    code = None
    try:
        result = await sandbox.run(command, stdin=_stdin() if with_stdin else None, **how)
    except ExecTimeout as error:
        result, code = error.result, NOT_RUN
    output.print_json(
        {
            "sandbox_id": sandbox.id,
            "exit_code": result.exit_code,
            "signal": result.signal,
            "reason": result.reason,
            "stdout": result.text,
            "stderr": result.stderr_text,
            "truncated": result.truncated,
            "duration_s": result.duration_s,
            "cpu_s": result.cpu_s,
            "peak_memory": result.peak_memory,
        }
    )
    return result.exit_code if code is None else code


async def _stdin() -> AsyncIterator[bytes]:
    """Our own stdin in pieces. It is read in a thread that nothing waits for: a terminal may never send its end."""
    import threading

    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[bytes] = asyncio.Queue()
    room = threading.Semaphore(4)

    def read() -> None:
        data = b"."
        while data:
            room.acquire()
            try:
                data = os.read(0, _STDIN_PIECE)
                loop.call_soon_threadsafe(pieces.put_nowait, data)
            except (OSError, RuntimeError):
                return

    threading.Thread(target=read, daemon=True).start()
    while data := await pieces.get():
        room.release()
        yield data


async def _feed(process: AsyncProcess) -> None:
    try:
        async for piece in _stdin():
            await process.write(piece)
        await process.close_stdin()
    except DsecError:
        return  # the command has ended, or reads no more


@reports_errors
def cp(
    source: Annotated[str, typer.Argument(help="A local path, or SANDBOX:PATH.")],
    target: Annotated[
        str,
        typer.Argument(help="A local path, or SANDBOX:PATH. An existing local folder, or a final /, means: into it."),
    ],
    user: o.User = None,
    json: o.Json = False,
) -> int:
    """Copy a file or folder into or out of a sandbox."""
    return asyncio.run(_cp(source, target, user, as_json=json))


async def _cp(source: str, target: str, user: str | None, *, as_json: bool) -> int:
    origin, place = _remote(source), _remote(target)
    if (origin is None) == (place is None):
        raise WrongUse("one of the two must be SANDBOX:PATH, the other a local path")
    async with _client() as client:
        with output.working(f"copying {source} to {target}"):
            if place is not None:
                sandbox_id, path = place
                path = path + _base_name(source) if path.endswith("/") else path
                files = (await client.get(sandbox_id)).files
                try:
                    moved = await files.upload(source, path, user=user)
                except FileIsDirectory as error:
                    raise WrongUse(f"{path} is a folder in the sandbox: write {target}/ to copy into it") from error
            else:
                assert origin is not None
                sandbox_id, path = origin
                into = target.endswith("/") or await asyncio.to_thread(Path(target).is_dir)
                local = Path(target) / Path(path).name if into else Path(target)
                moved = await (await client.get(sandbox_id)).files.download(path, local, user=user)
    if as_json:
        output.print_json(moved)
    for name in moved.skipped:
        output.note(f"left out: {name}")
    return 0


def _base_name(path: str) -> str:
    """The last component of a local path, `.` and `..` resolved."""
    return Path(path).resolve().name


def _remote(text: str) -> tuple[str, str] | None:
    """Sandbox and path of `SANDBOX:PATH`, or None for a local path."""
    sandbox_id, colon, path = text.partition(":")
    return (sandbox_id, path or "/") if colon and "/" not in sandbox_id and sandbox_id else None


@reports_errors
def ps(
    sandbox: Annotated[str | None, typer.Argument(help="Show the processes of this sandbox.")] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Ended ones too.")] = False,
    state: Annotated[str | None, typer.Option(help="Only those in this state.")] = None,
    label: o.Labels = [],  # noqa: B006
    limit: Annotated[int, typer.Option(help="At most so many.")] = 100,
    json: o.Json = False,
) -> int:
    """List sandboxes, newest first, or the processes of one."""
    if sandbox is not None:
        return asyncio.run(_processes(sandbox, as_json=json))
    return asyncio.run(_list("all" if everything else state, o.pairs(label, what="--label"), limit, as_json=json))


async def _list(state: str | None, labels: dict[str, str], limit: int, *, as_json: bool) -> int:
    records: list[SandboxRecord] = []
    async with _client() as client:
        async for item in client.list_all(labels=labels, state=state):
            if len(records) >= limit:
                output.note(f"there are more: --limit {limit} ended the list")
                break
            records.append(item.record)
    if as_json:
        output.print_json(records)
        return 0
    rows = [
        (
            record.id,
            record.kind,
            record.state + (f" ({record.reason})" if record.reason else ""),
            record.image,
            output.age_text(record.created_at),
            " ".join(f"{name}={value}" for name, value in record.labels.items()),
        )
        for record in records
    ]
    output.print_table(("ID", "KIND", "STATE", "IMAGE", "AGE", "LABELS"), rows)
    return 0


async def _processes(sandbox_id: str, *, as_json: bool) -> int:
    async with _client() as client:
        found = await (await client.get(sandbox_id)).processes()
    if as_json:
        output.print_json([{"id": item.id, "pid": item.pid, "state": item.state, "argv": item.argv} for item in found])
        return 0
    output.print_table(
        ("ID", "PID", "STATE", "COMMAND"), [(item.id, item.pid, item.state, " ".join(item.argv)) for item in found]
    )
    return 0


@reports_errors
def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with events as they happen.")] = False,
    since: Annotated[int | None, typer.Option(help="Events after this sequence number.")] = None,
    sandbox: Annotated[str | None, typer.Option(help="Only of this sandbox.")] = None,
    event_type: Annotated[str | None, typer.Option("--type", help="Only of this type.")] = None,
    limit: Annotated[int, typer.Option(help="At most so many (without --follow).")] = 1000,
    json: o.Json = False,
) -> int:
    """Print what happened, oldest first."""
    return asyncio.run(_events(since, sandbox, event_type, limit, follow=follow, as_json=json))


async def _events(
    since: int | None, sandbox_id: str | None, event_type: str | None, limit: int, *, follow: bool, as_json: bool
) -> int:
    async with _client() as client:
        if follow:
            async for event in client.events.follow(since=since, sandbox_id=sandbox_id, event_type=event_type):
                _tell_event(event, as_json=as_json)
            return 0
        for event in await client.events.list(since=since, sandbox_id=sandbox_id, event_type=event_type, limit=limit):
            _tell_event(event, as_json=as_json)
    return 0


def _tell_event(event: Any, *, as_json: bool) -> None:
    from datetime import UTC, datetime

    if as_json:
        output.print_json(event)
        return
    when = datetime.fromtimestamp(event.time, UTC).isoformat(timespec="milliseconds")
    data = " ".join(f"{name}={value}" for name, value in event.data.items())
    output.say(f"{event.seq:>6} {when} {event.type:<24} {event.sandbox_id or '-'} {data}".rstrip())


@reports_errors
def stop(
    sandboxes: Annotated[list[str] | None, typer.Argument(help="Ids.")] = None,
    label: o.Labels = [],  # noqa: B006
    everything: Annotated[bool, typer.Option("--all", help="All of the project's.")] = False,
    json: o.Json = False,
) -> int:
    """Stop sandboxes, and wait until nothing of them is left."""
    ids, labels = list(sandboxes or []), o.pairs(label, what="--label")
    if not ids and not labels and not everything:
        raise WrongUse("say which: ids, --label KEY=VALUE, or --all")
    return asyncio.run(_stop(ids, labels, everything=everything, as_json=json))


async def _stop(ids: list[str], labels: dict[str, str], *, everything: bool, as_json: bool) -> int:
    async with _client() as client:
        if everything:
            ids += [item.id async for item in client.list_all()]
        with output.working("stopping"):
            results = await client.stop_many(ids, labels=labels)
    if as_json:
        output.print_json(
            [{"id": item.id, "state": item.state, "error": item.error and item.error.body()} for item in results]
        )
    for item in results:
        if item.error is not None:
            output.note(f"{item.id}: {item.error.message}")
        elif not as_json:
            output.say(item.id)
    return 1 if any(item.error is not None for item in results) else 0
