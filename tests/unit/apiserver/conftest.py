"""A whole control plane over a peer edge, served on a unix socket and TCP."""

from __future__ import annotations

import io
import json
import shutil
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.unit.apiserver.peer import PeerEdge

from dsec.api.errors import ImageError
from dsec.api.token import TokenKey
from dsec.apiserver.metrics import Metrics
from dsec.apiserver.service import Service, StoreSink
from dsec.apiserver.v1 import ApiServer
from dsec.bus import LocalBus, serve_edge
from dsec.iam import hash_key, open_iam
from dsec.images.catalog import Environment
from dsec.placement import Placer
from dsec.store import KeyRow, Store, open_store
from dsec.store.migrate import upgrade

TOKEN_KEY = b"k" * 32


class OneImage:
    """A catalog with debian:12."""

    def resolve(self, name: str, *, project: str | None = None) -> Environment:
        if name != "debian:12":
            raise ImageError(f"no image {name!r}; there are: debian:12", image=name)
        return Environment(name=name, layers=("sha256:1",), created_at=1.0, env={"IMAGE": "1"})

    def list(self, *, project: str | None = None) -> Sequence[Environment]:
        return [self.resolve("debian:12")]

    def size(self, environment: Environment) -> int:
        return 7


@dataclass
class Plane:
    """What a test needs."""

    store: Store
    edge: PeerEdge
    service: Service
    http: aiohttp.ClientSession
    other: aiohttp.ClientSession
    """A session with another project's key."""
    key: str
    socket: Path
    port: int
    bus: LocalBus

    async def json(self, method: str, path: str, *, status: int = 200, **more: Any) -> Any:
        """Make a request with a JSON answer of that status."""
        if isinstance(more.get("data"), bytes):
            more["data"] = io.BytesIO(more["data"])  # aiohttp warns of large bodies otherwise
        if "json" in more:
            more["data"] = io.BytesIO(json.dumps(more.pop("json")).encode())
            more["headers"] = {"Content-Type": "application/json"} | more.get("headers", {})
        async with self.http.request(method, f"http://dsec{path}", **more) as response:
            assert response.status == status, (response.status, await response.text())
            return await response.json()

    async def box(self, **fields: Any) -> str:
        """Create a sandbox; its id."""
        return str((await self.json("POST", "/v1/sandboxes", status=201, json=fields))["id"])


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh database: migrating one for each test would take longer than the tests."""
    path = tmp_path_factory.mktemp("store") / "dsec.db"
    upgrade(path)
    return path


@pytest.fixture
async def plane(tmp_path: Path, migrated: Path) -> AsyncIterator[Plane]:
    shutil.copy(migrated, tmp_path / "dsec.db")
    async with open_store(tmp_path / "dsec.db") as store:
        auth = await open_iam(store, tmp_path / "api.key")
        key = (tmp_path / "api.key").read_text().strip()
        bus, metrics = LocalBus(), Metrics()
        sink = StoreSink(store, bus, metrics)
        edge = PeerEdge("aaaa", tmp_path / "boxes", sink, TOKEN_KEY)
        secret = await store.meta("iam.secret")
        assert secret is not None
        other_key = "dsec_other"
        await store.add_key(
            KeyRow(hash=hash_key(secret, other_key), name="o", project="other", principal="eve", created_at=1.0)
        )
        service = Service(
            store=store,
            bus=bus,
            auth=auth,
            placement=Placer(bus, ["aaaa"]),
            images=OneImage(),
            planes={"aaaa": edge},
            tokens=TokenKey(TOKEN_KEY),
            metrics=metrics,
            records=sink,
        )
        path = tmp_path / "api.sock"
        with socket.create_server(("127.0.0.1", 0)) as tcp:
            port = tcp.getsockname()[1]
            async with serve_edge(bus, "aaaa", edge), service, ApiServer(service, socket_path=path, tcp=tcp):
                async with _session(path, key) as http, _session(path, other_key) as other:
                    yield Plane(store, edge, service, http, other, key, path, port, bus)
                for box in edge.alive():
                    await edge.stop(_stop(box.record.id))
                await edge.aclose()


def _stop(name: str) -> Any:
    from dsec.api.control import StopSandboxes

    return StopSandboxes(ids=(name,))


def _session(path: Path, key: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(path=str(path), limit=0), headers={"Authorization": f"Bearer {key}"}
    )
