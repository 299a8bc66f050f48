"""State machine: Hypothesis drives trainers, agents, nodes, disk and network, and shrinks what breaks a promise.

Ranks take a step only when they are permitted, so that faults take place between two of them, in the order that a
failed run prints. After each rule every promise of the model has been checked: see `model.py`. A few deep runs are for
every change, many and long ones are slow tests.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.faults.cluster import undisturbed
from tests.faults.jobs import Job, faulty, import_everything
from tests.faults.kinds import Kind
from tests.faults.leaks import LEAVING_SECONDS, strange_files
from tests.faults.model import Truth
from tests.support.trainings.engine_harness import Lab

#: Longest training of one run of the machine, in steps, and the steps that its end may take.
LAST, _END = 45, 3


class FaultMachine(RuleBasedStateMachine):
    """A job under faults."""

    job: ClassVar[Job] = Job(nodes=1, kind="plain")
    #: Agents are forked, not started by trainers; a run ends with `memckpt stop`, not with the end of training: both
    #: save the import of torch.
    quick: ClassVar[bool] = False
    injected: ClassVar[Counter[Kind]] = Counter()  # of all runs of the machine
    survived: ClassVar[Counter[Kind]] = Counter()  # training went on with equal bits
    _truths: ClassVar[dict[Job, Truth]] = {}

    def __init__(self) -> None:
        super().__init__()
        self._stack = contextlib.ExitStack()
        self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))

    @initialize(seed=st.integers(0, 1 << 16))
    def begin(self, seed: int) -> None:
        truth = self._truth()
        entered = faulty(self.job, self._directory, random.Random(seed), paced=True, truth=Truth(dict(truth.known)))
        self.cluster, self.faults = self._stack.enter_context(entered)
        self.cluster.agents_first = self.quick
        self.cluster.before_attempt = self._make_a_start_possible
        self.cluster.train_to(3)

    def _truth(self) -> Truth:
        """The undisturbed training, once for all runs."""
        if self.job not in self._truths:
            with tempfile.TemporaryDirectory() as directory, contextlib.closing(Lab(Path(directory))) as lab:
                self._truths[self.job] = undisturbed(lab, self.job.setup, LAST)
        return self._truths[self.job]

    @property
    def _room(self) -> int:
        return LAST - _END - self.cluster.model.newest

    @rule(
        kinds=st.runner().flatmap(lambda self: st.lists(st.sampled_from(self.job.kinds), min_size=1, max_size=3)),
        node=st.integers(0, 2),
        steps=st.integers(0, 6),
        settle=st.booleans(),
        agents_first=st.booleans(),
    )
    def strike(self, kinds: list[Kind], node: int, steps: int, settle: bool, agents_first: bool) -> None:
        """One fault, or several at once, and some steps after them; nothing once there is no step left to train.

        Which rules there are must not depend on how far training is: that differs from run to run. `settle`: all faults
        end then, and training goes on until all is protected again.
        """
        if self._room <= 0:
            return
        self.cluster.agents_first = self.quick or agents_first
        for kind in kinds:
            if kind is Kind.KILL_RESUMING:
                self._begin_to_resume()
            self.faults.inject(kind, node % self.job.nodes)
            self.cluster.drain()
        if steps:
            self._let_trainers_go_on()
            self.cluster.train_to(min(self.cluster.model.newest + steps, LAST - _END))
        if settle:
            self.faults.end_all()
            self.cluster.settle(LAST - _END)
        self.faults.count_survived()

    def _begin_to_resume(self) -> None:
        self.faults.inject(Kind.KILL_TRAINERS)
        self._let_trainers_go_on()
        self.cluster.until("the end of an attempt", lambda: not self.cluster.running)
        self.cluster.begin()

    def _let_trainers_go_on(self) -> None:
        """A launcher waits for a trainer that is stopped; so do the others."""
        for each in list(self.faults.lasting):
            if each.kind is Kind.STOP_TRAINER:
                self.faults.end(each)

    def _make_a_start_possible(self) -> None:
        """A start waits for its node's agent, and ends with an error where that stays stopped.

        One that has ended because a node did not answer, and was needed, is made again once its network is mended.
        """
        refused = self.cluster.model.refused == self.cluster.attempts - 1 >= 0
        for each in list(self.faults.lasting):
            if each.kind is Kind.STOP_AGENT or (each.kind is Kind.CUT_NETWORK and refused):
                self.faults.end(each)

    def teardown(self) -> None:
        try:
            if hasattr(self, "faults"):
                if sys.exc_info()[0] is None:
                    self._finish()
                else:
                    self._abandon()
        finally:
            self._stack.close()

    def _finish(self) -> None:
        """Train on, and to the end unless it is quick: all states equal, and nothing is left."""
        end = min(self.cluster.model.newest + _END, LAST)
        try:
            self.faults.end_all()
            if self.quick:
                self.cluster.train_to(end)
            else:
                self.cluster.run_out(end)
            self.faults.count_survived()
            self.cluster.close()
            self.cluster.stop_agents()
            left = self.cluster.lab.left_behind(LEAVING_SECONDS)
            if not self.quick:  # files of a killed writer are deleted with the next checkpoint
                left += strange_files(self.cluster, self.faults.store)
        except BaseException:
            self._abandon()
            raise
        type(self).injected.update(self.faults.injected)
        type(self).survived.update(self.faults.survived)
        assert not left, "left behind:\n" + "\n".join(left)

    def _abandon(self) -> None:
        """End all processes, whatever they do."""
        self.faults.end_all()
        self.cluster.close()
        self.cluster.lab.left_behind(limit=0.0)


Count = Callable[[Counter[Kind], Counter[Kind]], None]
PEERS = [Job(3, "fsdp"), Job(3, "ddp", redo="eager")]


@pytest.fixture
def count_faults(record_property: Callable[[str, object], None]) -> Count:
    """Give the summary of a test run (see tests/conftest.py) the faults that a test has injected and survived."""

    def count(injected: Counter[Kind], survived: Counter[Kind]) -> None:
        record_property("faults", {kind.value: [number, survived[kind]] for kind, number in injected.items()})

    return count


def machine_of(**own: Any) -> type[FaultMachine]:
    """A machine with counts of its own."""
    return type("FaultMachine", (FaultMachine,), {"injected": Counter(), "survived": Counter(), **own})


def run(job: Job, examples: int, steps: int, count_faults: Count, quick: bool = False) -> int:
    """Run the machine on a job, `quick`: and with the same faults every time; returns the number of faults survived."""
    import_everything()
    machine = machine_of(job=job, quick=quick)
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
    machine = machine_of(job=PEERS[1])
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
