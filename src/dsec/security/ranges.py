"""Builds the part of a filter that needs no argument: a search tree over ranges of call numbers.

libseccomp gives each call a branch of its own: 488 instructions for the default profile. The kernel checks, translates and runs them
through its table of always-allowed calls at every load, which is a tenth of a sandbox's whole start. Most neighbouring numbers share
their action, so that ranges need a third of it. Calls whose arguments matter stay libseccomp's: the tree jumps to its program.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final

_LOAD_WORD: Final = 0x20
_JUMP_ALWAYS: Final = 0x05
_JUMP_EQUAL: Final = 0x15
_JUMP_AT_LEAST: Final = 0x35
_RETURN: Final = 0x06
# Offsets in struct seccomp_data.
_NUMBER: Final = 0
_ARCHITECTURE: Final = 4
_INSTRUCTION: Final = struct.Struct("=HBBI")

_Tree = list[tuple[int, int, int, int]]
_FARTHEST_BRANCH: Final = 255
"""A conditional jump has one byte for its distance."""


def build(
    *, architecture: int, other_architecture: int, actions: Mapping[int, int | None], default: int, tail: bytes
) -> bytes:
    """Return a filter: `actions` by call number (None: ask `tail`, a complete filter), `default` for the rest.

    `architecture` is the AUDIT_ARCH of the host; calls of others end with `other_architecture`.
    """
    tree = _search(_ranges(actions, default))
    head = [
        (_LOAD_WORD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, other_architecture),
        (_LOAD_WORD, 0, 0, _NUMBER),
    ]
    program = head + tree
    length = len(program)
    # Where the tree says "ask", the distance to the tail is known only now.
    placed = [
        (code, yes, no, length - place - 1) if code == _JUMP_ALWAYS else (code, yes, no, value)
        for place, (code, yes, no, value) in enumerate(program)
    ]
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in placed) + tail


def _ranges(actions: Mapping[int, int | None], default: int) -> list[tuple[int, int | None]]:
    """Return the numbers at which the action changes, with the action from there on; the first is 0."""
    ranges: list[tuple[int, int | None]] = []
    for number in range(max(actions, default=-1) + 2):
        action = actions.get(number, default)
        if not ranges or ranges[-1][1] != action:
            ranges.append((number, action))
    return ranges


def _search(ranges: list[tuple[int, int | None]]) -> _Tree:
    if len(ranges) == 1:
        action = ranges[0][1]
        return [(_JUMP_ALWAYS, 0, 0, 0) if action is None else (_RETURN, 0, 0, action)]
    middle = len(ranges) // 2
    below, above = _search(ranges[:middle]), _search(ranges[middle:])
    if len(below) > _FARTHEST_BRANCH:
        raise ValueError(f"{len(ranges)} ranges of system calls are more than a filter's tree can hold")
    return [(_JUMP_AT_LEAST, len(below), 0, ranges[middle][0]), *below, *above]
