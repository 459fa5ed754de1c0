"""Small programs that tests put into sandboxes."""

from __future__ import annotations

import dsec

PCOUNT = """#!/bin/sh
# prints how many live processes have a command line that starts with $1 (argv joined by blanks)
n=0
for p in /proc/[0-9]*/cmdline; do
  c=$(tr '\\0' ' ' <"$p" 2>/dev/null) || continue
  case "$c" in "$1 "*) n=$((n+1));; esac
done
echo $n
"""

TCPPROBE = """#!/usr/bin/env python3
import socket,sys
try:
    socket.create_connection((sys.argv[1],int(sys.argv[2])),timeout=5).close(); print('open')
except (OSError,UnicodeError): print('blocked')
"""


async def install_programs(box: dsec.AsyncSandbox) -> None:
    """Put pcount and tcpprobe on the sandbox's PATH."""
    await box.files.write("/usr/local/bin/pcount", PCOUNT.encode(), mode=0o755, user="root")
    await box.files.write("/usr/local/bin/tcpprobe", TCPPROBE.encode(), mode=0o755, user="root")
