"""The journal over restarts, also torn ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.api.types import Kind, SandboxRecord, State
from dsec.edge.journal import Journal


def record(name: str, state: State = State.RUNNING) -> SandboxRecord:
    return SandboxRecord(
        id=name, project="p", principal="u", edge="aaaa", epoch=1, kind=Kind.CONTAINER, state=state, image="i", cpus=1.0,
        memory=1, disk=1, pids=1, created_at=1.0, labels={"a": "b"},
    )  # fmt: skip


def test_epochs_rise_and_the_last_entry_counts(tmp_path: Path) -> None:
    path = tmp_path / "state" / "edge.journal"
    journal = Journal.open(path)
    assert (journal.epoch, journal.kept) == (1, {})
    journal.put(record("a", State.CREATING))
    journal.put(record("a"), slot=7)
    journal.put(record("b"))
    journal.forget(["b"])
    journal.close()
    again = Journal.open(path)
    assert again.epoch == 2
    assert list(again.kept) == ["a"]
    assert again.kept["a"].slot == 7
    assert again.kept["a"].record == record("a")
    again.close()
    third = Journal.open(path)
    assert (third.epoch, list(third.kept)) == (3, ["a"])
    third.close()


def test_what_was_flushed_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "edge.journal"
    journal = Journal.open(path)
    journal.put(record("a"))
    journal.flush()
    journal.put(record("b"))  # gathered, not written: as if the process died here
    assert list(Journal.open(path).kept) == ["a"]


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_end_loses_only_itself(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "edge.journal"
    journal = Journal.open(path)
    journal.put(record("a"))
    journal.put(record("b"))
    journal.close()
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    again = Journal.open(path)
    assert list(again.kept) == ["a"]
    assert again.epoch == 2
    again.close()


def test_damage_in_the_middle_is_survived(tmp_path: Path) -> None:
    path = tmp_path / "edge.journal"
    path.write_bytes(b"\x03\x00\x00\x00\xc1\xc1\xc1" + b"rest")
    journal = Journal.open(path)
    assert journal.kept == {}
    journal.close()


def test_compaction_keeps_the_living_and_shrinks(tmp_path: Path) -> None:
    path = tmp_path / "edge.journal"
    journal = Journal.open(path)
    journal.put(record("a"))
    for _ in range(60_000):
        journal.put(record("b"))
    journal.flush()
    assert journal.wants_compaction
    before = path.stat().st_size
    journal.compact(Journal.open(path).kept.values())
    journal.put(record("c"))
    journal.close()
    assert path.stat().st_size < before / 1000
    assert set(Journal.open(path).kept) == {"a", "b", "c"}
