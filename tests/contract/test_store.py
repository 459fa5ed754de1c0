"""The contract of dsec.store.Store, run over every implementation."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.api.types import EndReason, Kind, SandboxRecord, SandboxSpec, State
from dsec.store import Change, EventQuery, KeyRow, ListQuery, NewEvent, NewRequest, Store, StoreError, open_store
from dsec.store.migrate import upgrade

SPEC = SandboxSpec(
    kind=Kind.CONTAINER,
    image="debian:12",
    layers=("sha256:1",),
    cpus=1.0,
    memory_bytes=1 << 29,
    disk_bytes=1 << 31,
    pids=512,
    disk_backing="tmpfs",
    env={"A": "1"},
)


def record(
    name: str, *, created: float = 1.0, project: str = "default", edge: str = "aaaa", **more: object
) -> SandboxRecord:
    fields: dict[str, object] = {
        "id": name,
        "project": project,
        "principal": "admin",
        "edge": edge,
        "epoch": 1,
        "kind": Kind.CONTAINER,
        "state": State.CREATING,
        "image": "debian:12",
        "cpus": 1.0,
        "memory": 1 << 29,
        "disk": 1 << 31,
        "pids": 512,
        "created_at": created,
        "seq": 1,
    }
    return SandboxRecord(**(fields | more))  # type: ignore[arg-type]


def event(kind: str = "sandbox.created", *, about: str | None = None, at: float = 1.0, **data: object) -> NewEvent:
    return NewEvent(time=at, type=kind, project="default", principal="admin", sandbox_id=about, data=data)


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "dsec.db"
    upgrade(path)
    return path


@pytest.fixture(params=["sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, migrated: Path) -> AsyncIterator[Store]:
    shutil.copy(migrated, tmp_path / "dsec.db")
    async with open_store(tmp_path / "dsec.db") as opened:
        yield opened


async def test_meta_is_claimed_once_and_numbers_rise(store: Store) -> None:
    assert await store.meta("edge") is None
    assert await store.claim_meta("edge", b"aaaa") == b"aaaa"
    assert await store.claim_meta("edge", b"bbbb") == b"aaaa"
    assert await store.meta("edge") == b"aaaa"
    assert [await store.next_number("epoch") for _ in range(3)] == [1, 2, 3]


async def test_keys(store: Store) -> None:
    await store.add_principal("default", "admin", now=1.0)
    await store.add_principal("default", "admin", now=2.0)
    key = KeyRow(hash=b"h", name="first", project="default", principal="admin", created_at=1.0, expires_at=9.0)
    await store.add_key(key)
    assert await store.key(b"h") == key
    assert await store.key(b"x") is None
    assert await store.keys("default") == [key]
    assert await store.keys("other") == []
    assert await store.remove_key("other", "first") == 0
    assert await store.remove_key("default", "first") == 1
    assert await store.key(b"h") is None


async def test_create_then_get_spec_and_events(store: Store) -> None:
    items = [(record(f"aaaa{n}"), SPEC) for n in range(200)]
    assert await store.create(items, [event(about=r.id, n=1) for r, _ in items]) is None
    assert await store.get("aaaa7") == items[7][0]
    assert await store.spec("aaaa7") == SPEC
    assert await store.get("nothing") is None
    assert await store.spec("nothing") is None
    assert set(await store.get_many(["aaaa1", "aaaa2", "no"])) == {"aaaa1", "aaaa2"}
    assert len(await store.living("aaaa")) == 200
    assert await store.living("bbbb") == []
    events = await store.events(EventQuery(project="default", limit=1000))
    assert [e.seq for e in events] == list(range(1, 201))
    assert [e.sandbox_id for e in events] == [r.id for r, _ in items]
    assert events[0].data == {"n": 1}
    assert await store.last_seq() == 200


async def test_a_request_id_is_claimed_once(store: Store) -> None:
    claim = NewRequest(
        project="default", request_id="r1", kind="batch", fingerprint=b"f", sandbox_ids=("a", "b"), created_at=1.0
    )
    assert await store.create([(record("a"), SPEC), (record("b"), SPEC)], [event()], request=claim) is None
    again = NewRequest(
        project="default", request_id="r1", kind="batch", fingerprint=b"g", sandbox_ids=("c",), created_at=2.0
    )
    assert await store.create([(record("c"), SPEC)], [event()], request=again) == claim
    assert await store.get("c") is None
    assert len(await store.events(EventQuery(project="default"))) == 1
    assert await store.request("default", "r1") == claim
    assert await store.request("other", "r1") is None
    elsewhere = NewRequest(
        project="other", request_id="r1", kind="batch", fingerprint=b"g", sandbox_ids=("c",), created_at=2.0
    )
    assert await store.create([(record("c", project="other"), SPEC)], [], request=elsewhere) is None


async def test_concurrent_claims_have_one_winner(store: Store) -> None:
    async def claim(n: int) -> bool:
        request = NewRequest(
            project="default", request_id="r", kind="create", fingerprint=b"f", sandbox_ids=(f"s{n}",), created_at=1.0
        )
        return await store.create([(record(f"s{n}"), SPEC)], [], request=request) is None

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(claim(n)) for n in range(50)]
    assert sum(task.result() for task in tasks) == 1
    assert len(await store.living("aaaa")) == 1


async def test_changes_are_fenced_by_epoch_then_seq(store: Store) -> None:
    await store.create([(record("a"), SPEC)], [])
    running = record("a", state=State.RUNNING, seq=2)
    stopped = record("a", state=State.STOPPED, seq=3, ended_at=5.0, reason=EndReason.REQUESTED)
    assert await store.change([Change(record=running, event=event("sandbox.running", about="a"))]) == [True]
    assert await store.change([Change(record=running, event=event("again"))]) == [False]
    both = [Change(record=stopped, event=event("sandbox.stopped")), Change(record=running, event=event("late"))]
    assert await store.change(both) == [True, False]
    assert await store.get("a") == stopped
    revived = record("a", state=State.RUNNING, epoch=2, seq=1)
    assert await store.change([Change(record=revived, event=event("sandbox.running"))]) == [True]
    assert await store.get("a") == revived
    assert await store.change([Change(record=record("a", epoch=1, seq=99), event=event("old"))]) == [False]
    types = [e.type for e in await store.events(EventQuery(project="default"))]
    assert types == ["sandbox.running", "sandbox.stopped", "sandbox.running"]
    assert await store.spec("a") == SPEC


async def test_a_change_of_an_unknown_sandbox_inserts_it(store: Store) -> None:
    lost = record("a", state=State.RUNNING, seq=4, labels={"run": "7"})
    assert await store.change([Change(record=lost, event=event())]) == [True]
    assert await store.get("a") == lost
    assert await store.page(ListQuery(project="default", labels={"run": "7"})) == [lost]


async def test_a_record_may_be_changed_by_its_owner_while_it_is_written(store: Store) -> None:
    owned = record("a")
    writing = asyncio.ensure_future(store.create([(owned, SPEC)], []))
    await asyncio.sleep(0)
    owned.state = State.RUNNING
    await writing
    kept = await store.get("a")
    assert kept is not None
    assert kept.state is State.CREATING


async def test_pages_newest_first_by_labels_state_and_job(store: Store) -> None:
    items = [
        record(
            f"aaaa{n:03}",
            created=float(n // 10),
            labels={"run": str(n % 2), "all": "1"},
            state=State.RUNNING if n % 3 else State.STOPPED,
            ended_at=None if n % 3 else 7.0,
            job="j" if n < 5 else None,
        )
        for n in range(100)
    ]
    await store.create([(item, SPEC) for item in items], [])
    await store.create([(record("other", project="other", labels={"run": "1"}), SPEC)], [])
    newest = sorted(items, key=lambda r: (r.created_at, r.id), reverse=True)

    async def everything(**query: object) -> list[str]:
        names: list[str] = []
        after: tuple[float, str] | None = None
        while True:
            page = await store.page(ListQuery(project="default", limit=7, after=after, **query))  # type: ignore[arg-type]
            if not page:
                return names
            names += [r.id for r in page]
            after = (page[-1].created_at, page[-1].id)

    assert await everything() == [r.id for r in newest]
    assert await everything(living=True) == [r.id for r in newest if not r.state.ended]
    assert await everything(states=("stopped",)) == [r.id for r in newest if r.state is State.STOPPED]
    assert await everything(labels={"run": "1"}) == [r.id for r in newest if r.labels["run"] == "1"]
    assert await everything(labels={"run": "1", "all": "1"}, living=True) == [
        r.id for r in newest if r.labels["run"] == "1" and not r.state.ended
    ]
    assert await everything(labels={"run": "1", "all": "2"}) == []
    assert await everything(job="j") == [r.id for r in newest if r.job == "j"]


async def test_moved(store: Store) -> None:
    assert await store.moved("a") is None
    await store.move("a", "bbbb", 2)
    await store.move("a", "cccc", 1)
    assert await store.moved("a") == ("bbbb", 2)
    await store.move("a", "cccc", 3)
    assert await store.moved("a") == ("cccc", 3)


async def test_event_queries(store: Store) -> None:
    await store.add_events([event("x", about="a"), event("y", about="b"), event("x", about="b")])
    await store.add_events([NewEvent(time=1.0, type="x", project="other")])
    assert [e.seq for e in await store.events(EventQuery(project="default", since=1))] == [2, 3]
    assert [e.seq for e in await store.events(EventQuery(project="default", sandbox_id="b"))] == [2, 3]
    assert [e.seq for e in await store.events(EventQuery(project="default", type="x"))] == [1, 3]
    assert [e.seq for e in await store.events(EventQuery(project="default", limit=1))] == [1]
    assert [e.seq for e in await store.events(EventQuery(project="other"))] == [4]


async def test_prune_leaves_the_living_and_the_young(store: Store) -> None:
    ended = record("old", state=State.STOPPED, ended_at=10.0, labels={"a": "b"})
    young = record("young", state=State.STOPPED, ended_at=100.0)
    living = record("living")
    await store.create([(ended, SPEC), (young, SPEC), (living, SPEC)], [event(at=10.0), event(at=100.0)])
    claim = NewRequest(project="default", request_id="r", kind="k", fingerprint=b"", sandbox_ids=(), created_at=10.0)
    await store.create([], [], request=claim)
    assert await store.prune(before=50.0) == 3
    assert await store.prune(before=50.0) == 0
    assert await store.get("old") is None
    assert {r.id for r in await store.page(ListQuery(project="default"))} == {"young", "living"}
    assert await store.page(ListQuery(project="default", labels={"a": "b"})) == []
    assert await store.request("default", "r") is None
    assert [e.seq for e in await store.events(EventQuery(project="default"))] == [2]
    assert await store.last_seq() == 2


async def test_a_failing_write_does_not_undo_its_neighbours(store: Store) -> None:
    await store.create([(record("a"), SPEC)], [])
    async with asyncio.TaskGroup() as group:
        good = [group.create_task(store.create([(record(f"g{n}"), SPEC)], [event()])) for n in range(5)]
        bad = group.create_task(_raises(store))
        more = [group.create_task(store.create([(record(f"h{n}"), SPEC)], [event()])) for n in range(5)]
    assert bad.result() is not None
    assert all(task.result() is None for task in good + more)
    assert len(await store.living("aaaa")) == 11
    assert await store.last_seq() == 10


async def _raises(store: Store) -> StoreError | None:
    try:
        await store.create([(record("a"), SPEC)], [event()])
    except StoreError as error:
        return error
    return None


async def test_everything_survives_reopening(tmp_path: Path) -> None:
    path = tmp_path / "dsec.db"
    async with open_store(path) as store:
        await store.create([(record("a"), SPEC)], [event(about="a")])
        await store.next_number("epoch")
    async with open_store(path) as store:
        assert await store.get("a") == record("a")
        assert await store.next_number("epoch") == 2
        assert await store.last_seq() == 1
    assert path.stat().st_mode & 0o777 == 0o600


async def test_a_cancelled_write_leaves_the_store_usable(store: Store) -> None:
    writing = asyncio.ensure_future(store.create([(record("a"), SPEC)], []))
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    await store.create([(record("b"), SPEC)], [])
    assert await store.get("b") is not None


async def test_closed_store_refuses(tmp_path: Path) -> None:
    async with open_store(tmp_path / "dsec.db") as store:
        pass
    with pytest.raises(StoreError):
        await store.add_events([event()])
    with pytest.raises(StoreError):
        await store.get("a")


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dsec.db"
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(StoreError, match="not a database"):
        async with open_store(path):
            pass


async def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dsec.db"
    async with open_store(path):
        pass
    connection = sqlite3.connect(path)
    connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.commit()
    connection.close()
    with pytest.raises(StoreError, match="newer release"):
        async with open_store(path):
            pass


async def test_a_batch_is_cheap(store: Store) -> None:
    """Guards against an accident, not a promise: the bound is far above what is measured (see dsec bench)."""
    start = time.perf_counter()
    for batch in range(10):
        items = [(record(f"b{batch}n{n}"), SPEC) for n in range(64)]
        await store.create(items, [event(about=r.id) for r, _ in items])
    assert (time.perf_counter() - start) / 1280 < 0.002
