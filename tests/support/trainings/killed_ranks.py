"""Trainings in several ranks, killed at chosen places and compared with an undisturbed one.

A test forks the ranks of an attempt, and each resumes what the attempt before it has left. A :class:`Job` describes an
attempt; what trains, and how models are distributed, is its subclasses' business.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar
from unittest import mock

import torch
import torch.distributed as dist

import memckpt
from memckpt.config import MemckptConfig
from memckpt.processes.address import NODE_VARIABLE
from tests.support.cluster.processes import CHILD_SECONDS, kill_and_wait
from tests.support.faults.frozen import differences
from tests.support.late import device as late
from tests.support.late import process_group
from tests.support.trainings.engine_child import Journal, Probe, listen_until, use_device
from tests.support.trainings.engine_harness import Child, Lab
from tests.support.trainings.resume_history import commit, journal_of, note_resume, why_unproved

#: Exit code of a rank that found no others: gloo's ranks do not always find each other, with or without memckpt.
NO_PROCESS_GROUP = 77
#: Attempts of a job whose ranks do not find each other.
TRIES = 4
#: Seconds within which a rank learns that it has lost the others.
PROCESS_GROUP_SECONDS = 50
#: Seconds that ranks have to notice that one has died, before the launcher ends them.
LAUNCHER_SECONDS = 20


@dataclass(frozen=True)
class Death:
    """A death: who, and where."""

    #: A rank, "all" (ranks), "agent" (of rank 0's node), "agents" (of all nodes), or names of nodes, separated by
    #: commas: each with its ranks and its agent.
    who: int | str
    step: int
    #: "forward", "backward", "reduced" (gradients are clipped), "in step" (between two groups of the optimizer's step),
    #: "stepped", "in commit" or "committed".
    place: str = "forward"

    @property
    def resumed(self) -> int:
        """The step at which training resumes: no step that all ranks have committed is lost."""
        return self.step + (self.place == "committed")


class RankTraining:
    """What a rank trains: `model` and `optimizers`, and, where they matter, the attributes below."""

    registered: ClassVar[dict[str, Any]] = {}
    attach_arguments: ClassVar[dict[str, Any]] = {}
    commit_arguments: ClassVar[dict[str, Any]] = {}
    #: The session that protects it, if there is one.
    session: memckpt.Session | None = None
    model: Any
    optimizers: Any

    def attached(self) -> None:
        """Called between attach() and restore()."""

    def step(self, number: int) -> str:
        """Train one step; returns its loss as exact text."""
        raise NotImplementedError

    def committed(self, rank: Rank) -> None:
        """Called after each commit."""

    def local_state(self) -> dict[str, Any]:
        """This rank's state, with every bit."""
        raise NotImplementedError

    def full_state(self) -> dict[str, Any]:
        """The state independent of the sharding."""
        return {}


