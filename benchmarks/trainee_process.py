"""A training in a process of its own, for benchmarks that kill it or measure its memory.

Reports events on standard output, one JSON object in a line each, with the time of the monotonic clock in seconds.
Trains until it is killed.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import torch

import memckpt
from benchmarks.workloads import OPTIMIZERS, Trainee, redo_config

IMPORTED_AT = time.monotonic()


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
    say("imported", IMPORTED_AT)
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
