"""Another number of ranks, or another way to shard: every element of parameters and optimizer state is carried over."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest

from memckpt.config import StorageConfig
from tests.support.cluster.sharded_cases import Setup, ShardedJob, job_of, named
from tests.support.faults.frozen import differences
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import (
    Death,
    check_same,
    fresh_directory,
    logs,
    noted,
    reference,
    results,
    run,
    start_agents,
)

PLAIN, DDP = Setup("plain", 1), Setup("ddp")
FSDP1, FSDP2, FSDP4 = (Setup(world_size=size) for size in (1, 2, 4))
HSDP, TP, FSDP_TP = Setup("hsdp", 4), Setup("tp"), Setup("fsdp-tp", 4)

slow = pytest.mark.slow


AT = 6


def restored(lab: Lab, died: ShardedJob, setup: Setup, **settings: Any) -> ShardedJob:
    """Go on in another way, without a further step: what is compared is what was restored."""
    job = replace(
        died, setup=setup, directory=fresh_directory(lab), number=1, deaths=(), wait_at=None, last_step=AT, **settings
    )
    assert run(lab, job) == [0] * setup.world_size, logs(lab)[-6000:]
    return job


def check_carried_over(lab: Lab, died: ShardedJob, job: ShardedJob) -> None:
    """Every rank has the undisturbed training's parameters and optimizer state, element for element."""
    expected = reference(lab, replace(died, last_step=AT))[0]["full"]
    found = results(job)
    for rank, ours in enumerate(found):
        assert ours["resumed"] == AT
        different = differences(expected, ours["full"])
        assert not different, f"rank {rank}:\n" + "\n".join(different[:10])
    if job.world_size != died.world_size and "tp" not in job.setup.kind:
        assert len({ours["state"]["rng"] for ours in found}) == len(found), "ranks must not draw the same numbers"
        assert {each["exact"] for rank in noted(job, "restored") for each in rank} == {False}


SGD4, SGD2 = (Setup(world_size=size, optimizer="sgd") for size in (4, 2))
BF16, BF16_2 = (Setup(world_size=size, precision="bf16") for size in (4, 2))
TABLE4, TABLE2 = (Setup(world_size=size, table=True) for size in (4, 2))
CHANGES = [
    (FSDP4, FSDP2), (FSDP4, FSDP1), (FSDP4, PLAIN), (FSDP2, PLAIN), (FSDP2, FSDP1), (FSDP2, FSDP4), (PLAIN, FSDP2),
    (HSDP, FSDP2), (HSDP, FSDP4), (FSDP4, HSDP), (FSDP2, DDP), (DDP, FSDP2), (DDP, FSDP4), (TP, PLAIN),
    (TP, Setup("tp", 4)), (FSDP_TP, FSDP2), (FSDP_TP, TP), (FSDP4, FSDP_TP), (SGD4, SGD2), (BF16, BF16_2),
    (TABLE4, TABLE2),
]  # fmt: skip


def from_and_to(*ordinary: tuple[Setup, Setup]) -> pytest.MarkDecorator:
    """All but these among the slow tests."""
    params = [pytest.param(*each, marks=() if each in ordinary else slow) for each in CHANGES]
    return pytest.mark.parametrize(("before", "after"), params, ids=named)


@pytest.mark.promise(
    "another number of ranks, or another mesh, gets parameters and optimizer state of the step, element for element"
)
@pytest.mark.parametrize(
    ("before", "after", "redo"),
    [
        pytest.param(FSDP4, FSDP2, "lazy", marks=slow),
        (FSDP2, DDP, "lazy"),
        pytest.param(FSDP2, FSDP4, "eager", marks=slow),
        pytest.param(HSDP, FSDP2, "lazy", marks=slow),
        pytest.param(HSDP, FSDP4, "eager", marks=slow),
        pytest.param(TP, PLAIN, "lazy", marks=slow),
        pytest.param(FSDP_TP, FSDP2, "lazy", marks=slow),
        pytest.param(TABLE4, TABLE2, "lazy", marks=slow),
    ],
    ids=named,
)
def test_carried_over_from_memory(lab: Lab, before: Setup, after: Setup, redo: str) -> None:
    """The ranks died, their agent lives: it brings to storage what it holds of them."""
    died = job_of(lab, before, config(redo, storage=StorageConfig(every_steps=100)))
    died = replace(died, deaths=[Death("all", AT - 1, "committed")])
    if redo == "eager":
        start_agents(lab, died)
    assert run(lab, died) == [-9] * before.world_size
    check_carried_over(lab, died, restored(lab, died, after))


