#!/bin/sh
# Renews requirements.lock: one universal set of hashed packages for all supported interpreters, without download addresses.
set -eu
cd "$(dirname "$0")/.."

python=.venv/bin/python
[ -x "$python" ] || python=python3
"$python" -m venv build/lock
build/lock/bin/pip install --quiet --disable-pip-version-check uv
build/lock/bin/uv pip compile pyproject.toml --extra server --group dev --group build --upgrade --universal --python-version 3.11 \
    --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate --quiet --output-file requirements.lock

if grep -nE '://|--(extra-)?index-url|--find-links' requirements.lock; then
    echo "lock: requirements.lock holds an address" >&2
    exit 1
fi
echo "lock: $(grep -c '==' requirements.lock) packages"
