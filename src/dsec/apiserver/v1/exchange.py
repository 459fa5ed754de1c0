"""One request and its answer: bodies and queries in, typed; answers and errors out, in the client's encoding."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec
from aiohttp import web
from aiohttp.http import HttpVersion11
from multidict import CIMultiDict

from dsec.api.errors import DsecError, InvalidRequest, NoCapacity, Unauthenticated
from dsec.apiserver.v1.route import Route

if TYPE_CHECKING:
    from dsec.apiserver.service import Service
    from dsec.iam import Principal

T = TypeVar("T")

JSON = "application/json"
MSGPACK = "application/msgpack"
BYTES = "application/octet-stream"
NDJSON = "application/x-ndjson"
STALL_S = 120.0
"""A client that neither sends the next piece of its body nor takes the next of an answer for so long is given up."""
_MAX_INT = 1 << 63

_encode_json = msgspec.json.Encoder().encode
_encode_msgpack = msgspec.msgpack.Encoder().encode


class BodyTooLarge(InvalidRequest):
    """The body is larger than this route takes."""

    http_status = 413


class UnsupportedMedia(InvalidRequest):
    """The body is in an encoding that this route does not take."""

    http_status = 415


class StalledClient(InvalidRequest):
    """The client stopped sending its body."""

    http_status = 408


class Exchange:
    """What a handler sees of one request."""

    __slots__ = ("_query", "principal", "request", "route", "service", "values")

    def __init__(
        self,
        service: Service,
        request: web.BaseRequest,
        route: Route,
        values: list[str],
        principal: Principal,
        raw_query: str,
    ) -> None:
        self.service = service
        self.request = request
        self.route = route
        self.values = values
        """The variable segments of the path."""
        self.principal = principal
        self._query = _parse_query(raw_query, route) if raw_query else {}

    # What the client sent

    async def body(self, kind: type[T]) -> T:
        """The body, decoded and checked against the route's request type. Raises InvalidRequest that names the bad field."""
        raw = await read_body(self.request, self.route.body_limit)
        media = self.request.headers.get("Content-Type", JSON).partition(";")[0].strip().lower()
        decoder: Any
        if media == MSGPACK:
            decoder = self.route.msgpack_decoder
        elif media in (JSON, BYTES, "") or media.endswith("+json"):
            decoder, raw = self.route.json_decoder, raw or b"{}"
        else:
            raise UnsupportedMedia(f"Content-Type must be {JSON} or {MSGPACK}, not {media[:64]!r}")
        try:
            value = decoder.decode(raw)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"the request does not fit {kind.__name__}: {error}{_known(kind, error)}") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"the body is not valid {media.rpartition('/')[2] or 'json'}: {error}") from error
        assert isinstance(value, kind)
        return value

    def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes, for streaming. Raises StalledClient."""
        return _pieces(self.request)

    async def drain_empty(self) -> None:
        """Take in the body of a request that needs none."""
        await read_body(self.request, 1 << 16)

    def request_id(self) -> str | None:
        """The `Idempotency-Key` header."""
        return self.request.headers.get("Idempotency-Key")

    def raw(self, name: str) -> bytes | None:
        """A query parameter's bytes."""
        values = self._query.get(name)
        return values[-1] if values else None

    def required(self, name: str) -> bytes:
        """A query parameter that must be there."""
        value = self.raw(name)
        if value is None:
            raise InvalidRequest(f"the query parameter {name!r} is missing")
        return value

    def text(self, name: str) -> str | None:
        """A query parameter as text."""
        value = self.raw(name)
        return None if value is None else _text(name, value)

    def texts(self, name: str) -> list[str]:
        """All values of a query parameter, as text."""
        return [_text(name, value) for value in self._query.get(name, ())]

    def integer(self, name: str, default: T, *, base: int = 10) -> int | T:
        """A query parameter as a number; `base` 8 for modes."""
        value = self.raw(name)
        if value is None:
            return default
        try:
            number = int(value, base)
        except ValueError:
            number = _MAX_INT
        if not -_MAX_INT < number < _MAX_INT:
            what = "an octal number such as 0644" if base == 8 else "a whole number"
            raise InvalidRequest(f"{name} must be {what}, not {_shown(value)}")
        return number

    def number(self, name: str) -> float | None:
        """A query parameter as seconds."""
        value = self.raw(name)
        if value is None:
            return None
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise InvalidRequest(f"{name} must be a number, not {_shown(value)}")
        return number

    def flag(self, name: str, *, default: bool) -> bool:
        """A query parameter that is true or false."""
        value = self.raw(name)
        if value is None:
            return default
        if value in (b"true", b"1"):
            return True
        if value in (b"false", b"0"):
            return False
        raise InvalidRequest(f"{name} must be true or false, not {_shown(value)}")

    # What the client gets

    def answer(self, value: msgspec.Struct | dict[str, Any], *, status: int | None = None) -> web.Response:
        """The answer, as JSON or msgpack."""
        return encoded(self.request, value, status or self.route.status)

    async def streamed(self, media: str, pieces: AsyncIterator[bytes]) -> web.StreamResponse:
        """Answer with pieces as they come; one piece or none goes out whole, with its length."""
        first = await anext(pieces, b"")
        second = await anext(pieces, None) if first else None
        if second is None:
            return web.Response(body=first, content_type=media)
        response = web.StreamResponse(headers={"Content-Type": media})
        await response.prepare(self.request)
        await write(response, first)
        await write(response, second)
        async for piece in pieces:
            await write(response, piece)
        await response.write_eof()
        return response


