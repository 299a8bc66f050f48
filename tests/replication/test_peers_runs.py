"""Nodes are lost for real, and training goes on from what their peers keep: bit for bit the undisturbed one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from memckpt.config import MemckptConfig, StorageConfig
from memckpt.replication.coding.placement import place
from tests.support.cluster.peers_lab import (
    Act,
    PeersJob,
    PeersRank,
    agent_of,
    bounds,
    fail,
    falls_to_storage,
    finishes,
    goes_on,
    loses,
    peers_config,
    peers_job,
    recovers,
    start,
    stop_here,
    stored_job,
    survives,
    told,
)
from tests.support.cluster.processes import kill_and_wait
from tests.support.cluster.sharded_cases import Setup, check_verdict, named
from tests.support.faults.frozen import differences
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import Death, fresh_directory, noted, reference, results

FSDP, DDP, HSDP = Setup(world_size=4), Setup("ddp", 4), Setup("hsdp", 4)
FSDP2, DDP3, FSDP6, DDP6 = Setup(world_size=2), Setup("ddp", 3), Setup(world_size=6), Setup("ddp", 6)
PLACES = ["forward", "backward", "reduced", "in step", "stepped", "in commit", "committed"]
slow = pytest.mark.slow


def slowly(*cases: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*case, marks=slow) for case in cases]


# Nodes die


@pytest.mark.promise(
    "up to m whole nodes of a group may be lost anywhere in a step, early and late, one after the other: FSDP2, "
    "HSDP and DDP on four and six nodes go on from peers, bit for bit"
)
@pytest.mark.promise("up to m whole nodes of a group: trainers, agents, memory (peers)")
@pytest.mark.promise("the same with copies")
@pytest.mark.parametrize(
    ("setup", "data", "tolerate", "redo", "losses"),
    [
        (FSDP, 2, 2, "lazy", 2),
        (FSDP, 1, 2, "lazy", 3),
        (Setup(), 1, 1, "lazy", 3),
        *slowly(
            (FSDP, 2, 2, "lazy", 3), (DDP, 3, 1, "lazy", 3), (FSDP, 1, 1, "eager", 3), (FSDP, 3, 1, "eager", 3),
            (FSDP, 1, 1, "lazy", 3), (FSDP, 1, 2, "eager", 3), (DDP, 1, 1, "lazy", 3), (DDP, 1, 1, "eager", 3),
            (DDP, 1, 2, "lazy", 3), (HSDP, 1, 1, "eager", 3), (DDP, 2, 2, "eager", 3), (FSDP6, 1, 1, "lazy", 3),
            (FSDP6, 3, 1, "lazy", 3), (FSDP6, 2, 2, "lazy", 3), (FSDP6, 4, 2, "lazy", 3), (FSDP6, 4, 2, "eager", 3),
            (DDP6, 1, 1, "eager", 3), (DDP6, 3, 1, "lazy", 3), (DDP6, 2, 2, "lazy", 3), (DDP6, 4, 2, "lazy", 3),
        ),
    ],
    ids=named,
)  # fmt: skip
def test_goes_on_from_peers_when_nodes_are_lost(
    lab: Lab, setup: Setup, data: int, tolerate: int, redo: str, losses: int
) -> None:
    """One after the other and neighbours at once, early and late, the same one twice."""
    both = "node1,node2" if tolerate > 1 else f"node{setup.world_size - 1}"
    deaths = [Death("node1", 3, "backward"), Death(both, 6, "in commit"), Death("node1", 8, "committed")]
    survives(lab, peers_job(lab, setup, peers_config(data, tolerate, redo)), deaths[:losses], protected_before=1)


@slow
@pytest.mark.parametrize(
    ("setup", "data", "tolerate", "redo"),
    [
        (FSDP, 3, 1, "lazy"),
        (FSDP, 2, 2, "eager"),
        (FSDP, 1, 2, "lazy"),
        (FSDP, 1, 2, "eager"),
        (DDP, 1, 1, "eager"),
        (DDP, 2, 2, "lazy"),
        (FSDP6, 4, 2, "lazy"),
    ],
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
    recovers(lab, died, expected, 5, 5)


@slow
@pytest.mark.parametrize(
    ("setup", "step", "place"),
    [(FSDP, 0, "backward"), pytest.param(FSDP, 1, "stepped", marks=slow), pytest.param(DDP, 0, "backward", marks=slow)],
    ids=named,
)
def test_starts_over_when_a_node_is_lost_before_anything_is_protected(
    lab: Lab, setup: Setup, step: int, place: str
) -> None:
    job = peers_job(lab, setup, peers_config(3, 1))
    expected = reference(lab, job)
    died = fail(lab, job, Death("node1", step, place))
    last = recovers(lab, died, expected, number=0)
    if step == 0:
        goes_on(last, 0, 0)


# More is lost than can be borne


@pytest.mark.promise(
    "after more losses than tolerated, or before protection is complete, storage serves, with the same step for all"
    " ranks"
)
@pytest.mark.promise("more nodes, or another one before protection is complete again")
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
    recovers(lab, died, expected, 0, 0, number=0)
    assert "starting over: " + ("memory cannot produce" if setup is FSDP else "nothing is held") in told(lab)


def lost_again_before_protection(lab: Lab, job: PeersJob, second: str) -> tuple[PeersJob, Sequence[object]]:
    """A node is lost, and another one before the first step behind the recovery; the attempt that follows."""
    expected = reference(lab, job)
    first = fail(lab, replace(job, protected_at=(6,)), Death("node1", 7, "backward"))
    begin = bounds(first)[0]
    again = fail(lab, first.again(lab), Death(second, begin, "forward"))
    goes_on(again, begin, begin + 1)
    return again.again(lab), expected


@pytest.mark.promise(
    "after more losses than tolerated, or before protection is complete, storage serves, with the same step for all"
    " ranks"
)
@pytest.mark.promise("more nodes, or another one before protection is complete again")
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


@pytest.mark.promise(
    "after the loss of nodes the step is repeated from copies, from fragments of private state together with "
    "another node, or from the ranks' old nodes; also if the same node is lost again in that step, or the step "
    "differs"
)
@pytest.mark.promise("ranks may come back on other nodes")
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
    last = recovers(lab, moved, expected, directory=fresh_directory(lab))
    # What was handed out for those that had moved, too, is proved by repeating its last step.
    assert check_verdict(moved) == check_verdict(last) == {"equal"}


# The resume proves itself: the last step is repeated from the state before, which comes from where the state does


def draw_once_more(rank: PeersRank) -> None:
    """The fault: this rank's generator goes on by a number that nobody else draws."""
    torch.rand(1)


