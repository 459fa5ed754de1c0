"""What the command line prints: JSON or tables on stdout; errors, notes and progress on stderr.

The one rule: with `--json`, stdout carries JSON and nothing else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from rich.console import Console

PROGRESS_AFTER_S = 1.0
"""What takes longer shows that it is at work."""


def print_json(value: Any) -> None:
    """Print one value as a line of JSON; bytes as base64."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """A line for people, on stdout."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """A line for people, on stderr."""
    sys.stderr.write(f"dsec: {text}\n")
    sys.stderr.flush()


def console(*, stderr: bool = False) -> Console:
    """A rich console; made late, because importing rich takes time."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a plain table; columns are as wide as their content, and nothing is cut when stdout is a pipe."""
    from rich.table import Table

    target = console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=not target.is_terminal)
    for row in rows:
        table.add_row(*["" if cell is None else _escaped(str(cell)) for cell in row])
    if not target.is_terminal:
        target.width = 10_000
    target.print(table)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show that `what` is being done, if it takes longer than a second and somebody looks at stderr."""
    if not sys.stderr.isatty():
        yield
        return
    import threading

    from rich.status import Status

    done = threading.Event()

    def show() -> None:
        if not done.wait(PROGRESS_AFTER_S):
            with Status(what, console=console(stderr=True)):
                done.wait()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def size_text(count: int) -> str:
    """Bytes for people: 512 MiB, 1.5 GiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 10 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def age_text(since: float | None) -> str:
    """The time since an epoch time, for people: 5s, 3m, 2h, 4d."""
    if since is None:
        return ""
    seconds = max(time.time() - since, 0.0)
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "m"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.0f}{unit}"
    return f"{seconds / 86_400:.0f}d"
