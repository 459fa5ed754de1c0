"""Where an instance keeps its files."""

import re
from pathlib import Path

import pytest

from dsec.paths import Paths

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DSEC_HOME", "DSEC_IMAGES", "DSEC_BIN"):
        monkeypatch.delenv(name, raising=False)


def test_a_checkout_keeps_its_state_in_itself() -> None:
    assert Paths.discover().home == CHECKOUT / ".dsec"


def test_the_environment_names_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSEC_HOME", str(tmp_path / "link"))
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    paths = Paths.discover()
    assert paths.home == tmp_path / "real"
    assert paths == Paths.discover(tmp_path / "real")


def test_homes_never_share_an_instance(tmp_path: Path) -> None:
    first, second = Paths.discover(tmp_path / "a"), Paths.discover(tmp_path / "b")
    assert first.instance != second.instance
    assert re.fullmatch(r"[a-z2-7]{8}", first.instance)
    assert first.instance == Paths.discover(tmp_path / "a").instance
    assert first.run_dir != second.run_dir


def test_sockets_fit_the_limit_however_long_the_home_is() -> None:
    paths = Paths.discover(Path("/" + "/".join(["deep"] * 100)))
    assert max(len(str(path)) for path in (paths.api_socket, paths.launch_socket)) < 108


def test_a_private_home_may_use_another_homes_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSEC_IMAGES", "/elsewhere/images")
    monkeypatch.setenv("DSEC_BIN", "/elsewhere/bin")
    paths = Paths.discover(tmp_path)
    assert paths.images_dir == Path("/elsewhere/images")
    assert paths.seccomp_blob == Path("/elsewhere/bin/seccomp.bpf")
    assert paths.state_dir == tmp_path / "state"


def test_discovering_makes_nothing(tmp_path: Path) -> None:
    Paths.discover(tmp_path / "home")
    assert not list(tmp_path.iterdir())
