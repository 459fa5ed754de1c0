"""The result of one probe."""

import enum
from dataclasses import dataclass


class Feature(enum.StrEnum):
    """What a check is needed for."""

    HOST = "host"
    CONTAINER = "container"
    DISK = "disk-backed files"
    SCALE = "many sandboxes"
    MICROVM = "microvm"
    FULLVM = "fullvm"
    LAZY_LOADING = "loading on demand"
    AUDIT = "audit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing looked at.

    `ok` is None where it cannot be told (usually: not root). `required` means that no sandbox starts without it. `detail` is what was found, `fix` what to do
    about it (empty while it is well).
    """

    name: str
    feature: Feature
    ok: bool | None
    detail: str
    fix: str = ""
    required: bool = False
