"""The script's own checkpoints drilled, with memckpt off: what do they bring back after a kill, and from where on?

Nothing says which step a process goes on from. Its tensors tell: behind which earlier step they had these bits.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from msgspec.structs import replace

from memckpt.config.arguments import DISABLE
from memckpt.errors import DrillError
from memckpt.processes.handles import start_ticks
from memckpt.user_messages import nbytes_text
from memckpt_tools.drill import witness
from memckpt_tools.drill.comparison import (
    STEPS,
    Difference,
    Verdict,
    by_record,
    compare,
    judge,
    parameters_of,
    sketch_distance,
)
from memckpt_tools.drill.job import Job, Start, pause
from memckpt_tools.drill.lines import Attempt, Key, Point, RankHistory, RunHistory
from memckpt_tools.drill.supervisor import FIRST, KILLED, SECOND, Followed, Instant, draw, end_processes

#: When a kill falls: within a step, in the middle of a large file that is written, before a file is opened to write,
#: moved or removed, or behind a SIGTERM.
Kind = Literal["step", "save", "file", "term"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: Steps before the next kill, or the end, at which a kill waits no longer for a file.
_NEXT_STEPS = 3


@dataclass(frozen=True)
class Plan:
    """What is drilled."""

    kills: int
    steps: int  #: of each run, at most
    seed: int
    kinds: tuple[Kind, ...]
    silence_seconds: float  #: time without a new step after which a process stands still
    grace_seconds: float  #: time that a process has behind SIGTERM


@dataclass
class Blow:
    """One kill, and what the process behind it begins with."""

    kind: Kind
    step: int  #: last step before it
    behind: int = 0  #: steps of the killed process by then, or by the order to end itself with what it does to files
    amount: float = 0.0  #: seconds since then; where `file` is not empty the bytes of it, or the number of the event
    file: str = ""  #: file that was being written, with its size by then, or event that was next; empty: none was
    resumed: int | None = None  #: step whose parameters the next process begins with, 0: it starts over; None: none has
    seconds: float = 0.0  #: from the kill to the first step behind it
    apart: float = 0.0  #: distance of its last parameters from the undisturbed run's, as a fraction of their norm
    difference: Difference | None = None  #: what differs first from the state before, or the undisturbed run
    inherited: bool = False  #: whether it begins with the state of a run that was another one before
    why_none: str = ""  #: why no process trained on

    @property
    def lost(self) -> int:
        return 0 if self.resumed is None else max(0, self.step - self.resumed)

    @property
    def outcome(self) -> Literal["exact", "diverged", "diverged before", "cannot start"]:
        if self.resumed is None:
            return "cannot start"
        if self.inherited:
            return "diverged before"
        return "exact" if self.difference is None else "diverged"


@dataclass(frozen=True)
class Result:
    """Findings of a drill of a script's own checkpoints."""

    verdict: Verdict
    blows: list[Blow]
    step_seconds: float  #: median of a step
    ranks: int = 1  #: processes that step an optimizer

    @property
    def untried(self) -> list[Kind]:
        """Kinds of which no kill was made."""
        return [kind for kind in KINDS if all(blow.kind != kind for blow in self.blows)]

    @property
    def outcome(self) -> Literal["exact", "within", "diverged", "cannot start"]:
        """``within``: training does not repeat itself, and the killed run is as near as two undisturbed ones are."""
        if any(blow.resumed is None for blow in self.blows):
            return "cannot start"
        names: dict[str, Literal["exact", "within", "diverged"]] = {"equal": "exact", "within": "within"}
        return names.get(self.verdict.outcome, "diverged")


