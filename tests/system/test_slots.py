"""Slots are reused, and show nothing of the previous tenant."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.daemon import Daemon
from tests.support.timing import scaled

import dsec

# One worker runs them all: a host has room for 14 instances, and each test has one or two of its own.
pytestmark = [
    pytest.mark.system,
    pytest.mark.root,
    pytest.mark.timeout(scaled(180)),
    pytest.mark.xdist_group("instances"),
]

LITTER = r"""
import ctypes, os, resource, socket, subprocess, threading
for folder in ('/tmp', '/dev/shm', '/var/tmp', '/root', '/run', '/etc', '/var/lock'):
    try: open(folder + '/litter4807', 'w').write('litter')
    except OSError: pass
server = socket.create_server(('127.0.0.1', 7777))
for _ in range(50):
    client = socket.create_connection(('127.0.0.1', 7777))
    peer, _address = server.accept()
    client.send(b'x'); peer.recv(1); client.close(); peer.close()   # the client's side is left in TIME_WAIT
abstract = socket.socket(socket.AF_UNIX); abstract.bind('\0litter4807'); abstract.listen()
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall(248, b'user', b'litter4807', b'secret', 6, -4)   # add_key to the user keyring
libc.syscall(248, b'user', b'litter4807', b'secret', 6, -5)   # and to the user session keyring
identity = libc.shmget(4807, 65536, 0o1666)
libc.semget(4807, 1, 0o1666); libc.msgget(4807, 0o1666)
name = b'/litter4807'
try: libc.mq_open(name, os.O_CREAT | os.O_RDWR, 0o666, None)
except AttributeError: pass
for path, value in (('/proc/sys/net/ipv4/ip_local_port_range', '10000 11000'), ('/proc/sys/net/ipv4/tcp_fin_timeout', '7'),
                    ('/proc/sys/net/ipv4/ip_unprivileged_port_start', '5'), ('/proc/sys/net/core/somaxconn', '7'),
                    ('/proc/sys/kernel/hostname', 'litter4807'), ('/proc/sys/kernel/shmmax', '4807'),
                    ('/proc/sys/fs/mqueue/queues_max', '7'), ('/proc/sys/kernel/msgmax', '4807')):
    try: open(path, 'w').write(value)
    except OSError: pass
subprocess.run('ip addr add 127.0.0.77/32 dev lo; ip link add d0 type dummy; ip route add blackhole 10.9.0.0/16; '
               'iptables -A INPUT -j DROP; nft add table inet litter; hostname litter4807', shell=True, stderr=subprocess.DEVNULL)
resource.setrlimit(resource.RLIMIT_NOFILE, (77, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
subprocess.Popen(['sleep', '4807'], start_new_session=True)
bytearray(30 << 20)
print('littered')
"""

LOOK = r"""
import glob, json, os
def read(path):
    try: return open(path).read()
    except OSError as error: return 'errno %d' % error.errno
seen = {}
seen['files'] = sorted(p for f in ('/tmp','/dev/shm','/var/tmp','/root','/run','/etc','/var/lock') for p in glob.glob(f + '/*litter4807*'))
for name in ('tcp','tcp6','udp','udp6','route','fib_trie','if_inet6','arp','packet','raw','snmp','netstat','dev','igmp','dev_snmp6/lo'):
    seen[name] = read('/proc/net/' + name).splitlines()
seen['unix'] = sorted(' '.join(l.split()[7:]) for l in read('/proc/net/unix').splitlines())
seen['netlink'] = sorted(' '.join(l.split()[1:4]) for l in read('/proc/net/netlink').splitlines())
# The other numbers of sockstat are the host's, not the namespace's.
for line in read('/proc/net/sockstat').splitlines():
    words = line.split()
    for word in ('used', 'inuse', 'tw'):
        if word in words: seen['sockstat ' + words[0] + word] = words[words.index(word) + 1]
for name in ('/proc/sysvipc/shm','/proc/sysvipc/sem','/proc/sysvipc/msg','/proc/key-users','/proc/keys','/proc/sys/net/ipv4/ip_local_port_range',
             '/proc/sys/net/ipv4/tcp_fin_timeout','/proc/sys/net/ipv4/ip_unprivileged_port_start','/proc/sys/net/core/somaxconn','/proc/sys/kernel/shmmax',
             '/proc/sys/kernel/msgmax','/proc/sys/fs/mqueue/queues_max','/proc/self/limits'):
    seen[name] = read(name)
seen['hostname'] = len(os.uname().nodename)
seen['sleepers'] = [p for p in glob.glob('/proc/[0-9]*/comm') if 'sleep' in read(p)]
seen['processes'] = len(glob.glob('/proc/[0-9]*'))
seen['mqueue'] = glob.glob('/dev/mqueue/*')
seen['free'] = os.statvfs('/').f_bfree * os.statvfs('/').f_frsize
print(json.dumps(seen))
"""


async def picture(sandbox: dsec.AsyncSandbox) -> dict[str, Any]:
    """What a tenant sees, by name of the place."""
    found: dict[str, Any] = json.loads((await sandbox.run(["python3", "-c", LOOK], check=True)).text)
    return found


@pytest.mark.parametrize("backing", ["tmpfs", "local"])
async def test_a_reused_slot_shows_nothing_of_the_previous_tenant(
    fresh_daemon: Callable[..., Daemon], backing: str
) -> None:
    daemon = fresh_daemon()
    options: dict[str, Any] = {"disk_backing": backing, "memory": "256MiB", "disk": "64MiB"}
    async with daemon.client() as client:
        async with await client.create("container", **options) as first:
            clean = await picture(first)
            clean_usage = await first.usage()
        # Enough rounds that slots of the pool come round again (it holds at most 64).
        for _ in range(24):
            boxes = [item async for item in client.create_many(8, "container", **options)]
            for sandbox in boxes:
                assert isinstance(sandbox, dsec.AsyncSandbox)
                seen = await picture(sandbox)
                assert {
                    name: (clean.get(name), value) for name, value in seen.items() if clean.get(name) != value
                } == {}
            victim = boxes[0]
            assert isinstance(victim, dsec.AsyncSandbox)
            usage = await victim.usage()
            assert usage.memory_peak <= clean_usage.memory_peak * 2 + (32 << 20)
            assert usage.oom_kills == 0
            assert usage.cpu_s < clean_usage.cpu_s + 1
            littered = await victim.run(["python3", "-c", LITTER])
            assert "littered" in littered.text, littered.stderr_text
            await client.stop_many([item for item in boxes if isinstance(item, dsec.AsyncSandbox)])


async def test_descriptors_of_the_launcher_do_not_grow_round_by_round(fresh_daemon: Callable[..., Daemon]) -> None:
    from tests.support import procfs

    daemon = fresh_daemon()
    counts: list[tuple[int, int]] = []
    async with daemon.client() as client:
        for _ in range(6):
            boxes = [item async for item in client.create_many(70, "container", memory="64MiB", disk="64MiB")]
            await client.stop_many([item for item in boxes if isinstance(item, dsec.AsyncSandbox)])
            launcher = daemon.launcher_pid
            assert launcher is not None
            counts.append((len(procfs.descriptors(launcher)), len(procfs.descriptors(daemon.edge_pid))))
    # The first rounds fill the pool; from then on the numbers stand.
    assert max(counts[3:])[0] <= max(counts[:3])[0] + 8, counts
    assert max(edge for _, edge in counts[3:]) <= max(edge for _, edge in counts[:3]) + 4, counts
