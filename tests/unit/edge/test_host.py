"""Probes of the host: on the reference machine everything that sandboxes need is there."""

import os
from pathlib import Path

import pytest

from dsec.edge.host import PID_MAX_TARGET, Check, Feature, probe, raise_limits, unmet
from dsec.edge.host.cgroups import find_cgroups

_V1 = """\
cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0
cgroup2 {unified} cgroup2 rw 0 0
"""


def test_every_failed_check_says_what_to_do(tmp_path: Path) -> None:
    checks = probe(tmp_path / "home")
    assert len({check.name for check in checks}) == len(checks)
    for check in checks:
        assert check.detail, check
        assert bool(check.fix) == (check.ok is False), check
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="root: the trials need it")
def test_a_host_that_runs_the_suite_has_what_containers_need(tmp_path: Path) -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    checks = {check.name: check for check in probe(tmp_path)}
    assert unmet(checks.values()) == ()
    assert all(checks[name].ok for name in ("erofs", "overlay", "idmap", "user namespaces", "pidfd", "cgroup2"))
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    unified = find_cgroups().unified
    assert unified is not None
    assert not (unified / f"dsec-probe-{os.getpid()}").exists()


def test_only_required_failures_count() -> None:
    def check(*, ok: bool | None, required: bool) -> Check:
        return Check(name="x", feature=Feature.HOST, ok=ok, detail="d", required=required)

    failed = check(ok=False, required=True)
    assert unmet(
        [failed, check(ok=None, required=True), check(ok=False, required=False), check(ok=True, required=True)]
    ) == (failed,)


def test_controllers_are_found_in_either_hierarchy(tmp_path: Path) -> None:
    unified = tmp_path / "unified"
    unified.mkdir()
    (unified / "cgroup.controllers").write_text("pids io\n")
    (tmp_path / "mounts").write_text(_V1.format(unified=unified))
    layout = find_cgroups(tmp_path / "mounts")
    assert layout.unified == unified
    assert layout.v1 == {"memory": Path("/sys/fs/cgroup/memory"), "cpu": Path("/sys/fs/cgroup/cpu,cpuacct")}
    assert layout.missing == ()
    assert layout.describe() == "memory v1, cpu v1, pids v2"


def test_a_missing_controller_is_named(tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text("cgroup2 /nowhere cgroup2 rw 0 0\n")
    assert find_cgroups(tmp_path / "mounts").missing == ("memory", "cpu", "pids")


def test_limits_are_raised_and_never_lowered(tmp_path: Path) -> None:
    values = {"kernel/pid_max": 32768, "fs/inotify/max_user_instances": 1 << 30, "fs/inotify/max_user_watches": 1 << 30}
    for name, value in values.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    changes = raise_limits(root=tmp_path)
    assert [(change.name, change.before, change.after, change.error) for change in changes] == [
        ("kernel.pid_max", 32768, PID_MAX_TARGET, "")
    ]
    assert raise_limits(root=tmp_path) == ()
