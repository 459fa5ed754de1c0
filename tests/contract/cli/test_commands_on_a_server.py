"""The command line as a user has it: a process each, over the real daemon."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from tests.support.daemon import COMMAND, STORE, Daemon
from tests.support.timing import scaled

pytestmark = [pytest.mark.system, pytest.mark.root]


class Dsec(Protocol):
    def __call__(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]: ...


def runner(env: dict[str, str]) -> Dsec:
    def run(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(COMMAND), *words],
            env=env,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=scaled(60),
            check=False,
        )

    return run


@pytest.fixture
def dsec(daemon: Daemon) -> Dsec:
    return runner(daemon.client_env)


@pytest.fixture
def box(dsec: Dsec) -> Iterator[str]:
    made = dsec("create", "-l", "cli=test", "--memory", "256MiB", "--disk", "64MiB", "--disk-backing", "tmpfs")
    assert made.returncode == 0, made.stderr
    yield made.stdout.strip()
    assert dsec("stop", "-l", "cli=test").returncode == 0


def test_run_ends_with_the_commands_code_and_streams(dsec: Dsec) -> None:
    done = dsec("run", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")
    assert dsec("run", "kill -TERM $$").returncode == 143
    assert dsec("run", "-I", "cat", stdin="from stdin").stdout == "from stdin"


def test_a_timeout_is_told_apart(dsec: Dsec, box: str) -> None:
    done = dsec("exec", "-t", "0.5", box, "sleep 30")
    assert done.returncode == 125
    assert "killed after 0.5 s" in done.stderr
    assert dsec("exec", box, "exit 124").returncode == 124
    as_json = dsec("exec", "--json", "-t", "0.5", box, "echo a; sleep 30")
    assert (as_json.returncode, json.loads(as_json.stdout)["reason"]) == (125, "timeout")


def test_exec_json_is_the_result(dsec: Dsec, box: str) -> None:
    result = json.loads(dsec("exec", "--json", box, "--", "python3", "-c", "print(6*7)").stdout)
    assert (result["stdout"], result["exit_code"], result["reason"]) == ("42\n", 0, "exit")
    missing = dsec("exec", "--json", box, "--", "no-such", "argument")
    assert missing.returncode == 125
    assert json.loads(missing.stdout)["error"]["code"] == "command_not_started"
    assert "no-such" in missing.stderr


def test_files_are_copied_both_ways(dsec: Dsec, box: str, tmp_path: Path) -> None:
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "sub" / "file").write_text("content")
    assert dsec("cp", str(tmp_path / "tree"), f"{box}:/w/").returncode == 0
    assert dsec("exec", box, "cat /w/tree/sub/file").stdout == "content"
    assert dsec("cp", f"{box}:/w/tree/sub/file", str(tmp_path)).returncode == 0
    assert (tmp_path / "file").read_text() == "content"
    onto = dsec("cp", str(tmp_path / "file"), f"{box}:/w")
    assert (onto.returncode, f"{box}:/w/" in onto.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("cp", "a", "b"), "SANDBOX:PATH"),
        (("stop",), "--all"),
        (("create", "-n", "0"), "--count"),
        (("run", "-e", "X", "true"), "NAME=VALUE"),
    ],
)
def test_a_wrong_use_ends_with_2(dsec: Dsec, words: tuple[str, ...], told: str) -> None:
    done = dsec(*words)
    assert (done.returncode, told in done.stderr) == (2, True)


def test_listing_events_and_stopping(dsec: Dsec, box: str) -> None:
    listed = json.loads(dsec("ps", "--json", "-l", "cli=test").stdout)
    assert [record["id"] for record in listed] == [box]
    assert box in dsec("ps").stdout
    events = [json.loads(line) for line in dsec("events", "--json", "--sandbox", box).stdout.splitlines()]
    assert "sandbox.running" in [event["type"] for event in events]
    assert dsec("stop", box).stdout.strip() == box
    assert dsec("stop", "nosuch").returncode == 1
    gone = dsec("exec", box, "true")
    assert gone.returncode == 125
    assert "Traceback" not in gone.stderr


def test_a_batch_prints_an_id_each(dsec: Dsec) -> None:
    made = dsec("create", "-n", "5", "-l", "cli=batch", "--disk-backing", "tmpfs", "--disk", "16MiB").stdout.split()
    assert len(set(made)) == 5
    stopped = json.loads(dsec("stop", "--json", "-l", "cli=batch").stdout)
    assert {item["id"] for item in stopped} == set(made)


def test_the_daemons_life(tmp_path: Path, daemon: Daemon) -> None:
    """`daemon` is only there for its skip: this one has a home of its own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("DSEC_")}
    env |= {"DSEC_HOME": str(tmp_path / "home"), "DSEC_IMAGES": str(STORE.images_dir), "DSEC_BIN": str(STORE.bin_dir)}
    dsec = runner(env)
    try:
        up = dsec("up", "--detach", "--port", "0", "--json")
        assert up.returncode == 0, up.stderr
        told = json.loads(up.stdout)
        assert Path(told["key_file"]).stat().st_mode & 0o777 == 0o600
        assert Path(told["socket"]).stat().st_mode & 0o777 == 0o600
        second = dsec("up", "--detach", "--port", "0")
        assert (second.returncode, "already serves" in second.stderr) == (1, True)
        box = dsec("create").stdout.strip()
        dsec("exec", box, "echo kept > /f")
        assert dsec("down", "--keep").returncode == 0
        assert dsec("ps").returncode == 1
        assert dsec("up", "--detach", "--port", "0").returncode == 0
        assert dsec("exec", box, "cat /f").stdout == "kept\n"
        again = json.loads(dsec("up", "--json").stdout)
        assert again["error"]["code"] == "conflict"
        pid = int(second.stderr.split("pid ")[1].split(")")[0])
        assert pid == told["pid"]
    finally:
        assert dsec("down").returncode == 0
    assert not Path(told["socket"]).parent.exists()
    assert dsec("down").stdout == "not running\n"


def test_ctrl_c_in_the_foreground_ends_everything(tmp_path: Path, daemon: Daemon) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("DSEC_")}
    env |= {"DSEC_HOME": str(tmp_path / "home"), "DSEC_IMAGES": str(STORE.images_dir), "DSEC_BIN": str(STORE.bin_dir)}
    process = subprocess.Popen(
        [str(COMMAND), "up", "--port", "0", "--json"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    told = json.loads(process.stdout.readline())
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=scaled(30))
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert time.monotonic() - began < scaled(15)
    assert not Path(told["socket"]).parent.exists()


def test_a_damaged_database_is_one_sentence(tmp_path: Path) -> None:
    database = tmp_path / "home" / "state" / "dsec.db"
    database.parent.mkdir(parents=True)
    database.write_bytes(b"not a database\n" * 100)
    env = {name: value for name, value in os.environ.items() if not name.startswith("DSEC_")}
    env |= {"DSEC_HOME": str(tmp_path / "home"), "DSEC_IMAGES": str(STORE.images_dir), "DSEC_BIN": str(STORE.bin_dir)}
    up = runner(env)("up", "--detach", "--port", "0")
    assert (up.returncode, up.stderr.count("\n")) == (1, 1)
    assert "restore" in up.stderr
    assert "Traceback" not in up.stderr
