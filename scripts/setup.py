"""Sets up a checkout: Debian packages, virtual environment, native binaries, seccomp blob, base image. Skips what is done.

Runs on the system's Python with the standard library only. `setup.py tools` stops after the virtual environment, which needs no root. The
one rule: a stamp is written after its step succeeded and holds a hash of everything the step was made from.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
HOME = Path(os.environ.get("DSEC_HOME") or ROOT / ".dsec").expanduser().resolve()
VENV = ROOT / ".venv"
BINARIES = ("dsec-launch", "dsec-guest", "dsec-bench")
MIN_RUST = (1, 85)

# Packages by name; of the alternatives, the first that this release has.
PACKAGES: tuple[tuple[str, ...], ...] = (
    ("mmdebstrap",),
    ("erofs-utils",),
    ("libseccomp2",),
    ("golang-github-containers-common", "containers-common"),
    ("e2fsprogs",),
    ("crun",),
    ("gcc",),
    ("libc6-dev",),
)


def main(arguments: Sequence[str]) -> None:
    """Run the steps; ends the process with 1 and a sentence where one fails."""
    started_s = time.monotonic()
    everything = arguments != ["tools"]
    if everything:
        preflight()
        install_packages()
    make_venv()
    if everything:
        build_native()
        prepare_store()
        say(f"ready in {time.monotonic() - started_s:.1f} s")


def say(message: str) -> None:
    """Tell what is being done."""
    print(f"setup: {message}", flush=True)


def fail(message: str) -> NoReturn:
    """End with what is missing and what to do."""
    print(f"setup: {message}", file=sys.stderr, flush=True)
    sys.exit(1)


def run(command: Sequence[str | Path], *, what: str, env: dict[str, str] | None = None) -> None:
    """Run a step's command with its output in view, and fail with `what` if it fails."""
    try:
        code = subprocess.run(command, check=False, env=env, stdin=subprocess.DEVNULL).returncode
    except OSError as error:
        fail(f"{what}: {error}")
    if code != 0:
        fail(f"{what} failed (exit code {code}); what it said is above")


def preflight() -> None:
    """Refuse a host on which no sandbox could start, with all reasons at once."""
    # Checks that root and the kernel are there come from the package, whose own __init__ needs what is not installed yet.
    import types

    for name in ("dsec", "dsec.edge"):
        package = types.ModuleType(name)
        package.__path__ = [str(ROOT / "src" / Path(*name.split(".")))]
        sys.modules[name] = package
    from dsec.edge.host import probe, unmet

    missing = unmet(probe(HOME))
    rust = rust_problem()
    if missing or rust:
        lines = [f"  {check.name}: {check.detail}\n      {check.fix}" for check in missing]
        lines += [f"  rust: {rust}"] if rust else []
        fail("this host lacks what sandboxes need:\n" + "\n".join(lines))


def cargo() -> str | None:
    """Return cargo's path: sudo often drops the folder where rustup puts it."""
    homes = [Path(os.environ.get("CARGO_HOME") or Path.home() / ".cargo") / "bin", Path("/usr/local/cargo/bin")]
    return shutil.which("cargo", path=os.pathsep.join([os.environ.get("PATH", os.defpath), *map(str, homes)]))


def rust_problem() -> str:
    """Return what is wrong with the Rust tools, empty if nothing is."""
    remedy = "install Rust >= 1.85: `apt-get install cargo rustc rustfmt rust-clippy` on Debian 13, rustup on Debian 12"
    found = cargo()
    if found is None:
        return f"no cargo on PATH; {remedy}"
    words = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout.split()
    version = words[1].split("-")[0] if len(words) > 1 else "0.0"
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_RUST:
        return f"cargo is {version}; {remedy}"
    return ""


def install_packages() -> None:
    """Install the Debian packages that are missing; asks the network only if there are any."""
    wanted = [group for group in PACKAGES if not any(map(installed, group))]
    if not venv_works():
        wanted.append((f"python{sys.version_info[0]}.{sys.version_info[1]}-venv", "python3-venv"))
    if not wanted:
        return
    if not shutil.which("apt-get"):
        fail("this is not Debian (no apt-get); install by hand: " + " ".join(group[0] for group in wanted))
    names = available(wanted)
    if names is None:
        say("apt-get update")
        run(["apt-get", "-qq", "update"], what="apt-get update")
        names = available(wanted)
    if names is None:
        fail("apt has no package for: " + ", ".join(" or ".join(group) for group in wanted) + "; look at its sources")
    say(f"installing {' '.join(names)}")
    command = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *names]
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "APT_LISTCHANGES_FRONTEND": "none"}
    if subprocess.run(command, check=False, env=quiet, stdout=subprocess.DEVNULL).returncode != 0:
        # Package lists older than the archive name files that are gone.
        run(["apt-get", "-qq", "update"], what="apt-get update")
        run(command, what="apt-get install", env=quiet)


