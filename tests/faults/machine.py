"""State machine: Hypothesis drives trainers, agents, nodes, disk and network, and shrinks what breaks a promise.

Ranks take a step only when they are permitted, so that faults take place between two of them, in the order that a
failed run prints. After each rule every promise of the model has been checked: see `model.py`.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.faults.cluster import undisturbed
from tests.faults.jobs import Job, faulty
from tests.faults.kinds import Kind
from tests.faults.leaks import LEAVING_SECONDS, strange_files
from tests.faults.model import Truth
from tests.support.trainings.engine_harness import Lab

#: Longest training of one run of the machine, in steps, and the steps that its end may take.
LAST, _END = 45, 3


class FaultMachine(RuleBasedStateMachine):
    """A job under faults.

    Attributes:
        job: what is trained.
        quick: agents are forked and not started by trainers, and a run ends with `memckpt stop` and not with the end of
            training: both save the import of torch.
        injected: faults by kind, of all runs of the machine.
        survived: those after which training went on with equal bits.
    """

    job: ClassVar[Job] = Job(nodes=1, kind="plain")
    quick: ClassVar[bool] = False
    injected: ClassVar[Counter[Kind]] = Counter()
    survived: ClassVar[Counter[Kind]] = Counter()
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
            with tempfile.TemporaryDirectory() as directory:
                lab = Lab(Path(directory))
                try:
                    self._truths[self.job] = undisturbed(lab, self.job.setup, LAST)
                finally:
                    lab.close()
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

        Which rules there are must not depend on how far training is: that differs from run to run.

        Args:
            settle: whether all faults end then, and training goes on until all is protected again.
            agents_first: whether the launcher starts agents before trainers, which else do so.
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
