"""What is read of the host's apt."""

import re
from pathlib import Path

import pytest

from dsec.api.errors import ImageError, InvalidRequest
from dsec.images import bootstrap_debian
from dsec.images.apt import host_release, host_setup


def test_this_hosts_own_release_has_sources_and_keys() -> None:
    setup = host_setup(host_release().codename)
    assert any(re.fullmatch(r"deb \S+ \S+ main.*", source) for source in setup.sources)
    assert setup.keyrings
    assert all(option.endswith(";") for option in setup.options)


def test_a_release_that_apt_does_not_know_is_told() -> None:
    with pytest.raises(ImageError, match="apt-get update"):
        host_setup("no-such-release")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('ID=debian\nVERSION_CODENAME=trixie\nVERSION_ID="13"\n', ("trixie", "13")),
        ("ID=debian\nVERSION_CODENAME=forky\n", ("forky", "forky")),
    ],
)
def test_the_release_is_read(tmp_path: Path, text: str, expected: tuple[str, str]) -> None:
    (tmp_path / "os-release").write_text(text)
    release = host_release(tmp_path / "os-release")
    assert (release.codename, release.version) == expected


@pytest.mark.parametrize("text", ["ID=fedora\nPRETTY_NAME=Fedora\n", ""])
def test_another_system_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "os-release").write_text(text)
    with pytest.raises(ImageError, match="made on Debian"):
        host_release(tmp_path / "os-release")


@pytest.mark.parametrize("package", ["a b", "--option", "x,y", "", "../x"])
def test_what_is_no_package_is_refused(tmp_path: Path, package: str) -> None:
    with pytest.raises(InvalidRequest):
        bootstrap_debian(tmp_path, include=[package])
