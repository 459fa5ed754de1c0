"""The HTTP table of docs/http.md as pure functions: each returns the call to make. No I/O here.

A call is `repeatable` if making it twice has the effect of making it once: by its nature, or because it carries a request id.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from dsec.api import types as t
from dsec.api.errors import DsecError, ErrorBody, InternalError, InvalidRequest, from_body
from dsec.api.ids import random_base32

T = TypeVar("T")

MSGPACK = "application/msgpack"
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request. `target` is path and query, percent-encoded; `decoder` None: the answer is bytes or nothing of interest."""

    method: str
    target: str
    decoder: msgspec.msgpack.Decoder[T] | None = None
    body: bytes | None = None
    repeatable: bool = False
    headers: dict[str, str] = field(default_factory=dict)


_RECORD = msgspec.msgpack.Decoder(t.SandboxRecord)
_PAGE = msgspec.msgpack.Decoder(t.SandboxPage)
_STOPPED = msgspec.msgpack.Decoder(t.StopResponse)
_USAGE = msgspec.msgpack.Decoder(t.Usage)
_EXEC = msgspec.msgpack.Decoder(t.ExecResponse)
_PROCESS = msgspec.msgpack.Decoder(t.ProcessInfo)
_PROCESSES = msgspec.msgpack.Decoder(t.ProcessList)
_ENTRY = msgspec.msgpack.Decoder(t.FileEntry)
_ENTRIES = msgspec.msgpack.Decoder(t.FileList)
_WRITTEN = msgspec.msgpack.Decoder(t.FileWritten)
_REPORT = msgspec.msgpack.Decoder(t.ArchiveReport)
_EVENTS = msgspec.msgpack.Decoder(t.EventPage)
_IMAGES = msgspec.msgpack.Decoder(t.ImageList)
_NODES = msgspec.msgpack.Decoder(t.NodeList)
_BATCH_ITEM = msgspec.json.Decoder(t.BatchItem)
_EVENT_LINE = msgspec.json.Decoder(t.Event)


def new_request_id() -> str:
    """A fresh request id: 100 random bits."""
    return "r" + random_base32(20)


def encode(value: object) -> bytes:
    """`value` as msgpack. Raises InvalidRequest for what cannot travel, such as text with lone surrogates."""
    try:
        return _encode(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"the request cannot be sent: {error}") from error


def _query(**values: Any) -> str:
    """The query string of what is set; text is encoded as file names are (surrogates stand for raw bytes)."""
    pairs = []
    for name, value in values.items():
        if value is None:
            continue
        text = str(value).lower() if isinstance(value, bool) else str(value)
        pairs.append(f"{name}={quote(text.encode('utf-8', 'surrogateescape'), safe='')}")
    return "?" + "&".join(pairs) if pairs else ""


def _key(request_id: str) -> dict[str, str]:
    return {"Idempotency-Key": request_id}


def create(spec: t.CreateSandbox) -> Call[t.SandboxRecord]:
    """Create one sandbox."""
    return Call("POST", "/v1/sandboxes", _RECORD, encode(spec), repeatable=True)


def create_batch(batch: t.CreateBatch) -> Call[t.BatchItem]:
    """Create many; the answer is a stream of lines for `batch_item`."""
    return Call("POST", "/v1/sandboxes:batch", None, encode(batch), repeatable=True)


def batch_item(line: bytes) -> t.BatchItem:
    """One line of a batch's answer."""
    return _BATCH_ITEM.decode(line)


def stop_many(request: t.StopRequest) -> Call[t.StopResponse]:
    """Stop several."""
    return Call("POST", "/v1/sandboxes:stop", _STOPPED, encode(request), repeatable=True)


def stop(sandbox_id: str) -> Call[t.SandboxRecord]:
    """Stop one."""
    return Call("DELETE", f"/v1/sandboxes/{quote(sandbox_id, safe='')}", _RECORD, repeatable=True)


