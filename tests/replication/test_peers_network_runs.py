"""Trainings whose replicators speak over a network that is cut or slow, or with one that does not read: bit for bit."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest

from memckpt.config import AgentConfig
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import ask_status
from memckpt.protocol.status import PeersStatus
from memckpt.session import link
from tests.support.cluster import netns, peers_lab
from tests.support.cluster.netns import Network
from tests.support.cluster.sharded_cases import Setup
from tests.support.trainings.engine_harness import Child, Lab
from tests.support.trainings.killed_ranks import Death, logs, noted, reference, run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(netns.problem(as_root=True) is not None, reason=str(netns.problem(as_root=True))),
]

PATIENCE_SECONDS = 40.0
#: What is on its way to one peer at the most, and a message more.
MOST_BEHIND_BYTES = (32 << 20) + (1 << 20)
SLOW_BITS_PER_SECOND = 5_000_000
SLOTS = 3


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(4) as network:
        yield network


@dataclass(frozen=True)
class Trouble:
    """What keeps node1 from reading or being read, and what ends that.

    Attributes:
        silent: whether nothing is heard of node1 meanwhile.
    """

    name: str
    begin: Callable[[peers_lab.PeersJob], None]
    end: Callable[[peers_lab.PeersJob], None]
    silent: bool = True


def _network(job: peers_lab.PeersJob) -> Network:
    assert job.network is not None
    return job.network


TROUBLES = [
    Trouble("cut", lambda job: _network(job).cut(1), lambda job: _network(job).mend(1)),
    Trouble(
        "slow",
        lambda job: _network(job).limit(1, SLOW_BITS_PER_SECOND),
        lambda job: _network(job).unlimit(1),
        silent=False,
    ),
    Trouble(
        "stopped",
        lambda job: os.kill(peers_lab.replicator_of(job, "node1"), signal.SIGSTOP),
        lambda job: os.kill(peers_lab.replicator_of(job, "node1"), signal.SIGCONT),
    ),
]
#: A replicator that is stopped here is not to be replaced.
PATIENT = AgentConfig(linger_seconds=60.0, liveness_seconds=600.0)
troubles = pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.name)


def until(job: peers_lab.PeersJob, what: Callable[[PeersStatus], bool], *names: str) -> None:
    """Wait until something is true of what these nodes' agents say of their peers."""
    assert job.run_dir is not None
    deadline = time.monotonic() + PATIENCE_SECONDS
    for name in names:
        while True:
            status = ask_status(AgentAddress.of(job.run_dir, name))
            if status is not None and status.peers is not None and what(status.peers):
                break
            assert time.monotonic() < deadline, f"{name} says: {status}"
            time.sleep(0.1)


def degraded(trouble: Trouble) -> Callable[[PeersStatus], bool]:
    def is_degraded(status: PeersStatus) -> bool:
        silent = any(not link.connected for link in status.links) or "has said nothing" in status.problem
        return not status.protected and bool(status.problem) and (silent or not trouble.silent)

    return is_degraded


def lags(job: peers_lab.PeersJob) -> list[int]:
    """By how many records training was ahead of what is acknowledged, at each commit."""
    return [each["step"] + 1 - each["acknowledged"] for rank in noted(job, "committed") for each in rank]


@troubles
def test_training_goes_on_without_peers_and_is_protected_when_they_are_back(
    lab: Lab, network: Network, trouble: Trouble
) -> None:
    """So many steps that what is sent in vain would be more than may wait for one peer.

    No states are sent in place of records: on a busy machine they would be, and the last one of them lies behind where
    this training stands and waits. Peers that are back get a whole window before it does.
    """
    config = peers_lab.peers_config(1, 1, ack="proceed", every_steps=1, agent=PATIENT)
    job = peers_lab.peers_job(lab, Setup(world_size=2), config, network=network, last_step=180)
    expected = reference(lab, job)

    def looks(rank: peers_lab.PeersRank) -> None:
        until(rank.job, lambda status: degraded(trouble)(status) and status.gap is not None, "node0")
        until(rank.job, degraded(trouble), "node1")
        until(rank.job, lambda status: all(link.behind_bytes <= MOST_BEHIND_BYTES for link in status.links), "node0")

    acts = [
        peers_lab.Act(0, 3, "forward", lambda rank: trouble.begin(rank.job)),
        peers_lab.Act(0, 170, "forward", looks),
        peers_lab.Act(0, 172, "forward", lambda rank: trouble.end(rank.job)),
    ]
    died = peers_lab.fail(
        lab,
        replace(job, acts=acts, acknowledged_at=(172, 173, 174), protected_at=(2, 175)),
        Death("node1", 177, "backward"),
    )
    assert len(noted(died, "acted")[0]) == len(acts)
    assert max(lags(died)) > SLOTS
    assert "the replicator is gone" not in logs(lab)
    peers_lab.recovers(lab, died, expected)


