"""Nodes are lost for real, and training goes on from replicas on their partners: bit for bit the undisturbed one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from memckpt import StorageConfig
from memckpt.memory.replica import Replica
from memckpt.replication.coding.placement import place
from memckpt.state.records import RecordMeta
from tests.support.cluster.peers_lab import (
    Act,
    PeersRank,
    bounds,
    fail,
    falls_to_storage,
    finishes,
    goes_on,
    kill_agent,
    kill_nodes,
    kill_replicator,
    peers_job,
    recovers_with,
    standby_config,
    start,
    survives,
    told,
)
from tests.support.cluster.sharded_cases import Setup, named
from tests.support.cluster.sharded_lab import Death, noted, reference
from tests.support.trainings.engine_harness import Lab

FSDP, DDP, HSDP = Setup(world_size=4), Setup("ddp", 4), Setup("hsdp", 4)
FSDP6, DDP6 = Setup(world_size=6), Setup("ddp", 6)
PLACES = ["forward", "backward", "reduced", "in step", "stepped", "in commit", "committed"]
slow = pytest.mark.slow


def all_on_standbys(lab: Lab) -> None:
    """Nothing was kept as plain copies, and nothing came too late to be taken."""
    said = told(lab)
    assert "of another node get a standby replica here" in said
    assert "plain copies" not in said
    assert "records behind" not in said


def with_copies_of(node: str, copies: int) -> list[str]:
    """A node of four, and those that standby replica it."""
    names = [f"node{index}" for index in range(4)]
    holders = place([(name,) for name in names], 1, copies - 1).holders(names.index(node))
    return [node, *(names[holder] for holder in holders)]


# Nodes die


@pytest.mark.parametrize(
    ("setup", "copies", "redo"),
    [
        (Setup(), 2, "lazy"),
        pytest.param(FSDP, 2, "lazy", marks=slow),
        pytest.param(FSDP, 3, "eager", marks=slow),
        pytest.param(FSDP, 2, "eager", marks=slow),
        pytest.param(FSDP, 3, "lazy", marks=slow),
        pytest.param(DDP, 2, "lazy", marks=slow),
        pytest.param(DDP, 2, "eager", marks=slow),
        pytest.param(DDP, 3, "lazy", marks=slow),
        pytest.param(DDP, 3, "eager", marks=slow),
        pytest.param(FSDP6, 2, "eager", marks=slow),
        pytest.param(FSDP6, 3, "lazy", marks=slow),
        pytest.param(DDP6, 2, "lazy", marks=slow),
        pytest.param(DDP6, 3, "eager", marks=slow),
    ],
    ids=named,
)
def test_goes_on_from_standbys_when_nodes_are_lost(lab: Lab, setup: Setup, copies: int, redo: str) -> None:
    """One after the other and two at once, early and late, the same one twice."""
    other = "node3" if setup.world_size > 2 else "node0"
    both = "node1,node2" if copies > 2 else other
    deaths = [Death("node1", 3, "backward"), Death(both, 6, "in commit"), Death("node1", 8, "committed")]
    survives(lab, peers_job(lab, setup, standby_config(copies, redo)), deaths, protected_before=1)
    if setup.kind != "ddp":  # every node has a replica of its own
        all_on_standbys(lab)


@slow
@pytest.mark.parametrize(("setup", "copies"), [(FSDP, 2), (FSDP, 3), (DDP, 2)], ids=named)
@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_goes_on_from_standbys_wherever_a_node_is_lost(lab: Lab, setup: Setup, copies: int, redo: str) -> None:
    """At each place, a step after all are protected: no less than what was acknowledged."""
    lost = [f"node{index % 4}" + f",node{(index + 2) % 4}" * (copies > 2) for index in range(len(PLACES))]
    deaths = [Death(who, number + 3, place) for number, (who, place) in enumerate(zip(lost, PLACES, strict=True))]
    survives(lab, peers_job(lab, setup, standby_config(copies, redo), last_step=12), deaths, protected_before=1)


@slow
@pytest.mark.parametrize("seed", range(8))
def test_instants_at_random(lab: Lab, seed: int) -> None:
    choose = random.Random(seed)
    copies, redo, ack = choose.choice([2, 3]), choose.choice(["lazy", "eager"]), choose.choice(["wait", "proceed"])
    if redo == "eager":  # else all is protected only a period after each resume
        ack = "wait"
    setup = choose.choice([FSDP, FSDP, DDP, HSDP])
    steps = sorted(choose.sample(range(3, 9), 3))  # before that nothing need be acknowledged
    names = [choose.sample(["node0", "node1", "node2", "node3"], copies - 1) for _ in steps]
    if copies == 2:
        names = [one[:1] for one in names]
    deaths = [Death(",".join(sorted(who)), step, choose.choice(PLACES)) for who, step in zip(names, steps, strict=True)]
    # The next nodes may be lost a step after the last ones: only what is protected again can be had then.
    survives(lab, peers_job(lab, setup, standby_config(copies, redo, ack=ack)), deaths, protected_before=1)


@slow
@pytest.mark.parametrize(
    "setup",
    [
        HSDP,
        Setup(world_size=4, scaler=True),
        Setup(world_size=4, accumulate=2),
        Setup(world_size=4, precision="bf16"),
        Setup(world_size=4, table=True),
        Setup(world_size=4, optimizer="own"),
        Setup(world_size=4, optimizer="sgd"),
        Setup("fsdp-tp", 4),
    ],
    ids=named,
)
@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_trainings_of_all_kinds(lab: Lab, setup: Setup, redo: str) -> None:
    deaths = [Death("node1", 3, "backward"), Death("node2", 7, "stepped")]
    survives(lab, peers_job(lab, setup, standby_config(2, redo)), deaths, protected_before=1)


@slow
@pytest.mark.parametrize(
    ("setup", "copies"),
    [(FSDP, 2), (FSDP, 3), (DDP, 2)],
    ids=named,
)
def test_falls_to_storage_when_all_copies_are_lost(lab: Lab, setup: Setup, copies: int) -> None:
    """Of one node's shards; with DDP every node has them all."""
    lost = ",".join(with_copies_of("node1", copies) if setup is FSDP else [f"node{node}" for node in range(4)])
    settings = standby_config(copies, storage=StorageConfig(every_steps=4))
    falls_to_storage(lab, peers_job(lab, setup, settings, wait_at=5), lost)


