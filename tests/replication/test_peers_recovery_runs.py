"""Nodes, replicators and fragments are lost while others recover from them: what is left serves, or is named."""

from __future__ import annotations

import os
import select
import signal
from dataclasses import replace

import pytest

from memckpt.config import AgentConfig
from tests.support.cluster.peers_lab import (
    Act,
    agent_of,
    bounds,
    continue_replicator,
    damage,
    fail,
    finishes,
    goes_on,
    kill_nodes,
    kill_once,
    kill_replicator,
    loses,
    peers_config,
    peers_job,
    recovers,
    recovers_with,
    replicator_of,
    start,
    stored_job,
    survives,
    told,
)
from tests.support.cluster.processes import kill_and_wait
from tests.support.cluster.sharded_cases import Setup, check_verdict, named
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import Death, logs, noted, reference

FSDP, DDP = Setup(world_size=4), Setup("ddp", 4)
slow = pytest.mark.slow
#: A replicator that stands still is not replaced.
LEFT_ALONE = AgentConfig(linger_seconds=60.0, liveness_seconds=600.0)


# During recovery


def wait_for(fd: int) -> None:
    """Until a byte is in a pipe; once it has been, those that follow need not wait."""
    if fd not in waited_for:
        waited_for.add(fd)
        assert select.select([fd], [], [], 30)[0]
        os.read(fd, 1)


def send_to(fd: int, count: int) -> None:
    if fd not in waited_for:
        waited_for.add(fd)
        os.write(fd, bytes(count))


waited_for: set[int] = set()


def lost_in_recovery(lab: Lab, setup: Setup, tolerate: int, first: str, second: str) -> None:
    """A node is lost, and while others fetch and hand out what it had, one more."""
    job = peers_job(lab, setup, peers_config(4 - tolerate, tolerate))
    expected = reference(lab, job)
    died = fail(lab, replace(job, protected_at=(5,)), Death(first, 6, "backward"))
    attempt = died.again(lab)
    asked = [rank for rank in range(4) if job.node(rank) == second]
    codes = start(
        lab, replace(attempt, prepare=recovers_with(asked, lambda rank: kill_nodes(attempt, [second], itself=True)))
    )
    assert all(codes[rank] == -9 for rank in asked)
    assert 0 not in codes
    assert not any(noted(attempt, "restored"))
    recovers(lab, attempt, expected, *bounds(died), config=job.config)


@slow
@pytest.mark.parametrize(
    ("setup", "tolerate", "second"),
    [
        pytest.param(FSDP, 1, "node1", marks=slow),
        pytest.param(FSDP, 2, "node2", marks=slow),
        pytest.param(FSDP, 2, "node3", marks=slow),
        (DDP, 1, "node1"),
        pytest.param(DDP, 2, "node0", marks=slow),
    ],
    ids=named,
)
def test_a_node_is_lost_while_it_fetches_or_serves(lab: Lab, setup: Setup, tolerate: int, second: str) -> None:
    lost_in_recovery(lab, setup, tolerate, "node1", second)


@slow
@pytest.mark.parametrize("setup", [FSDP, DDP], ids=named)
def test_reads_around_a_holder_that_has_gone_silent(lab: Lab, setup: Setup) -> None:
    """In the same attempt; it comes to its senses when training has begun, and nobody has replaced it until then."""
    job = peers_job(lab, setup, peers_config(2, 2, agent=LEFT_ALONE))
    died, expected = loses(lab, job, 6)
    attempt = died.again(lab)
    begin, _ = bounds(died)
    goes = [Act(2, step, "forward", continue_replicator) for step in (begin, begin + 1)]
    attempt = replace(attempt, acts=goes)
    silence = recovers_with([2], lambda rank: os.kill(replicator_of(attempt, "node2"), signal.SIGSTOP))
    finishes(lab, replace(attempt, prepare=silence), expected)
    goes_on(attempt, *bounds(died))
    assert "has not answered for" in told(lab)


