"""The error tree of dsec: what a caller can do decides the branch.

    DsecError
    ├── InvalidRequest (ValueError)          the request can never succeed as it is; mend it
    │   └── CommandNotStarted                the command could not be started; not an exit code
    ├── Unauthenticated / PermissionDenied   a key is missing or wrong / may not do this
    ├── NotFound (LookupError)               no such thing, or another project's
    ├── Conflict                             wrong state for this operation
    ├── QuotaExceeded / NoCapacity           try later (`retry_after`, seconds)
    ├── Unsupported                          a kind or feature this host or release lacks
    ├── ImageError                           an image or layer cannot be used
    ├── ExecTimeout (TimeoutError)           the command was killed at its deadline; `result` has its partial output
    ├── CommandFailed                        `check=True` and a non-zero end; `result` has all of it
    ├── SandboxGone                          the sandbox has ended; `reason` says why
    ├── FileError (OSError) ...              one class for each cause, also the fitting built-in
    ├── OutcomeUnknown                       it may or may not have happened
    ├── ConnectionFailed (ConnectionError)   the server cannot be reached
    ├── DeadlineExceeded (TimeoutError)      the call's own `timeout` ran out before an answer
    └── InternalError                        a fault of dsec's

Every class has a stable `code`, travels as `ErrorBody` and is rebuilt from a table of codes. `sandbox_survived` tells whether the
sandbox the call was about still exists (None: no sandbox was involved, or it is not known).
"""

from __future__ import annotations

import errno
from typing import Any, ClassVar

import msgspec


class ErrorBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An error as it travels: `{"code", "message", "retryable", "details"}`."""

    code: str
    message: str
    retryable: bool = False
    details: dict[str, Any] = {}


class DsecError(Exception):
    """Root of all errors that dsec raises on purpose.

    Attributes: `code` (stable), `retryable` (the same request may succeed later), `sandbox_id`, `sandbox_survived`, `details`.
    """

    code: ClassVar[str] = "error"
    retryable: bool = False
    http_status: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        *,
        sandbox_id: str | None = None,
        sandbox_survived: bool | None = None,
        **details: Any,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.sandbox_id = sandbox_id
        self.sandbox_survived = sandbox_survived
        self.details: dict[str, Any] = details

    def __str__(self) -> str:
        return self.message

    def body(self) -> ErrorBody:
        """The error in the form that travels."""
        details = {name: value for name, value in self.details.items() if value is not None}
        if self.sandbox_id is not None:
            details["sandbox_id"] = self.sandbox_id
        if self.sandbox_survived is not None:
            details["sandbox_survived"] = self.sandbox_survived
        return ErrorBody(code=self.code, message=self.message, retryable=self.retryable, details=details)


class InvalidRequest(DsecError, ValueError):
    """The request can never succeed as it is; the message says what to change."""

    code = "invalid_request"
    http_status = 400


class CommandNotStarted(InvalidRequest):
    """The command could not be started (no such program, not executable, missing directory): there is no exit code."""

    code = "command_not_started"


class Unauthenticated(DsecError):
    """The API key is missing or not known."""

    code = "unauthenticated"
    http_status = 401


class PermissionDenied(DsecError):
    """The key is known but may not do this."""

    code = "permission_denied"
    http_status = 403


class NotFound(DsecError, LookupError):
    """No such thing, or one that belongs to another project."""

    code = "not_found"
    http_status = 404


class Conflict(DsecError):
    """The thing is in a state in which this cannot be done."""

    code = "conflict"
    http_status = 409


class QuotaExceeded(DsecError):
    """The project's quota is used up; `details` names the limit."""

    code = "quota_exceeded"
    retryable = True
    http_status = 429


class NoCapacity(DsecError):
    """The host or fleet has no room now; `retry_after` (seconds) is a hint."""

    code = "no_capacity"
    retryable = True
    http_status = 503

    @property
    def retry_after(self) -> float:
        """Seconds after which a retry makes sense."""
        return float(self.details.get("retry_after", 1.0))


class Unsupported(DsecError, NotImplementedError):
    """A kind, feature or option that this host or this release does not have; the message says why."""

    code = "unsupported"
    http_status = 422


