"""dsec: self-hosted elastic sandboxes for AI agents.

The names of the SDK live here. They are loaded at their first use, so that `import dsec` costs nothing a program does not need.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsec.api.errors import (
        CommandFailed,
        CommandNotStarted,
        Conflict,
        ConnectionFailed,
        DeadlineExceeded,
        DirectoryNotEmpty,
        DsecError,
        ExecTimeout,
        FileDenied,
        FileError,
        FileExists,
        FileIsDirectory,
        FileNotDirectory,
        FileNotFound,
        ImageError,
        InternalError,
        InvalidPath,
        InvalidRequest,
        NoCapacity,
        NoSpace,
        NotFound,
        NotRegularFile,
        OutcomeUnknown,
        PermissionDenied,
        QuotaExceeded,
        SandboxGone,
        Unauthenticated,
        Unsupported,
    )
    from dsec.sdk import (
        AsyncClient,
        AsyncEvents,
        AsyncFiles,
        AsyncImages,
        AsyncNodes,
        AsyncProcess,
        AsyncSandbox,
        Client,
        Events,
        ExecResult,
        FileEntry,
        Files,
        Images,
        Later,
        Nodes,
        Output,
        Page,
        Process,
        Sandbox,
        Stopped,
        Transfer,
        function,
    )

__version__ = "0.1.0"
__all__ = [
    "AsyncClient",
    "AsyncEvents",
    "AsyncFiles",
    "AsyncImages",
    "AsyncNodes",
    "AsyncProcess",
    "AsyncSandbox",
    "Client",
    "CommandFailed",
    "CommandNotStarted",
    "Conflict",
    "ConnectionFailed",
    "DeadlineExceeded",
    "DirectoryNotEmpty",
    "DsecError",
    "Events",
    "ExecResult",
    "ExecTimeout",
    "FileDenied",
    "FileEntry",
    "FileError",
    "FileExists",
    "FileIsDirectory",
    "FileNotDirectory",
    "FileNotFound",
    "Files",
    "ImageError",
    "Images",
    "InternalError",
    "InvalidPath",
    "InvalidRequest",
    "Later",
    "NoCapacity",
    "NoSpace",
    "Nodes",
    "NotFound",
    "NotRegularFile",
    "OutcomeUnknown",
    "Output",
    "Page",
    "PermissionDenied",
    "Process",
    "QuotaExceeded",
    "Sandbox",
    "SandboxGone",
    "Stopped",
    "Transfer",
    "Unauthenticated",
    "Unsupported",
    "__version__",
    "function",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    errors = import_module("dsec.api.errors")
    value = getattr(errors, name) if hasattr(errors, name) else getattr(import_module("dsec.sdk"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
