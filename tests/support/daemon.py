"""A private dsec daemon for tests: own home and instance, images and programs read-only from the checkout's store."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support import census, procfs
from tests.support.timing import eventually_sync, scaled

import dsec
from dsec.paths import Paths

CHECKOUT = Path(__file__).resolve().parents[2]
STORE = Paths.discover(Path(os.environ.get("DSEC_TEST_STORE", CHECKOUT / ".dsec")))
"""Where `make setup` put images and programs."""
COMMAND = Path(sys.executable).parent / "dsec"


def missing_capability() -> str | None:
    """What the host or the checkout lacks for system tests, as a reason to skip; None if all is there."""
    if os.geteuid() != 0:
        return "root: system tests make namespaces, mounts and cgroups"
    for program in ("dsec-launch", "dsec-guest"):
        if not (STORE.bin_dir / program).is_file():
            return f"{program}: not built (make setup)"
    if not STORE.images_dir.is_dir():
        return "base image: not built (make setup)"
    return None


class Daemon:
    """One daemon process and what belongs to it. Not started by the constructor."""

    def __init__(self, home: Path, **extra_env: str) -> None:
        self.paths = Paths.discover(home)
        self.home = self.paths.home
        self.instance = self.paths.instance
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("DSEC_")}
        self.env |= {
            "DSEC_HOME": str(self.home),
            "DSEC_IMAGES": str(STORE.images_dir),
            "DSEC_BIN": str(STORE.bin_dir),
        } | extra_env
        self.process: subprocess.Popen[bytes] | None = None
        self.log = self.home / "test-daemon.log"

    @property
    def up_command(self) -> list[str]:
        """The command line of the daemon in the foreground."""
        return [str(COMMAND), "up", "--port", "0"]

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start `dsec up` and wait until it answers; also until the host has room for another instance."""
        deadline = time.monotonic() + scaled(90)
        while True:
            try:
                return self._start()
            except AssertionError:
                if "blocks of user ids" not in self.log_tail(300) or time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def _start(self) -> None:
        assert self.process is None or self.process.poll() is not None, "already running"
        self.home.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.up_command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        eventually_sync(self._answers, within_s=30, what="the daemon answers")

    def _answers(self) -> bool:
        assert self.process is not None
        status = self.process.poll()
        assert status is None, f"dsec up ended with {status}:\n{self.log_tail()}"
        import http.client
        import socket

        connection = http.client.HTTPConnection("localhost", timeout=5)
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(5)
            sock.connect(str(self.paths.api_socket))
            connection.sock = sock
            connection.request("GET", "/healthz")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            sock.close()

    def stop(self) -> None:
        """`dsec down`, as a user ends it: all sandboxes end too. Nothing may be left."""
        self._dsec("down")
        if self.process is not None:
            self.process.wait(scaled(30))
            self.process = None

    def stop_keeping(self) -> None:
        """End the daemon in the polite way and leave its sandboxes to the next one, as for an upgrade."""
        self._dsec("down", "--keep")
        assert self.process is not None
        self.process.wait(scaled(30))

    def _dsec(self, *words: str) -> None:
        """Run a command of the command line against this instance; it must succeed."""
        command = [str(COMMAND), *words]
        done = subprocess.run(
            command,
            env=self.env,
            check=False,
            timeout=scaled(60),
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, f"{command} ended with {done.returncode}: {done.stdout.decode(errors='replace')}"

    def destroy(self) -> None:
        """End the daemon whatever state it is in, and assert that nothing of the instance is left."""
        try:
            if self.process is None or self.process.poll() is not None:
                self.start()  # a dead instance is swept at its next start
            self.stop()
        except BaseException:
            self._end_by_force()
            raise
        eventually_sync(
            lambda: not census.remains(instance=self.instance, home=self.home),
            within_s=15,
            what=f"nothing of instance {self.instance} is left, but {census.remains(instance=self.instance, home=self.home)}",
        )

    def _end_by_force(self) -> None:
        """Leave no daemon behind for the next test, whatever went wrong with this one."""
        if self.process is not None and self.process.poll() is None:
            self.kill_edge()
        if self.launcher_pid is not None:
            self.kill_launcher()
        self.clean_host(grace_s=60)

    def kill_edge(self) -> None:
        """`kill -9` of the Python process, and wait for its end."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(scaled(10))

    def kill_launcher(self) -> None:
        """`kill -9` of the launcher."""
        pid = self.launcher_pid
        assert pid is not None, "no launcher"
        os.kill(pid, signal.SIGKILL)
        eventually_sync(lambda: not procfs.alive(pid), within_s=10, what="the launcher is dead")

    def clean_host(self, *, grace_s: float) -> None:
        """Sweep what dead instances left on the host, sparing those that died less than `grace_s` ago, as an edge's start does."""
        command = [sys.executable, "-m", "dsec.edge.sweep", "--grace", str(grace_s)]
        subprocess.run(command, env=self.env, check=True, timeout=scaled(60), cwd="/", capture_output=True)

    def remains_in_kernel(self) -> list[str]:
        """What of the instance is in the kernel: processes, cgroups, loop devices, mounts."""
        return [text for text in census.remains(instance=self.instance, home=self.home) if not text.startswith("file ")]

    # -- what belongs to it -------------------------------------------------------------------------------------------

    @property
    def edge_pid(self) -> int:
        """The Python process."""
        assert self.process is not None
        return self.process.pid

    @property
    def launcher_pid(self) -> int | None:
        """The launcher (not its workers), None if it does not run."""
        pids = [
            pid
            for pid in procfs.with_word(self.instance)
            if procfs.cmdline(pid) and Path(procfs.cmdline(pid)[0]).name == "dsec-launch"
        ]
        tops = [pid for pid in pids if procfs.parent(pid) not in pids]
        return tops[0] if tops else None

    def sandbox_pids(self) -> list[int]:
        """All living processes inside sandboxes of this instance, guests included."""
        mark = re.compile(re.escape(os.fsencode(self.instance)) + rb"[^\n]*/s\d+")
        return [pid for pid in procfs.all_pids() if mark.search(procfs.read(pid, "cgroup")) and procfs.alive(pid)]

    def guest_pids(self) -> list[int]:
        """First processes of the sandboxes of this instance (pid 1 inside)."""
        found = []
        for pid in self.sandbox_pids():
            match = re.search(rb"^NSpid:\s+(.*)$", procfs.read(pid, "status"), re.MULTILINE)
            if match and match[1].split()[-1] == b"1":
                found.append(pid)
        return found

    def take_census(self) -> census.Census:
        """Count what the instance has in the kernel and on disk."""
        return census.take(instance=self.instance, home=self.home, edge=self.edge_pid, launcher=self.launcher_pid)

    # -- access -------------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The unix socket as a URL for the SDK."""
        return f"unix://{self.paths.api_socket}"

    @property
    def key(self) -> str:
        """The key that the daemon made at its first start."""
        return self.paths.api_key_file.read_text().strip()

    def client(self) -> dsec.AsyncClient:
        """A new client of this daemon."""
        return dsec.AsyncClient(url=self.url, key=self.key)

    @property
    def client_env(self) -> dict[str, str]:
        """Environment for a client program in a process of its own."""
        return {**os.environ, "DSEC_URL": self.url, "DSEC_API_KEY": self.key}

    def log_tail(self, max_bytes: int = 20_000) -> str:
        """The end of the daemon's output."""
        if not self.log.exists():
            return "(no log)"
        raw = self.log.read_bytes()
        return raw[-max_bytes:].decode(errors="replace")

    def save_logs(self, folder: Path) -> None:
        """Copy the logs of daemon and launcher, and the kernel's last lines, for whoever looks at a failure."""
        folder.mkdir(parents=True, exist_ok=True)
        for path in [self.log, *self.paths.state_dir.glob("*.log")]:
            if path.exists():
                (folder / path.name).write_bytes(path.read_bytes()[-2_000_000:])
        dmesg = subprocess.run(["dmesg"], capture_output=True, check=False, timeout=10)
        (folder / "dmesg.txt").write_bytes(b"\n".join(dmesg.stdout.splitlines()[-200:]))
