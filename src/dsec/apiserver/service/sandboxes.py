"""Sandboxes as clients see them: create, list, get, stop, time limits, usage. Knows no HTTP.

A create is claimed in the store (records, events and the request id in one transaction) before an edge hears of it, so that a repeat of
the request, on whatever instance, finds the same sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec

from dsec.api.control import (
    SetTimeouts,
    StartBatch,
    StartResult,
    StartSandbox,
    StopResult,
    StopSandboxes,
    UsageQuery,
    UsageReply,
)
from dsec.api.errors import (
    Conflict,
    DeadlineExceeded,
    DsecError,
    ErrorBody,
    InternalError,
    InvalidRequest,
    NotFound,
    from_body,
)
from dsec.api.ids import EdgeCode, new_sandbox_id
from dsec.api.types import (
    BatchItem,
    CreateBatch,
    CreateSandbox,
    EndReason,
    Kind,
    SandboxPage,
    SandboxRecord,
    SandboxSpec,
    State,
    StopItem,
    StopRequest,
    StopResponse,
    TimeoutUpdate,
    Usage,
)
from dsec.apiserver.metrics import Metrics
from dsec.apiserver.service import checks
from dsec.apiserver.service.creation import Creation
from dsec.apiserver.service.cursor import decode_cursor, encode_cursor
from dsec.apiserver.service.guest import Guests
from dsec.apiserver.service.images import ImageService
from dsec.apiserver.service.ports import Placement
from dsec.apiserver.service.records import StoreSink, events_subject, publish_news, reason_data
from dsec.apiserver.service.tasks import Detached
from dsec.bus import Bus
from dsec.bus.edges import start_subject, stop_subject, timeouts_subject, usage_subject
from dsec.iam import Action, Principal, Resource, authorize, checked_project
from dsec.store import Change, ListQuery, NewEvent, NewRequest, RequestRow, Store

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 60.0
"""An edge that has not stopped sandboxes by then does not answer at all; its journal goes on with it."""
ASK_TIMEOUT_S = 10.0
_GRACE_S = 5.0
"""An edge keeps to the deadline itself; past it by so much, it is not there."""
_TOMBSTONE_S = 120.0
"""How long a request id that was cancelled before it came is refused."""
_RECHECK_S = 1.0
_STATES = frozenset(State)


class _Prepared(NamedTuple):
    creation: Creation
    items: list[tuple[SandboxRecord, SandboxSpec]]
    claim: NewRequest | None


class Sandboxes:
    """The sandboxes of all projects; every method takes the principal who asks."""

    def __init__(
        self,
        *,
        store: Store,
        bus: Bus,
        placement: Placement,
        images: ImageService,
        guests: Guests,
        tasks: Detached,
        metrics: Metrics,
        records: StoreSink,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._bus = bus
        self._placement = placement
        self._images = images
        self._guests = guests
        self._tasks = tasks
        self._metrics = metrics
        self._records = records
        self._created = {kind: metrics.created.labels(kind.value) for kind in Kind}
        self._now = wall_clock
        self._creations: dict[tuple[str, str], Creation] = {}
        self._tombstones: dict[tuple[str, str], float] = {}

    # Creating

    async def create(self, principal: Principal, request: CreateSandbox) -> SandboxRecord:
        """Create one sandbox; returns when it runs. Cancelled: it is stopped.

        Raises InvalidRequest, Unsupported, ImageError, NoCapacity, Conflict (the request id was used for something else),
        DeadlineExceeded, and what the edge refuses with.
        """
        batch = CreateBatch(count=1, sandbox=request)
        async with self.batch(principal, batch, kind="create") as groups:
            items = [item async for group in groups for item in group]
        if items[0].error is not None:
            raise from_body(items[0].error)
        if items[0].sandbox is None:
            raise InternalError("a create ended without a result")
        return items[0].sandbox

    @asynccontextmanager
    async def batch(
        self, principal: Principal, batch: CreateBatch, *, kind: str = "batch"
    ) -> AsyncIterator[AsyncIterator[list[BatchItem]]]:
        """Create `batch.count` sandboxes; yields an iterator of results in groups as they come. Left early: the undelivered are stopped.

        Raises as `create` on entering; what befalls single sandboxes comes as their error.
        """
        checks.check_batch(batch)
        checks.check_create(batch.sandbox)
        project = checked_project(principal, batch.sandbox.project)
        authorize(principal, Action.CREATE, Resource("project", project, project))
        creation = await self._begin(principal, batch, kind)
        creation.waiters += 1
        try:
            async with contextlib.aclosing(creation.groups()) as groups:
                yield groups
        finally:
            creation.waiters -= 1
            if creation.waiters == 0 and creation.delivered < len(creation.ids) and not creation.cancelled:
                creation.cancelled = True
                self._tasks.start(self._cancel(creation))

    async def _begin(self, principal: Principal, batch: CreateBatch, kind: str) -> Creation:
        request_id = batch.sandbox.request_id
        fingerprint = b""
        if request_id is not None:
            fingerprint = hashlib.blake2b(kind.encode() + checks.fingerprint_bytes(batch), digest_size=16).digest()
            self._check_tombstone(principal.project, request_id)
            running = self._creations.get((principal.project, request_id))
            if running is not None:
                return _same(running, fingerprint, request_id)
            earlier = await self._store.request(principal.project, request_id)
            if earlier is not None:
                return await self._rejoin(earlier, fingerprint)
        environment = await self._images.resolve(batch.sandbox.image, project=principal.project)
        spec = checks.spec_of(batch.sandbox, environment)
        node = await self._placement.place(
            kind=spec.kind.value, cpus=spec.cpus, memory_bytes=spec.memory_bytes, count=batch.count
        )
        now = self._now()
        items = self._new_records(principal, batch.sandbox, spec, EdgeCode(node.edge), node.epoch, batch.count, now)
        ids = tuple([record.id for record, _ in items])
        creation = Creation(project=principal.project, edge=node.edge, ids=ids, fingerprint=fingerprint)
        claim = None
        if request_id is not None:
            claim = NewRequest(
                project=principal.project,
                request_id=request_id,
                kind=kind,
                fingerprint=fingerprint,
                sandbox_ids=ids,
                created_at=now,
            )
            # Others with the same id who come while this one is written find it here.
            running = self._creations.get((principal.project, request_id))
            if running is not None:
                return _same(running, fingerprint, request_id)
            self._creations[principal.project, request_id] = creation
        # Detached: a client that goes away between the claim and the start must not leave records that nobody starts.
        self._tasks.start(self._drive(_Prepared(creation, items, claim), batch, now))
        return creation

    def _new_records(
        self,
        principal: Principal,
        request: CreateSandbox,
        spec: SandboxSpec,
        edge: EdgeCode,
        epoch: int,
        count: int,
        now: float,
    ) -> list[tuple[SandboxRecord, SandboxSpec]]:
        expires = None if spec.max_lifetime_s is None else now + spec.max_lifetime_s
        return [
            (
                SandboxRecord(
                    id=new_sandbox_id(edge),
                    project=principal.project,
                    principal=principal.name,
                    edge=edge,
                    epoch=epoch,
                    kind=spec.kind,
                    state=State.CREATING,
                    image=spec.image,
                    layers=spec.layers,
                    cpus=spec.cpus,
                    memory=spec.memory_bytes,
                    disk=spec.disk_bytes,
                    pids=spec.pids,
                    disk_backing=spec.disk_backing,
                    labels=request.labels,
                    job=request.job,
                    user=spec.user,
                    workdir=spec.workdir,
                    idle_timeout=spec.idle_timeout_s,
                    max_lifetime=spec.max_lifetime_s,
                    on_idle=spec.on_idle,
                    created_at=now,
                    expires_at=expires,
                    request_id=request.request_id,
                    seq=1,
                ),
                spec,
            )
            for _ in range(count)
        ]

    async def _drive(self, prepared: _Prepared, batch: CreateBatch, started: float) -> None:
        """Write the claim, start the sandboxes, fill the creation. Whatever happens, every sandbox gets a result."""
        creation, items, claim = prepared
        try:
            events = [_event("sandbox.created", record, started) for record, _ in items]
            earlier = await self._store.create(items, events, request=claim)
            if earlier is not None:
                await self._adopt(creation, earlier)
                return
            publish_news(self._bus, [creation.project])
            for record, _ in items:
                self._guests.note(record.id, record.project, record.edge)
            if creation.cancelled:
                await self._fail(creation, items, _cancelled_error())
                return
            await self._start(creation, items, batch, started)
        except DsecError as error:
            await self._fail(creation, items, error)
        except Exception:
            log.exception("a create failed", extra={"project": creation.project})
            await self._fail(creation, items, InternalError("the create failed inside dsec; its log says why"))
        finally:
            if claim is not None:
                self._creations.pop((claim.project, claim.request_id), None)
            if not creation.finished:
                failure = InternalError("the daemon is going down").body()
                creation.add([BatchItem(index=index, error=failure) for index in creation.unanswered()])

    async def _start(
        self,
        creation: Creation,
        items: list[tuple[SandboxRecord, SandboxSpec]],
        batch: CreateBatch,
        started: float,
    ) -> None:
        timeout = batch.sandbox.timeout
        index_of = {name: index for index, name in enumerate(creation.ids)}
        message = StartBatch(
            items=tuple([StartSandbox(record=record, spec=spec) for record, spec in items]),
            deadline=started + timeout,
            wait=batch.on_shortage == "wait",
        )
        try:
            replies = self._bus.stream(start_subject(creation.edge), message, list, timeout=timeout + _GRACE_S)
            async for group in replies:
                await self._records.settled([result.record for result in group if result.record is not None])
                creation.add([self._item(index_of[result.id], result, started) for result in group])
        except DeadlineExceeded:
            left = [creation.ids[index] for index in creation.unanswered()]
            self._tasks.start(self._stop_on(creation.edge, left, EndReason.TIMEOUT))
            raise
        if not creation.finished:
            raise InternalError(f"node {creation.edge} ended a batch without all its results")

    def _item(self, index: int, result: StartResult, started: float) -> BatchItem:
        if result.record is not None:
            self._created[result.record.kind].inc()
            self._metrics.create_seconds.observe(max(0.0, self._now() - started))
            return BatchItem(index=index, sandbox=result.record)
        error = result.error or ErrorBody(code=InternalError.code, message="the node gave no reason")
        self._metrics.create_failed.labels(error.code).inc()
        return BatchItem(index=index, error=error)

    async def _fail(self, creation: Creation, items: list[tuple[SandboxRecord, SandboxSpec]], error: DsecError) -> None:
        """Give all sandboxes without a result this one, and note in the store that they failed."""
        left = creation.unanswered()
        body = error.body()
        self._metrics.create_failed.labels(body.code).inc(len(left))
        now = self._now()
        reason = EndReason.TIMEOUT if isinstance(error, DeadlineExceeded) else EndReason.ADMISSION
        changes = []
        for index in left:
            record = msgspec.structs.replace(
                items[index][0],
                state=State.FAILED,
                reason=EndReason.CANCELLED if creation.cancelled else reason,
                detail=error.message,
                ended_at=now,
                seq=items[index][0].seq + 1,
            )
            changes.append(Change(record=record, event=_event("sandbox.failed", record, now)))
        try:
            if changes:
                await self._store.change(changes)
                publish_news(self._bus, [creation.project])
        finally:
            creation.add([BatchItem(index=index, error=body) for index in left])

    async def _cancel(self, creation: Creation) -> None:
        """Stop what nobody took delivery of."""
        names = creation.undelivered()
        if names:
            await self._stop_on(creation.edge, names, EndReason.CANCELLED)

    # A request id that was used before

    async def _rejoin(self, earlier: RequestRow, fingerprint: bytes) -> Creation:
        if earlier.fingerprint != fingerprint:
            raise _other_body(earlier.request_id)
        creation = Creation(project=earlier.project, edge="", ids=earlier.sandbox_ids, fingerprint=fingerprint)
        self._tasks.start(self._adopt(creation, earlier))
        return creation

    async def _adopt(self, creation: Creation, earlier: RequestRow) -> None:
        """Fill `creation` with what became, or becomes, of the sandboxes of an earlier request with its id."""
        creation.ids = earlier.sandbox_ids
        if earlier.fingerprint != creation.fingerprint:
            failure = _other_body(earlier.request_id).body()
            creation.add([BatchItem(index=index, error=failure) for index in range(len(creation.ids))])
            return
        async with self._bus.subscribe(events_subject(creation.project)) as news:
            while not creation.finished:
                news.clear()
                left = creation.unanswered()
                records = await self._store.get_many([creation.ids[index] for index in left])
                creation.add([item for index in left if (item := _settled(index, records.get(creation.ids[index])))])
                if not creation.finished:
                    with contextlib.suppress(TimeoutError):
                        await news.next(timeout=_RECHECK_S)
        creation.cancelled = True  # they are not this request's to stop

    def _check_tombstone(self, project: str, request_id: str) -> None:
        until = self._tombstones.get((project, request_id))
        if until is not None and until > self._now():
            raise Conflict(f"the request {request_id!r} was cancelled")

    # Stopping

    async def stop(self, principal: Principal, sandbox_id: str) -> SandboxRecord:
        """Stop a sandbox; returns its record when all of it is gone. Stopping an ended one returns its record."""
        place = await self._guests.route(sandbox_id, principal, Action.STOP)
        (result,) = await self._stop_on(place.edge, [sandbox_id], EndReason.REQUESTED)
        if result.record is not None:
            return result.record
        record = await self._guests.record(sandbox_id, principal, Action.STOP)
        if record.state.ended:
            return record
        raise from_body(result.error) if result.error else InternalError("the node gave no reason")

    async def stop_many(self, principal: Principal, request: StopRequest) -> StopResponse:
        """Stop several: by ids, by the request that made them, or by labels. One that cannot be stopped has its error."""
        names = await self._chosen(principal, request)
        outcome: dict[str, StopItem] = {}
        by_edge: dict[str, list[str]] = {}
        for name in dict.fromkeys(names):
            try:
                by_edge.setdefault((await self._guests.route(name, principal, Action.STOP)).edge, []).append(name)
            except DsecError as error:
                outcome[name] = StopItem(id=name, error=error.body())
        async with asyncio.TaskGroup() as group:
            for edge, mine in by_edge.items():
                group.create_task(self._stop_group(edge, mine, outcome))
        return StopResponse(results=[outcome[name] for name in dict.fromkeys(names)])

    async def _chosen(self, principal: Principal, request: StopRequest) -> Sequence[str]:
        if len(request.ids) > checks.MAX_BATCH:
            raise InvalidRequest(f"at most {checks.MAX_BATCH} ids can be stopped at once")
        if sum((bool(request.ids), request.request_id is not None, bool(request.labels))) != 1:
            raise InvalidRequest("give exactly one of ids, request_id and labels (which must not be empty)")
        if request.ids:
            return request.ids
        if request.request_id is not None:
            return await self._of_request(principal, request.request_id)
        checks.check_labels(request.labels)
        names: list[str] = []
        after: tuple[float, str] | None = None
        while True:
            query = ListQuery(project=principal.project, living=True, labels=request.labels, limit=1000, after=after)
            page = await self._store.page(query)
            names += [record.id for record in page]
            if len(page) < query.limit:
                return names
            after = (page[-1].created_at, page[-1].id)

    async def _of_request(self, principal: Principal, request_id: str) -> Sequence[str]:
        checks.check_request_id(request_id)
        running = self._creations.get((principal.project, request_id))
        if running is not None:
            running.cancelled = True
            return running.ids
        claim = await self._store.request(principal.project, request_id)
        if claim is not None:
            return claim.sandbox_ids
        # It may still be under way from the client that cancels it: refuse it when it comes.
        now = self._now()
        self._tombstones = {key: until for key, until in self._tombstones.items() if until > now}
        self._tombstones[principal.project, request_id] = now + _TOMBSTONE_S
        return ()

    async def _stop_group(self, edge: str, names: list[str], outcome: dict[str, StopItem]) -> None:
        try:
            results = await self._stop_on(edge, names, EndReason.REQUESTED)
        except DsecError as error:
            body = error.body()
            outcome.update({name: StopItem(id=name, error=body) for name in names})
            return
        missing = []
        for result in results:
            if result.record is not None:
                outcome[result.id] = StopItem(id=result.id, state=result.record.state)
            else:
                missing.append(result)
        if missing:
            kept = await self._store.get_many([result.id for result in missing])
            for result in missing:
                record = kept.get(result.id)
                ended = record is not None and record.state.ended
                outcome[result.id] = StopItem(
                    id=result.id,
                    state=record.state if ended and record else None,
                    error=None if ended else result.error,
                )

    async def _stop_on(self, edge: str, names: Sequence[str], reason: EndReason) -> list[StopResult]:
        if not edge or not names:
            return []
        message = StopSandboxes(ids=tuple(names), reason=reason.value)
        results: list[StopResult] = await self._bus.call(stop_subject(edge), message, list, timeout=STOP_TIMEOUT_S)
        await self._records.settled([result.record for result in results if result.record is not None])
        return results

    # Looking

    async def get(self, principal: Principal, sandbox_id: str) -> SandboxRecord:
        """A sandbox's record, also when it has ended. Raises NotFound."""
        return await self._guests.record(sandbox_id, principal, Action.READ)

    async def page(
        self,
        principal: Principal,
        *,
        state: str | None = None,
        labels: dict[str, str] | None = None,
        job: str | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> SandboxPage:
        """A page of sandboxes, newest first: the living, or those in `state` ("all" for every one). Raises InvalidRequest."""
        authorize(principal, Action.READ, Resource("project", principal.project, principal.project))
        if not 1 <= limit <= 1000:
            raise InvalidRequest(f"limit must be 1 to 1000, not {limit}")
        if state is not None and state != "all" and state not in _STATES:
            raise InvalidRequest(f'there is no state {state!r}; states are "all", {", ".join(State)}')
        checks.check_labels(labels or {})
        records = await self._store.page(
            ListQuery(
                project=principal.project,
                states=() if state in (None, "all") else (str(state),),
                living=state is None,
                labels=labels or {},
                job=job,
                limit=limit + 1,
                after=decode_cursor(cursor) if cursor is not None else None,
            )
        )
        more = len(records) > limit
        records = records[:limit]
        return SandboxPage(items=records, next_cursor=encode_cursor(records[-1]) if more else None)

    async def set_timeouts(self, principal: Principal, sandbox_id: str, update: TimeoutUpdate) -> SandboxRecord:
        """Set the time limits given; the others stay. Raises SandboxGone, NotFound, InvalidRequest."""
        record = await self._guests.record(sandbox_id, principal, Action.UPDATE)
        idle = record.idle_timeout if update.idle_timeout is msgspec.UNSET else update.idle_timeout
        lifetime = record.max_lifetime if update.max_lifetime is msgspec.UNSET else update.max_lifetime
        checks.check_ttl("idle_timeout", idle)
        checks.check_ttl("max_lifetime", lifetime)
        message = SetTimeouts(id=sandbox_id, idle_timeout_s=idle, max_lifetime_s=lifetime)
        place = await self._guests.route(sandbox_id, principal, Action.UPDATE)
        try:
            return await self._bus.call(timeouts_subject(place.edge), message, SandboxRecord, timeout=ASK_TIMEOUT_S)
        except NotFound as error:
            raise await self._guests.gone(error, sandbox_id) from error

    async def usage(self, principal: Principal, sandbox_id: str) -> Usage:
        """What a sandbox uses. Raises SandboxGone, NotFound."""
        place = await self._guests.route(sandbox_id, principal, Action.READ)
        try:
            query = UsageQuery(id=sandbox_id)
            reply = await self._bus.call(usage_subject(place.edge), query, UsageReply, timeout=ASK_TIMEOUT_S)
        except NotFound as error:
            raise await self._guests.gone(error, sandbox_id) from error
        return reply.usage


def _event(kind: str, record: SandboxRecord, now: float) -> NewEvent:
    return NewEvent(
        time=now,
        type=kind,
        project=record.project,
        principal=record.principal,
        sandbox_id=record.id,
        data=reason_data(record),
    )


def _same(running: Creation, fingerprint: bytes, request_id: str) -> Creation:
    if running.fingerprint != fingerprint:
        raise _other_body(request_id)
    return running


def _other_body(request_id: str) -> Conflict:
    return Conflict(f"the request id {request_id!r} was used for another request; make a fresh one for each request")


def _cancelled_error() -> Conflict:
    return Conflict("the create was cancelled", reason=EndReason.CANCELLED.value)


def _settled(index: int, record: SandboxRecord | None) -> BatchItem | None:
    """What became of a sandbox that an earlier request made; None while it is being created."""
    if record is None:
        return BatchItem(index=index, error=NotFound("the sandbox of this request was pruned").body())
    if record.state in (State.QUEUED, State.CREATING):
        return None
    if record.state is State.FAILED and record.started_at is None:
        reason = record.reason.value if record.reason else "unknown"
        failure = Conflict(record.detail or f"the sandbox failed ({reason})", sandbox_id=record.id, reason=reason)
        return BatchItem(index=index, error=failure.body())
    return BatchItem(index=index, sandbox=record)
