"""Messages: the reference page has all of them, and the messages that docs/troubleshooting.md quotes exist.

A row quotes a message in its first column: a piece of it in backquotes, with capitals (NAME, N) or `...` for values.
"""

from __future__ import annotations

import re
from pathlib import Path

from docs_site import reference
from docs_site.messages import LINE, all_messages, messages_of
from memckpt import errors

ROOT = Path(__file__).parents[2]
MESSAGES = all_messages()
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
#: Sections that quote messages of other programs, or what commands print.
FOREIGN = ("## From torch and torchrun", "## `memckpt drill`")
_PLACEHOLDER = re.compile(r"\.\.\.|…|\b(?!(?:DDP|FSDP|SGD|SIGTERM|SIGKILL)\b)[A-Z][A-Z_]*\b|\b\d+(?:\.\d+)?\b")


def quotations(page: str) -> list[tuple[str, str]]:
    """Class (or "") and each piece of three words or more without placeholders, of texts in first columns."""
    found = []
    for section in re.split(r"^(?=## )", page, flags=re.MULTILINE):
        if not section.startswith(FOREIGN):
            for cell in re.findall(r"^\| (.*?) \|", section, re.MULTILINE):
                for span in re.findall(r"`([^`\n]+)`", cell):
                    kind, _, rest = span.partition(": ")
                    named = kind if hasattr(errors, kind) else ""
                    pieces = [_bare(piece) for piece in _PLACEHOLDER.split(rest if named else span)]
                    found += [(named, piece) for piece in pieces if len(piece.split()) >= 3]
    return found


def _bare(text: str) -> str:
    """Without what belongs to the values around it."""
    return " ".join(text.split()).strip(",;:.()[]{}'= ")


def exists(kind: str, piece: str) -> bool:
    return any(
        kind in ("", message.kind) and any(piece in chunk for chunk in [*message.chunks, message.shown])
        for message in MESSAGES
    )


def test_every_message_that_is_quoted_exists() -> None:
    quoted = quotations(PAGE)
    assert len(quoted) > 10
    assert [(kind, piece) for kind, piece in quoted if not exists(kind, piece)] == []


def test_a_message_that_does_not_exist_is_noticed() -> None:
    table = "## A\n\n| you see | do |\n|---|---|\n"
    row = "| `AgentError: the agent N has turned to stone`, `RUN` | as `the other column says` |\n"
    (quoted,) = quotations(table + row + "\n## From torch and torchrun\n\n" + row)
    assert quoted == ("AgentError", "has turned to stone")
    assert not exists(*quoted)


def test_the_reference_has_every_message() -> None:
    page = reference.messages()
    assert len(MESSAGES) > 300
    assert [message for message in MESSAGES if f"- ``{message.shown}``" not in page] == []
    kinds = {message.kind for message in MESSAGES} - {LINE}
    assert kinds <= set(re.findall(r"^## `(\w+)`$", page, re.MULTILINE))


def test_messages_are_read_from_the_source(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "raise AgentError(f'the agent {agent.pid} has turned to ' + ('stone' if cold else 'water'))\n"
        "_log.warning('memckpt: %d of the %s were eaten (100%%)', n, what)\n"
        "_log.info('all is well with this training')\n"
        "raise ValueError('the moon is made of cheese')\n"
    )
    found = list(messages_of(module, "module"))
    assert [(each.kind, each.shown) for each in found] == [
        ("AgentError", "the agent PID has turned to stone"),
        ("AgentError", "the agent PID has turned to water"),
        (LINE, "memckpt: N of the WHAT were eaten (100%)"),
    ]
    assert found[2].chunks == ["memckpt:", "of the", "were eaten (100%)"]
