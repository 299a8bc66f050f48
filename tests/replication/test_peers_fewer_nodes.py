"""Nodes are lost and none comes in their place: those that are left go on with the newest step, as fewer ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memckpt.config import MemckptConfig, StorageConfig
from tests.support.cluster.peers_lab import agent_of, fail, goes_on, peers_config, peers_job, start, told
from tests.support.cluster.processes import kill_and_wait
from tests.support.cluster.sharded_cases import Setup, named
from tests.support.faults.frozen import differences
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import Death, noted, reference, results

FSDP4, FSDP2, DDP4, DDP3 = Setup(world_size=4), Setup(world_size=2), Setup("ddp", 4), Setup("ddp", 3)
slow = pytest.mark.slow
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
        pytest.param(FSDP4, FSDP2, ("node2", "node3"), coded(1, 1, "lazy"), marks=slow),
        pytest.param(FSDP4, FSDP2, ("node0", "node3"), coded(1, 1, "lazy"), marks=slow),
        pytest.param(FSDP4, FSDP2, ("node3", "node2"), coded(1, 1, "eager"), marks=slow),
        pytest.param(DDP4, DDP3, ("node0", "node2", "node3"), coded(2, 1, "lazy"), marks=slow),
        pytest.param(DDP4, DDP3, ("node2", "node0", "node3"), coded(1, 1, "eager"), marks=slow),
        pytest.param(DDP4, DDP3, ("node1", "node2", "node3"), coded(2, 1, "lazy"), marks=slow),
        pytest.param(FSDP4, DDP3, ("node1", "node2", "node3"), coded(2, 1, "eager"), marks=slow),
        pytest.param(FSDP4, DDP3, ("node3", "node2", "node0"), coded(2, 1, "lazy"), marks=slow),
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
