"""What the host's apt is set up with: the Debian archives it uses, their keys, and how it reaches them.

Read only. Nothing of it may end up in an image or in the project's files: addresses are passed to the tools and removed from the root.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.api.errors import ImageError

_RECORD_END: Final = "\x1e"
_FIELD_END: Final = "\x1f"
# How archives are reached and checked; all else (languages, hooks, caches) is the host's own business.
_TRANSPORT_OPTION: Final = re.compile(
    r"Acquire::(http|https|ftp|tor|mirror|Retries|ForceIPv[46]|Check-|AllowInsecure|AllowWeak|AllowDowngrade|By-Hash|Proxy)",
    re.IGNORECASE,
)
_SIGNED_BY: Final = re.compile(r"signed-by\s*[:=]\s*(/[^\s\],]+)", re.IGNORECASE)
_ARCHIVE_KEYS: Final = (Path("/usr/share/keyrings/debian-archive-keyring.gpg"), Path("/etc/apt/trusted.gpg.d"))
_CREDENTIALS: Final = {
    "Dir::Etc::netrc": Path("/etc/apt/auth.conf"),
    "Dir::Etc::netrcparts": Path("/etc/apt/auth.conf.d"),
}


@dataclass(frozen=True, slots=True)
class Release:
    """The Debian release of the host: `codename` such as bookworm, `version` such as 12 (the codename before it has a number)."""

    codename: str
    version: str


@dataclass(frozen=True, slots=True)
class AptSetup:
    """One-line sources of the release's archives, files or folders with their keys, and apt options to carry over."""

    sources: tuple[str, ...]
    keyrings: tuple[Path, ...]
    options: tuple[str, ...]


def host_release(os_release: Path = Path("/etc/os-release")) -> Release:
    """Return the host's Debian release; raises `ImageError` on another system."""
    try:
        lines = os_release.read_text().splitlines()
    except OSError as error:
        raise ImageError(f"cannot tell this host's release: {error}") from error
    fields = {key: value.strip("\"'") for key, _, value in (line.partition("=") for line in lines)}
    codename = fields.get("VERSION_CODENAME", "")
    if fields.get("ID") != "debian" or not codename:
        raise ImageError(
            f"a Debian image is made on Debian; this host is {fields.get('PRETTY_NAME', 'something else')}"
        )
    return Release(codename, fields.get("VERSION_ID", codename))


def host_setup(codename: str) -> AptSetup:
    """Return how this host reaches Debian's archives of a release.

    Raises `ImageError` when apt knows no archive of it: its lists are missing (`apt-get update`) or it uses another release.
    """
    records = _index_targets()
    wanted = {codename, f"{codename}-updates", f"{codename}-security"}
    chosen = [record for record in records if record[2] in wanted and record[4] == "Debian"]
    sources: dict[tuple[str, str], list[str]] = {}
    for uri, suite, _, component, _, _ in chosen:
        components = sources.setdefault((uri, suite), [])
        if component not in components:
            components.append(component)
    if not any("main" in components for components in sources.values()):
        raise ImageError(
            f"apt has no lists of Debian {codename}: run `apt-get update`, or add its archive to apt's sources"
        )
    return AptSetup(
        sources=tuple(f"deb {uri} {suite} {' '.join(components)}" for (uri, suite), components in sources.items()),
        keyrings=_keyrings({Path(record[5].rpartition(":")[0]) for record in chosen}),
        options=_transport_options(),
    )


def _index_targets() -> list[list[str]]:
    names = ("REPO_URI", "RELEASE", "CODENAME", "COMPONENT", "ORIGIN", "SOURCESENTRY")
    layout = _FIELD_END.join(f"$({name})" for name in names) + _RECORD_END
    output = _read(["apt-get", "indextargets", "--format", layout, "Created-By: Packages"])
    return [
        fields for text in output.split(_RECORD_END) if len(fields := text.strip("\n").split(_FIELD_END)) == len(names)
    ]


def _keyrings(source_files: set[Path]) -> tuple[Path, ...]:
    keyrings = {path for path in _ARCHIVE_KEYS if path.exists()}
    for source in source_files:
        if source.is_file():
            keyrings.update(Path(name) for name in _SIGNED_BY.findall(source.read_text(errors="replace")))
    return tuple(sorted(keyrings))


def _transport_options() -> tuple[str, ...]:
    options = [
        line
        for line in _read(["apt-config", "dump", "--format", '%F "%v";%n']).splitlines()
        if _TRANSPORT_OPTION.match(line) and not line.endswith(' "";')
    ]
    options += [f'{name} "{path}";' for name, path in _CREDENTIALS.items() if path.exists()]
    return tuple(options)


def _read(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except FileNotFoundError as error:
        raise ImageError(f"{command[0]} is missing: a Debian image is made on Debian") from error
    except subprocess.CalledProcessError as error:
        raise ImageError(f"{' '.join(command[:2])} failed: {str(error.stderr).strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise ImageError(str(error)) from error
