"""A CPU hog: processes that keep all CPUs busy while a test runs beside them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SPIN = "import os, signal\nsignal.alarm(7200)\nwhile os.getppid() == {parent}: sum(range(20000))\n"


@contextmanager
def cpu_hog(processes: int | None = None) -> Iterator[None]:
    """Keep `processes` (default: one a CPU) loops running inside the block. They end with their parent."""
    code = SPIN.format(parent=os.getpid())
    count = processes or os.cpu_count() or 1
    hogs = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
        for hog in hogs:
            hog.wait()
