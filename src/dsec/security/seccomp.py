"""Compiles the strict seccomp profile to a BPF blob through libseccomp. Loading the blob is the launcher's work.

The blob is for this machine's architecture alone: calls of another one (32-bit, x32) answer ENOSYS. Calls that pass or fail whatever
their arguments are decided by a tree over ranges (`ranges`), the others by libseccomp's program behind it.
"""

import ctypes
import errno
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.security import ranges
from dsec.security.profile import ProfileError, Rule, StrictProfile, load_strict

# Debian's containers-common installs the first, an administrator's override is the second.
_PROFILES: Final = (Path("/usr/share/containers/seccomp.json"), Path("/etc/containers/seccomp.json"))

_ACT_ALLOW: Final = 0x7FFF0000
_ACT_ERRNO: Final = 0x00050000
_ATTR_BAD_ARCHITECTURE: Final = 2
_ATTR_OPTIMIZE: Final = 8
_OPTIMIZE_BINARY_TREE: Final = 2
_UNKNOWN_SYSCALL: Final = -1
_BPF_INSTRUCTION_BYTES: Final = 8


class _ArgumentComparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileReport:
    """What became of a profile: rules in the filter, calls left out because this libseccomp does not know them, the filter's length."""

    rules: int
    unknown: tuple[str, ...]
    instructions: int


def find_profile() -> Path:
    """Return the OCI default profile of this host; raises `ProfileError` with the package to install where there is none."""
    for path in _PROFILES:
        if path.is_file():
            return path
    raise ProfileError(f"no seccomp profile at {_PROFILES[0]}: install golang-github-containers-common")


def compile_profile(source: Path, target: Path) -> ProfileReport:
    """Compile `source` in its strict form to the blob `target`, atomically; raises `ProfileError` and then leaves `target` as it was."""
    profile = load_strict(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    program, rules, unknown = _compile(profile)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(program)
        os.fchmod(descriptor, 0o644)
        os.fsync(descriptor)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return ProfileReport(rules=rules, unknown=unknown, instructions=len(program) // _BPF_INSTRUCTION_BYTES)


def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        raise ProfileError(f"libseccomp cannot be loaded ({error}): install libseccomp2") from error
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = (ctypes.c_uint32,)
    library.seccomp_release.argtypes = (ctypes.c_void_p,)
    library.seccomp_attr_set.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32)
    library.seccomp_syscall_resolve_name.argtypes = (ctypes.c_char_p,)
    library.seccomp_rule_add_array.argtypes = (
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.POINTER(_ArgumentComparison),
    )
    library.seccomp_arch_native.restype = ctypes.c_uint32
    library.seccomp_export_bpf.argtypes = (ctypes.c_void_p, ctypes.c_int)
    return library


def _compile(profile: StrictProfile) -> tuple[bytes, int, tuple[str, ...]]:
    """Return the filter, the number of rules in it and the calls that this libseccomp does not know."""
    library = _library()
    rules: dict[int, list[Rule]] = {}
    unknown: set[str] = set()
    for rule in profile.rules:
        number = library.seccomp_syscall_resolve_name(rule.syscall.encode())
        if number == _UNKNOWN_SYSCALL:
            unknown.add(rule.syscall)
        # Other negative numbers are known calls that this architecture does not have.
        elif number >= 0 and rule.error != profile.default_error:
            rules.setdefault(number, []).append(rule)
    plain = {number: found[0] for number, found in rules.items() if len({*found}) == 1 and not found[0].conditions}
    asked = [(number, rule) for number, found in rules.items() if number not in plain for rule in found]
    program = ranges.build(
        architecture=library.seccomp_arch_native(),
        other_architecture=_ACT_ERRNO | errno.ENOSYS,
        actions={number: _action(plain[number]) if number in plain else None for number in rules},
        default=_ACT_ERRNO | profile.default_error,
        tail=_export(library, profile.default_error, asked),
    )
    return program, sum(len(found) for found in rules.values()), tuple(sorted(unknown))


def _export(library: ctypes.CDLL, default_error: int, rules: list[tuple[int, Rule]]) -> bytes:
    """Return libseccomp's program for these rules."""
    context = library.seccomp_init(_ACT_ERRNO | default_error)
    if not context:
        raise ProfileError("libseccomp gave no filter context")
    try:
        _check(library.seccomp_attr_set(context, _ATTR_OPTIMIZE, _OPTIMIZE_BINARY_TREE), "optimise")
        _check(library.seccomp_attr_set(context, _ATTR_BAD_ARCHITECTURE, _ACT_ERRNO | errno.ENOSYS), "architecture")
        for number, rule in rules:
            _add_rule(library, context, rule, number)
        with tempfile.TemporaryFile() as file:
            _check(library.seccomp_export_bpf(context, file.fileno()), "export")
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(context)


def _action(rule: Rule) -> int:
    return _ACT_ALLOW if rule.error is None else _ACT_ERRNO | rule.error


def _add_rule(library: ctypes.CDLL, context: int, rule: Rule, number: int) -> None:
    terms = (_ArgumentComparison * len(rule.conditions))(
        *(
            _ArgumentComparison(condition.argument, condition.operator, condition.value, condition.other)
            for condition in rule.conditions
        )
    )
    outcome = library.seccomp_rule_add_array(context, _action(rule), number, len(terms), terms)
    # A call that two entries of the profile open in the same way.
    if outcome != -errno.EEXIST:
        _check(outcome, rule.syscall)


def _check(outcome: int, what: str) -> None:
    if outcome < 0:
        raise ProfileError(f"libseccomp refused {what}: {os.strerror(-outcome)}")
