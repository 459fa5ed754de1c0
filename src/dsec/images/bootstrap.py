"""Makes the base image: a minimal Debian root with Python 3, from the archives the host's apt already uses, packed as one layer.

The tree is built by mmdebstrap in namespaces of its own that die with this process, then cleaned so that the same packages give
the same layer, byte for byte. The one rule: no address of an archive stays in the root.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from dsec.api.errors import ImageError, InvalidRequest
from dsec.images.apt import AptSetup, host_release, host_setup
from dsec.images.catalog import Catalog, Environment
from dsec.images.layer import raise_if_full
from dsec.images.rootfs import clean, installed_packages

# Called with what is being done and the share done so far, 0 to 1.
Progress = Callable[[str, float], None]

_PACKAGES: Final = ("bash", "coreutils", "hostname", "login", "mount", "passwd", "python3")
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PACKAGE_NAME: Final = re.compile(r"[a-z0-9][a-z0-9.+-]+")

# mmdebstrap's own words for where it is, and the share of the whole at that point (measured on two cores).
_MILESTONES: Final = (
    ("apt-get update", "reading the package lists", 0.05),
    ("downloading packages", "downloading packages", 0.12),
    ("extracting archives", "unpacking the essential packages", 0.3),
    ("installing essential", "installing the essential packages", 0.4),
    ("installing remaining", "installing Python", 0.65),
    ("cleaning", "cleaning up", 0.88),
)
# Documentation is most of the files of a small root; licences stay.
_WITHOUT_DOCS: Final = (
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-include=/usr/share/locale/locale.alias",
    "path-exclude=/usr/share/lintian/*",
)


def bootstrap_debian(
    images_dir: Path,
    *,
    include: Sequence[str] = (),
    force: bool = False,
    docs: bool = False,
    compress: bool = False,
    name: str | None = None,
    progress: Progress | None = None,
) -> Environment:
    """Make the host's Debian release into the image `debian:<version>` (and `debian`), unless it is there already.

    `include` adds packages by name, `docs` keeps documentation, `compress` packs with lz4hc (half the size, six times as long), `force` makes the
    image anew, `name` names it otherwise (and nothing else is named). Needs root, mmdebstrap and erofs-utils; takes about half a minute and 500 MB of disk in the
    image store while it works. Raises `ImageError`, `NoSpace`, `InvalidRequest` (a package name) or `Conflict` (another one is at
    work). Interrupted at any point it leaves nothing named; what remains after a kill is removed by the next writer.
    """
    for package in include:
        if not _PACKAGE_NAME.fullmatch(package):
            raise InvalidRequest(f"{package!r} is not a package name")
    release = host_release()
    wanted = name or f"debian:{release.version}"
    catalog = Catalog(images_dir)
    report = progress or (lambda _message, _share: None)
    existing = usable(catalog, wanted)
    if existing is not None and not force:
        report(f"{wanted} is there already", 1.0)
        return existing
    if os.geteuid() != 0:
        raise ImageError("making a Debian image needs root: run it as root or with sudo")
    setup = host_setup(release.codename)
    started_s = time.time()
    with catalog.layers.writing() as staging:
        root = staging / "root"
        _run_mmdebstrap(setup, release.codename, root, packages=(*_PACKAGES, *include), docs=docs, report=report)
        packages = installed_packages(root)
        clean(root, built_since_s=started_s)
        report("packing the layer", 0.92)
        source = f"debian {release.codename}"
        layer = catalog.layers.add(root, staging, source=source, packages=packages, compress=compress)
        environment = catalog.put(
            wanted, [layer.digest], env={"PATH": _PATH, "LANG": "C.UTF-8"}, workdir="/", user="root"
        )
        if name is None:
            catalog.put("debian", environment.layers, env=environment.env, workdir="/", user="root")
        catalog.collect()
    report(f"{wanted} is ready", 1.0)
    return environment


def usable(catalog: Catalog, name: str) -> Environment | None:
    """Return the environment if it can be used as it is: a record whose layer is gone is made again."""
    try:
        environment = catalog.resolve(name)
        for digest in environment.layers:
            catalog.layers.path(digest)
    except ImageError:
        return None
    return environment


def _run_mmdebstrap(
    setup: AptSetup, codename: str, root: Path, *, packages: Sequence[str], docs: bool, report: Progress
) -> None:
    command = [
        # Whatever becomes of this process, the tool and what it started die with it, and its mounts with their namespace.
        *("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
        *("mmdebstrap", "--mode=root", "--format=directory", "--variant=apt"),
        f"--include={','.join(packages)}",
        *_merged_usr(codename),
        *(f"--keyring={path}" for path in setup.keyrings),
        *(f"--aptopt={option}" for option in setup.options),
        # Every file is synced once, when the layer is.
        "--dpkgopt=force-unsafe-io",
        *(() if docs else tuple(f"--dpkgopt={option}" for option in _WITHOUT_DOCS)),
        *(codename, str(root), *setup.sources),
    ]
    # SOURCE_DATE_EPOCH stays out: with it Python's modules are compiled to the slower form that hashes its source at every import.
    environment = {"PATH": _PATH, "LC_ALL": "C.UTF-8", "TMPDIR": str(root.parent)}
    for variable in ("http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR", "CURL_CA_BUNDLE"):
        if variable in os.environ:
            environment[variable] = os.environ[variable]
    tail: list[str] = []
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        ) as process:
            try:
                for line in process.stderr or ():
                    tail = [*tail[-20:], line.rstrip()]
                    _report_line(line, report)
            except BaseException:
                process.kill()
                # The end of the pipe: the last process of the tree is gone, nothing writes to the root any more.
                if process.stderr is not None:
                    process.stderr.read()
                raise
    except FileNotFoundError as error:
        raise ImageError(f"{error.filename} is missing: install mmdebstrap") from error
    if process.returncode != 0:
        raise_if_full(root.parent, "the root could not be unpacked")
        if not shutil.which("mmdebstrap"):
            raise ImageError("mmdebstrap is missing: install it")
        raise ImageError("mmdebstrap failed: " + "\n".join(tail[-12:]))


def _merged_usr(codename: str) -> tuple[str, ...]:
    """Return options that lay out a merged /usr from the start: in Debian 12 the package that merges afterwards brings Perl, 60 MB."""
    hooks = Path("/usr/share/mmdebstrap/hooks/merged-usr")
    if codename == "bookworm" and hooks.is_dir():
        return (f"--hook-dir={hooks}", "--include=usr-is-merged")
    return ()


def _report_line(line: str, report: Progress) -> None:
    for words, message, share in _MILESTONES:
        if words in line:
            report(message, share)
