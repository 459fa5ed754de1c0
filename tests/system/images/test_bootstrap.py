"""The base image, as set-up made it and made anew; interrupted at any point it leaves nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.timing import scaled

from dsec.images import Catalog, Environment, bootstrap_debian
from dsec.images.apt import host_release
from dsec.images.bootstrap import usable
from dsec.paths import Paths

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="root: images are made and mounted by root"),
]

# Mounts the layer argv[1] at argv[2] without a loop device, changes its root there and runs the code argv[3].
_INSIDE = """
import os, sys
from dsec.edge.host import trial
trial._libc.unshare(trial._CLONE["mnt"])
trial._libc.mount(None, b"/", None, 0x4000 | 0x40000, None)
layer = trial._mount(b"erofs", {b"source": sys.argv[1].encode()})
trial._call(trial._MOVE_MOUNT, layer, b"", -100, sys.argv[2].encode(), 4)
os.chroot(sys.argv[2])
os.chdir("/")
os.execve("/usr/bin/python3", ["python3", "-c", sys.argv[3]], {"PATH": "/usr/bin:/bin"})
"""

_BOOTSTRAP = """
import sys
from pathlib import Path
from dsec.images import bootstrap_debian
bootstrap_debian(Path(sys.argv[1]), progress=lambda message, share: print(message, flush=True))
"""


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog(Paths.discover().images_dir)


@pytest.fixture(scope="module")
def base(catalog: Catalog) -> Environment:
    return catalog.resolve(f"debian:{host_release().version}")


@pytest.fixture(scope="module")
def inside(catalog: Catalog, base: Environment, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], object]:
    """Runs Python code in the image; what it assigns to `answer` comes back."""
    place = tmp_path_factory.mktemp("root")
    layer = catalog.layers.path(base.layers[0])

    def run(code: str) -> object:
        text = f"import json, os\nfrom pathlib import Path\n{code}\nprint(json.dumps(answer))"
        done = subprocess.run(
            [sys.executable, "-c", _INSIDE, str(layer), str(place), text],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_the_base_image_has_both_names(catalog: Catalog, base: Environment) -> None:
    assert len(base.layers) == 1
    assert catalog.resolve("debian").layers == base.layers
    assert base.env["PATH"].startswith("/usr/local/sbin:")
    packages = catalog.layers.info(base.layers[0]).packages
    assert {"bash", "coreutils", "python3", "apt", "dpkg"} <= set(packages)
    assert "perl" not in packages
    assert catalog.size(base) < 200 << 20


def test_python_and_a_shell_work_in_it(inside: Callable[[str], object]) -> None:
    code = (
        "import asyncio, sqlite3, ssl, subprocess, sys, unittest\n"
        "shell = subprocess.run(['bash', '-c', 'echo $((6 * 7))'], capture_output=True, text=True)\n"
        "answer = [sys.version_info[:2] >= (3, 11), shell.stdout]"
    )
    assert inside(code) == [True, "42\n"]


def test_nothing_of_the_host_is_in_it(inside: Callable[[str], object]) -> None:
    files = "'etc/hostname', 'etc/resolv.conf', 'etc/machine-id'"
    assert inside(f"answer = [Path(name).read_text() for name in ({files})]") == ["sandbox\n", "", ""]
    folders = "'etc/apt/sources.list.d', 'var/lib/apt/lists', 'var/cache/apt', 'var/log', 'tmp', 'dev', 'usr/share/man'"
    assert inside(f"answer = [n for n in ({folders}) if Path(n).exists() and any(Path(n).iterdir())]") == []
    assert inside("answer = Path('etc/apt/sources.list').exists()") is False


def test_owners_modes_and_compiled_modules_are_as_packaged(inside: Callable[[str], object]) -> None:
    code = (
        "import importlib.util, struct\n"
        "source = importlib.util.find_spec('json').origin\n"
        "cached = Path(importlib.util.cache_from_source(source)).read_bytes()\n"
        "shadow, temporary = os.stat('etc/shadow'), os.stat('tmp')\n"
        "answer = [shadow.st_gid, shadow.st_mode & 0o777, temporary.st_mode & 0o7777,\n"
        "    struct.unpack('<I', cached[8:12])[0] == int(os.stat(source).st_mtime)]"
    )
    assert inside(code) == [42, 0o640, 0o1777, True]


@pytest.mark.parametrize(
    ("how", "at"),
    [(signal.SIGKILL, "installing the essential packages"), (signal.SIGINT, "downloading packages")],
    ids=["killed", "interrupted"],
)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_interrupted_it_leaves_nothing(tmp_path: Path, how: signal.Signals, at: str) -> None:
    images_dir = tmp_path / "images"
    maker = subprocess.Popen(
        [sys.executable, "-c", _BOOTSTRAP, str(images_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert maker.stdout is not None
    with maker.stdout as reports:
        assert any(line.strip() == at for line in reports), "the bootstrap ended before it could be interrupted"
        maker.send_signal(how)
        assert maker.wait(timeout=scaled(20)) != 0
    deadline = time.monotonic() + scaled(10)
    while using := processes_that_name(str(images_dir)):
        assert time.monotonic() < deadline, f"still at work: {using}"
        time.sleep(0.05)
    assert str(images_dir) not in Path("/proc/self/mounts").read_text()
    catalog = Catalog(images_dir)
    assert catalog.list() == ()
    assert catalog.layers.digests() == set()
    if how == signal.SIGINT:
        assert not (images_dir / "staging").exists()
    with catalog.layers.writing() as staging:
        assert not list(staging.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_made_anew_it_is_the_same_layer(tmp_path: Path, catalog: Catalog, base: Environment) -> None:
    shares: list[float] = []
    fresh = bootstrap_debian(tmp_path, progress=lambda _message, share: shares.append(share))
    store = Catalog(tmp_path)
    ours, theirs = (
        found.layers.info(environment.layers[0]) for found, environment in ((store, fresh), (catalog, base))
    )
    # The archive may have moved on since set-up; the same packages make the same bytes.
    if ours.packages == theirs.packages:
        assert ours.digest == theirs.digest
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    started_s = time.monotonic()
    assert bootstrap_debian(tmp_path) == fresh
    assert time.monotonic() - started_s < scaled(1)
    store.layers.path(fresh.layers[0]).unlink()
    assert usable(store, fresh.name) is None, "a record whose layer is gone is made again"


def processes_that_name(text: str) -> list[str]:
    """Command lines of living processes, and their working folders, that name a path."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            root, folder = str((process / "root").readlink()), str((process / "cwd").readlink())
        except OSError:
            continue
        if any(text in place for place in (command, root, folder)):
            found.append(command)
    return found
