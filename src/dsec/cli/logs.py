"""The daemon's log: one JSON object a line in the home's log file; warnings for people on stderr. Written by a thread of its own."""

from __future__ import annotations

import logging
import logging.handlers
import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

_MAX_BYTES = 32 << 20
_BACKUPS = 3
_QUEUED = 10_000
"""Records waiting for the disk; more are dropped rather than anything waiting for it."""
_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """A record as a JSON object: time, level, logger, message, and the fields given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        fields = {name: value for name, value in record.__dict__.items() if name not in _STANDARD}
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class _Queueing(logging.handlers.QueueHandler):
    """Hands records over as they are: formatting is the writing thread's work."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Keep the record whole; the listener is in this process."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue it, or drop it where the disk is too slow."""
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            return


@contextmanager
def logging_to(path: Path, *, to_stderr: bool) -> Iterator[None]:
    """Send all logs to `path`, and warnings also to stderr, while the context is open."""
    file = logging.handlers.RotatingFileHandler(path, maxBytes=_MAX_BYTES, backupCount=_BACKUPS, encoding="utf-8")
    file.setFormatter(JsonFormatter())
    handlers: list[logging.Handler] = [file]
    if to_stderr:
        people = logging.StreamHandler()
        people.setLevel(logging.WARNING)
        people.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handlers.append(people)
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(_QUEUED)
    listener = logging.handlers.QueueListener(waiting, *handlers, respect_handler_level=True)
    root = logging.getLogger()
    handler = _Queueing(waiting)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    listener.start()
    try:
        yield
    finally:
        listener.stop()
        root.removeHandler(handler)
        file.close()
