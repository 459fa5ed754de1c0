"""What the service needs from its surroundings; the composition root passes the implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dsec.api.types import NodeInfo
from dsec.images.catalog import Environment


class Placement(Protocol):
    """Finds the node for a sandbox."""

    async def place(self, *, kind: str, cpus: float, memory_bytes: int, count: int) -> NodeInfo:
        """The node that shall start `count` sandboxes alike. Raises NoCapacity or Unsupported with the reason."""

    async def nodes(self) -> list[NodeInfo]:
        """All nodes that answer."""


class Images(Protocol):
    """The catalog of environments. Blocks on file I/O, so the service calls it in a thread."""

    def resolve(self, name: str, *, project: str | None = None) -> Environment:
        """The environment of that name. Raises InvalidRequest or ImageError."""

    def list(self, *, project: str | None = None) -> Sequence[Environment]:
        """All environments the project may use."""

    def size(self, environment: Environment) -> int:
        """Bytes on disk of its layers."""
