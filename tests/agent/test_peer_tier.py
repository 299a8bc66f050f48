"""Acknowledgements of peers, as an agent counts them while a resume looks for a state."""

from __future__ import annotations

from contextlib import closing
from unittest.mock import MagicMock

import msgspec
import pytest

from memckpt.agent.replication.peer_tier import Peers
from memckpt.processes.event_loop import EventLoop
from memckpt.protocol.replication import Join, PeerJob, WatermarkAdvanced

JOB = PeerJob(
    attempt="a", nodes=(), units=(), data=2, tolerate=1, backend="x", wait=True, rate_bytes_per_second=None,
    overhead=0.05, record=32, forget=False, ack_timeout_seconds=4.0, every_steps=1,
)  # fmt: skip


@pytest.mark.parametrize(("then", "acknowledged"), [(None, 0), (20, 20)])
def test_a_plan_that_is_made_once_more_has_another_record_to_begin_with(then: int | None, acknowledged: int) -> None:
    """Peers' states prove to be damaged, and an earlier one serves. What follows it is sent from its start.

    The base of a generation that counts as acknowledged is not sent: then nobody ever acknowledges a record.
    """
    with closing(EventLoop()) as loop:
        peers = Peers(loop, MagicMock(), lambda message: None)
        peers.replicator = MagicMock()
        peers.join(Join(JOB))
        assert peers.watermark == 32
        peers.join(Join(msgspec.structs.replace(JOB, record=then)))
        assert peers.watermark == acknowledged


def test_a_replicator_that_is_replaced_changes_nothing_of_what_is_acknowledged() -> None:
    with closing(EventLoop()) as loop:
        peers = Peers(loop, MagicMock(), lambda message: None)
        peers.replicator = MagicMock()
        peers.join(Join(JOB))
        peers.replicator_said(WatermarkAdvanced(40, True))
        peers.replicator_replaced()
        assert peers.watermark == 40
