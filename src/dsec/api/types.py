"""What travels between SDK, apiserver and edge: requests (unknown fields refused) and records (unknown fields ignored).

Sizes are bytes; requests also take strings such as "512MiB". Times are seconds since the epoch, durations seconds, both float.
"""

from __future__ import annotations

import enum
import re
from typing import Any

import msgspec

from dsec.api.errors import ErrorBody, InvalidRequest

Size = int | str

_UNITS = {
    "": 1,
    "B": 1,
    "K": 10**3,
    "KB": 10**3,
    "M": 10**6,
    "MB": 10**6,
    "G": 10**9,
    "GB": 10**9,
    "T": 10**12,
    "TB": 10**12,
}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: Size, *, name: str = "size") -> int:
    """`value` in bytes: an int, or a string such as "512MiB" or "2GB".

    Raises InvalidRequest for anything else, and for sizes below zero.
    """
    if isinstance(value, int):
        if value < 0:
            raise InvalidRequest(f"{name} must not be negative: {value}")
        return value
    match = _SIZE.fullmatch(value)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise InvalidRequest(f'{name} must be a number of bytes or a string such as "512MiB", not {value!r}')
    return int(float(match[1]) * unit)


class Kind(enum.StrEnum):
    """Kinds of sandbox."""

    CONTAINER = "container"
    MICROVM = "microvm"
    FULLVM = "fullvm"


class State(enum.StrEnum):
    """States of a sandbox; see ARCHITECTURE.md for the transitions."""

    QUEUED = "queued"
    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"
    RECOVERING = "recovering"

    @property
    def ended(self) -> bool:
        """Whether nothing comes after this state."""
        return self in (State.STOPPED, State.FAILED)


class EndReason(enum.StrEnum):
    """Why a sandbox ended."""

    REQUESTED = "requested"
    IDLE = "idle"
    LIFETIME = "lifetime"
    OOM = "oom"
    TIMEOUT = "timeout"
    NODE_LOST = "node_lost"
    CHANNEL_LOST = "channel_lost"
    CRASHED = "crashed"
    ADMISSION = "admission"
    CANCELLED = "cancelled"


