"""Host limits that many sandboxes run into, and raising them for the running system (a reboot forgets it)."""

import contextlib
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# 64 fork bombs of 512 processes reach the usual 32,768; this is the kernel's own ceiling on 64 bits.
PID_MAX_TARGET: Final = 4_194_304
# An edge holds three to four descriptors a sandbox; the launcher as many again.
NOFILE_TARGET: Final = 1_048_576
NOFILE_NEEDED: Final = 16_384
# Each watching sandbox takes one instance; file watching takes one watch a directory.
INOTIFY_INSTANCES_TARGET: Final = 8_192
INOTIFY_WATCHES_TARGET: Final = 1_048_576

_SYSCTLS: Final = {
    "kernel/pid_max": PID_MAX_TARGET,
    "fs/inotify/max_user_instances": INOTIFY_INSTANCES_TARGET,
    "fs/inotify/max_user_watches": INOTIFY_WATCHES_TARGET,
}


@dataclass(frozen=True, slots=True)
class LimitChange:
    """A limit before and after; `error` says why it stayed as it was."""

    name: str
    before: int
    after: int
    error: str = ""


def read_sysctl(name: str, *, root: Path = Path("/proc/sys")) -> int:
    """Return a numeric sysctl, named with slashes."""
    return int((root / name).read_text())


def raise_limits(*, root: Path = Path("/proc/sys")) -> tuple[LimitChange, ...]:
    """Raise what is below its target, for all of the host; never lowers anything. Needs root. Returns one change a limit that was too low."""
    changes = []
    for name, target in _SYSCTLS.items():
        before = read_sysctl(name, root=root)
        if before >= target:
            continue
        error = ""
        try:
            (root / name).write_text(f"{target}\n")
        except OSError as failure:
            error = failure.strerror or str(failure)
        changes.append(LimitChange(name.replace("/", "."), before, read_sysctl(name, root=root), error))
    return tuple(changes)


def raise_own_nofile() -> int:
    """Raise this process's limit of open files as far as it may and return it; children inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (max(hard, NOFILE_TARGET), hard):
        # Beyond the hard limit needs CAP_SYS_RESOURCE.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
            break
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
