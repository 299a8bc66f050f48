"""Sharded training (FSDP2, HSDP, tensor parallelism): neutral, and exact after the death of any rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memckpt.config import StorageConfig
from tests.support.cluster.sharded_cases import Setup, ShardedJob, job_of, named
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import (
    Death,
    check_same,
    die_and_go_on,
    fresh_directory,
    logs,
    next_attempt,
    node,
    noted,
    reference,
    results,
    run,
    start_agents,
    survives,
)

FSDP2, FSDP4 = Setup(), Setup(world_size=4)
HSDP, TP, FSDP_TP = Setup("hsdp", 4), Setup("tp"), Setup("fsdp-tp", 4)
#: One of each way to distribute, small; the others are variations.
SAMPLE = [FSDP2, HSDP, TP, FSDP_TP]
VARIATIONS = [
    FSDP4,
    Setup("tp", 4),
    Setup(optimizer="sgd"),
    Setup(optimizer="nesterov"),
    Setup("tp", optimizer="sgd"),
    Setup("fsdp-tp", 4, optimizer="nesterov"),
    Setup(accumulate=2),
    Setup(accumulate=2, sync_each=True),
    Setup("hsdp", 4, accumulate=2),
    Setup(precision="bf16"),
    Setup(precision="bf16-reduce"),
    Setup("hsdp", 4, precision="bf16", accumulate=2),
    Setup(reshard=False),
    Setup(offload=True),
    Setup(scaler=True),
    Setup("hsdp", 4, scaler=True),
    Setup("fsdp-tp", 4, scaler=True),
    Setup(optimizer="fused"),
    Setup(optimizer="lion"),
    Setup("hsdp", 4, optimizer="lion"),
    Setup(optimizer="own"),
    Setup("tp", optimizer="own"),
    Setup(table=True),
]
#: In their steps ranks communicate: what a rank has is not enough to redo them.
WHOLE = [Setup(optimizer="muon"), Setup("hsdp", 4, optimizer="muon"), Setup("tp", optimizer="muon")]
PLACES = ["forward", "backward", "reduced", "in step", "stepped", "in commit", "committed"]

slow = pytest.mark.slow


def every_setup(*ordinary: Setup) -> pytest.MarkDecorator:
    """All but these among the slow tests."""
    params = [pytest.param(each, marks=() if each in ordinary else slow) for each in [*SAMPLE, *VARIATIONS]]
    return pytest.mark.parametrize("setup", params, ids=named)


@pytest.mark.promise("attaching to a sharded model changes no bit")
@every_setup(FSDP2, TP)
def test_protection_changes_no_bit(lab: Lab, setup: Setup) -> None:
    job = job_of(lab, setup, config())
    expected = reference(lab, job)
    assert run(lab, job) == [0] * setup.world_size, logs(lab)[-6000:]
    check_same(results(job), expected)


# Ranks die


@pytest.mark.promise(
    "with sharded models (FSDP2, HSDP, tensor parallel) any rank may die anywhere, on one to four nodes"
)
@pytest.mark.promise("one rank, several, or all, on one node or more")
@pytest.mark.parametrize(
    ("redo", "places"),
    [("lazy", PLACES[1::2]), pytest.param("lazy", PLACES, marks=slow), pytest.param("eager", PLACES, marks=slow)],
    ids=["some", "lazy", "eager"],
)
def test_resumes_exactly_wherever_a_rank_dies(lab: Lab, redo: str, places: list[str]) -> None:
    """One place after the other, each rank in turn; nothing that was committed is lost."""
    deaths = [Death(number % 2, number + 1, place) for number, place in enumerate(places)]
    survives(lab, job_of(lab, FSDP2, config(redo)), deaths)


@pytest.mark.promise(
    "with sharded models (FSDP2, HSDP, tensor parallel) any rank may die anywhere, on one to four nodes"
)
@slow
@pytest.mark.parametrize("setup", [FSDP4, HSDP, TP, FSDP_TP], ids=named)
@pytest.mark.parametrize(("redo", "nodes"), [("lazy", 1), ("eager", 2)])
def test_resumes_exactly_wherever_a_rank_dies_in_other_meshes(lab: Lab, setup: Setup, redo: str, nodes: int) -> None:
    deaths = [Death(number % setup.world_size, number + 1, place) for number, place in enumerate(PLACES)]
    survives(lab, job_of(lab, setup, config(redo), nodes=nodes), deaths)


@pytest.mark.promise("one rank, several, or all, on one node or more")
@every_setup(TP)
def test_resumes_exactly_after_the_death_of_all_ranks(lab: Lab, setup: Setup) -> None:
    """Once before the anchors have come round, once in a ring that has wrapped."""
    survives(lab, job_of(lab, setup, config()), [Death("all", 2, "backward"), Death("all", 8, "stepped")])


@slow
@pytest.mark.parametrize("setup", WHOLE, ids=named)
def test_the_state_of_optimizers_that_need_whole_tensors_is_captured(lab: Lab, setup: Setup) -> None:
    job = job_of(lab, setup, config(snapshot_every_steps=1))
    survives(lab, job, [Death("all", 2, "backward"), Death("all", 8, "stepped")])


@pytest.mark.promise(
    "with sharded models (FSDP2, HSDP, tensor parallel) any rank may die anywhere, on one to four nodes"
)
@pytest.mark.promise("one rank, several, or all, on one node or more")
@pytest.mark.parametrize(
    ("setup", "nodes", "redo"),
    [
        (FSDP2, 2, "lazy"),
        pytest.param(FSDP4, 2, "lazy", marks=slow),
        pytest.param(FSDP4, 4, "lazy", marks=slow),
        pytest.param(FSDP4, 2, "eager", marks=slow),
        pytest.param(HSDP, 2, "lazy", marks=slow),
        pytest.param(HSDP, 4, "lazy", marks=slow),
        pytest.param(TP, 2, "lazy", marks=slow),
        pytest.param(FSDP_TP, 2, "lazy", marks=slow),
        pytest.param(FSDP_TP, 4, "eager", marks=slow),
    ],
    ids=named,
)
def test_resumes_exactly_on_several_nodes(lab: Lab, setup: Setup, nodes: int, redo: str) -> None:
    survives(lab, job_of(lab, setup, config(redo), nodes=nodes), [Death(setup.world_size - 1, 8, "backward")])


@slow
@pytest.mark.parametrize("setup", [TP, FSDP_TP], ids=named)
def test_what_is_not_declared_replicated_is_each_rank_s_own(lab: Lab, setup: Setup) -> None:
    survives(lab, job_of(lab, setup, config(), declare=False), [Death(1, 3, "backward"), Death("all", 8)])


@pytest.mark.promise(
    "with sharded models (FSDP2, HSDP, tensor parallel) any rank may die anywhere, on one to four nodes"
)
@pytest.mark.parametrize(
    ("setup", "place", "steps"),
    [
        (FSDP2, "stepped", [2, 8]),
        pytest.param(FSDP2, "stepped", [2, 5, 8], marks=slow),
        pytest.param(FSDP2, "in commit", [2, 5, 8], marks=slow),
        pytest.param(FSDP2, "committed", [2, 5, 8], marks=slow),
        pytest.param(HSDP, "committed", [2, 5, 8], marks=slow),
        pytest.param(FSDP_TP, "committed", [2, 5, 8], marks=slow),
    ],
    ids=named,
)
def test_launchers_kill_the_others_at_any_moment(lab: Lab, setup: Setup, place: str, steps: list[int]) -> None:
    """What all ranks have committed is there; what some have may be."""
    job = job_of(lab, setup, config())
    expected = reference(lab, job)
    committed = 0
    for number, step in enumerate(steps):
        attempt = replace(
            job, directory=fresh_directory(lab), number=number, deaths=[Death(0, step, place)], launcher=True
        )
        assert -9 in run(lab, attempt)
        _check_resumed(attempt, committed)
        committed = min(max(each["step"] for each in rank) + 1 for rank in noted(attempt, "committed"))
    last = next_attempt(lab, job, number=len(steps))
    assert run(lab, last) == [0] * setup.world_size
    _check_resumed(last, committed)
    check_same(results(last), expected)


def _check_resumed(attempt: ShardedJob, committed: int) -> None:
    """All ranks went on together, with nothing lost. One that is killed in a commit may not have noted it."""
    starts = {rank[0]["step"] if rank else 0 for rank in noted(attempt, "restored")}
    assert len(starts) == 1
    assert starts <= {committed, committed + (committed > 0)}


# Agents die


@pytest.mark.parametrize(
    ("setup", "nodes", "who", "redo"),
    [
        pytest.param(FSDP2, 1, "agents", "lazy", marks=slow),
        (FSDP2, 2, "agent", "lazy"),
        pytest.param(FSDP4, 1, "agents", "eager", marks=slow),
        pytest.param(FSDP4, 2, "agent", "lazy", marks=slow),
        pytest.param(FSDP4, 2, "agents", "lazy", marks=slow),
        pytest.param(FSDP4, 4, "agents", "lazy", marks=slow),
        pytest.param(HSDP, 2, "agent", "lazy", marks=slow),
        pytest.param(HSDP, 2, "agents", "lazy", marks=slow),
        pytest.param(TP, 1, "agents", "lazy", marks=slow),
        pytest.param(FSDP_TP, 2, "agent", "lazy", marks=slow),
    ],
    ids=named,
)
def test_training_survives_its_agents_and_is_protected_again(
    lab: Lab, setup: Setup, nodes: int, who: str, redo: str
) -> None:
    """The ranks come back one after the other: the replica of one that is there goes on while the next says hello."""
    job = job_of(lab, setup, config(redo), nodes=nodes)
    expected = reference(lab, job)
    first = replace(job, deaths=[Death(who, 2), Death("all", 8)])
    assert run(lab, first) == [-9] * setup.world_size
    killed = [each["who"] for rank in noted(first, "killed") for each in rank]
    assert killed.count("agent") == (nodes if who == "agents" else 1)
    assert "without protection" in logs(lab)
    assert "protected again" in logs(lab)
    second = next_attempt(lab, first)
    assert run(lab, second) == [0] * setup.world_size
    check_same(results(second), expected, 8)


@pytest.mark.promise("the machine, the container with both, the cgroup with both, without peers")
@pytest.mark.parametrize(
    ("setup", "nodes", "who", "redo"),
    [
        (FSDP2, 2, "agent", "lazy"),
        pytest.param(FSDP2, 1, "agents", "eager", marks=slow),
        pytest.param(FSDP4, 2, "agents", "lazy", marks=slow),
        pytest.param(HSDP, 1, "agents", "lazy", marks=slow),
        pytest.param(HSDP, 2, "agents", "eager", marks=slow),
        pytest.param(HSDP, 2, "agent", "lazy", marks=slow),
        pytest.param(TP, 2, "agents", "lazy", marks=slow),
        pytest.param(FSDP_TP, 2, "agents", "lazy", marks=slow),
    ],
    ids=named,
)
def test_resumes_from_storage_when_agents_and_all_ranks_are_gone(
    lab: Lab, setup: Setup, nodes: int, who: str, redo: str
) -> None:
    """Each unit has written its own part; an agent that lives on has not all of them in memory."""
    job = job_of(lab, setup, config(redo, storage=StorageConfig(every_steps=4)), nodes=nodes)
    expected = reference(lab, job)
    if redo == "eager":
        start_agents(lab, job)
    last = die_and_go_on(lab, job, Death(who, 6), Death("all", 6, "backward"), wait_at=5)
    assert {each["tier"] for rank in noted(last, "restored") for each in rank} == {"storage"}
    check_same(results(last), expected, 4)


# What a node holds: its shards, and not the model


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
