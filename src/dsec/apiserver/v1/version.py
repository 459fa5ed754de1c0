"""The release that answers. Read from the installed package: importing `dsec` itself would pull the SDK in."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

VERSION: Final = version("dsec")
