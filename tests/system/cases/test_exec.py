"""Behaviour cases of area exec."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile

import pytest
from tests.support import procfs
from tests.support.fixtures import BoxFactory
from tests.support.programs import install_programs
from tests.support.timing import Stopwatch, scaled
from tests.system.cases.kinds import case

import dsec

PROBE_18080 = "import urllib.request as u;print(u.urlopen('http://127.0.0.1:18080/',timeout=5).status)"


@case("exec-nohup-child-does-not-block")
async def test_exec_nohup_child_does_not_block(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    await install_programs(sandbox)
    with Stopwatch() as first:
        result = await sandbox.run("nohup sh -c 'sleep 4711 &'", timeout=20)
    assert result.exit_code == 0
    first.assert_below(3)
    with Stopwatch() as second:
        result = await sandbox.run("pcount 'sleep 4711'; echo two")
    assert result.text == "1\ntwo\n"
    second.assert_below(2)


@case("exec-server-ampersand-stays-up")
async def test_exec_server_ampersand_stays_up(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    with Stopwatch() as first:
        result = await sandbox.run("python3 -m http.server 18080 --bind 127.0.0.1 & echo started", timeout=20)
    assert result.exit_code == 0
    assert "started" in result.text
    first.assert_below(3)
    await asyncio.sleep(scaled(2))
    assert (await sandbox.run(["python3", "-c", PROBE_18080])).text == "200\n"
    await asyncio.sleep(10)
    assert (await sandbox.run(["python3", "-c", PROBE_18080])).text == "200\n"


@pytest.mark.timeout(scaled(180))
@case("exec-1000-short-echoes")
async def test_exec_1000_short_echoes(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    for number in range(1, 1001):
        result = await sandbox.run(["echo", str(number)])
        assert (result.stdout, result.exit_code) == (f"{number}\n".encode(), 0)
    for number in range(1, 101):
        process = await sandbox.start(["echo", str(number)])
        received = b""
        async for chunk in process.output():
            received += chunk.data
        # The stream ends with the process: nothing may come after its exit was told.
        assert await process.wait(timeout=scaled(5)) == 0
        assert received == f"{number}\n".encode()


@case("exec-100mib-stdout")
async def test_exec_100mib_stdout(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    command = "head -c 104857600 /dev/zero | tr '\\0' a"
    # It begins once its consumer is attached: what is written before that is kept up to the output limit only.
    process = await sandbox.start(f"echo; read -r _; {command}", stdin=True)
    digest, received, before, peak = hashlib.sha256(), -1, procfs.rss_bytes(os.getpid()), 0
    async for chunk in process.output():
        assert chunk.dropped == 0
        if received < 0:
            await process.write(b"go\n")
        else:
            digest.update(chunk.data)
        received += len(chunk.data)
        peak = max(peak, procfs.rss_bytes(os.getpid()))
    await process.aclose()
    assert received == 104857600
    assert digest.hexdigest() == "cee41e98d0a6ad65cc0ec77a2ba50bf26d64dc9007f7f1c7d7df68b8b71291a6"
    assert await process.wait(timeout=scaled(5)) == 0
    assert peak - before < 64 << 20
    result = await sandbox.run(command)
    assert result.exit_code == 0
    assert result.truncated
    assert result.stdout_total == 104857600
    assert len(result.stdout) <= 10 << 20


@case("exec-cap-counts-bytes", fncall=True)
async def test_exec_cap_counts_bytes(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    result = await sandbox.run(
        ["python3", "-c", "import sys; sys.stdout.buffer.write('\u20ac'.encode()*100000)"], output_limit=100_000
    )
    assert result.exit_code == 0
    assert result.truncated
    assert len(result.stdout) <= 100_000
    assert len(result.text.encode()) <= 100_000
    head, _, rest = result.text.partition("\n[... ")
    marker, _, tail = rest.partition(" ...]\n")
    assert marker.endswith("bytes dropped")
    assert set(head + tail) == {"\u20ac"}
    # Head and tail are both kept, and nearly all of the limit is used.
    assert min(len(head), len(tail)) * 3 > 45_000


@case("exec-invalid-utf8", fncall=True)
async def test_exec_invalid_utf8(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    result = await sandbox.run("printf 'a\\377b\\n'; printf '\\376' >&2; exit 3")
    assert result.exit_code == 3
    assert (result.stdout, result.stderr) == (b"a\xffb\n", b"\xfe")
    assert (result.text, result.stderr_text) == ("a\ufffdb\n", "\ufffd")


@case("exec-exit-124-is-not-timeout", fncall=True)
async def test_exec_exit_124_is_not_timeout(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    result = await sandbox.run("exit 124", timeout=30)
    assert (result.exit_code, result.reason, result.signal) == (124, "exit", None)
    result = await sandbox.run("kill -TERM $$", timeout=30)
    assert (result.exit_code, result.reason, result.signal) == (143, "signal", 15)
    result = await sandbox.run("exit 137", timeout=30)
    assert (result.exit_code, result.reason, result.signal) == (137, "exit", None)


@case("exec-sigpipe-default", fncall=True)
async def test_exec_sigpipe_default(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    for command, expected in (
        ("yes aaaaaaaa | head -n 5", b"aaaaaaaa\n" * 5),
        ("while :; do echo b; done | head -n 2", b"b\n" * 2),
    ):
        with Stopwatch() as watch:
            result = await sandbox.run(command, timeout=20)
        assert (result.stdout, result.stderr, result.exit_code) == (expected, b"", 0)
        watch.assert_below(3)


@case("exec-env-lossless", fncall=True)
async def test_exec_env_lossless(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    value = "  line1\nline2 $HOME 'q' \"d\" \\ `id` end "
    sandbox = await box(kind, env={"V": value})
    command = "python3 -c \"import os;print(ascii(os.environ['V']))\""
    assert (await sandbox.run(command)).text == ascii(value) + "\n"
    assert (await sandbox.run(command, env={"V": value + "2"})).text == ascii(value + "2") + "\n"


@case("exec-shell-broken-is-reported")
async def test_exec_shell_broken_is_reported(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    sandbox = await box(kind)
    # The platform calls bash where there is one.
    breaking = "S=$(readlink -f /bin/bash); cp $S /tmp/sh2; echo $S > /tmp/s; chmod a-x $S"
    assert (await sandbox.run(breaking)).exit_code == 0
    with Stopwatch() as watch, pytest.raises(dsec.CommandNotStarted):
        await sandbox.run("echo hi", timeout=10)
    watch.assert_below(3)
    assert (await sandbox.run(["/tmp/sh2", "-c", "chmod a+x $(cat /tmp/s)"])).exit_code == 0
    assert (await sandbox.run("echo hi")).text == "hi\n"


@case("exec-no-leaked-descriptors", fncall=True)
async def test_exec_no_leaked_descriptors(kind: str, client: dsec.AsyncClient, box: BoxFactory) -> None:
    # A descriptor that this process holds open, and one of an earlier command, must not show either.
    with tempfile.TemporaryFile():
        sandbox = await box(kind)
        await sandbox.start(["sleep", "60"], stdin=True)
        listing = "import os;print(sorted(int(f) for f in os.listdir('/proc/self/fd')))"
        for stdin in (None, b"x"):
            result = await sandbox.run(["python3", "-c", listing], stdin=stdin)
            assert result.text == "[0, 1, 2, 3]\n"
