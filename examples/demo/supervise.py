"""Starts the training under `memckpt run`, watches it, and kills it at times drawn in advance."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.demo.black_box import BlackBox, Position
from memckpt.errors import MemckptError
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import stop_agent

_POLL_SECONDS = 0.002
_LOOK_SECONDS = 0.05
_SILENCE_SECONDS = 120.0
_END_SECONDS = 30.0
#: What `memckpt run` says when it knows how it will start the next process.
_RESTARTS_ARE = ("modules are imported ahead", "restarts will be cold")
_ROOT = Path(__file__).resolve().parents[2]


class TrainingFailedError(Exception):
    """The training process failed; the message has the end of its log."""


@dataclass(frozen=True)
class Plan:
    """Training parameters of both runs, and their output directory."""

    steps: int
    size: str
    directory: Path
    sabotage: bool = False


@dataclass
class Kill:
    """One SIGKILL and the resume after it.

    Attributes:
        drawn: time drawn for it, in steps since the start of the training.
        at: position of the training when the process was gone.
        resumed: the step after which the next process continued.
        tier: tier that the state came from.
        check: outcome of repeating the last step: "equal", "different", "rounding", or "none" if it was not repeated.
        start: "warm" if the next process was forked from one that had imported ahead, else "cold".
        seconds: from the signal to the end of the first new step.
    """

    drawn: float
    at: Position
    resumed: int = -1
    tier: str = ""
    check: str = ""
    start: str = ""
    seconds: float = 0.0

    @property
    def lost(self) -> int:
        """Number of steps that the optimizer had taken and that have to be repeated."""
        return self.at.finished - self.resumed


@dataclass
class RunResult:
    """Results of a run that has ended.

    Attributes:
        final: file with its last state.
        losses: loss of each step, as a hexadecimal float, which is exact.
        step_seconds: median duration of a step.
        seconds: duration of the whole run, including all starts of processes.
    """

    final: Path
    losses: dict[int, str]
    step_seconds: float
    seconds: float
    kills: list[Kill] = field(default_factory=list)


def draw_instants(seed: int, kills: int, steps: int) -> list[float]:
    """Times in steps: 37.4 is 0.4 of a step's duration after step 37 has ended.

    The first is after step 2: before the first step no state is held from which a resume could repeat it.
    """
    generator = random.Random(seed)
    return sorted(generator.uniform(2, 0.95 * steps - 2) for _ in range(kills))


class Run:
    """One run: a process, and another one after each kill, which `memckpt run` starts if the run is protected."""

    def __init__(self, plan: Plan, name: str, protected: bool, on_progress: Callable[[Position, str], None]) -> None:
        self._plan = plan
        self._on_progress = on_progress
        directory = plan.directory / name
        directory.mkdir(parents=True)
        self._events_path, self._log_path = directory / "events.jsonl", directory / "training.log"
        self._final = directory / "final.pt"
        self._run_dir = directory / "memckpt" if protected else None
        self._box_path = directory / "black_box"
        self._box = BlackBox(self._box_path)
        self._events_read = 0
        self._kills: list[Kill] = []
        self._losses: dict[int, str] = {}
        self._moments: list[tuple[int, float]] = []
        self._process: subprocess.Popen[bytes] | None = None
        #: A pidfd of the training process, once it has said which one it is.
        self._training: int | None = None
        self._killed_at = 0.0

    def execute(
        self, instants: Sequence[float], step_seconds: float = 0.0, on_kill: Callable[[Kill], None] = lambda kill: None
    ) -> RunResult:
        """Train to the end, with a kill at each time.

        Raises:
            TrainingFailedError: a process ended by itself before it was done, or was silent for too long.
        """
        began = time.monotonic()
        kills = self._kills
        try:
            self._start()
            self._wait_for_training()
            for instant in instants:
                kill = self._kill_at(instant, step_seconds)
                kills.append(kill)
                self._attempt += 1
                self._note_resume(kill, self._wait_for_training())
                on_kill(kill)
            self._wait_for_end()
        finally:
            self._end_everything()
        return RunResult(self._final, self._losses, self._median_step(), time.monotonic() - began, kills)

    # Processes

    def _start(self) -> None:
        plan = self._plan
        command = [sys.executable, "-m", "examples.demo.train", "--steps", str(plan.steps), "--size", plan.size]
        command += ["--events", str(self._events_path), "--black-box", str(self._box_path), "--final", str(self._final)]
        if self._run_dir is not None:
            command += ["--run-dir", str(self._run_dir)] + (["--sabotage"] if plan.sabotage else [])
            command = [sys.executable, "-m", "memckpt", "run", "--", *command]
        self._box.write(step=0, phase="start-up", finished=0, closed=0)
        self._attempt = 1
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=log, stderr=log)

    def _end_everything(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()  # `memckpt run` starts no other process behind that
            if self._training is not None:
                signal.pidfd_send_signal(self._training, signal.SIGKILL)
            self._wait_at_most(_END_SECONDS)
            self._process.kill()
            self._process.wait()
        if self._training is not None:
            os.close(self._training)
        if self._run_dir is not None:
            end_agent(self._run_dir)

    def _kill_at(self, instant: float, step_seconds: float) -> Kill:
        """Send SIGKILL at the drawn time, or right after the first new step if that is later."""
        assert self._process is not None
        first_new = self._resumed_at + 1
        whole, fraction = int(instant), instant - int(instant)
        for position in self._watch():
            if position.closed >= max(whole, first_new):
                break
        else:
            raise TrainingFailedError(f"the training had ended before the kill drawn for step {instant:.1f}")
        # The drawn time lies within the step; a process that ends earlier ends the wait.
        self._wait_at_most(fraction * step_seconds)
        assert self._training is not None
        if self._kills:
            self._stand_still_until_warm(self._training)
        self._killed_at = time.monotonic()
        signal.pidfd_send_signal(self._training, signal.SIGKILL)
        select.select([self._training], [], [])
        # The next process takes longer to its first line than this.
        at = self._box.read()
        self._box.write(step=0, phase="start-up", finished=0, closed=0)
        self._read_events()
        os.close(self._training)
        self._training = None
        return Kill(instant, at)

    def _stand_still_until_warm(self, training: int) -> None:
        """Stop the training in its place until the next start is warm: imports ahead take longer than the demo's steps.

        The first kill comes before, so that a cold start is seen as well.
        """
        signal.pidfd_send_signal(training, signal.SIGSTOP)
        began = time.monotonic()
        while not any(said in self._log_path.read_text(errors="replace") for said in _RESTARTS_ARE):
            if time.monotonic() - began > _SILENCE_SECONDS:
                raise TrainingFailedError(f"`memckpt run` says nothing about warm starts\n{self._log_tail()}")
            self._wait_at_most(_LOOK_SECONDS)

    # Watching

    def _wait_at_most(self, seconds: float) -> None:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def _watch(self) -> Iterator[Position]:
        """Yield positions as they change, until the process ends by itself."""
        assert self._process is not None
        last, changed_at = None, time.monotonic()
        while self._process.poll() is None:
            position = self._box.read()
            if position != last:
                last, changed_at = position, time.monotonic()
                self._on_progress(position, f"process {self._attempt}")
                yield position
            elif time.monotonic() - changed_at > _SILENCE_SECONDS:
                raise TrainingFailedError(f"no progress for {_SILENCE_SECONDS:.0f} s\n{self._log_tail()}")
            self._wait_at_most(_POLL_SECONDS)
        if self._process.returncode != 0:
            raise TrainingFailedError(f"the training ended with status {self._process.returncode}\n{self._log_tail()}")

    def _wait_for_training(self) -> dict[str, Any]:
        """Wait for the first step of the process; returns its report."""
        for position in self._watch():
            if position.phase != "start-up":
                break
        found = [event for event in self._read_events() if event["event"] == "training"]
        if not found:
            raise TrainingFailedError(f"the training ended before its first step\n{self._log_tail()}")
        # A step that is repeated as a proof was taken before.
        self._resumed_at: int = found[-1].get("resumed", found[-1]["step"])
        self._training = os.pidfd_open(found[-1]["pid"])
        return found[-1]

    def _note_resume(self, kill: Kill, hello: dict[str, Any]) -> None:
        kill.resumed = self._resumed_at
        kill.tier = hello.get("tier", "nothing: started over")
        kill.start = "warm" if hello["forked"] else "cold"
        for position in self._watch():
            if position.finished > self._resumed_at:
                break
        kill.seconds = time.monotonic() - self._killed_at

    def _wait_for_end(self) -> None:
        for _ in self._watch():
            pass
        self._read_events()

    def _read_events(self) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            lines = self._events_path.read_text().splitlines()
            events = [json.loads(line) for line in lines[self._events_read :]]
            self._events_read = len(lines)
            for event in events:
                if event["event"] == "step":
                    self._losses[event["step"]] = event["loss"]
                    self._moments.append((event["step"], event["at"]))
                elif event["event"] == "checked" and self._kills:
                    self._kills[-1].check = event["verdict"]
            return events
        return []

    def _median_step(self) -> float:
        pairs = zip(self._moments, self._moments[1:], strict=False)
        durations = [after[1] - before[1] for before, after in pairs if after[0] == before[0] + 1]
        return statistics.median(durations) if durations else 0.0

    def _log_tail(self, lines: int = 25) -> str:
        text = self._log_path.read_text(errors="replace").splitlines()
        return "\n".join(["the last lines of its log:", *text[-lines:]])


def end_agent(run_dir: Path) -> None:
    """End the agent of a run if there is one: a finished training has ended it already."""
    with contextlib.suppress(MemckptError):
        stop_agent(AgentAddress.of(run_dir))
