"""Keys, the gate, and the first start."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.api.errors import NotFound, Unauthenticated
from dsec.api.ids import PrincipalId, ProjectId
from dsec.iam import Action, Principal, Resource, authorize, checked_project, new_key, open_iam, write_key_file
from dsec.iam.authorize import CACHE_S, Authenticator
from dsec.iam.keys import hash_key
from dsec.store import KeyRow, Store, open_store

ALICE = Principal(ProjectId("default"), PrincipalId("alice"))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(tmp_path / "dsec.db") as opened:
        yield opened


async def test_the_first_start_writes_a_key_only_its_owner_reads(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "api.key"
    gate = await open_iam(store, path)
    key = path.read_text().strip()
    assert path.stat().st_mode & 0o777 == 0o600
    assert key.startswith("dsec_")
    assert len(key) == 5 + 52
    assert (await gate.authenticate(key)).project == "default"
    again = await open_iam(store, path)
    assert path.read_text().strip() == key
    assert (await again.authenticate(key)).name == "admin"
    rows = await store.keys("default")
    assert len(rows) == 1
    assert key.encode() not in rows[0].hash
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


async def test_a_key_file_outlives_its_database(tmp_path: Path) -> None:
    path = tmp_path / "api.key"
    key = new_key()
    write_key_file(path, key)
    async with open_store(tmp_path / "other.db") as store:
        gate = await open_iam(store, path)
        assert (await gate.authenticate(key)).project == "default"


@pytest.mark.parametrize("key", [None, "", "wrong", "dsec_" + "a" * 52, "dsec_" + "a" * 10_000, "dsec_\x00", "dsec_é"])
async def test_wrong_keys(store: Store, tmp_path: Path, key: str | None) -> None:
    gate = await open_iam(store, tmp_path / "api.key")
    for _ in range(2):
        with pytest.raises(Unauthenticated):
            await gate.authenticate(key)


async def test_expiry_and_removal(store: Store) -> None:
    now = 1000.0
    gate = Authenticator(store, b"s" * 32, wall_clock=lambda: now)
    key = new_key()
    row = KeyRow(
        hash=hash_key(b"s" * 32, key),
        name="k",
        project="p",
        principal="a",
        created_at=0.0,
        expires_at=1000.0 + CACHE_S * 3,
    )
    await store.add_key(row)
    assert (await gate.authenticate(key)).project == "p"
    await store.remove_key("p", "k")
    assert (await gate.authenticate(key)).project == "p"
    now += CACHE_S + 1
    with pytest.raises(Unauthenticated, match="not known"):
        await gate.authenticate(key)
    await store.add_key(row)
    gate.forget()
    assert (await gate.authenticate(key)).project == "p"
    now += CACHE_S * 3
    with pytest.raises(Unauthenticated, match="expired"):
        await gate.authenticate(key)


def test_other_projects_things_do_not_exist() -> None:
    authorize(ALICE, Action.STOP, Resource("sandbox", "x", "default"))
    authorize(ALICE, Action.NODES, Resource("node", "x", None))
    with pytest.raises(NotFound):
        authorize(ALICE, Action.READ, Resource("sandbox", "x", "other"))
    assert checked_project(ALICE, None) == "default"
    assert checked_project(ALICE, "default") == "default"
    with pytest.raises(NotFound):
        checked_project(ALICE, "other")


async def test_the_gate_is_quick(store: Store, tmp_path: Path) -> None:
    """Guards against an accident: measured at 1-2 us, so the bound leaves room for a busy host."""
    gate = await open_iam(store, tmp_path / "api.key")
    key = (tmp_path / "api.key").read_text().strip()
    resource = Resource("sandbox", "x", "default")
    await gate.authenticate(key)
    start = time.perf_counter()
    for _ in range(2000):
        authorize(await gate.authenticate(key), Action.READ, resource)
    assert (time.perf_counter() - start) / 2000 < 100e-6
