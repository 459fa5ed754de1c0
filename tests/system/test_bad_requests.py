"""Bad requests: a 4xx, a stable code and a sentence that says what to do; never a 500, never a hang."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable
from typing import Any

import pytest
from tests.support import raw_http
from tests.support.daemon import Daemon
from tests.support.fixtures import BoxFactory
from tests.support.timing import Stopwatch

import dsec

pytestmark = [pytest.mark.system, pytest.mark.root]

UNKNOWN_ID = "aaaa" + "b" * 16

BAD_CREATES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown kind": ({"kind": "pod"}, "invalid_request"),
    "a kind of a later release": ({"kind": "microvm"}, "unsupported"),
    "unknown image": ({"image": "no-such-image:1"}, "not_found image_error"),
    "an image name that is a path": ({"image": "../../etc/passwd"}, "not_found image_error invalid_request"),
    "empty image": ({"image": ""}, "not_found image_error invalid_request"),
    "negative memory": ({"memory": -1}, "invalid_request"),
    "zero memory": ({"memory": 0}, "invalid_request"),
    "tiny memory": ({"memory": 4096}, "invalid_request"),
    "memory in words": ({"memory": "plenty"}, "invalid_request"),
    "memory as a list": ({"memory": []}, "invalid_request"),
    "memory beyond 64 bits": ({"memory": 1 << 70}, "invalid_request no_capacity"),
    "memory beyond the host": ({"memory": "100TiB"}, "invalid_request no_capacity"),
    "negative disk": ({"disk": -5}, "invalid_request"),
    "disk beyond the host": ({"disk": "10000TiB"}, "invalid_request no_capacity"),
    "no cpu": ({"cpus": 0}, "invalid_request"),
    "negative cpus": ({"cpus": -1.5}, "invalid_request"),
    "too many cpus": ({"cpus": 1e9}, "invalid_request no_capacity"),
    "cpus as text": ({"cpus": "two"}, "invalid_request"),
    "no processes": ({"pids": 0}, "invalid_request"),
    "negative pids": ({"pids": -1}, "invalid_request"),
    "unknown backing": ({"disk_backing": "tape"}, "invalid_request"),
    "unknown on_idle": ({"on_idle": "dance"}, "invalid_request"),
    "pause on idle": ({"on_idle": "pause"}, "unsupported"),
    "unknown policy": ({"policy": "no-such"}, "invalid_request unsupported not_found"),
    "network": ({"network": {"pypi": True}}, "unsupported"),
    "snapshot": ({"snapshot": "s"}, "unsupported"),
    "workspace": ({"workspace": "w"}, "unsupported"),
    "toolkits": ({"toolkits": ["t"]}, "unsupported"),
    "another project": ({"project": "theirs"}, "not_found permission_denied"),
    "negative idle timeout": ({"idle_timeout": -1}, "invalid_request"),
    "zero lifetime": ({"max_lifetime": 0}, "invalid_request"),
    "negative timeout": ({"timeout": -1}, "invalid_request"),
    "unknown field": ({"memroy": "1GiB"}, "invalid_request"),
    "label with a number": ({"labels": {"run": 7}}, "invalid_request"),
    "endless label": ({"labels": {"k": "v" * 100_000}}, "invalid_request"),
    "many labels": ({"labels": {f"k{n}": "v" for n in range(10_000)}}, "invalid_request"),
    "environment name with =": ({"env": {"A=B": "1"}}, "invalid_request"),
    "environment with NUL": ({"env": {"A": "a\0b"}}, "invalid_request"),
    "relative workdir": ({"workdir": "there"}, "invalid_request"),
    "user with a newline": ({"user": "root\nx"}, "invalid_request"),
    "long request id": ({"request_id": "r" * 10_000}, "invalid_request"),
}


def assert_refused(answer: raw_http.Answer, codes: str = "", *, status: int | None = None) -> None:
    """The answer is a helpful refusal with one of the codes."""
    assert 400 <= answer.status < 500 or (answer.status == 503 and "no_capacity" in codes), (
        answer.status,
        answer.body[:500],
    )
    body = answer.json
    assert set(body) >= {"code", "message"}
    assert len(body["message"]) > 10, body
    assert "Traceback" not in body["message"]
    if codes:
        assert body["code"] in codes.split(), body
    if status is not None:
        assert answer.status == status


@pytest.mark.parametrize("name", BAD_CREATES)
async def test_create_refuses(daemon: Daemon, name: str) -> None:
    fields, codes = BAD_CREATES[name]
    with Stopwatch() as watch:
        answer = await raw_http.request(
            daemon.paths.api_socket,
            "POST",
            "/v1/sandboxes",
            key=daemon.key,
            body=json.dumps({"timeout": 5, **fields}).encode(),
            timeout_s=20,
        )
    assert_refused(answer, codes)
    watch.assert_below(8)


@pytest.mark.parametrize("count", [0, -1, 1_000_000_000])
async def test_batch_refuses_odd_counts(daemon: Daemon, count: int) -> None:
    body = json.dumps({"count": count}).encode()
    answer = await raw_http.request(daemon.paths.api_socket, "POST", "/v1/sandboxes:batch", key=daemon.key, body=body)
    assert_refused(answer, "invalid_request quota_exceeded")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe\x00", b"[" * 100_000, b'{"memory": 1e999}', b'{"cpus": NaN}',
     b'{"env": {"A": "\xff"}}', b'{"kind": "container", "kind": ', b"\0" * 1000],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
async def test_malformed_bodies_are_refused(daemon: Daemon, body: bytes) -> None:
    for content_type in ("application/json", "application/msgpack", "text/plain", "application/xml", ""):
        if (content_type, body) in (("application/msgpack", b"[]"), ("application/msgpack", b"{")):
            continue  # as msgpack these bytes are small numbers followed by junk: covered by the others
        answer = await raw_http.request(
            daemon.paths.api_socket,
            "POST",
            "/v1/sandboxes",
            key=daemon.key,
            body=body,
            headers={"Content-Type": content_type},
        )
        if answer.status == 201:  # an empty body asks for the defaults
            assert body == b""
            await raw_http.request(
                daemon.paths.api_socket, "DELETE", f"/v1/sandboxes/{answer.json['id']}", key=daemon.key
            )
            continue
        assert_refused(answer)


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", "Bearer ", "Bearer wrong", "Basic Zm9vOmJhcg==", "Bearer " + "x" * 5000, "bearer \xff\xfe"],
)
async def test_a_wrong_key_is_unauthenticated(daemon: Daemon, authorization: str) -> None:
    for method, target in (("GET", "/v1/sandboxes"), ("POST", "/v1/sandboxes"), ("GET", f"/v1/sandboxes/{UNKNOWN_ID}"),
                           ("GET", "/v1/events"), ("GET", "/v1/nodes"), ("GET", "/metrics")):  # fmt: skip
        headers = {"Authorization": authorization} if authorization else {}
        answer = await raw_http.request(daemon.paths.api_socket, method, target, headers=headers)
        assert_refused(answer, "unauthenticated", status=401)
    with pytest.raises(dsec.Unauthenticated):
        async with dsec.AsyncClient(url=daemon.url, key="wrong") as client:
            await client.list()


async def test_health_and_openapi_need_no_key(daemon: Daemon) -> None:
    health = await raw_http.request(daemon.paths.api_socket, "GET", "/healthz")
    assert (health.status, health.json["status"]) == (200, "ok")
    document = await raw_http.request(daemon.paths.api_socket, "GET", "/openapi.json")
    assert document.status == 200
    assert document.json["openapi"].startswith("3.1")
    assert "/v1/sandboxes" in document.json["paths"]


@pytest.mark.parametrize(
    "sandbox_id", [UNKNOWN_ID, "x", "A" * 20, "..", "%2e%2e", "a" * 5000, "%00", "%ff", "' OR 1=1"]
)
async def test_unknown_and_foreign_ids_are_not_found(daemon: Daemon, sandbox_id: str) -> None:
    target = sandbox_id.replace(" ", "%20").replace("'", "%27")
    for method, tail, body in (
        ("GET", "", None),
        ("DELETE", "", None),
        ("GET", "/usage", None),
        ("POST", "/exec", b'{"argv": ["true"]}'),
        ("POST", "/processes", b'{"argv": ["true"]}'),
        ("GET", "/processes", None),
        ("GET", "/files?path=/etc/passwd", None),
        ("PUT", "/files?path=/x", b"data"),
        ("PATCH", "", b'{"idle_timeout": 5}'),
    ):
        answer = await raw_http.request(
            daemon.paths.api_socket, method, f"/v1/sandboxes/{target}{tail}", key=daemon.key, body=body
        )
        assert_refused(answer)
        assert answer.status in (400, 404, 405, 414, 431)


@pytest.mark.parametrize(
    ("body", "codes"),
    [
        ({}, "invalid_request"),
        ({"argv": []}, "invalid_request"),
        ({"argv": ["true"], "command": "true"}, "invalid_request"),
        ({"argv": ["a\0b"]}, "invalid_request command_not_started"),
        ({"argv": "true"}, "invalid_request"),
        ({"argv": ["true"], "timeout": -1}, "invalid_request"),
        ({"argv": ["true"], "timeout": "soon"}, "invalid_request"),
        ({"argv": ["true"], "output_limit": -1}, "invalid_request"),
        ({"argv": ["true"], "output_limit": "1TiB"}, "invalid_request"),
        ({"argv": ["true"], "env": {"": "x"}}, "invalid_request"),
        ({"argv": ["true"], "user": "no such user"}, "invalid_request command_not_started"),
        ({"argv": ["true"], "user": "99999999999"}, "invalid_request command_not_started"),
        ({"argv": ["true"], "user": "-1"}, "invalid_request command_not_started"),
        ({"argv": ["true"], "cwd": "a\0b"}, "invalid_request command_not_started"),
        ({"argv": ["true"], "pty": [24, 80]}, "unsupported"),
        ({"argv": ["x" * 200_000]}, "invalid_request command_not_started"),
        ({"command": "x" * 3_000_000}, "invalid_request command_not_started"),
        ({"argv": ["true"] * 200_000}, "invalid_request command_not_started"),
        ({"argv": ["true"], "no_such_field": 1}, "invalid_request"),
    ],
    ids=lambda value: repr(value)[:50],
)
async def test_exec_refuses(daemon: Daemon, box: BoxFactory, body: dict[str, Any], codes: str) -> None:
    sandbox = await box()
    target = f"/v1/sandboxes/{sandbox.id}/exec"
    raw = json.dumps(body).encode()
    answer = await raw_http.request(daemon.paths.api_socket, "POST", target, key=daemon.key, body=raw)
    assert_refused(answer, codes)
    assert (await sandbox.run("echo alive")).text == "alive\n"


@pytest.mark.timeout(120)
async def test_a_gigabyte_of_environment_is_refused_without_being_held(daemon: Daemon, box: BoxFactory) -> None:
    sandbox = await box()
    piece = b"x" * (1 << 20)
    head = b'{"kind":"container","argv":["true"],"env":{"A":"'

    for target in ("/v1/sandboxes", f"/v1/sandboxes/{sandbox.id}/exec"):
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_unix_connection(str(daemon.paths.api_socket))
            writer.write(
                f"POST {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {daemon.key}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(head) + (1 << 30) + 3}\r\n\r\n".encode()
            )
            writer.write(head)
            answer = asyncio.ensure_future(reader.readuntil(b"\r\n\r\n"))
            try:
                for _ in range(1024):
                    if answer.done():
                        break
                    writer.write(piece)
                    await writer.drain()
            except ConnectionError:
                pass
            status = int((await answer).split()[1])
            writer.close()
        assert 400 <= status < 500
    # The SDK says so too, with its own sentence, and need not send all of it.
    with pytest.raises((dsec.InvalidRequest, dsec.ConnectionFailed, dsec.CommandNotStarted)) as caught:
        await sandbox.run("true", env={"A": "x" * (1 << 28)})
    assert str(caught.value)
    assert (await sandbox.run("echo alive")).text == "alive\n"


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=-1", "limit=1001", "limit=x", "state=dancing", "label=novalue", "cursor=nonsense", "cursor=%ff",
     "limit=99999999999999999999", "nosuch=1"],
)  # fmt: skip
async def test_listing_refuses_bad_filters(daemon: Daemon, query: str) -> None:
    answer = await raw_http.request(daemon.paths.api_socket, "GET", f"/v1/sandboxes?{query}", key=daemon.key)
    assert_refused(answer, "invalid_request")


@pytest.mark.parametrize(
    ("method", "tail"),
    [
        ("GET", "files"),
        ("GET", "files?path="),
        ("GET", "files?path=/x&offset=-1"),
        ("GET", "files?path=/x&limit=x"),
        ("GET", "files?path=%00"),
        ("GET", "files?path=/a%00b"),
        ("PUT", "files?path=/x&mode=rwx"),
        ("PUT", "files?path=/x&mode=99999"),
        ("GET", "files:list?path=/&depth=-1"),
        ("GET", "files:list?path=/&depth=x"),
        ("POST", "files:move?path=/x"),
        ("POST", "files:chown?path=/etc/passwd&owner=no-such-user"),
        ("POST", "files:nosuchverb?path=/x"),
        ("PUT", "files:archive"),
        ("GET", "processes/nosuch"),
        ("POST", "processes/nosuch/signal"),
        ("GET", "processes/nosuch/wait?timeout=x"),
        ("POST", "pause"),
        ("POST", "fork"),
        ("GET", "nosuch"),
    ],
)
async def test_sub_resources_refuse(daemon: Daemon, box: BoxFactory, method: str, tail: str) -> None:
    sandbox = await box()
    body = b'{"signal": "TERM"}' if tail.endswith("signal") else b"x" if method != "GET" else None
    answer = await raw_http.request(
        daemon.paths.api_socket, method, f"/v1/sandboxes/{sandbox.id}/{tail}", key=daemon.key, body=body
    )
    assert_refused(answer)


@pytest.mark.parametrize("signal", ["DANCE", "", 0, -9, 65, 1 << 40, None, "9"])
async def test_odd_signals_are_refused(daemon: Daemon, box: BoxFactory, signal: object) -> None:
    sandbox = await box()
    process = await sandbox.start(["sleep", "60"])
    target = f"/v1/sandboxes/{sandbox.id}/processes/{process.id}/signal"
    body = json.dumps({"signal": signal}).encode()
    answer = await raw_http.request(daemon.paths.api_socket, "POST", target, key=daemon.key, body=body)
    if signal == "9" and answer.status == 200:
        return  # a number as text may be understood
    assert_refused(answer, "invalid_request")


def _huge_header(daemon: Daemon) -> bytes:
    return f"GET /v1/sandboxes HTTP/1.1\r\nHost: x\r\nX-Big: {'b' * 10_000_000}\r\n\r\n".encode()


def _many_headers(daemon: Daemon) -> bytes:
    lines = "".join(f"X-{number}: v\r\n" for number in range(100_000))
    return f"GET /v1/sandboxes HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode()


def _huge_target(daemon: Daemon) -> bytes:
    return f"GET /v1/sandboxes?label={'x' * 1_000_000} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def _bad_length(daemon: Daemon) -> bytes:
    return f"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {daemon.key}\r\nContent-Length: -5\r\n\r\n".encode()


def _two_lengths(daemon: Daemon) -> bytes:
    return (
        f"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {daemon.key}\r\n"
        "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}"
    ).encode()


def _bad_chunk(daemon: Daemon) -> bytes:
    return (
        f"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {daemon.key}\r\n"
        "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n"
    ).encode()


@pytest.mark.parametrize(
    "make",
    [_huge_header, _many_headers, _huge_target, _bad_length, _two_lengths, _bad_chunk,
     lambda _: b"\0\1\2\3\r\n\r\n", lambda _: b"GET\r\n\r\n", lambda _: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
     lambda _: b"BREW /v1/sandboxes HTTP/1.1\r\nHost: x\r\n\r\n", lambda _: b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n"],
)  # fmt: skip
async def test_what_is_hardly_http_is_refused(daemon: Daemon, make: Callable[[Daemon], bytes]) -> None:
    try:
        answer = await raw_http.exchange(daemon.paths.api_socket, make(daemon), timeout_s=10)
        assert 400 <= answer.status < 500
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # closing the connection is an answer too
    health = await raw_http.request(daemon.paths.api_socket, "GET", "/healthz")
    assert health.status == 200


async def test_methods_that_do_not_exist_are_refused(daemon: Daemon) -> None:
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        answer = await raw_http.request(daemon.paths.api_socket, method, "/v1/sandboxes", key=daemon.key)
        assert_refused(answer)
    answer = await raw_http.request(daemon.paths.api_socket, "GET", "/v2/sandboxes", key=daemon.key)
    assert_refused(answer, status=404)


@pytest.mark.parametrize("target", ["/v1/fncall", "/v1/jobs/x", "/v1/projects", "/v1/keys", "/v1/environments"])
async def test_collections_of_later_releases_say_so(daemon: Daemon, target: str) -> None:
    for method in ("GET", "POST"):
        answer = await raw_http.request(
            daemon.paths.api_socket, method, target, key=daemon.key, body=b"{}" if method == "POST" else None
        )
        assert_refused(answer, "unsupported")


async def test_slow_and_silent_clients_hold_nobody_up(daemon: Daemon, box: BoxFactory) -> None:
    sandbox = await box()
    writers = []
    for _ in range(50):
        _, writer = await asyncio.open_unix_connection(str(daemon.paths.api_socket))
        writer.write(b"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n")
        writers.append(writer)
    with Stopwatch() as watch:
        assert (await sandbox.run("echo here")).text == "here\n"
    watch.assert_below(2)
    for writer in writers:
        writer.close()


async def test_a_message_names_what_to_do(daemon: Daemon, client: dsec.AsyncClient) -> None:
    with pytest.raises(dsec.DsecError) as caught:
        await client.create("container", image=f"nothing-{secrets.token_hex(3)}")
    assert "image" in str(caught.value)
    with pytest.raises(dsec.InvalidRequest) as negative:
        await client.create("container", memory=-1)
    assert "memory" in str(negative.value)
    with pytest.raises(dsec.NotFound) as missing:
        await client.get(UNKNOWN_ID)
    assert UNKNOWN_ID in str(missing.value)
