"""Root in the sandbox against the kernel and the host: mounts, namespaces, devices, cgroups, /proc, /sys, forbidden calls."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import pytest
from tests.attack.test_agent import attack
from tests.support.daemon import Daemon
from tests.support.fixtures import BoxFactory, HostName
from tests.support.timing import eventually, scaled

pytestmark = [pytest.mark.system, pytest.mark.attack, pytest.mark.root]


LISTENER = """
import socket, sys, time
s = socket.socket(socket.AF_UNIX); s.bind('\\0' + sys.argv[1]); s.listen()
t = socket.create_server(('0.0.0.0', 18099))
time.sleep(600)
"""


async def test_mounts_and_namespaces_are_refused(box: BoxFactory) -> None:
    sandbox = await box()
    report = await attack(
        sandbox,
        """
os.makedirs('/mnt/x', exist_ok=True)
for kind in (b'tmpfs', b'proc', b'sysfs', b'cgroup2', b'cgroup', b'overlay', b'devpts', b'mqueue', b'ext4', b'bpf', b'debugfs'):
    report['mount ' + kind.decode()] = syscall(165, b'none', b'/mnt/x', kind, 0, b'')
report['bind'] = syscall(165, b'/proc', b'/mnt/x', b'', 4096, 0)
report['remount'] = syscall(165, b'none', b'/', b'', 32, 0)
report['remount proc'] = syscall(165, b'none', b'/proc/sys', b'', 32 | 4096, 0)
report['propagation'] = syscall(165, b'none', b'/', b'', 1 << 20, 0)
report['umount'] = syscall(166, b'/proc', 2)
report['umount masked'] = syscall(166, b'/proc/kcore', 2)
report['pivot_root'] = syscall(155, b'/mnt', b'/mnt/x')
report['open_tree'] = syscall(428, -100, b'/', 1)
report['fsopen'] = syscall(430, b'tmpfs', 0)
report['move_mount'] = syscall(429, -100, b'/mnt', -100, b'/mnt/x', 0)
report['mount_setattr'] = syscall(442, -100, b'/', 0, ctypes.create_string_buffer(32), 32)
for name, flag in (('user', 0x10000000), ('mnt', 0x20000), ('net', 0x40000000), ('pid', 0x20000000), ('ipc', 0x8000000), ('uts', 0x4000000), ('cgroup', 0x2000000), ('time', 0x80)):
    report['unshare ' + name] = syscall(272, flag)
    if name != 'time': report['clone ' + name] = syscall(56, flag | 17, 0, 0, 0, 0)
    if report.get('clone ' + name) == 0: os._exit(0)
report['clone3'] = syscall(435, ctypes.create_string_buffer(88), 88)
for name in ('mnt', 'pid', 'net', 'ipc', 'uts', 'cgroup'):
    fd = os.open('/proc/self/ns/' + name, os.O_RDONLY)
    report['setns ' + name] = syscall(308, fd, 0)
""",
    )
    succeeded = {name: value for name, value in report.items() if not (isinstance(value, int) and value < 0)}
    assert succeeded == {}


async def test_forbidden_calls_are_refused(box: BoxFactory) -> None:
    sandbox = await box()
    report = await attack(
        sandbox,
        """
big = ctypes.create_string_buffer(4096)
for name, number, args in (
    ('keyctl', 250, (0, -3, 1)), ('add_key', 248, (b'user', b'a', b'b', 1, -4)), ('request_key', 249, (b'user', b'a', 0, 0)),
    ('bpf', 321, (0, big, 128)), ('perf_event_open', 298, (big, 0, -1, -1, 0)), ('userfaultfd', 323, (0,)),
    ('init_module', 175, (big, 10, b'')), ('finit_module', 313, (0, b'', 0)), ('delete_module', 176, (b'x', 0)),
    ('kexec_load', 246, (0, 0, 0, 0)), ('kexec_file_load', 320, (0, 0, 0, 0, 0)), ('reboot', 169, (0xfee1dead, 672274793, 0x89abcdef, 0)),
    ('swapon', 167, (b'/x', 0)), ('swapoff', 168, (b'/x',)), ('acct', 163, (b'/x',)), ('quotactl', 179, (0, b'/x', 0, 0)),
    ('iopl', 172, (3,)), ('ioperm', 173, (0, 1, 1)), ('syslog', 103, (3, big, 100)), ('sethostname', 170, (b'x', 1)), ('setdomainname', 171, (b'x', 1)),
    ('settimeofday', 164, (big, 0)), ('clock_settime', 227, (0, big)), ('adjtimex', 159, (ctypes.create_string_buffer(struct.pack('I', 2) + bytes(300)),)),
    ('open_by_handle_at', 304, (-100, big, 0)), ('lookup_dcookie', 212, (0, big, 10)), ('fanotify_init', 300, (4, 0)),
    ('io_uring_setup', 425, (4, big)), ('vhangup', 153, ()), ('nfsservctl', 180, (0,)),
    ('personality', 135, (0x0040000,)), ('setns', 308, (-1, 0)),
):
    report[name] = syscall(number, *args)
