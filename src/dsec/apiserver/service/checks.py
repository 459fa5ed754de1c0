"""Checks what clients send and says what to change. Pure but for the image, which the caller has resolved."""

from __future__ import annotations

import math

import msgspec

from dsec.api.errors import InvalidPath, InvalidRequest, Unsupported
from dsec.api.types import CreateBatch, CreateSandbox, Kind, SandboxSpec, parse_size
from dsec.images.catalog import Environment

MAX_BATCH = 32_768
MAX_ENV_BYTES = 48 << 10
"""Names and values of one environment together: it travels to the guest in one message of at most 64 KiB, beside other things."""
_ENV_ENTRY_BYTES = 6
"""What the encoding adds to a name and its value."""
MAX_LABELS = 64
MAX_LABEL_CHARS = 256
MAX_NAME_CHARS = 256
"""Users, jobs, request ids and other short texts."""
MAX_PATH_BYTES = 4096
MIN_MEMORY_BYTES = 16 << 20
MIN_DISK_BYTES = 1 << 20
MIN_PIDS = 16
MAX_PIDS = 4 << 20
MAX_CPUS = 1024.0
MAX_BYTES = 1 << 50
MAX_SECONDS = 366 * 86_400.0
MAX_CREATE_TIMEOUT_S = 3600.0

_LATER = "is part of a later release; leave it out"


def check_batch(batch: CreateBatch) -> None:
    """Check what a batch has beyond its sandbox. Raises InvalidRequest."""
    if not 1 <= batch.count <= MAX_BATCH:
        raise InvalidRequest(f"count must be 1 to {MAX_BATCH}, not {batch.count}; split larger batches")
    if batch.on_shortage not in ("wait", "fail"):
        raise InvalidRequest(f'on_shortage must be "wait" or "fail", not {batch.on_shortage!r}')


def check_create(request: CreateSandbox) -> None:
    """Check all of a request that needs no image. Raises InvalidRequest or Unsupported with what to do."""
    _check_features(request)
    _number("cpus", request.cpus, 0.01, MAX_CPUS)
    memory = _size("memory", request.memory, MIN_MEMORY_BYTES)
    disk = _size("disk", request.disk, MIN_DISK_BYTES)
    _number("pids", request.pids, MIN_PIDS, MAX_PIDS)
    if request.disk_backing not in ("auto", "tmpfs", "local"):
        raise InvalidRequest(f'disk_backing must be "auto", "tmpfs" or "local", not {request.disk_backing!r}')
    if request.disk_backing == "tmpfs" and disk > memory // 2:
        raise InvalidRequest(
            f"a disk on tmpfs counts as memory and may have at most half of it: disk={disk} needs memory={2 * disk}, not"
            f' {memory}; ask for more memory, less disk, or disk_backing="local"'
        )
    check_user(request.user)
    if request.workdir is not None:
        check_absolute("workdir", request.workdir)
    check_env(request.env)
    check_labels(request.labels)
    _name("job", request.job)
    check_request_id(request.request_id)
    check_ttl("idle_timeout", request.idle_timeout)
    check_ttl("max_lifetime", request.max_lifetime)
    _number("timeout", request.timeout, 0.001, MAX_CREATE_TIMEOUT_S)
    if not request.image or len(request.image) > MAX_NAME_CHARS:
        raise InvalidRequest(f"image must be a name of 1 to {MAX_NAME_CHARS} characters such as debian:12")


def _check_features(request: CreateSandbox) -> None:
    try:
        kind = Kind(request.kind)
    except ValueError:
        raise InvalidRequest(
            f'there is no kind {request.kind!r}; kinds are "container", "microvm" and "fullvm"'
        ) from None
    if kind is not Kind.CONTAINER:
        raise Unsupported(f'kind {request.kind!r} is part of a later release; this one has "container"', feature="kind")
    later = {
        "workspace": request.workspace is not None,
        "toolkits": bool(request.toolkits),
        "snapshot": request.snapshot is not None,
        "network": bool(request.network),
    }
    for name, asked in later.items():
        if asked:
            raise Unsupported(f"{name} {_LATER}", feature=name)
    choices = {
        "on_idle": (request.on_idle, "stop", ("stop", "pause")),
        "qos": (request.qos, "besteffort", ("besteffort", "burstable", "guaranteed")),
        "on_node_loss": (request.on_node_loss, "fail", ("fail", "recreate", "recover")),
        "policy": (request.policy, "default", None),
    }
    for name, (value, offered, known) in choices.items():
        if value != offered:
            if known is not None and value not in known:
                raise InvalidRequest(f"{name} must be one of {', '.join(known)}, not {value!r}")
            raise Unsupported(f"{name}={value!r} is part of a later release; this one has {offered!r}", feature=name)


