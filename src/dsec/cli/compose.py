"""Wires the parts of a one-host dsec: store, keys, bus, edge, placement, service. Serving HTTP is `up`'s."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from dsec.api.errors import InternalError, Unsupported
from dsec.api.ids import EDGE_CODE_CHARS, EdgeCode, random_base32
from dsec.api.token import KEY_BYTES, TokenKey
from dsec.apiserver.metrics import Metrics
from dsec.apiserver.service.records import StoreSink
from dsec.apiserver.service.service import Service
from dsec.bus import LocalBus, serve_edge
from dsec.edge.config import EdgeConfig
from dsec.edge.edge import Edge
from dsec.iam import open_iam
from dsec.images import Catalog
from dsec.paths import Paths
from dsec.placement import Placer
from dsec.store import StoreError, open_store

_EDGE_CODE = "edge.code"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What serves requests and what runs sandboxes."""

    service: Service
    edge: Edge


@asynccontextmanager
async def composed(paths: Paths) -> AsyncIterator[Parts]:
    """Start the parts; sandboxes of an earlier daemon are taken over. Leaving it lets go of them; `edge.drain` ends them first.

    Raises Unsupported (the programs are not built), Conflict (another daemon serves the home), InternalError (its database cannot be used), and what the edge raises.
    """
    _check_programs(paths)
    for folder in (paths.home, paths.state_dir, paths.run_dir):
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    paths.state_dir.chmod(0o700)
    async with AsyncExitStack() as stack:
        try:
            store = await stack.enter_async_context(open_store(paths.database))
        except StoreError as error:
            raise InternalError(f"{error}: restore {paths.database} from a backup, or move it away") from error
        authenticator = await open_iam(store, paths.api_key_file)
        code = EdgeCode((await store.claim_meta(_EDGE_CODE, random_base32(EDGE_CODE_CHARS).encode())).decode())
        # Tokens live a minute and never leave this process: a fresh key at each start is enough.
        token_key = secrets.token_bytes(KEY_BYTES)
        bus, metrics, catalog = LocalBus(), Metrics(), Catalog(paths.images_dir)
        config = EdgeConfig(code=code, paths=paths, token_key=token_key)
        sink = StoreSink(store, bus, metrics)
        async with Edge(config, sink=sink, layer_path=catalog.layers.path) as edge, serve_edge(bus, code, edge):
            service = Service(
                store=store,
                bus=bus,
                auth=authenticator,
                placement=Placer(bus, [code]),
                images=catalog,
                planes={code: edge},
                tokens=TokenKey(token_key),
                metrics=metrics,
                records=sink,
            )
            async with service:
                yield Parts(service=service, edge=edge)


def _check_programs(paths: Paths) -> None:
    for path in (paths.bin_dir / "dsec-launch", paths.bin_dir / "dsec-guest", paths.seccomp_blob):
        if not path.exists():
            raise Unsupported(f"{path} is not there: run `make setup` in the checkout")
