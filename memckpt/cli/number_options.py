"""Commands whose options for numbers say, where they are given something else, what that was and what is meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand

#: Words of typer's messages, which differ with its version, and what is expected.
_KINDS = {
    "valid integer": "a whole number",
    "valid int": "a whole number",
    "valid number": "a number",
    "valid float": "a number",
}


class NumbersCommand(TyperCommand):
    """A command. ``--mtbf-hours 24h`` is answered with the value, and with the help text, which has the unit."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            option: Any = error.param
            kind = next((kind for words, kind in _KINDS.items() if words in error.message), None)
            value = None if option is None else _value_of(option.opts, given)
            if kind is None or value is None:
                raise
            message = f"expected {kind}, found {value!r}: {getattr(option, 'help', '') or ''}"
            raise typer.BadParameter(message, ctx=error.ctx, param=option) from error


def _value_of(names: Sequence[str], args: Sequence[str]) -> str | None:
    """The last value that is given to an option."""
    found = None
    for position, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name in names:
            found = value if equals else (args[position + 1] if position + 1 < len(args) else found)
    return found
