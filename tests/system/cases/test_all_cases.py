"""The table of cases in README.md and the tests agree."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from tests.system.cases.kinds import CASES

HERE = Path(__file__).parent
MODULES = sorted(path.stem for path in HERE.glob("test_*.py") if path.stem != "test_all_cases")


def test_every_case_of_the_table_has_a_test_and_every_test_a_line() -> None:
    for name in MODULES:
        module = importlib.import_module(f"tests.system.cases.{name}")
        tests = {entry for entry in vars(module) if entry.startswith("test_")}
        assert tests <= set(CASES.values()), f"tests without a case in {name}"
    listed = re.findall(
        r"^\| ((?:exec|stdin|timeout|files|res|life)-[a-z0-9-]+) \|", (HERE / "README.md").read_text(), re.M
    )
    assert len(listed) == len(set(listed)) == 50
    assert set(listed) == set(CASES)
