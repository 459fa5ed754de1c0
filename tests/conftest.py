"""Options of the whole test suite (`--forbid-skips`, `--repeat`) and the fixtures that all folders share."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from tests.support.fixtures import (  # fixtures are found by their names in this module
    box,
    client,
    daemon,
    fresh_daemon,
    host_name,
    leak_check,
    save_logs_of_failed,
)

__all__ = ["box", "client", "daemon", "fresh_daemon", "host_name", "leak_check"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--forbid-skips", action="store_true", help="a skipped test fails: for the lane that must have everything"
    )
    parser.addoption("--repeat", type=int, default=1, metavar="N", help="run every test N times")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    count: int = metafunc.config.getoption("--repeat")
    if count > 1:
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(count))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Long waits begin first, so that workers wait side by side instead of one after another at the end.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture
def repetition() -> int:
    """Number of this run when `--repeat` asks for several."""
    return 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("--forbid-skips"):
        report.outcome = "failed"
        report.longrepr = f"skipped although this lane forbids it: {report.longrepr}"
    if report.failed:
        save_logs_of_failed(item)
    return report
