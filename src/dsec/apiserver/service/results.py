"""What the guest tells of processes, as API types. The guest is not trusted: missing or odd fields become defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsec.api.types import ExecResponse, ProcessInfo

_REASONS = frozenset({"exit", "signal", "oom", "timeout", "killed"})
_SIGNAL_BASE = 128


def exec_response(
    process_id: str, fields: Mapping[str, Any], output: tuple[bytearray, bytearray] | None = None
) -> ExecResponse:
    """A result map as a response; `output` is what came in DATA frames."""
    get = fields.get
    signal = get("signal")
    code = get("exit")
    if not isinstance(code, int):
        code = _SIGNAL_BASE + signal if isinstance(signal, int) else _SIGNAL_BASE + 9
    reason = get("reason")
    return ExecResponse(
        process_id=process_id,
        pid=_int(get("pid")),
        reason=reason if reason in _REASONS else "exit",
        exit_code=code,
        signal=signal if isinstance(signal, int) else None,
        stdout=bytes(output[0]) if output is not None else _bytes(get("out")),
        stderr=bytes(output[1]) if output is not None else _bytes(get("err")),
        stdout_total=_int(get("out_total")),
        stderr_total=_int(get("err_total")),
        stdout_gap=_gap(get("out_gap")),
        stderr_gap=_gap(get("err_gap")),
        duration_s=_int(get("dur_us")) / 1e6,
        cpu_s=_int(get("cpu_us")) / 1e6,
        peak_memory=_int(get("peak")),
        oom_kills=_int(get("oom_kills")),
    )


def process_info(entry: Mapping[str, Any]) -> ProcessInfo:
    """An entry of `ps`."""
    name = str(entry.get("id", ""))
    result = entry.get("result")
    argv = entry.get("argv")
    return ProcessInfo(
        id=name,
        pid=_int(entry.get("pid")),
        argv=[text(word) for word in argv] if isinstance(argv, list) else [],
        user=str(entry.get("user") or ""),
        state="ended" if entry.get("state") == "ended" else "running",
        started_at=_int(entry.get("started_ms")) / 1000,
        result=exec_response(name, result) if isinstance(result, dict) else None,
    )


def text(value: object) -> str:
    """Bytes as text, bad ones replaced."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else b""


def _gap(value: object) -> tuple[int, int] | None:
    if isinstance(value, list | tuple) and len(value) == 2:
        return (_int(value[0]), _int(value[1]))
    return None
