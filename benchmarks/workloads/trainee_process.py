"""A training in a process of its own, for benchmarks that kill it or measure its memory.

The process reports events on standard output, one JSON object in a line each, with the time of the monotonic clock in
seconds. It trains until it is killed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

import memckpt
from benchmarks.harness.processes import Lines, end_agent
from benchmarks.workloads.gpt import OPTIMIZERS, Trainee, redo_config

IMPORTED_AT = time.monotonic()
_ROOT = Path(__file__).resolve().parents[2]


# In the measuring process


class TraineeProcess:
    """A running trainee. :meth:`kill` ends it as a crash would."""

    def __init__(self, *arguments: str) -> None:
        self.started_at = time.monotonic()
        self.moments: dict[str, float] = {}
        self.agent_pid: int | None = None
        self.numel = 0
        command = [sys.executable, "-m", "benchmarks.workloads.trainee_process", *arguments]
        self._process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE)
        self.pid = self._process.pid
        self._lines = Lines(self._process)

    def wait_for(self, event: str, count: int = 1) -> dict[str, Any]:
        """Wait until it reports `event` for the `count`-th time from now on. The time of the first one is kept.

        Raises:
            RuntimeError: it ended, or reported nothing for minutes.
        """
        while True:
            said: dict[str, Any] = json.loads(self._lines.next())
            self.moments.setdefault(said["event"], said["at"])
            self.agent_pid = said.get("pid", self.agent_pid)
            self.numel = said.get("numel", self.numel)
            if said["event"] == event:
                count -= 1
                if count == 0:
                    return said

    def kill(self) -> tuple[float, float]:
        """Send SIGKILL; returns the times of the signal and of the process's end, in seconds."""
        sent_at = time.monotonic()
        self._process.kill()
        self._process.wait()
        return sent_at, time.monotonic()

    def close(self) -> None:
        """End it, and its agent."""
        if self._process.poll() is None:
            self.kill()
        self._lines.close()
        if self.agent_pid is not None:
            end_agent(self.agent_pid)


@contextmanager
def trainee_process(*arguments: str) -> Iterator[TraineeProcess]:
    """A trainee that ends with the block, together with its agent."""
    process = TraineeProcess(*arguments)
    try:
        yield process
    finally:
        process.close()


# In the process of the training


def say(event: str, at: float | None = None, **values: object) -> None:
    print(json.dumps({"event": event, "at": time.monotonic() if at is None else at, **values}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", required=True)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="fused")
    parser.add_argument("--protect", help='"lazy T=8", "eager", ...; without it there is no protection')
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--load", type=Path, help="a file that --save wrote, to start from")
    parser.add_argument("--save", type=Path, help="written after the first steps")
    parser.add_argument("--steps", type=int, default=12, help="after these it says so and waits to be killed")
    args = parser.parse_args()
    say("imported", IMPORTED_AT, trainee=os.getpid())
    # The first optimizer of a process imports torch's compiler, which takes as long as torch itself.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    say("first optimizer")
    trainee = Trainee(args.size, args.optimizer)
    say("built", numel=trainee.model.numel)
    start = 0
    with ExitStack() as stack:
        session = None
        if args.protect is not None:
            config = redo_config(args.protect)
            session = memckpt.attach(trainee.model, trainee.optimizer, run_dir=args.run_dir, config=config)
            stack.enter_context(session)
            say("attached", pid=session.agent_pid)
            report = session.restore()
            start = report.step if report is not None else 0
        if args.load is not None:
            state = torch.load(args.load, weights_only=True)
            trainee.model.load_state_dict(state["model"])
            trainee.optimizer.load_state_dict(state["optimizer"])
            del state
        say("restored", step=start)
        for step in range(start + 1, start + args.steps + 1):
            trainee.step()
            if session is not None:
                session.commit()
            say("step", step=step)
        if args.save is not None:
            torch.save(trainee.state_dict(), args.save)
        say("waiting")
        while True:
            signal.pause()  # the benchmark ends this process


if __name__ == "__main__":
    main()
