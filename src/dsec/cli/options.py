"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from dsec.cli.errors import WrongUse

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on stdout.")]
Labels = Annotated[list[str], typer.Option("--label", "-l", metavar="KEY=VALUE", help="A label; may be repeated.")]
Env = Annotated[
    list[str], typer.Option("--env", "-e", metavar="NAME=VALUE", help="An environment variable; may be repeated.")
]
Image = Annotated[str, typer.Option("--image", "-i", help="The image.")]
Kind = Annotated[str, typer.Option("--kind", help="container, microvm or fullvm.")]
Cpus = Annotated[float, typer.Option("--cpus", help="Processors.")]
Memory = Annotated[str, typer.Option("--memory", "-m", help='Bytes, or text such as "512MiB".')]
Disk = Annotated[str, typer.Option("--disk", help='Bytes, or text such as "2GiB".')]
Pids = Annotated[int, typer.Option("--pids", help="Processes at once.")]
DiskBacking = Annotated[str, typer.Option("--disk-backing", help="auto, tmpfs or local.")]
User = Annotated[str | None, typer.Option("--user", "-u", help="A name, uid, name:group or uid:gid.")]
Cwd = Annotated[str | None, typer.Option("--cwd", "-w", help="The directory to run in.")]
Timeout = Annotated[float | None, typer.Option("--timeout", "-t", help="Seconds after which the command is killed.")]
WithStdin = Annotated[bool, typer.Option("--stdin", "-I", help="Pass stdin on to the command.")]


def pairs(items: list[str], *, what: str) -> dict[str, str]:
    """`KEY=VALUE` texts as a mapping. Raises WrongUse for one without a `=`."""
    found = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise WrongUse(f"{what} must be NAME=VALUE, not {item!r}")
        found[name] = value
    return found
