"""HTTP by hand, for requests that no client library would send."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.timing import scaled


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers (lower-case names) and body of an answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


async def exchange(socket_path: Path, request: bytes, *, timeout_s: float = 10) -> Answer:
    """Send the bytes as they are and read one answer. A connection closed without an answer is an error."""
    async with asyncio.timeout(scaled(timeout_s)):
        reader, writer = await asyncio.open_unix_connection(str(socket_path), limit=1 << 20)
        try:
            sending = asyncio.ensure_future(_send(writer, request))
            try:
                return await _read_answer(reader)
            finally:
                sending.cancel()
        finally:
            writer.close()


async def _send(writer: asyncio.StreamWriter, request: bytes) -> None:
    """Send in pieces; the server may answer and close before it has read all."""
    try:
        for start in range(0, len(request), 65536):
            writer.write(request[start : start + 65536])
            await writer.drain()
    except ConnectionError:
        return


async def _read_answer(reader: asyncio.StreamReader) -> Answer:
    head = await reader.readuntil(b"\r\n\r\n")
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int((await reader.readline()).strip(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
    else:
        body = await reader.read()
    return Answer(int(status_line.split()[1]), headers, body)


async def request(
    socket_path: Path,
    method: str,
    target: str,
    *,
    key: str | None = None,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
    timeout_s: float = 10,
) -> Answer:
    """One ordinary request with any target, key, body and headers."""
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", "Connection: close"]
    if key is not None:
        lines.append(f"Authorization: Bearer {key}")
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
        if not headers or "Content-Type" not in headers:
            lines.append("Content-Type: application/json")
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    raw = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (body or b"")
    return await exchange(socket_path, raw, timeout_s=timeout_s)
