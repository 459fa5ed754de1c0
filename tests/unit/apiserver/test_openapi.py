"""The OpenAPI document: whole, consistent, and the same as the one that clients were built from."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from dsec.apiserver.v1 import openapi
from dsec.apiserver.v1.route import Route, Router
from dsec.apiserver.v1.table import LATER, ROUTES

SNAPSHOT = Path(__file__).with_name("openapi.v1.json")


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(openapi.document(ROUTES)))
    return made


def test_every_reference_has_its_schema(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    used = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert used <= set(schemas)
    assert {"ErrorBody", "CreateSandbox", "ExecResponse", "SandboxRecord"} <= used


def test_every_route_is_documented(document: dict[str, Any]) -> None:
    found = {(method.upper(), path) for path, operations in document["paths"].items() for method in operations}
    assert found == {(route.method, route.path) for route in ROUTES}
    names = [op["operationId"] for operations in document["paths"].values() for op in operations.values()]
    assert len(names) == len(set(names))
    for operations in document["paths"].values():
        for operation in operations.values():
            assert operation["summary"].endswith(".")
            assert "500" in operation["responses"]


def test_the_document_has_not_changed(document: dict[str, Any]) -> None:
    """A change of the wire is a decision: DSEC_UPDATE_SNAPSHOTS=1 writes the new one, and its diff is reviewed."""
    document["info"].pop("version")
    text = json.dumps(document, indent=1, sort_keys=True) + "\n"
    if os.environ.get("DSEC_UPDATE_SNAPSHOTS"):
        SNAPSHOT.write_text(text)
    assert SNAPSHOT.read_text() == text


def test_the_table_in_the_documentation_names_every_path() -> None:
    text = (Path(__file__).parents[3] / "docs" / "http.md").read_text()
    for route in ROUTES:
        word = (
            route.path.replace("/v1/sandboxes/{id}", "").replace("/processes/{p}", "").replace("/files", "") or "{id}"
        )
        assert word in text, route.path


def test_routing() -> None:
    router = Router((*ROUTES, *LATER))

    def name(method: str, path: str) -> str:
        found = router.find(path)
        route: Route | None = found[0].get(method) if found else None
        return route.name if route else "none"

    assert name("POST", "/v1/sandboxes:batch") == "createBatch"
    assert name("GET", "/v1/sandboxes/abc/files:list") == "listFiles"
    assert name("GET", "/v1/sandboxes/abc/processes/req:x%2Fy/wait") == "waitProcess"
    assert name("POST", "/v1/sandboxes/abc/ports/80") == "later"
    for path in ("", "/", "/v1", "/v1/sandboxes/", "/v1/sandboxes//exec", "//v1/sandboxes", "/v1/sandboxes/a/b/c/d/e"):
        assert name("GET", path) == "none", path
    found = router.find("/v1/sandboxes/abc/processes/req:x%2Fy/wait")
    assert found is not None
    assert found[1] == ["abc", "req:x/y"]
