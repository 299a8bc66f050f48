"""Agents and replicators die or stand still while training goes on, and records are on their way."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from memckpt.config import AgentConfig
from tests.support.cluster import peers_lab
from tests.support.cluster.peers_lab import kill_agent, kill_replicator, kill_replicators, stop_agent, stop_both
from tests.support.cluster.sharded_cases import Setup, named
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import Death, noted, reference

FSDP, DDP = Setup(world_size=4), Setup("ddp", 4)
slow = pytest.mark.slow


def slowly(*cases: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*case, marks=slow) for case in cases]


# Records on their way


@pytest.mark.promise('acknowledgements that keep coming, with `ack="wait"`')
@pytest.mark.promise("up to m whole nodes of a group: trainers, agents, memory (peers)")
@slow
@pytest.mark.parametrize("setup", [FSDP, pytest.param(DDP, marks=slow)], ids=named)
@pytest.mark.parametrize(
    ("ack", "lost"),
    [("wait", "node1"), pytest.param("wait", "node2", marks=slow), pytest.param("proceed", "node1", marks=slow)],
)
def test_what_was_on_its_way_may_be_lost_and_nothing_that_was_acknowledged(
    lab: Lab, setup: Setup, ack: str, lost: str
) -> None:
    """The replicator of node1 stands still for the last steps before it, or one that keeps its fragments, is lost."""
    job = peers_lab.peers_job(lab, setup, peers_lab.peers_config(2, 2, ack=ack))
    expected = reference(lab, job)
    stands = peers_lab.Act(1, 5, "forward", peers_lab.stop_replicator)
    # One step more, and a training that does not wait would have filled the slots of what is acknowledged anew.
    step = 7 if ack == "wait" else 6
    died = peers_lab.fail(lab, replace(job, protected_at=(4,), acts=[stands]), Death(lost, step, "stepped"))
    if lost != "node1":
        os.kill(peers_lab.replicator_of(died, "node1"), signal.SIGCONT)
    low, high = peers_lab.bounds(died)
    assert low == 5
    last = died.again(lab)
    peers_lab.finishes(lab, last, expected)
    peers_lab.goes_on(last, low, high, ahead=True)


# Agents and replicators die, training goes on


@pytest.mark.promise(
    "agents and replicators may die in mid-run, repeatedly: training goes on according to `ack`, and protection "
    "becomes complete again by itself"
)
@pytest.mark.parametrize(
    ("setup", "ack", "redo", "who", "dies"),
    [
        (Setup(), "wait", "lazy", 1, kill_agent),
        *slowly(
            (FSDP, "wait", "lazy", 1, kill_agent), (DDP, "proceed", "lazy", 0, kill_replicator),
            (FSDP, "wait", "lazy", 0, kill_agent), (FSDP, "proceed", "lazy", 1, kill_agent),
            (FSDP, "wait", "eager", 1, kill_agent), (DDP, "wait", "lazy", 0, kill_agent),
            (DDP, "proceed", "eager", 2, kill_agent), (FSDP, "wait", "lazy", 0, kill_replicator),
            (FSDP, "wait", "lazy", 1, kill_replicator), (FSDP, "proceed", "lazy", 1, kill_replicator),
            (FSDP, "wait", "eager", 1, kill_replicator), (DDP, "wait", "eager", 1, kill_replicator),
            (FSDP, "wait", "lazy", 1, kill_replicators), (FSDP, "wait", "eager", 0, kill_replicators),
            (DDP, "proceed", "lazy", 1, kill_replicators),
        ),
    ],
    ids=named,
)  # fmt: skip
def test_protection_becomes_whole_again_after_the_death_of_an_agent_or_replicator(
    lab: Lab, setup: Setup, ack: str, redo: str, who: int, dies: Callable[[peers_lab.PeersRank], None]
) -> None:
    """A node that is lost after that, another one or the same, is recovered from peers."""
    job = peers_lab.peers_job(lab, setup, peers_lab.peers_config(setup.world_size - 1, 1, redo, ack=ack))
    expected = reference(lab, job)
    acts = [peers_lab.Act(who, 3, "forward", dies)]
    died = peers_lab.fail(lab, replace(job, acts=acts, protected_at=(2, 7)), Death("node1", 8, "backward"))
    assert len(noted(died, "acted")[who]) == 1
    assert [[each["step"] for each in rank] for rank in noted(died, "protected")] == [[2, 7]] * setup.world_size
    peers_lab.recovers(lab, died, expected)


@slow
@pytest.mark.parametrize("dies", [kill_replicator, kill_agent], ids=named)
def test_two_replicators_that_are_replaced_one_after_the_other_find_each_other(
    lab: Lab, dies: Callable[[peers_lab.PeersRank], None]
) -> None:
    """Each has a plan that says where the other one was."""
    job = peers_lab.peers_job(lab, FSDP, peers_lab.peers_config(2, 2))
    expected = reference(lab, job)
    acts = [peers_lab.Act(1, 3, "forward", kill_replicator), peers_lab.Act(3, 3, "forward", dies)]
    died = peers_lab.fail(lab, replace(job, acts=acts, protected_at=(2, 7)), Death("node1,node3", 8, "backward"))
    assert [[each["step"] for each in rank] for rank in noted(died, "protected")] == [[2, 7]] * 4
    peers_lab.recovers(lab, died, expected)


@slow
@pytest.mark.parametrize("redo", ["lazy", "eager"])
@pytest.mark.parametrize("setup", [DDP, FSDP], ids=named)
def test_nobody_waits_for_ranks_that_have_to_get_on_to_begin_anew(lab: Lab, setup: Setup, redo: str) -> None:
    """Two ranks of a node lose their agent: they begin anew together with a later record, which takes all others."""
    job = peers_lab.peers_job(lab, setup, peers_lab.peers_config(1, 1, redo), nodes=2)
    expected = reference(lab, job)
    # Once gradients are reduced the other rank, too, is in that step: before, it may still wait for protection.
    acts = [peers_lab.Act(2, step, "reduced", kill_agent) for step in (3, 6)]
    last = replace(job, acts=acts, protected_at=(2, 9))
    peers_lab.finishes(lab, last, expected)
    assert len(noted(last, "acted")[2]) == 2


# Agents and replicators stand still, training goes on


@pytest.mark.promise("this node's replicator: stopped, deadlocked, dead")
@pytest.mark.promise(
    "a stopped or deadlocked replicator is killed and replaced, a busy one is not; no acknowledged record is lost "
    "with it"
)
@slow
@pytest.mark.parametrize(
    ("setup", "redo", "who"), [(DDP, "eager", 1), (FSDP, "lazy", 1), (FSDP, "lazy", 0), (FSDP, "eager", 2)], ids=named
)
def test_a_replicator_that_is_stopped_is_replaced_and_nothing_acknowledged_is_lost(
    lab: Lab, setup: Setup, redo: str, who: int
) -> None:
    """Nobody lets it go on. Protection becomes whole again, and a node that is lost after that is recovered."""
    settings = peers_lab.peers_config(3, 1, redo, agent=AgentConfig(linger_seconds=60.0, liveness_seconds=2.0))
    job = peers_lab.peers_job(lab, setup, settings)
    expected = reference(lab, job)
    acts = [peers_lab.Act(who, 3, "forward", peers_lab.stop_replicator)]
    died = peers_lab.fail(lab, replace(job, acts=acts, protected_at=(2, 7)), Death("node1", 8, "backward"))
    assert [[each["step"] for each in rank] for rank in noted(died, "protected")] == [[2, 7]] * 4
    assert peers_lab.told(lab).count("it shows no sign of life") == 1
    peers_lab.recovers(lab, died, expected)


@pytest.mark.promise("a silent node whose trainers are known to be alive")
@pytest.mark.promise(
    "if the replicator or the agent of a node hangs, or both, training that waits for peers goes on without the "
    "node after a deadline, reports it, and is protected again when the node is back"
)
@pytest.mark.parametrize(
    ("setup", "redo", "who", "stops"),
    slowly(
        (DDP, "lazy", 1, stop_both), (DDP, "lazy", 1, stop_agent), (FSDP, "lazy", 2, stop_both),
        (FSDP, "lazy", 0, stop_both), (FSDP, "lazy", 0, stop_agent), (FSDP, "eager", 1, stop_both),
        (DDP, "eager", 1, stop_agent),
    ),
    ids=named,
)  # fmt: skip
def test_training_goes_on_without_a_node_that_stands_still_and_with_it_when_it_is_back(
    lab: Lab, setup: Setup, redo: str, who: int, stops: Callable[[peers_lab.PeersRank], None]
) -> None:
    """Where it would wait for that node's acknowledgements. A node that is lost after that is recovered."""
    agent = AgentConfig(linger_seconds=60.0, liveness_seconds=2.0)
    settings = peers_lab.peers_config(3, 1, redo, agent=agent, ack_timeout_seconds=2.0)
    job = peers_lab.peers_job(lab, setup, settings, last_step=20)
    expected = reference(lab, job)
    acts = [peers_lab.Act(who, 3, "forward", stops), peers_lab.Act(who, 10, "forward", peers_lab.continue_both)]
    died = peers_lab.fail(lab, replace(job, acts=acts, protected_at=(2, 16)), Death("node3", 17, "backward"))
    assert len(noted(died, "acted")[who]) == 2
    assert [[each["step"] for each in rank] for rank in noted(died, "protected")] == [[2, 16]] * 4
    peers_lab.recovers(lab, died, expected)
