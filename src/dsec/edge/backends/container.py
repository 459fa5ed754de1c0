"""Containers: turns a checked request into the launcher's spawn spec (docs/protocols.md). Starts nothing itself.

Sandboxes of one shape (project, image, size, environment) share an encoded spec, so that each further one costs its id and three
small files.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
import stat
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from dsec.api import wire
from dsec.api.control import StartSandbox
from dsec.api.errors import InvalidRequest, Unsupported
from dsec.api.types import SandboxSpec
from dsec.edge.backends.base import Group
from dsec.edge.backends.sysfs import synthetic_sysfs
from dsec.edge.backends.template import disk_template

CPU_PERIOD_US: Final = 100_000
"""The kernel's default period: short enough that a throttled command stalls for less than 0.1 s."""
_SHARES_PER_CPU: Final = 1024
_NOFILE_HARD: Final = 1_048_576
_NOFILE_SOFT: Final = 65_536
"""Enough for servers; programs that close every possible descriptor still take milliseconds."""
_READY_MS: Final = 30_000
"""A guest that has not answered by then never will; it takes 1 ms on an idle machine."""
_BYTES_PER_INODE: Final = 8192
_COMMON_CACHED: Final = 256
_MIN_MEMORY_BYTES: Final = 16 << 20
"""Below this not even the guest and a shell fit."""

# The OCI runtime's default list. What this kernel does not have is left out, and what only the host's root may read: its owner has
# no id inside, so that not even root there may open it. Each mount costs 25 us at the start and more at the end.
_MASKED: Final = (
    "/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug",
    "/proc/scsi", "/proc/timer_list", "/proc/timer_stats",
)  # fmt: skip
# Of the OCI list only what root inside could write: the sysctls of its own namespaces. The rest (bus, fs, irq, sysrq-trigger) can be
# written by the host's root alone, which again has no id inside.
_READ_ONLY: Final = ("/proc/sys",)

_encode: Final = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerConfig:
    """Paths and facts of the host. `v1_pids`: whether pids are limited through cgroup v1."""

    guest: Path
    seccomp_blob: Path | None
    storage_dir: Path
    run_dir: Path
    v1_pids: bool
    host_cpus: int


