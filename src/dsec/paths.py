"""Where dsec keeps its state on a host. Owns names of files and folders only: nothing here creates or opens anything.

The one rule: every path of a daemon comes from here, so that two homes (two checkouts, a bench beside a daemon) never meet.
"""

import base64
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_SYSTEM_HOME = Path("/var/lib/dsec")
_RUN_ROOT = Path("/run/dsec")


def _default_home() -> Path:
    """Return the home of this installation: the checkout's own while running from one, else the system's."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file() and (checkout / "src" / "dsec" / "paths.py").is_file():
        return checkout / ".dsec"
    return _SYSTEM_HOME


def _instance_id(home: Path) -> str:
    """Return eight lower-case base32 characters that name the home: 40 bits, stable over restarts."""
    digest = hashlib.sha256(os.fsencode(home)).digest()
    return base64.b32encode(digest[:5]).decode().lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """The files and folders of one dsec instance.

    | attribute | what it is |
    |---|---|
    | `home` | root of all state, resolved: `DSEC_HOME`, else `<checkout>/.dsec`, else `/var/lib/dsec` |
    | `images_dir` | image store: layers and names; may be another home's, read only (`DSEC_IMAGES`) |
    | `state_dir` | `home/state`: database, journal, keys |
    | `storage_dir` | `home/storage`: sparse images of disk-backed uppers |
    | `bin_dir` | `home/bin`: `dsec-launch`, `dsec-guest`, `dsec-bench`; may be another home's (`DSEC_BIN`) |
    | `seccomp_blob` | `bin_dir/seccomp.bpf`: the compiled default profile |
    | `api_key_file` | `home/state/api.key`, mode 0600 |
    | `database` | `home/state/dsec.db` |
    | `log_file` | `home/state/dsec.log` |
    | `instance` | eight base32 characters made from `home`; part of the name of every kernel object |
    | `run_dir` | `/run/dsec/<instance>`: sockets and locks; short, because a unix socket's path has at most 107 bytes |
    | `api_socket` | `run_dir/api.sock` |
    | `launch_socket` | `run_dir/launch.sock` |
    | `lock_file` | `run_dir/lock`: held (flock) by the living daemon |
    """

    home: Path
    instance: str
    images_dir: Path
    bin_dir: Path
    run_dir: Path

    @classmethod
    def discover(cls, home: Path | None = None) -> Self:
        """Return the paths of `home`, or of `DSEC_HOME`, or of this installation. Creates nothing."""
        chosen = home or Path(os.environ.get("DSEC_HOME") or _default_home())
        chosen = chosen.expanduser().resolve()
        instance = _instance_id(chosen)
        return cls(
            home=chosen,
            instance=instance,
            images_dir=Path(os.environ.get("DSEC_IMAGES") or chosen / "images"),
            bin_dir=Path(os.environ.get("DSEC_BIN") or chosen / "bin"),
            run_dir=_RUN_ROOT / instance,
        )

    @property
    def state_dir(self) -> Path:
        """Folder of the database, the journal and the keys."""
        return self.home / "state"

    @property
    def storage_dir(self) -> Path:
        """Folder of the sparse images behind disk-backed sandboxes."""
        return self.home / "storage"

    @property
    def seccomp_blob(self) -> Path:
        """The compiled default seccomp profile."""
        return self.bin_dir / "seccomp.bpf"

    @property
    def api_key_file(self) -> Path:
        """The key made at the first start, mode 0600."""
        return self.state_dir / "api.key"

    @property
    def database(self) -> Path:
        """The SQLite database."""
        return self.state_dir / "dsec.db"

    @property
    def log_file(self) -> Path:
        """The daemon's log when it runs in the background."""
        return self.state_dir / "dsec.log"

    @property
    def api_socket(self) -> Path:
        """The API's unix socket."""
        return self.run_dir / "api.sock"

    @property
    def launch_socket(self) -> Path:
        """The launcher's unix socket."""
        return self.run_dir / "launch.sock"

    @property
    def lock_file(self) -> Path:
        """The lock that the living daemon holds."""
        return self.run_dir / "lock"
