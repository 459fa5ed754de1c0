"""API keys: how they are made, hashed and handed to the operator. A key is kept only as HMAC-SHA-256 under the installation's secret.

The rule a reader could break: a key's text exists in the file made at the first start and in its holder's hands, nowhere else.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

PREFIX = "dsec_"
KEY_BYTES = 32
MAX_KEY_CHARS = 128
"""Longer texts are no keys of ours and are not hashed."""


def new_key() -> str:
    """A fresh key: `dsec_` and 256 random bits in lower-case base32."""
    return PREFIX + base64.b32encode(secrets.token_bytes(KEY_BYTES)).decode().rstrip("=").lower()


def hash_key(secret: bytes, key: str) -> bytes:
    """The keyed hash under which a key is stored."""
    return hmac.digest(secret, key.encode(), hashlib.sha256)


def read_key_file(path: Path) -> str | None:
    """The key in the file, None if the file is missing or empty. Blocks."""
    try:
        return path.read_text(encoding="ascii").strip() or None
    except FileNotFoundError:
        return None


def write_key_file(path: Path, key: str) -> None:
    """Write the key to `path` with mode 0600, whole or not at all; its folder must exist. Blocks. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(key + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
