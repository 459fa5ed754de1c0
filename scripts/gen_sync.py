"""Writes the sync twin of the SDK: one class for each async one, with the same signatures and documentation.

Each generated method runs the async one on its client's portal, so there is one implementation. `--check` writes nothing and fails if
the file in the tree differs by a byte.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SDK = ROOT / "src" / "dsec" / "sdk"
TARGET = SDK / "_generated" / "sync.py"
SOURCES = ("files.py", "processes.py", "sandbox.py", "collections.py", "client.py")

HEADER = '''"""The sync twin of the SDK. Generated from the async classes by scripts/gen_sync.py (`make gen`); not to be edited."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

import msgspec

from dsec.api import types as t
from dsec.api.errors import DsecError
from dsec.sdk._later import Later
from dsec.sdk._portal import Portal
from dsec.sdk.client import AsyncClient, Identified, Stopped
from dsec.sdk.collections import AsyncEvents, AsyncImages, AsyncNodes
from dsec.sdk.files import AsyncFiles, LocalPath, Transfer
from dsec.sdk.processes import AsyncProcess
from dsec.sdk.results import ExecResult, FileEntry, Output, Page
from dsec.sdk.sandbox import AsyncSandbox, Stdin
'''

ENTER = """
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        {leave}
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def translate(text: str) -> str:
    """Annotations and documentation of the async source, as the sync twin says them."""
    text = re.sub(r"\bAsync(Iterator|Client|Sandbox|Process|Files|Images|Nodes|Events)\b", r"\1", text)
    return text.replace("`async with`", "`with`").replace("`aclose`", "`close`")


def parameters(function: Function) -> str:
    """The parameter list, self included."""
    return translate(ast.unparse(function.args))


def arguments(function: Function) -> str:
    """The call's arguments that hand every parameter on."""
    args = function.args
    words = [arg.arg for arg in args.args[1:]]
    if args.vararg:
        words.append(f"*{args.vararg.arg}")
    words += [f"{arg.arg}={arg.arg}" for arg in args.kwonlyargs]
    if args.kwarg:
        words.append(f"**{args.kwarg.arg}")
    return ", ".join(words)


def wrapped(annotation: str, value: str) -> str:
    """The expression that turns `value`, of the async type `annotation`, into its sync twin."""
    if found := re.fullmatch(r"Async(\w+)", annotation):
        return f"{found[1]}(self._portal, {value})"
    if found := re.fullmatch(r"(?:builtins\.)?list\[Async(\w+)\]", annotation):
        return f"[{found[1]}(self._portal, item) for item in {value}]"
    if found := re.fullmatch(r"Page\[Async(\w+)\]", annotation):
        return f"_page(self._portal, {value})"
    if found := re.fullmatch(r"Async(\w+) \| DsecError", annotation):
        return f"{found[1]}(self._portal, {value}) if isinstance({value}, Async{found[1]}) else {value}"
    if "Async" in annotation:
        raise SystemExit(f"gen_sync: no rule for the type {annotation}")
    return value


def is_generator(function: Function) -> bool:
    """Whether the function yields."""
    return any(isinstance(node, ast.Yield) for node in ast.walk(function))


def body(function: Function, *, is_property: bool) -> str:
    """The statement that runs the async method."""
    returns = ast.unparse(function.returns) if function.returns else "None"
    if is_property:
        return f"return {wrapped(returns, f'self._async.{function.name}')}"
    call = f"self._async.{function.name}({arguments(function)})"
    if found := re.fullmatch(r"AsyncIterator\[(.*)\]", returns):
        return f"return self._portal.iterate({call}, lambda item: {wrapped(found[1], 'item')})"
    if isinstance(function, ast.FunctionDef):
        return f"return {wrapped(returns, call)}" if returns != "NoReturn" else call
    if returns in ("None", "NoReturn"):
        return f"self._portal.run({call})"
    return f"return {wrapped(returns, f'self._portal.run({call})')}"


def docstring(node: Function | ast.ClassDef, indent: str) -> str:
    """The documentation, indented anew."""
    text = ast.get_docstring(node, clean=True)
    if text is None:
        raise SystemExit(f"gen_sync: {node.name} has no docstring")
    lines = translate(text).splitlines()
    if len(lines) == 1:
        return f'{indent}"""{lines[0]}"""\n'
    return (
        "\n".join([f'{indent}"""{lines[0]}', *[(indent + line).rstrip() for line in lines[1:]], f'{indent}"""']) + "\n"
    )


def method(function: Function) -> str:
    """One generated method or property."""
    is_property = any(isinstance(node, ast.Name) and node.id == "property" for node in function.decorator_list)
    returns = translate(ast.unparse(function.returns)) if function.returns else "None"
    head = "    @property\n" if is_property else ""
    head += f"    def {function.name}({parameters(function)}) -> {returns}:\n"
    statement = body(function, is_property=is_property)
    if returns == "NoReturn" and isinstance(function, ast.AsyncFunctionDef):
        statement += "\n        raise AssertionError"
    return f"\n{head}{docstring(function, ' ' * 8)}        {statement}\n"


def attributes(node: ast.ClassDef) -> str:
    """Properties for the documented attributes (an annotation followed by a docstring)."""
    text = ""
    for first, second in zip(node.body, node.body[1:], strict=False):
        if isinstance(first, ast.AnnAssign) and isinstance(second, ast.Expr):
            name = ast.unparse(first.target)
            text += f"\n    @property\n    def {name}(self) -> {ast.unparse(first.annotation)}:\n"
            text += f'        """{ast.literal_eval(second.value)}"""\n        return self._async.{name}\n'
    return text


def constructor(node: ast.ClassDef, name: str) -> str:
    """The constructor: a client makes its portal, all others get theirs."""
    if name != "Client":
        return f"\n    def __init__(self, portal: Portal, source: {node.name}) -> None:\n        self._portal = portal\n        self._async = source\n"
    init = next(item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__")
    return (
        f"\n    def __init__({parameters(init)}) -> None:\n        self._async = AsyncClient({arguments(init)})\n"
        "        self._portal = Portal(self._async.aclose)\n"
    )


def twin(node: ast.ClassDef) -> str:
    """The generated class."""
    name = node.name.removeprefix("Async")
    text = f'\n\nclass {name}:\n{docstring(node, "    ")}\n    __slots__ = ("__weakref__", "_async", "_portal")\n'
    text += constructor(node, name) + attributes(node)
    functions = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    names = {item.name for item in functions}
    for function in functions:
        if function.name.startswith("_") or (name == "Client" and function.name == "aclose"):
            continue
        sync = method(function)
        text += sync.replace("def aclose(", "def close(", 1)
    if "__repr__" in names:
        text += '\n    def __repr__(self) -> str:\n        return repr(self._async).replace("<Async", "<", 1)\n'
    if name == "Client":
        text += CLIENT_END + ENTER.format(leave="self.close()")
    elif "__aexit__" in names:
        text += ENTER.format(leave="self._portal.run(self._async.__aexit__(exc_type, exc, traceback))")
    return text


CLIENT_END = '''
    def close(self) -> None:
        """Close all connections and end the client's thread. Sandboxes live on. Idempotent."""
        self._portal.close()
'''

FOOTER = """

def _page(portal: Portal, page: Page[AsyncSandbox]) -> Page[Sandbox]:
    return Page([Sandbox(portal, item) for item in page.items], page.next_cursor)
"""


def generate() -> str:
    """The whole text of the generated module."""
    text = HEADER
    for source in SOURCES:
        tree = ast.parse((SDK / source).read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name.startswith("Async"):
                text += twin(node)
    return text + FOOTER


def main() -> None:
    """Write the module, or with `--check` compare it."""
    text = generate()
    if "--check" in sys.argv[1:]:
        if TARGET.read_text(encoding="utf-8") != text:
            raise SystemExit(f"{TARGET.relative_to(ROOT)} is not what scripts/gen_sync.py writes: run `make gen`")
        return
    TARGET.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
