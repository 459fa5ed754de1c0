"""Behaviour cases of area stdin."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator

import pytest
from tests.support.fixtures import BoxFactory
from tests.support.timing import Stopwatch, scaled
from tests.system.cases.kinds import case

import dsec


async def never() -> AsyncIterator[bytes]:
    """A stream that neither yields nor ends."""
    await asyncio.Event().wait()
    yield b""


@case("stdin-open-pipe-does-not-block")
async def test_stdin_open_pipe_does_not_block(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    with Stopwatch() as watch:
        result = await sandbox.run(["echo", "hi"], stdin=never(), timeout=10)
    assert (result.stdout, result.exit_code) == (b"hi\n", 0)
    watch.assert_below(2)
    with Stopwatch() as watch, pytest.raises(dsec.ExecTimeout):
        await sandbox.run(["sleep", "60"], stdin=never(), timeout=2)
    assert watch.seconds >= 2.0
    watch.assert_below(3.5)


@case("stdin-48mib-arrives")
async def test_stdin_48mib_arrives(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    for size in (0, 1, 65536, 1048576, 50331648):
        result = await sandbox.run("wc -c", stdin=b"a" * size, timeout=scaled(60))
        assert (result.text.strip(), result.exit_code) == (str(size), 0)


@case("stdin-echo-both-ways")
async def test_stdin_echo_both_ways(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    data = random.Random(8).randbytes(8 << 20)
    result = await sandbox.run("cat", stdin=data, timeout=60)
    assert hashlib.sha256(result.stdout).digest() == hashlib.sha256(data).digest()
    assert result.exit_code == 0
