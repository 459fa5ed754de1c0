"""An edge's configuration: made once by the composition root, never changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dsec.api.ids import EdgeCode
from dsec.paths import Paths


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeConfig:
    """Who this edge is and what bounds it has.

    | field | meaning |
    |---|---|
    | `code` | four base32 characters: the start of every id that is made for this edge |
    | `paths` | the instance's files |
    | `token_key` | 16 to 64 bytes shared with the apiservers that mint stream tokens |
    | `pool_target` | slots (user and network namespaces, cgroups) kept ready for each project, at most 64 |
    | `max_sandboxes` | living sandboxes; None: what descriptors allow, at most 4,095 |
    | `max_starting` | sandboxes at the launcher at once; more wait their turn |
    | `max_queued` | sandboxes waiting for room or their turn; more are refused |
    | `memory_reserve_bytes` | no sandbox is started while the host has less memory available |
    | `seccomp` | whether the seccomp profile is loaded (off only for measurements) |
    | `uid_blocks` | folder of the claims on host user ids, shared by all instances |
    """

    code: EdgeCode
    paths: Paths
    token_key: bytes = field(repr=False)
    pool_target: int = 64
    max_sandboxes: int | None = None
    max_starting: int = 64
    max_queued: int = 20_000
    memory_reserve_bytes: int = 256 << 20
    seccomp: bool = True
    uid_blocks: Path = Path("/run/dsec/uid-blocks")

    @property
    def cgroup_name(self) -> str:
        """Name of the instance's cgroups."""
        return f"dsec-{self.paths.instance}"

    @property
    def journal(self) -> Path:
        """The edge's journal."""
        return self.paths.state_dir / "edge.journal"

    @property
    def launcher(self) -> Path:
        """The launcher's program."""
        return self.paths.bin_dir / "dsec-launch"

    @property
    def guest(self) -> Path:
        """The guest's program."""
        return self.paths.bin_dir / "dsec-guest"

    @property
    def launcher_log(self) -> Path:
        """Where the launcher's log goes."""
        return self.paths.state_dir / "launch.log"