class _Run(Followed):
    """One run, in a new directory. Ends all processes that it started when :meth:`train` returns.

    `on_progress` is called with the newest step, and the number of kills. `files`: events of files by step, as in an
    undisturbed run. `ended_by_itself`: whether the script had come to its end by the last step.
    """

    def __init__(
        self,
        directory: Path,
        starts: tuple[Start, Start],
        plan: Plan,
        steps: int,
        on_progress: Callable[[int, int], None],
        files: Mapping[int, tuple[str, ...]] | None = None,
    ) -> None:
        directory.mkdir()
        self._jobs = [Job(start, 1, directory) for start in starts]
        super().__init__(self._jobs[0], RunHistory(directory), plan.silence_seconds, on_progress)
        self._directory, self._hold = directory, directory / witness.HOLD
        self._variables = {**witness.variables(directory / "site", directory), DISABLE: "1"}
        self._plan, self._steps = plan, steps
        self._files = files or {}
        self._blows: list[Blow] = []
        self._base = 0  # step that the newest process has begun with
        self.ended_by_itself = False

    def train(
        self, instants: Sequence[Instant] = (), kinds: Sequence[Kind] = (), step_seconds: float = 0.0
    ) -> list[Blow]:
        """Train to the last step, or the script's own end, with a kill at each instant. Raises DrillError.

        The run ends with a kill behind which no process trains on.
        """
        try:
            self._job.start(self._variables)
            ends = [instant.record for instant in instants[1:]] + [self._steps]
            for instant, kind, end in zip(instants, kinds, ends, strict=False):
                if not self._kill(instant, kind, step_seconds, end):
                    break
            self._hold.unlink(missing_ok=True)
            if all(blow.resumed is not None for blow in self._blows):
                self.ended_by_itself = not self._until(lambda: self._step >= self._steps)
            if not self.history.furthest:
                raise DrillError(
                    "expected a training whose Python processes step an optimizer of torch, found a command without a "
                    "single step. Either it goes on from checkpoints of a training that is over, which are in the "
                    "working directory or outside of it: drill without them. Or its Python is not one that memckpt is "
                    "installed in, or has the options -I or -E" + self._job.tail()
                )
        finally:
            end_processes(self._job, self.history)
            self.history.poll()
            self.history.close()
        return self._blows

    @property
    def _step(self) -> int:
        return self._base + self.history.last_record

    def _kill(self, instant: Instant, kind: Kind, step_seconds: float, end: int) -> bool:
        """Kill at the instant, start the command again, and wait for a step. False if the run is over with that."""
        order, done = self._directory / witness.ORDER, self._directory / witness.DONE
        latest = max(instant.record, end - _NEXT_STEPS)
        # Most is done to files where a checkpoint is saved, not where a line is logged.
        step = max((one for one in self._files if instant.record <= one <= latest), key=self._events, default=0)
        behind, amount, file = max(1, instant.record - self._base), 0.0, ""
        if kind == "save":
            order.symlink_to(str(behind))
        elif kind == "file" and step:
            behind, amount = max(1, step - self._base), 1 + int(instant.fraction * self._events(step))
            order.symlink_to(f"{behind} {amount}")
        self._hold.unlink(missing_ok=True)
        if not self._until(lambda: self._step >= instant.record):
            return False
        if kind in ("save", "file"):
            self._until(lambda: not self._trains() or self._step > latest)
            if kind == "save" and not self._trains() and self._job.poll() != 0:
                amount = witness.limit_of(self.history.ranks[min(self.history.ranks)].nbytes)
                file = self._cut_off(int(amount))
            elif done.is_symlink():
                file = str(done.readlink())
        else:
            due = time.monotonic() + instant.fraction * step_seconds
            while time.monotonic() < due and self._runs():
                pause()
            if not self._runs() and not self._until(lambda: False):
                return False
        killed_at = time.monotonic()
        if not file:
            line = self._newest.points[-1].line
            behind, amount = self.history.last_record, max(0.0, killed_at - line.time - line.seconds)
        if kind == "term":
            self._job.terminate()
            while self._runs() and time.monotonic() < killed_at + self._plan.grace_seconds:
                pause()
        end_processes(self._job, self.history)
        order.unlink(missing_ok=True)
        done.unlink(missing_ok=True)
        self.history.poll()
        attempts, blow = self.history.attempts, Blow(kind, self._step, behind, amount, file)
        self._blows.append(blow)
        self._made += 1
        self._hold.touch()  # until the next kill is arranged
        self._job = self._jobs[1]
        self._job.start(self._variables)
        try:
            begun = self._until(lambda: self.history.attempts > attempts and self._newest.points != [])
        except DrillError as error:
            blow.why_none = str(error)
            return False
        if not begun:
            blow.why_none = "the command ended with status 0, without a step"
            return False
        self._base = blow.resumed = aligned(self.history)[1][-1]
        blow.seconds = self._newest.points[0].line.time - killed_at
        return True

    def _events(self, step: int) -> int:
        return len(self._files[step])

    @property
    def _newest(self) -> Attempt:
        return self.history.ranks[min(self.history.ranks)].attempts[-1]

    def _cut_off(self, nbytes: int) -> str:
        """The file that ends where the limit was, and its size."""
        for path in self._directory.rglob("*"):
            with contextlib.suppress(OSError):
                if not path.is_symlink() and path.is_file() and path.stat().st_size == nbytes:
                    return f"{path.name}, {nbytes_text(nbytes)} of it"
        return f"a file outside of the working directory, {nbytes_text(nbytes)} of it"

    def _trains(self) -> bool:
        """Whether the command and all trainers go on. Reads the lines that have been written until now."""
        begun = [rank.attempts[-1].begun for rank in self.history.ranks.values()]
        return self._runs() and all(start_ticks(each.pid) == each.ticks for each in begun)

    def _failure(self, status: int) -> str:
        return f"the command ended with status {status}, behind step {self._step}"