@pytest.mark.promise(
    "fragments survive the replicator that kept them, whether it dies in training, between attempts or in a "
    "recovery; dropped or incomplete ones are not used"
)
@slow
@pytest.mark.parametrize("setup", [FSDP, DDP], ids=named)
def test_fragments_outlive_the_replicators_that_kept_them(lab: Lab, setup: Setup) -> None:
    """A node is lost, then the replicators of all others die, one of them once more as it is asked for fragments."""
    job = peers_job(lab, setup, peers_config(3, 1))
    died, expected = loses(lab, job, 6)
    for name in ("node0", "node2", "node3"):
        kill_and_wait(replicator_of(died, name))
    attempt = died.again(lab)
    dies = recovers_with([1], lambda rank: kill_once(attempt, "node2"))
    finishes(lab, replace(attempt, prepare=dies), expected)
    goes_on(attempt, *bounds(died))


@pytest.mark.promise(
    "fragments survive the replicator that kept them, whether it dies in training, between attempts or in a "
    "recovery; dropped or incomplete ones are not used"
)
@slow
@pytest.mark.parametrize("setup", [FSDP, DDP], ids=named)
@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_a_node_is_lost_as_the_replicators_of_others_die(lab: Lab, setup: Setup, redo: str) -> None:
    """What was acknowledged is with those who take their place: (3, 1) needs the fragments of all three."""
    job = peers_job(lab, setup, peers_config(3, 1, redo))
    expected = reference(lab, job)
    acts = [Act(rank, 6, "backward", kill_replicator) for rank in (0, 2, 3)]
    died = fail(lab, replace(job, protected_at=(5,), acts=acts), Death("node1", 6, "backward"))
    recovers(lab, died, expected, 4, 6)


@pytest.mark.promise(
    "a silent node is asked again if a resume would go back further without it, and its fragments are not dropped "
    "before a new attempt is protected"
)
@slow
def test_a_silent_holder_that_is_needed_is_waited_for(lab: Lab) -> None:
    """With (3, 1) nobody can be done without. It is asked for a check as well, then without, and then once more."""
    job = peers_job(lab, FSDP, peers_config(3, 1, agent=LEFT_ALONE))
    died, expected = loses(lab, job, 6)
    attempt = died.again(lab)
    signals = iter([signal.SIGSTOP, signal.SIGSTOP])
    silence = recovers_with([2], lambda rank: os.kill(replicator_of(attempt, "node2"), next(signals, signal.SIGCONT)))
    finishes(lab, replace(attempt, prepare=silence), expected)
    goes_on(attempt, *bounds(died))
    assert "node2 did not answer, and step" in told(lab)


@pytest.mark.promise(
    "a start that can resume nothing without a silent node ends with an error after its patience, and drops nothing"
)
@slow
def test_a_start_that_silence_has_ended_is_made_good_by_the_next(lab: Lab) -> None:
    """Nothing else can be resumed, and what is held stays where it is."""
    job = peers_job(lab, FSDP, peers_config(3, 1, agent=LEFT_ALONE, recovery_patience_seconds=0.1))
    died, expected = loses(lab, job, 6)
    assert job.config is not None
    attempt = died.again(lab, config=replace(job.config, resume_check="off"))  # nothing is asked for a check as well
    silence = recovers_with([2], lambda rank: os.kill(replicator_of(attempt, "node2"), signal.SIGSTOP))
    assert 0 not in start(lab, replace(attempt, prepare=silence))
    assert "PeerError: expected an answer of node2, found none for 0 s; step" in told(lab)
    os.kill(replicator_of(attempt, "node2"), signal.SIGCONT)
    recovers(lab, attempt, expected, *bounds(died), config=job.config)


@slow
@pytest.mark.parametrize("setup", [FSDP, DDP], ids=named)
def test_a_replicator_that_dies_while_it_fetches_is_replaced(lab: Lab, setup: Setup) -> None:
    job = peers_job(lab, setup, peers_config(2, 2))
    died, expected = loses(lab, job, 6)
    attempt = died.again(lab)
    dies = recovers_with([1], lambda rank: kill_once(attempt, "node1"))
    finishes(lab, replace(attempt, prepare=dies), expected)
    goes_on(attempt, *bounds(died))


