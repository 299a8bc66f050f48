"""Accelerate trainings in processes that are killed, and their comparison with an undisturbed training.

A training is killed at each of a list of points in turn; every process is told only the same directory, and the last
one trains to the end. All notes of all processes, and the final state, must equal those of the undisturbed training,
which has no plugin, bit for bit.
"""

from __future__ import annotations

import json
import pickle
import random
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, GradientState

from tests.support.cluster.processes import children, kill_and_wait
from tests.support.faults.check_lines import unproved
from tests.support.faults.frozen import differences
from tests.support.trainings.accelerate_training import INSTANT, Case, Kill, Run, Training
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import fresh_directory, join, run_ranks

DEATHS = (-signal.SIGKILL, -signal.SIGALRM)


def _body(run: Run, store: Path, rank: int) -> None:
    if run.sabotage is not None:
        run.sabotage()
    if run.ranks > 1:
        join(rank, run.ranks, store / "store", launched=True)
    # Earlier tests in this process may have made an Accelerator, whose state all later ones share.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    Training(run, rank).train()


def attempt(lab: Lab, run: Run) -> list[int]:
    """Start the processes of a run once; returns exit codes. When one dies the others are killed, as launchers do."""
    run.directory.mkdir(parents=True, exist_ok=True)
    store = fresh_directory(lab)
    ranks = run_ranks(lab, run.ranks, partial(_body, run, store), store, name=f"{run.case.name}-")
    codes = [child.wait() for child in ranks]
    with (run.directory / "log").open("a") as log:
        log.write(ranks[0].log.read_text())
    if run.kill is None or codes[run.victim] not in DEATHS:  # reactions to its death do not matter
        logs = [rank.log.read_text()[-4000:] for rank, code in zip(ranks, codes, strict=True) if code]
        assert not logs, "\n".join(logs)
    return codes


def entries(run: Run, rank: int) -> list[dict[str, Any]]:
    """The notes of a rank's processes, in order."""
    path = run.directory / f"journal-{rank}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def result(run: Run, rank: int, name: str = "result") -> dict[str, Any]:
    value: dict[str, Any] = pickle.loads((run.directory / f"{name}-{rank}").read_bytes())
    return value


def end_workers(run: Run) -> None:
    """End the loader workers that outlived a run: one that waits for its dead trainer's lock would wait for ever."""
    noted = {entry["pid"] for rank in range(run.ranks) for entry in entries(run, rank) if entry["event"] == "worker"}
    for pid in noted & children():
        kill_and_wait(pid)


_references: dict[tuple[str, int], Run] = {}


def reference(lab: Lab, case: Case, ranks: int, directory: Path) -> Run:
    """The same training, undisturbed and without the plugin."""
    key = (case.name, ranks)
    if key not in _references:
        run = Run(case, directory / f"{case.name}-{ranks}", protected=False, ranks=ranks)
        assert attempt(lab, run) == [0] * ranks
        end_workers(run)
        _references[key] = run
    return _references[key]


def noted(run: Run, rank: int) -> dict[str, set[str]]:
    """All computed values, by kind and place; more than one value if processes disagree."""
    found: dict[str, set[str]] = {}
    for entry in entries(run, rank):
        if "value" in entry:
            found.setdefault(f"{entry['event']} {entry['place']}", set()).add(entry["value"])
    return found


def check_same(expected: Run, found: Run) -> None:
    """Check that all processes' values, and the final state, equal the undisturbed training's, bit for bit."""
    for rank in range(found.ranks):
        ours, theirs = noted(found, rank), noted(expected, rank)
        wrong = [key for key in theirs if ours.get(key) != theirs[key]] + [key for key in ours if key not in theirs]
        assert not wrong, f"rank {rank}: {wrong[:5]} of {len(wrong)}"
        different = differences(result(expected, rank), result(found, rank))
        assert not different, f"rank {rank}:\n" + "\n".join(different[:10])


def survives(lab: Lab, run: Run, kills: list[Kill], references: Path) -> Run:
    """Kill a run at each of `kills` in turn, let the next process continue, and compare.

    Each process must die at its point, and each must begin after the last committed step.
    """
    try:
        _survive(lab, run, kills)
    finally:
        end_workers(run)
    check_same(reference(lab, run.case, run.ranks, references), run)
    assert unproved((run.directory / "log").read_text()) == []
    return run


def _survive(lab: Lab, run: Run, kills: list[Kill]) -> None:
    for kill in [*kills, None]:
        before = [entry["step"] for entry in entries(run, 0) if entry["event"] == "committed"]
        seen = len(entries(run, run.victim))
        codes = attempt(lab, replace(run, kill=kill))
        new = entries(run, run.victim)[seen:]
        if kill is None:
            assert codes == [0] * run.ranks
        else:
            assert codes[run.victim] == -signal.SIGKILL
            assert [each for each in new if each["event"] == "killed"] == [
                {"event": "killed", "place": kill[0], "visit": kill[1]}
            ], f"{kill} was not reached"
        resumed = next(each["step"] for each in new if each["event"] == "attached")
        last = max(before, default=0)
        # With several ranks one may have committed a step that another has not; it is repeated. And the first one is
        # killed at any instant once the victim is dead, also between a commit and its note.
        expected = {last} if run.ranks == 1 else {last - 1, last, last + 1}
        assert resumed in expected, f"resumed at {resumed}, expected {last}"


def survives_chance(lab: Lab, run: Run, chance: random.Random, references: Path) -> int:
    """Kill a run at random instants, let the last attempt end, and compare; returns the number of kills."""
    kills = 0
    try:
        while True:
            before = max((each["step"] for each in entries(run, 0) if each["event"] == "committed"), default=0)
            seen = len(entries(run, run.victim))
            codes = attempt(lab, replace(run, kill=(INSTANT, chance.randrange(1, 20)) if kills < 8 else None))
            new = entries(run, run.victim)[seen:]
            resumed = next(each["step"] for each in new if each["event"] == "attached")
            # It may have died between a commit and its note; with several ranks another one may be ahead.
            assert before - (run.ranks > 1) <= resumed <= before + 1, f"resumed at {resumed}, had noted {before}"
            if codes == [0] * run.ranks:
                break
            kills += 1
    finally:
        end_workers(run)
    check_same(reference(lab, run.case, run.ranks, references), run)
    # A process killed between the check and its line about the restore does not name its step.
    assert unproved((run.directory / "log").read_text(), ["the replica has gone past"]) == []
    return kills
