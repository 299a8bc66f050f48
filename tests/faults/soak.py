"""``python -m tests.faults.soak``: a failure every few seconds, of all kinds, into a job of three nodes.

It ends with the comparison of every state of every step with the undisturbed training, and with a census of what is
left. Exit status 0: nothing differs, and nothing is left.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.cluster import Cluster, Stuck, undisturbed
from tests.faults.injector import Injector
from tests.faults.jobs import Job, faulty, import_everything
from tests.faults.kinds import INJECTED, Kind
from tests.faults.leaks import LEAVING_SECONDS, Holdings, holdings, own_descriptors, strange_files
from tests.support.cluster import netns

#: Mean seconds between two faults, and the longest that one lasts.
_GAP_SECONDS, _LAST_SECONDS = 2.0, 5.0
#: Longest delay of a kill after ranks have begun to resume, in seconds.
_RESUMING_SECONDS = 1.5
#: So many faults are followed by a wait until all is protected again: faults of peers count only from there.
_SETTLE_EVERY = 5
#: Steps from the word that training ends to its end: more than any rank is ahead of its notes.
_LAST_STEPS = 100
#: What agents may hold more at the end than at the beginning: descriptors, and a share of the memory.
_SPARE_DESCRIPTORS, _SPARE_MEMORY = 12, 0.5


class Soak:
    """A job, its faults, and when they come and end."""

    def __init__(self, cluster: Cluster, faults: Injector, chance: random.Random, verbose: bool) -> None:
        self.cluster, self.faults, self._chance, self._verbose = cluster, faults, chance, verbose
        self._bag: list[Kind] = []
        self._ends: list[float] = []

    def run(self, seconds: float) -> None:
        """Inject faults for so long."""
        end = time.monotonic() + seconds
        number = 0
        while time.monotonic() < end:
            self._train_until(time.monotonic() + self._chance.expovariate(1 / _GAP_SECONDS))
            if self._strike():
                number += 1
                if number % _SETTLE_EVERY == 0:
                    self.settle()

    def settle(self) -> None:
        """End all faults, and train until all is protected."""
        self.faults.end_all()
        self._ends.clear()
        self.cluster.drain()
        self.cluster.until("protection", lambda: self.cluster.model.whole)
        self.faults.count_survived()

    def _train_until(self, moment: float) -> None:
        """Train, and end the faults that are due, until a moment of time."""
        while (left := moment - time.monotonic()) > 0:
            self._end_faults()
            if not self.cluster.running:
                self._begin()
            self.cluster.poll(min(left, 0.1))
            self.cluster.check_progress()
            self.faults.count_survived()

    def _begin(self) -> None:
        """Start the next attempt; the launcher starts agents first, or leaves that to the trainers."""
        self.cluster.agents_first = self._chance.random() < 0.5
        self.cluster.begin()

    def _end_faults(self) -> None:
        now = time.monotonic()
        for fault, moment in list(zip(self.faults.lasting, self._ends, strict=True)):
            if moment <= now:
                self._ends.remove(moment)
                self.faults.end(fault)

    def _strike(self) -> bool:
        """Inject the next fault of the bag; False if it cannot be, now: it is tried again later."""
        if not self._bag:
            self._bag = list(INJECTED)
            self._chance.shuffle(self._bag)
        kind = self._bag.pop()
        if kind is Kind.KILL_RESUMING:
            self._interrupt_a_resume()
        lasting = len(self.faults.lasting)
        done = self.faults.inject(kind)
        if done and self._verbose:
            print(f"step {self.cluster.model.newest}: {kind.value}, owed {self.cluster.model.owed()}", flush=True)
        if len(self.faults.lasting) > lasting:
            self._ends.append(time.monotonic() + self._chance.uniform(0.5, _LAST_SECONDS))
        if not done:
            self._bag.insert(0, kind)
        return done

    def _interrupt_a_resume(self) -> None:
        """Have the ranks die and resume, up to some moment of that."""
        self.faults.inject(Kind.KILL_TRAINERS)
        self.cluster.until("the end of an attempt", lambda: not self.cluster.running)
        self._begin()
        self._train_until(time.monotonic() + self._chance.uniform(0.0, _RESUMING_SECONDS))

    def finish(self) -> int:
        """Train to the end without faults; returns its step."""
        self.settle()
        self.cluster.finish.step = last = self.cluster.model.newest + _LAST_STEPS
        self.cluster.run_out(last)
        self.faults.count_survived()
        return last


def table(faults: Injector) -> str:
    """Faults injected and survived, by kind."""
    rows = [(kind.value, faults.injected[kind], faults.survived[kind]) for kind in INJECTED]
    rows.append(("all", sum(faults.injected.values()), sum(faults.survived.values())))
    return "\n".join(f"{name:34} {injected:9} {survived:9}" for name, injected, survived in [
        ("fault", "injected", "survived"), *rows,
    ])  # fmt: skip


def leaked(before: Holdings, after: Holdings) -> list[str]:
    """What a job that is protected holds more of than it did when it was first protected."""
    found = []
    if after.processes > before.processes + 1:  # a writer may be running
        found.append(f"processes: {before.processes}, then {after.processes}")
    if after.descriptors > before.descriptors + _SPARE_DESCRIPTORS:
        found.append(f"descriptors: {before.descriptors}, then {after.descriptors}")
    if after.memory_bytes > before.memory_bytes * (1 + _SPARE_MEMORY):
        found.append(f"shared memory: {before.memory_bytes} bytes, then {after.memory_bytes}")
    return found


def soak(job: Job, directory: Path, minutes: float, seed: int, verbose: bool) -> list[str]:
    """Run a job under faults; prints what happened, and returns what is wrong."""
    chance = random.Random(seed)
    began = time.monotonic()
    descriptors = own_descriptors()
    with faulty(job, directory, chance, paced=False) as (cluster, faults):
        run = Soak(cluster, faults, chance, verbose)
        wrong: list[str] = []
        try:
            run.settle()
            before = holdings(cluster)
            run.run(minutes * 60)
            run.settle()
            after = holdings(cluster)
            wrong += leaked(before, after)
            last = run.finish()
            print(f"{last} steps, {cluster.attempts} attempts, resumed from {cluster.model.resumes}", flush=True)
            print(f"ranks that have lost their agent without a fault: {cluster.model.unprovoked}")
            print(f"agents and helpers hold {before}\nat the end {after}")
            truth = cluster.model.truth
            same = truth.confirm(undisturbed(cluster.lab, job.setup, last))
            print(f"{truth.checked} comparisons; {same} losses and states equal those of the undisturbed training")
        except (AssertionError, Stuck) as error:
            wrong.append(f"{type(error).__name__}: {error}\n{cluster.told()}")
        finally:
            print(table(faults), flush=True)
            cluster.close()
            faults.end_all()
        wrong += cluster.lab.left_behind(LEAVING_SECONDS)
        wrong += [f"file left: {path}" for path in strange_files(cluster, directory / "store")]
    wrong += [f"descriptor left: {each}" for each in set(own_descriptors()) - set(descriptors)]
    print(f"{time.monotonic() - began:.0f} s, seed {seed}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16))
    parser.add_argument("--kind", choices=["fsdp", "ddp"], default="fsdp", help="how the model is distributed")
    parser.add_argument("--redo", choices=["lazy", "eager"], default="lazy")
    parser.add_argument("--keep", type=Path, help="directory for logs and run, which is kept")
    parser.add_argument("--verbose", action="store_true", help="a line for each fault")
    arguments = parser.parse_args()
    import_everything()
    if problem := netns.problem(as_root=True):
        print(f"without faults of the network: {problem}")
    job = Job(3, arguments.kind, arguments.redo)
    print(f"seed {arguments.seed}, {arguments.minutes:g} minutes, {job}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        kept = arguments.keep or Path(directory)
        kept.mkdir(parents=True, exist_ok=True)
        wrong = soak(job, kept, arguments.minutes, arguments.seed, arguments.verbose)
    for each in wrong:
        print(f"WRONG: {each}")
    print("failed" if wrong else "passed: every state equal, nothing left")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
