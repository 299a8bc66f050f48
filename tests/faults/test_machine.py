"""The state machine: a few deep runs for every change, many and long ones in the slow tests."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.faults.conftest import Count
from tests.faults.jobs import Job, import_everything
from tests.faults.kinds import Kind
from tests.faults.machine import FaultMachine

PEERS = [Job(3, "fsdp"), Job(3, "ddp", redo="eager")]


def run(job: Job, examples: int, steps: int, count_faults: Count, quick: bool = False) -> int:
    """Run the machine on a job, `quick`: and with the same faults every time; returns the number of faults survived."""
    import_everything()
    own = {"job": job, "quick": quick, "injected": Counter(), "survived": Counter()}
    machine: type[FaultMachine] = type("FaultMachine", (FaultMachine,), own)
    limits = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],  # the first example of others is an empty one
        derandomize=quick,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=limits)
    count_faults(machine.injected, machine.survived)
    assert machine.injected == machine.survived
    return sum(machine.survived.values())


def test_one_node(count_faults: Count) -> None:
    assert run(Job(1, "plain", every_steps=5), 3, 5, count_faults, quick=True) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_one_node_for_long(count_faults: Count, redo: str) -> None:
    assert run(Job(1, "plain", redo, every_steps=5), 30, 40, count_faults) >= 100


@pytest.mark.slow
def test_an_agent_that_cannot_save_as_it_leaves_gives_its_place_to_another_one() -> None:
    """It tries for as long as it may; meanwhile its node is protected again, before it is lost."""
    import_everything()
    own = {"job": PEERS[1], "injected": Counter(), "survived": Counter()}
    machine: type[FaultMachine] = type("FaultMachine", (FaultMachine,), own)
    state = machine()
    try:
        state.begin(seed=30317)
        state.strike(kinds=[Kind.KILL_TRAINER], node=0, steps=1, settle=False, agents_first=True)
        leaving = [Kind.TERMINATE_AGENT, Kind.DISK_FULL, Kind.STOP_TRAINER]
        state.strike(kinds=leaving, node=0, steps=2, settle=False, agents_first=False)
        state.strike(kinds=[Kind.KILL_TRAINER], node=0, steps=0, settle=True, agents_first=False)
    finally:
        state.teardown()
    assert machine.injected == machine.survived


@pytest.mark.slow
@pytest.mark.parametrize("job", PEERS, ids=lambda job: job.kind)
def test_three_nodes(count_faults: Count, job: Job) -> None:
    assert run(job, 8, 30, count_faults) >= 30