@troubles
def test_training_waits_for_peers_that_are_away(lab: Lab, network: Network, trouble: Trouble) -> None:
    config = peers_lab.peers_config(2, 1, agent=PATIENT, ack_timeout_seconds=600.0)
    job = peers_lab.peers_job(lab, Setup(world_size=3), config, network=network)
    expected = reference(lab, job)

    class Ends(logging.Handler):
        """Ends the trouble when training has said that it waits."""

        def emit(self, record: logging.LogRecord) -> None:
            if "training waits for peers" in record.getMessage():
                logging.getLogger("memckpt").removeHandler(self)
                until(job, degraded(trouble), "node0", "node1", "node2")
                trouble.end(job)

    def prepare(rank: int) -> None:
        link._PATIENCE_SECONDS = 1.0
        if rank == 0 and trouble.silent:
            logging.getLogger("memckpt").addHandler(Ends())

    acts = [peers_lab.Act(0, 3, "forward", lambda rank: trouble.begin(rank.job))]
    attempt = replace(job, acts=acts, prepare=prepare, protected_at=(2, 9))
    peers_lab.finishes(lab, attempt, expected)
    assert max(lags(attempt)) <= SLOTS
    if trouble.silent:
        assert "training waits for peers" in peers_lab.told(lab)


# A node that is cut off, given up, and comes back


def cut_off(lab: Lab, job: peers_lab.PeersJob, lost: int) -> Child:
    """Run an attempt until a node is cut off and all other ranks are dead; the rank that is left."""
    ranks = run_ranks(lab, job.world_size, partial(peers_lab.train, job), job.directory, patience=None, hangs=lost)
    assert {child.wait() for rank, child in enumerate(ranks) if rank != lost} == {-signal.SIGKILL}, peers_lab.told(lab)
    return ranks[lost]


@pytest.mark.promise("up to m whole nodes of a group: trainers, agents, memory (peers)")
def test_a_node_that_was_given_up_and_comes_back_changes_nothing(lab: Lab, network: Network) -> None:
    job = peers_lab.peers_job(lab, Setup(world_size=3), peers_lab.peers_config(2, 1), network=network)
    expected = reference(lab, job)

    def cut(rank: peers_lab.PeersRank) -> None:
        network.cut(1)
        for pid in peers_lab.ranks_of(rank.job, ["node0", "node2"]):
            os.kill(pid, signal.SIGKILL)
        signal.pause()

    first = replace(job, acts=[peers_lab.Act(1, 6, "backward", cut)], protected_at=(4,))
    peers_lab.revive_agents(lab, first)
    stale = cut_off(lab, first, 1)
    assert stale.alive()

    def comes_back(rank: peers_lab.PeersRank) -> None:
        network.mend(1)
        until(rank.job, lambda status: status.refused > 0, "node0", "node2")

    def is_whole(rank: peers_lab.PeersRank) -> None:
        def unspoilt(status: PeersStatus) -> bool:
            known = {link.node for link in status.links} | {node for node, _, _ in status.kept}
            return status.protected and "node1" not in known

        until(rank.job, unspoilt, "node0", "node2", "node3")

    names = ("node0", "node3", "node2")
    acts = [peers_lab.Act(0, 8, "forward", comes_back), peers_lab.Act(0, 9, "forward", is_whole)]
    second = peers_lab.fail(
        lab, first.again(lab, names=names, acts=acts, protected_at=(7, 8)), Death("node3", 9, "backward")
    )
    peers_lab.goes_on(second, *peers_lab.bounds(first))
    assert len(noted(second, "acted")[0]) == 2
    assert stale.alive()

    # Its agent is still there, with what it has of the timeline that was left: it takes part again.
    peers_lab.recovers(lab, second, expected, names=())
    assert stale.wait() == -signal.SIGKILL
