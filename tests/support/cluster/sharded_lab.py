"""Attempts of sharded trainings in forked ranks, with deaths at chosen places."""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import memckpt
from memckpt.config import MemckptConfig
from memckpt.processes.address import NODE_VARIABLE
from tests.support.cluster.processes import kill_and_wait
from tests.support.cluster.sharded_cases import REPLICATED, Distributed, Setup
from tests.support.trainings.engine_child import Journal
from tests.support.trainings.engine_harness import Child, Lab
from tests.support.trainings.rank_group import (
    Death,
    become,
    check_same,
    fresh_directory,
    give_up,
    results,
    run_ranks,
)
from tests.support.trainings.rank_group import join as join_group
from tests.support.trainings.resume_history import journal_of

STEPS = 10
#: Seconds within which a rank learns that it has lost the others.
PROCESS_GROUP_SECONDS = 50
#: Seconds that ranks have to notice that one has died, before the launcher ends them.
LAUNCHER_SECONDS = 20


@dataclass(frozen=True)
class Job:
    """One attempt.

    Attributes:
        directory: directory for its results; a new one for each attempt.
        run_dir: run directory; None to train without memckpt.
        number: number of the attempt, which launchers count.
        nodes: number of nodes over which the ranks are spread evenly.
        deaths: the planned deaths.
        launcher: whether the others are killed as soon as one has died, as launchers do; else they find out.
        wait_at: step after which ranks wait until something is in storage.
        declare: whether parameters that tensor parallelism leaves alone are declared replicated.
        prepare: called in each rank before anything else, to patch code for a test.
        each_step: called in each rank before each step.
    """

    setup: Setup
    directory: Path
    run_dir: Path | None
    config: MemckptConfig | None = None
    number: int = 0
    nodes: int = 1
    deaths: Sequence[Death] = ()
    launcher: bool = False
    wait_at: int | None = None
    declare: bool = True
    prepare: Callable[[int], None] | None = None
    each_step: Callable[[Distributed, int], None] | None = None
    last_step: int = STEPS
    resume: Any = None

    @property
    def world_size(self) -> int:
        return self.setup.world_size

    def node(self, rank: int) -> str:
        return f"node{rank * self.nodes // self.world_size}"

    def first_of_node(self, rank: int) -> bool:
        return rank == 0 or self.node(rank) != self.node(rank - 1)


def job_of(lab: Lab, setup: Setup, config: MemckptConfig | None, **settings: Any) -> Job:
    return Job(setup, fresh_directory(lab), lab.run_dir, config, **settings)


# In a rank


def join(job: Job, rank: int) -> None:
    """Become a rank of the attempt, on its node."""
    become(rank, job.number, job.node(rank))
    if job.setup.kind != "plain" or job.world_size > 1:
        join_group(rank, job.world_size, job.directory / "store", PROCESS_GROUP_SECONDS)


