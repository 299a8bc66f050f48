"""Copies, `ErasureConfig(data=1, tolerate=n)`: each record is on n other nodes, and any n nodes may be lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memckpt import StorageConfig
from memckpt.replication.coding.placement import place
from tests.support.cluster.peers_lab import fail, falls_to_storage, finishes, goes_on, peers_config, peers_job, survives
from tests.support.cluster.sharded_cases import Setup, named
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import Death, reference

FSDP, DDP, HSDP = Setup(world_size=4), Setup("ddp", 4), Setup("hsdp", 4)
PLACES = ["forward", "backward", "reduced", "in step", "stepped", "in commit", "committed"]
slow = pytest.mark.slow


def nodes_with(node: str, tolerate: int) -> list[str]:
    """A node of four, and those that keep its copies."""
    names = [f"node{index}" for index in range(4)]
    holders = place([(name,) for name in names], 1, tolerate).holders(names.index(node))
    return list(dict.fromkeys([node, *(names[holder] for holder in holders)]))


@pytest.mark.parametrize("tolerate", [1, 2, 3])
def test_copies_are_on_as_many_other_nodes_as_may_be_lost(tolerate: int) -> None:
    for index in range(4):
        assert len(nodes_with(f"node{index}", tolerate)) == tolerate + 1


@pytest.mark.promise("the same with copies")
@pytest.mark.parametrize(
    ("setup", "tolerate", "redo"),
    [
        (Setup(), 1, "lazy"),
        (FSDP, 2, "lazy"),
        pytest.param(FSDP, 1, "lazy", marks=slow),
        pytest.param(FSDP, 2, "eager", marks=slow),
        pytest.param(DDP, 1, "eager", marks=slow),
        pytest.param(DDP, 2, "lazy", marks=slow),
        pytest.param(HSDP, 1, "eager", marks=slow),
    ],
    ids=named,
)
def test_as_many_nodes_as_there_are_copies_may_be_lost(lab: Lab, setup: Setup, tolerate: int, redo: str) -> None:
    """One after the other and that many at once, the same one twice."""
    most = ",".join(f"node{index}" for index in range(1, 1 + tolerate))
    deaths = [Death("node1", 3, "backward"), Death(most, 6, "in commit"), Death("node1", 8, "committed")]
    survives(lab, peers_job(lab, setup, peers_config(1, tolerate, redo)), deaths, protected_before=1)


@pytest.mark.promise("the same with copies")
@slow
@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_copies_serve_wherever_two_nodes_are_lost(lab: Lab, redo: str) -> None:
    lost = [f"node{index % 4},node{(index + 2) % 4}" for index in range(len(PLACES))]
    deaths = [Death(who, number + 3, where) for number, (who, where) in enumerate(zip(lost, PLACES, strict=True))]
    survives(lab, peers_job(lab, FSDP, peers_config(1, 2, redo), last_step=12), deaths, protected_before=1)


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
    expected = reference(lab, job)
    died = fail(lab, replace(job, protected_at=(3,)), Death("node0", 4, "backward"))
    last = died.again(lab, names=("node3", "fresh", "node1", "node2"))
    finishes(lab, last, expected)
    goes_on(last, 4, 4)
