"""The SDK's contract runs over the async and the sync client, on the reference server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import dsec
from tests.contract.sdk.adapter import AsAsync
from tests.contract.sdk.reference_server import KEY, ReferenceServer, serve


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ReferenceServer]:
    folder = tmp_path / "boxes"
    folder.mkdir()
    state = ReferenceServer(folder)
    async with serve(state, tmp_path / "api.sock"):
        yield state


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"http+unix://{quote(str(tmp_path / 'api.sock'), safe='')}"


@pytest.fixture(params=["async", "sync"])
async def client(request: pytest.FixtureRequest, server: ReferenceServer, url: str) -> AsyncIterator[Any]:
    made: Any = dsec.AsyncClient(url, key=KEY) if request.param == "async" else AsAsync(dsec.Client(url, key=KEY))
    async with made:
        yield made


@pytest.fixture
async def box(client: Any) -> AsyncIterator[Any]:
    async with await client.create() as made:
        yield made
