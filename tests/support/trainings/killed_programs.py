"""Programs killed at places and begun again in the same directory, and compared with themselves without memckpt.

A *program* is a function of a :class:`Run`. Its process calls :meth:`Process.at` where it may die, notes values that
have to come out the same, and returns what has to be the same at its end. Processes are forked from the pytest process,
which has imported all and never trained, so each begins as a new interpreter would.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support.cluster.processes import die_after, live_on
from tests.support.faults.frozen import differences
from tests.support.trainings.engine_child import Journal
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import fresh_directory, join, run_ranks
from tests.support.trainings.resume_history import journal_of

#: Where a process dies, and the how-manieth time that it comes by.
Kill = tuple[str, int]
#: A pseudo-place: so many milliseconds after the first :attr:`Process.first`.
INSTANT = "instant"
#: Longest life of a process in seconds; then it hangs, dumps its stack, and ends.
PROCESS_SECONDS = 120


@dataclass(frozen=True)
class Run:
    """Parameters of one attempt's processes."""

    case: Any  # what is trained
    directory: Path  # directory of this run alone; its attempts share it
    protected: bool = True  # with memckpt, or without for the reference
    kill: Kill | None = None  # point at which a process dies; None to train to the end
    ranks: int = 1  # number of processes that train together; `rank` is that of this process
    rank: int = 0
    victim: int = -1  # the rank that dies
    hooks: dict[Kill, Callable[[Any], None]] = field(default_factory=dict)  # further actions, by place
    sabotage: Callable[[], None] | None = None  # called before anything else

    @property
    def dies(self) -> Kill | None:
        """Point at which this process dies."""
        return self.kill if self.rank == self.victim % self.ranks else None

    def journal(self, rank: int | None = None) -> Path:
        return self.directory / f"journal-{self.rank if rank is None else rank}"

    @property
    def log(self) -> Path:
        """Output of the first rank of all attempts."""
        return self.directory / "log"


class Process:
    """One process of a run, which comes by places."""

    #: The place from which an instant is counted.
    first = "batch"

    def __init__(self, run: Run) -> None:
        self.run = run
        self.journal = Journal(run.journal())
        self.visits: Counter[str] = Counter()

    def at(self, place: str) -> None:
        """Note that the program passes a place: run its hook, or die here."""
        self.visits[place] += 1
        here, dies = (place, self.visits[place]), self.run.dies
        if dies is not None and dies[0] == INSTANT and here == (self.first, 1):
            die_after(dies[1] / 1000)
        if here in self.run.hooks:
            self.run.hooks[here](self)
        if here == dies:
            self.journal.note("killed", place=place, visit=here[1])
            try:
                for worker in multiprocessing.active_children():
                    worker.kill()  # by themselves they would look for their parent every five seconds
            finally:  # torch's handler may raise here that a worker has been killed
                os.kill(os.getpid(), signal.SIGKILL)

    def note(self, event: str, place: object, value: Any) -> None:
        """Note a value that has to come out the same; tensors of one element bit for bit."""
        text = float(value).hex() if hasattr(value, "item") else repr(value)
        self.journal.note(event, place=place, value=text)


Program = Callable[[Any], Any]


@dataclass(frozen=True)
class Ended:
    """An attempt that has ended: by rank its exit code, its notes, its output, and what it has returned."""

    codes: list[int]
    notes: list[list[dict[str, Any]]]
    logs: list[str]
    outcomes: list[Any]

    @property
    def log(self) -> str:
        return "\n".join(self.logs)

    def events(self, event: str, rank: int = 0) -> list[dict[str, Any]]:
        return [each for each in self.notes[rank] if each["event"] == event]


def attempt(lab: Lab, program: Program, run: Run) -> Ended:
    """Run the processes of an attempt to their ends; when one dies the others are killed, as launchers do."""
    run.directory.mkdir(parents=True, exist_ok=True)
    store = fresh_directory(lab)
    seen = [len(journal_of(run.journal(rank))) for rank in range(run.ranks)]
    results = [run.directory / f"result-{rank}" for rank in range(run.ranks)]
    for result in results:
        result.unlink(missing_ok=True)

    def body(rank: int) -> None:
        faulthandler.dump_traceback_later(PROCESS_SECONDS, exit=True, file=sys.stderr)
        if run.sabotage is not None:
            run.sabotage()
        if run.ranks > 1:
            join(rank, run.ranks, store / "store", launched=True)
        outcome = program(replace(run, rank=rank))
        live_on()  # a process that dies after the end has nothing to continue
        results[rank].write_bytes(pickle.dumps(outcome))
        sys.stdout.flush()
        if dist.is_initialized():
            os._exit(0)  # gloo's teardown may hang

    children = run_ranks(lab, run.ranks, body, store, name=f"{getattr(run.case, 'name', 'loop')}-")
    codes, logs = [child.wait() for child in children], [child.log.read_text() for child in children]
    with run.log.open("a") as log:
        log.write(logs[0])
    notes = [journal_of(run.journal(rank))[count:] for rank, count in enumerate(seen)]
    return Ended(codes, notes, logs, [pickle.loads(each.read_bytes()) if each.exists() else None for each in results])


