"""Farewell of a trainer: the agent's answers to its goodbye, and what it logs of the final step."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest

from memckpt.config import AgentConfig
from memckpt.protocol.channel import Channel, Message
from memckpt.protocol.storing import Saved, SaveFailed
from memckpt.protocol.trainer import Goodbye, HoldingOn, Leaving, OthersStay
from memckpt.session import connection
from memckpt.session.connection import AgentConnection

FAILED, SAVED = SaveFailed(9, "the disk is full"), Saved(9, 9, 1, 0.1, 0.1)
ORDERED, LAST, LOST = Leaving(), Leaving(last=True), Leaving(last=True, unsaved="the disk is full")
NOT_STORED = "the final step is not in storage: the disk is full"
NOT_KNOWN = "whether the final step is in storage is not known"


@pytest.mark.promise(
    "the state that a dead trainer leaves is written to storage, and so are the final step and the state at a SIGTERM"
)
@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([LAST], ""),
        ([SAVED, LAST], ""),
        ([OthersStay()], ""),
        ([FAILED, HoldingOn("the disk is full", 60.0)], f"{NOT_STORED}; the agent (pid"),
        # It was told to end, and says so before it writes.
        ([ORDERED, SAVED, LAST], ""),
        ([ORDERED, FAILED, LOST], f"{NOT_STORED}; the agent (pid"),
        ([ORDERED, FAILED, SAVED, LAST], ""),
        # Trainers know already that the disk is full: failures for the same reason are told once.
        ([ORDERED, LOST], f"{NOT_STORED}; the agent (pid"),
        # It was killed before it had written.
        ([ORDERED], NOT_KNOWN),
        ([ORDERED, SAVED], NOT_KNOWN),
        ([FAILED], NOT_KNOWN),
        ([], NOT_KNOWN),
    ],
    ids=lambda value: "-".join(type(one).__name__ for one in value) if isinstance(value, list) else "",
)
def test_what_becomes_of_the_final_step_is_said(
    messages: Sequence[Message], said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "_END_SECONDS", 0.01)  # the agent is this process, and does not end
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent, ours_end = Channel(theirs), AgentConnection(Channel(ours), AgentConfig())
    try:
        for message in messages:
            agent.send(message)
        theirs.shutdown(socket.SHUT_WR)
        ours_end.say_goodbye(finished=True, saving_seconds=60.0)
        assert agent.receive(5.0)[0] == Goodbye(True)
        assert ours_end.notices == [each for each in messages if isinstance(each, Saved)]
    finally:
        ours_end.close()
        agent.close()
    texts = [record.message for record in caplog.records if "final step" in record.message]
    assert [said in text for text in texts] == ([True] if said else [])
