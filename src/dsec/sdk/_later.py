"""What this release does not have yet, refused in one way."""

from __future__ import annotations

from typing import Any

from dsec.api.errors import Unsupported


def later(feature: str) -> Unsupported:
    """The refusal of a feature that a later release brings."""
    return Unsupported(f"{feature} is not part of this release of dsec", feature=feature)


class Later:
    """Stands for a namespace that a later release brings: using anything of it raises Unsupported."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, verb: str) -> Any:
        if verb.startswith("__"):
            raise AttributeError(verb)
        raise later(f"{self._name}.{verb}")


def function(*_: object, **__: object) -> Any:
    """Make a Python function run in sandboxes. Not part of this release: raises Unsupported."""
    raise later("function")
