"""Messages that a user can see, read from the source: errors of ours that are raised, and lines that are logged."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memckpt import errors

#: What stands for a value that is only known when the message is made.
HOLE = "\0"
ERRORS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
#: Errors of frameworks, raised by adapters for mistakes that the framework's users know them for.
FRAMEWORKS_ERRORS = {"MisconfigurationException"}
_LEVELS = {"warning", "error", "exception", "critical"}
#: `Messages.warn` of the adapters; `warnings.warn` is another one.
_LINES = {"warn"}
_CONVERSION = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[sdrgfxi]")


@dataclass(frozen=True)
class Message:
    """One message of the source.

    Attributes:
        place: file and line.
        kind: name of the error's class, or `line` of a log.
        text: its text, with HOLE for each value.
    """

    place: str
    kind: str
    text: str

    @property
    def chunks(self) -> list[str]:
        """What is always there, between values."""
        return [" ".join(chunk.split()) for chunk in self.text.split(HOLE) if chunk.strip()]


def messages_of(path: Path, name: str) -> Iterator[Message]:
    """All messages of a module; one with alternatives comes once for each."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            called = _name(node.exc.func)
            if called in ERRORS | FRAMEWORKS_ERRORS and node.exc.args:
                for text in _texts(node.exc.args[0]):
                    yield Message(f"{name}:{node.lineno}", called, text)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            logs = node.func.attr in _LEVELS and "log" in ast.unparse(node.func.value).lower()
            if logs or (node.func.attr in _LINES and ast.unparse(node.func.value) != "warnings"):
                for text in _texts(node.args[0]):
                    yield Message(f"{name}:{node.lineno}", "line", _CONVERSION.sub(HOLE, text) if logs else text)


def _name(called: ast.expr) -> str:
    return called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""


def _texts(node: ast.expr) -> list[str]:
    """The texts that an expression may have."""
    match node:
        case ast.Constant(value=str(value)):
            return [value]
        case ast.JoinedStr(values=values):
            return ["".join(parts) for parts in itertools.product(*map(_texts, values))]
        case ast.FormattedValue(value=ast.IfExp() as chosen):
            return _texts(chosen)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [a + b for a, b in itertools.product(_texts(left), _texts(right))]
        case ast.IfExp(body=body, orelse=orelse):
            return [*_texts(body), *_texts(orelse)]
        case _:
            return [HOLE]
