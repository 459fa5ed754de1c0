"""Behaviour cases of area resources."""

from __future__ import annotations

import asyncio
import os

import pytest
from tests.support import raw_http
from tests.support.daemon import Daemon
from tests.support.fixtures import BoxFactory
from tests.support.timing import Stopwatch, eventually, scaled
from tests.system.cases.kinds import case

import dsec

FORK_BOMB = """
import os,time
n=0
for i in range(2000):
  try: p=os.fork()
  except OSError as e: print('stopped',n,e.errno,flush=True);break
  if p==0: time.sleep(600);os._exit(0)
  n+=1
time.sleep(600)
"""


@case("res-fork-bomb-bounded")
async def test_res_fork_bomb_bounded(kind: str, client: dsec.AsyncClient, box: BoxFactory, daemon: Daemon) -> None:
    sandbox, neighbour = await box(kind, pids=128), await box(kind)
    others = set(daemon.sandbox_pids()) - {*daemon.guest_pids()}
    bomb = asyncio.ensure_future(sandbox.run(["python3", "-c", FORK_BOMB], timeout=20))
    try:
        await eventually(lambda: len(daemon.sandbox_pids()) > 100, within_s=15, what="the bomb is full")
        with Stopwatch() as watch:
            assert (await neighbour.run("echo b")).text == "b\n"
        watch.assert_below(2)
        assert (await client.get(sandbox.id)).state == "running"
        # Another command of the same sandbox fits while the bomb is full.
        assert (await sandbox.run("echo during", timeout=scaled(10))).text == "during\n"
    finally:
        with pytest.raises(dsec.ExecTimeout) as caught:
            await bomb
    word, count, errno = caught.value.result.text.split()
    assert (word, errno) == ("stopped", "11")
    assert int(count) <= 128
    assert (await sandbox.run("echo a")).text == "a\n"
    await sandbox.stop()
    await eventually(
        lambda: set(daemon.sandbox_pids()) - {*daemon.guest_pids()} <= others, within_s=5, what="all processes are gone"
    )


@case("res-oom-has-a-reason", fncall=True)
async def test_res_oom_has_a_reason(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind, memory="256MiB")
    await sandbox.run("echo m > /tmp/m", check=True)
    result = await sandbox.run(["python3", "-c", "b=b'x'*(1<<30);print(len(b))"])
    assert "1073741824" not in result.text
    assert (result.reason, result.exit_code, result.signal) == ("oom", 137, 9)
    assert (await sandbox.run("cat /tmp/m; grep -c . /proc/loadavg")).text == "m\n1\n"


@case("res-oom-vm-or-agent-killed")
async def test_res_oom_vm_or_agent_killed(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind, memory="256MiB")
    command = (
        "echo -1000 > /proc/self/oom_score_adj 2>/dev/null; "
        "exec python3 -c \"a=[]\nwhile True: a.append(b'x'*(8<<20))\""
    )
    try:
        reason = (await sandbox.run(command, timeout=60)).reason
    except dsec.SandboxGone as gone:
        reason = gone.reason
    assert reason == "oom"
    try:
        assert (await sandbox.run("echo alive", timeout=10)).text == "alive\n"
        ended = None
    except dsec.SandboxGone as gone:
        ended = gone.reason
    assert ended in (None, "oom")
    record = (await client.get(sandbox.id)).record
    assert (record.state, record.reason) == (("running", None) if ended is None else ("failed", "oom"))


@case("res-disk-quota-while-running")
async def test_res_disk_quota_while_running(
    kind: str, client: dsec.AsyncClient, box: BoxFactory, daemon: Daemon
) -> None:
    disk = 256 << 20
    for backing in ("local", "tmpfs"):
        sandbox = await box(kind, disk=disk, disk_backing=backing, memory="1GiB")
        result = await sandbox.run("dd if=/dev/urandom of=/data.bin bs=1M count=1024 2>&1", timeout=100)
        assert "No space left on device" in result.text
        used = sum(path.stat().st_blocks * 512 for path in daemon.paths.storage_dir.rglob("*") if path.is_file())
        assert used <= disk * 1.1
        assert (await sandbox.usage()).disk <= disk * 1.1
        assert (await sandbox.run("echo still; ls -l /data.bin | wc -l")).text == "still\n1\n"
        with pytest.raises(dsec.NoSpace):
            await sandbox.files.write("/x", b"y" * (1 << 20))
        assert (await sandbox.run("rm /data.bin; echo z > /tmp/z && cat /tmp/z")).text == "z\n"
        other = await box(kind)
        assert (await other.run("echo ok")).text == "ok\n"
        await sandbox.stop()


