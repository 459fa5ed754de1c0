"""The demo's project: a small Python package with two bugs, its tests, and the scripted agent's knowledge of how to mend them."""

from __future__ import annotations

import io
import tarfile

FILES = {
    "shop/__init__.py": "",
    "shop/prices.py": '''"""Prices in cents."""


def total(prices, discount_percent=0):
    """The sum of the prices after the discount, rounded to a cent."""
    amount = sum(prices)
    return round(amount - amount * discount_percent / 10)


def cheapest(prices):
    """The lowest price, None if there is none."""
    return min(prices)
''',
    "tests/__init__.py": "",
    "tests/test_prices.py": """import unittest

from shop.prices import cheapest, total


class Prices(unittest.TestCase):
    def test_total(self):
        self.assertEqual(total([100, 250]), 350)

    def test_discount(self):
        self.assertEqual(total([100, 100], discount_percent=10), 180)

    def test_cheapest(self):
        self.assertEqual(cheapest([3, 1, 2]), 1)

    def test_cheapest_of_nothing(self):
        self.assertIsNone(cheapest([]))
""",
}

SOURCE = "shop/prices.py"
# Without site packages and PYTHON* variables, which the project does not use: a quarter of the interpreter's start.
TEST_COMMAND = ["python3", "-S", "-E", "-m", "unittest", "-q"]

# What the test run must say, the text to replace, its replacement: one step of the agent each.
REMEDIES = (
    ("test_discount", "discount_percent / 10)", "discount_percent / 100)"),
    ("test_cheapest_of_nothing", "return min(prices)", "return min(prices, default=None)"),
)


def archive() -> bytes:
    """The project as a tar file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in FILES.items():
            data = text.encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def mended(source: str, complaints: str) -> str | None:
    """The source with the first remedy applied that fits what the tests said; None if none does."""
    for test, wrong, right in REMEDIES:
        if test in complaints and wrong in source:
            return source.replace(wrong, right)
    return None
