"""Runs of programs in processes that are forked from this one, and the verdict on them."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from memckpt import errors
from memckpt.errors import MemckptError
from tests.fuzzing.trainings.programs import Program, fits, simpler
from tests.fuzzing.trainings.text import text
from tests.support.cluster.processes import kill_and_wait
from tests.support.trainings.engine_child import use_device
from tests.support.trainings.engine_harness import Lab, import_ahead

#: Longest life of an attempt, in seconds.
ATTEMPT_SECONDS = 45.0

#: What programs, and memckpt in them, import when they need it.
_ALSO = (
    "torch.ao.quantization",
    "torch.nn.utils.prune",
    "torch.utils.checkpoint",
    "torchdata.stateful_dataloader",
    "memckpt.replication.transport.links",
)

Class = Literal["exact", "said", "refused", "wrong", "invalid"]
_ERRORS = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, MemckptError)}


@dataclass
class Verdict:
    """What became of a program."""

    kind: Class  # class of the outcome; *invalid*: it does not even run without memckpt
    why: str = ""  # the reason, in a line
    details: list[str] = field(default_factory=list)  # lines for whoever mends it

    @property
    def wrong(self) -> bool:
        return self.kind == "wrong"

    @property
    def way(self) -> str:
        """The way in which it is wrong: what its reason begins with, without numbers."""
        return re.sub(r"\d+", "", " ".join(self.why.split()[:4]))


@dataclass(frozen=True)
class _Notes:
    """What the attempts of one run have noted since one of them has started over."""

    steps: dict[int, str]
    repeated: list[int]
    end: dict[str, Any]
    resumed: list[list[Any]]

    @classmethod
    def read(cls, path: Path) -> _Notes:
        lines = [line for lines in _attempts(path) for line in lines]
        steps: dict[int, str] = {}
        repeated = []
        for _, step, value in (line for line in lines if line[0] == "loss"):
            if steps.setdefault(step, value) != value:
                repeated.append(step)
            steps[step] = value
        ends = {line[1]: line[2] for line in lines if line[0] == "end"}
        return cls(steps, repeated, ends, [line[1:] for line in lines if line[0] == "resumed"])


def _attempts(path: Path) -> list[list[Any]]:
    """Lines of each attempt from the last one on that did not resume: it had its own numbers, and nothing to lose."""
    attempts: list[list[Any]] = []
    for line in map(json.loads, path.read_text().splitlines() if path.exists() else []):
        attempts += [[]] if line[0] == "begins" else []
        attempts[-1].append(line)
    begun = [index for index, lines in enumerate(attempts) if not any(line[0] == "resumed" for line in lines)]
    return attempts[begun[-1] if begun else 0 :]


def import_everything(*frameworks: str) -> None:
    """Import what children need, once."""
    import_ahead()
    for each in (*_ALSO, *frameworks):
        importlib.import_module(each)
    # Workers of a loader look for their dead trainer every five seconds, for which each program would wait at its end.
    torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.2


def run(program: Program, device: str = "cpu") -> Verdict:
    """Run a program without memckpt, then with both kills; returns the verdict."""
    with _lab() as lab:
        return _Run(lab, program, device).verdict()


def minimal(program: Program, verdict: Verdict, runs: int = 60, device: str = "cpu") -> tuple[Program, Verdict]:
    """The simplest program found in so many runs that is wrong in the same way, and its verdict."""
    tried = {program}
    untried = simpler(program)
    while runs > 0 and (candidate := next(untried, None)) is not None:
        if candidate in tried or not fits(candidate):
            continue
        tried.add(candidate)
        runs -= 1
        found = run(candidate, device)
        if found.wrong and found.way == verdict.way:
            program, verdict, untried = candidate, found, simpler(candidate)
    return program, verdict


@contextlib.contextmanager
def _lab() -> Iterator[Lab]:
    with tempfile.TemporaryDirectory(prefix="program-") as directory, contextlib.closing(Lab(Path(directory))) as lab:
        try:
            yield lab
        finally:
            lab.left_behind(limit=0.0)


class _Run:
    def __init__(self, lab: Lab, program: Program, device: str) -> None:
        self._lab, self._program, self._device = lab, program, device
        self._directory = lab.directory
        (self._directory / "program.py").write_text(text(program, device))
        self._logs: list[str] = []

    def verdict(self) -> Verdict:
        code, log = self._attempt(None, "", 0)
        if code:
            return Verdict("invalid", _last_line(log), [log[-3000:]])
        self._logs.clear()
        agent = self._lab.start_agent()
        begun = 0
        for number, kill in enumerate([*self._program.kills, None]):
            point = "" if kill is None else f"{kill[0]} {kill[1]}"
            held = "is complete after record" in agent.log.read_text()
            code, log = self._attempt(self._lab.run_dir, point, number)
            if code != (-signal.SIGKILL if kill is not None else 0):
                return self._ended(number, code, log)
            begun = _attempts(self._directory / "notes")[0][0][1]
            if begun == number and held:
                return self._wrong(f"attempt {number + 1} starts over, though a step was held")
            if number == 0 and self._program.node:
                kill_and_wait(self._lab.status().pid)
                agent = self._lab.start_agent()
        if begun and self._program.reseeded:
            (self._directory / "expected").unlink()
            self._attempt(None, "", begun)
            self._logs.pop()
        return self._compared()

    # Attempts

    def _attempt(self, run_dir: Path | None, kill: str, number: int) -> tuple[int, str]:
        notes = self._directory / ("notes" if run_dir is not None else "expected")
        environment = {
            "PROGRAM_DEVICE": self._device,
            "PROGRAM_KILL": kill,
            "PROGRAM_NUMBER": str(number),
            "PROGRAM_NOTES": str(notes),
            "PROGRAM_RUN": str(run_dir or self._directory / "none"),
            "PROGRAM_SEED": str(100 * number * self._program.reseeded),
            **({} if run_dir is not None else {"MEMCKPT_DISABLE": "1"}),
        }
        child = self._lab.fork(lambda: _train(self._directory, environment), "attempt")
        try:
            code = child.wait(ATTEMPT_SECONDS)
        except TimeoutError:
            kill_and_wait(child.pid)
            child.wait()
            code = 124
        log = child.log.read_text()
        self._logs.append(log)
        return code, log

    # Verdicts

    def _wrong(self, why: str, *details: str) -> Verdict:
        notes = _Notes.read(self._directory / "notes")
        resumed = [f"resumed: step {step}, exact={exact} {reasons}" for step, exact, reasons in notes.resumed]
        return Verdict("wrong", why, [*details, *resumed, *_told(self._logs)])

    def _ended(self, number: int, code: int, log: str) -> Verdict:
        last = _last_line(log)
        which = f"attempt {number + 1}"
        if code == 124:
            return self._wrong(f"{which} hangs", log[-2000:])
        if code == 0:
            return Verdict("invalid", f"{which} never came to {self._program.kills[number]}", [log[-1500:]])
        allowed, error = self._program.may("refused"), last.split(":")[0].rpartition(".")[2]
        if number == 0 and error in _ERRORS:
            if allowed and re.search(allowed, last):
                return Verdict("refused", last)
            return self._wrong(f"refused: {last}")
        if number and error in _ERRORS and (named := self._named(self._logs[:-1])):
            return Verdict("said", f"{named[0]}; then {last}")
        return self._wrong(f"{which} ended with {code}: {last}", log[-2500:])

    def _named(self, logs: list[str]) -> list[str]:
        """Warnings about an ingredient of which they are allowed."""
        allowed = self._program.may("said")
        found = [line for line in _warnings(logs) if "resume check" not in line]
        return [line for line in found if allowed and re.search(allowed, line)]

    def _compared(self) -> Verdict:
        expected, found = _Notes.read(self._directory / "expected"), _Notes.read(self._directory / "notes")
        different = [f"loss of step {step}" for step in expected.steps if expected.steps[step] != found.steps.get(step)]
        different += [f"loss of step {step}, when repeated" for step in found.repeated]
        different += [
            line for name in expected.end for line in _differences(expected.end[name], found.end.get(name), name)
        ]
        unsure = [why for _, exact, why in found.resumed if not exact]
        allowed, named = self._program.may("said"), self._named(self._logs)
        said = bool(unsure or named)
        if different and not (allowed and said):
            certain = "exact=False" if unsure else "exact=True"
            return self._wrong(f"{certain}, and differs in {len(different)} values: {different[0]}", *different[:8])
        if ours := [line for log in self._logs for line in log.splitlines() if _OURS.search(line)]:
            return self._wrong(f"an error of ours: {ours[0]}", *ours[:5])
        alarms = [*unsure, *(line for line in _warnings(self._logs) if "resume check" in line)]
        if alarms and not allowed:
            return self._wrong(f"false alarm: equal, and {alarms[0]}")
        kept = next((line for line in _warnings(self._logs) if "keeps it in memory for" in line), None)
        if kept is not None:  # what a trainer has ended with, and the agent cannot redo
            return Verdict("said", kept)
        left = self._lab.left_behind(limit=20.0 if self._program.settings.storage else 10.0)
        if left:
            return self._wrong(f"left behind: {left[0].splitlines()[0]}", *left)
        if said and (different or unsure):
            return Verdict("said", (unsure or named)[0])
        return Verdict("exact")


_OURS = re.compile(r"^ERROR memckpt|please report|Traceback \(most recent call last\)")


def _train(directory: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    os.setpgid(0, 0)
    sys.path.insert(0, str(directory))
    use_device(environment["PROGRAM_DEVICE"])
    torch.set_default_device(None)  # a program says what it makes there: its loaders shuffle on the CPU
    importlib.import_module("program").train()


def _last_line(log: str) -> str:
    lines = [line for line in log.splitlines() if line and not line.startswith((" ", "INFO", "DEBUG", "WARNING"))]
    return lines[-1] if lines else ""


def _warnings(logs: list[str]) -> list[str]:
    lines = [line for log in logs for line in log.splitlines() if line.startswith(("WARNING memckpt", "ERROR memckpt"))]
    return [line for line in dict.fromkeys(lines) if "MEMCKPT_DISABLE" not in line]


def _told(logs: list[str]) -> list[str]:
    """What users see of memckpt in each attempt."""
    found = []
    for number, log in enumerate(logs, start=1):
        lines = [line for line in log.splitlines() if re.match("(INFO|WARNING|ERROR) .*memckpt", line)]
        found += [f"attempt {number}: {line}" for line in lines]
    return found


def _differences(expected: Any, found: Any, path: str) -> list[str]:
    if isinstance(expected, dict) and isinstance(found, dict):
        keys = {**expected, **found}
        return [line for key in keys for line in _differences(expected.get(key), found.get(key), f"{path}/{key}")]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found) < 100:
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for index, (a, b) in pairs for line in _differences(a, b, f"{path}/{index}")]
    return [] if expected == found else [f"{path}: {str(expected)[:80]} became {str(found)[:80]}"]
