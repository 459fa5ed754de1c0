"""Where the server is and which key opens it. The one place of the SDK that reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dsec.api.errors import ConnectionFailed, InvalidRequest, Unauthenticated
from dsec.paths import Paths


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A server: `base` is the scheme and host of its URLs, `socket` the unix socket's path (None: TCP), `key` the API key."""

    base: str
    socket: str | None
    key: str

    @property
    def name(self) -> str:
        """The server as people name it."""
        return self.socket or self.base


def resolve(url: str | None, key: str | None) -> Endpoint:
    """Return the endpoint for `url` and `key`, completed from DSEC_URL, DSEC_API_KEY and the local daemon.

    Raises InvalidRequest (a URL that cannot be used), Unauthenticated (no key to be found), ConnectionFailed (no URL was given and
    no daemon was ever started here).
    """
    url = url or os.environ.get("DSEC_URL") or None
    key = key or os.environ.get("DSEC_API_KEY") or None
    if url is None:
        paths = Paths.discover()
        if key is None and not _exists(paths.api_key_file) and not paths.api_socket.exists():
            raise ConnectionFailed(
                f"no dsec daemon was started for {paths.home}: start one with `dsec up`, or set DSEC_URL"
            )
        return Endpoint(base="http://dsec", socket=str(paths.api_socket), key=key or _local_key())
    base, socket = _split(url)
    return Endpoint(base=base, socket=socket, key=key or _local_key())


def _split(url: str) -> tuple[str, str | None]:
    parts = urlsplit(url)
    if parts.scheme == "http+unix":
        return "http://dsec", unquote(parts.netloc or parts.path)
    if parts.scheme == "unix":
        return "http://dsec", unquote(parts.path)
    if parts.scheme in ("http", "https") and parts.netloc:
        return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}", None
    raise InvalidRequest(
        f"{url!r} is no server address: use http://HOST:PORT, https://HOST or http+unix://%2Fpath%2Fto.sock"
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:  # a folder on the way is closed to this user: reading says so
        return True


def _local_key() -> str:
    path = Paths.discover().api_key_file
    try:
        return path.read_text(encoding="ascii").strip()
    except PermissionError as error:
        raise Unauthenticated(
            f"the API key in {path} may not be read by this user: run as its owner, or set DSEC_API_KEY"
        ) from error
    except OSError as error:
        raise Unauthenticated("no API key: set DSEC_API_KEY or pass key=") from error
