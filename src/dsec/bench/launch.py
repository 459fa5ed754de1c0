"""`dsec bench launch`: how many sandboxes a second are created and destroyed.

All loops have at most 64 alive and 4 workers, the same layer, tmpfs uppers, the same namespaces, limits and seccomp rules.
"""

from __future__ import annotations

from typing import Any

from dsec.bench import crun, ours
from dsec.bench.framework import (
    FULL_S,
    QUICK_S,
    Bench,
    Budget,
    Loop,
    Row,
    at_least,
    in_rounds,
    native_bench,
    present,
    private_daemon,
    rate_row,
    teller,
)

ALIVE = 64
WORKERS = 4
_BARE_RATE = 1500.0
"""Of the bare loop, on two idle cores."""


def main(*, quick: bool, as_json: bool) -> int:
    """Measure and print; 0 also where a promise is missed."""
    tell = teller(quiet=as_json)
    budget = Budget(3, QUICK_S) if quick else Budget(12, FULL_S)
    with private_daemon(tell=tell) as bench:
        rows = measure(bench, budget, seconds=2.0 if quick else 8.0, tell=tell)
    return present(rows, as_json=as_json, title="dsec bench launch")


def measure(bench: Bench, budget: Budget, *, seconds: float, tell: Any) -> list[Row]:
    """All rows of this bench."""
    loops = [
        Loop("bare", lambda s: _bare(bench, s), seconds),
        Loop("ours", lambda s: _ours(bench, s, ours.SAME_CONDITIONS), seconds),
        Loop("crun", lambda s: _crun(bench, s), seconds),
        Loop("default", lambda s: _ours(bench, s, {}), seconds),
    ]
    measured = in_rounds(loops, budget, tell=tell)
    bare, bare_count = measured["bare"]
    mine, count = measured["ours"]
    theirs, _ = measured["crun"]
    default, default_count = measured["default"]
    return [
        rate_row("create.bare", mine, bare, n=count, promise=at_least(0.5)),
        rate_row("create.crun", mine, theirs, n=count, promise=at_least(6.0)),
        rate_row("create.default", default, bare, n=default_count),
        rate_row("bare.rate", bare, None, n=bare_count, promise=at_least(_BARE_RATE)),
    ]


def _ours(bench: Bench, seconds: float, options: dict[str, Any]) -> tuple[float, int]:
    return ours.launch_loop(bench, seconds, workers=WORKERS, alive=ALIVE, options=options)


def _bare(bench: Bench, seconds: float) -> tuple[float, int]:
    measured = native_bench(
        bench,
        *("launch", "--seconds", str(max(round(seconds), 1)), "--workers", str(WORKERS), "--alive", str(ALIVE)),
        *("--layer", str(bench.layer), "--guest", str(bench.paths.bin_dir / "dsec-guest")),
        *("--seccomp", str(bench.paths.seccomp_blob)),
    )
    return float(measured["rate"]), int(measured["n"])


def _crun(bench: Bench, seconds: float) -> tuple[float, int]:
    measured = crun.measure(bench.layer, "launch", seconds=seconds, workers=WORKERS, alive=ALIVE)
    return float(measured["rate"]), int(measured["n"])
