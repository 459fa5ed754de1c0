"""Reclaims what dead instances left: processes, cgroups, run folders, launchers. Also `python -m dsec.edge.sweep`.

An instance is dead when nobody holds its lock. While one is swept, the sweep holds its lock, so that its daemon cannot start half-way.
At an edge's start, instances that died less than a minute ago and whose launcher runs are left alone: their daemon may be restarting,
and their sandboxes are waiting for it. The rule a reader could break: what is not proven dead is not touched.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from dsec.edge.cgroups import PREFIX, Hierarchies, instances, reclaim
from dsec.edge.instance import InstanceLock

log = logging.getLogger(__name__)

RUN_ROOT: Final = Path("/run/dsec")
_INSTANCE: Final = re.compile(r"[a-z2-7]{8}")
RESTART_GRACE_S: Final = 60.0
_DIE_S: Final = 5.0


def sweep(
    hierarchies: Hierarchies,
    *,
    keep: str | None = None,
    only: str | None = None,
    grace_s: float = RESTART_GRACE_S,
    run_root: Path = RUN_ROOT,
) -> list[str]:
    """Reclaim every dead instance but `keep` (or `only` that one) and return their names.

    Blocks for up to seconds for each that has something left.
    """
    launchers: dict[str, list[int]] = {}
    elsewhere: set[str] = set()
    for instance, pid in _launchers():
        if _shares_our_files(pid):
            launchers.setdefault(instance, []).append(pid)
        else:
            elsewhere.add(instance)
    names = {entry.name for entry in run_root.iterdir() if entry.is_dir()} if run_root.is_dir() else set()
    found = sorted(
        name
        for name in (names | instances(hierarchies) | launchers.keys()) - {keep} - elsewhere
        if _INSTANCE.fullmatch(name) and only in (None, name)
    )
    return [name for name in found if _sweep_one(hierarchies, run_root / name, launchers.get(name, []), grace_s)]


def _sweep_one(hierarchies: Hierarchies, run_dir: Path, launchers: list[int], grace_s: float) -> bool:
    lock_file = run_dir / "lock"
    died = lock_file.stat().st_mtime if lock_file.exists() else 0.0
    if launchers and time.time() - died < grace_s:
        return False  # before the lock is touched: its daemon may be about to take it
    lock = InstanceLock.try_take(lock_file)
    if lock is None:
        return False
    try:
        log.warning("sweeping a dead instance", extra={"instance": run_dir.name})
        for pid in launchers:
            _end(pid)
        for group in reclaim(hierarchies, PREFIX + run_dir.name):
            log.error("a cgroup of a dead instance could not be removed", extra={"path": group})
        shutil.rmtree(run_dir, ignore_errors=True)
        return True
    finally:
        lock.close()


def _shares_our_files(pid: int) -> bool:
    """Whether the process sees the same files as we do; if not, its instance's lock is not where we look, and proves nothing."""
    try:
        same_mounts = os.path.samestat(Path(f"/proc/{pid}/ns/mnt").stat(), Path("/proc/self/ns/mnt").stat())
        return same_mounts and os.path.samestat(Path(f"/proc/{pid}/root").stat(), Path("/").stat())
    except OSError:
        return False


def _launchers() -> list[tuple[str, int]]:
    """Launchers on this host, as (instance, pid)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if (
            len(words) > 2
            and words[0].endswith(b"dsec-launch")
            and words[1] == b"serve"
            and b"--instance" in words[:-1]
        ):
            found.append((os.fsdecode(words[words.index(b"--instance") + 1]), int(entry.name)))
    return found


def _end(pid: int) -> None:
    with suppress(ProcessLookupError, OSError):
        pidfd = os.pidfd_open(pid)
        try:
            # The pid may have been reused since it was read.
            if any(pid == found for _, found in _launchers()):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                poll.poll(_DIE_S * 1000)
        finally:
            os.close(pidfd)


def main() -> int:
    """Sweep every dead instance of this host, also those that died just now."""
    parser = argparse.ArgumentParser(prog="python -m dsec.edge.sweep", description=main.__doc__)
    parser.add_argument(
        "--grace", type=float, default=0.0, metavar="S", help="spare instances that died less than S seconds ago"
    )
    options = parser.parse_args()
    swept = sweep(Hierarchies.discover(), grace_s=options.grace)
    sys.stdout.write(f"swept {len(swept)} dead instance(s)" + "".join(f" {name}" for name in swept) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
