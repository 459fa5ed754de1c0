"""`dsec bench exec`: what a command in a sandbox costs beyond the command, against the bare host and `crun exec`."""

from __future__ import annotations

import statistics
from typing import Any

from dsec.bench import crun, ours
from dsec.bench.framework import (
    FULL_S,
    QUICK_S,
    Bench,
    Budget,
    Row,
    at_least,
    at_most,
    native_bench,
    present,
    private_daemon,
    quantile,
    teller,
)

SAMPLES = 500


def main(*, quick: bool, as_json: bool) -> int:
    """Measure and print; 0 also where a promise is missed."""
    tell = teller(quiet=as_json)
    budget = Budget(5, QUICK_S) if quick else Budget(20, FULL_S)
    with private_daemon(tell=tell) as bench:
        rows = measure(bench, budget, samples=SAMPLES // 5 if quick else SAMPLES, tell=tell)
    return present(rows, as_json=as_json, title="dsec bench exec")


def measure(bench: Bench, budget: Budget, *, samples: int, tell: Any) -> list[Row]:
    """All rows of this bench. Each round has every loop; differences and ratios are medians over the rounds."""
    all_ours: list[float] = []
    over, bare, crun_p50, crun_ratio = [], [], [], []
    for number in budget.numbers():
        tell(f"round {number + 1}")
        mine = ours.exec_samples(bench, samples)
        spawn = native_bench(bench, "spawn", "--n", str(samples))["p50"] / 1e3
        theirs = statistics.median(crun.measure(bench.layer, "exec", count=max(samples // 5, 20))["ms"])
        all_ours += mine
        middle = statistics.median(mine)
        over.append(middle - spawn)
        bare.append(spawn)
        crun_p50.append(theirs)
        crun_ratio.append(theirs / middle)
    return [
        _over_bare(all_ours, over, bare),
        _against_crun(all_ours, crun_p50, crun_ratio),
    ]


def _over_bare(mine: list[float], over: list[float], bare: list[float]) -> Row:
    promise = at_most(2.0)
    value = statistics.median(over)
    reference = statistics.median(bare)
    return Row(
        name="run_true.over_bare_ms",
        value=round(value, 3),
        unit="ms",
        reference=round(reference, 3),
        ratio=round(reference / statistics.median(mine), 3),
        promise=promise.text,
        met=promise.met(value),
        n=len(mine),
        p10=round(quantile(mine, 0.1) - reference, 3),
        p90=round(quantile(mine, 0.9) - reference, 3),
    )


def _against_crun(mine: list[float], theirs: list[float], ratios: list[float]) -> Row:
    promise = at_least(4.0)
    ratio = statistics.median(ratios)
    return Row(
        name="run_true.crun_exec",
        value=round(statistics.median(mine), 3),
        unit="ms",
        reference=round(statistics.median(theirs), 3),
        ratio=round(ratio, 3),
        promise=promise.text,
        met=promise.met(ratio),
        n=len(mine),
        p10=round(quantile(mine, 0.1), 3),
        p90=round(quantile(mine, 0.9), 3),
    )
