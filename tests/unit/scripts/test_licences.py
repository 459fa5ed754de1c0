"""Reading licence expressions."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


@pytest.fixture(scope="module")
def licences() -> ModuleType:
    spec = importlib.util.spec_from_file_location("licences", SCRIPTS / "licences.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("MIT", True),
        ("MIT License", True),
        ("MIT OR Apache-2.0", True),
        ("MIT/Apache-2.0", True),
        ("Apache-2.0 WITH LLVM-exception OR GPL-3.0-only", True),
        ("Apache-2.0 AND MIT", True),
        ("(MIT OR Apache-2.0) AND Unicode-3.0", True),
        ("MIT AND GPL-3.0-only", False),
        ("(MIT OR GPL-3.0-only) AND GPL-3.0-only", False),
        ("GPL-3.0-or-later", False),
        ("AGPL-3.0", False),
        ("LGPL-3.0-only", False),
        ("SSPL-1.0", False),
        ("", False),
    ],
)
def test_an_expression_is_judged(licences: ModuleType, expression: str, expected: bool) -> None:
    assert licences.allowed(expression) is expected


def test_installed_packages_state_their_licences(licences: ModuleType) -> None:
    found = dict(licences.python_licences())
    assert len(found) > 20
    assert {name for name, licence in found.items() if not licences.allowed(licence)} == set()