@case("res-cpu-count-honest")
async def test_res_cpu_count_honest(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    cpus = 2 if (os.cpu_count() or 1) > 2 else 1
    sandbox = await box(kind, cpus=cpus)
    assert (await sandbox.run("nproc")).text == f"{cpus}\n"
    affinity = await sandbox.run(["python3", "-c", "import os;print(len(os.sched_getaffinity(0)))"])
    assert affinity.text == f"{cpus}\n"
    burn = (
        "import multiprocessing as m,time\n"
        "def f(_):\n"
        "  t=time.process_time()\n"
        "  e=time.time()+3\n"
        "  while time.time()<e: pass\n"
        "  return time.process_time()-t\n"
        "with m.Pool(8) as p: print(sum(p.map(f,range(8),1)))\n"
    )
    used = float((await sandbox.run(["python3", "-c", burn], check=True)).text)
    # Others on the machine may leave less than the limit, never more. A second's rounding as in the case.
    assert 0 < used <= 3 * cpus + 1


@case("res-dev-shm-follows-memory")
async def test_res_dev_shm_follows_memory(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    memory = 1 << 30
    sandbox = await box(kind, memory=memory)
    result = await sandbox.run(
        "df -k /dev/shm | tail -n 1; dd if=/dev/zero of=/dev/shm/x bs=1M count=300 2>&1 | tail -n 1; "
        "stat -c %a /dev/shm; rm /dev/shm/x"
    )
    df, dd, mode = result.text.splitlines()
    assert int(df.split()[1]) > 307200
    assert "314572800" in dd
    assert mode == "1777"
    result = await sandbox.run(
        "dd if=/dev/zero of=/dev/shm/y bs=1M count=4096 2>&1 | tail -n 1; rm -f /dev/shm/y; echo after"
    )
    assert result.reason == "oom" or result.text.endswith("after\n")
    usage = await sandbox.usage()
    assert usage.memory_peak <= memory * 1.1
    assert (await sandbox.run("echo again")).text == "again\n"


@case("res-nofile-sane", fncall=True)
async def test_res_nofile_sane(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    code = (
        "import resource,os,time\n"
        "s,h=resource.getrlimit(resource.RLIMIT_NOFILE);print(1024<=s<=1048576)\n"
        "t=time.time()\n"
        "for i in range(3,s):\n"
        "  try: os.close(i)\n"
        "  except OSError: pass\n"
        "print(time.time()-t<5)\n"
    )
    assert (await sandbox.run(["python3", "-c", code])).text == "True\nTrue\n"


@case("res-rlimits-enforced")
async def test_res_rlimits_enforced(kind: str, client: dsec.AsyncClient, box: BoxFactory, daemon: Daemon) -> None:
    # The SDK takes no rlimits: such a request must be refused, not accepted and ignored.
    answer = await raw_http.request(
        daemon.paths.api_socket,
        "POST",
        "/v1/sandboxes",
        key=daemon.key,
        body=b'{"kind": "container", "rlimits": {"nofile": 64}}',
    )
    assert 400 <= answer.status < 500
    assert answer.json["code"] in ("invalid_request", "unsupported")
    sandbox = await box(kind)
    with pytest.raises(dsec.Unsupported):
        await sandbox.start("ulimit -n", pty=(24, 80))
    # What a shell sets for itself holds, in the foreground and in the background.
    count = (
        "python3 -c \"l=[]\nimport os\ntry:\n  while True: l.append(os.open('/dev/null',0))\n"
        'except OSError as e: print(len(l)<64,e.errno)"'
    )
    files = f"ulimit -n 64; ulimit -n; {count}"
    size = "ulimit -f 1024; (head -c 2097152 /dev/zero > /tmp/big; echo rc=$?); stat -c %s /tmp/big"
    assert (await sandbox.run(files)).text == "64\nTrue 24\n"
    assert (await sandbox.run(size)).text == "rc=153\n1048576\n"
    for command, expected in ((files, b"64\nTrue 24\n"), (size, b"rc=153\n1048576\n")):
        process = await sandbox.start(command)
        received = b"".join([chunk.data async for chunk in process.output() if chunk.stream == "stdout"])
        assert received == expected
        await process.wait(timeout=scaled(5))


@case("res-orphans-are-reaped")
async def test_res_orphans_are_reaped(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    assert (await sandbox.run("for i in $(seq 200); do (sleep 0.05 &) ; done; echo x")).text == "x\n"
    for _ in range(50):
        await sandbox.run("true | false | true")
    for _ in range(10):
        await sandbox.run("sh -c 'sleep 9 & exit'", timeout=1)
    await asyncio.sleep(12)
    result = await sandbox.run("grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l")
    assert result.text == "0\n"
