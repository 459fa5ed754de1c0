"""The catalog: names of environments, one JSON document each, replaced atomically so that readers need no lock.

Owns `names/` of an image store. A name is `name:tag`; `name` alone means the tag `latest`. What a project names is its own; what has no project
is everybody's and is found after the project's.
"""

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from dsec.api.errors import ImageError, InvalidRequest, NotFound
from dsec.images.layer import LayerStore, write_atomically

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?")
_PROJECT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
# Starts with a character that no project's name starts with.
_SHARED: Final = "@shared"
_HOW_TO: Final = "`dsec image bootstrap debian` makes the base image"


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox's root is made of: layers by digest, lowest first, and the defaults of its commands.

    `created_at` is seconds since the epoch; `project` None means that every project may use it.
    """

    name: str
    layers: tuple[str, ...]
    created_at: float
    env: dict[str, str] = {}
    workdir: str | None = None
    user: str | None = None
    project: str | None = None


class Catalog:
    """The environments of one image store. All methods block on file I/O, for well under a millisecond a name."""

    def __init__(self, images_dir: Path) -> None:
        self._names_dir = images_dir / "names"
        self.layers = LayerStore(images_dir)

    def resolve(self, name: str, *, project: str | None = None) -> Environment:
        """Return the environment of that name, the project's own or a shared one.

        Raises `InvalidRequest` for what is no name, `ImageError` (listing what there is) for an unknown one or a damaged document.
        """
        for owner in (project, None) if project is not None else (None,):
            found = self._read(self._file(name, owner))
            if found is not None:
                return found
        known = ", ".join(sorted({environment.name for environment in self.list(project=project)}))
        have = f"there are: {known}" if known else "there are none"
        raise ImageError(f"no image {name!r}; {have}; {_HOW_TO}", image=name)

    def list(self, *, project: str | None = None) -> tuple[Environment, ...]:
        """Return the environments that the project may use, by name; its own hide shared ones of the same name."""
        found = {environment.name: environment for environment in self._owned(None)}
        if project is not None:
            found.update({environment.name: environment for environment in self._owned(project)})
        return tuple(found[name] for name in sorted(found))

    def size(self, environment: Environment) -> int:
        """Return the bytes on disk of an environment's layers; missing ones count nothing."""
        total = 0
        for digest in set(environment.layers):
            try:
                total += self.layers.path(digest).stat().st_size
            except (ImageError, FileNotFoundError):
                continue
        return total

    def put(
        self,
        name: str,
        layers: Iterable[str],
        *,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        user: str | None = None,
        project: str | None = None,
    ) -> Environment:
        """Give an environment this name, instead of what had it before. Its layers must be in the store (`ImageError`).

        Whoever added layers for it still holds `layers.writing()`: a layer that no name holds is removed at any other time.
        """
        digests = tuple(layers)
        for digest in digests:
            self.layers.path(digest)
        path = self._file(name, project)
        environment = Environment(
            name=path.stem,
            layers=digests,
            created_at=time.time(),
            env=dict(env or {}),
            workdir=workdir,
            user=user,
            project=project,
        )
        write_atomically(path, msgspec.json.format(msgspec.json.encode(environment)))
        return environment

    def remove(self, name: str, *, project: str | None = None) -> int:
        """Remove a name, and the layers that no name holds any more; returns the bytes set free.

        Raises `NotFound` for an unknown name and `Conflict` while an image is being made. Running sandboxes keep what they have mounted.
        """
        with self.layers.writing():
            try:
                self._file(name, project).unlink()
            except FileNotFoundError:
                raise NotFound(f"no image {name!r}") from None
            return self.collect()

    def collect(self) -> int:
        """Remove the layers that no name holds and return the bytes set free. The caller holds `layers.writing()`."""
        held: set[str] = set()
        for path in self._names_dir.glob("*/*.json"):
            environment = self._read(path)
            held.update(environment.layers if environment else ())
        freed = 0
        for digest in self.layers.digests() - held:
            freed += self.layers.path(digest).stat().st_size
            self.layers.remove(digest)
        return freed

    def _owned(self, project: str | None) -> Iterator[Environment]:
        for path in (self._names_dir / _owner(project)).glob("[!.]*.json"):
            environment = self._read(path)
            if environment is not None:
                yield environment

    def _file(self, name: str, project: str | None) -> Path:
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"{name!r} is not an image name such as debian:12")
        full = name if ":" in name else f"{name}:latest"
        return self._names_dir / _owner(project) / f"{full}.json"

    @staticmethod
    def _read(path: Path) -> Environment | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=Environment)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise ImageError(f"the catalog's record {path} cannot be read: {error}") from error


def _owner(project: str | None) -> str:
    if project is None:
        return _SHARED
    if not _PROJECT.fullmatch(project):
        raise InvalidRequest(f"{project!r} is not a project name")
    return project