class CreateSandbox(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a client asks for. Defaults are those of the SDK."""

    kind: str = "container"
    image: str = "debian:12"
    workspace: str | None = None
    toolkits: tuple[str, ...] = ()
    snapshot: str | None = None
    cpus: float = 1.0
    memory: Size = "512MiB"
    disk: Size = "2GiB"
    pids: int = 512
    disk_backing: str = "auto"
    user: str | None = None
    workdir: str | None = None
    env: dict[str, str] = {}
    labels: dict[str, str] = {}
    job: str | None = None
    project: str | None = None
    network: dict[str, bool | str] | None = None
    idle_timeout: float | None = 300.0
    max_lifetime: float | None = 86400.0
    on_idle: str = "stop"
    qos: str = "besteffort"
    on_node_loss: str = "fail"
    policy: str = "default"
    timeout: float = 120.0
    request_id: str | None = None


class CreateBatch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`count` sandboxes alike. `on_shortage`: "wait" for room (until `sandbox.timeout`) or "fail"."""

    count: int
    sandbox: CreateSandbox = msgspec.field(default_factory=CreateSandbox)
    on_shortage: str = "wait"


class SandboxSpec(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A checked request: sizes in bytes, names resolved to digests. What an edge starts, and what the record keeps."""

    kind: Kind
    image: str
    layers: tuple[str, ...]
    cpus: float
    memory_bytes: int
    disk_bytes: int
    pids: int
    disk_backing: str
    user: str | None = None
    workdir: str | None = None
    env: dict[str, str] = {}
    image_env: dict[str, str] = {}
    idle_timeout_s: float | None = None
    max_lifetime_s: float | None = None
    on_idle: str = "stop"
    qos: str = "besteffort"


class SandboxRecord(msgspec.Struct, kw_only=True, omit_defaults=False):
    """A sandbox as the API shows it and the store keeps it. `seq` rises with every change (fenced by `epoch`)."""

    id: str
    project: str
    principal: str
    edge: str
    epoch: int
    kind: Kind
    state: State
    reason: EndReason | None = None
    detail: str | None = None
    image: str
    layers: tuple[str, ...] = ()
    cpus: float
    memory: int
    disk: int
    pids: int
    disk_backing: str = "auto"
    labels: dict[str, str] = {}
    job: str | None = None
    user: str | None = None
    workdir: str | None = None
    idle_timeout: float | None = None
    max_lifetime: float | None = None
    on_idle: str = "stop"
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    expires_at: float | None = None
    request_id: str | None = None
    seq: int = 0


class SandboxPage(msgspec.Struct, kw_only=True):
    """One page of a listing; `next_cursor` is None on the last."""

    items: list[SandboxRecord]
    next_cursor: str | None = None


class BatchItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One result of a batch: `sandbox` or `error`."""

    index: int
    sandbox: SandboxRecord | None = None
    error: ErrorBody | None = None


class StopRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which sandboxes to stop: `ids`, or those created by `request_id` (also while they are still being created), or all with `labels`."""

    ids: tuple[str, ...] = ()
    request_id: str | None = None
    labels: dict[str, str] = {}


class StopItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What became of one sandbox that was to be stopped."""

    id: str
    state: State | None = None
    error: ErrorBody | None = None


class StopResponse(msgspec.Struct, kw_only=True):
    """Answer to a StopRequest, in the order of its ids."""

    results: list[StopItem]


class TimeoutUpdate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """New TTLs in seconds; absent: unchanged; null: none. Both count anew from now (idle) or from creation (max_lifetime)."""

    idle_timeout: float | None | msgspec.UnsetType = msgspec.UNSET
    max_lifetime: float | None | msgspec.UnsetType = msgspec.UNSET


class ExecRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A command: `argv`, or `command` for the shell. `stdin` None means /dev/null; `stdin_open` (start only) keeps it open for the stream."""

    argv: tuple[str, ...] = ()
    command: str | None = None
    cwd: str | None = None
    env: dict[str, str] = {}
    user: str | None = None
    stdin: bytes | None = None
    stdin_open: bool = False
    timeout: float | None = None
    output_limit: Size = 10 << 20
    pty: tuple[int, int] | None = None
    request_id: str | None = None


class ExecResponse(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How a command ended. `reason`: exit | signal | oom | timeout | killed. `*_gap`: the range of offsets dropped from the middle, else None."""

    process_id: str
    pid: int
    reason: str
    exit_code: int
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_total: int = 0
    stderr_total: int = 0
    stdout_gap: tuple[int, int] | None = None
    stderr_gap: tuple[int, int] | None = None
    duration_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory: int = 0
    oom_kills: int = 0


class ProcessInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A process started through the API, living or recently ended (`result`, without output)."""

    id: str
    pid: int
    argv: list[str]
    user: str = ""
    state: str = "running"
    started_at: float = 0.0
    result: ExecResponse | None = None


class ProcessList(msgspec.Struct, kw_only=True):
    """All processes started through the API."""

    processes: list[ProcessInfo]


class SignalRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Send `signal` (name such as "TERM", or number) to the process; `tree` with KILL ends everything it started."""

    signal: str | int
    tree: bool = False


class FileEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A file as `stat` and `list` tell it. `*_bytes` are set only where the name is not valid UTF-8."""

    name: str
    path: str
    type: str
    size: int
    mode: int
    uid: int
    gid: int
    mtime: float
    target: str | None = None
    name_bytes: bytes | None = None
    path_bytes: bytes | None = None


class FileList(msgspec.Struct, kw_only=True):
    """Entries of a directory, names sorted by their bytes."""

    entries: list[FileEntry]


class FileWritten(msgspec.Struct, kw_only=True):
    """Bytes stored by a write."""

    size: int


class ArchiveReport(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What became of an archive: entries stored, names refused or skipped."""

    entries: int
    refused: list[str] = []
    skipped: list[str] = []


class Usage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a sandbox uses now. cpu_s since its start; memory without reclaimable page cache; disk of its own writes."""

    cpu_s: float = 0.0
    memory: int = 0
    memory_peak: int = 0
    memory_limit: int = 0
    disk: int = 0
    disk_limit: int = 0
    pids: int = 0
    pids_limit: int = 0
    network_rx: int = 0
    network_tx: int = 0
    oom_kills: int = 0


class Event(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Something that happened. `seq` orders all events of a store."""

    seq: int
    time: float
    type: str
    project: str
    principal: str = ""
    sandbox_id: str | None = None
    data: dict[str, Any] = {}


class EventPage(msgspec.Struct, kw_only=True):
    """Events in order of `seq`; `next_since` goes into the next request."""

    items: list[Event]
    next_since: int


class ImageInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An environment by name: its layers, lowest first, and their size on disk."""

    name: str
    layers: tuple[str, ...]
    size: int = 0
    created_at: float = 0.0
    env: dict[str, str] = {}
    workdir: str | None = None
    user: str | None = None


class ImageList(msgspec.Struct, kw_only=True):
    """All images of the project."""

    images: list[ImageInfo]


class NodeInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A node: what it can start and how full it is."""

    edge: str
    epoch: int
    kinds: list[str]
    sandboxes: int
    cpus: int
    memory: int
    memory_available: int
    load: float = 0.0
    version: str = ""


class NodeList(msgspec.Struct, kw_only=True):
    """All nodes."""

    nodes: list[NodeInfo]
