"""The runs of a drill: kills are drawn, the script is started, watched, killed, started again, ended, and compared."""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from memckpt.config import ErasureConfig
from memckpt.config.arguments import DISABLE, RESUME, RUN_DIR
from memckpt.errors import ConfigurationError, DrillError
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import ask_status, stop_agent
from memckpt.processes.handles import ProcessHandle, start_ticks
from memckpt.protocol.status import Status
from memckpt_tools.drill.comparison import Overhead, Verdict, first_change, judge
from memckpt_tools.drill.job import END_SECONDS, DrillOrders, Job, Start, kill_processes, pause
from memckpt_tools.drill.lines import RunHistory, Taken

#: Seconds between two questions whether peers protect a node.
_ASK_SECONDS = 0.05
#: Records before the next kill, or the end, at which a kill waits no longer for a checkpoint.
_NEXT_RECORDS = 3
_ONE_JOB = (
    "The command is started once for each node, and all are to be one job: a script with one process on each gets "
    "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; torchrun gets PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and "
    "PET_MASTER_PORT, so leave out its options --standalone, --nnodes, --node-rank and --rdzv-..."
)
#: Who is killed: a trainer, its node's agent, both at once, or all processes of a simulated node.
Kind = Literal["trainer", "agent", "both", "node"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: Who is killed where nothing else is said: on one node, and on several.
ON_ONE, ON_SEVERAL = "trainer,agent,both", "trainer,agent,node"
#: Steps before the first kill, and behind the last one.
_FIRST, _LAST = 2, 2


@dataclass(frozen=True)
class Instant:
    """When a kill is due, and of whom."""

    kind: Kind
    record: int  #: the record that is committed by then, at least
    fraction: float  #: how much of a step's time passes behind its commit, from 0 to 1


def draw(seed: int, kills: int, records: int, kinds: Sequence[Kind] = ("trainer",)) -> list[Instant]:
    """`kills` instants in ascending order, one in each of as many equal parts of the run; kinds in turn.

    Raises ConfigurationError if the run is too short for so many.
    """
    room = records - _FIRST - _LAST
    if room < 2 * kills:
        raise ConfigurationError(
            f"--kills: expected at most {max(0, room // 2)} in a training of {records} steps, found {kills}; drill "
            "more steps (--steps), or kill less often"
        )
    drawn = random.Random(seed)
    places = [_FIRST + (index + drawn.random() * 0.9) * room / kills for index in range(kills)]
    order = drawn.sample(list(kinds), len(kinds))
    turns = [order[index % len(order)] for index in range(kills)]
    return [Instant(kind, int(place), place - int(place)) for kind, place in zip(turns, places, strict=True)]


@dataclass
class Blow:
    """One kill, and the resume behind it."""

    kind: Kind
    rank: int  #: whose trainer was killed, or whose node's agent, or whose node
    step: int  #: last committed step by then
    record: int
    resumed: int = 0  #: step behind which the next process went on; 0: it started over
    lost: int = 0  #: committed steps that were trained again
    unprotected: int | None = 0  #: steps until a new agent held the state, if only the agent was killed; None: all
    seconds: float = 0.0  #: from the kill to the first step that is new, or that the new agent holds
    tier: str = "nothing"  #: source of the state; ``nothing``: training started over
    check: str = "none"  #: verdict of repeating the last step; ``none``: no step was compared
    check_line: str = ""


@dataclass(frozen=True)
class Plan:
    """What is drilled."""

    kills: int
    steps: int  #: of each run, at most
    seed: int
    silence_seconds: float = 300.0  #: time without a new step after which a run is given up
    kinds: tuple[Kind, ...] = ("trainer",)
    nodes: int = 1  #: nodes to simulate, with a command for each
    overhead: bool = False  #: whether a run without protection is compared, too


class Followed(ABC):
    """A run whose lines are read as they come: of a job, with its history."""

    def __init__(
        self, job: Job, history: RunHistory, silence_seconds: float, on_progress: Callable[[int, int], None]
    ) -> None:
        self._job, self.history = job, history
        self._silence_seconds, self._on_progress = silence_seconds, on_progress
        self._changed_at = 0.0
        self._made = 0  # kills

    @property
    @abstractmethod
    def _step(self) -> int:
        """Its newest step."""

    @abstractmethod
    def _failure(self, status: int) -> str:
        """Meaning of a command that fails by itself, for a message."""

    @property
    def step_seconds(self) -> float:
        """Median duration of a step, without the drill's own work; 0 if it is not known."""
        return self._median(lambda before, after: after.time - before.time - before.seconds)

    def _median(self, seconds: Callable[[Taken, Taken], float]) -> float:
        attempts = [attempt for history in self.history.ranks.values() for attempt in history.attempts]
        found = [seconds(*pair) for attempt in attempts for pair in itertools.pairwise(attempt.taken)]
        return max(0.0, statistics.median(found)) if found else 0.0

    def _runs(self) -> bool:
        """Whether the command goes on. Reads the lines that it has written until now."""
        ended = self._job.poll()  # first: what it wrote before its end is read below
        if self.history.poll():
            self._changed_at = time.monotonic()
            self._on_progress(self._step, self._made)
        return ended is None

    def _until(self, met: Callable[[], bool], silent: bool = False) -> bool:
        """Wait until the condition is met: True; False if the command ended by itself, with status 0.

        `silent`: no more steps are expected; then False, too, if none come for long. Raises DrillError if the command
        failed, or stood still.
        """
        self._changed_at = time.monotonic()
        while True:
            runs = self._runs()
            if met():
                return True
            if not runs:
                if status := self._job.poll():
                    raise DrillError(self._failure(status) + self._job.tail())
                return False
            if time.monotonic() - self._changed_at > self._silence_seconds:
                if silent:
                    return False
                raise DrillError(
                    f"expected a step within {self._silence_seconds:.0f} s (--patience), found none since step "
                    f"{self._step}{self._job.tail()}"
                )
            pause()


class Run(Followed):
    """One run, in a new directory. Ends all processes that it started when :meth:`train` returns.

    It is ended after a number of `records`; `protected`: whether memckpt is on. `on_progress` is called with the newest
    record, and the number of kills. `ended_by_itself`: whether the script had come to its end by then.
    """

    def __init__(
        self,
        directory: Path,
        start: Start,
        plan: Plan,
        records: int,
        protected: bool = True,
        on_progress: Callable[[int, int], None] = lambda record, kills: None,
    ) -> None:
        directory.mkdir(parents=True)
        super().__init__(Job(start, plan.nodes, directory), RunHistory(directory), plan.silence_seconds, on_progress)
        self._orders = DrillOrders(directory, plan.nodes)
        self._plan, self._records, self._protected = plan, records, protected
        self._blows: list[Blow] = []
        self.ended_by_itself = False
        self._asked_at = 0.0

    @property
    def lent_peers(self) -> ErasureConfig | None:
        """The peers that the drill has configured for the nodes, as the script configures none; None where it does."""
        return self._orders.peers if self._orders.lent_peers else None

    def train(
        self, instants: Sequence[Instant] = (), step_seconds: float = 0.0, to_its_end: bool = False
    ) -> list[Blow]:
        """Train to the last record, or the script's own end, with a kill at each instant. Raises DrillError.

        `step_seconds`: usual duration of a step. `to_its_end`: whether the script is to end by itself behind the last
        record; it is ended at the next one.
        """
        try:
            self._start()
            if self._until(lambda: self.history.attempts > 0):
                self._check_nodes()
            ends = [instant.record for instant in instants[1:]] + [self._records]
            for instant, end in zip(instants, ends, strict=False):
                if not self._kill(instant, step_seconds, end):
                    break
            self.ended_by_itself = not self._until(lambda: self.history.last_record >= self._records)
            if to_its_end and not self.ended_by_itself:
                self._until(lambda: self.history.furthest > self._records, silent=True)
            self.history.poll()
            if not self.history.furthest:
                raise DrillError(
                    "expected a training that memckpt protects (MemCheckpoint, MemCheckpointPlugin, protect or "
                    f"memckpt.attach, with session.commit() at each step), found a command that ended without a single "
                    f"commit{self._job.tail()}"
                )
        finally:
            self._end()
        return self._blows

    @property
    def stall_seconds(self) -> float:
        """Median time of a step in which protection kept the process from training; 0 if it is not known."""
        return self._median(lambda before, after: after.stalled - before.stalled)

    # Kills

    def _kill(self, instant: Instant, step_seconds: float, end: int) -> bool:
        """Kill at the instant, and wait for what follows. False if training ended before.

        What is to come from storage or from peers has to be there: the kill waits for that, for storage until shortly
        before the record `end`.
        """
        if not self._until(lambda: self.history.last_record >= instant.record):
            return False
        attempts = self.history.attempts
        victim = len(self._blows) % len(self.history.ranks)
        begun = self.history.ranks[victim].attempts[-1].begun
        if instant.kind == "node" and not self._until(self._peers_protect):
            return False
        latest = max(instant.record, end - _NEXT_RECORDS)
        if instant.kind == "both" and not self._until(lambda: self.history.last_record >= latest or self._stored()):
            return False
        with _process(begun.pid, begun.ticks) as trainer:
            if trainer is None or trainer.wait(instant.fraction * step_seconds):
                return False
            self.history.poll()
            self._orders.repeat(sum(one.kind != "agent" for one in self._blows) % 3 < 2)
            killed_at = time.monotonic()
            agent = None
            if instant.kind == "node":
                self._kill_node(begun.node)
            elif instant.kind != "trainer":
                agent = self._kill_agent(victim)
                if agent is None:
                    return False
            if instant.kind != "agent":
                trainer.kill()
                if not trainer.wait(END_SECONDS):
                    raise DrillError(f"pid {begun.pid} does not end after SIGKILL: its state is {trainer.state()}")
        self.history.poll()
        last = max(self.history.ranks[victim].attempts[-1].points, key=lambda point: point.record)
        blow = Blow(instant.kind, victim, last.step, self.history.furthest)
        self._blows.append(blow)
        self._made += 1
        if instant.kind == "agent":
            return self._wait_for_agent(blow, agent, killed_at)
        self._begin_again(attempts)
        if not self._until(lambda: self.history.attempts > attempts and self._new_steps(blow) != []):
            return False
        self._note_resume(blow, killed_at)
        return True

    def _check_nodes(self) -> None:
        """Refuse a job that has not the nodes it was started with. Raises DrillError."""
        found = {history.attempts[-1].begun.node for history in self.history.ranks.values()}
        if len(found) < self._plan.nodes:
            raise DrillError(
                f"expected one job of {self._plan.nodes} nodes, found {', '.join(sorted(found))} alone: {_ONE_JOB}"
            )

    def _peers_protect(self) -> bool:
        """Whether any node may be lost now, as all agents see it."""
        return self._all_say(lambda status: status.peers is not None and status.peers.protected)

    def _stored(self) -> bool:
        """Whether a checkpoint is in storage, as all agents see it, or none will be."""
        return self._all_say(lambda status: status.storage is None or status.storage.step is not None)

    def _all_say(self, met: Callable[[Status], bool]) -> bool:
        """Whether it is so in the status of each agent. Asks them now and then; False in between."""
        if time.monotonic() < self._asked_at + _ASK_SECONDS:
            return False
        self._asked_at = time.monotonic()
        statuses = [ask_status(address) for address in self._agents()]
        return all(status is not None and met(status) for status in statuses)

    def _agents(self) -> list[AgentAddress]:
        """Addresses of the run's agents, one for each node."""
        files = sorted(self._orders.run_dir.glob("agent-*.json"))
        return [AgentAddress.of(self._orders.run_dir, path.stem.removeprefix("agent-")) for path in files]

    def _kill_node(self, node: str) -> None:
        """Kill all processes of a node: trainers, their launcher, the agent, and what these have started."""
        pids = []
        for history in self.history.ranks.values():
            attempt = history.attempts[-1]
            if attempt.begun.node == node:
                agent = attempt.taken[-1].agent if attempt.taken else attempt.begun.agent
                pids += [attempt.begun.pid, self._job.command_of(attempt.begun.pid), *([agent] if agent else [])]
        kill_processes(pids)

    def _kill_agent(self, rank: int) -> int | None:
        """Kill the agent of a rank's node; returns its process id, None if there is none."""
        attempt = self.history.ranks[rank].attempts[-1]
        pid = attempt.taken[-1].agent if attempt.taken else attempt.begun.agent
        if pid is None:
            return None
        with _process(pid, start_ticks(pid)) as agent:
            if agent is None:
                return None
            agent.kill()
            return pid if agent.wait(END_SECONDS) else None

    def _wait_for_agent(self, blow: Blow, killed: int | None, killed_at: float) -> bool:
        """Wait until another agent holds the training's state; training itself goes on."""
        attempt = self.history.ranks[blow.rank].attempts[-1]

        def held() -> list[Taken]:
            return [line for line in attempt.taken if line.time > killed_at and line.agent not in (None, killed)]

        blow.resumed, blow.tier, blow.check = blow.step, "", ""
        over = not self._until(lambda: held() != [] or self.history.last_record >= self._records)
        if found := held():
            blow.unprotected = max(0, found[0].record - blow.record - 1)
            blow.seconds = found[0].time - killed_at
        else:
            blow.unprotected = None
        return not over

    def _new_steps(self, blow: Blow) -> list[Taken]:
        """Steps of the newest attempt that no attempt has taken before."""
        taken = self.history.ranks[blow.rank].attempts[-1].taken
        return [line for line in taken if line.record > blow.record and not line.repeated]

    def _begin_again(self, attempts: int) -> None:
        """Start the command again once it has ended, unless its launcher begins another attempt by itself.

        With several nodes all commands are ended: those of the others wait for the dead one in a collective.
        """
        deadline = time.monotonic() + (END_SECONDS if self._plan.nodes == 1 else 0)
        while self._job.poll() is None and time.monotonic() < deadline:
            self.history.poll()
            if self.history.attempts > attempts:
                return
            pause()
        end_processes(self._job, self.history)
        self._start()

    def _note_resume(self, blow: Blow, killed_at: float) -> None:
        attempt = self.history.ranks[blow.rank].attempts[-1]
        blow.resumed, record = attempt.resumed_behind
        if record > blow.record:  # killed between the commit and its line
            blow.step, blow.record = blow.resumed, record
        blow.lost = max(0, blow.record - record)
        if attempt.restored is not None:
            blow.tier = attempt.restored.line.tier
        blow.seconds = self._new_steps(blow)[0].time - killed_at
        blow.check, blow.check_line = attempt.check if attempt.check[0] else ("none", "")

    # Processes

    def _start(self) -> None:
        variables = {**self._orders.variables(), RUN_DIR: str(self._orders.run_dir), RESUME: None}
        self._job.start({**variables, DISABLE: None if self._protected else "1"})

    @property
    def _step(self) -> int:
        return self.history.furthest

    def _failure(self, status: int) -> str:
        return (
            f"expected a training of {self._records} steps, found one that ended with status {status} after step "
            f"{self._step}; mend the script, or drill fewer steps"
            + (f". {_ONE_JOB}" if self._plan.nodes > 1 and not self._step else "")
        )

    def _end(self) -> None:
        try:
            end_processes(self._job, self.history)
        finally:
            with contextlib.ExitStack() as stack:  # one agent that does not end keeps no other one
                stack.callback(self.history.close)
                stack.callback(self.history.poll)
                for address in self._agents():
                    stack.callback(stop_agent, address)


@contextlib.contextmanager
def _process(pid: int, ticks: int) -> Iterator[ProcessHandle | None]:
    """A trainer; None if it has ended."""
    try:
        handle = ProcessHandle.of(pid, ticks)
    except ProcessLookupError:
        yield None
        return
    try:
        yield handle
    finally:
        handle.close()


def end_processes(job: Job, history: RunHistory) -> None:
    """Kill the commands with their groups, and every trainer: launchers may give them other groups."""
    history.poll()
    with contextlib.ExitStack() as stack:
        handles = []
        for rank in history.ranks.values():
            for attempt in rank.attempts[-1:]:
                begun = attempt.begun
                handles.append(stack.enter_context(_process(begun.pid, begun.ticks)))
        job.kill()
        for handle in handles:
            if handle is not None:
                handle.kill()
                handle.wait(END_SECONDS)
    job.wait()


#: Names of the runs, which are those of their directories.
FIRST, WITHOUT, SECOND, KILLED = "undisturbed-1", "unprotected", "undisturbed-2", "killed"


@dataclass(frozen=True)
class Result:
    """What a drill has found; the figures are medians of a step, by run."""

    verdict: Verdict
    instants: list[Instant]  #: kills that were drawn
    blows: list[Blow]  #: kills that were made
    step_seconds: dict[str, float]
    stall_seconds: dict[str, float]  #: time in which protection kept the process from training
    overhead: Overhead | None  #: what protection costs; None: it was not asked for
    lent_peers: ErasureConfig | None  #: those that the drill has configured, as the script configures none

    @property
    def untried(self) -> list[Kind]:
        """Kinds of losses of which no kill was made."""
        return [kind for kind in KINDS if all(blow.kind != kind for blow in self.blows)]


def drill(
    directory: Path,
    start: Start,
    plan: Plan,
    on_progress: Callable[[str, int, int], None],
    on_undisturbed: Callable[[Verdict], None] = lambda verdict: None,
) -> Result:
    """Train twice undisturbed and once with kills, and once without protection if that is asked for, and compare.

    Each run gets its own directory in `directory`. `on_progress` is called with a run's name, its newest record, and
    its kills; `on_undisturbed` with what the two undisturbed runs say alone. Raises DrillError if a run could not be
    carried out, or no kill could be made; ConfigurationError if the training is too short for the kills.
    """

    def run(name: str, records: int) -> Run:
        told = partial(on_progress, name)
        return Run(directory / name, start, plan, records, name != WITHOUT, told)

    first = run(FIRST, plan.steps)
    first.train()
    records = min(plan.steps, first.history.furthest)
    instants = draw(plan.seed, plan.kills, records, plan.kinds)
    without, problem = run(WITHOUT, records) if plan.overhead else None, ""
    if without is not None:  # between the other two: a machine that slows down makes no difference then
        try:
            without.train()
        except DrillError as error:  # its time is not known; all else can be found out
            problem = str(error)
    second = run(SECOND, records)
    second.train()
    on_undisturbed(judge(first.history, second.history, second.history, records))
    killed = run(KILLED, records)
    blows = killed.train(instants, first.step_seconds, to_its_end=first.ended_by_itself)
    if not blows and instants[0].kind == "node":
        raise DrillError(
            f"expected peers that protect the training's nodes by its step {records}, found none that did; drill more "
            "steps, or longer ones; `memckpt status` has the row peers, which says what is missing"
        )
    if not blows:
        raise DrillError(
            f"expected a training that can be killed, found one that ended before its first kill (step "
            f"{instants[0].record} of {records}); drill more steps, or longer ones"
        )
    runs = {FIRST: first, SECOND: second, KILLED: killed}
    verdict = judge(first.history, second.history, killed.history, records, whole=first.ended_by_itself)
    steps = {name: each.step_seconds for name, each in runs.items()}
    stalls = {name: each.stall_seconds for name, each in runs.items()}
    overhead = None
    if without is not None:
        changed = first_change(without.history, first.history, second.history, records) if not problem else None
        protected = first.step_seconds, second.step_seconds
        overhead = Overhead(protected, without.step_seconds, changed, problem)
    return Result(verdict, instants, blows, steps, stalls, overhead, killed.lent_peers)
