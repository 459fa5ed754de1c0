"""Tries kernel features in a process of its own, run as a script; prints one JSON object of name: [ok, detail].

Whatever a trial makes (namespaces, mounts, descriptors, a virtual machine) ends with the process. Self-contained: standard library only.
"""

import base64
import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import signal
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable
from typing import Final

# Numbers from 424 on are the same on all architectures.
_MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _PIDFD_OPEN, _MOUNT_SETATTR = 429, 430, 431, 432, 434, 442
_BPF: Final = {"x86_64": 321, "aarch64": 280}
_CLONE: Final = {
    "user": 0x10000000,
    "mnt": 0x20000,
    "pid": 0x20000000,
    "net": 0x40000000,
    "ipc": 0x8000000,
    "uts": 0x4000000,
    "cgroup": 0x2000000,
}
_SET_STRING, _CREATE = 1, 6
_EMPTY_PATH, _ATTR_IDMAP = 0x1000, 0x00100000
_PIDFD_GET_INFO, _PIDFD_GET_USER_NAMESPACE = 0xC040FF0B, 0xFF09
_LOOP_CTL_GET_FREE: Final = 0x4C82
# An empty EROFS file system of one block.
_EROFS: Final = zlib.decompress(
    base64.b64decode("eNpjYBgFo2AUjFTw6OHXBwaRcSeYgWweBhUGRixqMMUcGBqoZD8LEL91ZGKQhvL/AwGyvAqUlmBggrMlgWw9PT0ATUMMjw==")
).ljust(4096, b"\0")

_libc = ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: int | bytes | None) -> int:
    words = [ctypes.c_long(word) if isinstance(word, int) else ctypes.c_char_p(word) for word in arguments]
    outcome = int(_libc.syscall(ctypes.c_long(number), *words))
    if outcome < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return outcome


def _mount(kind: bytes, options: dict[bytes, bytes]) -> int:
    """Return a detached mount."""
    context = _call(_FSOPEN, kind, 1)
    for key, value in options.items():
        _call(_FSCONFIG, context, _SET_STRING, key, value, 0)
    _call(_FSCONFIG, context, _CREATE, None, None, 0)
    return _call(_FSMOUNT, context, 1, 0)


def try_mount_api() -> str:
    """A detached tmpfs through fsopen, fsconfig and fsmount."""
    os.close(_mount(b"tmpfs", {b"size": b"65536"}))
    return "fsopen, fsconfig, fsmount"


def try_overlay() -> str:
    """An overlay whose layers are passed one by one."""
    with tempfile.TemporaryDirectory() as folder:
        tmpfs = _mount(b"tmpfs", {b"size": b"1048576"})
        _call(_MOVE_MOUNT, tmpfs, b"", -100, folder.encode(), 4)
        try:
            for name in ("lower", "upper", "work"):
                os.mkdir(f"{folder}/{name}")  # noqa: PTH102 - paths are plain strings here
            options = {name: f"{folder}/{name}".encode() for name in ("lower", "upper", "work")}
            os.close(
                _mount(
                    b"overlay",
                    {b"lowerdir+": options["lower"], b"upperdir": options["upper"], b"workdir": options["work"]},
                )
            )
        finally:
            _libc.umount2(folder.encode(), 2)
    return "layers by descriptor"


def try_erofs() -> str:
    """An EROFS file mounted without a loop device, then idmapped as sandboxes have it."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(_EROFS)
        file.flush()
        os.close(_mount(b"erofs", {b"source": file.name.encode()}))
    return "mounted from a file, no loop device"


def try_idmap() -> str:
    """A mount whose ids are shifted by a user namespace."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(_EROFS)
        file.flush()
        layer = _mount(b"erofs", {b"source": file.name.encode()})
    namespace = _user_namespace()
    attributes = struct.pack("QQQQ", _ATTR_IDMAP, 0, 0, namespace)
    _call(_MOUNT_SETATTR, layer, b"", _EMPTY_PATH, attributes, len(attributes))
    return "EROFS layers keep their owners inside"


def _user_namespace() -> int:
    """Return a descriptor of a new user namespace that maps 65,536 ids."""
    ready_read, ready_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ready_read)
        os.write(ready_write, bytes([_libc.unshare(_CLONE["user"]) & 0xFF]))
        signal.pause()
    os.close(ready_write)
    try:
        if os.read(ready_read, 1) != b"\0":
            raise OSError(errno.EPERM, "unshare(CLONE_NEWUSER) was refused")
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{child}/{name}", "w") as file:  # noqa: PTH123
                file.write("0 100000 65536")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY)
    finally:
        os.close(ready_read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def try_user_namespaces() -> str:
    """A user namespace with a full map."""
    os.close(_user_namespace())
    with open("/proc/sys/user/max_user_namespaces") as file:  # noqa: PTH123
        return f"up to {file.read().strip()}"


def try_namespaces() -> str:
    """The other kinds of namespace, each new."""
    child = os.fork()
    if child == 0:
        flags = sum(flag for name, flag in _CLONE.items() if name != "user")
        os._exit(0 if _libc.unshare(flags) == 0 else ctypes.get_errno())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise OSError(code, os.strerror(code))
    return "pid mnt net ipc uts cgroup"


def try_pidfd() -> str:
    """Facts and namespaces through a process descriptor."""
    descriptor = _call(_PIDFD_OPEN, os.getpid(), 0)
    fcntl.ioctl(descriptor, _PIDFD_GET_INFO, bytearray(64))
    os.close(fcntl.ioctl(descriptor, _PIDFD_GET_USER_NAMESPACE, 0))
    return "PIDFD_GET_INFO, PIDFD_GET_USER_NAMESPACE"


def try_seccomp() -> str:
    """A filter that lets everything pass."""
    child = os.fork()
    if child == 0:
        allow = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000))
        program = struct.pack("HxxxxxxP", 1, ctypes.addressof(allow))
        loaded = _libc.prctl(38, 1, 0, 0, 0) == 0 and _libc.prctl(22, 2, program, 0, 0) == 0
        os._exit(0 if loaded else ctypes.get_errno())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise OSError(code, os.strerror(code))
    return "filters load"


