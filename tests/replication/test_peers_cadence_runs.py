"""Links that carry a part of what records need: nodes are lost, and training goes on from the last state by value."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tests.support.cluster import peers_lab
from tests.support.cluster.sharded_cases import Setup, check_verdict
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import PROCESS_GROUP_SECONDS, Death, noted, reference

slow = pytest.mark.slow
#: Of what a node may send, in bytes per second. A record has 350 KB; steps take some hundredths of a second.
_RATE = 100_000
#: A step is taken slowly in so many seconds: an order for the state of a later record is there in time.
_SLOW_SECONDS = 0.5


def until_states_are_sent(rank: peers_lab.PeersRank) -> None:
    """Wait until records are not sent any more."""
    client = rank.session._link.connection
    while not client.waits_suspended:
        assert rank.listen(PROCESS_GROUP_SECONDS * 0.6), "records are sent for long"


def look_for_a_state(rank: peers_lab.PeersRank) -> None:
    """Take a step slowly, unless a state that was sent by value is with the peers of every node.

    Training must not stand still for it: the state that is named may be that of a later record.
    """
    client, end = rank.session._link.connection, time.monotonic() + _SLOW_SECONDS
    while not (there := client.whole and client.waits_suspended) and (left := end - time.monotonic()) > 0:
        rank.listen(left)
    if there:
        rank.journal.note("protected", step=rank.step, acknowledged=client.watermark)


@pytest.mark.promise(
    "if links carry only part of the records, the watermark still advances: states by value follow each other "
    "every N steps, and all nodes can go back to the last one"
)
@pytest.mark.promise("up to m whole nodes of a group: trainers, agents, memory (peers)")
@slow
@pytest.mark.parametrize("redo", ["lazy", "eager"])
@pytest.mark.parametrize(("data", "ranks"), [(1, 2), (2, 3)])
def test_a_node_is_lost_that_could_not_send_every_record(lab: Lab, redo: str, data: int, ranks: int) -> None:
    """Before that only its trainer is, which goes on at the very step that it had begun."""
    config = peers_lab.peers_config(data, 1, redo, ack="proceed", every_steps=10, rate_bytes_per_second=_RATE)
    job = peers_lab.peers_job(lab, Setup(world_size=ranks), config, last_step=60)
    expected = reference(lab, job)
    slowly = [peers_lab.Act(0, step, "forward", look_for_a_state) for step in range(11, 41)]
    acts = [peers_lab.Act(0, 10, "forward", until_states_are_sent), *slowly]
    died = peers_lab.fail(lab, replace(job, acts=acts), Death("node1", 43, "backward"))
    assert noted(died, "protected")[0]
    low, high = peers_lab.bounds(died)
    assert 1 <= low < high
    acts = [peers_lab.Act(0, 50, "forward", until_states_are_sent)]
    again = peers_lab.fail(lab, died.again(lab, acts=acts), Death(1, 52, "backward"))
    assert peers_lab.goes_on(again, low, high) < 43
    assert check_verdict(again) == {"equal"}, peers_lab.told(lab)
    last = again.again(lab)
    peers_lab.finishes(lab, last, expected)
    assert peers_lab.goes_on(last, 52, 52, "local memory") == 52


@slow
@pytest.mark.parametrize(("ack", "rate", "steps"), [("wait", 400_000, 75), ("proceed", 700_000, 105)])
def test_states_are_sent_where_links_prove_to_be_slow(lab: Lab, ack: str, rate: int, steps: int) -> None:
    """N is chosen once the links are measured."""
    config = peers_lab.peers_config(1, 1, ack=ack, rate_bytes_per_second=rate)
    job = peers_lab.peers_job(lab, Setup(world_size=2), config, last_step=steps)
    expected = reference(lab, job)
    slowly = [peers_lab.Act(0, step, "forward", look_for_a_state) for step in range(steps - 14, steps - 4)]
    acts = [peers_lab.Act(0, steps - 15, "forward", until_states_are_sent), *slowly]
    died = peers_lab.fail(lab, replace(job, acts=acts, protected_at=(0,)), Death("node1", steps - 3, "backward"))
    low, high = peers_lab.bounds(died)
    assert 32 < low < high
    assert "states are sent in place of records" in peers_lab.told(lab)
    peers_lab.recovers(lab, died, expected, low, high)
