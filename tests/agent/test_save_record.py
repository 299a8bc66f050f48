"""A start with other ranks waits for what it has asked of storage, whatever is said of other checkpoints meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from memckpt.errors import StorageError
from memckpt.protocol.channel import Channel
from memckpt.protocol.storing import RecordSaved, Saved, SaveFailed, SaveRecord
from memckpt.session.link import AgentLink
from tests.support.linked import link_over

RECORD = 8
#: Of the dead attempt: a copy after the same record, of one of four ranks that hold different shards.
OF_ONE_UNIT = Saved(RECORD, RECORD, 100, 0.1, 0.1)
OF_ANOTHER = SaveFailed(RECORD, "training has resumed meanwhile; try again")


Ends = tuple[AgentLink, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A rank's link, and the agent's end of it."""
    ours, theirs = (Channel(each) for each in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    link = link_over(ours)
    yield link, theirs
    link.abandon()
    theirs.close()


def test_other_checkpoints_are_no_answer(ends: Ends) -> None:
    link, agent = ends
    agent.send(OF_ONE_UNIT)
    agent.send(OF_ANOTHER)
    with pytest.raises(StorageError, match="has not got to storage within"):
        link.save_record(RECORD, "/store", 0.1)
    assert agent.receive(1.0)[0] == SaveRecord(RECORD, "/store")
    agent.send(RecordSaved(RECORD))
    link.save_record(RECORD, "/store", 10.0)
    assert link.notices() == [OF_ONE_UNIT, OF_ANOTHER]


def test_why_it_is_not_there(ends: Ends) -> None:
    link, agent = ends
    agent.send(RecordSaved(RECORD, "the disk is full"))
    with pytest.raises(StorageError, match="does not get to storage: the disk is full"):
        link.save_record(RECORD, "/store", 10.0)
