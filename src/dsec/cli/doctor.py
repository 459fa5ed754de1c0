"""`dsec doctor`: what this host can do, why not, and what to do about it."""

from __future__ import annotations

import dataclasses
import os
import sys

from dsec.cli import output
from dsec.edge.host import Check, probe, raise_limits
from dsec.edge.host.check import Feature
from dsec.paths import Paths

_LATER = (Feature.MICROVM, Feature.FULLVM, Feature.LAZY_LOADING, Feature.AUDIT)
"""What this release looks at but does not use yet."""


def doctor(*, fix: bool, as_json: bool) -> int:
    """Print the checks; 0 if sandboxes can start here, else 1."""
    home = Paths.discover().home
    checks = probe(home)
    if fix:
        _raise()
        checks = probe(home)
    usable = not any(check.required and check.ok is False for check in checks)
    if as_json:
        output.print_json({"usable": usable, "checks": [dataclasses.asdict(check) for check in checks]})
        return 0 if usable else 1
    for feature in Feature:
        rows = [_row(check) for check in checks if check.feature is feature]
        if rows:
            output.say(f"\n{feature.value}: {_verdict(feature, checks)}")
            output.print_table(("", "CHECK", "FOUND"), rows)
    for check in checks:
        if check.ok is False and check.fix:
            output.say(f"\n{check.name}: {check.fix}")
    output.say("\nSandboxes can start here." if usable else "\nNo sandbox can start here yet.")
    low = [check for check in checks if check.feature is Feature.SCALE and check.ok is False]
    if low and not fix:
        if os.geteuid() == 0 and sys.stdin.isatty():
            if _agreed(low):
                _raise()
        else:
            output.say("\n`dsec doctor --fix`, as root, raises the limits that are too low (until the next boot).")
    return 0 if usable else 1


def _row(check: Check) -> tuple[str, str, str]:
    mark = {True: "ok", False: "NO" if check.required else "no", None: "?"}[check.ok]
    return mark, check.name, check.detail


def _verdict(feature: Feature, checks: tuple[Check, ...]) -> str:
    states = [check.ok for check in checks if check.feature is feature]
    found = "not all there" if False in states else "cannot be told" if None in states else "all there"
    return found + (" (for a later release)" if feature in _LATER else "")


def _agreed(low: list[Check]) -> bool:
    names = ", ".join(check.name for check in low)
    sys.stderr.write(f"\nRaise {names} now, until the next boot? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _raise() -> None:
    for change in raise_limits():
        outcome = f"stays at {change.before}: {change.error}" if change.error else f"{change.before} -> {change.after}"
        output.note(f"{change.name}: {outcome}")
