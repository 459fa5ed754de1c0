"""The command line's entry point: puts the commands together. What a command needs is imported when it runs.

`dsec --help` must stay quick: nothing here imports the SDK, the server parts or rich.
"""

from __future__ import annotations

from typing import Annotated

import typer

from dsec.cli import hosting, sandboxes

app = typer.Typer(
    name="dsec",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from dsec import __version__

        typer.echo(f"dsec {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Self-hosted elastic sandboxes.

    The server is found by DSEC_URL and DSEC_API_KEY, else it is the local daemon of DSEC_HOME (default: the checkout's .dsec, or /var/lib/dsec).

    Exit codes: 0 success; 1 an error, told in one sentence on stderr; 2 a wrong use; 130 Ctrl-C. `run` and `exec` end with the code of the
    command, and with 125 for errors of dsec itself, a timeout among them.
    """


hosting.register(app)
sandboxes.register(app)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
