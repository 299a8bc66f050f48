"""Nodes are lost for real, and training goes on from what their peers keep: bit for bit the undisturbed one."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from memckpt.config import AgentConfig, StorageConfig
from tests.support.cluster.peers_lab import (
    Act,
    PeersJob,
    PeersRank,
    agent_of,
    bounds,
    continue_both,
    continue_replicator,
    damage,
    fail,
    falls_to_storage,
    finishes,
    goes_on,
    kill_agent,
    kill_nodes,
    kill_once,
    kill_replicator,
    kill_replicators,
    peers_config,
    peers_job,
    recovers_with,
    replicator_of,
    start,
    stop_agent,
    stop_both,
    stop_here,
    stop_replicator,
    survives,
    told,
)
from tests.support.cluster.processes import kill_and_wait
from tests.support.cluster.sharded_cases import Setup, named
from tests.support.cluster.sharded_lab import Death, check_verdict, fresh_directory, logs, noted, reference
from tests.support.trainings.engine_harness import Lab

FSDP, DDP, HSDP = Setup(world_size=4), Setup("ddp", 4), Setup("hsdp", 4)
FSDP6, DDP6 = Setup(world_size=6), Setup("ddp", 6)
PLACES = ["forward", "backward", "reduced", "in step", "stepped", "in commit", "committed"]
slow = pytest.mark.slow
#: A replicator that stands still is not replaced.
LEFT_ALONE = AgentConfig(linger_seconds=60.0, liveness_seconds=600.0)


# Nodes die


@pytest.mark.parametrize(
    ("setup", "data", "tolerate", "redo", "losses"),
    [
        (FSDP, 2, 2, "lazy", 2),
        pytest.param(FSDP, 2, 2, "lazy", 3, marks=slow),
        pytest.param(DDP, 3, 1, "lazy", 3, marks=slow),
        pytest.param(FSDP, 1, 1, "eager", 3, marks=slow),
        pytest.param(FSDP, 3, 1, "eager", 3, marks=slow),
        pytest.param(DDP, 1, 1, "lazy", 3, marks=slow),
        pytest.param(DDP, 2, 2, "eager", 3, marks=slow),
        pytest.param(FSDP6, 1, 1, "lazy", 3, marks=slow),
        pytest.param(FSDP6, 3, 1, "lazy", 3, marks=slow),
        pytest.param(FSDP6, 2, 2, "lazy", 3, marks=slow),
        pytest.param(FSDP6, 4, 2, "lazy", 3, marks=slow),
        pytest.param(FSDP6, 4, 2, "eager", 3, marks=slow),
        pytest.param(DDP6, 1, 1, "eager", 3, marks=slow),
        pytest.param(DDP6, 3, 1, "lazy", 3, marks=slow),
        pytest.param(DDP6, 2, 2, "lazy", 3, marks=slow),
        pytest.param(DDP6, 4, 2, "lazy", 3, marks=slow),
    ],
    ids=named,
)
def test_goes_on_from_peers_when_nodes_are_lost(
    lab: Lab, setup: Setup, data: int, tolerate: int, redo: str, losses: int
) -> None:
    """One after the other and neighbours at once, early and late, the same one twice."""
    both = "node1,node2" if tolerate > 1 else "node3"
    deaths = [Death("node1", 3, "backward"), Death(both, 6, "in commit"), Death("node1", 8, "committed")]
    survives(lab, peers_job(lab, setup, peers_config(data, tolerate, redo)), deaths[:losses], protected_before=1)


@slow
@pytest.mark.parametrize(
    ("setup", "data", "tolerate", "redo"),
    [(FSDP, 3, 1, "lazy"), (FSDP, 2, 2, "eager"), (DDP, 1, 1, "eager"), (DDP, 2, 2, "lazy"), (FSDP6, 4, 2, "lazy")],
    ids=named,
)
def test_goes_on_from_peers_wherever_a_node_is_lost(
    lab: Lab, setup: Setup, data: int, tolerate: int, redo: str
) -> None:
    """At each place, with records on their way: no less than what was acknowledged.

    DDP lays out its buckets anew after its first backward, and four ranks sum in another order then: no attempt goes
    on from the first record.
    """
    last = setup.world_size - 1
    lost = [f"node{index % setup.world_size}" + f",node{last}" * (tolerate > 1) for index in range(len(PLACES))]
    deaths = [Death(who, 2 * number + 3, place) for number, (who, place) in enumerate(zip(lost, PLACES, strict=True))]
    job = peers_job(lab, setup, peers_config(data, tolerate, redo), last_step=17)
    survives(lab, job, deaths, protected_before=2)


@slow
@pytest.mark.parametrize(
    "setup",
    [
        HSDP,
        Setup(world_size=4, scaler=True),
        Setup(world_size=4, accumulate=2),
        Setup(world_size=4, precision="bf16"),
        Setup(world_size=4, table=True),
        Setup("ddp", 4, scaler=True),
        Setup("ddp", 4, table=True),
        Setup("fsdp-tp", 4),
    ],
    ids=named,
)
@pytest.mark.parametrize(("data", "tolerate"), [(1, 1), (2, 2)])
def test_goes_on_from_peers_in_other_trainings(lab: Lab, setup: Setup, data: int, tolerate: int) -> None:
    deaths = [Death("node1", 2, "backward"), Death("node2" + ",node3" * (tolerate > 1), 6, "stepped")]
    survives(lab, peers_job(lab, setup, peers_config(data, tolerate)), deaths, protected_before=1)


@slow
@pytest.mark.parametrize("setup", [Setup(world_size=8), Setup("ddp", 8), Setup("hsdp", 8)], ids=named)
def test_goes_on_from_peers_with_two_ranks_to_a_node(lab: Lab, setup: Setup) -> None:
    deaths = [Death("node1", 3, "backward"), Death("node2,node3", 6, "stepped")]
    survives(lab, peers_job(lab, setup, peers_config(2, 2), nodes=4), deaths, protected_before=1)


@slow
def test_ranks_that_nobody_ends_notice_that_a_node_is_lost(lab: Lab) -> None:
    survives(
        lab,
        peers_job(lab, FSDP, peers_config(3, 1), launcher=False),
        [Death("node2", 4, "reduced")],
        protected_before=1,
    )


@slow
@pytest.mark.parametrize("setup", [FSDP, pytest.param(DDP, marks=slow)], ids=named)
def test_what_only_the_lost_node_had_committed_is_done_again(lab: Lab, setup: Setup) -> None:
    """The owner is ahead of all the others, who stand in their commits."""
    job = peers_job(lab, setup, peers_config(2, 2))
    expected = reference(lab, job)
    stand = [Act(rank, 5, "in commit", stop_here) for rank in (0, 2, 3)]
    died = fail(lab, replace(job, acts=stand, protected_at=(4,)), Death("node1", 5, "committed"))
    last = died.again(lab)
    finishes(lab, last, expected)
    goes_on(last, 5, 5)


@slow
@pytest.mark.parametrize(
    ("setup", "step", "place"),
    [
        (FSDP, 0, "backward"),
        pytest.param(FSDP, 1, "stepped", marks=slow),
        pytest.param(DDP, 0, "backward", marks=slow),
    ],
    ids=named,
)
def test_starts_over_when_a_node_is_lost_before_anything_is_protected(
    lab: Lab, setup: Setup, step: int, place: str
) -> None:
    job = peers_job(lab, setup, peers_config(3, 1))
    expected = reference(lab, job)
    died = fail(lab, job, Death("node1", step, place))
    last = died.again(lab, number=0)
    finishes(lab, last, expected)
    goes_on(last, *bounds(died))
    if step == 0:
        goes_on(last, 0, 0)


# More is lost than can be borne


def stored_job(lab: Lab, setup: Setup, data: int, tolerate: int) -> PeersJob:
    """Step 4 is in storage when steps after 5 are trained."""
    settings = peers_config(data, tolerate, storage=StorageConfig(every_steps=4))
    return peers_job(lab, setup, settings, wait_at=5)


@pytest.mark.parametrize(
    ("setup", "data", "tolerate", "lost"),
    [
        pytest.param(FSDP, 3, 1, "node1,node2", marks=slow),
        pytest.param(FSDP, 2, 2, "node1,node2,node3", marks=slow),
        pytest.param(DDP, 2, 2, "node0,node1,node3", marks=slow),
        pytest.param(DDP, 3, 1, "node0,node1,node2,node3", marks=slow),
        pytest.param(FSDP6, 4, 2, "node0,node2,node4", marks=slow),
    ],
    ids=named,
)
def test_falls_to_storage_when_more_nodes_are_lost_than_tolerated(
    lab: Lab, setup: Setup, data: int, tolerate: int, lost: str
) -> None:
    falls_to_storage(lab, stored_job(lab, setup, data, tolerate), lost)


@slow
@pytest.mark.parametrize("setup", [FSDP, pytest.param(DDP, marks=slow)], ids=named)
def test_starts_over_when_too_much_is_lost_and_nothing_is_stored(lab: Lab, setup: Setup) -> None:
    job = peers_job(lab, setup, peers_config(3, 1))
    expected = reference(lab, job)
    names = ",".join(job.node_names[1:] if setup is FSDP else job.node_names)
    died = fail(lab, replace(job, protected_at=(4,)), Death(names, 5, "backward"))
    last = died.again(lab, number=0)
    finishes(lab, last, expected)
    goes_on(last, 0, 0)
    assert "starting over: " + ("memory cannot produce" if setup is FSDP else "nothing is held") in told(lab)


def lost_again_before_protection(lab: Lab, job: PeersJob, second: str) -> tuple[PeersJob, Sequence[object]]:
    """A node is lost, and another one before the first step behind the recovery; the attempt that follows."""
    expected = reference(lab, job)
    first = fail(lab, replace(job, protected_at=(6,)), Death("node1", 7, "backward"))
    begin = bounds(first)[0]
    again = fail(lab, first.again(lab), Death(second, begin, "forward"))
    goes_on(again, begin, begin + 1)
    return again.again(lab), expected


@slow
@pytest.mark.parametrize("setup", [FSDP])
def test_falls_to_storage_when_a_second_node_is_lost_before_protection_is_whole(lab: Lab, setup: Setup) -> None:
    last, expected = lost_again_before_protection(lab, stored_job(lab, setup, 3, 1), "node2")
    finishes(lab, last, expected)
    goes_on(last, 4, 4, "storage")
    assert "2 of 3 fragments needed are left" in told(lab)


@slow
def test_starts_over_when_a_second_node_is_lost_before_protection_is_whole(lab: Lab) -> None:
    job = peers_job(lab, FSDP, peers_config(3, 1))
    last, expected = lost_again_before_protection(lab, job, "node2")
    last = replace(last, number=0)
    finishes(lab, last, expected)
    goes_on(last, 0, 0)
    assert "2 of 3 fragments needed are left" in told(lab)


@slow
@pytest.mark.parametrize(("setup", "data", "tolerate"), [(FSDP, 3, 1), (DDP, 3, 1), (FSDP, 2, 2), (DDP, 2, 2)])
def test_the_same_node_is_lost_again_before_protection_is_whole(
    lab: Lab, setup: Setup, data: int, tolerate: int
) -> None:
    """Its records are still where they were; so are they when one more is lost than the first time, of two."""
    job = peers_job(lab, setup, peers_config(data, tolerate))
    last, expected = lost_again_before_protection(lab, job, "node1" + ",node2" * (tolerate > 1))
    finishes(lab, last, expected)
    goes_on(last, 7, 8)


# Ranks come back elsewhere


@pytest.mark.parametrize(
    ("setup", "who", "names"),
    [
        pytest.param(FSDP, "node1", ("node2", "fresh", "node3", "node0"), marks=slow),
        pytest.param(FSDP, 1, ("node1", "node2", "node3", "node0"), marks=slow),
        pytest.param(DDP, 1, ("node1", "node2", "node3", "node0"), marks=slow),
        pytest.param(DDP, "node1", ("node2", "fresh", "node3", "node0"), marks=slow),
        pytest.param(FSDP, "node1", ("node0", "fresh", "node2", "node3"), marks=slow),
        pytest.param(FSDP, "node1", ("node0", "node2", "node1", "node3"), marks=slow),
        pytest.param(Setup(world_size=8), "node1", ("node2", "fresh", "node3", "node0"), marks=slow),
    ],
    ids=named,
)
def test_ranks_come_back_on_other_nodes(lab: Lab, setup: Setup, who: int | str, names: tuple[str, ...]) -> None:
    job = peers_job(lab, setup, peers_config(3, 1), nodes=4)
    expected = reference(lab, job)
    died = fail(lab, replace(job, protected_at=(3,)), Death(who, 4, "backward"))
    moved = fail(lab, died.again(lab, names=names, protected_at=(6,)), Death(names[0], 7, "stepped"))
    goes_on(moved, *bounds(died))
    last = moved.again(lab, directory=fresh_directory(lab))
    finishes(lab, last, expected)
    goes_on(last, *bounds(moved))
    # What was handed out for those that had moved, too, is proved by repeating its last step.
    assert check_verdict(moved) == check_verdict(last) == {"equal"}


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
    last = attempt.again(lab, config=job.config)
    finishes(lab, last, expected)
    goes_on(last, *bounds(died))


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
    expected = reference(lab, job)
    died = fail(lab, replace(job, protected_at=(5,)), Death("node1", 6, "backward"))
    attempt = died.again(lab)
    begin, _ = bounds(died)
    goes = [Act(2, step, "forward", continue_replicator) for step in (begin, begin + 1)]
    attempt = replace(attempt, acts=goes)
    silence = recovers_with([2], lambda rank: os.kill(replicator_of(attempt, "node2"), signal.SIGSTOP))
    finishes(lab, replace(attempt, prepare=silence), expected)
    goes_on(attempt, *bounds(died))
    assert "has not answered for" in told(lab)


@slow
@pytest.mark.parametrize("setup", [FSDP, DDP], ids=named)
def test_fragments_outlive_the_replicators_that_kept_them(lab: Lab, setup: Setup) -> None:
    """A node is lost, then the replicators of all others die, one of them once more as it is asked for fragments."""
    job = peers_job(lab, setup, peers_config(3, 1))
    expected = reference(lab, job)
    died = fail(lab, replace(job, protected_at=(5,)), Death("node1", 6, "backward"))
    for name in ("node0", "node2", "node3"):
        kill_and_wait(replicator_of(died, name))
    attempt = died.again(lab)
    dies = recovers_with([1], lambda rank: kill_once(attempt, "node2"))
    finishes(lab, replace(attempt, prepare=dies), expected)
    goes_on(attempt, *bounds(died))


@slow
@pytest.mark.parametrize("setup", [FSDP, DDP], ids=named)
@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_a_node_is_lost_as_the_replicators_of_others_die(lab: Lab, setup: Setup, redo: str) -> None:
    """What was acknowledged is with those who take their place: (3, 1) needs the fragments of all three."""
    job = peers_job(lab, setup, peers_config(3, 1, redo))
    expected = reference(lab, job)
    acts = [Act(rank, 6, "backward", kill_replicator) for rank in (0, 2, 3)]
    died = fail(lab, replace(job, protected_at=(5,), acts=acts), Death("node1", 6, "backward"))
    attempt = died.again(lab)
    finishes(lab, attempt, expected)
    goes_on(attempt, 4, 6)


@slow
def test_a_silent_holder_that_is_needed_is_waited_for(lab: Lab) -> None:
    """With (3, 1) nobody can be done without. It is asked for a check as well, then without, and then once more."""
    job = peers_job(lab, FSDP, peers_config(3, 1, agent=LEFT_ALONE))
    expected = reference(lab, job)
    died = fail(lab, replace(job, protected_at=(5,)), Death("node1", 6, "backward"))
    attempt = died.again(lab)
    signals = iter([signal.SIGSTOP, signal.SIGSTOP])
    silence = recovers_with([2], lambda rank: os.kill(replicator_of(attempt, "node2"), next(signals, signal.SIGCONT)))
    finishes(lab, replace(attempt, prepare=silence), expected)
    goes_on(attempt, *bounds(died))
    assert "node2 did not answer, and step" in told(lab)


@slow
def test_a_start_that_silence_has_ended_is_made_good_by_the_next(lab: Lab) -> None:
    """Nothing else can be resumed, and what is held stays where it is."""
    job = peers_job(lab, FSDP, peers_config(3, 1, agent=LEFT_ALONE, recovery_patience_seconds=0.1))
    expected = reference(lab, job)
    died = fail(lab, replace(job, protected_at=(5,)), Death("node1", 6, "backward"))
    assert job.config is not None
    attempt = died.again(lab, config=replace(job.config, resume_check="off"))  # nothing is asked for a check as well
    silence = recovers_with([2], lambda rank: os.kill(replicator_of(attempt, "node2"), signal.SIGSTOP))
    assert 0 not in start(lab, replace(attempt, prepare=silence))
    assert "PeerError: expected an answer of node2, found none for 0 s; step" in told(lab)
    os.kill(replicator_of(attempt, "node2"), signal.SIGCONT)
    last = attempt.again(lab, config=job.config)
    finishes(lab, last, expected)
    goes_on(last, *bounds(died))


@slow
@pytest.mark.parametrize("setup", [FSDP, DDP], ids=named)
def test_a_replicator_that_dies_while_it_fetches_is_replaced(lab: Lab, setup: Setup) -> None:
    job = peers_job(lab, setup, peers_config(2, 2))
    expected = reference(lab, job)
    died = fail(lab, replace(job, protected_at=(5,)), Death("node1", 6, "backward"))
    attempt = died.again(lab)
    dies = recovers_with([1], lambda rank: kill_once(attempt, "node1"))
    finishes(lab, replace(attempt, prepare=dies), expected)
    goes_on(attempt, *bounds(died))


@slow
@pytest.mark.parametrize("setup", [DDP, pytest.param(FSDP, marks=slow)], ids=named)
def test_nobody_fetches_before_the_others_hand_out(lab: Lab, setup: Setup) -> None:
    """However late they are asked to: each of the others waits for rank 1, whose node fetches."""
    job = peers_job(lab, setup, peers_config(3, 1))
    expected = reference(lab, job)
    died = fail(lab, replace(job, protected_at=(5,)), Death("node1", 6, "backward"))
    read_fd, write_fd = os.pipe()
    late = recovers_with([0, 2, 3], lambda rank: wait_for(read_fd), lambda rank: send_to(write_fd, 3))
    # Where each rank has all there is to hand out, only that travels; FSDP's come back elsewhere for it.
    names = () if setup is DDP else ("node2", "fresh", "node3", "node0")
    last = died.again(lab, prepare=late, names=names)
    finishes(lab, last, expected)
    goes_on(last, *bounds(died))
    assert logs(lab).count("comes from peers") == 1  # and nothing had to be tried again
    os.close(read_fd)
    os.close(write_fd)


# Records on their way


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
    job = peers_job(lab, setup, peers_config(2, 2, ack=ack))
    expected = reference(lab, job)
    stands = Act(1, 5, "forward", stop_replicator)
    # One step more, and a training that does not wait would have filled the slots of what is acknowledged anew.
    step = 7 if ack == "wait" else 6
    died = fail(lab, replace(job, protected_at=(4,), acts=[stands]), Death(lost, step, "stepped"))
    if lost != "node1":
        os.kill(replicator_of(died, "node1"), signal.SIGCONT)
    low, high = bounds(died)
    assert low == 5
    last = died.again(lab)
    finishes(lab, last, expected)
    goes_on(last, low, high, ahead=True)


# Agents and replicators die, training goes on


@pytest.mark.parametrize(
    ("setup", "ack", "redo", "who", "dies"),
    [
        (Setup(), "wait", "lazy", 1, kill_agent),
        pytest.param(FSDP, "wait", "lazy", 1, kill_agent, marks=slow),
        pytest.param(DDP, "proceed", "lazy", 0, kill_replicator, marks=slow),
        pytest.param(FSDP, "wait", "lazy", 0, kill_agent, marks=slow),
        pytest.param(FSDP, "proceed", "lazy", 1, kill_agent, marks=slow),
        pytest.param(FSDP, "wait", "eager", 1, kill_agent, marks=slow),
        pytest.param(DDP, "wait", "lazy", 0, kill_agent, marks=slow),
        pytest.param(DDP, "proceed", "eager", 2, kill_agent, marks=slow),
        pytest.param(FSDP, "wait", "lazy", 0, kill_replicator, marks=slow),
        pytest.param(FSDP, "wait", "lazy", 1, kill_replicator, marks=slow),
        pytest.param(FSDP, "proceed", "lazy", 1, kill_replicator, marks=slow),
        pytest.param(FSDP, "wait", "eager", 1, kill_replicator, marks=slow),
        pytest.param(DDP, "wait", "eager", 1, kill_replicator, marks=slow),
        pytest.param(FSDP, "wait", "lazy", 1, kill_replicators, marks=slow),
        pytest.param(FSDP, "wait", "eager", 0, kill_replicators, marks=slow),
        pytest.param(DDP, "proceed", "lazy", 1, kill_replicators, marks=slow),
    ],
    ids=named,
)
def test_protection_becomes_whole_again_after_the_death_of_an_agent_or_replicator(
    lab: Lab, setup: Setup, ack: str, redo: str, who: int, dies: Callable[[PeersRank], None]
) -> None:
    """A node that is lost after that, another one or the same, is recovered from peers."""
    job = peers_job(lab, setup, peers_config(setup.world_size - 1, 1, redo, ack=ack))
    expected = reference(lab, job)
    acts = [Act(who, 3, "forward", dies)]
    died = fail(lab, replace(job, acts=acts, protected_at=(2, 7)), Death("node1", 8, "backward"))
    assert len(noted(died, "acted")[who]) == 1
    assert [[each["step"] for each in rank] for rank in noted(died, "protected")] == [[2, 7]] * setup.world_size
    last = died.again(lab)
    finishes(lab, last, expected)
    goes_on(last, *bounds(died))


@slow
@pytest.mark.parametrize("redo", ["lazy", "eager"])
@pytest.mark.parametrize("setup", [DDP, FSDP], ids=named)
def test_nobody_waits_for_ranks_that_have_to_get_on_to_begin_anew(lab: Lab, setup: Setup, redo: str) -> None:
    """Two ranks of a node lose their agent: they begin anew together with a later record, which takes all others."""
    job = peers_job(lab, setup, peers_config(1, 1, redo), nodes=2)
    expected = reference(lab, job)
    # Once gradients are reduced the other rank, too, is in that step: before, it may still wait for protection.
    acts = [Act(2, step, "reduced", kill_agent) for step in (3, 6)]
    last = replace(job, acts=acts, protected_at=(2, 9))
    finishes(lab, last, expected)
    assert len(noted(last, "acted")[2]) == 2


# Agents and replicators stand still, training goes on


@slow
@pytest.mark.parametrize(
    ("setup", "redo", "who"),
    [
        (DDP, "eager", 1),
        (FSDP, "lazy", 1),
        (FSDP, "lazy", 0),
        (FSDP, "eager", 2),
    ],
    ids=named,
)
def test_a_replicator_that_is_stopped_is_replaced_and_nothing_acknowledged_is_lost(
    lab: Lab, setup: Setup, redo: str, who: int
) -> None:
    """Nobody lets it go on. Protection becomes whole again, and a node that is lost after that is recovered."""
    settings = peers_config(3, 1, redo, agent=AgentConfig(linger_seconds=60.0, liveness_seconds=2.0))
    job = peers_job(lab, setup, settings)
    expected = reference(lab, job)
    acts = [Act(who, 3, "forward", stop_replicator)]
    died = fail(lab, replace(job, acts=acts, protected_at=(2, 7)), Death("node1", 8, "backward"))
    assert [[each["step"] for each in rank] for rank in noted(died, "protected")] == [[2, 7]] * 4
    assert told(lab).count("it shows no sign of life") == 1
    last = died.again(lab)
    finishes(lab, last, expected)
    goes_on(last, *bounds(died))


@pytest.mark.parametrize(
    ("setup", "redo", "who", "stops"),
    [
        pytest.param(DDP, "lazy", 1, stop_both, marks=slow),
        pytest.param(DDP, "lazy", 1, stop_agent, marks=slow),
        pytest.param(FSDP, "lazy", 2, stop_both, marks=slow),
        pytest.param(FSDP, "lazy", 0, stop_both, marks=slow),
        pytest.param(FSDP, "lazy", 0, stop_agent, marks=slow),
        pytest.param(FSDP, "eager", 1, stop_both, marks=slow),
        pytest.param(DDP, "eager", 1, stop_agent, marks=slow),
    ],
    ids=named,
)
def test_training_goes_on_without_a_node_that_stands_still_and_with_it_when_it_is_back(
    lab: Lab, setup: Setup, redo: str, who: int, stops: Callable[[PeersRank], None]
) -> None:
    """Where it would wait for that node's acknowledgements. A node that is lost after that is recovered."""
    agent = AgentConfig(linger_seconds=60.0, liveness_seconds=2.0)
    settings = peers_config(3, 1, redo, agent=agent, ack_timeout_seconds=2.0)
    job = peers_job(lab, setup, settings, last_step=20)
    expected = reference(lab, job)
    acts = [Act(who, 3, "forward", stops), Act(who, 10, "forward", continue_both)]
    died = fail(lab, replace(job, acts=acts, protected_at=(2, 16)), Death("node3", 17, "backward"))
    assert len(noted(died, "acted")[who]) == 2
    assert [[each["step"] for each in rank] for rank in noted(died, "protected")] == [[2, 16]] * 4
    last = died.again(lab)
    finishes(lab, last, expected)
    goes_on(last, *bounds(died))


# Damage


@slow
@pytest.mark.parametrize("setup", [FSDP, DDP], ids=named)
@pytest.mark.parametrize("every", [1, 5000])
def test_damaged_fragments_are_decoded_around(lab: Lab, setup: Setup, every: int) -> None:
    job = peers_job(lab, setup, peers_config(2, 2))
    expected = reference(lab, job)
    died = fail(lab, replace(job, protected_at=(5,)), Death("node1", 6, "backward"))
    assert damage(replicator_of(died, "node2"), every) > 0
    last = died.again(lab)
    finishes(lab, last, expected)
    goes_on(last, *bounds(died))
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
    expected = reference(lab, job)
    died = fail(lab, replace(job, protected_at=(6,)), Death("node1", 7, "backward"))
    assert damage(replicator_of(died, "node2")) > 0
    last = died.again(lab, **({} if stored else {"number": 0}))
    finishes(lab, last, expected)
    goes_on(last, 4 * stored, 4 * stored, "storage")
    said = told(lab)
    assert "memory cannot produce the states of all ranks (ranks [1]:" in said
    assert "2 of 3 fragments needed" in said


# Nothing is left


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
