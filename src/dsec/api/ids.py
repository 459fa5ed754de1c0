"""Identifiers: lower-case base32, no hyphen, at most 40 characters; a sandbox's id starts with its home edge's code."""

from __future__ import annotations

import secrets
from typing import NewType

SandboxId = NewType("SandboxId", str)
ProcessId = NewType("ProcessId", str)
EdgeCode = NewType("EdgeCode", str)
ProjectId = NewType("ProjectId", str)
PrincipalId = NewType("PrincipalId", str)

EDGE_CODE_CHARS = 4
"""Length of an edge code: 20 bits name a million edges."""
RANDOM_CHARS = 16
"""80 random bits: no collision in sight at millions of sandboxes a day, and not to be guessed."""

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"


def random_base32(chars: int) -> str:
    """`chars` random lower-case base32 characters (5 bits each) from the system's generator."""
    value = secrets.randbits(5 * chars)
    return "".join([_ALPHABET[(value >> shift) & 31] for shift in range(0, 5 * chars, 5)])


def new_sandbox_id(edge: EdgeCode) -> SandboxId:
    """A fresh sandbox id whose home is `edge`."""
    return SandboxId(edge + random_base32(RANDOM_CHARS))


def new_process_id() -> ProcessId:
    """A fresh id for a process in a sandbox."""
    return ProcessId("p" + random_base32(11))


def home_edge(sandbox_id: str) -> EdgeCode:
    """The code of the edge on which `sandbox_id` was created; where it lives now is for `route` to say."""
    return EdgeCode(sandbox_id[:EDGE_CODE_CHARS])


def is_sandbox_id(text: str) -> bool:
    """Whether `text` has the form of a sandbox id."""
    return len(text) == EDGE_CODE_CHARS + RANDOM_CHARS and all(char in _ALPHABET for char in text)