def spec_of(request: CreateSandbox, environment: Environment) -> SandboxSpec:
    """The checked spec: sizes in bytes, the image's defaults under the request's own. Raises InvalidRequest."""
    if environment.env:
        check_env(environment.env | request.env)
    return SandboxSpec(
        kind=Kind(request.kind),
        image=environment.name,
        layers=environment.layers,
        cpus=float(request.cpus),
        memory_bytes=parse_size(request.memory, name="memory"),
        disk_bytes=parse_size(request.disk, name="disk"),
        pids=request.pids,
        disk_backing=request.disk_backing,
        user=request.user if request.user is not None else environment.user,
        workdir=request.workdir if request.workdir is not None else environment.workdir,
        env=request.env,
        image_env=dict(environment.env),
        idle_timeout_s=request.idle_timeout,
        max_lifetime_s=request.max_lifetime,
        on_idle=request.on_idle,
        qos=request.qos,
    )


def check_env(env: dict[str, str]) -> None:
    """Check environment variables. Raises InvalidRequest."""
    total = 0
    for name, value in env.items():
        if not name or "=" in name or "\0" in name:
            raise InvalidRequest(f"env has a variable whose name is empty or has '=' or NUL in it: {name[:64]!r}")
        if "\0" in value:
            raise InvalidRequest(f"env variable {name[:64]!r} has NUL in its value")
        total += len(name.encode()) + len(value.encode()) + _ENV_ENTRY_BYTES
        if total > MAX_ENV_BYTES:
            raise InvalidRequest(
                f"env takes more than {MAX_ENV_BYTES} bytes in all; put large values into a file and name the file in env"
            )


def check_labels(labels: dict[str, str]) -> None:
    """Check labels. Raises InvalidRequest."""
    if len(labels) > MAX_LABELS:
        raise InvalidRequest(f"there are {len(labels)} labels; at most {MAX_LABELS} are allowed")
    for name, value in labels.items():
        if not name or "=" in name or len(name) > MAX_LABEL_CHARS or len(value) > MAX_LABEL_CHARS:
            raise InvalidRequest(
                f"label {name[:64]!r}: names have 1 to {MAX_LABEL_CHARS} characters and no '=', values at most {MAX_LABEL_CHARS}"
            )


def check_user(user: str | None) -> None:
    """Check a user as exec, files and create take it. Raises InvalidRequest."""
    if user is not None and (not user or len(user) > MAX_NAME_CHARS or any(c in user for c in "\0\n/")):
        raise InvalidRequest("user must be a name, a uid, name:group or uid:gid of the sandbox")


def check_request_id(request_id: str | None) -> None:
    """Check a client-made request id. Raises InvalidRequest."""
    if request_id is not None and not (0 < len(request_id) <= MAX_NAME_CHARS and request_id.isprintable()):
        raise InvalidRequest(f"request_id must have 1 to {MAX_NAME_CHARS} printable characters")


def check_ttl(name: str, seconds: float | None) -> None:
    """Check a time to live. Raises InvalidRequest."""
    if seconds is not None and not 0 < seconds <= MAX_SECONDS:
        raise InvalidRequest(
            f"{name} must be more than 0 and at most {MAX_SECONDS:.0f} seconds, or null for none, not {seconds}"
        )


def check_path(path: bytes, *, name: str = "path") -> bytes:
    """Check a path inside the sandbox. Raises InvalidPath."""
    shown = path[:256].decode("utf-8", "replace")
    if not path:
        raise InvalidPath(f"{name} is empty", path=shown)
    if b"\0" in path:
        raise InvalidPath(f"{name} has NUL in it", path=shown)
    if len(path) > MAX_PATH_BYTES:
        raise InvalidPath(f"{name} is longer than {MAX_PATH_BYTES} bytes", path=shown)
    if not path.startswith(b"/"):
        raise InvalidPath(f"{name} must be absolute (begin with '/'): {shown!r}", path=shown)
    return path


def check_seconds(name: str, value: float | None, *, most: float = MAX_SECONDS) -> None:
    """Check a duration that may be absent. Raises InvalidRequest."""
    if value is not None and not 0 < value <= most:
        raise InvalidRequest(f"{name} must be more than 0 and at most {most:.0f} seconds, not {value}")


def _size(name: str, value: int | str, least: int) -> int:
    size = parse_size(value, name=name)
    if not least <= size <= MAX_BYTES:
        raise InvalidRequest(f"{name} must be at least {least} bytes and at most {MAX_BYTES}, not {size}")
    return size


def _number(name: str, value: float, least: float, most: float) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        raise InvalidRequest(f"{name} must be between {least:g} and {most:g}, not {value}")


def _name(name: str, value: str | None) -> None:
    if value is not None and not (0 < len(value) <= MAX_NAME_CHARS and value.isprintable()):
        raise InvalidRequest(f"{name} must have 1 to {MAX_NAME_CHARS} printable characters")


def check_absolute(name: str, value: str) -> None:
    """Check a directory that commands start in. Raises InvalidRequest."""
    if not value.startswith("/") or "\0" in value or len(value.encode()) > MAX_PATH_BYTES:
        raise InvalidRequest(f"{name} must be an absolute path of at most {MAX_PATH_BYTES} bytes without NUL")


def fingerprint_bytes(request: msgspec.Struct) -> bytes:
    """What two requests with the same id must have in common."""
    return msgspec.msgpack.encode(request, order="deterministic")