""",
    )
    # These exist on a host as root, so that a refusal here says something.
    succeeded = {name: value for name, value in report.items() if not (isinstance(value, int) and value < 0)}
    assert succeeded == {}
    assert {report[name] for name in ("keyctl", "add_key", "bpf", "perf_event_open", "io_uring_setup")} <= {-1, -38}


async def test_devices_cannot_be_made_or_opened(box: BoxFactory) -> None:
    sandbox = await box()
    report = await attack(
        sandbox,
        """
for name, major, minor, kind in (('mem', 1, 1, 'c'), ('kmsg', 1, 11, 'c'), ('sda', 8, 0, 'b'), ('vda', 254, 0, 'b'), ('loop0', 7, 0, 'b'), ('fuse', 10, 229, 'c'), ('kvm', 10, 232, 'c'), ('tun', 10, 200, 'c'), ('null', 1, 3, 'c')):
    mode = 0o600 | (0o020000 if kind == 'c' else 0o060000)
    for folder in ('/tmp', '/dev', '/dev/shm'):
        path = folder + '/made-' + name
        report['mknod ' + path] = attempt(os.mknod, path, mode, os.makedev(major, minor))
        report['open ' + path] = attempt(os.open, path, os.O_RDWR)
devices = []
for folder, _, names in os.walk('/dev'):
    for name in names:
        path = folder + '/' + name
        try: info = os.lstat(path)
        except OSError: continue
        if info.st_mode & 0o170000 in (0o020000, 0o060000): devices.append(path)
report['devices'] = ' '.join(sorted(devices))
""",
    )
    devices = set(str(report.pop("devices")).split())
    allowed = {
        f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "console", "pts/ptmx")
    }
    assert {"/dev/null", "/dev/zero", "/dev/urandom"} <= devices <= allowed
    assert {name: value for name, value in report.items() if not (isinstance(value, int) and value < 0)} == {}


async def test_proc_and_sys_tell_nothing_and_take_nothing(box: BoxFactory) -> None:
    sandbox = await box()
    report = await attack(
        sandbox,
        """
def size(path):
    if not os.path.exists(path): return -2
    if os.path.isdir(path): return len(os.listdir(path))
    with open(path, 'rb') as file: return len(file.read(4096))
for path in ('/proc/kcore', '/proc/kmsg', '/proc/keys', '/proc/latency_stats', '/proc/timer_list', '/proc/sched_debug', '/proc/scsi', '/proc/acpi', '/proc/asound', '/sys/firmware', '/sys/kernel/debug', '/sys/kernel/security', '/sys/fs/cgroup', '/sys/fs/bpf', '/proc/vmallocinfo', '/proc/kpagecount', '/proc/kallsyms_not'):
    report['read ' + path] = attempt(size, path)
def write(path, value):
    fd = os.open(path, os.O_WRONLY)
    return os.write(fd, value)
for path, value in (
    ('/proc/sysrq-trigger', b'h'), ('/proc/sys/kernel/core_pattern', b'|/tmp/x'), ('/proc/sys/kernel/modprobe', b'/tmp/x'), ('/proc/sys/vm/panic_on_oom', b'0'),
    ('/proc/sys/vm/drop_caches', b'1'), ('/proc/sys/kernel/panic', b'0'), ('/proc/sys/fs/file-max', b'9'), ('/proc/sys/kernel/pid_max', b'99999'),
    ('/proc/sys/kernel/hostname', b'x'), ('/proc/sys/kernel/domainname', b'x'), ('/proc/sys/net/ipv4/ip_forward', b'1'), ('/proc/sys/net/ipv4/ip_unprivileged_port_start', b'1'), ('/proc/sys/fs/binfmt_misc/register', b':x:M::x::/x:'),
    ('/proc/irq/default_smp_affinity', b'1'), ('/proc/bus/x', b'1'), ('/proc/fs/x', b'1'), ('/proc/mtrr', b'x'),
    ('/sys/power/state', b'mem'), ('/sys/kernel/uevent_helper', b'/x'), ('/sys/kernel/mm/transparent_hugepage/enabled', b'never'), ('/sys/module/x', b'1'), ('/sys/class/net/lo/mtu', b'1000'),
):
    report['write ' + path] = attempt(write, path, value)
report['interrupts'] = attempt(lambda: len(open('/proc/interrupts').read()) * 0)
""",
    )
    report.pop("interrupts")
    readable = {name: value for name, value in report.items() if not (isinstance(value, int) and value <= 0)}
    assert readable == {}


async def test_cgroups_are_out_of_reach(box: BoxFactory, daemon: Daemon) -> None:
    sandbox = await box(pids=64, memory="64MiB", disk_backing="local")
    report = await attack(
        sandbox,
        """
