"""Frames of the guest protocol (docs/protocols.md, section 1). Owns the byte layout only: no streams, no sockets.

The rule a reader could break: frames come from a peer that may be hostile, so parsing raises `WireError` and nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

PROTO: Final = 1
"""Generation of the protocol spoken here."""

HELLO: Final = 0
OPEN: Final = 1
MSG: Final = 2
DATA: Final = 3
RESET: Final = 4
CREDIT: Final = 5
PING: Final = 6
PONG: Final = 7
FIN: Final = 0x80
"""Bit of the type byte: the sender's last frame on this stream."""

HEADER: Final = struct.Struct("<IIB")
"""length (of stream, type and payload), stream, type."""
HEADER_BYTES: Final = HEADER.size
LENGTH_BYTES: Final = 4
MAX_PAYLOAD_BYTES: Final = 65_536
MAX_PACKET_BYTES: Final = 65_600
WINDOW_BYTES: Final = 262_144
"""DATA payload bytes that each direction of a stream may send before the first CREDIT."""

OUTPUT_HEADER: Final = struct.Struct("<BQ")
"""Header of DATA on output streams: channel (1 stdout, 2 stderr), offset."""

_CREDIT: Final = struct.Struct("<IIBI")
_CREDIT_LENGTH: Final = 9
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(dict[str, Any])


class WireError(Exception):
    """Bytes that are no frame, or a payload that is no map."""


def frame(stream: int, kind: int, payload: bytes | memoryview = b"") -> bytes:
    """One frame; `kind` may carry FIN. Raises WireError above 65,536 payload bytes."""
    size = len(payload)
    if size > MAX_PAYLOAD_BYTES:
        raise WireError(f"a frame carries at most {MAX_PAYLOAD_BYTES} bytes, not {size}")
    return b"".join((HEADER.pack(size + 5, stream, kind), payload))


def map_frame(stream: int, kind: int, fields: Mapping[str, Any]) -> bytes:
    """One frame with `fields` as its msgpack map. Raises WireError if that is too long or cannot be encoded."""
    try:
        payload = _encoder.encode(fields)
    except (TypeError, OverflowError, ValueError) as error:
        raise WireError(f"cannot be encoded: {error}") from error
    size = len(payload)
    if size > MAX_PAYLOAD_BYTES:
        raise WireError(f"a message has at most {MAX_PAYLOAD_BYTES} bytes, not {size}")
    return HEADER.pack(size + 5, stream, kind) + payload


def credit_frame(stream: int, granted_bytes: int) -> bytes:
    """A CREDIT frame: the peer may send so many further DATA payload bytes on `stream`."""
    return _CREDIT.pack(_CREDIT_LENGTH, stream, CREDIT, granted_bytes)


def credit_of(payload: bytes | memoryview) -> int:
    """The bytes granted by a CREDIT frame's payload."""
    if len(payload) != 4:
        raise WireError("CREDIT carries four bytes")
    return int.from_bytes(payload, "little")


def fields_of(payload: bytes | memoryview) -> dict[str, Any]:
    """The map that is a frame's payload; raises WireError for anything else."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"the payload is no map: {error}") from error


def frames(packet: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """The frames of a whole packet as (stream, type with FIN, payload); the payload is a view into `packet`.

    Raises WireError at a torn or overlong frame, after what came before it.
    """
    position, end = 0, len(packet)
    while position < end:
        if end - position < HEADER_BYTES:
            raise WireError("the packet ends inside a header")
        length, stream, kind = HEADER.unpack_from(packet, position)
        following = position + LENGTH_BYTES + length
        if length < 5 or following > end or length - 5 > MAX_PAYLOAD_BYTES:
            raise WireError(f"a frame of length {length} does not fit its packet")
        yield stream, kind, packet[position + HEADER_BYTES : following]
        position = following
