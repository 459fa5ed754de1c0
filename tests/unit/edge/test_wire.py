"""Frames and stream tokens."""

from __future__ import annotations

import pytest

from dsec.api import token, wire
from dsec.api.errors import PermissionDenied


def test_frames_of_one_packet_come_out_as_they_went_in() -> None:
    packet = (
        wire.map_frame(1, wire.OPEN | wire.FIN, {"m": "ps"})
        + wire.frame(3, wire.DATA, b"abc")
        + wire.credit_frame(3, 70_000)
    )
    found = [(stream, kind, bytes(payload)) for stream, kind, payload in wire.frames(memoryview(packet))]
    assert [(stream, kind) for stream, kind, _ in found] == [
        (1, wire.OPEN | wire.FIN),
        (3, wire.DATA),
        (3, wire.CREDIT),
    ]
    assert wire.fields_of(found[0][2]) == {"m": "ps"}
    assert found[1][2] == b"abc"
    assert wire.credit_of(found[2][2]) == 70_000


def test_the_layout_is_that_of_the_document() -> None:
    assert wire.frame(0x01020304, wire.DATA | wire.FIN, b"xy") == bytes.fromhex("07000000 04030201 83") + b"xy"


@pytest.mark.parametrize(
    "packet", [b"\x05\x00", bytes.fromhex("04000000 01000000 00"), bytes.fromhex("ff000000 01000000 00") + b"abc"]
)
def test_damaged_packets_are_refused(packet: bytes) -> None:
    with pytest.raises(wire.WireError):
        list(wire.frames(memoryview(packet)))


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x91" * 5000])
def test_a_payload_that_is_no_map_is_refused(payload: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.fields_of(payload)


def test_what_does_not_fit_a_frame_is_refused() -> None:
    wire.frame(1, wire.DATA, bytes(wire.MAX_PAYLOAD_BYTES))
    with pytest.raises(wire.WireError):
        wire.frame(1, wire.DATA, bytes(wire.MAX_PAYLOAD_BYTES + 1))
    with pytest.raises(wire.WireError):
        wire.map_frame(1, wire.OPEN, {"env": "x" * wire.MAX_PAYLOAD_BYTES})


def test_a_token_says_what_it_was_minted_for_until_it_expires() -> None:
    key = token.TokenKey(b"k" * 32)
    text = key.mint(project="team.a", sandbox="aaaabbbb", operations=token.EXEC, now_s=1000.0, life_s=60.0)
    claim = key.verify(text, now_s=1060.0)
    assert (claim.project, claim.sandbox, claim.operations) == ("team.a", "aaaabbbb", token.EXEC)
    with pytest.raises(PermissionDenied, match="expired"):
        key.verify(text, now_s=1061.0)


def test_a_changed_token_is_refused() -> None:
    key = token.TokenKey(b"k" * 32)
    text = key.mint(project="p", sandbox="s", operations=token.READ, now_s=0.0)
    for position in range(len(text)):
        forged = text[:position] + ("0" if text[position] != "0" else "1") + text[position + 1 :]
        with pytest.raises(PermissionDenied):
            key.verify(forged, now_s=0.0)
    with pytest.raises(PermissionDenied):
        token.TokenKey(b"x" * 32).verify(text, now_s=0.0)
    for nonsense in ("", ".", "a.b", "ü.ü"):
        with pytest.raises(PermissionDenied):
            key.verify(nonsense, now_s=0.0)


@pytest.mark.parametrize(
    ("params", "needed"),
    [
        ({"m": "exec"}, token.EXEC),
        ({"m": "ps"}, token.OBSERVE),
        ({"m": "file", "op": "stat"}, token.READ),
        ({"m": "file", "op": "write"}, token.WRITE),
        ({"m": "file", "op": "of tomorrow"}, token.WRITE),
    ],
)
def test_each_method_needs_its_operation(params: dict[str, object], needed: int) -> None:
    assert token.operation(params) == needed


@pytest.mark.parametrize("params", [{"m": "config"}, {"m": None}, {}])
def test_no_token_covers_the_edges_own_methods(params: dict[str, object]) -> None:
    assert token.operation(params) & ~token.ALL