class Rank:
    """One rank of an attempt."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        self.journal = Journal(job.directory / f"journal-{rank}")
        self.session: memckpt.Session | None = None
        self.step = -1
        self.resumed = 0
        self.losses: dict[int, str] = {}
        self._deaths = {(death.step, death.place): death for death in job.deaths if self._concerns(death)}

    def _concerns(self, death: Death) -> bool:
        match death.who:
            case "all":
                return True
            case "agents":
                return self.job.first_of_node(self.rank)
            case "agent":
                return self.rank == 0
            case str(nodes):
                return self.job.node(self.rank) in nodes.split(",")
        return death.who == self.rank

    def at(self, place: str) -> None:
        """Note that training has reached a place: die there, or kill the agent, if that is planned."""
        death = self._deaths.pop((self.step, place), None)
        if death is None:
            return
        if death.who not in ("agent", "agents"):
            self._note_layout()
            self.journal.note("killed", who="rank", step=self.step)
            if isinstance(death.who, str) and death.who != "all":
                self._kill_node()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.session is not None and self.session.agent_pid is not None:
            kill_and_wait(self.session.agent_pid)
            self.journal.note("killed", who="agent", step=self.step)

    def _kill_node(self) -> None:
        """Kill all processes of the node but this one. Its replicator ends with its agent."""
        assert self.session is not None
        if self.session.agent_pid is not None:
            os.kill(self.session.agent_pid, signal.SIGKILL)

    def _note_committed(self) -> None:
        self.journal.note("committed", step=self.step)

    def _note_layout(self) -> None:
        """Note the memory that this rank's unit takes on its node."""
        writer = None if self.session is None else self.session._staging.writer
        if writer is not None:
            spec = writer.layout.spec
            self.journal.note("layout", nbytes=writer.layout.total_bytes, ranks=spec.local_ranks, serves=spec.serves)

    def train(self) -> None:
        job = self.job
        join(job, self.rank)
        try:
            # Other random numbers than in the previous attempt: state that is not restored shows.
            training = Distributed(job.setup, self.at, seed=job.number)
        except RuntimeError as error:
            give_up(error)
        if job.prepare is not None:
            job.prepare(self.rank)
        start = self._attach(training)
        losses = self.losses
        with _between_groups(lambda: self.at("in step")):
            for self.step in range(start, job.last_step):
                if job.each_step is not None:
                    job.each_step(training, self.step)
                losses[self.step] = training.step(self.step)
                self.at("stepped")
                if self.session is not None:
                    check = self.session.check
                    pending = check.verdict == "pending"
                    # A scaler that has skipped the step leaves gradients behind: only the loop knows that the step is
                    # over.
                    assert self.session.commit(gradients_pending=False if job.setup.scaler else None)
                    if pending and check.verdict != "pending":
                        self.journal.note("checked", verdict=check.verdict, line=check.line)
                self._note_committed()
                self.at("committed")
                if job.wait_at is not None and self.step == job.wait_at - 4:
                    self._await_order()
                if self.step == job.wait_at:
                    self._await_storage()
        found = {
            "state": training.local_state(),
            "full": training.full_state(),
            "losses": losses,
            "start": self.resumed,
        }
        (job.directory / f"result-{self.rank}").write_bytes(pickle.dumps(found))
        if self.session is not None:
            self.session.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # gloo's shutdown sometimes hangs, with and without memckpt

    def _attach(self, training: Distributed) -> int:
        job = self.job
        if job.run_dir is None:
            return 0
        settings: dict[str, Any] = {"run_dir": job.run_dir, "resume": job.resume, "config": job.config}
        if "tp" in job.setup.kind and job.declare:
            settings["replicated"] = REPLICATED
        session = self.session = memckpt.attach(training.model, training.optimizers, **settings)
        for name, each in training.registered.items():
            session.register(name, each)
        session.register("probe", _Probe(self))
        print("described:", session.describe())
        report = session.restore()
        if report is None:
            return 0
        check = report.check
        self.resumed = report.step if check.step is None else check.step  # the held step, which is repeated
        self.journal.note("restored", step=self.resumed, tier=report.tier, lost=report.steps_lost, exact=report.exact)
        if check.verdict != "pending":
            self.journal.note("checked", verdict=check.verdict, line=check.line)
        return report.step

    def _await_order(self) -> None:
        """Wait for the snapshot's order: on a busy machine it would come too late for steps this short."""
        assert self.session is not None
        while self.session.mode != "eager" and self.session._link.connection.order is None:
            assert select.select([self.session._link.connection.channel], [], [], PROCESS_GROUP_SECONDS * 0.6)[0]
            self.session._protection.listen()

    def _await_storage(self) -> None:
        assert self.session is not None
        while self.session.stored_step is None:
            assert select.select([self.session._link.connection.channel], [], [], PROCESS_GROUP_SECONDS * 0.6)[0]
            self.session._protection.listen()
        if dist.is_initialized():
            dist.barrier()  # all must know before one continues and kills the agent


class _Probe:
    """A registered object whose state_dict() is called in the middle of a commit."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def state_dict(self) -> dict[str, int]:
        self._rank.at("in commit")
        return {"step": self._rank.step, "rank": self._rank.rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._rank.journal.note("loaded", **state)


@contextmanager
def _between_groups(at: Callable[[], None]) -> Iterator[None]:
    """Call `at` when an optimizer's step has changed its first group and not yet the second one."""
    originals = {kind: kind.__dict__["_init_group"] for kind in (torch.optim.Adam, torch.optim.SGD)}

    def watched(original: Any) -> Any:
        def init_group(optimizer: Any, group: Any, *rest: Any) -> Any:
            if group is optimizer.param_groups[-1] and len(optimizer.param_groups) > 1:
                at()
            return original(optimizer, group, *rest)

        return init_group

    for kind, original in originals.items():
        kind._init_group = watched(original)
    try:
        yield
    finally:
        for kind, original in originals.items():
            kind._init_group = original


def train(job: Job, rank: int) -> None:
    """The body of one rank of the attempt; never returns."""
    Rank(job, rank).train()


# From outside


def run(lab: Lab, job: Job, body: Callable[[Job, int], None] = train) -> list[int]:
    """Run one attempt as a launcher does; returns the exit codes of its ranks."""
    patience = 0.0 if job.launcher else LAUNCHER_SECONDS
    ranks = run_ranks(lab, job.world_size, partial(body, job), job.directory, patience=patience)
    return [child.wait() for child in ranks]


