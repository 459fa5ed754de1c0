"""The command line without a server: help, versions, parsing, errors, logs, finding the daemon."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dsec.api.errors import Conflict, InvalidRequest
from dsec.cli import demo_project, instance, options, output, sandboxes
from dsec.cli.app import app
from dsec.cli.demo import quantile
from dsec.cli.logs import logging_to
from dsec.paths import Paths


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("DSEC_HOME", str(tmp_path))
    for variable in ("DSEC_URL", "DSEC_API_KEY", "DSEC_IMAGES"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def test_help_names_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for name in "up down doctor create run exec cp ps events stop image bench demo".split():
        assert f"\n  {name} " in result.output, name


@pytest.mark.parametrize(
    "command", ["up", "down", "doctor", "create", "run", "exec", "cp", "ps", "events", "stop", "demo"]
)
def test_every_command_offers_json(command: str) -> None:
    assert "--json" in CliRunner().invoke(app, [command, "--help"]).output
    for words in (["image", "ls"], ["image", "rm"], ["image", "bootstrap"], ["bench", "launch"], ["bench", "exec"]):
        assert "--json" in CliRunner().invoke(app, [*words, "--help"]).output


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output.split()[0]) == (0, "dsec")


def test_help_is_quick_because_it_imports_little() -> None:
    code = "import sys, dsec.cli.app; print([m for m in ('rich', 'aiohttp', 'sqlalchemy', 'dsec.sdk') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_daemon_is_one_sentence_with_what_to_do() -> None:
    result = CliRunner().invoke(app, ["ps"])
    assert result.exit_code == 1
    assert "dsec up" in result.stderr
    assert "Traceback" not in result.output
    as_json = CliRunner().invoke(app, ["ps", "--json"])
    assert json.loads(as_json.stdout)["error"]["code"] == "connection_failed"
    assert CliRunner().invoke(app, ["run", "true"]).exit_code == 125
    assert CliRunner().invoke(app, ["exec", "someid", "true"]).exit_code == 125
    assert CliRunner().invoke(app, ["stop"]).exit_code == 2
    assert CliRunner().invoke(app, ["no-such-command"]).exit_code == 2


def test_down_without_a_daemon() -> None:
    assert CliRunner().invoke(app, ["down"]).output == "not running\n"


def test_words_become_commands() -> None:
    assert sandboxes._command(["ls | wc"]) == "ls | wc"
    assert sandboxes._command(["ls", "-l"]) == ["ls", "-l"]
    assert sandboxes._command(["--", "ls"]) == "ls"
    with pytest.raises(InvalidRequest):
        sandboxes._command(["--"])
    assert sandboxes._remote("abc:/x:y") == ("abc", "/x:y")
    assert sandboxes._remote("./a:b") is None
    assert sandboxes._remote("plain") is None
    assert options.pairs(["A=b=c", "D="], what="--env") == {"A": "b=c", "D": ""}
    with pytest.raises(InvalidRequest, match="NAME=VALUE"):
        options.pairs(["x"], what="--env")


def test_figures_for_people() -> None:
    assert [output.size_text(size) for size in (0, 1536, 512 << 20, 3 << 40)] == [
        "0 B",
        "1.5 KiB",
        "512 MiB",
        "3.0 TiB",
    ]
    now = time.time()
    assert [output.age_text(now - age) for age in (5, 600, 7300, 300_000)] == ["5s", "10m", "2h", "3d"]
    assert quantile([1.0, 2.0, 3.0], 0.99) == 3.0
    assert quantile([], 0.5) == 0.0


def test_the_daemon_is_found_by_its_lock(own_home: Path) -> None:
    paths = Paths.discover()
    assert instance.find(paths) is None
    paths.run_dir.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(paths.lock_file, os.O_RDWR | os.O_CREAT)
        assert instance.find(paths) is None
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        found = instance.find(paths)
        assert found is not None
        assert found.pid == os.getpid()
        assert not found.ended(within_s=0)
        found.close()
        instance.refuse_second(paths)  # a sweep's lock: nothing listens
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(paths.api_socket))
            server.listen()
            with pytest.raises(Conflict, match="dsec down"):
                instance.refuse_second(paths)
        os.close(descriptor)
        assert instance.find(paths) is None
    finally:
        paths.api_socket.unlink(missing_ok=True)
        paths.lock_file.unlink(missing_ok=True)
        paths.run_dir.rmdir()


def test_logs_are_json_with_their_fields(tmp_path: Path) -> None:
    with logging_to(tmp_path / "log", to_stderr=False):
        logging.getLogger("dsec.test").warning("hello", extra={"sandbox_id": "abc", "count": 3})
        try:
            raise ValueError("boom")
        except ValueError:
            logging.getLogger("dsec.test").exception("failed")
    first, second = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert (first["level"], first["message"], first["sandbox_id"], first["count"]) == ("warning", "hello", "abc", 3)
    assert "ValueError: boom" in second["traceback"]


def test_the_demo_project_fails_until_it_is_mended(tmp_path: Path) -> None:
    import io
    import tarfile

    with tarfile.open(fileobj=io.BytesIO(demo_project.archive())) as tar:
        tar.extractall(tmp_path, filter="data")
    source, runs = tmp_path / demo_project.SOURCE, 0
    while True:
        runs += 1
        done = subprocess.run(demo_project.TEST_COMMAND, cwd=tmp_path, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            break
        mended = demo_project.mended(source.read_text(), done.stderr)
        assert mended is not None
        source.write_text(mended)
    assert runs == 3
    assert demo_project.mended(source.read_text(), "all is well") is None
