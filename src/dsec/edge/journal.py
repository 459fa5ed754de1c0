"""The edge's own memory over restarts: its epoch, the sandboxes it answers for, and ends that the store has not heard of yet.

An append-only file of msgpack entries, each `u32le length | entry`. Entries gather during one turn of the loop and go out in one write
(group commit). Written is kept: a write is in the kernel before it returns, and only processes may be killed, not the machine - after
a power loss no sandbox is left to adopt. The one rule: an entry is written before what it announces is done (`flush`, then spawn).
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Self

import msgspec

from dsec.api.types import SandboxRecord

log = logging.getLogger(__name__)

_LENGTH: Final = struct.Struct("<I")
_COMPACT_BYTES: Final = 8 << 20
"""The file is rewritten when it has grown by this much since the last time: about 15,000 entries."""


class Kept(msgspec.Struct, array_like=True):
    """A sandbox as the journal keeps it."""

    record: SandboxRecord
    slot: int = -1


class _Epoch(msgspec.Struct, array_like=True, tag="e"):
    number: int


class _Put(msgspec.Struct, array_like=True, tag="p"):
    kept: Kept


class _Forget(msgspec.Struct, array_like=True, tag="f"):
    ids: list[str]


_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(_Epoch | _Put | _Forget)


class Journal:
    """An open journal. `kept` is what was in it when it was opened, `epoch` this run's number (one above the last)."""

    def __init__(self, path: Path, descriptor: int, kept: dict[str, Kept], epoch: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._pending: list[bytes] = []
        self._grown_bytes = 0
        self.kept = kept
        self.epoch = epoch

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read `path` (made if missing), count the epoch up and rewrite it compactly. A torn last entry is dropped.

        Blocks for the time of reading: for starts only.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        epoch, kept = _replay(path)
        journal = cls(path, -1, kept, epoch + 1)
        journal._rewrite(kept.values())
        return journal

    @property
    def wants_compaction(self) -> bool:
        """Whether `compact` would be worth its time."""
        return self._grown_bytes > _COMPACT_BYTES

    def put(self, record: SandboxRecord, *, slot: int = -1) -> None:
        """Note the record as it is now; the last entry for an id counts."""
        self._add(_Put(Kept(record, slot)))

    def forget(self, ids: Iterable[str]) -> None:
        """Drop sandboxes that have ended and that the store knows to have ended."""
        self._add(_Forget(list(ids)))

    def flush(self) -> None:
        """Write what has gathered. Takes microseconds: it goes to the page cache."""
        if self._pending:
            data = b"".join(self._pending)
            self._pending.clear()
            self._grown_bytes += len(data)
            _write_all(self._descriptor, data)

    def compact(self, living: Iterable[Kept]) -> None:
        """Rewrite the file with `living` alone (everything that is not forgotten)."""
        self.flush()
        self._rewrite(living)

    def close(self) -> None:
        """Flush and close. Idempotent."""
        if self._descriptor >= 0:
            self.flush()
            os.close(self._descriptor)
            self._descriptor = -1

    def _add(self, entry: _Put | _Forget) -> None:
        data = _encode(entry)
        self._pending.append(_LENGTH.pack(len(data)))
        self._pending.append(data)

    def _rewrite(self, living: Iterable[Kept]) -> None:
        parts: list[bytes] = []
        for entry in (_Epoch(self.epoch), *(_Put(kept) for kept in living)):
            data = _encode(entry)
            parts += (_LENGTH.pack(len(data)), data)
        fresh = self._path.with_suffix(".new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write_all(descriptor, b"".join(parts))
            fresh.rename(self._path)
        except BaseException:
            os.close(descriptor)
            raise
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = descriptor
        self._grown_bytes = 0


def _replay(path: Path) -> tuple[int, dict[str, Kept]]:
    epoch, kept = 0, dict[str, Kept]()
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return epoch, kept
    position = 0
    while position + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        end = position + _LENGTH.size + length
        if end > len(data):
            break
        try:
            entry = _decoder.decode(data[position + _LENGTH.size : end])
        except msgspec.MsgspecError:
            log.exception("the journal is damaged; what follows is lost", extra={"path": str(path), "offset": position})
            break
        position = end
        if isinstance(entry, _Epoch):
            epoch = entry.number
        elif isinstance(entry, _Put):
            kept[entry.kept.record.id] = entry.kept
        else:
            for sandbox in entry.ids:
                kept.pop(sandbox, None)
    return epoch, kept


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