@dataclass(frozen=True)
class Job:
    """One attempt."""

    directory: Path  # directory for its results; a new one for each attempt
    run_dir: Path | None  # run directory; None to train without memckpt
    config: MemckptConfig | None = None
    number: int = 0  # number of the attempt, which launchers count
    nodes: int = 0  # number of nodes over which the ranks are spread evenly; 0: all are on the test's own
    moved: int = 0  # number of nodes by which ranks are further on than at first
    deaths: Sequence[Death] = ()  # the planned deaths
    launcher: bool = False  # whether the others are killed as soon as one has died, as launchers do; else they find out
    hang: int | None = None  # the rank that stays alive, stuck, when another one has died
    wait_at: int | None = None  # step after which ranks wait until something is in storage
    log: bool = False  # whether ranks wait at each step until its record has been taken for the log
    prepare: Callable[[int], None] | None = None  # called in each rank before it attaches, to patch code for a test
    each_step: Callable[[Any, int], None] | None = None  # called in each rank before each step
    last_step: int = 10
    resume: Any = None
    device: str = "cpu"  # "cpu", or "late", of which all ranks have the first one in a process of its own
    #: Fields of which the next attempt has the defaults.
    once: ClassVar[tuple[str, ...]] = ("deaths", "hang", "wait_at", "log", "prepare")

    @property
    def world_size(self) -> int:
        raise NotImplementedError

    @property
    def grouped(self) -> bool:
        """Whether the ranks have a process group."""
        return True

    def training(self, rank: Rank) -> Any:
        """What a rank trains, in that rank: a :class:`RankTraining`."""
        raise NotImplementedError

    def undisturbed(self, directory: Path) -> Job:
        """The same training without memckpt and deaths."""
        compression = self.config.compression if self.config is not None else None
        config = None if compression is None else MemckptConfig(compression=compression)
        calm = self.defaults("number", "nodes", "moved", "launcher", "resume", *self.once)
        return replace(self, directory=directory, run_dir=None, config=config, **calm)

    def defaults(self, *names: str) -> dict[str, Any]:
        return {each.name: each.default for each in fields(self) if each.name in names}

    def problem(self, attempts: Sequence[Job], died: bool, reasons: Sequence[str]) -> str:
        """Why the resume of the last of these attempts is unproved; empty if it is not."""
        journals = [[journal_of(each.journal(rank)) for rank in range(each.world_size)] for each in attempts]
        assert self.config is not None
        return why_unproved(journals[-1], journals[:-1], self.config, died, reasons)

    def node(self, rank: int) -> str | None:
        return f"node{(rank * self.nodes // self.world_size + self.moved) % self.nodes}" if self.nodes else None

    def first_of_node(self, rank: int) -> bool:
        return rank == 0 or self.node(rank) != self.node(rank - 1)

    def journal(self, rank: int) -> Path:
        return self.directory / f"journal-{rank}"

    def join(self, rank: int) -> None:
        """Become a rank of the attempt, on its node."""
        torch.set_num_threads(1)
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(self.number)
        if (name := self.node(rank)) is not None:
            os.environ[NODE_VARIABLE] = name
        if self.device == "late":
            late.load()
            process_group.register()
        if self.grouped:
            backend = process_group.BACKEND if self.device == "late" else "gloo"
            join(rank, self.world_size, self.directory / "store", backend=backend)
        use_device(self.device)


AnyJob = TypeVar("AnyJob", bound=Job)


# In a rank


def join(
    rank: int,
    ranks: int,
    store: Path,
    seconds: float = PROCESS_GROUP_SECONDS,
    *,
    launched: bool = False,
    backend: str = "gloo",
) -> None:
    """Join the process group of a rank's job, in that rank; ends the process with NO_PROCESS_GROUP if that fails.

    `launched`: with the variables that torchrun sets.
    """
    if launched:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({name: str(value) for name, value in numbers.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    try:
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=seconds)
        )
    except RuntimeError as error:
        give_up(error)


def give_up(error: RuntimeError) -> NoReturn:
    """End the attempt for a retry."""
    print(error)
    os._exit(NO_PROCESS_GROUP)


class Rank:
    """One rank of an attempt."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        self.journal = Journal(job.journal(rank))
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

    def train(self) -> NoReturn:
        job = self.job
        job.join(self.rank)
        try:
            training = job.training(self)
        except RuntimeError as error:
            give_up(error)
        if job.prepare is not None:
            job.prepare(self.rank)
        start = self._attach(training)
        # Once dynamo is loaded, AdamW has this method of Adam's as its own.
        for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
            _watch_groups(kind, lambda: self.at("in step"))
        for self.step in range(start, job.last_step):
            if job.each_step is not None:
                job.each_step(training, self.step)
            self.losses[self.step] = self._train_step(training)
            self.at("stepped")
            if self.session is not None:
                assert commit(self.journal, self.session, self.step, **training.commit_arguments)
            self._note_committed()
            training.committed(self)
            self.at("committed")
            if self.step == (job.wait_at or 0) - 4:
                self._await_order()
            if self.step == job.wait_at:
                self._await_storage()
        found = {"state": training.local_state(), "full": training.full_state()}
        found |= {"losses": self.losses, "resumed": self.resumed}
        (job.directory / f"result-{self.rank}").write_bytes(pickle.dumps(found))
        if self.session is not None:
            self.session.close()
        if dist.is_initialized():
            dist.barrier()  # no rank leaves while another one still talks to it
        sys.stdout.flush()
        os._exit(0)  # gloo's shutdown sometimes hangs, with and without memckpt

    def _train_step(self, training: RankTraining) -> str:
        try:
            return training.step(self.step)
        except RuntimeError:
            if self.job.hang == self.rank:
                signal.pause()
            raise

    def _attach(self, training: RankTraining) -> int:
        job = self.job
        if job.run_dir is None:
            training.attached()
            return 0
        settings = {"run_dir": job.run_dir, "config": job.config, **training.attach_arguments}
        session = self.session = training.session = memckpt.attach(
            training.model, training.optimizers, resume=job.resume, **settings
        )
        for name, each in training.registered.items():
            session.register(name, each)
        session.register("probe", Probe(self.at))
        print("described:", session.describe())
        training.attached()
        report = session.restore()
        self.resumed = note_resume(self.journal, report)
        return 0 if report is None else report.step

    def _await_order(self) -> None:
        """Wait for the order for a copy: on a busy machine it would come too late for steps this short."""
        session = self.session
        if session is not None and session.mode != "eager":
            listen_until(session, lambda: session._link.connection.order is not None)

    def _await_storage(self) -> None:
        session = self.session
        if session is not None:
            listen_until(session, lambda: session.stored_step is not None)
            if dist.is_initialized():
                dist.barrier()  # all must know before one continues and kills the agent


def _watch_groups(kind: Any, at: Callable[[], None]) -> None:
    """Call `at` when an optimizer's step has changed its first group and not yet the second one."""
    original = kind._init_group

    def init_group(optimizer: Any, group: Any, *rest: Any) -> Any:
        if group is optimizer.param_groups[-1] and len(optimizer.param_groups) > 1:
            at()
        return original(optimizer, group, *rest)

    kind._init_group = init_group


