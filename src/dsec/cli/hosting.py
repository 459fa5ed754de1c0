"""Commands for the host that runs a server: up, down, doctor, image, bench, demo."""

from __future__ import annotations

import os
from typing import Annotated, Any, Self

import typer

from dsec.cli import options as o
from dsec.cli import output
from dsec.cli.errors import WrongUse, reports_errors

image_app = typer.Typer(no_args_is_help=True, help="Images: what sandboxes are made from.", rich_markup_mode=None)
bench_app = typer.Typer(no_args_is_help=True, help="Measure what SPECIFICATION.md promises.", rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(up)
    app.command()(down)
    app.command()(doctor)
    app.add_typer(image_app, name="image")
    app.add_typer(bench_app, name="bench")
    app.command()(demo)


@reports_errors
def up(
    detach: Annotated[
        bool, typer.Option("--detach/--foreground", "-d", help="Go on in the background once it answers.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            "--tcp",
            min=0,
            max=65_535,
            help="Loopback TCP port; 0: any free one. Default: 7373 if it is free, else any.",
        ),
    ] = None,
    json: o.Json = False,
) -> int:
    """Start the daemon: API on a unix socket and loopback TCP, one node.

    Ctrl-C, SIGTERM and `dsec down` end it with all sandboxes. SIGHUP and `dsec down --keep` end it and leave the sandboxes running for the next `dsec up`.
    """
    from dsec.cli import up as daemon

    return daemon.detached(port, as_json=json) if detach else daemon.foreground(port, as_json=json)


@reports_errors
def down(
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave sandboxes running; the next `dsec up` takes them over.")
    ] = False,
    json: o.Json = False,
) -> int:
    """Stop the daemon, and with it every sandbox. Without a running daemon, end what a dead one left."""
    from dsec.cli import down as ending

    return ending.down(keep=keep, as_json=json)


@reports_errors
def doctor(
    fix: Annotated[
        bool, typer.Option("--fix", "--raise-limits", help="Raise host limits that are too low (until the next boot).")
    ] = False,
    json: o.Json = False,
) -> int:
    """Say for each kind and feature whether this host has it, and what to do where it has not."""
    from dsec.cli import doctor as checks

    return checks.doctor(fix=fix, as_json=json)


@reports_errors
def demo(
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=1000, help="Sandboxes.")] = 64,
    json: o.Json = False,
) -> int:
    """Run a real job: many sandboxes, in each a scripted agent that mends a Python project until its tests pass."""
    from dsec.cli import demo as job

    return job.demo(count, as_json=json)


@image_app.command("bootstrap")
@reports_errors
def image_bootstrap(
    distribution: Annotated[str, typer.Argument(help="debian")] = "debian",
    include: Annotated[list[str], typer.Option(help="A further package; may be repeated.")] = [],  # noqa: B006
    name: Annotated[str | None, typer.Option(help="The image's name; default debian:VERSION.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Make it anew.")] = False,
    json: o.Json = False,
) -> int:
    """Make a base image from the package archive that this host already uses."""
    from dsec.images import bootstrap_debian
    from dsec.paths import Paths

    if distribution != "debian":
        raise WrongUse(f"only debian can be bootstrapped, not {distribution!r}")
    with _Progress() as progress:
        made = bootstrap_debian(
            Paths.discover().images_dir, include=include, name=name, force=force, progress=progress.report
        )
    if json:
        output.print_json(made)
    else:
        output.say(made.name)
    return 0


@image_app.command("ls")
@reports_errors
def image_ls(json: o.Json = False) -> int:
    """List images: the server's with DSEC_URL, else those of the local store."""
    images = _remote_images() if os.environ.get("DSEC_URL") else _local_images()
    if json:
        output.print_json(images)
        return 0
    rows = [
        (image["name"], output.size_text(image["size"]), len(image["layers"]), output.age_text(image["created_at"]))
        for image in images
    ]
    output.print_table(("NAME", "SIZE", "LAYERS", "AGE"), rows)
    return 0


def _local_images() -> list[dict[str, Any]]:
    from dsec.images import Catalog
    from dsec.paths import Paths

    catalog = Catalog(Paths.discover().images_dir)
    return [
        {"name": item.name, "layers": item.layers, "size": catalog.size(item), "created_at": item.created_at}
        for item in catalog.list()
    ]


def _remote_images() -> list[dict[str, Any]]:
    import asyncio

    import msgspec

    from dsec.sdk import AsyncClient

    async def ask() -> list[dict[str, Any]]:
        async with AsyncClient() as client:
            return [msgspec.structs.asdict(image) for image in await client.images.list()]

    return asyncio.run(ask())


@image_app.command("rm")
@reports_errors
def image_rm(
    names: Annotated[list[str], typer.Argument(help="Names, such as debian:12.")],
    json: o.Json = False,
) -> int:
    """Remove images by name, and the layers that no other image uses."""
    from dsec.images import Catalog
    from dsec.paths import Paths

    catalog = Catalog(Paths.discover().images_dir)
    for name in names:
        freed = catalog.remove(name)
        if json:
            output.print_json({"name": name, "freed": freed})
        else:
            output.say(f"{name}: {output.size_text(freed)} freed")
    return 0


_Quick = Annotated[bool, typer.Option("--quick", help="Under 50 seconds, with fewer samples.")]


@bench_app.command("launch")
@reports_errors
def bench_launch(quick: _Quick = False, json: o.Json = False) -> int:
    """Creating and destroying sandboxes, against a bare launcher loop and crun."""
    from dsec.bench import launch

    return launch.main(quick=quick, as_json=json)


@bench_app.command("exec")
@reports_errors
def bench_exec(quick: _Quick = False, json: o.Json = False) -> int:
    """Running commands in a sandbox, against the bare host and crun."""
    from dsec.bench import execs

    return execs.main(quick=quick, as_json=json)


class _Progress:
    """A bar on stderr, or a line for each step where stderr is no terminal."""

    def __init__(self) -> None:
        from rich.progress import Progress

        self._bar = Progress(console=output.console(stderr=True), transient=True)
        self._task = self._bar.add_task("", total=1.0)
        self._last = ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def report(self, message: str, share: float) -> None:
        """Show how far it is."""
        if self._bar.console.is_terminal:
            self._bar.update(self._task, description=message, completed=share)
        elif message != self._last:
            output.note(message)
        self._last = message