def aligned(history: RunHistory) -> tuple[RunHistory, list[int]]:
    """The same with the steps that a run has come to in all its processes, and the step that each begins with.

    A process begins with the last step whose parameters it has, bit for bit; if none has them, with the nearest.
    """
    found = RunHistory(Path())
    begins: list[int] = []
    for rank, each in history.ranks.items():
        known: dict[bytes, tuple[int, bytes]] = {}
        attempts, begins = [], []
        for attempt in each.attempts:
            restored = attempt.restored
            base = 0
            if restored is not None:
                digests, sketches = parameters_of(restored)
                if known and digests not in known:
                    digests = min(known, key=lambda one: sketch_distance(sketches, known[one][1]))
                base, _ = known.setdefault(digests, (0, sketches))
                restored = Point(replace(restored.line, step=base, record=base), restored.keys)
            points = [
                Point(replace(point.line, step=base + point.step, record=base + point.record), point.keys)
                for point in attempt.points
            ]
            for point in points:
                digests, sketches = parameters_of(point)
                known[digests] = point.record, sketches
            attempts.append(Attempt(attempt.begun, restored, points))
            begins.append(base)
        found.ranks[rank] = RankHistory(attempts, each.loaders)
    return found, begins


def drill(
    directory: Path, starts: tuple[Start, Start], plan: Plan, on_progress: Callable[[str, int, int], None]
) -> Result:
    """Train twice undisturbed and once with kills, with memckpt off, and compare.

    `starts`: of the command, and of the one behind a kill. `on_progress` is called with a run's name, its newest step,
    and its kills. Raises DrillError if a run could not be carried out, or no kill could be made; ConfigurationError if
    the training is too short for the kills.
    """

    def run(name: str, steps: int, files: Mapping[int, tuple[str, ...]] | None = None) -> _Run:
        return _Run(directory / name, starts, plan, steps, partial(on_progress, name), files)

    first = run(FIRST, plan.steps)
    first.train()
    steps = min(plan.steps, first.history.furthest)
    instants = draw(plan.seed, plan.kills, steps)
    order = random.Random(plan.seed).sample(list(plan.kinds), len(plan.kinds))
    second = run(SECOND, steps)
    second.train()
    check_begin(first.history, second.history)
    killed = run(KILLED, steps, first.history.ranks[min(first.history.ranks)].files)
    blows = killed.train(instants, list(itertools.islice(itertools.cycle(order), plan.kills)), first.step_seconds)
    if not blows:
        raise DrillError(
            f"expected a training that can be killed, found one that ended before its first kill (step "
            f"{instants[0].record} of {steps}); drill more steps, or longer ones"
        )
    whole, _ = aligned(killed.history)
    verdict = judge(first.history, second.history, whole, steps, whole=first.ended_by_itself)
    ignored = {each.key for each in verdict.unrepeatable}
    for index, blow in enumerate(blows, start=1):
        _judge_blow(blow, whole, index, first.history, ignored, steps)
    return Result(verdict, blows, first.step_seconds, len(first.history.ranks))


def check_begin(first: RunHistory, second: RunHistory) -> None:
    """Raises DrillError if the second run goes on from the first one's checkpoints."""
    begin, *points = first.ranks[min(first.ranks)].points()
    begins = next(second.ranks[min(second.ranks)].points())
    steps = {parameters_of(point)[0]: point.record for point in points} | {parameters_of(begin)[0]: 0}
    if step := steps.get(parameters_of(begins)[0]):
        raise DrillError(
            f"expected runs that begin alike, found a second one that begins behind step {step} of the first: the "
            "script saves outside of its working directory, of which each run has a copy; have it save in there"
        )


def _judge_blow(
    blow: Blow, run: RunHistory, index: int, undisturbed: RunHistory, ignored: Collection[tuple[int, Key]], last: int
) -> None:
    """Say of a kill what the process behind it, the one of this `index`, loads, and how it goes on."""

    def part(begin: int, end: int, restored: bool) -> RunHistory:
        found = RunHistory(Path())
        for rank, each in run.ranks.items():
            attempts = [
                Attempt(one.begun, one.restored if restored else None, [] if restored else one.points)
                for one in each.attempts[begin:end]
            ]
            found.ranks[rank] = RankHistory(attempts, each.loaders)
        return found

    def first_of(found: RunHistory, expected: RunHistory) -> Difference | None:
        return next((each for each in compare(found, expected, last, ignored) if each.kind != STEPS), None)

    begins, goes_on = part(index, index + 1, restored=True), part(index, index + 1, restored=False)
    blow.difference = first_of(begins, part(0, index, restored=False))
    if blow.difference is None:
        blow.inherited = first_of(begins, undisturbed) is not None
        blow.difference = first_of(goes_on, undisturbed)
    reference = by_record(undisturbed.ranks[0])
    there = [point for point in goes_on.ranks[0].points() if point.record in reference]
    if there:
        point = max(there, key=lambda each: each.record)
        blow.apart = sketch_distance(parameters_of(point)[1], parameters_of(reference[point.record])[1])
