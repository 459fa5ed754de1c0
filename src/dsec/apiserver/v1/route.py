"""What one route is, and how a path finds its route: a tree of segments, no regular expressions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote

import msgspec

from dsec.api.errors import DsecError

if TYPE_CHECKING:
    from aiohttp.web import StreamResponse

    from dsec.apiserver.v1.exchange import Exchange

Handler = Callable[["Exchange"], Awaitable["StreamResponse"]]

SMALL_BODY = 4 << 20
"""Bodies of requests that carry no data of a user's."""


@dataclass(frozen=True, slots=True)
class Query:
    """A query parameter. `kind` is what it is parsed as; `bytes` are percent-encoded raw bytes."""

    name: str
    kind: Literal["text", "bytes", "int", "float", "bool", "octal"]
    about: str
    required: bool = False
    many: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One row of the table: from it the router, the decoders and the OpenAPI document are made."""

    method: str
    path: str
    handler: Handler
    name: str
    summary: str
    request: type[msgspec.Struct] | None = None
    response: type[msgspec.Struct] | None = None
    status: int = 200
    query: tuple[Query, ...] = ()
    errors: tuple[type[DsecError], ...] = ()
    request_media: str | None = None
    response_media: str | None = None
    public: bool = False
    body_limit: int = SMALL_BODY
    json_decoder: msgspec.json.Decoder[Any] | None = field(init=False)
    msgpack_decoder: msgspec.msgpack.Decoder[Any] | None = field(init=False)
    query_names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        json = msgspec.json.Decoder(self.request) if self.request else None
        msgpack = msgspec.msgpack.Decoder(self.request) if self.request else None
        object.__setattr__(self, "json_decoder", json)
        object.__setattr__(self, "msgpack_decoder", msgpack)
        object.__setattr__(self, "query_names", frozenset(query.name for query in self.query))


class _Node:
    __slots__ = ("literals", "methods", "variable")

    def __init__(self) -> None:
        self.literals: dict[str, _Node] = {}
        self.variable: _Node | None = None
        self.methods: dict[str, Route] = {}


class Router:
    """Finds routes by path. Segments in braces match anything but an empty segment."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._root = _Node()
        for route in routes:
            node = self._root
            for segment in route.path.split("/")[1:]:
                if segment.startswith("{"):
                    node.variable = node.variable or _Node()
                    node = node.variable
                else:
                    node = node.literals.setdefault(segment, _Node())
            if route.method in node.methods:
                raise ValueError(f"{route.method} {route.path} is there twice")
            node.methods[route.method] = route

    def find(self, path: str) -> tuple[dict[str, Route], list[str]] | None:
        """The routes of a path by method, and the values of its variable segments, percent-decoded."""
        node = self._root
        values: list[str] = []
        for segment in path.split("/")[1:]:
            following = node.literals.get(segment)
            if following is None:
                following = node.variable
                if following is None or not segment:
                    return None
                values.append(unquote(segment, errors="replace") if "%" in segment else segment)
            node = following
        return (node.methods, values) if node.methods else None
