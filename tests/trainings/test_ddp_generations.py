"""DDP: what a rank cannot stage or redo begins a generation on all ranks of its node, and only one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from memckpt.agent.connections import Connection
from memckpt.agent.server import Agent
from memckpt.agent.unit import Unit
from memckpt.protocol.trainer import GenerationCommit, NeedGeneration
from tests.support.trainings import rank_trainings
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import Death, logs, run, survives
from tests.support.trainings.rank_trainings import DdpJob

PLACES = pytest.mark.parametrize(
    ("redo", "nodes"),
    [("lazy", False), ("lazy", True), ("eager", False)],
    ids=["lazy-one-agent", "lazy-two-agents", "eager-one-agent"],
)


def change_table(ranks: tuple[int, ...], training: Any, step: int) -> None:
    if step == 5 and training.rank in ranks:
        training.net.table += training.rank + 1


#: The same objects for every test, so that they share references.
CHANGES = {ranks: partial(change_table, ranks) for ranks in [(0, 1), (0,), (1,)]}
CHANGED_ON = pytest.mark.parametrize("changed_on", CHANGES, ids=["all-ranks", "rank-0", "rank-1"])


def job_of(lab: Lab, redo: str, nodes: bool, changed_on: tuple[int, ...]) -> DdpJob:
    """Some ranks change a large buffer of their own at the sixth step, which nobody expects to change."""
    return rank_trainings.job_of(
        lab, redo, nodes=nodes, table="same", each_step=CHANGES[changed_on], ddp={"broadcast_buffers": False}
    )


@pytest.mark.thinned(3)
@PLACES
@CHANGED_ON
def test_all_ranks_go_back_behind_a_record_that_one_of_them_cannot_redo(
    lab: Lab, changed_on: tuple[int, ...], redo: str, nodes: bool
) -> None:
    # Ranks that share no slots need not wait for each other: each begins at the very record.
    survives(lab, job_of(lab, redo, nodes, changed_on), [Death("all", 5, "committed")], [6 if nodes else 5])


def change_in_repetition(training: Any, step: int) -> None:
    """One rank finds in a repeated step that a large buffer has to be staged with every record."""
    session = training.session
    if training.rank == 1 and session is not None and session._first_steps.repetition is not None:
        spec = session._live.spec(session._switch.request)
        session._live.growth.changing.update(one.name for one in spec.static)


@pytest.mark.parametrize("nodes", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one-agent", "two-agents"])
def test_a_rank_whose_layout_grows_in_a_repeated_step_takes_those_along_that_share_its_slots(
    lab: Lab, nodes: bool
) -> None:
    job = rank_trainings.job_of(lab, nodes=nodes, table="same", each_step=change_in_repetition)
    survives(lab, job, [Death("all", 4, "committed"), Death("all", 9, "committed")])


@pytest.mark.thinned(3)
@PLACES
@CHANGED_ON
def test_a_few_records_later_all_ranks_are_protected_again(
    lab: Lab, changed_on: tuple[int, ...], redo: str, nodes: bool
) -> None:
    """Whether all of a node's ranks have seen the change, or one has."""
    survives(lab, job_of(lab, redo, nodes, changed_on), [Death("all", 9, "forward")], [9])


@pytest.mark.thinned(2)
@PLACES
def test_large_buffers_of_each_rank_s_own_are_restored_to_it(lab: Lab, redo: str, nodes: bool) -> None:
    job = rank_trainings.job_of(lab, redo, nodes=nodes, table="own", ddp={"broadcast_buffers": False})
    survives(lab, job, [Death("all", 5, "forward")], [5])


@PLACES
@pytest.mark.parametrize("rank", [0, 1])
def test_an_average_that_only_one_rank_keeps_is_restored_to_it(lab: Lab, rank: int, redo: str, nodes: bool) -> None:
    job = rank_trainings.job_of(lab, redo, nodes=nodes, averages=True, average_on=(rank,))
    survives(lab, job, [Death("all", 5, "forward"), Death("all", 9, "committed")], [5, 10])


def grow(training: Any, step: int) -> None:
    if step == 5 and training.rank == 1:
        training.net.register_buffer("late", torch.ones(3))


def test_a_buffer_that_only_one_rank_gets_is_said_to_leave_the_node_unprotected(lab: Lab) -> None:
    run(lab, rank_trainings.job_of(lab, each_step=grow, ddp={"broadcast_buffers": False}))
    assert "the state is written anew: the ranks of this node differ: only some have late" in logs(lab)


def test_a_second_rank_s_order_that_comes_late_begins_no_generation_of_its_own(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ask at the same record; the agent comes to the second one's question when all is done already."""
    order, committed = Agent._order_generation, Unit.generation_committed
    asked: list[Any] = []

    def order_later(agent: Agent, unit: Unit, message: NeedGeneration, asker: Connection) -> None:
        asked.append((agent, unit, message, asker))
        if len(asked) == 2:
            order(*asked[0])

    def commit_and_order(unit: Unit, rank: int, message: GenerationCommit) -> None:
        committed(unit, rank, message)
        if len(asked) == 2 and unit._pending.generation is None:
            order(*asked.pop())
            print("the late order is given")

    monkeypatch.setattr(Agent, "_order_generation", order_later)
    monkeypatch.setattr(Unit, "generation_committed", commit_and_order)
    agent = lab.start_agent()
    survives(lab, job_of(lab, "lazy", False, (0, 1)), [Death("all", 9, "forward")], [9])
    log = agent.log.read_text()
    assert log.count("the late order is given") == 1
    assert log.count("is complete after record") == 2, log
