"""What every kind of sandbox must offer. Everything else is done by the guest, which knows no kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from dsec.api.control import StartSandbox


@dataclass(frozen=True, slots=True)
class Group:
    """Sandboxes to start with one message: what they have in common, encoded, and each one's own fields."""

    common: msgspec.Raw
    items: list[dict[str, Any]]


class Backend(Protocol):
    """One kind of sandbox. An operation that the kind lacks raises Unsupported with the reason."""

    async def prepare(self, layers: Sequence[str], disk_bytes: int, backing: str) -> None:
        """Make what is shared by many sandboxes (templates, folders); quick when it is there already.

        Raises ImageError or InternalError.
        """

    def check(self, item: StartSandbox) -> None:
        """Raise InvalidRequest or Unsupported if this kind can never start `item`."""

    def groups(self, items: Sequence[StartSandbox], *, epoch: int) -> list[Group]:
        """The spawn messages for `items`, which `check` has passed, in their order."""

    async def freeze(self, sandbox: str, slot: int) -> None:
        """Stop all its processes for a while."""

    async def thaw(self, sandbox: str, slot: int) -> None:
        """Let them go on."""

    async def snapshot(self, sandbox: str, slot: int) -> str:
        """Keep its state under a name."""