def train(job: Job, rank: int) -> None:
    """The body of one rank of the attempt; never returns."""
    Rank(job, rank).train()


# From outside


def run_ranks(
    lab: Lab,
    ranks: int,
    body: Callable[[int], None],
    directory: Path,
    *,
    patience: float = 0.0,
    hangs: int | None = None,
    limit: float = 3 * CHILD_SECONDS,
    name: str = "rank",
) -> list[Child]:
    """Run one attempt to its end: `body` in each rank, with its number. Repeated where ranks did not find each other.

    `directory` has the store of the process group, and what ranks leave; it is emptied before a repetition. `hangs`: a
    rank that is left alive.
    """
    for _ in range(TRIES):
        children = [lab.fork(partial(body, rank), f"{name}{rank}") for rank in range(ranks)]
        awaited = [child for rank, child in enumerate(children) if rank != hangs]
        if NO_PROCESS_GROUP not in wait(awaited, patience, limit):
            break
        if hangs is not None:
            children[hangs].wait()
        for left in directory.iterdir():
            left.unlink()
    return children


def wait(ranks: Sequence[Child], patience: float = 0.0, limit: float = 3 * CHILD_SECONDS) -> list[int]:
    """The ranks' exit codes; from one end to the next are at most `limit` seconds.

    `patience`: seconds that ranks have to notice that one has died, before they are killed, as launchers do.
    """
    running = {child._handle: child for child in ranks}
    failed = False
    while running:
        ready, _, _ = select.select(list(running), [], [], patience if failed else limit)
        if failed and (patience == 0 or not ready):
            for child in running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
            break
        if not ready:
            raise TimeoutError("ranks live on:\n" + "\n".join(child.log.read_text()[-3000:] for child in ranks))
        for handle in ready:
            failed |= running.pop(handle).wait() != 0
    return [child.wait() for child in ranks]


def run(lab: Lab, job: AnyJob, body: Callable[[AnyJob, int], None] = train) -> list[int]:
    """Run one attempt as a launcher does; returns the exit codes of its ranks, 0 for one that is left to hang."""
    patience = 0.0 if job.launcher else LAUNCHER_SECONDS
    ranks = run_ranks(lab, job.world_size, partial(body, job), job.directory, patience=patience, hangs=job.hang)
    return [0 if job.hang == rank else child.wait() for rank, child in enumerate(ranks)]


def fresh_directory(lab: Lab) -> Path:
    return Path(tempfile.mkdtemp(dir=lab.directory))


def next_attempt(lab: Lab, job: AnyJob, **changes: Any) -> AnyJob:
    """The attempt that follows one that has died: without deaths and waits, in a directory of its own."""
    planned = {**job.defaults(*job.once), "directory": fresh_directory(lab), "number": job.number + 1, **changes}
    return replace(job, **planned)


def logs(lab: Lab) -> str:
    return "".join(child.log.read_text() for child in lab._children if child.log.exists())


def noted(job: Job, event: str) -> list[list[dict[str, Any]]]:
    """Each rank's notes of an event."""
    journals = [journal_of(job.journal(rank)) for rank in range(job.world_size)]
    return [[each for each in journal if each["event"] == event] for journal in journals]


def results(attempt: Job) -> list[Any]:
    """What each rank has left."""
    return [pickle.loads((attempt.directory / f"result-{rank}").read_bytes()) for rank in range(attempt.world_size)]


