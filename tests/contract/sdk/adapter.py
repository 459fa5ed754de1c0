"""Lets one suite, written for the async SDK, run over the sync twin: each call runs in a thread."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

import dsec

_TWINS = (dsec.Client, dsec.Sandbox, dsec.Process, dsec.Files, dsec.Images, dsec.Nodes, dsec.Events)


class AsAsync:
    """A sync object that is used like its async twin."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        name = "close" if name == "aclose" else name
        if isinstance(getattr(type(self._target), name, None), property):
            return wrap(getattr(self._target, name))
        method = getattr(self._target, name)
        returns = str(inspect.signature(method).return_annotation)
        if returns.startswith("Iterator"):
            return lambda *args, **kwargs: _iterate(method(*args, **kwargs))
        if name in ("forward", "url"):
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            args = tuple(item._target if isinstance(item, AsAsync) else item for item in args)
            return wrap(await asyncio.to_thread(method, *args, **kwargs))

        return call

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._target.__enter__)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self._target.__exit__, *exc_info)


def wrap(value: Any) -> Any:
    """The value, usable as if it had come from the async SDK."""
    if isinstance(value, _TWINS):
        return AsAsync(value)
    if isinstance(value, list):
        return [wrap(item) for item in value]
    if isinstance(value, dsec.Page):
        return dsec.Page([wrap(item) for item in value.items], value.next_cursor)
    return value


async def _iterate(source: Iterator[Any]) -> AsyncIterator[Any]:
    end = object()
    try:
        while (item := await asyncio.to_thread(next, source, end)) is not end:
            yield wrap(item)
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            await asyncio.to_thread(close)
