"""Text made of output: bad bytes, dropped middles, whole characters, the byte limit."""

from __future__ import annotations

import random

import pytest

from dsec.sdk._collector import OutputCollector
from dsec.sdk.results import render_text

EURO = "\u20ac".encode()


def test_without_a_gap_all_is_kept() -> None:
    assert render_text(b"a\xffb\n", None, 1) == "a\ufffdb\n"
    assert render_text(b"", None, 100) == ""


@pytest.mark.parametrize("limit", [200, 201, 202, 1000, 99_999])
def test_a_dropped_middle_is_marked_between_whole_characters(limit: int) -> None:
    data = EURO * 100_000
    head, tail = limit - limit // 2, limit // 2
    text = render_text(data[:head] + data[-tail:], (head, len(data) - tail), limit)
    assert len(text.encode()) <= limit
    before, mark, after = text.partition("\n[... ")
    dropped, _, after = after.partition(" bytes dropped ...]\n")
    assert mark
    assert set(before + after) == {"\u20ac"}
    assert int(dropped) == len(data) - len((before + after).encode())


@pytest.mark.parametrize("limit", [0, 1, 10, 30, 60, 100])
def test_tiny_limits_hold(limit: int) -> None:
    text = render_text(EURO * (limit // 3), (limit // 6 * 3, 10_000), limit)
    assert len(text.encode()) <= limit
    assert "\ufffd" not in text


def test_bad_bytes_beside_a_gap_keep_to_the_limit() -> None:
    rng = random.Random(1)
    for _ in range(200):
        data = rng.randbytes(rng.randrange(1, 300))
        start = rng.randrange(len(data) + 1)
        limit = rng.randrange(40, 400)
        assert len(render_text(data, (start, start + 1000), limit).encode()) <= limit


def test_the_collector_cuts_as_documented() -> None:
    rng = random.Random(2)
    data = rng.randbytes(300_000)
    for limit in (0, 1, 7, 1000, 299_999, 300_000, 400_000):
        collector = OutputCollector(limit)
        position = 0
        while position < len(data):
            size = rng.randrange(1, 70_000)
            collector.add(data[position : position + size])
            position += size
        kept, gap = collector.finish()
        if limit >= len(data):
            assert (kept, gap) == (data, None)
        else:
            head, tail = limit - limit // 2, limit // 2
            assert gap == (head, len(data) - tail)
            assert kept == data[:head] + data[len(data) - tail :]


def test_the_collector_counts_what_the_server_dropped() -> None:
    collector = OutputCollector(100)
    collector.add(b"a" * 10)
    collector.skip(1000)
    collector.add(b"b" * 10)
    assert collector.finish() == (b"a" * 10 + b"b" * 10, (10, 1010))
    assert collector.total == 1020
