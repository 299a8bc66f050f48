"""Every message that a user can see has a row in docs/troubleshooting.md, which says what it means and what to do.

A row quotes the message: a piece of it in backquotes, with capitals (NAME, N) or `...` for what varies. A message
without a row fails this test, which names its place and its text.

Left out, with the reason:

- errors of `SHARED`: one row for all of a class, as the message itself says which value, file or call is wrong, and
  what was expected in its place;
- messages that are made elsewhere (`%s` alone): their text is that of another message, or the row is that of the frame
  around it;
- `ValueError`, `TypeError` and `assert`: arguments of internal functions, which a user meets as a bug report only;
- lines at INFO: they say what is happening, and ask for nothing.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from memckpt import errors
from tests.support.docs.messages import HOLE, Message, messages_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
PACKAGES = (
    "memckpt",
    "memckpt_run",
    "memckpt_tools",
    "lightning_memckpt",
    "accelerate_plugin",
    "transformers_memckpt",
    "memckpt_hydra",
)
#: Classes of errors with one row for all their messages.
SHARED = {
    "DamagedStateError": "bytes that fail validation: the message names the file and the place in it",
    "AgentGoneError": "the reason in `training goes on without protection since step N: REASON`",
    "UsageError": "calls or options in an order that cannot work: the message says which",
    "DrillError": "what a drill found of the script: the message quotes the script's output",
}
#: A piece that is shorter, or of fewer words, is found in too many messages to stand for one, unless it is all of it.
_LENGTH, _WORDS = 12, 3


_PLACEHOLDER = re.compile(r"\.\.\.|…|\b(?!(?:DDP|FSDP|SGD|SIGTERM)\b)[A-Z][A-Z_]*\b|\b\d+(?:\.\d+)?\b")


def quotations(page: str) -> list[tuple[str, str]]:
    """Class (or "") and each piece without placeholders of the texts in backquotes."""
    found = []
    for span in re.findall(r"`([^`\n]+)`", page):
        kind, _, rest = span.partition(": ")
        named = kind if hasattr(errors, kind) else ""
        pieces = _PLACEHOLDER.split(rest if named else span)
        found += [(named, _bare(piece)) for piece in pieces]
    return [(kind, piece) for kind, piece in found if " " in piece]


def _bare(text: str) -> str:
    """Without what belongs to the values around it."""
    return " ".join(text.split()).strip(",;:.()[]{}'= ")


QUOTED = quotations(PAGE)


def has_row(message: Message, quoted: list[tuple[str, str]]) -> bool:
    """Whether a piece that is quoted on the page is in what is always in the message."""
    longest = _bare(max(message.chunks, key=len, default=""))
    return any(
        piece == longest
        or (len(piece) >= _LENGTH and len(piece.split()) >= _WORDS and any(piece in chunk for chunk in message.chunks))
        for kind, piece in quoted
        if kind in ("", message.kind)
    )


def shares_a_row(message: Message) -> bool:
    """Whether the row of its class is enough."""
    if message.kind == "ConfigurationError":  # the row `NAME: expected ..., found ...`
        return "expected" in message.text or ", found " in message.text
    return message.kind in SHARED


def is_made_elsewhere(message: Message) -> bool:
    """Whether what is always there is no sentence: fewer than three words in a row."""
    return max((len(chunk.removeprefix("memckpt:").split()) for chunk in message.chunks), default=0) < 3


ALL = [
    message
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    for message in messages_of(path, str(path.relative_to(ROOT)))
]


def test_every_message_has_a_row() -> None:
    missing = [
        f"{message.place}: {message.kind}: {message.text.replace(HOLE, '...')}"
        for message in ALL
        if not (shares_a_row(message) or is_made_elsewhere(message) or has_row(message, QUOTED))
    ]
    assert len(ALL) > 400
    assert missing == [], f"{len(missing)} messages without a row in docs/troubleshooting.md"


@pytest.mark.parametrize("kind", [*SHARED, "ConfigurationError"])
def test_classes_with_a_row_in_common_have_it(kind: str) -> None:
    assert f"`{kind}: " in PAGE
    assert any(message.kind == kind for message in ALL)


def test_a_message_without_a_row_is_noticed(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "raise AgentError(f'the agent {pid} has turned to ' + ('stone' if cold else 'water'))\n"
        "_log.warning('memckpt: %d of the %s were eaten', n, what)\n"
        "_log.info('all is well with this training')\n"
        "raise ValueError('the moon is made of cheese')\n"
    )
    found = list(messages_of(module, "module.py"))
    assert [(each.kind, each.text) for each in found] == [
        ("AgentError", f"the agent {HOLE} has turned to stone"),
        ("AgentError", f"the agent {HOLE} has turned to water"),
        ("line", f"memckpt: {HOLE} of the {HOLE} were eaten"),
    ]
    assert not any(has_row(each, QUOTED) for each in found)
    page = "`AgentError: the agent N has turned to stone` `RunBusyError: has turned to water` `the moon is made`"
    assert [has_row(each, quotations(page)) for each in found] == [True, False, False]
