"""Reads the OCI default seccomp profile and makes it strict: a list of rules, nothing of libseccomp yet.

The profile of Debian's containers-common package lets everybody have clone, unshare, mount and keyctl, because podman relies on user
namespaces alone. Strict means: what a container without CAP_SYS_ADMIN gets in moby's profile. The one rule: the filter is
loaded before the guest agent and its commands inherit it, so what the agent needs (`setns` into a user namespace) is open to all.
"""

import errno
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

# The capabilities that container runtimes give by default; the profile opens calls by them.
DEFAULT_CAPABILITIES: Final = frozenset(
    f"CAP_{name}"
    for name in (
        "AUDIT_WRITE CHOWN DAC_OVERRIDE FOWNER FSETID KILL MKNOD NET_BIND_SERVICE NET_RAW SETFCAP SETGID SETPCAP SETUID SYS_CHROOT"
    ).split()
)

# Refused with EPERM whatever the profile says: namespaces, mounts, the kernel's keyrings (not namespaced) and log, and io_uring, whose
# operations no filter sees.
_REFUSED: Final = frozenset(
    (
        "unshare mount umount umount2 mount_setattr move_mount open_tree open_tree_attr fsopen fsconfig fsmount fspick pivot_root "
        "keyctl add_key request_key syslog reboot io_uring_setup io_uring_enter io_uring_register"
    ).split()
)
# clone3 takes its flags in memory, where a filter cannot look: with ENOSYS (the default action) libraries fall back to clone.
_CLONE_NAMESPACE_FLAGS: Final = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
_CLONE_NEWUSER: Final = 0x10000000

_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}

NE, EQ, MASKED_EQ = 1, 4, 7
_OPERATORS: Final = {
    "SCMP_CMP_NE": NE,
    "SCMP_CMP_LT": 2,
    "SCMP_CMP_LE": 3,
    "SCMP_CMP_EQ": EQ,
    "SCMP_CMP_GE": 5,
    "SCMP_CMP_GT": 6,
    "SCMP_CMP_MASKED_EQ": MASKED_EQ,
}


class ProfileError(Exception):
    """The profile cannot be read or used; the message names the file or the system call."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of one argument of a system call. With MASKED_EQ `value` is the mask and `other` what must remain."""

    argument: int
    operator: int
    value: int
    other: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to one system call: `error` is the errno it answers, None lets it pass."""

    syscall: str
    error: int | None
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class StrictProfile:
    """The strict rules; every call that no rule names answers `default_error`."""

    default_error: int
    rules: tuple[Rule, ...]


def load_strict(source: Path, *, capabilities: frozenset[str] = DEFAULT_CAPABILITIES) -> StrictProfile:
    """Return the strict form of an OCI profile for this machine's architecture; raises `ProfileError`."""
    try:
        document = msgspec.json.decode(source.read_bytes())
        entries: Sequence[Mapping[str, Any]] = document["syscalls"]
        if document["defaultAction"] != "SCMP_ACT_ERRNO":
            raise ProfileError(f"{source}: the default action is {document['defaultAction']}, not an error")
        default_error = int(document.get("defaultErrnoRet") or errno.EPERM)
        rules = [rule for entry in entries if _applies(entry, capabilities) for rule in _entry_rules(entry)]
    except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise ProfileError(f"cannot read the seccomp profile {source}: {error}") from error
    return StrictProfile(default_error, (*rules, *_strict_rules()))


def _applies(entry: Mapping[str, Any], capabilities: frozenset[str]) -> bool:
    includes: Mapping[str, Any] = entry.get("includes") or {}
    excludes: Mapping[str, Any] = entry.get("excludes") or {}
    architecture = _ARCHITECTURES.get(platform.machine(), platform.machine())
    if includes.get("arches") and architecture not in includes["arches"]:
        return False
    if includes.get("caps") and not capabilities.intersection(includes["caps"]):
        return False
    return not capabilities.intersection(excludes.get("caps") or ())


def _entry_rules(entry: Mapping[str, Any]) -> Iterator[Rule]:
    action = entry["action"]
    if action == "SCMP_ACT_ALLOW":
        error = None
    elif action == "SCMP_ACT_ERRNO":
        error = int(entry.get("errnoRet") or errno.EPERM)
    else:
        raise ValueError(f"action {action} is not supported")
    conditions = tuple(
        Condition(int(term["index"]), _OPERATORS[term["op"]], int(term["value"]), int(term.get("valueTwo") or 0))
        for term in entry.get("args") or ()
    )
    for name in entry["names"]:
        if name not in _REFUSED and name not in ("clone", "clone3", "setns"):
            yield Rule(name, error, conditions)


def _strict_rules() -> Iterator[Rule]:
    for name in sorted(_REFUSED):
        yield Rule(name, errno.EPERM)
    yield Rule("clone", None, (Condition(0, MASKED_EQ, sum(_CLONE_NAMESPACE_FLAGS), 0),))
    for flag in _CLONE_NAMESPACE_FLAGS:
        yield Rule("clone", errno.EPERM, (Condition(0, MASKED_EQ, flag, flag),))
    yield Rule("setns", None, (Condition(1, EQ, _CLONE_NEWUSER),))
    yield Rule("setns", errno.EPERM, (Condition(1, NE, _CLONE_NEWUSER),))
