"""The default filter, compiled and loaded into a real process."""

import ctypes
import errno
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from dsec.security import compile_profile, find_profile, seccomp
from dsec.security.profile import ProfileError, load_strict

# Loads the blob at argv[1], then runs argv[2] with `call(number, *arguments)` giving the errno of a raw system call, 0 for success.
_HARNESS = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
blob = open(sys.argv[1], "rb").read()
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]
program = Program(len(blob) // 8, blob)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()
seccomp = ctypes.CDLL("libseccomp.so.2")
def call(name, *arguments):
    number = seccomp.seccomp_syscall_resolve_name(name.encode())
    assert number >= 0, name
    ctypes.set_errno(0)
    outcome = libc.syscall(number, *[ctypes.c_long(word) for word in arguments])
    return ctypes.get_errno() if outcome == -1 else 0
exec(sys.argv[2])
"""


@pytest.fixture(scope="module")
def blob(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("seccomp") / "default.bpf"
    report = compile_profile(find_profile(), target)
    assert report.rules > 300
    assert report.instructions == target.stat().st_size // 8
    return target


def inside(blob: Path, code: str) -> str:
    """Run Python code under the filter and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", _HARNESS, str(blob), code], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def errno_of(blob: Path, call: str) -> str:
    return inside(blob, f"code = call({call}); print(errno.errorcode.get(code, code))")


@pytest.mark.parametrize(
    "call",
    [
        "'unshare', 0x10000000",
        "'unshare', 0x00020000",
        "'mount', 0, 0, 0, 0, 0",
        "'umount2', 0, 0",
        "'fsopen', 0, 0",
        "'move_mount', 0, 0, 0, 0, 0",
        "'pivot_root', 0, 0",
        "'keyctl', 0, -3, 1",
        "'add_key', 0, 0, 0, 0, 0",
        "'bpf', 0, 0, 0",
        "'perf_event_open', 0, 0, -1, -1, 0",
        "'userfaultfd', 0",
        "'init_module', 0, 0, 0",
        "'kexec_load', 0, 0, 0, 0",
        "'syslog', 3, 0, 0",
        "'io_uring_setup', 1, 0",
        "'open_by_handle_at', 0, 0, 0",
        "'setns', -1, 0",
        "'setns', -1, 0x40000000",
        "'clone', 0x10000000 | 17, 0, 0, 0, 0",
        "'clone', 0x20000000 | 0x02000000 | 17, 0, 0, 0, 0",
    ],
)
def test_a_refused_call_is_eperm(blob: Path, call: str) -> None:
    assert errno_of(blob, call) == "EPERM"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("'clone3', 0, 0", "ENOSYS"),  # libraries fall back to clone
        ("'setns', -1, 0x10000000", "EBADF"),  # passes the filter: the guest joins its user namespace so
        ("'personality', 0", "0"),
        ("'personality', 0xffffffff", "0"),
        ("'personality', 0x0040000", "ENOSYS"),  # ADDR_NO_RANDOMIZE is not in the profile's list
        ("'getpid'", "0"),
        ("'close', -1", "EBADF"),
    ],
)
def test_other_calls_answer_as_the_profile_says(blob: Path, call: str, expected: str) -> None:
    assert errno_of(blob, call) == expected


def run_filter(program: bytes, number: int, architecture: int, arguments: tuple[int, ...]) -> int:
    """Interpret a classic BPF filter over one call and return its verdict."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *arguments)
    instructions = list(struct.iter_unpack("=HBBI", program))
    accumulator = place = 0
    while True:
        code, yes, no, value = instructions[place]
        place += 1
        if code == 0x06:
            return int(value)
        if code == 0x20:
            accumulator = struct.unpack_from("=I", data, value)[0]
        elif code == 0x05:
            place += value
        elif code == 0x54:
            accumulator &= value
        else:
            holds = {0x15: accumulator == value, 0x25: accumulator > value, 0x35: accumulator >= value}[code]
            place += yes if holds else no


def test_the_tree_over_ranges_decides_as_libseccomp_does(blob: Path) -> None:
    library = seccomp._library()
    profile = load_strict(find_profile())
    rules = [
        (number, rule)
        for rule in profile.rules
        if (number := library.seccomp_syscall_resolve_name(rule.syscall.encode())) >= 0
        and rule.error != profile.default_error
    ]
    reference, ours = seccomp._export(library, profile.default_error, rules), blob.read_bytes()
    assert len(ours) < len(reference) / 2
    native = library.seccomp_arch_native()
    words = [0, 1, 2, 8, 16, 17, 40, 0x20000, 0x20008, 0x10000000, 0x7E020000, 0xFFFFFFFF, 1 << 32, (1 << 64) - 1]
    cases = [(word, other, 0, 0, 0, 0) for word in words for other in words]
    for number in [*range(600), 0xFFFF, 0x3FFFFFFF, 0xFFFFFFFF]:
        wide = number in {found for found, rule in rules if rule.conditions}
        for arguments in cases if wide else cases[:: len(words) + 1]:
            assert run_filter(ours, number, native, arguments) == run_filter(reference, number, native, arguments)
    for foreign in (0x40000003, 0, 0xFFFFFFFF):
        assert run_filter(ours, 0, foreign, cases[0]) == run_filter(reference, 0, foreign, cases[0])


def test_ordinary_programs_work(blob: Path) -> None:
    code = (
        "import subprocess, threading, tempfile, multiprocessing\n"
        "seen = []\n"
        "thread = threading.Thread(target=seen.append, args=(1,)); thread.start(); thread.join()\n"
        "assert subprocess.run(['sh', '-c', 'echo a | cat'], capture_output=True, check=True).stdout == b'a\\n'\n"
        "with tempfile.TemporaryFile() as file: file.write(b'x')\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(3)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3\n"
        "import socket; socket.socketpair()[0].close()\n"
        "print(seen)"
    )
    assert inside(blob, code) == "[1]"


def test_an_unknown_call_is_left_out_and_told(tmp_path: Path) -> None:
    source = tmp_path / "profile.json"
    entry = {"names": ["getpid", "no_such_call_ever"], "action": "SCMP_ACT_ALLOW", "args": []}
    document = {"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": errno.ENOSYS, "syscalls": [entry]}
    source.write_text(json.dumps(document))
    report = compile_profile(source, tmp_path / "out.bpf")
    assert "no_such_call_ever" in report.unknown


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": []}'])
def test_a_broken_profile_is_an_error_and_leaves_the_target(tmp_path: Path, text: str) -> None:
    source, target = tmp_path / "profile.json", tmp_path / "out.bpf"
    source.write_text(text)
    target.write_bytes(b"old")
    with pytest.raises(ProfileError):
        compile_profile(source, target)
    assert target.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.bpf", "profile.json"]


def test_more_capabilities_open_more_calls() -> None:
    usual = {rule.syscall for rule in load_strict(find_profile()).rules if rule.error is None}
    wide = {
        rule.syscall
        for rule in load_strict(find_profile(), capabilities=frozenset({"CAP_SYS_TIME"})).rules
        if rule.error is None
    }
    assert "clock_settime" not in usual
    assert "clock_settime" in wide


def test_libseccomp_is_the_one_the_host_has() -> None:
    assert ctypes.CDLL("libseccomp.so.2").seccomp_api_get() >= 1