def installed(package: str) -> bool:
    """Whether dpkg has the package installed."""
    status = subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Status}", package], capture_output=True, text=True, check=False
    )
    return status.stdout.startswith("installed")


def available(groups: Iterable[tuple[str, ...]]) -> list[str] | None:
    """Return a package for each group, or None if apt knows none of some group's."""
    names = []
    for group in groups:
        found = [name for name in group if candidate(name)]
        if not found:
            return None
        names.append(found[0])
    return names


def candidate(package: str) -> bool:
    """Whether apt could install the package."""
    policy = subprocess.run(["apt-cache", "policy", package], capture_output=True, text=True, check=False).stdout
    return "Candidate:" in policy and "Candidate: (none)" not in policy


def venv_works() -> bool:
    """Whether this Python can make a virtual environment with pip in it: Debian splits that off."""
    check = subprocess.run([sys.executable, "-c", "import venv, ensurepip"], capture_output=True, check=False)
    return (VENV / "bin" / "python").exists() or check.returncode == 0


def make_venv() -> None:
    """Make the virtual environment from the lock and put the project into it, editable."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}.{sys.version_info[2]} {VENV}"
    key = digest([ROOT / "requirements.lock", ROOT / "pyproject.toml"], version)
    stamp = VENV / ".stamp"
    python = VENV / "bin" / "python"
    if python.exists() and read(stamp) == key:
        return
    if not venv_works():
        fail("this Python has no venv module: apt-get install python3-venv")
    say(f"virtual environment with Python {version.split(maxsplit=1)[0]}")
    if not python.exists() or version not in read(VENV / ".python"):
        run([sys.executable, "-m", "venv", "--clear", VENV], what="python -m venv")
        (VENV / ".python").write_text(version)
    stamp.unlink(missing_ok=True)
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    run([*pip, "--require-hashes", "-r", ROOT / "requirements.lock"], what="pip install of the locked packages")
    run([*pip, "--no-build-isolation", "--editable", ROOT], what="pip install of the project")
    stamp.write_text(key)


def build_native() -> None:
    """Build the Rust workspace for the host's gnu target and copy the programs to the home."""
    found = cargo()
    if found is None:
        fail(rust_problem())
    target = f"{os.uname().machine}-unknown-linux-gnu"
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    sources = [path for path in (ROOT / "native").rglob("*") if "target" not in path.relative_to(ROOT / "native").parts]
    key = digest([path for path in sources if path.suffix in (".rs", ".toml", ".lock")], version + target)
    folder = HOME / "bin"
    stamp = folder / ".stamp-native"
    if all((folder / name).exists() for name in BINARIES) and read(stamp) == key:
        return
    say("building the native programs (about a minute the first time)")
    # The explicit target keeps crt-static away from procedural macros; .cargo/config.toml is found from the folder.
    command = [found, "build", "--release", "--locked", "--quiet", "--target", target, "--bins"]
    environment = {**os.environ, "PATH": f"{Path(found).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    environment.pop("CARGO_TARGET_DIR", None)
    if subprocess.run(command, check=False, cwd=ROOT / "native", env=environment).returncode != 0:
        fail("cargo build failed; what it said is above")
    folder.mkdir(parents=True, exist_ok=True)
    for name in BINARIES:
        # A running program's file cannot be written to, but replaced.
        fresh = folder / f".{name}.new"
        shutil.copy2(ROOT / "native" / "target" / target / "release" / name, fresh)
        fresh.replace(folder / name)
    stamp.write_text(key)


def prepare_store() -> None:
    """Compile the seccomp profile and make the base image, with the project's own code."""
    environment = {**os.environ, "DSEC_HOME": str(HOME)}
    run([VENV / "bin" / "python", ROOT / "scripts" / "prepare.py"], what="preparing the image store", env=environment)


def digest(paths: Iterable[Path], extra: str) -> str:
    """Return a hash of the files' names and contents and of `extra`."""
    total = hashlib.sha256(extra.encode())
    for path in sorted(paths):
        total.update(f"{path.relative_to(ROOT)}\0".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def read(path: Path) -> str:
    """Return a small file's text, empty if it is not there."""
    try:
        return path.read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    main(sys.argv[1:])
