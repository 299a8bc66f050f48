"""A command that is a Python program: the interpreter, its options, and what it runs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

_INTERPRETER = re.compile(r"python(\d(\.\d+)?)?")
#: Options that take a value, attached or as the next argument.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
#: Letters of options with which Python does not begin as a warm process needs it, and why not.
_UNSUITED = {
    "I": "-I makes it ignore PYTHONPATH",
    "E": "-E makes it ignore PYTHONPATH",
    "S": "-S leaves site out",
    "i": "-i makes it interactive",
    "h": "-h shows its help",
    "?": "-? shows its help",
    "V": "-V shows its version",
}


@dataclass(frozen=True)
class PythonCommand:
    """A command whose program is a Python interpreter.

    Attributes:
        words: the whole command.
        interpreter: program and options, without what it runs.
    """

    words: tuple[str, ...]
    interpreter: tuple[str, ...]


def python_command(words: Sequence[str]) -> PythonCommand | str:
    """Take a command apart; a reason in words if it is no Python program that can be started warm."""
    program = words[0]
    if not _INTERPRETER.fullmatch(program.rpartition("/")[2]) or shutil.which(program) is None:
        return f"{program} is not Python: expected python, python3 or a path to one"
    index = 1
    while index < len(words):
        word = words[index]
        if word in ("-", "--help", "--version", "--help-all", "--help-env", "--help-xoptions"):
            return f"{program} {word} runs no script"
        if word.startswith(("-c", "-m")) or not word.startswith("-"):
            return PythonCommand(tuple(words), tuple(words[:index]))
        if word in _WITH_VALUE:
            index += 2
            continue
        if not word.startswith(("--", "-W", "-X")):
            letters = word[1:]
            for position, letter in enumerate(letters):
                if letter in _UNSUITED:
                    return _UNSUITED[letter]
                if letter in "cm":  # -uc: the rest is what it runs
                    return PythonCommand(
                        tuple(words), (*words[:index], *([f"-{letters[:position]}"] if position else []))
                    )
                if letter in "WX":
                    index += position == len(letters) - 1  # its value is the next word
                    break
        index += 1
    return f"{program} runs no script"
