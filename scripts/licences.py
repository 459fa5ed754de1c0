"""Checks the licences of all Python and Rust dependencies against what an Apache-2.0 project may build on."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Permissive ones, and MPL-2.0, whose terms end at the borders of its own files.
ALLOWED = frozenset(
    {
        "0BSD",
        "Apache-2.0",
        "Apache-2.0 WITH LLVM-exception",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "ISC",
        "MIT",
        "MIT-0",
        "MPL-2.0",
        "PSF-2.0",
        "Python-2.0",
        "Unicode-3.0",
        "Unlicense",
        "Zlib",
    }
)
# How older packages say it: trove classifiers and free text.
SPELLINGS = {
    "apache 2": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "psfl": "PSF-2.0",
    "python software foundation license": "PSF-2.0",
}
# What comes with the interpreter and is not a dependency.
NOT_OURS = frozenset({"dsec", "pip", "setuptools", "wheel"})


def main() -> int:
    """Print what is not allowed; return 1 if there is anything."""
    found = sorted({*python_licences(), *rust_licences()})
    refused = [(name, licence) for name, licence in found if not allowed(licence)]
    for name, licence in refused:
        print(
            f"licences: {name}: {licence or 'none stated'} is not on the list in scripts/licences.py", file=sys.stderr
        )
    if not refused:
        print(f"licences: {len(found)} dependencies, all compatible with Apache-2.0")
    return 1 if refused else 0


def allowed(expression: str) -> bool:
    """Whether an SPDX expression (or an old spelling) can be met with licences on the list."""
    text = known(expression.strip())
    if text in ALLOWED:
        return True
    # "/" is how old Rust crates wrote OR.
    words = [known(word.strip()) for word in re.split(r"(\(|\)|\bAND\b|\bOR\b|/)", text) if word.strip()]
    try:
        verdict = either(words)
    except IndexError:
        return False
    return verdict and not words


def known(text: str) -> str:
    """Return the SPDX name of an old spelling, anything else as it is."""
    return SPELLINGS.get(text.lower(), text)


def either(words: list[str]) -> bool:
    """Judge alternatives and take their words from the front of the list."""
    verdict = both(words)
    while words and words[0] in ("OR", "/"):
        words.pop(0)
        verdict = both(words) or verdict
    return verdict


def both(words: list[str]) -> bool:
    """Judge what applies together, which binds closer than OR, and take its words."""
    verdict = single(words)
    while words and words[0] == "AND":
        words.pop(0)
        verdict = single(words) and verdict
    return verdict


def single(words: list[str]) -> bool:
    """Judge one licence or a bracket and take its words."""
    word = words.pop(0)
    if word != "(":
        return word in ALLOWED
    verdict = either(words)
    return words.pop(0) == ")" and verdict


def python_licences() -> Iterator[tuple[str, str]]:
    """Yield each installed distribution with what it says of its licence."""
    for distribution in importlib.metadata.distributions():
        metadata = distribution.metadata
        name = metadata["Name"]
        if name in NOT_OURS:
            continue
        classifiers = [
            known(value.rsplit(" :: ", 1)[-1])
            for value in metadata.get_all("Classifier") or []
            if value.startswith("License :: ") and value not in ("License :: OSI Approved", "License :: DFSG approved")
        ]
        expression, text = ((metadata.get_all(field) or [""])[0] for field in ("License-Expression", "License"))
        stated = expression or " AND ".join(classifiers) or text.partition("\n")[0]
        yield f"{name} (Python)", stated


def rust_licences() -> Iterator[tuple[str, str]]:
    """Yield each crate of the workspace's lock with its licence expression."""
    cargo = shutil.which("cargo") or str(Path.home() / ".cargo" / "bin" / "cargo")
    done = subprocess.run(
        [cargo, "metadata", "--locked", "--format-version=1", "--quiet"],
        cwd=ROOT / "native",
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"licences: cargo metadata failed: {done.stderr.strip()}")
    for package in json.loads(done.stdout)["packages"]:
        if package["source"] is not None:
            yield f"{package['name']} (Rust)", package["license"] or ""


if __name__ == "__main__":
    sys.exit(main())