class ImageError(DsecError):
    """An image or layer cannot be used; the message says why."""

    code = "image_error"
    http_status = 422


class ExecTimeout(DsecError, TimeoutError):
    """The command was killed, with all its children, at its deadline. `result` is the `ExecResult` with partial output."""

    code = "exec_timeout"
    http_status = 408
    result: Any = None


class CommandFailed(DsecError):
    """`check=True` was asked and the command did not end with exit code 0. `result` is the `ExecResult`."""

    code = "command_failed"
    http_status = 409
    result: Any = None


class SandboxGone(DsecError):
    """The sandbox has ended; `reason` is `requested`, `idle`, `lifetime`, `oom`, `crashed`, `channel_lost`, ..."""

    code = "sandbox_gone"
    http_status = 410

    @property
    def reason(self) -> str:
        """Why the sandbox ended."""
        return str(self.details.get("reason", "unknown"))


class FileError(DsecError, OSError):
    """A file operation failed; `errno` and `filename` are set as for OSError."""

    code = "file_error"
    http_status = 409
    default_errno: ClassVar[int] = errno.EIO

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message, **details)
        self.errno = int(self.details.get("errno") or self.default_errno)
        self.filename = self.details.get("path")


class FileNotFound(FileError, FileNotFoundError):
    """No such file or directory."""

    code = "file_not_found"
    http_status = 404
    default_errno = errno.ENOENT


class FileDenied(FileError, PermissionError):
    """The user may not do this to the file."""

    code = "file_denied"
    http_status = 403
    default_errno = errno.EACCES


class FileIsDirectory(FileError, IsADirectoryError):
    """A file was needed and a directory is there."""

    code = "file_is_directory"
    default_errno = errno.EISDIR


class FileNotDirectory(FileError, NotADirectoryError):
    """A directory was needed and something else is there."""

    code = "file_not_directory"
    default_errno = errno.ENOTDIR


class FileExists(FileError, FileExistsError):
    """Something of that name is there already."""

    code = "file_exists"
    default_errno = errno.EEXIST


class DirectoryNotEmpty(FileError):
    """The directory has entries; `recursive=True` removes them too."""

    code = "directory_not_empty"
    default_errno = errno.ENOTEMPTY


class NotRegularFile(FileError):
    """A fifo, socket or device: reading it could wait for ever."""

    code = "not_regular_file"
    default_errno = errno.EINVAL


class InvalidPath(FileError):
    """A path that cannot exist: too long, a NUL in it, too many links, or leading out of the target."""

    code = "invalid_path"
    http_status = 400
    default_errno = errno.EINVAL


class NoSpace(FileError):
    """The sandbox's disk (or, for images, the store) is full."""

    code = "no_space"
    http_status = 507
    default_errno = errno.ENOSPC


class OutcomeUnknown(DsecError):
    """The answer was lost; the operation may or may not have happened. Repeating it with the same request id is safe."""

    code = "outcome_unknown"
    retryable = True
    http_status = 502


class ConnectionFailed(DsecError, ConnectionError):
    """The server cannot be reached."""

    code = "connection_failed"
    retryable = True
    http_status = 502


class DeadlineExceeded(DsecError, TimeoutError):
    """The call's own time limit ran out before there was an answer."""

    code = "deadline_exceeded"
    retryable = True
    http_status = 504


class InternalError(DsecError):
    """A fault of dsec's; the server's log has the traceback under `details["incident"]`."""

    code = "internal"
    http_status = 500


def _tree(root: type[DsecError]) -> dict[str, type[DsecError]]:
    table = {root.code: root}
    for child in root.__subclasses__():
        table |= _tree(child)
    return table


ERRORS: dict[str, type[DsecError]] = _tree(DsecError)
"""Every error class by its code."""


def from_body(body: ErrorBody) -> DsecError:
    """Rebuild the error that travelled as `body`; an unknown code becomes a plain `DsecError`."""
    details = dict(body.details)
    sandbox_id, survived = details.pop("sandbox_id", None), details.pop("sandbox_survived", None)
    error = ERRORS.get(body.code, DsecError)(body.message, sandbox_id=sandbox_id, sandbox_survived=survived, **details)
    error.retryable = body.retryable
    return error
