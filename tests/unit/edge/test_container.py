"""From a checked request to the launcher's spawn spec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.api import wire
from dsec.api.control import StartSandbox
from dsec.api.errors import InvalidRequest, Unsupported
from dsec.api.types import Kind, SandboxRecord, SandboxSpec, State
from dsec.edge.backends.container import ContainerBackend, ContainerConfig, backing_of

MIB = 1 << 20


def item(name: str = "aaaa", project: str = "p", **fields: Any) -> StartSandbox:
    wanted: dict[str, Any] = {
        "kind": Kind.CONTAINER, "image": "i", "layers": ("l1", "l2"), "cpus": 1.5, "memory_bytes": 512 * MIB, "disk_bytes": 128 * MIB,
        "pids": 512, "disk_backing": "auto",
    }  # fmt: skip
    spec = SandboxSpec(**{**wanted, **fields})
    record = SandboxRecord(
        id=name, project=project, principal="u", edge="aaaa", epoch=0, kind=Kind.CONTAINER, state=State.CREATING, image="i", cpus=1.5,
        memory=1, disk=1, pids=1, created_at=0.0,
    )  # fmt: skip
    return StartSandbox(record=record, spec=spec)


@pytest.fixture
def backend(tmp_path: Path) -> ContainerBackend:
    return ContainerBackend(
        ContainerConfig(
            guest=Path("/bin/guest"),
            seccomp_blob=None,
            storage_dir=tmp_path,
            run_dir=tmp_path / "run",
            v1_pids=True,
            host_cpus=4,
        )
    )


def common(backend: ContainerBackend, start: StartSandbox) -> dict[str, Any]:
    (group,) = backend.groups([start], epoch=5)
    fields: dict[str, Any] = msgspec.msgpack.decode(group.common)
    return fields


def test_limits_and_the_guests_config(backend: ContainerBackend) -> None:
    spec = common(backend, item(env={"A": "2"}, image_env={"A": "1", "B": "3"}, user="me", workdir="/w"))
    assert spec["limits"] == {
        "memory": 512 * MIB, "cpu_quota_us": 150_000, "cpu_period_us": 100_000, "cpu_shares": 1536, "pids": 512,
    }  # fmt: skip
    assert spec["affinity"] == 2
    assert spec["layers"] == ["l1", "l2"]
    assert spec["upper"] == {"kind": "tmpfs", "bytes": 128 * MIB, "inodes": 16_384}
    ((stream, kind, payload),) = wire.frames(memoryview(spec["first"]))
    hello = wire.fields_of(payload)
    assert (stream, kind, hello["epoch"]) == (0, wire.HELLO, 5)
    config = hello["config"]
    assert config["env"] == {"A": "2", "B": "3"}
    assert (config["user"], config["cwd"], config["memory"]) == ("me", "/w", 512 * MIB)
    assert 8 <= config["run_pids"] < 512
    assert 1024 <= config["nofile"][0] <= config["nofile"][1] <= 1_048_576


def test_shm_is_half_of_memory_and_sysfs_tells_the_cpus(backend: ContainerBackend) -> None:
    mounts = common(backend, item())["mounts"]
    assert {"kind": "tmpfs", "path": "/dev/shm", "bytes": 256 * MIB, "mode": 0o1777} in mounts
    assert {"kind": "ro", "path": "/proc/sys"} in mounts
    assert {"kind": "mask", "path": "/proc/kcore"} in mounts or not Path("/proc/kcore").exists()
    (sysfs,) = [Path(mount["source"]) for mount in mounts if mount["kind"] == "bind"]
    for name in ("online", "possible", "present"):
        assert (sysfs / "devices/system/cpu" / name).read_text() == "0-1\n"
    assert list((sysfs / "fs/cgroup").iterdir()) == []


def test_sandboxes_of_one_shape_share_a_message(backend: ContainerBackend) -> None:
    groups = backend.groups([item("a"), item("b"), item("c", memory_bytes=1024 * MIB), item("d", project="q")], epoch=1)
    assert [[one["id"] for one in group.items] for group in groups] == [["a", "b"], ["c"], ["d"]]
    own = groups[0].items[1]
    assert own["hostname"] == "b"
    assert {file["path"] for file in own["files"]} == {"/etc/hosts", "/etc/hostname", "/etc/resolv.conf"}
    again = backend.groups([item("e")], epoch=1)
    assert again[0].common == groups[0].common


@pytest.mark.parametrize(
    ("disk", "backing", "expected"),
    [(64, "auto", "tmpfs"), (256, "auto", "tmpfs"), (257, "auto", "local"), (64, "local", "local")],
)
def test_where_writes_go(disk: int, backing: str, expected: str) -> None:
    assert backing_of(item(disk_bytes=disk * MIB, disk_backing=backing).spec) == expected


@pytest.mark.parametrize(
    "fields",
    [{"disk_backing": "tmpfs", "disk_bytes": 257 * MIB}, {"memory_bytes": 1 * MIB}, {"cpus": 0.0}, {"pids": 2}],
)
def test_what_can_never_start_is_refused(backend: ContainerBackend, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        backend.check(item(**fields))


async def test_templates_are_sparse_and_made_once(backend: ContainerBackend, tmp_path: Path) -> None:
    await backend.prepare((), 300 * MIB, "local")
    (template,) = (tmp_path / "run" / "templates").iterdir()
    made = template.stat()
    assert made.st_size == 300 * MIB
    assert made.st_blocks * 512 < 2 * MIB
    await backend.prepare((), 300 * MIB, "local")
    assert template.stat().st_ino == made.st_ino
    upper = common(backend, item(disk_bytes=300 * MIB))["upper"]
    assert upper == {"kind": "image", "template": str(template), "dir": str(tmp_path), "bytes": 300 * MIB}


async def test_what_containers_lack_is_a_typed_answer(backend: ContainerBackend) -> None:
    for work in (backend.freeze("a", 0), backend.thaw("a", 0), backend.snapshot("a", 0)):
        with pytest.raises(Unsupported):
            await work