report['paths'] = sorted({line.rsplit(':', 1)[1] for line in open('/proc/self/cgroup').read().splitlines()})
report['mounted'] = [line for line in open('/proc/self/mountinfo') if ' cgroup' in line]
report['release_agent'] = glob.glob('/sys/fs/cgroup/**/release_agent', recursive=True) + glob.glob('/sys/fs/cgroup/**/cgroup.procs', recursive=True)
fork_failed = 0
children = []
for _ in range(200):
    try: child = os.fork()
    except OSError as error: fork_failed = error.errno; break
    if child == 0:
        time.sleep(30); os._exit(0)
    children.append(child)
for child in children: os.kill(child, 9)
report['forked'] = len(children); report['fork_failed'] = fork_failed
""",
    )
    assert report["mounted"] == []
    assert report["release_agent"] == []
    # The agent stays outside the v1 pids leaf, so that its path shows whole; no other path tells more than "mine".
    assert [path for path in report["paths"] if daemon.instance in path and not path.endswith("/run-0")] == []
    assert report["fork_failed"] == 11
    assert report["forked"] <= 64


async def test_the_classic_chroot_escape_stays_in_the_root(box: BoxFactory, host_name: HostName) -> None:
    secret = host_name("hostonly")
    secret.write_text("HOSTSECRET")
    sandbox = await box()
    await sandbox.files.write("/inside", b"inside")
    report = await attack(
        sandbox,
        """
root = os.open('/', os.O_RDONLY)
os.makedirs('/jail', exist_ok=True)
report['chroot'] = attempt(os.chroot, '/jail')
os.fchdir(root)
for _ in range(100): os.chdir('..')
report['again'] = attempt(os.chroot, '.')
report['names'] = ' '.join(sorted(os.listdir('/')))
report['inside'] = attempt(lambda: open('/inside').read())
report['secret'] = attempt(lambda: open(sys.argv[1]).read())
""",
        str(secret),
    )
    assert report["secret"] == -2
    assert report["inside"] == "inside"
    assert "jail" in str(report["names"]).split()


async def test_limits_cannot_be_loosened(box: BoxFactory) -> None:
    sandbox = await box(cpus=0.5, memory="128MiB")
    report = await attack(
        sandbox,
        """
def score(value):
    with open('/proc/self/oom_score_adj', 'w') as file: file.write(value)
report['score'] = int(open('/proc/self/oom_score_adj').read())
report['below the agent'] = attempt(score, '-1')
report['lowest'] = attempt(score, '-1000')
for name in ('NOFILE', 'NPROC', 'CORE', 'MEMLOCK', 'RTPRIO', 'NICE', 'MSGQUEUE', 'SIGPENDING'):
    kind = getattr(resource, 'RLIMIT_' + name)
    soft, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY: report['raise ' + name] = attempt(resource.setrlimit, kind, (hard + 1, hard + 1))
report['nice'] = attempt(os.nice, -5)
report['realtime'] = attempt(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))
report['mlockall'] = syscall(151, 3) * 0
try: os.sched_setaffinity(0, range(256))
except OSError: pass
end, start = time.time() + 3, time.process_time()
child = os.fork()
while time.time() < end: pass
if child == 0: os._exit(0)
os.wait()
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
report['burnt'] = str(time.process_time() - start + usage.ru_utime + usage.ru_stime)
""",
    )
    assert float(str(report.pop("burnt"))) <= 3 * 0.5 * 1.3
    assert report.pop("mlockall") == 0
    assert report.pop("score") >= 0
    assert {
        name: value for name, value in report.items() if value is None or (isinstance(value, int) and value >= 0)
    } == {}


async def test_the_hosts_loopback_and_addresses_are_out_of_reach(box: BoxFactory, daemon: Daemon) -> None:
    reached = asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.set()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    abstract = f"\0dsec-test-{secrets.token_hex(6)}"
    unix = await asyncio.start_unix_server(connected, abstract)
    port = server.sockets[0].getsockname()[1]
    sandbox = await box()
    report = await attack(
        sandbox,
        """
port = int(sys.argv[1])
for address in ('127.0.0.1', '127.0.0.53', '169.254.169.254', '10.0.2.2', '172.17.0.1', '0.0.0.0', '192.168.1.1'):
    s = socket.socket(); s.settimeout(1)
    report[address] = attempt(s.connect, (address, port))
for address in ('::1', 'fe80::1'):
    s = socket.socket(socket.AF_INET6); s.settimeout(1)
    report[address] = attempt(s.connect, (address, port))