def try_loop() -> str:
    """A free loop device."""
    descriptor = os.open("/dev/loop-control", os.O_RDWR)
    number = fcntl.ioctl(descriptor, _LOOP_CTL_GET_FREE)
    os.close(descriptor)
    return f"/dev/loop{number} is free"


def try_fuse() -> str:
    """The FUSE device."""
    os.close(os.open("/dev/fuse", os.O_RDWR))
    return "/dev/fuse"


def try_fanotify() -> str:
    """Events before a file's content is read."""
    group = _libc.fanotify_init(0x8 | 0x1 | 0x10, os.O_RDWR | 0o100000)
    if group < 0:
        raise OSError(ctypes.get_errno(), "fanotify_init: " + os.strerror(ctypes.get_errno()))
    # /var/tmp is on a disk as a rule: tmpfs has no such events.
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
        mask = ctypes.c_uint64(0x00100000)
        if _libc.fanotify_mark(group, 1, mask, -100, file.name.encode()) != 0:
            raise OSError(ctypes.get_errno(), "fanotify_mark: " + os.strerror(ctypes.get_errno()))
    os.close(group)
    return "pre-content events"


def try_bpf_lsm() -> str:
    """An empty BPF LSM program: what it is attached to does not exist, so EINVAL or ENOENT is the good answer."""
    code = struct.pack("BBhi", 0xB7, 0, 0, 0) + struct.pack("BBhi", 0x95, 0, 0, 0)
    instructions, licence = ctypes.create_string_buffer(code), ctypes.create_string_buffer(b"GPL")
    attributes = bytearray(128)
    # prog_type LSM (29), two instructions, and expected_attach_type BPF_LSM_MAC (27) at offset 68.
    struct.pack_into("IIQQ", attributes, 0, 29, 2, ctypes.addressof(instructions), ctypes.addressof(licence))
    struct.pack_into("I", attributes, 68, 27)
    try:
        os.close(_call(_BPF[platform.machine()], 5, bytes(attributes), len(attributes)))
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            raise
    return "programs are accepted"


def try_kvm() -> str:
    """A virtual machine of one page that executes HLT: the device alone proves nothing where nesting is off."""
    device = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    if fcntl.ioctl(device, 0xAE00) != 12:
        raise OSError(errno.ENODEV, "unknown KVM API")
    machine = fcntl.ioctl(device, 0xAE01, 0)
    if platform.machine() != "x86_64":
        return "a machine can be made; its start was not tried on this architecture"
    memory = mmap.mmap(-1, 0x1000)
    memory[0] = 0xF4
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    fcntl.ioctl(machine, 0x4020AE46, struct.pack("IIQQQ", 0, 0, 0x1000, 0x1000, address))
    cpu = fcntl.ioctl(machine, 0xAE41, 0)
    state = mmap.mmap(cpu, fcntl.ioctl(device, 0xAE04))
    special = bytearray(312)
    fcntl.ioctl(cpu, 0x8138AE83, special)
    struct.pack_into("Q", special, 0, 0)
    struct.pack_into("H", special, 12, 0)
    fcntl.ioctl(cpu, 0x4138AE84, special)
    fcntl.ioctl(cpu, 0x4090AE82, struct.pack("18Q", *[0] * 16, 0x1000, 2))
    fcntl.ioctl(cpu, 0xAE80, 0)
    (reason,) = struct.unpack_from("I", state, 8)
    if reason != 5:
        raise OSError(errno.EIO, f"the test machine stopped with KVM exit reason {reason}, not at HLT")
    return "a test machine ran"


TRIALS: Final[dict[str, Callable[[], str]]] = {
    name.removeprefix("try_"): function for name, function in list(globals().items()) if name.startswith("try_")
}


def main() -> None:
    """Run every trial in a private mount namespace (as far as that is allowed) and print what came of each."""
    signal.alarm(20)
    if _libc.unshare(_CLONE["mnt"]) == 0:
        _libc.mount(None, b"/", None, 0x4000 | 0x40000, None)
    outcome: dict[str, tuple[bool, str]] = {}
    for name, trial in TRIALS.items():
        try:
            outcome[name] = (True, trial())
        except (OSError, KeyError, AttributeError) as error:
            outcome[name] = (False, getattr(error, "strerror", None) or str(error))
    json.dump(outcome, sys.stdout)


if __name__ == "__main__":
    main()
