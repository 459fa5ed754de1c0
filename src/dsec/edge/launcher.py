"""The node's `dsec-launch`: finds the running one or starts it, and starts a successor when it dies.

Owns the connection, the claim on the block of user ids, and nothing of a sandbox. The launcher is started detached from this process,
so that neither a restart of the edge nor its death touches it or its sandboxes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.api.errors import InternalError
from dsec.edge.launchwire import PROTO, Connection, LaunchEvents
from dsec.edge.process import start_detached
from dsec.edge.uidblock import UidBlock

log = logging.getLogger(__name__)

_START_S: Final = 10.0
"""A launcher that is not ready by then never is; it takes about 10 ms on an idle machine."""
_REQUEST_S: Final = 10.0
_RETRY_S: Final = 0.005
_LOG_TAIL_BYTES: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherConfig:
    """Where the launcher is and how it is called. `binary`: the program; `uid_blocks`: the folder of claims on user ids."""

    binary: Path
    socket: Path
    log_file: Path
    uid_blocks: Path
    instance: str
    cgroup_name: str


class _DyingError(InternalError):
    """The launcher closed the connection before it answered."""

    def __init__(self) -> None:
        super().__init__("the launcher closed the connection before it answered")


class Launcher:
    """Keeps one launcher running. `connection` is None while there is none."""

    def __init__(self, config: LauncherConfig, events: LaunchEvents) -> None:
        self._config = config
        self._events = events
        self._block: UidBlock | None = None
        self.connection: Connection | None = None

    async def connect_or_start(self, clean: Callable[[], Awaitable[None]]) -> bool:
        """Connect to the running launcher, or start one after `clean`; returns whether it was running already.

        `clean` ends what a dead launcher left. Raises InternalError (with the end of the log) if none can be started, NoCapacity if
        no block of user ids is free.
        """
        connection = self._try_connect()
        if connection is not None:
            if self._block is None:
                with suppress(OSError):
                    self._block = UidBlock.of_process(self._config.uid_blocks, connection.peer_pid())
            try:
                await self._greet(connection)
            except _DyingError:
                # It was dying while we connected. A claim that was shared with it is still the right one: sandboxes may live.
                log.warning("the launcher died as it was found")
            else:
                return True
        await clean()
        await self._greet(await self._start())
        return False

    async def _greet(self, connection: Connection) -> None:
        try:
            hello = await connection.request("hello", {"proto": PROTO}, timeout_s=_REQUEST_S)
            if hello.get("proto") != PROTO or hello.get("instance") != self._config.instance:
                raise InternalError(
                    f"the launcher at {self._config.socket} is another's or of another release: {hello}"
                )
        except BaseException as error:
            died = connection.closed and isinstance(error, InternalError)
            connection.close()
            if died:
                raise _DyingError from error
            raise
        self.connection = connection
        log.info("launcher connected", extra={"pid": hello.get("pid"), "sandboxes": hello.get("sandboxes")})

    async def stop(self, *, kill: bool) -> None:
        """Ask the launcher to end; `kill`: with all of its sandboxes."""
        if self.connection is not None:
            self.connection.expected_to_end = True
            with suppress(InternalError, TimeoutError):
                await self.connection.request("shutdown", {"kill": kill}, timeout_s=30.0)

    def close(self) -> None:
        """Let go of the launcher, which runs on. Idempotent."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if self._block is not None:
            self._block.close()
            self._block = None

    async def _start(self) -> Connection:
        config = self._config
        if self._block is None:
            self._block = UidBlock.claim(config.uid_blocks)
        config.socket.unlink(missing_ok=True)
        argv = [str(config.binary), "serve", "--socket", str(config.socket), "--instance", config.instance]
        argv += [
            "--cgroup-name",
            config.cgroup_name,
            "--uid-base",
            str(self._block.base),
            "--keep-fd",
            str(self._block.descriptor),
        ]
        await start_detached(
            argv, log_path=str(config.log_file), descriptors=(self._block.descriptor,), timeout_s=_START_S
        )
        deadline = asyncio.get_running_loop().time() + _START_S
        while asyncio.get_running_loop().time() < deadline:
            connection = self._try_connect()
            if connection is not None:
                return connection
            await asyncio.sleep(_RETRY_S)
        raise InternalError(f"dsec-launch did not start within {_START_S:.0f} s; its log ends with: {self._log_tail()}")

    def _try_connect(self) -> Connection | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.connect(str(self._config.socket))
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            return None
        except BaseException:
            sock.close()
            raise
        return Connection(sock, self._events)

    def _log_tail(self) -> str:
        with suppress(OSError), self._config.log_file.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
        return "(no log)"