def check_end(ended: Ended, run: Run) -> None:
    """Check that the attempt has died as planned, or trained to its end; how the others react does not matter."""
    died = ended.codes[run.victim]
    if run.kill is None or run.kill[0] == INSTANT:
        fine = not any(ended.codes) or (run.kill is not None and died == -signal.SIGALRM)
    else:
        fine = died == -signal.SIGKILL
    assert fine, f"{run.kill}: exit codes {ended.codes}\n{ended.log[-6000:]}"


def finish(lab: Lab, program: Program, run: Run) -> Ended:
    """Run an attempt, which must die as planned, or else train to its end."""
    ended = attempt(lab, program, run)
    check_end(ended, run)
    return ended


def values(attempts: Sequence[Ended], rank: int) -> dict[str, set[str]]:
    """All noted values of a rank, by kind and place; more than one value if processes disagree."""
    found: dict[str, set[str]] = {}
    for entry in (entry for each in attempts for entry in each.notes[rank] if "value" in entry):
        found.setdefault(f"{entry['event']} {entry['place']}", set()).add(entry["value"])
    return found


def check_same(expected: Ended, attempts: Sequence[Ended]) -> None:
    """Check that all processes' values, and what the last ones have returned, equal the undisturbed, bit for bit."""
    for rank in range(len(expected.codes)):
        ours, theirs = values(attempts, rank), values([expected], rank)
        wrong = [key for key in {**theirs, **ours} if ours.get(key) != theirs.get(key)]
        assert not wrong, f"rank {rank}: {wrong[:5]} of {len(wrong)}"
        different = differences(expected.outcomes[rank], attempts[-1].outcomes[rank])
        assert not different, f"rank {rank}:\n" + "\n".join(different[:10])


#: Fields of an attempt by its number; called before it with the attempts so far.
Fields = Callable[[int, list[Ended]], dict[str, Any]]
_references: list[tuple[tuple[Program, Any, int], Ended]] = []


def reference(lab: Lab, program: Program, run: Run) -> Ended:
    """The same case, undisturbed and without memckpt; run once for all."""
    key = (program, run.case, run.ranks)
    found = next((ended for known, ended in _references if known == key), None)
    if found is None:
        undisturbed = replace(run, directory=fresh_directory(lab), protected=False, kill=None, hooks={}, sabotage=None)
        found = finish(lab, program, undisturbed)
        _references.append((key, found))
    return found


def survives(
    lab: Lab, program: Program, run: Run, kills: Sequence[Kill], *, each: Fields = lambda number, attempts: {}
) -> list[Ended]:
    """Kill a run at each of `kills` in turn, let the next attempt continue, and compare."""
    expected, attempts = reference(lab, program, run), []
    for number, kill in enumerate([*kills, None]):
        attempts.append(finish(lab, program, replace(run, kill=kill, **each(number, attempts))))
        if kill is not None:
            killed = [one for one in attempts[-1].events("killed", run.victim) if one["place"] == kill[0]]
            assert killed, f"{kill} was not reached"
    check_same(expected, attempts)
    return attempts


def survives_chance(
    lab: Lab, program: Program, run: Run, chance: random.Random, within: int, each: Fields = lambda number, attempts: {}
) -> list[Ended]:
    """Kill a run at random instants within so many milliseconds, let the last attempt end, and compare."""
    expected, attempts = reference(lab, program, run), []
    while not attempts or any(attempts[-1].codes):
        kill = (INSTANT, chance.randrange(1, within)) if len(attempts) < 8 else None
        attempts.append(finish(lab, program, replace(run, kill=kill, **each(len(attempts), attempts))))
    check_same(expected, attempts)
    return attempts


# Resume checks, by the logs

#: Valid reasons for a resume without a proof: the step has further effects, or there is no state before it.
REASONS = (
    "a generation began at record",
    "an epoch ended before it",
    "an epoch ends with it",
    "an epoch, or another iteration over a loader, ended before it",
    "a validation ran before it",
    "an evaluation followed it",
    "a checkpoint file was written",
    "save_state() ran in it",
    "load_state() ran in it",
    "storage does not have the state from which",
)


def unproved(log: str, reasons: Sequence[str] = ()) -> list[str]:
    """Resumes without a verdict, and verdicts that are not *equal*, and not *none* for a good reason.

    An eager replica goes on to a record once its step is repeated; a process that dies before its next commit leaves
    nothing before it. So a process that resumes where the one before did may find that the replica has gone past.
    `log`: of one process after the other; `reasons`: good ones in this test beside `REASONS`.
    """
    found: list[str] = []
    steps: list[str] = []
    verdicts = 0
    for resumed, line in re.findall(r"memckpt: (?:resumed at step (\d+) |resume check: (.*))", log):
        if resumed:
            steps.append(resumed)
            continue
        verdicts += 1
        if gone := re.search(r"the replica has gone past record (\d+)", line):
            # Known before training continues, so that its line precedes the one that names the step.
            found += [line] if (steps or [""])[-1] != str(int(gone[1]) + 1) else []
        elif "equal, bit for bit" not in line and not any(each in line for each in (*REASONS, *reasons)):
            found.append(line)
    # A process that dies in the repeated step has no verdict, and its successor resumes where it did.
    died = sum(step == following for step, following in pairwise(steps))
    if verdicts < len(steps) - died:
        found.append(f"{verdicts} verdicts on resumes at the steps {steps}")
    return found