def verdict_of(attempt: PeersJob) -> tuple[str, str]:
    """What all ranks say of the repeated step."""
    (found,) = {(each["verdict"], each["line"]) for rank in noted(attempt, "checked") for each in rank}
    return found


def dies(lab: Lab, job: PeersJob, who: str, step: int) -> PeersJob:
    """An attempt of which a node is lost in a step, when all of the step before is protected."""
    return fail(lab, replace(job, protected_at=(step - 1,)), Death(who, step, "backward"))


@pytest.mark.promise(
    "after the loss of nodes the step is repeated from copies, from fragments of private state together with "
    "another node, or from the ranks' old nodes; also if the same node is lost again in that step, or the step "
    "differs"
)
@pytest.mark.parametrize(
    ("setup", "config"),
    [
        (Setup(), peers_config(1, 1, "lazy")),
        pytest.param(FSDP, peers_config(1, 1, "lazy"), marks=slow),
        pytest.param(DDP, peers_config(2, 2, "eager"), marks=slow),
        pytest.param(FSDP, peers_config(1, 1, "eager"), marks=slow),
        pytest.param(FSDP, peers_config(1, 2, "lazy"), marks=slow),
        pytest.param(DDP, peers_config(1, 1, "lazy"), marks=slow),
        pytest.param(DDP, peers_config(3, 1, "lazy"), marks=slow),
        pytest.param(HSDP, peers_config(2, 2, "lazy"), marks=slow),
        pytest.param(HSDP, peers_config(1, 1, "eager"), marks=slow),
        pytest.param(FSDP, peers_config(2, 2, "eager"), marks=slow),
    ],
    ids=["two nodes", "copies", "private fragments, eager", "copies, eager", "three copies",
         "copies, ddp", "private fragments", "hsdp", "copies, hsdp, eager", "fragments, eager"],
)  # fmt: skip
def test_a_step_is_repeated_and_whatever_becomes_of_it_nothing_is_lost(
    lab: Lab, setup: Setup, config: MemckptConfig
) -> None:
    """It ends with the loss of the same node again; then it differs, and training goes on from what was held."""
    job = peers_job(lab, setup, config)
    expected = reference(lab, job)
    first = dies(lab, job, "node1", 5)

    # The repeated step is the one before that at which training goes on.
    again = fail(lab, first.again(lab), Death("node1", 4, "stepped"))
    goes_on(again, 5, 5)
    assert not any(noted(again, "checked"))

    fault = [Act(1, 4, "forward", draw_once_more)]
    differing = dies(lab, again.again(lab, acts=fault), "node1", 8)
    assert {rank[0]["step"] for rank in noted(differing, "restored")} == {5}
    verdict, line = verdict_of(differing)
    assert verdict == "different", line
    assert "DIFFERENT: generators torch on rank 1" in line
    for rank, steps in enumerate(noted(differing, "committed")):
        losses = expected[rank]["losses"]
        assert all(each["loss"] == losses[each["step"]] for each in steps if each["step"] >= 5)

    last = recovers(lab, differing, expected, 8, 8)
    assert verdict_of(last)[0] == "equal", told(lab)


