"""The sync twin of the SDK. Generated from the async classes by scripts/gen_sync.py (`make gen`); not to be edited."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

import msgspec

from dsec.api import types as t
from dsec.api.errors import DsecError
from dsec.sdk._later import Later
from dsec.sdk._portal import Portal
from dsec.sdk.client import AsyncClient, Identified, Stopped
from dsec.sdk.collections import AsyncEvents, AsyncImages, AsyncNodes
from dsec.sdk.files import AsyncFiles, LocalPath, Transfer
from dsec.sdk.processes import AsyncProcess
from dsec.sdk.results import ExecResult, FileEntry, Output, Page
from dsec.sdk.sandbox import AsyncSandbox, Stdin


class Files:
    """`sandbox.files`. All methods raise the `FileError` family, SandboxGone, ConnectionFailed; sizes are bytes."""

    __slots__ = ("__weakref__", "_async", "_portal")

    def __init__(self, portal: Portal, source: AsyncFiles) -> None:
        self._portal = portal
        self._async = source

    def read(self, path: str, *, offset: int=0, limit: int | None=None, user: str | None=None) -> bytes:
        """Return the file's bytes from `offset` on, at most `limit` (None: to the end); past the end there are none.

        Raises FileNotFound, FileDenied, FileIsDirectory, NotRegularFile (a fifo, socket or device).
        """
        return self._portal.run(self._async.read(path, offset=offset, limit=limit, user=user))

    def write(self, path: str, data: bytes | bytearray | memoryview | str, *, mode: int | None=None, append: bool=False, parents: bool=True, user: str | None=None) -> int:
        """Write the file (text as UTF-8) and return the number of bytes.

        Replacing is atomic: readers see the old or the new file, and a cancelled or failed call leaves the old one. `mode` None: 0644 for
        a new file, else unchanged. `append` adds at the end instead, not atomically. `parents` makes missing folders.

        Raises FileNotFound, FileDenied, FileIsDirectory, FileNotDirectory, NoSpace, InvalidPath; with `append` OutcomeUnknown.
        """
        return self._portal.run(self._async.write(path, data, mode=mode, append=append, parents=parents, user=user))

    def stat(self, path: str, *, user: str | None=None) -> FileEntry:
        """Describe what is at `path`, a symlink itself rather than its target. Raises FileNotFound, FileDenied."""
        return self._portal.run(self._async.stat(path, user=user))

    def exists(self, path: str, *, user: str | None=None) -> bool:
        """Whether anything, a dangling symlink included, is at `path`."""
        return self._portal.run(self._async.exists(path, user=user))

    def list(self, path: str, *, depth: int=1, user: str | None=None) -> builtins.list[FileEntry]:
        """List a directory's entries, sorted by name; `depth` > 1 adds those of directories below (symlinks are not followed).

        Raises FileNotFound, FileNotDirectory, FileDenied.
        """
        return self._portal.run(self._async.list(path, depth=depth, user=user))

    def mkdir(self, path: str, *, parents: bool=True, mode: int=493, user: str | None=None) -> None:
        """Make a directory. With `parents` missing ones above too, and one that is there is no error; else FileExists."""
        self._portal.run(self._async.mkdir(path, parents=parents, mode=mode, user=user))

    def remove(self, path: str, *, recursive: bool=False, user: str | None=None) -> None:
        """Remove a file, symlink or empty directory; `recursive` a whole tree. Raises FileNotFound, DirectoryNotEmpty, FileDenied."""
        self._portal.run(self._async.remove(path, recursive=recursive, user=user))

    def move(self, source: str, target: str, *, overwrite: bool=True, user: str | None=None) -> None:
        """Rename `source` to `target`, replacing a file there unless `overwrite` is False (FileExists)."""
        self._portal.run(self._async.move(source, target, overwrite=overwrite, user=user))

    def chmod(self, path: str, mode: int, *, user: str | None=None) -> None:
        """Set permission bits."""
        self._portal.run(self._async.chmod(path, mode, user=user))

    def chown(self, path: str, owner: str, *, user: str | None=None) -> None:
        """Set the owner: `name`, `uid`, `name:group` or `uid:gid`. Raises FileDenied unless `user` may."""
        self._portal.run(self._async.chown(path, owner, user=user))

    def upload(self, local: LocalPath, remote: str, *, user: str | None=None) -> Transfer:
        """Copy a local file or folder to `remote`, which names the copy itself; streamed, modes kept, owned by `user`.

        A folder's contents are merged into `remote`. Sockets, fifos and devices are left out and named. An interrupted upload of a file
        leaves the old one; of a folder, the files that were complete.

        Raises OSError for the local side, the `FileError` family for the sandbox's, OutcomeUnknown (a lost connection).
        """
        return self._portal.run(self._async.upload(local, remote, user=user))

    def download(self, remote: str, local: LocalPath, *, user: str | None=None) -> Transfer:
        """Copy a file or directory of the sandbox to `local`, which names the copy itself; missing local folders are made.

        The copy appears when it is complete: an interrupted download leaves nothing. A directory is merged into an existing folder. Links
        leading out of the copied directory, special files and impossible names are left out and named; owners and setuid bits are not kept.

        Raises the `FileError` family for the sandbox's side, OSError for the local one, ConnectionFailed.
        """
        return self._portal.run(self._async.download(remote, local, user=user))

    def watch(self, path: str, *, recursive: bool=True) -> Iterator[Any]:
        """Watch for changes. Not part of this release: raises Unsupported."""
        return self._portal.iterate(self._async.watch(path, recursive=recursive), lambda item: item)


class Process:
    """A process that dsec started in a sandbox. `id` is dsec's, `pid` the one inside; `argv` what was started.

    Made by `sandbox.start`, `sandbox.attach` and `sandbox.processes`. Use it with `with` to end it (KILL, with everything it
    started) when the block is left.
    """

    __slots__ = ("__weakref__", "_async", "_portal")

    def __init__(self, portal: Portal, source: AsyncProcess) -> None:
        self._portal = portal
        self._async = source

    @property
    def id(self) -> str:
        """The id that dsec gave the process: `sandbox.attach(id)` finds it again, from any client."""
        return self._async.id

    @property
    def pid(self) -> int:
        """The pid inside the sandbox."""
        return self._async.pid

    @property
    def argv(self) -> list[str]:
        """What was started."""
        return self._async.argv

    @property
    def state(self) -> str:
        """`running` or `ended`, as last heard."""
        return self._async.state

    @property
    def position(self) -> tuple[int, int]:
        """Offsets (stdout, stderr) after what `output` handed out last: give them to `output(since=...)` to go on from there."""
        return self._async.position

    @property
    def result(self) -> ExecResult | None:
        """How it ended, without output; None while that is not known here."""
        return self._async.result

    def output(self, *, since: int | tuple[int, int]=0, follow: bool=True) -> Iterator[Output]:
        """Yield what the process wrote, from offset `since` (bytes; one for both streams, or a pair for stdout and stderr) on.

        With `follow` until the process has ended and all was read, else what there is now. While somebody follows, the process is
        held back rather than anything being dropped; what was dropped before (the middle, above the process's `output_limit`) is
        an `Output` with `dropped`. A lost connection is taken up again at the same offset. Leaving the loop, or being cancelled,
        detaches and leaves the process running.

        Raises NotFound (its record is gone), SandboxGone, ConnectionFailed.
        """
        return self._portal.iterate(self._async.output(since=since, follow=follow), lambda item: item)

    def write(self, data: bytes | str) -> None:
        """Send `data` (text as UTF-8) to the process's stdin, waiting while it does not read.

        Raises Conflict (stdin is closed, or the process was started without `stdin=True`), OutcomeUnknown (the connection was lost
        with data under way), SandboxGone. Cancelled: a part may have been written.
        """
        self._portal.run(self._async.write(data))

    def close_stdin(self) -> None:
        """Close the process's stdin: it reads end of file. Closing twice is harmless."""
        self._portal.run(self._async.close_stdin())

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of the process's terminal. Terminals are not part of this release: raises Unsupported."""
        self._portal.run(self._async.resize(rows, columns))

    def signal(self, signal: str | int, *, tree: bool=False) -> None:
        """Send a signal by name ("TERM") or number; `tree` with KILL ends everything the process started too.

        Raises Conflict or NotFound (it has ended), InvalidRequest (no such signal), OutcomeUnknown.
        """
        self._portal.run(self._async.signal(signal, tree=tree))

    def kill(self) -> None:
        """End the process and everything it started, whatever they did to their sessions. Harmless if it has ended."""
        self._portal.run(self._async.kill())

    def wait(self, *, timeout: float | None=None) -> int:
        """Wait for the end and return the exit code (128 + n after signal n); `result` then has the rest.

        Raises DeadlineExceeded after `timeout` seconds: the process runs on. Cancelled: it runs on too. SandboxGone, NotFound.
        """
        return self._portal.run(self._async.wait(timeout=timeout))

    def close(self) -> None:
        """Let go of the connection for stdin; the process runs on, with its stdin open."""
        self._portal.run(self._async.aclose())

    def __repr__(self) -> str:
        return repr(self._async).replace("<Async", "<", 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._portal.run(self._async.__aexit__(exc_type, exc, traceback))


class Sandbox:
    """One sandbox. Made by `client.create`, `create_many`, `get` and `list`.

    `with` stops it when the block is left, on exceptions and cancellation too.
    """

    __slots__ = ("__weakref__", "_async", "_portal")

    def __init__(self, portal: Portal, source: AsyncSandbox) -> None:
        self._portal = portal
        self._async = source

    @property
    def id(self) -> str:
        """The sandbox's id: `client.get(id)` finds it again, from any client of its project."""
        return self._async.id

    @property
    def record(self) -> t.SandboxRecord:
        """All that is known of the sandbox, as last heard: limits in bytes, times in seconds since the epoch."""
        return self._async.record

    @property
    def kind(self) -> str:
        """`container`, `microvm` or `fullvm`."""
        return self._async.kind

    @property
    def state(self) -> str:
        """The state, as last heard; `refresh` asks anew."""
        return self._async.state

    @property
    def reason(self) -> str | None:
        """Why it ended (`requested`, `idle`, `lifetime`, `oom`, ...), or None."""
        return self._async.reason

    @property
    def labels(self) -> dict[str, str]:
        """The labels given at creation."""
        return self._async.labels

    @property
    def files(self) -> Files:
        """The sandbox's files."""
        return Files(self._portal, self._async.files)

    def refresh(self) -> t.SandboxRecord:
        """Fetch the record anew and return it. Neither resumes the sandbox nor counts as activity. Raises NotFound."""
        return self._portal.run(self._async.refresh())

    def run(self, command: str | Sequence[str], *, cwd: str | None=None, env: Mapping[str, str] | None=None, user: str | None=None, stdin: Stdin | None=None, timeout: float | None=None, output_limit: int | str='10MiB', check: bool=False, request_id: str | None=None) -> ExecResult:
        """Run a command to its end and return its result.

        A `str` runs through `/bin/bash -c` (`/bin/sh -c` where there is no bash), no login shell; a list is argv, without a shell. `env` is
        laid over the sandbox's. `user` is a name, uid, `name:group` or `uid:gid`. `stdin` is bytes, text (as UTF-8), a binary file or any (async)
        iterable of bytes; None is /dev/null. The command's end ends the call: children in the background live on and do not delay it.

        `timeout` (seconds; None: no limit) kills the command and everything it started. `output_limit` (bytes for each stream, at most 64 MiB) drops the
        middle of what is longer. Exit codes and signals are results, not errors, unless `check` is set. The call is repeated over a lost
        connection without running the command twice.

        Raises ExecTimeout (its `result` has the partial output; the sandbox is usable), CommandFailed (`check`; has `result`), CommandNotStarted (no such
        program or directory), SandboxGone, InvalidRequest, ConnectionFailed, OutcomeUnknown.

        Cancelled: the command and everything it started are killed; the sandbox lives on.
        """
        return self._portal.run(self._async.run(command, cwd=cwd, env=env, user=user, stdin=stdin, timeout=timeout, output_limit=output_limit, check=check, request_id=request_id))

    def start(self, command: str | Sequence[str], *, cwd: str | None=None, env: Mapping[str, str] | None=None, user: str | None=None, stdin: bool=False, timeout: float | None=None, output_limit: int | str='10MiB', pty: tuple[int, int] | None=None, request_id: str | None=None) -> Process:
        """Start a process in the background and return it as soon as it runs. Arguments are those of `run`.

        `stdin=True` keeps its stdin open for `process.write`; else it is /dev/null. It runs until its own end, its `timeout` (then killed with everything
        it started), or the sandbox's end; while it runs, the sandbox is not idle. Of each output stream `output_limit` bytes are kept for
        readers to come. `pty` is not part of this release.

        Raises CommandNotStarted, SandboxGone, InvalidRequest, Unsupported (`pty`), ConnectionFailed, OutcomeUnknown. Cancelled: what may have been started
        is killed.
        """
        return Process(self._portal, self._portal.run(self._async.start(command, cwd=cwd, env=env, user=user, stdin=stdin, timeout=timeout, output_limit=output_limit, pty=pty, request_id=request_id)))

    def attach(self, process_id: str) -> Process:
        """Find a process by dsec's id of it, or by its pid as text, whoever started it. Raises NotFound, SandboxGone."""
        return Process(self._portal, self._portal.run(self._async.attach(process_id)))

    def processes(self) -> list[Process]:
        """List the processes that `start` and `run` made: running ones, and ended ones as long as their output is kept."""
        return [Process(self._portal, item) for item in self._portal.run(self._async.processes())]

    def usage(self) -> t.Usage:
        """What the sandbox uses now: CPU seconds; memory, disk and network in bytes; processes. Does not count as activity."""
        return self._portal.run(self._async.usage())

    def set_timeout(self, *, idle: float | None | msgspec.UnsetType=msgspec.UNSET, max_lifetime: float | None | msgspec.UnsetType=msgspec.UNSET) -> t.SandboxRecord:
        """Change the TTLs, in seconds; None: no limit; not given: unchanged. `idle` counts anew from now, `max_lifetime` from the creation."""
        return self._portal.run(self._async.set_timeout(idle=idle, max_lifetime=max_lifetime))

    def stop(self) -> None:
        """End the sandbox and everything in it, and wait until all of it is gone. Stopping an ended one succeeds.

        Cancelled: it may or may not be stopped; stop it again. Raises NotFound, ConnectionFailed, OutcomeUnknown.
        """
        self._portal.run(self._async.stop())

    def shell(self) -> NoReturn:
        """Open a shell that keeps its directory and variables between commands. Not part of this release: raises Unsupported."""
        self._portal.run(self._async.shell())
        raise AssertionError

    def forward(self, port: int) -> NoReturn:
        """Forward a local port into the sandbox. Not part of this release: raises Unsupported."""
        self._async.forward(port)

    def url(self, port: int) -> NoReturn:
        """The address of a port of the sandbox. Not part of this release: raises Unsupported."""
        self._async.url(port)

    def pause(self) -> NoReturn:
        """Pause the sandbox. Not part of this release: raises Unsupported."""
        self._portal.run(self._async.pause())
        raise AssertionError

    def resume(self) -> NoReturn:
        """Resume a paused sandbox. Not part of this release: raises Unsupported."""
        self._portal.run(self._async.resume())
        raise AssertionError

    def snapshot(self, name: str | None=None) -> NoReturn:
        """Keep the sandbox's state as a snapshot. Not part of this release: raises Unsupported."""
        self._portal.run(self._async.snapshot(name))
        raise AssertionError

    def fork(self, count: int=1) -> NoReturn:
        """Make copies of the sandbox. Not part of this release: raises Unsupported."""
        self._portal.run(self._async.fork(count))
        raise AssertionError

    def pack_diff(self, name: str, *, exclude: Sequence[str]=(), scrub: bool=True) -> NoReturn:
        """Make an image of what was changed. Not part of this release: raises Unsupported."""
        self._portal.run(self._async.pack_diff(name, exclude=exclude, scrub=scrub))
        raise AssertionError

    def audit(self) -> NoReturn:
        """Report what the sandbox did. Not part of this release: raises Unsupported."""
        self._portal.run(self._async.audit())
        raise AssertionError

    @property
    def screen(self) -> Later:
        """A full VM's screen. Not part of this release: using it raises Unsupported."""
        return self._async.screen

    @property
    def network(self) -> Later:
        """The sandbox's network rules. Not part of this release: using it raises Unsupported."""
        return self._async.network

    def __repr__(self) -> str:
        return repr(self._async).replace("<Async", "<", 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._portal.run(self._async.__aexit__(exc_type, exc, traceback))


class Images:
    """`client.images`: what sandboxes can be made from."""

    __slots__ = ("__weakref__", "_async", "_portal")

    def __init__(self, portal: Portal, source: AsyncImages) -> None:
        self._portal = portal
        self._async = source

    def list(self) -> builtins.list[t.ImageInfo]:
        """List all images by name; sizes are bytes on disk."""
        return self._portal.run(self._async.list())


class Nodes:
    """`client.nodes`: the hosts."""

    __slots__ = ("__weakref__", "_async", "_portal")

    def __init__(self, portal: Portal, source: AsyncNodes) -> None:
        self._portal = portal
        self._async = source

    def list(self) -> builtins.list[t.NodeInfo]:
        """List all nodes with the kinds they can start and how full they are; memory is bytes."""
        return self._portal.run(self._async.list())


class Events:
    """`client.events`: what happened, in order."""

    __slots__ = ("__weakref__", "_async", "_portal")

    def __init__(self, portal: Portal, source: AsyncEvents) -> None:
        self._portal = portal
        self._async = source

    def list(self, *, since: int | None=None, sandbox_id: str | None=None, event_type: str | None=None, limit: int | None=None) -> builtins.list[t.Event]:
        """Events after the sequence number `since`, oldest first, at most `limit`; of one sandbox or type if given."""
        return self._portal.run(self._async.list(since=since, sandbox_id=sandbox_id, event_type=event_type, limit=limit))

    def follow(self, *, since: int | None=None, sandbox_id: str | None=None, event_type: str | None=None) -> Iterator[t.Event]:
        """Yield events after `since` (None: from now on) as they happen, without end; a lost connection loses none and repeats none."""
        return self._portal.iterate(self._async.follow(since=since, sandbox_id=sandbox_id, event_type=event_type), lambda item: item)


class Client:
    """A connection to a dsec server.

    `url` is `http://HOST:PORT`, `https://HOST` or `http+unix://%2Fpath%2Fto.sock`; without it DSEC_URL, else the local daemon's unix socket. `key` is the API
    key; without it DSEC_API_KEY, else the local daemon's own key file. Connections are opened when they are needed and kept; at most 2,048 at
    once. Use it with `with`, or end it with `close`: that closes connections and leaves sandboxes running.

    Raises InvalidRequest (a wrong `url`), Unauthenticated (no key to be found), ConnectionFailed (no daemon was ever started here).
    """

    __slots__ = ("__weakref__", "_async", "_portal")

    def __init__(self, url: str | None=None, *, key: str | None=None) -> None:
        self._async = AsyncClient(url, key=key)
        self._portal = Portal(self._async.aclose)

    def create(self, kind: str='container', *, image: str='debian:12', workspace: str | None=None, toolkits: Sequence[str]=(), snapshot: str | None=None, cpus: float=1.0, memory: int | str='512MiB', disk: int | str='2GiB', pids: int=512, disk_backing: str='auto', user: str | None=None, workdir: str | None=None, env: Mapping[str, str] | None=None, labels: Mapping[str, str] | None=None, job: str | None=None, project: str | None=None, network: Mapping[str, bool | str] | None=None, idle_timeout: float | None=300.0, max_lifetime: float | None=86400.0, on_idle: str='stop', qos: str='besteffort', on_node_loss: str='fail', policy: str='default', timeout: float=120.0, request_id: str | None=None) -> Sandbox:
        """Create a sandbox and return it when it runs.

        `cpus` are processors; `memory` and `disk` bytes or text such as "512MiB"; `pids` processes. `disk_backing` is "auto", "tmpfs" (counts as memory) or
        "local". `user` and `workdir` None: the image's, else root and /. `network` None: loopback only. `idle_timeout` (seconds without calls and running
        processes) and `max_lifetime` (seconds since the creation) end the sandbox; None: never. `timeout` (seconds) bounds the creation.

        Raises InvalidRequest, ImageError, Unsupported, NoCapacity, QuotaExceeded, DeadlineExceeded, PermissionDenied, ConnectionFailed, OutcomeUnknown. After
        any of them, and when cancelled, what may have been created is stopped; only after OutcomeUnknown with a `request_id` of your own it is not, so that
        repeating the call finds it.
        """
        return Sandbox(self._portal, self._portal.run(self._async.create(kind, image=image, workspace=workspace, toolkits=toolkits, snapshot=snapshot, cpus=cpus, memory=memory, disk=disk, pids=pids, disk_backing=disk_backing, user=user, workdir=workdir, env=env, labels=labels, job=job, project=project, network=network, idle_timeout=idle_timeout, max_lifetime=max_lifetime, on_idle=on_idle, qos=qos, on_node_loss=on_node_loss, policy=policy, timeout=timeout, request_id=request_id)))

    def create_many(self, count: int, kind: str='container', *, image: str='debian:12', workspace: str | None=None, toolkits: Sequence[str]=(), snapshot: str | None=None, cpus: float=1.0, memory: int | str='512MiB', disk: int | str='2GiB', pids: int=512, disk_backing: str='auto', user: str | None=None, workdir: str | None=None, env: Mapping[str, str] | None=None, labels: Mapping[str, str] | None=None, job: str | None=None, project: str | None=None, network: Mapping[str, bool | str] | None=None, idle_timeout: float | None=300.0, max_lifetime: float | None=86400.0, on_idle: str='stop', qos: str='besteffort', on_node_loss: str='fail', policy: str='default', timeout: float=120.0, request_id: str | None=None, on_shortage: Literal['wait', 'fail']='wait') -> Iterator[Sandbox | DsecError]:
        """Create `count` sandboxes alike by one request and yield each as it becomes ready, or the error in its place.

        Arguments are those of `create`. Without room now, "wait" waits for it up to `timeout` seconds, "fail" yields NoCapacity.

        Leaving the loop early, closing the iterator or being cancelled stops what was not yielded; yielded sandboxes are the caller's.
        Raises what concerns the whole request: InvalidRequest, ImageError, Unsupported, PermissionDenied, ConnectionFailed, OutcomeUnknown.
        """
        return self._portal.iterate(self._async.create_many(count, kind, image=image, workspace=workspace, toolkits=toolkits, snapshot=snapshot, cpus=cpus, memory=memory, disk=disk, pids=pids, disk_backing=disk_backing, user=user, workdir=workdir, env=env, labels=labels, job=job, project=project, network=network, idle_timeout=idle_timeout, max_lifetime=max_lifetime, on_idle=on_idle, qos=qos, on_node_loss=on_node_loss, policy=policy, timeout=timeout, request_id=request_id, on_shortage=on_shortage), lambda item: Sandbox(self._portal, item) if isinstance(item, AsyncSandbox) else item)

    def stop_many(self, sandboxes: Iterable[str | Identified]=(), *, labels: Mapping[str, str] | None=None) -> builtins.list[Stopped]:
        """Stop sandboxes (objects or ids), or all with these labels, by one request; return what became of each. Nothing given: nothing is stopped.

        One that cannot be stopped does not keep the others from it. Cancelled: some may be stopped; stop them again.
        """
        return self._portal.run(self._async.stop_many(sandboxes, labels=labels))

    def get(self, sandbox_id: str) -> Sandbox:
        """Find a sandbox by id, an ended one too. Raises NotFound."""
        return Sandbox(self._portal, self._portal.run(self._async.get(sandbox_id)))

    def list(self, *, labels: Mapping[str, str] | None=None, state: str | None=None, job: str | None=None, limit: int=100, cursor: str | None=None) -> Page[Sandbox]:
        """Return one page of sandboxes, newest first: the living, or those in `state` ("all": every one), with all of `labels`.

        `limit` is at most 1,000; `cursor` is an earlier page's `next_cursor`.
        """
        return _page(self._portal, self._portal.run(self._async.list(labels=labels, state=state, job=job, limit=limit, cursor=cursor)))

    def list_all(self, *, labels: Mapping[str, str] | None=None, state: str | None=None, job: str | None=None) -> Iterator[Sandbox]:
        """Yield what `list` finds, page after page."""
        return self._portal.iterate(self._async.list_all(labels=labels, state=state, job=job), lambda item: Sandbox(self._portal, item))

    @property
    def images(self) -> Images:
        """What sandboxes can be made from."""
        return Images(self._portal, self._async.images)

    @property
    def nodes(self) -> Nodes:
        """The hosts."""
        return Nodes(self._portal, self._async.nodes)

    @property
    def events(self) -> Events:
        """What happened, in order."""
        return Events(self._portal, self._async.events)

    @property
    def layers(self) -> Later:
        """Layers of images. Not part of this release: using it raises Unsupported."""
        return self._async.layers

    @property
    def projects(self) -> Later:
        """Projects. Not part of this release: using it raises Unsupported."""
        return self._async.projects

    @property
    def keys(self) -> Later:
        """API keys. Not part of this release: using it raises Unsupported."""
        return self._async.keys

    @property
    def jobs(self) -> Later:
        """Jobs. Not part of this release: using it raises Unsupported."""
        return self._async.jobs

    def fncall(self, code: str, **options: Any) -> NoReturn:
        """Run a piece of code in a warm worker. Not part of this release: raises Unsupported."""
        self._portal.run(self._async.fncall(code, **options))
        raise AssertionError

    def fncall_many(self, calls: Iterable[Any], **options: Any) -> NoReturn:
        """Run many pieces of code. Not part of this release: raises Unsupported."""
        self._async.fncall_many(calls, **options)

    def close(self) -> None:
        """Close all connections and end the client's thread. Sandboxes live on. Idempotent."""
        self._portal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _page(portal: Portal, page: Page[AsyncSandbox]) -> Page[Sandbox]:
    return Page([Sandbox(portal, item) for item in page.items], page.next_cursor)
