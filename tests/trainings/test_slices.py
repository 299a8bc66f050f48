"""Nodes that all hold the same state protect a slice of it each, and a resume puts the slices together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from memckpt.config import StorageConfig
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import (
    Death,
    Rank,
    check_same,
    logs,
    next_attempt,
    node,
    noted,
    reference,
    results,
    run,
    survives,
)
from tests.support.trainings.rank_trainings import DdpJob, DdpTraining, Net, job_of

slow = pytest.mark.slow


class SlicedTraining(DdpTraining):
    """The first layer is frozen; what a node stages is noted."""

    def __init__(self, job: DdpJob, rank: Rank) -> None:
        super().__init__(job, rank)
        self.net.first.requires_grad_(False)

    def committed(self, rank: Rank) -> None:
        super().committed(rank)
        writer = None if rank.session is None else rank.session._staging.writer
        if writer is not None:
            held = [one.name for one in writer.spec.tensors() if one.shard is not None and not one.elsewhere]
            rank.journal.note("slice", held=held, nbytes=writer.layout.total_bytes)


@dataclass(frozen=True)
class SlicedJob(DdpJob):
    def training(self, rank: Rank) -> DdpTraining:
        return SlicedTraining(self, rank)


def sliced(lab: Lab, redo: str = "lazy", slices: str = "always", world_size: int = 2, **settings: Any) -> SlicedJob:
    job = job_of(lab, world_size=world_size)
    settings = {"ddp": {"find_unused_parameters": True}, "nodes": 2, **settings}
    chosen = config(redo, slices=slices, storage=settings.pop("storage", None))
    return SlicedJob(job.directory, job.run_dir, chosen, world_size=world_size, **settings)


@pytest.mark.promise("nodes that hold slices of a state that all have: exact, as nodes that hold all of it")
@pytest.mark.parametrize(("redo", "world_size"), [("lazy", 2), ("eager", 2), pytest.param("lazy", 4, marks=slow)])
def test_resumes_exactly_from_slices(lab: Lab, redo: str, world_size: int) -> None:
    job = sliced(lab, redo, world_size=world_size)
    last = survives(lab, job, [Death(1, 3), Death(0, 6, "backward"), Death("all", 9, "committed")])
    held = [set(rank[-1]["held"]) for rank in noted(last, "slice")]
    assert not held[0] & held[-1], "a tensor is in both slices"
    assert held[0] | held[-1] == {name for name, _ in Net(with_unused=True).named_parameters()}


@pytest.mark.promise("nodes that hold slices of a state that all have: exact, as nodes that hold all of it")
@pytest.mark.parametrize(
    ("slices", "nodes", "moved"),
    [
        ("always", 2, 0),
        ("always", 2, 1),
        ("always", 0, 0),
        pytest.param("never", 2, 0, marks=slow),
        pytest.param("never", 2, 1, marks=slow),
        pytest.param("never", 0, 0, marks=slow),
    ],
)
@pytest.mark.parametrize("redo", ["lazy", pytest.param("eager", marks=slow)])
def test_storage_has_the_whole_state_for_any_nodes(lab: Lab, redo: str, slices: str, nodes: int, moved: int) -> None:
    """Also for nodes that hold all of it, that have changed places, or that are one: training goes on bit for bit."""
    job = sliced(lab, redo, storage=StorageConfig(every_steps=5))
    expected = reference(lab, job)
    died = replace(job, deaths=[Death("agent", 8), Death("all", 8, "backward")], wait_at=6)
    assert run(lab, died) == [-9, -9], logs(lab)[-3000:]
    for name in ("node0", "node1"):  # memory must not serve, nor stay
        with node(name):
            lab.stop()
    assert died.config is not None
    last = next_attempt(lab, died, config=replace(died.config, slices=slices), nodes=nodes, moved=moved)
    assert run(lab, last) == [0, 0], logs(lab)[-3000:]
    assert {each["tier"] for rank in noted(last, "restored") for each in rank} == {"storage"}
    assert all(each["exact"] for rank in noted(last, "restored") for each in rank), logs(lab)[-3000:]
    check_same(results(last), expected, 5)


@pytest.mark.promise("nodes that hold slices of a state that all have: exact, as nodes that hold all of it")
@pytest.mark.parametrize("slices", ["always", pytest.param("never", marks=slow)])
def test_what_is_in_memory_goes_on_where_slices_are_turned_on_or_off(lab: Lab, slices: str) -> None:
    """The state that no storage has yet is put together in the run directory."""
    job = sliced(lab, slices=slices)
    assert job.config is not None
    died = replace(job, deaths=[Death("all", 6, "committed")])
    assert run(lab, died) == [-9, -9], logs(lab)[-3000:]
    other = replace(job.config, slices="never" if slices == "always" else "always")
    last = next_attempt(lab, died, config=other)
    assert run(lab, last) == [0, 0], logs(lab)[-3000:]
    assert all(each["exact"] for rank in noted(last, "restored") for each in rank), logs(lab)[-3000:]
    check_same(results(last), reference(lab, job), died.deaths[0].resumed)