@slow
@pytest.mark.parametrize("setup", [DDP, pytest.param(FSDP, marks=slow)], ids=named)
def test_nobody_fetches_before_the_others_hand_out(lab: Lab, setup: Setup) -> None:
    """However late they are asked to: each of the others waits for rank 1, whose node fetches."""
    job = peers_job(lab, setup, peers_config(3, 1))
    died, expected = loses(lab, job, 6)
    read_fd, write_fd = os.pipe()
    late = recovers_with([0, 2, 3], lambda rank: wait_for(read_fd), lambda rank: send_to(write_fd, 3))
    # Ranks of DDP have all that there is to hand out, and only that travels; those of FSDP come back elsewhere for it.
    names = () if setup is DDP else ("node2", "fresh", "node3", "node0")
    recovers(lab, died, expected, prepare=late, names=names)
    assert logs(lab).count("comes from peers") == 1  # and nothing had to be tried again
    os.close(read_fd)
    os.close(write_fd)


# Damage


@pytest.mark.promise("up to m whole nodes of a group: trainers, agents, memory (peers)")
@slow
@pytest.mark.parametrize("setup", [FSDP, DDP], ids=named)
@pytest.mark.parametrize("every", [1, 5000])
def test_damaged_fragments_are_decoded_around(lab: Lab, setup: Setup, every: int) -> None:
    job = peers_job(lab, setup, peers_config(2, 2))
    died, expected = loses(lab, job, 6)
    assert damage(replicator_of(died, "node2"), every) > 0
    recovers(lab, died, expected)
    assert "cannot be read from node2" in told(lab)


@slow
@pytest.mark.parametrize(
    ("stored", "setup"),
    [pytest.param(True, FSDP, marks=slow), pytest.param(False, FSDP, marks=slow), (True, DDP)],
    ids=named,
)
def test_more_damage_than_the_code_bears_names_the_ranks_and_falls_to_storage(
    lab: Lab, stored: bool, setup: Setup
) -> None:
    job = stored_job(lab, setup, 3, 1) if stored else peers_job(lab, setup, peers_config(3, 1))
    died, expected = loses(lab, job, 7)
    assert damage(replicator_of(died, "node2")) > 0
    recovers(lab, died, expected, 4 * stored, 4 * stored, "storage", **({} if stored else {"number": 0}))
    said = told(lab)
    assert "memory cannot produce the states of all ranks (ranks [1]:" in said
    assert "2 of 3 fragments needed" in said


# Nothing is left


@pytest.mark.promise(
    "after the loss of nodes the step is repeated from copies, from fragments of private state together with "
    "another node, or from the ranks' old nodes; also if the same node is lost again in that step, or the step "
    "differs"
)
@slow
@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_a_state_from_peers_is_proved_by_repeating_its_last_step(lab: Lab, redo: str) -> None:
    """Decoded for the lost node, held by the others: all of them have the record before."""
    job = peers_job(lab, FSDP, peers_config(2, 2, redo))
    last = survives(lab, job, [Death("node1", 5, "backward")], protected_before=1)
    assert check_verdict(last) == {"equal"}, told(lab)


@slow
@pytest.mark.parametrize("setup", [FSDP, DDP], ids=named)
@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_a_state_that_every_node_still_has_is_proved_alike(lab: Lab, setup: Setup, redo: str) -> None:
    """A trainer dies and no node: behind the repeated step a generation begins, which is sent to peers."""
    job = peers_job(lab, setup, peers_config(3, 1, redo))
    expected = reference(lab, job)
    last = fail(lab, job, Death(1, 5, "backward")).again(lab)
    finishes(lab, last, expected)
    assert goes_on(last, 5, 5, "local memory") == 5
    assert check_verdict(last) == {"equal"}, told(lab)


@slow
def test_replicators_end_with_their_agents(lab: Lab) -> None:
    """Both ways to end: the agent leaves, and the agent is killed."""
    job = peers_job(lab, FSDP, peers_config(1, 1))
    died = fail(lab, replace(job, protected_at=(1,)), Death("node1", 2, "backward"))
    replicators = {name: os.pidfd_open(replicator_of(died, name)) for name in ("node0", "node2", "node3")}
    agent = agent_of(died, "node2")
    assert agent is not None
    kill_and_wait(agent)
    finishes(lab, died.again(lab), reference(lab, job))
    for name, handle in replicators.items():
        assert select.select([handle], [], [], 20)[0], f"the replicator of {name} lives on"
        os.close(handle)
