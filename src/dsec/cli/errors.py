"""How a command of the command line ends when something goes wrong: one sentence on stderr and an exit code.

0 is success. 1 is an error of dsec. `run` and `exec` end with the exit code of the command (128 + n after signal n); dsec's own errors, a timeout
among them, are 125 there, so that they can be told apart. 130 is Ctrl-C, 2 a wrong use of the command line.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec

import typer

from dsec.api.errors import DsecError, InvalidRequest
from dsec.cli import output

P = ParamSpec("P")

FAILED = 1
NOT_RUN = 125
INTERRUPTED = 130
WRONG_USE = 2


class WrongUse(InvalidRequest):
    """The command line itself is wrong; nothing was asked of a server."""


def reports_errors(command: Callable[P, int | None]) -> Callable[P, None]:
    """Turn a command's errors into its exit code and a sentence; `json=True` among its arguments asks for JSON."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        failed = NOT_RUN if command.__name__ in ("run", "exec_") else FAILED
        as_json = bool(kwargs.get("json"))
        try:
            code = command(*args, **kwargs) or 0
        except WrongUse as error:
            report(error, as_json=as_json)
            raise typer.Exit(WRONG_USE) from None
        except DsecError as error:
            report(error, as_json=as_json)
            raise typer.Exit(failed) from None
        except BrokenPipeError:
            # Whoever read our output has gone; the interpreter's last flush would complain once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(128 + 13) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except OSError as error:
            output.note(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
            raise typer.Exit(failed) from None
        raise typer.Exit(code)

    return run


def report(error: DsecError, *, as_json: bool) -> None:
    """Print the error."""
    if as_json:
        output.print_json({"error": error.body()})
    output.note(error.message)