def logs(lab: Lab) -> str:
    return "".join(child.log.read_text() for child in lab._children)


def noted(job: Job, event: str) -> list[list[dict[str, Any]]]:
    """Each rank's notes of an event."""
    found = []
    for rank in range(job.world_size):
        events = journal_of(job.directory / f"journal-{rank}")
        found.append([each for each in events if each["event"] == event])
    return found


_references: dict[Any, list[Any]] = {}


def reference(lab: Lab, job: Job) -> list[Any]:
    """Results of the same training, undisturbed and without memckpt."""
    key = (job.setup, job.last_step, job.each_step)
    if key not in _references:
        undisturbed = replace(
            job, directory=fresh_directory(lab), run_dir=None, number=0, deaths=(), prepare=None, wait_at=None
        )
        assert run(lab, undisturbed) == [0] * job.world_size, logs(lab)[-6000:]
        _references[key] = results(undisturbed)
    return _references[key]


@contextmanager
def node(name: str) -> Iterator[None]:
    before = os.environ[NODE_VARIABLE]
    os.environ[NODE_VARIABLE] = name
    try:
        yield
    finally:
        os.environ[NODE_VARIABLE] = before


def start_agents(lab: Lab, job: Job) -> list[Child]:
    """Fork an agent for each node from this process: patches apply to them, and they have torch already."""
    started = []
    for name in sorted({job.node(rank) for rank in range(job.world_size)}):
        with node(name):
            started.append(lab.start_agent(job.run_dir))
    return started


#: Valid reasons for not repeating the step of a resumed record.
UNCHECKED = (
    "a generation began at record",
    "the replica has gone past record",
    "came from other nodes, without the one before it",
    "storage does not have the state from which",
    "the ranks, or their shards, are not those",
    "had not laid out its buckets for good before that step",
)


def check_verdict(attempt: Job, ahead: bool = False) -> set[str]:
    """Check that all ranks report an equal repeated step, or none for a valid reason; returns their reports.

    Args:
        ahead: whether the dead attempt was as far ahead of its peers as it may be, or does not wait for them: the
            record before the resumed one may have given its slot away.
    """
    verdicts = {(each["verdict"], each["line"]) for rank in noted(attempt, "checked") for each in rank}
    for verdict, line in verdicts:
        if (
            attempt.config is not None
            and attempt.config.replays
            and line != "no step was compared: nothing was resumed"
        ):
            proceeds = attempt.config.peers is not None and attempt.config.peers.ack == "proceed"
            reasons = (*UNCHECKED, "is not held any more") if ahead or proceeds else UNCHECKED
            assert verdict == "equal", f"{verdict}: {line}"
            assert "no step was compared" not in line or any(reason in line for reason in reasons), line
    assert len(verdicts) <= 1, verdicts
    if attempt.config is not None and attempt.config.replays and any(noted(attempt, "restored")) and not verdicts:
        assert not any(noted(attempt, "committed")), "a step has ended since the resume without a verdict"
    return {verdict for verdict, _ in verdicts}


def survives(lab: Lab, job: Job, deaths: Sequence[Death], resumed: Sequence[int] | None = None) -> Job:
    """Check that each attempt ends as planned, the next one resumes where it must, and the last result is right.

    Args:
        resumed: step at which each next attempt resumes; None: no step that all ranks have committed is lost.

    Returns:
        The last attempt.
    """
    expected = reference(lab, job)
    if job.config is not None and job.config.redo == "eager":
        start_agents(lab, job)
    begins = [0, *([death.resumed for death in deaths] if resumed is None else resumed)]
    attempt, codes = job, [0]
    for number, (death, begin) in enumerate(zip([*deaths, None], begins, strict=True)):
        attempt = replace(job, directory=fresh_directory(lab), number=number, deaths=() if death is None else (death,))
        codes = run(lab, attempt)
        starts = [rank[0]["step"] if rank else 0 for rank in noted(attempt, "restored")]
        assert starts == [begin] * job.world_size, f"attempt {number} went on at {starts}, expected {begin}"
        check_verdict(attempt)
        if death is None:
            break
        killed = range(job.world_size) if death.who == "all" else [death.who]
        assert all(codes[int(rank)] == -signal.SIGKILL for rank in killed), codes
        assert all(noted(attempt, "killed")[int(rank)] for rank in killed)
    assert codes == [0] * job.world_size, codes
    check_same(results(attempt), expected)
    return attempt
