"""Sharded training: a new generation on one unit is of use only when every unit has it; until then the older one is."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from memckpt.capture.slot_writer import SlotWriter
from memckpt.session.staging import Staging
from tests.support.cluster.sharded_cases import Distributed, Setup, job_of, named
from tests.support.trainings import killed_ranks
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab

FSDP2, FSDP4 = Setup(table=True), Setup(world_size=4, table=True)
HSDP, TP, FSDP_TP = Setup("hsdp", 4, table=True), Setup("tp", table=True), Setup("fsdp-tp", 4, table=True)
DDP = Setup("ddp", table=True)
slow = pytest.mark.slow

CHANGED_AT = 4


def change_table(ranks: tuple[int, ...], training: Distributed, step: int) -> None:
    """These ranks change a large buffer of their own, which nobody expects to change."""
    if step == CHANGED_AT and training.rank in ranks:
        training.net.table += training.rank + 1


def change_weight(ranks: tuple[int, ...], training: Distributed, step: int) -> None:
    """These ranks change their shard of a parameter by hand."""
    if step == CHANGED_AT and training.rank in ranks:
        weight = training.net.blocks[1].up.weight
        assert isinstance(weight, DTensor)
        with torch.no_grad():
            weight.to_local().mul_(1.5)


#: The same objects for every test, so that they share references.
CHANGES = {
    (change, ranks): partial(change, ranks)
    for change in (change_table, change_weight)
    for ranks in ((0,), (1,), (0, 1), (0, 1, 2, 3))
}


@pytest.mark.parametrize(
    ("setup", "nodes", "redo", "change", "ranks"),
    [
        (FSDP2, 1, "lazy", change_table, (1,)),
        pytest.param(FSDP2, 1, "eager", change_table, (0, 1), marks=slow),
        pytest.param(FSDP2, 2, "lazy", change_weight, (1,), marks=slow),
        pytest.param(FSDP4, 1, "lazy", change_table, (0, 1), marks=slow),
        pytest.param(FSDP4, 2, "eager", change_table, (0,), marks=slow),
        pytest.param(HSDP, 1, "lazy", change_table, (1,), marks=slow),
        pytest.param(HSDP, 1, "lazy", change_table, (0, 1), marks=slow),
        pytest.param(HSDP, 1, "eager", change_table, (0,), marks=slow),
        pytest.param(HSDP, 2, "lazy", change_table, (0,), marks=slow),
        pytest.param(TP, 1, "lazy", change_weight, (0, 1), marks=slow),
        pytest.param(FSDP_TP, 2, "lazy", change_table, (1,), marks=slow),
        pytest.param(DDP, 2, "lazy", change_table, (1,), marks=slow),
    ],
    ids=named,
)
def test_a_record_that_one_rank_cannot_redo_begins_a_generation(
    lab: Lab, setup: Setup, nodes: int, redo: str, change: Any, ranks: tuple[int, ...]
) -> None:
    """A rank that shares its shards with no other on its node writes its generation at once: then nothing is lost.

    In any case they are protected again a few records later.
    """
    alone = setup.kind != "hsdp" or nodes > 1
    job = job_of(lab, setup, config(redo), nodes=nodes, each_step=CHANGES[change, ranks])
    deaths = [killed_ranks.Death("all", CHANGED_AT, "committed"), killed_ranks.Death("all", CHANGED_AT + 3)]
    killed_ranks.survives(lab, job, deaths, [CHANGED_AT + alone, CHANGED_AT + 3])


def die_in_second_generation(rank: int, others: int, told: int) -> None:
    """Die when this attempt's second generation is written and not committed, once the others have theirs."""
    written: list[None] = []
    original = Staging.write_generation

    def write_generation(self: Staging, *arguments: Any) -> Any:
        result = original(self, *arguments)
        written.append(None)
        if len(written) == 2:
            for _ in range(others):
                assert select.select([told], [], [], 20)[0], "the others do not get their generation"
                os.read(told, 1)
            print(f"rank {rank} dies in its second generation")
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    Staging.write_generation = write_generation  # type: ignore[method-assign]


def tell_of_second_generation(tell: int) -> None:
    """Tell when this attempt's second generation has been committed on this rank, which now waits for its slots."""
    begun: list[None] = []
    original = Staging.adopt_writer

    def adopt_writer(self: Staging, writer: SlotWriter) -> None:
        original(self, writer)
        begun.append(None)
        if len(begun) == 2:
            os.write(tell, b"1")

    Staging.adopt_writer = adopt_writer  # type: ignore[method-assign]


def dying(rank: int, world_size: int, told: int, tell: int) -> Callable[[int], None]:
    def prepare(own: int) -> None:
        if own == rank:
            die_in_second_generation(rank, world_size - 1, told)
        else:
            tell_of_second_generation(tell)

    return prepare


@pytest.mark.promise("a rank that dies while it writes a generation costs no other rank its state")
@pytest.mark.parametrize(
    ("setup", "nodes", "redo", "who"),
    [
        (FSDP2, 1, "lazy", 1),
        pytest.param(HSDP, 1, "lazy", 1, marks=slow),
        pytest.param(DDP, 2, "lazy", 1, marks=slow),
        pytest.param(FSDP2, 2, "eager", 0, marks=slow),
        pytest.param(FSDP4, 1, "eager", 1, marks=slow),
        pytest.param(FSDP4, 2, "lazy", 0, marks=slow),
        pytest.param(HSDP, 1, "eager", 0, marks=slow),
        pytest.param(HSDP, 2, "lazy", 1, marks=slow),
        pytest.param(TP, 1, "lazy", 1, marks=slow),
        pytest.param(FSDP_TP, 2, "lazy", 0, marks=slow),
        pytest.param(DDP, 2, "lazy", 0, marks=slow),
    ],
    ids=named,
)
def test_a_rank_dies_in_a_generation_that_the_others_have_complete(
    lab: Lab, setup: Setup, nodes: int, redo: str, who: int
) -> None:
    """Their agents must not have let go of the older one: it is all that the dead rank's has."""
    job = job_of(lab, setup, config(redo), nodes=nodes, each_step=CHANGES[change_table, (0, 1, 2, 3)])
    expected = killed_ranks.reference(lab, job)
    if redo == "eager":
        killed_ranks.start_agents(lab, job)
    told, tell = os.pipe()
    try:
        first = replace(
            job, directory=killed_ranks.fresh_directory(lab), prepare=dying(who, setup.world_size, told, tell)
        )
        assert killed_ranks.run(lab, first)[who] == -signal.SIGKILL
    finally:
        os.close(told)
        os.close(tell)
    assert f"rank {who} dies in its second generation" in killed_ranks.logs(lab)
    second = killed_ranks.next_attempt(lab, first)
    assert killed_ranks.run(lab, second) == [0] * setup.world_size
    assert [rank[0]["step"] for rank in killed_ranks.noted(second, "restored")] == [CHANGED_AT] * setup.world_size
    killed_ranks.check_same(killed_ranks.results(second), expected)
