"""What all benches share: rows, rounds, the private daemon, the table.

The one rule: ours and the references are measured in turn, round by round, and compared by medians, because machines are noisy and a
reference measured at another time says nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dsec.api.errors import InternalError, PermissionDenied, Unsupported
from dsec.paths import Paths

_COMMAND_S = 120.0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. `ratio` is ours to the reference, so that more is better; `met` None: there is no promise."""

    name: str
    value: float
    unit: str
    reference: float | None = None
    ratio: float | None = None
    promise: str | None = None
    met: bool | None = None
    n: int
    p10: float
    p90: float


@dataclass(frozen=True, slots=True)
class Promise:
    """At least, or at most, `bound`."""

    sign: str
    bound: float

    @property
    def text(self) -> str:
        """As SPECIFICATION.md has it."""
        return f"{self.sign} {self.bound:g}"

    def met(self, value: float) -> bool:
        """Whether `value` keeps it."""
        return value >= self.bound if self.sign == ">=" else value <= self.bound


def at_least(bound: float) -> Promise:
    """A promise of no less than `bound`."""
    return Promise(">=", bound)


def at_most(bound: float) -> Promise:
    """A promise of no more than `bound`."""
    return Promise("<=", bound)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def rate_row(
    name: str, ours: Sequence[float], reference: Sequence[float] | None, *, n: int, promise: Promise | None = None
) -> Row:
    """A row of rates, one for each round; the ratio is the median of the rounds' ratios. Without a reference the promise is on the value."""
    value = statistics.median(ours)
    ratio = None
    if reference is not None:
        ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, reference, strict=True))
    judged = value if ratio is None else ratio
    return Row(
        name=name,
        value=round(value, 2),
        unit="1/s",
        reference=None if reference is None else round(statistics.median(reference), 2),
        ratio=None if ratio is None else round(ratio, 3),
        promise=promise.text if promise else None,
        met=promise.met(judged) if promise else None,
        n=n,
        p10=round(quantile(ours, 0.1), 2),
        p90=round(quantile(ours, 0.9), 2),
    )


@dataclass(frozen=True, slots=True)
class Loop:
    """Something measured in each round: `run` takes seconds and returns a rate and a count."""

    name: str
    run: Callable[[float], tuple[float, int]]
    seconds: float


class Budget:
    """How many rounds there are, and the time after which no further one begins: a busy machine gets fewer, not a longer run."""

    def __init__(self, rounds: int, seconds: float) -> None:
        self._rounds = rounds
        self._end = time.monotonic() + seconds
        self._longest = 0.0

    def numbers(self) -> Iterator[int]:
        """The rounds' numbers from 0; at least one."""
        for number in range(self._rounds):
            began = time.monotonic()
            if number and began + self._longest > self._end:
                return
            yield number
            self._longest = max(self._longest, time.monotonic() - began)


def in_rounds(
    loops: Sequence[Loop], budget: Budget, *, tell: Callable[[str], None]
) -> dict[str, tuple[list[float], int]]:
    """Run all loops in turn, round by round; return for each its rates and how many samples they rest on."""
    rates: dict[str, list[float]] = {loop.name: [] for loop in loops}
    counts = dict.fromkeys(rates, 0)
    for number in budget.numbers():
        # Each round begins with another loop: what a loop leaves to its successor is then spread evenly.
        turn = number % len(loops)
        for loop in (*loops[turn:], *loops[:turn]):
            tell(f"round {number + 1}: {loop.name}")
            rate, count = loop.run(loop.seconds)
            rates[loop.name].append(rate)
            counts[loop.name] += count
    return {name: (rates[name], counts[name]) for name in rates}


QUICK_S = 38.0
FULL_S = 780.0
"""Time for rounds and set-up, so that the whole stays under 50 s and 15 min."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A private daemon and the files that references share with it."""

    url: str
    key: str
    paths: Paths
    image: str
    layer: Path


@contextmanager
def private_daemon(*, tell: Callable[[str], None]) -> Iterator[Bench]:
    """Start a daemon with a state directory of its own and the installation's images, read only; remove it all afterwards.

    Raises PermissionDenied without root, Unsupported where set-up is not done.
    """
    if os.geteuid() != 0:
        raise PermissionDenied("benches start a daemon, which needs root: run them with sudo")
    store = Paths.discover()
    image, layer = _base_image(store)
    tell("starting a private daemon")
    # Beside the images, on a real disk: disk-backed sandboxes are measured, too.
    store.home.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="bench-", dir=store.home))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DSEC_")}
    environment |= {"DSEC_HOME": str(home), "DSEC_IMAGES": str(store.images_dir), "DSEC_BIN": str(store.bin_dir)}
    try:
        answer = json.loads(_dsec(["up", "--detach", "--port", "0", "--json"], environment))
        paths = Paths(
            home=home,
            instance=Path(answer["socket"]).parent.name,
            images_dir=store.images_dir,
            bin_dir=store.bin_dir,
            run_dir=Path(answer["socket"]).parent,
        )
        key = Path(answer["key_file"]).read_text(encoding="ascii").strip()
        yield Bench(f"unix://{answer['socket']}", key, paths, image, layer)
    finally:
        tell("stopping the private daemon")
        try:
            _dsec(["down", "--json"], environment)
        finally:
            shutil.rmtree(home, ignore_errors=True)


def _base_image(store: Paths) -> tuple[str, Path]:
    from dsec.images import Catalog

    catalog = Catalog(store.images_dir)
    for environment in catalog.list():
        if environment.name.startswith("debian:") and len(environment.layers) == 1:
            return environment.name, catalog.layers.path(environment.layers[0])
    raise Unsupported("there is no base image: run `dsec image bootstrap debian`")


def _dsec(words: Sequence[str], environment: dict[str, str]) -> str:
    """Run the command line in another process: a bench measures from outside."""
    done = subprocess.run(
        [sys.executable, "-m", "dsec.cli.app", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_COMMAND_S,
        check=False,
    )
    if done.returncode != 0:
        raise InternalError(f"dsec {words[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def native_bench(bench: Bench, *words: str) -> dict[str, Any]:
    """Run the native bench program and return what it measured. Raises InternalError if it fails."""
    program = bench.paths.bin_dir / "dsec-bench"
    if not program.exists():
        raise Unsupported(f"{program} is not there: run `make setup`")
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    if done.returncode != 0:
        raise InternalError(f"dsec-bench {words[0]} failed: {done.stderr.strip()[-500:]}")
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def present(rows: Sequence[Row], *, as_json: bool, title: str) -> int:
    """Print the rows: a list of objects and nothing else, or a table. Always 0: a missed promise is a figure, not a failure."""
    if as_json:
        sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=None, header_style="bold")
    for column in ("name", "value", "unit", "reference", "ratio", "promise", "met", "n", "p10", "p90"):
        table.add_column(column, justify="left" if column in ("name", "unit", "met") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*[_cell(value) for value in msgspec.structs.astuple(row)])
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    console.print(table)
    return 0


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "MISSED"
    return f"{value:,.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def teller(*, quiet: bool) -> Callable[[str], None]:
    """A function that tells on stderr what is being done, with the time since the start."""
    began = time.monotonic()

    def tell(text: str) -> None:
        if not quiet:
            sys.stderr.write(f"[{time.monotonic() - began:6.1f} s] {text}\n")
            sys.stderr.flush()

    return tell