report['abstract'] = attempt(socket.socket(socket.AF_UNIX).connect, '\\0' + sys.argv[2])
report['raw'] = attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).fileno() * 0)
report['interfaces'] = ' '.join(name for _, name in socket.if_nameindex())
""",
        str(port),
        abstract[1:],
    )
    server.close()
    unix.close()
    await asyncio.gather(server.wait_closed(), unix.wait_closed())
    assert not reached.is_set()
    assert report.pop("interfaces") == "lo"
    report.pop("raw")  # a packet socket on its own empty loopback harms nobody
    assert all(isinstance(value, int) and value < 0 for value in report.values() if not isinstance(value, str)), report
    assert report["abstract"] in (-111, -2)


async def test_another_sandbox_is_out_of_reach(box: BoxFactory) -> None:
    mine, theirs = await box(), await box()
    mark = f"mark{secrets.token_hex(8)}"
    await theirs.files.write(f"/tmp/{mark}", b"THEIRS")
    await theirs.start(["python3", "-c", LISTENER, mark])
    report = await attack(
        mine,
        """
mark = sys.argv[1]
report['socket'] = attempt(socket.socket(socket.AF_UNIX).connect, '\\0' + mark)
report['port'] = attempt(socket.create_connection, ('127.0.0.1', 18099), 1)
hits = []
for path in glob.glob('/proc/[0-9]*'):
    try:
        if mark.encode() in open(path + '/cmdline', 'rb').read() and path != '/proc/%d' % os.getpid(): hits.append(path)
        if os.path.exists(path + '/root/tmp/' + mark): hits.append(path + '/root')
    except OSError: pass
for top in ('/', '/proc/self/root', '/proc/1/root', '/proc/self/cwd/../../..', '/tmp', '/dev/shm'):
    if os.path.exists(top + '/tmp/' + mark) or os.path.exists(top + '/' + mark): hits.append(top)
for line in open('/proc/self/mountinfo'):
    if mark in line: hits.append(line)
report['hits'] = hits
report['highest'] = max(int(p.split('/')[2]) for p in glob.glob('/proc/[0-9]*'))
""",
        mark,
    )
    assert report["socket"] == -111
    assert isinstance(report["port"], int)
    assert report["port"] < 0
    assert report["hits"] == []
    assert report["highest"] < 1000, "pids are the sandbox's own"


async def test_the_mount_table_shows_no_host_path(box: BoxFactory, daemon: Daemon) -> None:
    sandbox = await box()
    lines = (await sandbox.run("cat /proc/self/mountinfo /proc/self/mounts")).text.splitlines()
    # /sys is a small read-only folder of the instance's; that it is one shows, nothing above it does.
    table = "\n".join(line for line in lines if line.split()[4:5] != ["/sys"])
    for word in (str(daemon.home), daemon.instance, "/run/dsec", ".dsec", str(Path.cwd())):
        assert word not in table, f"{word} shows in:\n{table}"
    environment = (await sandbox.run("env; cat /proc/1/cmdline 2>/dev/null | tr '\\0' ' '")).text
    assert daemon.key not in environment
    assert str(daemon.home) not in environment


async def test_files_and_processes_are_the_sandboxs_own_on_the_host_too(box: BoxFactory, daemon: Daemon) -> None:
    """No process of a sandbox runs as host root, and two sandboxes share no uid."""
    one, two = await box(), await box()
    known = set(daemon.sandbox_pids())
    await one.start("sleep 600")
    await two.start("sleep 600")
    await eventually(lambda: len(set(daemon.sandbox_pids()) - known) >= 2, within_s=5, what="both run")
    uids = [Path(f"/proc/{pid}").stat().st_uid for pid in set(daemon.sandbox_pids()) - known]
    agents = [Path(f"/proc/{pid}").stat().st_uid for pid in daemon.guest_pids()]
    assert len(set(uids)) == len(uids)
    assert all(uid >= 65_536 for uid in uids + agents)
    assert len(set(agents)) == len(agents)
    assert not set(agents) & set(uids)


@pytest.mark.timeout(scaled(120))
async def test_huge_and_sparse_files_and_deep_trees_hurt_nobody(box: BoxFactory) -> None:
    sandbox, neighbour = await box(), await box()
    await sandbox.run("truncate -s 1T /sparse; mkdir /deep; cd /deep; for i in $(seq 800); do mkdir d; cd d; done")
    assert len(await sandbox.files.list("/deep", depth=64)) == 64
    assert (await sandbox.files.stat("/sparse")).size == 1 << 40
    assert await sandbox.files.read("/sparse", offset=(1 << 40) - 10) == b"\0" * 10
    await sandbox.files.remove("/deep", recursive=True)
    assert not await sandbox.files.exists("/deep")
    assert (await neighbour.run("echo fine")).text == "fine\n"
