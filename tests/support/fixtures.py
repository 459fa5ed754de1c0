"""Fixtures of the tests that use a real daemon: factories with unique names, torn down in reverse, a leak check around each test.

A failed teardown fails the test. A test that failed leaves its daemon's logs in `results/<test>/`.
"""

from __future__ import annotations

import re
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest
from tests.support.census import Census
from tests.support.daemon import CHECKOUT, Daemon, missing_capability
from tests.support.timing import scaled

import dsec

DAEMONS = pytest.StashKey[list[Daemon]]()
"""Daemons a test used, for the logs of a failure."""
SETTLE_S = 10.0
"""The kernel frees namespaces and loop devices in the background; so long may that take."""


class BoxFactory(Protocol):
    """Creates sandboxes that end with the test. Options are those of `AsyncClient.create`."""

    async def __call__(self, kind: str = "container", **options: Any) -> dsec.AsyncSandbox: ...


class HostName(Protocol):
    """Makes a path directly in the host's /tmp, unlike any other test's; what is there at the end is removed."""

    def __call__(self, stem: str) -> Path: ...


def results_folder(node: pytest.Item) -> Path:
    """Where a test may leave what helps to understand its failure."""
    return CHECKOUT / "results" / re.sub(r"[^\w.\-\[\]]+", "_", node.nodeid.removeprefix("tests/"))[-150:]


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One private daemon for this worker, shared by the tests that leave it alive."""
    if reason := missing_capability():
        pytest.skip(reason)
    instance = Daemon(tmp_path_factory.mktemp("dsec", numbered=True))
    try:
        instance.start()
        yield instance
    finally:
        instance.destroy()


@pytest.fixture
def fresh_daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Makes daemons that the test may kill. Each is started, and at the end nothing of it may be left."""
    if reason := missing_capability():
        pytest.skip(reason)
    made: list[Daemon] = []

    def make(**extra_env: str) -> Daemon:
        instance = Daemon(tmp_path / f"home{len(made)}", **extra_env)
        made.append(instance)
        request.node.stash.setdefault(DAEMONS, []).append(instance)
        instance.start()
        return instance

    yield make
    errors = []
    for instance in reversed(made):
        try:
            instance.destroy()
        except Exception as error:
            instance.save_logs(results_folder(request.node))
            errors.append(error)
    if errors:
        raise ExceptionGroup("daemons did not end clean", errors)


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[dsec.AsyncClient]:
    """A client of the worker's daemon."""
    async with daemon.client() as connected:
        yield connected


@pytest.fixture
async def box(client: dsec.AsyncClient) -> AsyncIterator[BoxFactory]:
    """Makes sandboxes on the worker's daemon."""
    async with AsyncExitStack() as stack:

        async def make(kind: str = "container", **options: Any) -> dsec.AsyncSandbox:
            sandbox = await client.create(kind, **options)
            stack.push_async_callback(sandbox.stop)
            return sandbox

        yield make


@pytest.fixture
def host_name() -> Iterator[HostName]:
    """Paths in the host's /tmp whose parent exists in sandboxes too, so that a planted link could lead to them."""
    made: list[Path] = []

    def make(stem: str) -> Path:
        made.append(Path("/tmp") / f"{stem}_{secrets.token_hex(6)}")
        return made[-1]

    yield make
    for path in made:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _settled(daemon: Daemon, before: Census) -> list[str]:
    """What leaked, once the kernel has had time to finish what it does in the background."""
    deadline = time.monotonic() + scaled(SETTLE_S)
    while leaks := daemon.take_census().leaks_since(before):
        if time.monotonic() > deadline:
            return leaks
        time.sleep(0.1)
    return []


@pytest.fixture(autouse=True)
def leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compare what the worker's daemon has in the kernel and on disk before and after a test that uses it."""
    if "daemon" not in request.fixturenames:
        yield
        return
    daemon: Daemon = request.getfixturevalue("daemon")
    request.node.stash.setdefault(DAEMONS, []).append(daemon)
    before = daemon.take_census()
    yield
    leaks = _settled(daemon, before)
    assert not leaks, "the test left something behind:\n  " + "\n  ".join(leaks)


def save_logs_of_failed(node: pytest.Item) -> None:
    """Keep the logs of all daemons that `node` used."""
    for instance in node.stash.get(DAEMONS, []):
        instance.save_logs(results_folder(node) / instance.instance)
