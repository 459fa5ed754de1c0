"""Rows, promises and rounds of the benches."""

from __future__ import annotations

import json

import pytest

from dsec.bench.framework import Budget, Loop, Row, at_least, at_most, in_rounds, present, quantile, rate_row


def test_ratios_are_medians_of_rounds() -> None:
    row = rate_row("x", [10.0, 100.0, 30.0], [10.0, 50.0, 10.0], n=9, promise=at_least(1.5))
    assert (row.value, row.reference, row.ratio, row.promise, row.met) == (30.0, 10.0, 2.0, ">= 1.5", True)
    bare = rate_row("y", [10.0], None, n=1, promise=at_least(11))
    assert (bare.ratio, bare.met) == (None, False)
    assert rate_row("z", [1.0], [2.0], n=1).met is None
    assert at_most(2).met(2.0)
    assert not at_most(2).met(2.1)


def test_quantiles() -> None:
    assert [quantile([3, 1, 2], share) for share in (0.0, 0.5, 0.9)] == [1, 2, 3]


def test_loops_take_turns() -> None:
    order: list[str] = []

    def loop(name: str) -> Loop:
        def run(_seconds: float) -> tuple[float, int]:
            order.append(name)
            return 2.0, 5

        return Loop(name, run, 1.0)

    loops = [loop(name) for name in "abc"]
    measured = in_rounds(loops, Budget(3, 60), tell=lambda _text: None)
    assert "".join(order) == "abcbcacab"
    assert measured["a"] == ([2.0, 2.0, 2.0], 15)


def test_a_spent_budget_ends_after_the_first_round() -> None:
    assert list(Budget(5, -1.0).numbers()) == [0]


def test_json_is_the_rows_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row(name="a", value=1.0, unit="ms", n=3, p10=0.5, p90=2.0)
    assert present([row], as_json=True, title="t") == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert set(shown) == {"name", "value", "unit", "reference", "ratio", "promise", "met", "n", "p10", "p90"}
    present([row], as_json=False, title="t")
    assert "a" in capsys.readouterr().out
