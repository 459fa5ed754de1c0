"""Cursors of listings: where the next page starts, opaque to clients."""

from __future__ import annotations

import base64
import binascii
import struct

from dsec.api.errors import InvalidRequest
from dsec.api.ids import is_sandbox_id
from dsec.api.types import SandboxRecord

_TIME = struct.Struct(">d")


def encode_cursor(last: SandboxRecord) -> str:
    """The cursor of the page after the one that ends with `last`."""
    return base64.urlsafe_b64encode(_TIME.pack(last.created_at) + last.id.encode()).decode().rstrip("=")


def decode_cursor(cursor: str) -> tuple[float, str]:
    """Where the page starts. Raises InvalidRequest for what is no cursor."""
    try:
        raw = base64.urlsafe_b64decode(cursor.encode() + b"=" * (-len(cursor) % 4))
        (created_at,) = _TIME.unpack_from(raw)
        name = raw[_TIME.size :].decode("ascii")
    except (binascii.Error, struct.error, ValueError) as error:
        raise InvalidRequest("cursor is not one that a listing returned") from error
    if not is_sandbox_id(name):
        raise InvalidRequest("cursor is not one that a listing returned")
    return created_at, name
