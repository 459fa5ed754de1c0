#!/bin/sh
# Finds a Python that can run set-up and hands over to setup.py; all that can be said without one is said here.
set -eu
cd "$(dirname "$0")/.."

if [ "$(uname -s)" != Linux ]; then
    echo "setup: dsec runs on Linux; the SDK alone installs anywhere with 'pip install .'" >&2
    exit 1
fi

for candidate in ${PYTHON:-} python3 /usr/bin/python3 python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null 2>&1 &&
        "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
        exec "$candidate" -I -B scripts/setup.py "$@"
    fi
done

echo "setup: no Python 3.11, 3.12 or 3.13 on PATH: apt-get install python3 python3-venv (Debian 12 has 3.11, 13 has 3.13)," >&2
echo "       or name one with PYTHON=/path/to/python3 make ..." >&2
exit 1
