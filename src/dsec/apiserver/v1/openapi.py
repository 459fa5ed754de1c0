"""The OpenAPI 3.1 document, made from the table of routes and the types."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from dsec.api.errors import DsecError, ErrorBody, InternalError, Unauthenticated
from dsec.apiserver.v1.exchange import JSON, MSGPACK
from dsec.apiserver.v1.route import Query, Route
from dsec.apiserver.v1.version import VERSION

_VARIABLE = re.compile(r"\{(\w+)\}")
_TYPES = {"int": "integer", "float": "number", "bool": "boolean"}


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """The document for these routes."""
    routes = list(routes)
    types: list[Any] = [ErrorBody]
    for route in routes:
        types += [kind for kind in (route.request, route.response) if kind is not None and kind not in types]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_type)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dsec",
            "version": VERSION,
            "description": "Sandboxes. Bodies may be JSON or msgpack; mutating requests may carry an Idempotency-Key.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _operation(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "responses": _responses(route, schemas),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _VARIABLE.findall(route.path)
    ] + [_parameter(query) for query in route.query]
    if parameters:
        operation["parameters"] = parameters
    if route.request is not None:
        content = {media: {"schema": schemas[route.request]} for media in (JSON, MSGPACK)}
        operation["requestBody"] = {"required": True, "content": content}
    elif route.request_media is not None:
        binary = {"schema": {"type": "string", "format": "binary"}}
        operation["requestBody"] = {"required": True, "content": {route.request_media: binary}}
    if route.public:
        operation["security"] = []
    return operation


def _parameter(query: Query) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": _TYPES.get(query.kind, "string")}
    if query.many:
        schema = {"type": "array", "items": schema}
    return {"name": query.name, "in": "query", "required": query.required, "description": query.about, "schema": schema}


def _responses(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    success: dict[str, Any] = {"description": "Success."}
    if route.response_media is not None:
        schema = schemas[route.response] if route.response else {"type": "string", "format": "binary"}
        success["content"] = {route.response_media: {"schema": schema}}
    elif route.response is not None:
        success["content"] = {media: {"schema": schemas[route.response]} for media in (JSON, MSGPACK)}
    found[str(route.status)] = success
    errors: dict[int, list[type[DsecError]]] = {}
    for error in (*route.errors, *(() if route.public else (Unauthenticated,)), InternalError):
        errors.setdefault(error.http_status, []).append(error)
    for status, classes in sorted(errors.items()):
        found[str(status)] = {
            "description": "; ".join(f"`{c.code}`: {(c.__doc__ or '').strip().partition(chr(10))[0]}" for c in classes),
            "content": {media: {"schema": schemas[ErrorBody]} for media in (JSON, MSGPACK)},
        }
    return found
