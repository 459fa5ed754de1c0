"""What calls hand back: results of commands, chunks of output, entries of directories, pages.

Bytes come first; text is made on demand and never fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from dsec.api import types as t

T = TypeVar("T")

MARKER = "\n[... {dropped} bytes dropped ...]\n"
"""What stands in a text for output that was dropped from its middle."""


def render_text(data: bytes, gap: tuple[int, int] | None, limit: int) -> str:
    """`data` as text: bad bytes become U+FFFD, and a dropped middle becomes `MARKER`.

    Around the marker only whole characters are kept, and the text with its marker has at most `limit` bytes of UTF-8. Without a
    gap all of `data` is kept.
    """
    if gap is None:
        return data.decode("utf-8", "replace")
    start, end = gap
    head, tail = data[:start], data[start:]
    cut = _partial_at_end(head)
    head = head[: len(head) - cut]
    skip = _partial_at_start(tail)
    tail = tail[skip:]
    dropped = end - start + cut + skip
    # The marker's length depends on the number in it, which grows with what the marker displaces; twenty digits is the most a u64 has.
    room = max(limit - len(MARKER) - 20, 0)
    head_text = _first_bytes(head.decode("utf-8", "replace"), room - room // 2)
    tail_text = _last_bytes(tail.decode("utf-8", "replace"), room // 2)
    kept = len(head_text.encode()) + len(tail_text.encode())
    # Replacement characters take more room than the bytes they stand for: never claim to have dropped less than the gap.
    dropped = max(dropped + len(head) + len(tail) - kept, dropped)
    marker = MARKER.format(dropped=dropped)
    return head_text + (marker if len(marker) <= limit else "") + tail_text


def _partial_at_end(data: bytes) -> int:
    """How many last bytes begin a character that is not complete."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        need = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return back if need > back else 0
    return 0


def _partial_at_start(data: bytes) -> int:
    """How many first bytes continue a character that began before (at most three)."""
    count = 0
    while count < min(3, len(data)) and data[count] & 0xC0 == 0x80:
        count += 1
    return count


def _first_bytes(text: str, room: int) -> str:
    raw = text.encode()
    return text if len(raw) <= room else raw[:room].decode("utf-8", "ignore")


def _last_bytes(text: str, room: int) -> str:
    raw = text.encode()
    if len(raw) <= room:
        return text
    return raw[len(raw) - room :].decode("utf-8", "ignore")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """How a command ended and what it wrote.

    | attribute | meaning |
    |---|---|
    | `exit_code` | 0 ... 255; after death by signal n it is 128 + n |
    | `signal` | the signal's number, or None |
    | `reason` | `exit`, `signal` or `oom` (the sandbox ran out of memory and the kernel killed the command); `timeout` in the result of an `ExecTimeout` |
    | `stdout`, `stderr` | bytes; above `output_limit` (bytes, for each stream) the middle is missing |
    | `stdout_gap`, `stderr_gap` | None, or the range of offsets in the stream that is missing: `stdout[:gap[0]]` came before it |
    | `stdout_total`, `stderr_total` | bytes that the command wrote |
    | `duration_s`, `cpu_s` | wall clock and CPU time of the command with its children, seconds |
    | `peak_memory` | bytes |
    | `process_id`, `pid` | dsec's id of the process, and its pid inside |
    """

    exit_code: int
    signal: int | None
    reason: str
    stdout: bytes
    stderr: bytes
    duration_s: float
    cpu_s: float
    peak_memory: int
    stdout_gap: tuple[int, int] | None
    stderr_gap: tuple[int, int] | None
    stdout_total: int
    stderr_total: int
    process_id: str
    pid: int
    output_limit: int

    @property
    def truncated(self) -> bool:
        """Whether anything is missing from `stdout` or `stderr`."""
        return self.stdout_gap is not None or self.stderr_gap is not None

    @property
    def text(self) -> str:
        """`stdout` as text: bad bytes become U+FFFD; a dropped middle is marked by `[... N bytes dropped ...]` on a line of its own.

        Characters beside the mark are whole, and a text with a mark encodes to at most `output_limit` bytes.
        """
        return render_text(self.stdout, self.stdout_gap, self.output_limit)

    @property
    def stderr_text(self) -> str:
        """`stderr` as text, as `text` is made."""
        return render_text(self.stderr, self.stderr_gap, self.output_limit)

    @property
    def ok(self) -> bool:
        """Whether the command ended with exit code 0."""
        return self.exit_code == 0


def exec_result(response: t.ExecResponse, output_limit: int) -> ExecResult:
    """The result for users from the one that travelled."""
    reason = "signal" if response.reason == "killed" else response.reason
    return ExecResult(
        exit_code=response.exit_code,
        signal=response.signal,
        reason=reason,
        stdout=response.stdout,
        stderr=response.stderr,
        duration_s=response.duration_s,
        cpu_s=response.cpu_s,
        peak_memory=response.peak_memory,
        stdout_gap=response.stdout_gap,
        stderr_gap=response.stderr_gap,
        stdout_total=response.stdout_total,
        stderr_total=response.stderr_total,
        process_id=response.process_id,
        pid=response.pid,
        output_limit=output_limit,
    )


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of a process's output. `offset` is its place in `stream` ("stdout" or "stderr").

    `dropped` > 0 marks a gap: so many bytes from `offset` on are no longer kept, and `data` is empty.
    """

    stream: str
    data: bytes
    offset: int
    dropped: int = 0

    @property
    def text(self) -> str:
        """The bytes as text; bad ones, and characters cut between two pieces, become U+FFFD."""
        return MARKER.format(dropped=self.dropped) if self.dropped else self.data.decode("utf-8", "replace")


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A file. `name` and `path` are text in which bytes that are not UTF-8 are surrogates (`surrogateescape`), as in `os`.

    `type` is file, directory, symlink, fifo, socket, char or block; `size` bytes; `mode` permission bits; `mtime` seconds since the
    epoch; `target` where a symlink points.
    """

    name: str
    path: str
    type: str
    size: int
    mode: int
    uid: int
    gid: int
    mtime: float
    target: str | None = None

    @property
    def is_dir(self) -> bool:
        """Whether it is a directory (not a symlink to one)."""
        return self.type == "directory"

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file (not a symlink to one)."""
        return self.type == "file"


def file_entry(entry: t.FileEntry) -> FileEntry:
    """The entry for users from the one that travelled."""
    return FileEntry(
        name=entry.name if entry.name_bytes is None else entry.name_bytes.decode("utf-8", "surrogateescape"),
        path=entry.path if entry.path_bytes is None else entry.path_bytes.decode("utf-8", "surrogateescape"),
        type=entry.type,
        size=entry.size,
        mode=entry.mode,
        uid=entry.uid,
        gid=entry.gid,
        mtime=entry.mtime,
        target=entry.target,
    )


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a listing; `next_cursor` is None on the last."""

    items: list[T]
    next_cursor: str | None = None
