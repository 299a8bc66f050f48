"""The thread that sends what waits for copies: in order, and a failure is told whatever follows it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from memckpt.config import MemckptConfig
from memckpt.errors import AgentGoneError
from memckpt.processes.address import AgentAddress
from memckpt.session.link import AgentLink
from memckpt.session.ranks import Ranks


class Connection:
    """A connection of which messages may be refused."""

    def __init__(self, refused: str = "", on_shut_down: Callable[[], None] = lambda: None) -> None:
        self.sent: list[str] = []
        self._refused = refused
        self.shut_down = on_shut_down
        self.closed = False

    @property
    def channel(self) -> Connection:
        return self

    def close(self, dismiss: bool) -> None:
        self.closed = True

    def send(self, message: str) -> None:
        if message == self._refused:
            raise AgentGoneError("the agent has ended")
        self.sent.append(message)

    def read_notices(self) -> list[object]:
        return []


def link_with(connection: Any) -> AgentLink:
    link = AgentLink(AgentAddress.of("/nowhere"), Ranks(), MemckptConfig())
    link._connection = connection
    return link


def fail() -> Any:
    raise ValueError("expected a tensor, found none")


def refused() -> Any:
    return "commit"


@pytest.mark.parametrize("caller_waits", [True, False])
@pytest.mark.parametrize(
    ("make", "told"), [(fail, "could not be made: ValueError: expected a tensor"), (refused, "the agent has ended")]
)
def test_a_failure_is_told_once_and_what_follows_is_sent(
    make: Callable[[], Any], told: str, caller_waits: bool
) -> None:
    """A copy for storage is sent behind its record's commit: the next commit still hears that this one is lost."""
    connection, may_fail = Connection(refused="commit"), threading.Event()
    link = link_with(connection)

    def later() -> Any:
        assert may_fail.wait(20)
        return make()

    link.send_later(later)
    if caller_waits:
        may_fail.set()
    link.send_later(lambda: "copied", caller_waits=caller_waits)  # type: ignore[arg-type, return-value]
    may_fail.set()
    link.finish_sending()
    assert connection.sent == ["copied"]
    with pytest.raises(AgentGoneError, match=told):
        link.notices()
    assert link.notices() == []


def test_what_failed_on_a_connection_that_is_given_up_is_not_told_to_the_next_one() -> None:
    may_fail = threading.Event()
    connection = Connection(refused="commit", on_shut_down=may_fail.set)
    link = link_with(connection)
    link.send_later(lambda: may_fail.wait(20) and "commit")  # type: ignore[arg-type, return-value]
    link.abandon()
    assert connection.closed
    link._connection = Connection()  # type: ignore[assignment]
    assert link.notices() == []


def test_what_follows_waits_for_what_is_being_made() -> None:
    connection, made = Connection(), threading.Event()
    link = link_with(connection)
    link.send_later(lambda: made.wait(20) and "commit")  # type: ignore[arg-type, return-value]
    link.send_later(lambda: "copied", caller_waits=False)  # type: ignore[arg-type, return-value]
    assert connection.sent == []
    made.set()
    link.finish_sending()
    assert connection.sent == ["commit", "copied"]
