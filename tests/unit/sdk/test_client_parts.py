"""The pure parts: generated code, calls, endpoints, the lean HTTP client, the portal, public names."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import dsec
from dsec.api import types as t
from dsec.sdk import _calls, _endpoint
from dsec.sdk._http import LostError, NotConnectedError, Pool
from dsec.sdk._portal import Portal

ROOT = Path(__file__).resolve().parents[3]


def test_the_sync_twin_is_generated_from_the_source() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "gen_sync.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["Client", "Sandbox", "Process", "Files", "Images", "Nodes", "Events"])
def test_both_twins_have_the_same_methods_and_parameters(name: str) -> None:
    sync, source = getattr(dsec, name), getattr(dsec, f"Async{name}")
    for method, value in vars(source).items():
        if method.startswith("_") or not callable(value):
            continue
        twin = getattr(sync, "close" if method == "aclose" else method)
        assert list(inspect.signature(twin).parameters) == list(inspect.signature(value).parameters), method
        assert twin.__doc__


def test_every_public_name_is_there_and_documented() -> None:
    for name in dsec.__all__:
        value = getattr(dsec, name)
        assert name == "__version__" or value.__doc__, name
    with pytest.raises(AttributeError):
        _ = dsec.nothing_of_the_kind


def test_importing_dsec_loads_no_http_client() -> None:
    code = "import sys, dsec; dsec.Client; print('aiohttp' in sys.modules, 'typer' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_calls_are_encoded_as_the_table_says() -> None:
    call = _calls.write_file("abc", "/a b/\udcff?&", b"x", mode=0o644, append=False, parents=True, user=None)
    assert call.target == "/v1/sandboxes/abc/files?path=%2Fa%20b%2F%FF%3F%26&mode=0644&parents=true"
    assert call.repeatable
    assert not _calls.write_file("abc", "/a", b"x", mode=None, append=True, parents=True, user=None).repeatable
    assert not _calls.write_file("abc", "/a", None, mode=None, append=False, parents=True, user=None).repeatable
    assert not _calls.run("abc", t.ExecRequest(argv=("true",))).repeatable
    assert _calls.run("abc", t.ExecRequest(argv=("true",), request_id="r1")).repeatable
    assert _calls.get("a/../b").target == "/v1/sandboxes/a%2F..%2Fb"
    listing = _calls.list_sandboxes(labels={"a": "b=c"}, state=None, job=None, limit=5, cursor=None)
    assert listing.target == "/v1/sandboxes?label=a%3Db%3Dc&limit=5"


def test_errors_come_back_as_their_classes() -> None:
    body = dsec.FileNotFound("no /x", path="/x", errno=2).body()
    import msgspec

    error = _calls.error_of(404, "application/msgpack", msgspec.msgpack.encode(body))
    assert isinstance(error, FileNotFoundError)
    assert (error.errno, error.filename) == (2, "/x")
    assert isinstance(
        _calls.error_of(404, "application/json; charset=utf-8", msgspec.json.encode(body)), dsec.FileNotFound
    )
    assert isinstance(_calls.error_of(502, "text/html", b"<html>"), dsec.InternalError)


def test_endpoints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSEC_HOME", str(tmp_path))
    for variable in ("DSEC_URL", "DSEC_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(dsec.ConnectionFailed, match="dsec up"):
        _endpoint.resolve(None, None)
    with pytest.raises(dsec.Unauthenticated, match="DSEC_API_KEY"):
        _endpoint.resolve("http://host:1", None)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "api.key").write_text("dsec_k\n")
    local = _endpoint.resolve(None, None)
    assert local.key == "dsec_k"
    assert str(local.socket).endswith("/api.sock")
    assert _endpoint.resolve("http+unix://%2Frun%2Fa.sock", "k").socket == "/run/a.sock"
    assert _endpoint.resolve("unix:///run/a.sock", "k").socket == "/run/a.sock"
    assert _endpoint.resolve("https://host/prefix/", "k").base == "https://host/prefix"
    monkeypatch.setenv("DSEC_URL", "http://other:5")
    monkeypatch.setenv("DSEC_API_KEY", "k2")
    assert (_endpoint.resolve(None, None).base, _endpoint.resolve(None, None).key) == ("http://other:5", "k2")
    for wrong in ("ftp://x", "host:80", "http://"):
        with pytest.raises(dsec.InvalidRequest):
            _endpoint.resolve(wrong, "k")


ANSWERS = [
    (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Type: a/b\r\n\r\nhello", (200, "a/b", b"hello")),
    (b"HTTP/1.1 404 Not Found\r\ncontent-length:0\r\n\r\n", (404, "", b"")),
    (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n", (204, "", b"")),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n", (200, "", b"abcde")),
]


@asynccontextmanager
async def _served(tmp_path: Path, data: bytes, size: int) -> AsyncIterator[Pool]:
    """A server that answers every request with `data`, in pieces of `size`; a truncated answer ends its connection."""
    handlers: set[asyncio.Task[Any]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                for start in range(0, len(data), size):
                    writer.write(data[start : start + size])
                    await writer.drain()
                    await asyncio.sleep(0)
                if b"Content-Length: 50" in data:
                    break
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    path = str(tmp_path / "s")
    server = await asyncio.start_unix_server(answer, path)
    pool = Pool("http://dsec", path, {"A": "b"})
    try:
        yield pool
    finally:
        pool.close()
        server.close()
        if handlers:
            await asyncio.wait(handlers, timeout=5)


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(("data", "expected"), ANSWERS)
async def test_answers_in_any_pieces(tmp_path: Path, data: bytes, expected: Any, size: int) -> None:
    async with _served(tmp_path, data, size) as pool:
        for _ in range(3):
            answer = await pool.request("GET", "/", None, {})
            assert (answer.status, answer.content_type, answer.body) == expected


@pytest.mark.parametrize("data", [b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort", b"nonsense\r\n\r\n"])
async def test_a_broken_answer_is_a_lost_connection(tmp_path: Path, data: bytes) -> None:
    async with _served(tmp_path, data, 1000) as pool:
        with pytest.raises(LostError):
            await pool.request("GET", "/", None, {})


async def test_no_server_is_not_connected(tmp_path: Path) -> None:
    with pytest.raises(NotConnectedError):
        await Pool("http://dsec", str(tmp_path / "none"), {}).request("GET", "/", None, {})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(NotConnectedError):
            await Pool(f"http://127.0.0.1:{taken.getsockname()[1]}", None, {}).request("GET", "/", None, {})


async def _closer() -> None:
    return


def test_the_portal_runs_raises_and_closes() -> None:
    before = threading.active_count()
    portal = Portal(_closer)

    async def fail() -> None:
        raise KeyError("x")

    async def numbers() -> AsyncIterator[int]:
        for number in range(3):
            yield number

    assert portal.run(asyncio.sleep(0, 5)) == 5
    with pytest.raises(KeyError):
        portal.run(fail())
    assert list(portal.iterate(numbers(), str)) == ["0", "1", "2"]
    portal.close()
    portal.close()
    with pytest.raises(dsec.ConnectionFailed):
        portal.run(asyncio.sleep(0))
    assert threading.active_count() == before


def test_leaving_an_iteration_closes_it() -> None:
    portal, closed = Portal(_closer), []

    async def numbers() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.append(True)

    for _ in portal.iterate(numbers(), int):
        break
    assert closed == [True]
    portal.close()


def test_a_portal_nobody_holds_is_closed() -> None:
    before = threading.active_count()
    portal = Portal(_closer)
    portal.run(asyncio.sleep(0))
    del portal
    assert threading.active_count() == before


def test_ctrl_c_cancels_the_call_and_waits_for_its_clean_up() -> None:
    portal, undone, running = Portal(_closer), [], threading.Event()

    async def slow() -> None:
        try:
            running.set()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02)
            undone.append(True)

    def interrupt() -> None:
        running.wait(5)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        portal.run(slow())
    assert undone == [True]
    portal.close()


def test_signatures_carry_documentation_of_limits() -> None:
    text = dsec.AsyncSandbox.run.__doc__ or ""
    for word in ("seconds", "bytes", "Raises ExecTimeout", "Cancelled"):
        assert re.search(word, text), word