@slow
def test_falls_to_storage_when_the_other_copy_is_lost_before_protection_is_whole(lab: Lab) -> None:
    settings = standby_config(2, storage=StorageConfig(every_steps=4))
    job = peers_job(lab, FSDP, settings, wait_at=5, protected_at=(6,))
    expected = reference(lab, job)
    first = fail(lab, job, Death("node1", 7, "backward"))
    begin = bounds(first)[0]
    [_, other] = with_copies_of("node1", 2)
    again = fail(lab, first.again(lab), Death(other, begin, "forward"))
    last = again.again(lab)
    finishes(lab, last, expected)
    goes_on(last, 4, 4, "storage")


# Ranks come back elsewhere


@slow
@pytest.mark.parametrize(
    "names",
    [
        ("node1", "fresh", "node2", "node3"),
        pytest.param(("node3", "fresh", "node1", "node2"), marks=slow),
        pytest.param(("fresh", "node3", "node1", "node2"), marks=slow),
    ],
)
def test_ranks_come_back_on_other_nodes(lab: Lab, names: tuple[str, ...]) -> None:
    """Some of them where their own standby replica is."""
    job = peers_job(lab, FSDP, standby_config(2), nodes=4)
    expected = reference(lab, job)
    died = fail(lab, replace(job, protected_at=(3,)), Death("node0", 4, "backward"))
    moved = fail(lab, died.again(lab, names=names, protected_at=(6,)), Death(names[2], 7, "stepped"))
    goes_on(moved, *bounds(died))
    last = moved.again(lab)
    finishes(lab, last, expected)
    goes_on(last, *bounds(moved))


