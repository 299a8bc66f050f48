"""Messages that a user can see, read from the source: errors of ours that are raised, and lines that are logged.

Left out: `ValueError`, `TypeError` and `assert`, which a user meets in a bug report only; lines at INFO, which ask for
nothing; texts that are made elsewhere (`%s` alone), which come from there.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memckpt import errors

ROOT = Path(__file__).resolve().parents[1]
ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.MemckptError)
}
#: Errors of frameworks, raised by adapters for mistakes that the framework's users know them for.
FRAMEWORKS_ERRORS = {"MisconfigurationException"}
#: The kind of a message that is logged.
LINE = "line"
_NO_PRODUCT = {"tests", "benchmarks", "examples", "docs_site", "deploy", "build"}
_LEVELS = {"warning", "error", "exception", "critical"}
#: `Messages.warn` of the adapters; `warnings.warn` is another one.
_LINES = {"warn"}
_CONVERSION = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[sdrgfxi]")
#: A value that is only known when the message is made, with the name of its expression.
_HOLE = re.compile("\0(\\w*)\0")


@dataclass(frozen=True)
class Message:
    """One message of the source.

    Attributes:
        module: where it is made.
        kind: name of the error's class, or LINE.
        text: its text, with a hole for each value.
    """

    module: str
    kind: str
    text: str

    @property
    def chunks(self) -> list[str]:
        """What is always there, between values."""
        return [" ".join(chunk.split()) for chunk in _HOLE.split(self.text)[::2] if chunk.strip()]

    @property
    def shown(self) -> str:
        """Its text as a page shows it, with names in capitals for values."""
        text = _HOLE.sub(lambda hole: hole[1].upper() or "...", self.text)
        return " ".join(text.replace("`", "'").split())

    @property
    def made_here(self) -> bool:
        """Whether three words in a row are always there."""
        return any(len(chunk.removeprefix("memckpt:").split()) >= 3 for chunk in self.chunks)


def all_messages() -> list[Message]:
    """Every message of every package that is installed, each text of a module once."""
    found: dict[Message, None] = {}
    for package in sorted(path.parent for path in ROOT.glob("*/__init__.py")):
        if package.name not in _NO_PRODUCT:
            for path in sorted(package.rglob("*.py")):
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
                found.update(dict.fromkeys(messages_of(path, module)))
    return [message for message in found if message.made_here]


def messages_of(path: Path, module: str) -> Iterator[Message]:
    """All messages of a file; one with alternatives comes once for each."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            called = _name(node.exc.func)
            if called in ERRORS.keys() | FRAMEWORKS_ERRORS and node.exc.args:
                for text in _texts(node.exc.args[0]):
                    yield Message(module, called, text)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            logs = node.func.attr in _LEVELS and "log" in ast.unparse(node.func.value).lower()
            if logs or (node.func.attr in _LINES and ast.unparse(node.func.value) != "warnings"):
                values = iter(map(_hole, node.args[1:]))
                for text in _texts(node.args[0]):
                    yield Message(module, LINE, _filled(text, values) if logs else text)


def _filled(text: str, values: Iterator[str]) -> str:
    """A text of a logger with a hole for each conversion."""
    return _CONVERSION.sub(lambda _: next(values, "\0\0"), text).replace("%%", "%")


def _name(called: ast.expr) -> str:
    return called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""


def _hole(node: ast.expr) -> str:
    return f"\0{_name(node).strip('_')}\0"


def _texts(node: ast.expr) -> list[str]:
    """The texts that an expression may have."""
    match node:
        case ast.Constant(value=str(value)):
            return [value]
        case ast.JoinedStr(values=values):
            return ["".join(parts) for parts in itertools.product(*map(_texts, values))]
        case ast.FormattedValue(value=ast.IfExp() as chosen):
            return _texts(chosen)
        case ast.FormattedValue(value=value):
            return [_hole(value)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [a + b for a, b in itertools.product(_texts(left), _texts(right))]
        case ast.IfExp(body=body, orelse=orelse):
            return [*_texts(body), *_texts(orelse)]
        case _:
            return [_hole(node)]
