"""What a node holds of a sharded training: its shards, and not the model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.cluster.sharded_cases import Setup, ShardedJob, job_of, named
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import Death, fresh_directory, node, noted, run, start_agents

slow = pytest.mark.slow


def held(lab: Lab, job: ShardedJob) -> tuple[dict[str, int], dict[str, dict[tuple[int, ...], int]]]:
    """Of a training whose ranks have died: by node, what its agent says, and what each unit's layout asks for."""
    if job.config is not None and job.config.redo == "eager":
        start_agents(lab, job)
    job = replace(job, directory=fresh_directory(lab), deaths=[Death("all", 5, "backward")])
    assert run(lab, job) == [-9] * job.world_size
    by_agent: dict[str, int] = {}
    by_unit: dict[str, dict[tuple[int, ...], int]] = {}
    for rank, notes in enumerate(noted(job, "layout")):
        (layout,) = notes
        assert rank in layout["ranks"]
        by_unit.setdefault(job.node(rank), {})[tuple(layout["ranks"])] = layout["nbytes"]
    for name in by_unit:
        with node(name):
            by_agent[name] = lab.status(job.run_dir).held_bytes
            lab.stop(job.run_dir)
    return by_agent, by_unit


@pytest.mark.promise("a node holds each of its shards exactly once")
@pytest.mark.parametrize(
    ("setup", "nodes", "units"),
    [
        pytest.param(Setup(world_size=4), 2, {"node0": [(0,), (1,)], "node1": [(2,), (3,)]}, marks=slow),
        pytest.param(Setup("hsdp", 4), 1, {"node0": [(0, 2), (1, 3)]}, marks=slow),
        pytest.param(Setup("hsdp", 4), 2, {"node0": [(0,), (1,)], "node1": [(2,), (3,)]}, marks=slow),
        (Setup("tp"), 1, {"node0": [(0,), (1,)]}),
        pytest.param(Setup("ddp"), 1, {"node0": [(0, 1)]}, marks=slow),
    ],
    ids=named,
)
@pytest.mark.parametrize("redo", ["lazy", pytest.param("eager", marks=slow)])
def test_a_node_holds_what_its_units_ask_for(
    lab: Lab, setup: Setup, nodes: int, units: dict[str, list[tuple[int, ...]]], redo: str
) -> None:
    by_agent, by_unit = held(lab, job_of(lab, setup, config(redo), nodes=nodes))
    assert {name: sorted(each) for name, each in by_unit.items()} == units
    assert by_agent == {name: sum(each.values()) for name, each in by_unit.items()}


@pytest.mark.promise("a node holds each of its shards exactly once")
@pytest.mark.parametrize("redo", ["lazy", pytest.param("eager", marks=slow)])
def test_each_of_two_nodes_holds_about_half_of_what_one_would(lab: Lab, redo: str) -> None:
    """Not exactly: beside the shards there are headers of slots, and smaller pieces are better balanced.

    Where a step is to be repeated, an eager replica has one slot more with several ranks.
    """
    whole, _ = held(lab, replace(job_of(lab, Setup("plain", 1), config(redo)), run_dir=lab.directory / "whole"))
    halves, _ = held(lab, job_of(lab, Setup(), config(redo), nodes=2))
    for half in halves.values():
        assert 0.4 < half / whole["node0"] < (0.6 if redo == "lazy" else 0.75)