async def write(response: web.StreamResponse, piece: bytes) -> None:
    """Write a piece of an answer, giving up on a client that does not take it."""
    try:
        async with asyncio.timeout(STALL_S):
            await response.write(piece)
    except TimeoutError:
        raise ConnectionResetError("the client does not read its answer") from None


def encoded(request: web.BaseRequest, value: Any, status: int) -> web.Response:
    """A response with `value` in the encoding that the client asks for."""
    if MSGPACK in request.headers.get("Accept", ""):
        return web.Response(body=_encode_msgpack(value), status=status, headers=CIMultiDict({"Content-Type": MSGPACK}))
    return web.Response(body=_encode_json(value), status=status, headers=CIMultiDict({"Content-Type": JSON}))


def error_response(request: web.BaseRequest, error: DsecError) -> web.Response:
    """An error as ErrorBody with its status."""
    response = encoded(request, error.body(), error.http_status)
    if isinstance(error, NoCapacity):
        response.headers["Retry-After"] = str(math.ceil(error.retry_after))
    if isinstance(error, Unauthenticated):
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


async def read_body(request: web.BaseRequest, limit: int) -> bytes:
    """The whole body, at most `limit` bytes. Raises BodyTooLarge, StalledClient."""
    length = request.content_length
    if length is not None and length > limit:
        raise BodyTooLarge(f"the body has {length} bytes; at most {limit} are taken here")
    content = request.content
    if content.is_eof():
        return b"" if content.at_eof() else _limited(content.read_nowait(-1), limit)
    got = bytearray()
    async for piece in _pieces(request):
        got += piece
        _limited(got, limit)
    return bytes(got)


def _limited(body: Any, limit: int) -> Any:
    if len(body) > limit:
        raise BodyTooLarge(f"the body has more than the {limit} bytes that are taken here")
    return body


async def _pieces(request: web.BaseRequest) -> AsyncIterator[bytes]:
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("compressed bodies are not taken; send it as it is")
    expect = request.headers.get("Expect")
    if expect is not None and expect.lower() == "100-continue" and request.version == HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # Else aiohttp takes the answer's head for sent.
        request.writer.output_size = 0
    content = request.content
    while True:
        try:
            async with asyncio.timeout(STALL_S):
                piece = await content.readany()
        except TimeoutError:
            raise StalledClient(f"nothing of the body came for {STALL_S:.0f} s") from None
        except (web.PayloadAccessError, ValueError) as error:
            raise InvalidRequest(f"the body cannot be read: {error}") from error
        if not piece:
            return
        yield piece


def _parse_query(raw: str, route: Route) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = {}
    for pair in raw.split("&"):
        if not pair:
            continue
        name, _, value = pair.partition("=")
        name = unquote_to_bytes(name).decode("utf-8", "replace")
        if name not in route.query_names:
            known = ", ".join(sorted(route.query_names)) or "none"
            raise InvalidRequest(f"there is no query parameter {name[:64]!r} here; there are: {known}")
        found.setdefault(name, []).append(unquote_to_bytes(value.replace("+", " ")))
    return found


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not valid UTF-8") from error


def _shown(value: bytes) -> str:
    return repr(value[:64].decode("utf-8", "replace"))


def _known(kind: type, error: msgspec.ValidationError) -> str:
    """The fields that there are, where an unknown one is the fault and it is one of `kind` itself."""
    text = str(error)
    if "unknown field" not in text or " - at `$" in text or not issubclass(kind, msgspec.Struct):
        return ""
    return "; it has " + ", ".join(field.encode_name for field in msgspec.structs.fields(kind))