def stored(lab: Lab, setup: Setup, nodes: int) -> ShardedJob:
    """A training whose ranks and agents are all dead: what is left of it, after step AT, is in storage."""
    job = job_of(lab, setup, config(storage=StorageConfig(every_steps=AT)), nodes=nodes)
    deaths = [Death("agents", AT + 2), Death("all", AT + 2, "backward")]
    died = replace(job, deaths=deaths, wait_at=AT + 1)
    assert run(lab, died) == [-9] * setup.world_size
    return died


@pytest.mark.promise(
    "another number of ranks, or another mesh, gets parameters and optimizer state of the step, element for element"
)
@from_and_to((PLAIN, FSDP2))
def test_carried_over_from_storage(lab: Lab, before: Setup, after: Setup) -> None:
    died = stored(lab, before, 1)
    check_carried_over(lab, died, restored(lab, died, after))


@slow
@pytest.mark.parametrize(("before", "after"), [(FSDP2, TP), (TP, Setup("tp", 4)), (FSDP4, FSDP_TP)], ids=named)
def test_ranks_that_share_the_work_of_a_layer_draw_alike(lab: Lab, before: Setup, after: Setup) -> None:
    """Or what is replicated among them would drift apart."""
    died = stored(lab, before, 1)
    job = replace(died, setup=after, directory=fresh_directory(lab), number=1, deaths=(), wait_at=None)
    assert run(lab, job) == [0] * after.world_size, logs(lab)[-6000:]
    found = results(job)
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert one["losses"] == other["losses"]
        assert one["state"]["rng"] == other["state"]["rng"]
        assert one["state"]["buffers"] == other["state"]["buffers"]
    assert len({one["state"]["rng"] for one in found}) == (2 if after is FSDP_TP else 1)


@pytest.mark.promise(
    "another number of ranks, or another mesh, gets parameters and optimizer state of the step, element for element"
)
@slow
@pytest.mark.parametrize(
    ("before", "after", "nodes"),
    [
        (FSDP4, FSDP2, (2, 2)),
        (HSDP, FSDP4, (2, 4)),
        (FSDP2, FSDP4, (2, 1)),
        (FSDP_TP, PLAIN, (2, 1)),
        (DDP, FSDP2, (2, 2)),
    ],
    ids=named,
)
def test_carried_over_to_another_number_of_nodes(lab: Lab, before: Setup, after: Setup, nodes: tuple[int, int]) -> None:
    died = stored(lab, before, nodes[0])
    check_carried_over(lab, died, restored(lab, died, after, nodes=nodes[1]))


@slow
@pytest.mark.parametrize(
    ("before", "after"), [(FSDP4, FSDP2), (FSDP2, FSDP4), (HSDP, FSDP2), (FSDP2, DDP), (FSDP_TP, FSDP2)], ids=named
)
def test_what_goes_on_in_another_way_is_protected_as_ever(lab: Lab, before: Setup, after: Setup) -> None:
    """Two trainings go on from the same storage: one undisturbed, one with a death. They end with the same bits."""
    died = stored(lab, before, 1)
    assert died.run_dir is not None
    copy = lab.directory / "copy"
    shutil.copytree(died.run_dir, copy)
    undisturbed = replace(
        died, setup=after, directory=fresh_directory(lab), number=1, deaths=(), wait_at=None, run_dir=copy
    )
    assert run(lab, undisturbed) == [0] * after.world_size, logs(lab)[-6000:]
    killed = replace(
        undisturbed, directory=fresh_directory(lab), run_dir=died.run_dir, deaths=[Death("all", AT + 2, "backward")]
    )
    assert run(lab, killed) == [-9] * after.world_size
    last = replace(killed, directory=fresh_directory(lab), number=2, deaths=())
    assert run(lab, last) == [0] * after.world_size
    assert [one["resumed"] for one in results(last)] == [AT + 2] * after.world_size
    check_same(results(last), results(undisturbed))