def _readable_by_all(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return bool(path.stat().st_mode & stat.S_IROTH)
    return False


class ContainerBackend:
    """The Backend of kind `container`."""

    def __init__(self, config: ContainerConfig) -> None:
        self._config = config
        self._masked = [path for path in _MASKED if _readable_by_all(Path(path))]
        self._common: OrderedDict[bytes, msgspec.Raw] = OrderedDict()
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        self._nofile_hard = _NOFILE_HARD if hard == resource.RLIM_INFINITY else min(_NOFILE_HARD, hard)
        self._templates: dict[int, Path] = {}
        self._template_lock = asyncio.Lock()

    async def prepare(self, layers: Sequence[str], disk_bytes: int, backing: str) -> None:
        """Make the disk template of this size, if it is needed and missing."""
        if backing == "local" and disk_bytes not in self._templates:
            async with self._template_lock:
                if disk_bytes not in self._templates:
                    self._templates[disk_bytes] = await disk_template(self._config.run_dir / "templates", disk_bytes)

    def check(self, item: StartSandbox) -> None:
        """Raise InvalidRequest for what this kind can never start."""
        spec = item.spec
        if spec.memory_bytes < _MIN_MEMORY_BYTES:
            raise InvalidRequest(
                f"memory must be at least {_MIN_MEMORY_BYTES >> 20} MiB, not {spec.memory_bytes} bytes"
            )
        if spec.disk_backing == "tmpfs" and spec.disk_bytes > spec.memory_bytes // 2:
            raise InvalidRequest(
                f"disk_backing tmpfs counts as the sandbox's memory: disk ({spec.disk_bytes}) must be at most half of memory ({spec.memory_bytes})"
            )
        if spec.cpus <= 0 or spec.pids < 8:
            raise InvalidRequest("cpus must be above 0 and pids at least 8")

    def groups(self, items: Sequence[StartSandbox], *, epoch: int) -> list[Group]:
        """One group for each run of items of the same shape."""
        groups: list[Group] = []
        last: tuple[str, SandboxSpec] | None = None
        for item in items:
            shape = (item.record.project, item.spec)
            if last is None or last != shape:
                groups.append(Group(self._shape(item, epoch), []))
                last = shape
            groups[-1].items.append(_own(item.record.id))
        return groups

    async def freeze(self, sandbox: str, slot: int) -> None:
        """Containers cannot be paused yet."""
        raise Unsupported("pausing containers comes with a later release", sandbox_id=sandbox)

    async def thaw(self, sandbox: str, slot: int) -> None:
        """Containers cannot be paused yet."""
        raise Unsupported("pausing containers comes with a later release", sandbox_id=sandbox)

    async def snapshot(self, sandbox: str, slot: int) -> str:
        """Containers cannot be snapshotted yet."""
        raise Unsupported("snapshots of containers come with a later release", sandbox_id=sandbox)

    def _shape(self, item: StartSandbox, epoch: int) -> msgspec.Raw:
        key = b"%d %s %s" % (epoch, item.record.project.encode(), _encode(item.spec))
        common = self._common.get(key)
        if common is None:
            common = self._common[key] = msgspec.Raw(_encode(self._spec(item.record.project, item.spec, epoch)))
            if len(self._common) > _COMMON_CACHED:
                self._common.popitem(last=False)
        return common

    def _spec(self, project: str, spec: SandboxSpec, epoch: int) -> dict[str, Any]:
        config = self._config
        names = ["channel", "userns", "runs", "pids", "oom"] if config.v1_pids else ["channel", "userns", "runs", "oom"]
        cpus = math.ceil(spec.cpus)
        return {
            "project": project,
            "net_admin": False,  # not among the capabilities that the guest leaves to commands
            "exe": str(config.guest),
            "argv": ["dsec-guest", *(f"{name}=%{name}" for name in names)],
            "env": [],
            "ns": ["pid", "mnt", "net", "ipc", "uts", "cgroup", "user"],
            "layers": list(spec.layers),
            "upper": self._upper(spec),
            "mounts": self._mounts(spec, min(cpus, config.host_cpus)),
            "limits": {
                "memory": spec.memory_bytes,
                "cpu_quota_us": max(1000, int(spec.cpus * CPU_PERIOD_US)),
                "cpu_period_us": CPU_PERIOD_US,
                "cpu_shares": min(262_144, max(2, int(spec.cpus * _SHARES_PER_CPU))),
                "pids": spec.pids,
            },
            "fds": names,
            "affinity": cpus if cpus < config.host_cpus else 0,
            "seccomp": None if config.seccomp_blob is None else str(config.seccomp_blob),
            "rlimits": [[resource.RLIMIT_NOFILE, *self._nofile()], [resource.RLIMIT_CORE, 0, 0]],
            "first": wire.map_frame(
                0, wire.HELLO, {"proto": wire.PROTO, "epoch": epoch, "config": self._guest_config(spec)}
            ),
            "ready_ms": _READY_MS,
        }

    def _upper(self, spec: SandboxSpec) -> dict[str, Any]:
        if backing_of(spec) == "tmpfs":
            inodes = min(1 << 20, max(1024, spec.disk_bytes // _BYTES_PER_INODE))
            return {"kind": "tmpfs", "bytes": spec.disk_bytes, "inodes": inodes}
        template = self._templates[spec.disk_bytes]
        return {
            "kind": "image",
            "template": str(template),
            "dir": str(self._config.storage_dir),
            "bytes": spec.disk_bytes,
        }

    def _mounts(self, spec: SandboxSpec, cpus: int) -> list[dict[str, Any]]:
        return [
            {"kind": "proc"},
            *({"kind": "mask", "path": path} for path in self._masked),
            *({"kind": "ro", "path": path} for path in _READ_ONLY),
            {"kind": "dev"},
            {"kind": "devpts"},
            {"kind": "tmpfs", "path": "/dev/shm", "bytes": _shm_bytes(spec), "mode": 0o1777},  # noqa: S108 - the sandbox's own
            {"kind": "bind", "source": str(synthetic_sysfs(self._config.run_dir, cpus)), "path": "/sys", "ro": True},
        ]

    def _guest_config(self, spec: SandboxSpec) -> dict[str, Any]:
        # Each run's own limit is lower, so that another command fits in beside a fork bomb.
        reserve = min(max(16, spec.pids // 8), spec.pids // 2)
        config: dict[str, Any] = {
            "env": {**spec.image_env, **spec.env},
            "run_pids": spec.pids - reserve,
            "nofile": self._nofile(),
            "memory": spec.memory_bytes,
            "oom_score_adj": 500,
        }
        if spec.user is not None:
            config["user"] = spec.user
        if spec.workdir is not None:
            config["cwd"] = spec.workdir
        return config

    def _nofile(self) -> list[int]:
        return [min(_NOFILE_SOFT, self._nofile_hard), self._nofile_hard]


def _shm_bytes(spec: SandboxSpec) -> int:
    """Return the size of /dev/shm. With a disk that is memory too, both full must leave a quarter for processes."""
    on_disk = spec.disk_bytes if backing_of(spec) == "tmpfs" else 0
    return min(spec.memory_bytes // 2, spec.memory_bytes * 3 // 4 - on_disk)


def backing_of(spec: SandboxSpec) -> str:
    """Where the sandbox's writes go: "tmpfs" (its memory), or "local" (a sparse image on the node's disk)."""
    if spec.disk_backing != "auto":
        return spec.disk_backing
    return "tmpfs" if spec.disk_bytes <= spec.memory_bytes // 2 else "local"


def _own(sandbox: str) -> dict[str, Any]:
    hosts = f"127.0.0.1\tlocalhost {sandbox}\n::1\tlocalhost ip6-localhost ip6-loopback\n"
    return {
        "id": sandbox,
        "hostname": sandbox,
        "files": (
            {"path": "/etc/hosts", "data": hosts.encode(), "mode": 0o644},
            {"path": "/etc/hostname", "data": f"{sandbox}\n".encode(), "mode": 0o644},
            {"path": "/etc/resolv.conf", "data": b"", "mode": 0o644},
        ),
    }


def host_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))
