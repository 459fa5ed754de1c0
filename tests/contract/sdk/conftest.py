"""The SDK's contract runs over the async and the sync client, on the reference server and on the real one.

Tests that plan faults, or look behind the API, take `server` and have the reference server only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.contract.sdk.adapter import AsAsync
from tests.contract.sdk.reference_server import KEY, ReferenceServer, serve

import dsec


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "place" in metafunc.fixturenames:
        names = ["reference"] if "server" in metafunc.fixturenames else ["reference", "real"]
        marks = {"real": [pytest.mark.system, pytest.mark.root]}
        metafunc.parametrize("place", [pytest.param(name, marks=marks.get(name, [])) for name in names])


@pytest.fixture
def state(tmp_path: Path) -> ReferenceServer:
    folder = tmp_path / "boxes"
    folder.mkdir()
    return ReferenceServer(folder)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"http+unix://{quote(str(tmp_path / 'api.sock'), safe='')}"


@pytest.fixture
async def address(
    request: pytest.FixtureRequest, place: str, url: str, state: ReferenceServer, tmp_path: Path
) -> AsyncIterator[tuple[str, str]]:
    if place == "real":
        daemon = request.getfixturevalue("daemon")
        yield daemon.url, daemon.key
    else:
        async with serve(state, tmp_path / "api.sock"):
            yield url, KEY


@pytest.fixture
def server(address: tuple[str, str], state: ReferenceServer) -> ReferenceServer:
    return state


@pytest.fixture(params=["async", "sync"])
async def client(request: pytest.FixtureRequest, address: tuple[str, str]) -> AsyncIterator[Any]:
    where, key = address
    made: Any = dsec.AsyncClient(where, key=key) if request.param == "async" else AsAsync(dsec.Client(where, key=key))
    async with made:
        yield made


@pytest.fixture
async def box(client: Any) -> AsyncIterator[Any]:
    async with await client.create(memory="256MiB", disk="64MiB", disk_backing="tmpfs") as made:
        yield made
