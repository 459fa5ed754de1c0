"""The client: creates, finds and stops sandboxes."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol, Self

from dsec.api import types as t
from dsec.api.errors import DsecError, InvalidRequest, OutcomeUnknown, from_body
from dsec.sdk import _calls
from dsec.sdk._endpoint import resolve
from dsec.sdk._later import Later, later
from dsec.sdk._lines import lines
from dsec.sdk._transport import RECONNECT_S, Transport, lost_errors
from dsec.sdk.collections import AsyncEvents, AsyncImages, AsyncNodes
from dsec.sdk.results import Page
from dsec.sdk.sandbox import AsyncSandbox

_BATCH_TRIES = 5
_MAX_IDS = 32_768


class Identified(Protocol):
    """Anything with a sandbox's id, such as a sandbox."""

    @property
    def id(self) -> str:
        """The sandbox's id."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """What became of one sandbox of `stop_many`: its last `state`, or the `error` that kept it from being stopped."""

    id: str
    state: str | None
    error: DsecError | None = None


class AsyncClient:
    """A connection to a dsec server.

    `url` is `http://HOST:PORT`, `https://HOST` or `http+unix://%2Fpath%2Fto.sock`; without it DSEC_URL, else the local daemon's unix socket. `key` is the API
    key; without it DSEC_API_KEY, else the local daemon's own key file. Connections are opened when they are needed and kept; at most 2,048 at
    once. Use it with `async with`, or end it with `aclose`: that closes connections and leaves sandboxes running.

    Raises InvalidRequest (a wrong `url`), Unauthenticated (no key to be found), ConnectionFailed (no daemon was ever started here).
    """

    __slots__ = ("_transport",)

    def __init__(self, url: str | None = None, *, key: str | None = None) -> None:
        self._transport = Transport(resolve(url, key))

    async def create(
        self,
        kind: str = "container",
        *,
        image: str = "debian:12",
        workspace: str | None = None,
        toolkits: Sequence[str] = (),
        snapshot: str | None = None,
        cpus: float = 1.0,
        memory: int | str = "512MiB",
        disk: int | str = "2GiB",
        pids: int = 512,
        disk_backing: str = "auto",
        user: str | None = None,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        job: str | None = None,
        project: str | None = None,
        network: Mapping[str, bool | str] | None = None,
        idle_timeout: float | None = 300.0,
        max_lifetime: float | None = 86400.0,
        on_idle: str = "stop",
        qos: str = "besteffort",
        on_node_loss: str = "fail",
        policy: str = "default",
        timeout: float = 120.0,
        request_id: str | None = None,
    ) -> AsyncSandbox:
        """Create a sandbox and return it when it runs.

        `cpus` are processors; `memory` and `disk` bytes or text such as "512MiB"; `pids` processes. `disk_backing` is "auto", "tmpfs" (counts as memory) or
        "local". `user` and `workdir` None: the image's, else root and /. `network` None: loopback only. `idle_timeout` (seconds without calls and running
        processes) and `max_lifetime` (seconds since the creation) end the sandbox; None: never. `timeout` (seconds) bounds the creation.

        Raises InvalidRequest, ImageError, Unsupported, NoCapacity, QuotaExceeded, DeadlineExceeded, PermissionDenied, ConnectionFailed, OutcomeUnknown. After
        any of them, and when cancelled, what may have been created is stopped; only after OutcomeUnknown with a `request_id` of your own it is not, so that
        repeating the call finds it.
        """
        spec = _spec(locals())
        own_id = request_id is None
        try:
            record = await self._transport.call(_calls.create(spec), timeout=timeout + RECONNECT_S)
        except (asyncio.CancelledError, TimeoutError):
            await self._transport.shielded(self._abandon(spec))
            raise
        except OutcomeUnknown:
            if own_id:
                await self._transport.shielded(self._abandon(spec))
            raise
        return AsyncSandbox(self._transport, record)

    async def _abandon(self, spec: t.CreateSandbox) -> None:
        await self._transport.call(_calls.stop_many(t.StopRequest(request_id=spec.request_id)))

    def create_many(
        self,
        count: int,
        kind: str = "container",
        *,
        image: str = "debian:12",
        workspace: str | None = None,
        toolkits: Sequence[str] = (),
        snapshot: str | None = None,
        cpus: float = 1.0,
        memory: int | str = "512MiB",
        disk: int | str = "2GiB",
        pids: int = 512,
        disk_backing: str = "auto",
        user: str | None = None,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        job: str | None = None,
        project: str | None = None,
        network: Mapping[str, bool | str] | None = None,
        idle_timeout: float | None = 300.0,
        max_lifetime: float | None = 86400.0,
        on_idle: str = "stop",
        qos: str = "besteffort",
        on_node_loss: str = "fail",
        policy: str = "default",
        timeout: float = 120.0,
        request_id: str | None = None,
        on_shortage: Literal["wait", "fail"] = "wait",
    ) -> AsyncIterator[AsyncSandbox | DsecError]:
        """Create `count` sandboxes alike by one request and yield each as it becomes ready, or the error in its place.

        Arguments are those of `create`. Without room now, "wait" waits for it up to `timeout` seconds, "fail" yields NoCapacity.

        Leaving the loop early, closing the iterator or being cancelled stops what was not yielded; yielded sandboxes are the caller's.
        Raises what concerns the whole request: InvalidRequest, ImageError, Unsupported, PermissionDenied, ConnectionFailed, OutcomeUnknown.
        """
        spec = _spec(locals())
        return self._batch(t.CreateBatch(count=count, sandbox=spec, on_shortage=on_shortage))

    async def _batch(self, batch: t.CreateBatch) -> AsyncIterator[AsyncSandbox | DsecError]:
        call = _calls.create_batch(batch)
        yielded: set[int] = set()
        kept: set[str] = set()
        tries = 0
        try:
            while len(yielded) < batch.count:
                try:
                    # The answer's head may come late: with the first sandbox.
                    async with self._transport.stream(call, timeout=batch.sandbox.timeout + RECONNECT_S) as answer:
                        async for line in lines(answer.content):
                            item = _calls.batch_item(line)
                            if item.index in yielded:
                                continue  # told again after a lost connection
                            yielded.add(item.index)
                            if item.sandbox is None:
                                assert item.error is not None
                                yield from_body(item.error)
                            else:
                                kept.add(item.sandbox.id)
                                yield AsyncSandbox(self._transport, item.sandbox)
                except lost_errors():
                    pass
                tries += 1
                if len(yielded) < batch.count and tries >= _BATCH_TRIES:
                    raise OutcomeUnknown(
                        f"the connection was lost {tries} times with {len(yielded)} of {batch.count} sandboxes created"
                    )
        finally:
            if len(yielded) < batch.count:
                await self._transport.shielded(self._abandon_batch(batch.sandbox, kept))

    async def _abandon_batch(self, spec: t.CreateSandbox, kept: set[str]) -> None:
        """Stop what the batch created and nobody got: the server cancels what it has not sent, the rest is found by its request id."""
        if not kept:
            await self._abandon(spec)
            return
        cursor: str | None = None
        while True:
            call = _calls.list_sandboxes(labels=spec.labels, state=None, job=spec.job, limit=1000, cursor=cursor)
            page = await self._transport.call(call)
            lost = tuple(item.id for item in page.items if item.request_id == spec.request_id and item.id not in kept)
            if lost:
                await self._transport.call(_calls.stop_many(t.StopRequest(ids=lost)))
            cursor = page.next_cursor
            if cursor is None:
                return

    async def stop_many(
        self, sandboxes: Iterable[str | Identified] = (), *, labels: Mapping[str, str] | None = None
    ) -> builtins.list[Stopped]:
        """Stop sandboxes (objects or ids), or all with these labels, by one request; return what became of each. Nothing given: nothing is stopped.

        One that cannot be stopped does not keep the others from it. Cancelled: some may be stopped; stop them again.
        """
        ids = tuple(item if isinstance(item, str) else item.id for item in sandboxes)
        requests = [t.StopRequest(ids=ids[start : start + _MAX_IDS]) for start in range(0, len(ids), _MAX_IDS)]
        if labels:
            requests.append(t.StopRequest(labels=dict(labels)))
        items: builtins.list[t.StopItem] = []
        for request in requests:
            items += (await self._transport.call(_calls.stop_many(request))).results
        return [
            Stopped(
                item.id,
                None if item.state is None else str(item.state),
                None if item.error is None else from_body(item.error),
            )
            for item in items
        ]

    async def get(self, sandbox_id: str) -> AsyncSandbox:
        """Find a sandbox by id, an ended one too. Raises NotFound."""
        return AsyncSandbox(self._transport, await self._transport.call(_calls.get(sandbox_id)))

    async def list(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        state: str | None = None,
        job: str | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page[AsyncSandbox]:
        """Return one page of sandboxes, newest first: the living, or those in `state` ("all": every one), with all of `labels`.

        `limit` is at most 1,000; `cursor` is an earlier page's `next_cursor`.
        """
        call = _calls.list_sandboxes(labels=dict(labels or {}), state=state, job=job, limit=limit, cursor=cursor)
        page = await self._transport.call(call)
        return Page([AsyncSandbox(self._transport, record) for record in page.items], page.next_cursor)

    async def list_all(
        self, *, labels: Mapping[str, str] | None = None, state: str | None = None, job: str | None = None
    ) -> AsyncIterator[AsyncSandbox]:
        """Yield what `list` finds, page after page."""
        cursor: str | None = None
        while True:
            page = await self.list(labels=labels, state=state, job=job, limit=1000, cursor=cursor)
            for sandbox in page.items:
                yield sandbox
            cursor = page.next_cursor
            if cursor is None:
                return

    @property
    def images(self) -> AsyncImages:
        """What sandboxes can be made from."""
        return AsyncImages(self._transport)

    @property
    def nodes(self) -> AsyncNodes:
        """The hosts."""
        return AsyncNodes(self._transport)

    @property
    def events(self) -> AsyncEvents:
        """What happened, in order."""
        return AsyncEvents(self._transport)

    @property
    def layers(self) -> Later:
        """Layers of images. Not part of this release: using it raises Unsupported."""
        return Later("layers")

    @property
    def projects(self) -> Later:
        """Projects. Not part of this release: using it raises Unsupported."""
        return Later("projects")

    @property
    def keys(self) -> Later:
        """API keys. Not part of this release: using it raises Unsupported."""
        return Later("keys")

    @property
    def jobs(self) -> Later:
        """Jobs. Not part of this release: using it raises Unsupported."""
        return Later("jobs")

    async def fncall(self, code: str, **options: Any) -> NoReturn:
        """Run a piece of code in a warm worker. Not part of this release: raises Unsupported."""
        raise later("fncall")

    def fncall_many(self, calls: Iterable[Any], **options: Any) -> NoReturn:
        """Run many pieces of code. Not part of this release: raises Unsupported."""
        raise later("fncall")

    async def aclose(self) -> None:
        """Close all connections. Sandboxes live on. Idempotent."""
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


_FIELDS = frozenset(t.CreateSandbox.__struct_fields__)


def _spec(arguments: dict[str, Any]) -> t.CreateSandbox:
    """The request made of a call's arguments; `locals()` of a method whose parameters are the fields' names."""
    fields = {name: value for name, value in arguments.items() if name in _FIELDS}
    fields["toolkits"] = tuple(fields["toolkits"])
    fields["env"] = dict(fields["env"] or {})
    fields["labels"] = dict(fields["labels"] or {})
    fields["network"] = None if fields["network"] is None else dict(fields["network"])
    fields["request_id"] = fields["request_id"] or _calls.new_request_id()
    for name in ("memory", "disk"):
        fields[name] = t.parse_size(fields[name], name=name)
    if not isinstance(fields["timeout"], int | float) or fields["timeout"] <= 0:
        raise InvalidRequest(f"timeout must be a number of seconds above 0, not {fields['timeout']!r}")
    return t.CreateSandbox(**fields)