_references: list[tuple[Job, list[Any]]] = []


def reference(lab: Lab, job: Job) -> list[Any]:
    """Results of the same training, undisturbed and without memckpt."""
    key = job.undisturbed(Path())
    found = next((found for known, found in _references if known == key), None)
    if found is None:
        undisturbed = job.undisturbed(fresh_directory(lab))
        assert run(lab, undisturbed) == [0] * job.world_size, logs(lab)[-6000:]
        found = results(undisturbed)
        _references.append((key, found))
    return found


def node(name: str | None) -> Any:
    """A context in which this process is on a node; None: on the test's own."""
    return mock.patch.dict(os.environ, {} if name is None else {NODE_VARIABLE: name})


def start_agents(lab: Lab, job: Job) -> list[Child]:
    """Fork an agent for each node from this process: patches apply to them, and they have torch already."""
    started = []
    for name in dict.fromkeys(job.node(rank) for rank in range(job.world_size)):
        with node(name):
            started.append(lab.start_agent(job.run_dir))
    return started


def check_same(found: Sequence[Any], expected: Sequence[Any], resumed: int | None = None) -> None:
    """Check that each rank's losses and final state equal the undisturbed training's, bit for bit.

    `resumed`: the step at which all ranks must have resumed.
    """
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if resumed is not None:
            assert ours["resumed"] == resumed, f"rank {rank} went on at another step"
        wrong = [step for step, loss in ours["losses"].items() if loss != theirs["losses"][step]]
        assert not wrong, f"rank {rank}: losses differ at steps {wrong}"
        different = differences(theirs["state"], ours["state"])
        assert not different, f"rank {rank}:\n" + "\n".join(different[:10])


def check_verdicts(attempts: Sequence[Job], died: bool = False, reasons: Sequence[str] = ()) -> None:
    """Check that all ranks of a run's last attempt report an equal repeated step, or none for a valid reason."""
    problem = attempts[-1].problem(attempts, died, reasons)
    assert not problem, f"attempt {attempts[-1].number}: {problem}"


def survives(
    lab: Lab, job: AnyJob, deaths: Sequence[Death], resumed: Sequence[int] | None = None, unchecked: Sequence[str] = ()
) -> AnyJob:
    """Check that each attempt ends as planned, the next one resumes where it must, and the last result is right.

    `resumed`: step at which each next attempt resumes; None: no step that all ranks have committed is lost.
    `unchecked`: reasons for which the last resume may be unproved. The last attempt is returned.
    """
    expected = reference(lab, job)
    if job.config is not None and job.config.redo == "eager":
        start_agents(lab, job)
    begins = [0, *([death.resumed for death in deaths] if resumed is None else resumed)]
    attempts: list[AnyJob] = []
    for number, (death, begin) in enumerate(zip([*deaths, None], begins, strict=True)):
        planned = () if death is None else (death,)
        attempts.append(replace(job, directory=fresh_directory(lab), number=number, deaths=planned))
        codes = run(lab, attempts[-1])
        starts = [rank[0]["step"] if rank else 0 for rank in noted(attempts[-1], "restored")]
        # A commit from a device is sent a little later than it is made.
        late_commit = job.device != "cpu" and starts[0] == begin - 1
        assert starts == [begin - late_commit] * job.world_size, (
            f"attempt {number} went on at {starts}, expected {begin}"
        )
        check_verdicts(attempts, death is not None, unchecked if death is None else ())
        if death is not None:
            killed = range(job.world_size) if death.who == "all" else [int(death.who)]
            assert all(codes[rank] == -signal.SIGKILL and noted(attempts[-1], "killed")[rank] for rank in killed), codes
    assert codes == [0] * job.world_size, codes
    check_same(results(attempts[-1]), expected)
    return attempts[-1]


def die_and_go_on(lab: Lab, job: AnyJob, *deaths: Death, reasons: Sequence[str] = (), **waits: Any) -> AnyJob:
    """Run an attempt in which these die, all ranks among them, and the next one to its end; returns that.

    `waits`: fields of the first attempt alone. The verdict of the resume is checked.
    """
    died = replace(job, directory=fresh_directory(lab), deaths=deaths, **waits)
    assert run(lab, died) == [-signal.SIGKILL] * job.world_size, logs(lab)[-3000:]
    last = next_attempt(lab, died)
    assert run(lab, last) == [0] * job.world_size, logs(lab)[-3000:]
    check_verdicts([died, last], reasons=reasons)
    return last