@slow
@pytest.mark.parametrize("second", ["node1", "node2", "node0"])
def test_a_node_is_lost_while_others_fetch(lab: Lab, second: str) -> None:
    """Of three copies; what stood still for the attempt that failed does so for the next one."""
    job = peers_job(lab, FSDP, standby_config(3))
    expected = reference(lab, job)
    died = fail(lab, replace(job, protected_at=(5,)), Death("node1", 6, "backward"))
    attempt = died.again(lab)
    asked = [rank for rank in range(4) if job.node(rank) == second]
    codes = start(
        lab, replace(attempt, prepare=recovers_with(asked, lambda rank: kill_nodes(attempt, [second], itself=True)))
    )
    assert 0 not in codes
    last = attempt.again(lab)
    finishes(lab, last, expected)
    goes_on(last, *bounds(died))


# Agents and replicators die, training goes on


@slow
@pytest.mark.parametrize(
    ("redo", "ack", "who", "dies"),
    [
        ("lazy", "wait", 0, kill_agent),
        ("eager", "wait", 0, kill_replicator),
        pytest.param("lazy", "wait", 0, kill_replicator, marks=slow),
        pytest.param("lazy", "proceed", 1, kill_replicator, marks=slow),
        pytest.param("eager", "wait", 1, kill_agent, marks=slow),
        pytest.param("eager", "proceed", 0, kill_agent, marks=slow),
    ],
)
def test_protection_becomes_whole_again(
    lab: Lab, redo: str, ack: str, who: int, dies: Callable[[PeersRank], None]
) -> None:
    """A standby replica that begins in the middle, with nothing to begin with, is exact after a period."""
    job = peers_job(lab, FSDP, standby_config(2, redo, ack=ack, period=3))
    expected = reference(lab, job)
    acts = [Act(who, 3, "forward", dies)]
    # Where training does not wait, eager redo gives up the state that it began with: only a period later all is there.
    protected_at = (2, 7) if ack == "wait" else (7,)
    died = fail(lab, replace(job, acts=acts, protected_at=protected_at), Death("node1", 8, "backward"))
    assert len(noted(died, "acted")[who]) == 1
    last = died.again(lab)
    finishes(lab, last, expected)
    goes_on(last, *bounds(died))


# Standby replicas that do not keep up, and standby replicas that cannot


def of_standbys(do: Callable[[RecordMeta], None]) -> Callable[[Replica, RecordMeta], None]:
    """A redo that does something first on replicas of other nodes' ranks, which have more slots."""
    original = Replica._apply

    def apply(self: Replica, meta: RecordMeta) -> None:
        if self._layout.spec.slots > 3:
            do(meta)
        original(self, meta)

    return apply


@slow
@pytest.mark.parametrize("redo", [pytest.param("lazy", marks=slow), "eager"])
def test_training_waits_for_standbys_that_are_slow(lab: Lab, redo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def be_slow(meta: RecordMeta) -> None:
        left = [float(number) for number in range(300_000)]
        sum(left)

    monkeypatch.setattr(Replica, "_apply", of_standbys(lambda meta: [be_slow(meta) for _ in range(5)] and None))
    job = peers_job(lab, FSDP, standby_config(2, redo))
    survives(lab, job, [Death("node1", 7, "backward")])
    all_on_standbys(lab)


@slow
@pytest.mark.parametrize("redo", ["lazy", pytest.param("eager", marks=slow)])
def test_plain_copies_where_redo_fails(lab: Lab, redo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_at(meta: RecordMeta) -> None:
        if meta.record == 4:
            raise ZeroDivisionError("a kernel of another kind")

    monkeypatch.setattr(Replica, "_apply", of_standbys(fail_at))
    job = peers_job(lab, FSDP, standby_config(2, redo, period=2))
    expected = reference(lab, job)
    died = fail(lab, replace(job, protected_at=(7,)), Death("node1", 8, "backward"))
    said = told(lab)
    assert "plain copies are kept" in said
    assert "a kernel of another kind" in said
    last = died.again(lab)
    finishes(lab, last, expected)
    goes_on(last, *bounds(died))