def get(sandbox_id: str) -> Call[t.SandboxRecord]:
    """Fetch one record."""
    return Call("GET", f"/v1/sandboxes/{quote(sandbox_id, safe='')}", _RECORD, repeatable=True)


def list_sandboxes(
    *, labels: dict[str, str], state: str | None, job: str | None, limit: int, cursor: str | None
) -> Call[t.SandboxPage]:
    """Fetch one page of records."""
    pairs = [("label", f"{name}={value}") for name, value in labels.items()]
    pairs += [
        (name, value) for name, value in (("state", state), ("job", job), ("cursor", cursor)) if value is not None
    ]
    return Call("GET", "/v1/sandboxes?" + urlencode([*pairs, ("limit", str(limit))]), _PAGE, repeatable=True)


def set_timeout(sandbox_id: str, update: t.TimeoutUpdate) -> Call[t.SandboxRecord]:
    """Change TTLs."""
    return Call("PATCH", f"/v1/sandboxes/{sandbox_id}", _RECORD, encode(update), repeatable=True)


def usage(sandbox_id: str) -> Call[t.Usage]:
    """Fetch usage."""
    return Call("GET", f"/v1/sandboxes/{sandbox_id}/usage", _USAGE, repeatable=True)


def run(sandbox_id: str, request: t.ExecRequest) -> Call[t.ExecResponse]:
    """Run a command to its end."""
    return Call(
        "POST", f"/v1/sandboxes/{sandbox_id}/exec", _EXEC, encode(request), repeatable=request.request_id is not None
    )


def start(sandbox_id: str, request: t.ExecRequest) -> Call[t.ProcessInfo]:
    """Start a process."""
    return Call(
        "POST",
        f"/v1/sandboxes/{sandbox_id}/processes",
        _PROCESS,
        encode(request),
        repeatable=request.request_id is not None,
    )


def processes(sandbox_id: str) -> Call[t.ProcessList]:
    """List processes."""
    return Call("GET", f"/v1/sandboxes/{sandbox_id}/processes", _PROCESSES, repeatable=True)


def process(sandbox_id: str, process_id: str) -> Call[t.ProcessInfo]:
    """Fetch one process."""
    return Call("GET", f"/v1/sandboxes/{sandbox_id}/processes/{quote(process_id, safe=':')}", _PROCESS, repeatable=True)


def wait(sandbox_id: str, process_id: str, *, seconds: float) -> Call[t.ProcessInfo]:
    """Wait for a process's end, at most `seconds`."""
    target = f"/v1/sandboxes/{sandbox_id}/processes/{quote(process_id, safe=':')}/wait?timeout={seconds:.3f}"
    return Call("GET", target, _PROCESS, repeatable=True)


def signal(sandbox_id: str, process_id: str, request: t.SignalRequest, *, repeatable: bool = False) -> Call[Any]:
    """Signal a process."""
    target = f"/v1/sandboxes/{sandbox_id}/processes/{quote(process_id, safe=':')}/signal"
    return Call("POST", target, None, encode(request), repeatable=repeatable)


def stream(sandbox_id: str, process_id: str, *, since: tuple[int, int], follow: bool) -> str:
    """The target of a process's WebSocket."""
    query = _query(since_stdout=since[0], since_stderr=since[1], follow=follow)
    return f"/v1/sandboxes/{sandbox_id}/processes/{quote(process_id, safe=':')}/stream{query}"


def read_file(sandbox_id: str, path: str, *, offset: int, limit: int | None, user: str | None) -> Call[Any]:
    """Read a file; the answer is its bytes."""
    query = _query(path=path, offset=offset or None, limit=limit, user=user)
    return Call("GET", f"/v1/sandboxes/{sandbox_id}/files{query}", None, repeatable=True)


