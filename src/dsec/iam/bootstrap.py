"""The first start: one project, one principal, one key."""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path

from dsec.iam.authorize import Authenticator
from dsec.iam.keys import PREFIX, hash_key, new_key, read_key_file, write_key_file
from dsec.store import KeyRow, Store

DEFAULT_PROJECT = "default"
DEFAULT_PRINCIPAL = "admin"
_SECRET = "iam.secret"  # noqa: S105 - the name under which it is kept


async def open_iam(store: Store, key_file: Path) -> Authenticator:
    """Make what is missing (secret, project `default`, principal `admin`, a key in `key_file` with mode 0600) and return the gate.

    A key file that is there already is kept and its key made known, so that a lost database does not lock anybody out.
    Raises OSError if the file cannot be written.
    """
    secret = await store.claim_meta(_SECRET, secrets.token_bytes(32))
    now = time.time()
    await store.add_principal(DEFAULT_PROJECT, DEFAULT_PRINCIPAL, now=now)
    key = await asyncio.to_thread(read_key_file, key_file)
    if key is None or not key.startswith(PREFIX):
        key = new_key()
        await asyncio.to_thread(write_key_file, key_file, key)
    hashed = hash_key(secret, key)
    if await store.key(hashed) is None:
        await store.add_key(
            KeyRow(hash=hashed, name="first", project=DEFAULT_PROJECT, principal=DEFAULT_PRINCIPAL, created_at=now)
        )
    return Authenticator(store, secret)
