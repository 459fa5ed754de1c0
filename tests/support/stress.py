"""Run tests many times, partly beside a CPU hog: `python -m tests.support.stress NODEID...`.

A new system test passes 20 runs, 5 of them beside a hog, before it is committed. Each round is one pytest run with `--repeat`, so
that the runs share a warmed-up daemon as they do in the suite.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.support.hog import cpu_hog


def main() -> int:
    """Run the rounds; the exit status is that of the first round that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="+", help="pytest node ids or files")
    parser.add_argument("--quiet-runs", type=int, default=15)
    parser.add_argument("--hog-runs", type=int, default=5)
    parser.add_argument("--workers", default="6")
    options = parser.parse_args()

    def round_of(runs: int) -> int:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", options.workers, "--dist", "worksteal"]
        return subprocess.run([*command, "--repeat", str(runs), *options.tests], check=False).returncode

    if options.quiet_runs and (status := round_of(options.quiet_runs)):
        return status
    with cpu_hog():
        return round_of(options.hog_runs) if options.hog_runs else 0


if __name__ == "__main__":
    sys.exit(main())