def write_file(
    sandbox_id: str, path: str, body: bytes | None, *, mode: int | None, append: bool, parents: bool, user: str | None
) -> Call[t.FileWritten]:
    """Write a file; `body` None: the transport streams it."""
    octal = None if mode is None else f"{mode:04o}"
    query = _query(path=path, mode=octal, append=append or None, parents=parents, user=user)
    target = f"/v1/sandboxes/{sandbox_id}/files{query}"
    # A streamed body is used up by the first try.
    return Call(
        "PUT",
        target,
        _WRITTEN,
        body,
        repeatable=not append and body is not None,
        headers={**_key(new_request_id()), "Content-Type": "application/octet-stream"},
    )


def stat(sandbox_id: str, path: str, *, user: str | None) -> Call[t.FileEntry]:
    """Describe a file."""
    query = _query(path=path, user=user)
    return Call("GET", f"/v1/sandboxes/{sandbox_id}/files:stat{query}", _ENTRY, repeatable=True)


def list_files(sandbox_id: str, path: str, *, depth: int, user: str | None) -> Call[t.FileList]:
    """List a directory."""
    query = _query(path=path, depth=depth, user=user)
    return Call("GET", f"/v1/sandboxes/{sandbox_id}/files:list{query}", _ENTRIES, repeatable=True)


def change_files(sandbox_id: str, verb: str, path: str, *, repeatable: bool, **options: Any) -> Call[Any]:
    """`mkdir`, `remove`, `move`, `chmod` or `chown`."""
    target = f"/v1/sandboxes/{sandbox_id}/files:{verb}{_query(path=path, **options)}"
    return Call("POST", target, None, b"", repeatable=repeatable, headers=_key(new_request_id()))


def get_archive(sandbox_id: str, path: str, *, user: str | None) -> Call[Any]:
    """Fetch a tree as a tar stream."""
    return Call("GET", f"/v1/sandboxes/{sandbox_id}/files:archive{_query(path=path, user=user)}", None, repeatable=True)


def put_archive(sandbox_id: str, path: str, *, user: str | None) -> Call[t.ArchiveReport]:
    """Store a tar stream's entries under `path`."""
    target = f"/v1/sandboxes/{sandbox_id}/files:archive{_query(path=path, user=user)}"
    return Call("PUT", target, _REPORT, None, headers={**_key(new_request_id()), "Content-Type": "application/x-tar"})


def events(
    *, since: int | None, sandbox_id: str | None, event_type: str | None, limit: int | None, follow: bool
) -> Call[t.EventPage]:
    """Fetch a page of events, or with `follow` a stream of lines for `event`."""
    query = _query(since=since, sandbox=sandbox_id, type=event_type, limit=limit, follow=follow or None)
    return Call("GET", f"/v1/events{query}", _EVENTS, repeatable=True)


def event(line: bytes) -> t.Event:
    """One line of a followed event stream."""
    return _EVENT_LINE.decode(line)


def images() -> Call[t.ImageList]:
    """List images."""
    return Call("GET", "/v1/images", _IMAGES, repeatable=True)


def nodes() -> Call[t.NodeList]:
    """List nodes."""
    return Call("GET", "/v1/nodes", _NODES, repeatable=True)


def decode(call: Call[T], raw: bytes) -> T:
    """The answer of a call that succeeded."""
    assert call.decoder is not None
    try:
        return call.decoder.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise InternalError(f"the server's answer to {call.method} {call.target} cannot be read: {error}") from error


def error_of(status: int, content_type: str, raw: bytes) -> DsecError:
    """The error that an answer with `status` >= 400 stands for."""
    try:
        if content_type.startswith(MSGPACK):
            body = msgspec.msgpack.decode(raw, type=ErrorBody)
        else:
            body = msgspec.json.decode(raw, type=ErrorBody)
    except (msgspec.DecodeError, msgspec.ValidationError):
        text = raw[:200].decode("utf-8", "replace")
        return InternalError(f"the server answered with status {status}: {text}", status=status)
    return from_body(body)
