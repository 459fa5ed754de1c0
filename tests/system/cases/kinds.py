"""`@case(ID)`: one behaviour case, run for every kind of sandbox that it names.

The table of ids stands in README.md; `test_all_cases.py` checks that each has a test. For a kind that this release does not have,
the case passes only if creating one is refused with `Unsupported`.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

import dsec

OFFERED = frozenset({"container"})
"""Kinds whose cases run; add one when its issue is done."""
VM_KINDS = ("microvm", "fullvm")

CASES: dict[str, str] = {}
"""Name of the test by case id, filled as the modules are imported."""

CaseTest = Callable[..., Awaitable[None]]


def case(case_id: str, *, fncall: bool = False) -> Callable[[CaseTest], CaseTest]:
    """Make the test of case `case_id` out of a coroutine that takes `kind` and `client` besides its other fixtures.

    `fncall`: the case names function calls too.
    """

    def wrap(test: CaseTest) -> CaseTest:
        assert test.__name__ == "test_" + case_id.replace("-", "_"), f"{test.__name__} is not named after {case_id}"
        CASES[case_id] = test.__name__
        kinds = ["container", *VM_KINDS, *(["fncall"] if fncall else [])]

        @pytest.mark.system
        @pytest.mark.root
        @pytest.mark.parametrize("kind", kinds)
        @functools.wraps(test)
        async def run(*, kind: str, client: dsec.AsyncClient, **fixtures: Any) -> None:
            if kind in OFFERED:
                await test(kind=kind, client=client, **fixtures)
            elif kind == "fncall":
                with pytest.raises(dsec.Unsupported):
                    await client.fncall("print(1)")
            else:
                with pytest.raises(dsec.Unsupported):
                    await client.create(kind)

        return cast("CaseTest", run)

    return wrap