# None comes in place of nodes that are lost: those that are left go on with the newest step, as fewer ranks


#: So many steps are with peers when nodes are lost.
AT = 6


def coded(data: int, tolerate: int, redo: str) -> MemckptConfig:
    return peers_config(data, tolerate, redo, storage=StorageConfig(every_steps=1000))


@pytest.mark.promise(
    "after a loss of nodes without replacement fewer nodes go on from the newest step that peers have, element for "
    "element"
)
@pytest.mark.parametrize(
    ("before", "after", "names", "settings"),
    [
        # Nodes 0 and 1 are gone, and those that fetch ranks 0 and 1 are the nodes of ranks 0 and 1 now.
        pytest.param(FSDP, FSDP2, ("node2", "node3"), coded(1, 1, "lazy"), marks=slow),
        pytest.param(FSDP, FSDP2, ("node0", "node3"), coded(1, 1, "lazy"), marks=slow),
        pytest.param(FSDP, FSDP2, ("node3", "node2"), coded(1, 1, "eager"), marks=slow),
        pytest.param(DDP, DDP3, ("node0", "node2", "node3"), coded(2, 1, "lazy"), marks=slow),
        pytest.param(DDP, DDP3, ("node2", "node0", "node3"), coded(1, 1, "eager"), marks=slow),
        pytest.param(DDP, DDP3, ("node1", "node2", "node3"), coded(2, 1, "lazy"), marks=slow),
        pytest.param(FSDP, DDP3, ("node1", "node2", "node3"), coded(2, 1, "eager"), marks=slow),
        pytest.param(FSDP, DDP3, ("node3", "node2", "node0"), coded(2, 1, "lazy"), marks=slow),
    ],
    ids=named,
)
def test_fewer_nodes_go_on_from_the_newest_step(
    lab: Lab, before: Setup, after: Setup, names: tuple[str, ...], settings: MemckptConfig
) -> None:
    job = peers_job(lab, before, settings, protected_at=(AT - 1,))
    expected = reference(lab, replace(job, last_step=AT))[0]["full"]
    dies, *unused_too = sorted({f"node{rank}" for rank in range(4)} - {*names}, reverse=True)
    died = fail(lab, job, Death(dies, AT, "backward"))
    for unused in unused_too:
        agent = agent_of(died, unused)
        assert agent is not None
        kill_and_wait(agent)
    last = died.again(lab, setup=after, nodes=len(names), names=names, last_step=AT)
    assert start(lab, last) == [0] * len(names), told(lab)
    goes_on(last, AT, AT, "storage")
    for rank, ours in enumerate(results(last)):
        assert not (wrong := differences(expected, ours["full"])), f"rank {rank}:\n" + "\n".join(wrong[:10])
    assert {each["exact"] for rank in noted(last, "restored") for each in rank} == {False}


# Copies: each record is on n other nodes, and any n nodes may be lost


def nodes_with(node: str, tolerate: int) -> list[str]:
    """A node of four, and those that keep its copies."""
    names = [f"node{index}" for index in range(4)]
    holders = place([(name,) for name in names], 1, tolerate).holders[names.index(node)]
    return list(dict.fromkeys([node, *(names[holder] for holder in holders)]))


@pytest.mark.promise(
    "after more losses than tolerated, or before protection is complete, storage serves, with the same step for all"
    " ranks"
)
@slow
@pytest.mark.parametrize("tolerate", [1, 2])
def test_storage_serves_when_all_copies_are_lost(lab: Lab, tolerate: int) -> None:
    settings = peers_config(1, tolerate, storage=StorageConfig(every_steps=4))
    falls_to_storage(lab, peers_job(lab, FSDP, settings, wait_at=5), ",".join(nodes_with("node1", tolerate)))


@slow
def test_ranks_come_back_where_their_copies_are(lab: Lab) -> None:
    job = peers_job(lab, FSDP, peers_config(1, 1), nodes=4)
    died, expected = loses(lab, job, 4, "node0")
    recovers(lab, died, expected, 4, 4, names=("node3", "fresh", "node1", "node2"))
