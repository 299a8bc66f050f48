"""A training for a service manager: dies where it is told to, once per attempt.

Takes memckpt's own flags. Its working directory has ``plan.json``: the actions of each attempt by point and step,
"kill" itself or "wait" until a file ``go-N`` exists. Each attempt writes a ``report-N`` there.
"""

from __future__ import annotations

import argparse
import json
import logging
import select
import time
from pathlib import Path

import torch

import memckpt
from memckpt.config import StorageConfig
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import REFERENCE_SEED, Action, Attempt, Control, config, kill_self, train

LIMIT_SECONDS = 120.0
#: Nothing is stored while training runs: a checkpoint in storage was written because of a stop request.
SETTINGS = config("lazy", storage=StorageConfig(min_seconds=3600))


def wait_for(go: Path) -> Action:
    """An action that waits until it may continue, or is killed."""

    def wait(control: Control) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not go.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("there was no go")
            select.select([], [], [], 0.02)

    return wait


def main() -> None:
    parser = argparse.ArgumentParser()
    memckpt.add_arguments(parser)
    run_dir, resume, _ = memckpt.from_args(parser.parse_args())
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    number = len(list(Path().glob("report-*")))
    report = Path(f"report-{number}").resolve()
    report.mkdir()
    plan = json.loads(Path("plan.json").read_text())[number]
    does = {"kill": kill_self, "wait": wait_for(Path(f"go-{number}").resolve())}
    train(
        Attempt(
            PLAIN,
            Path(run_dir),
            report,
            SETTINGS,
            seed=REFERENCE_SEED + number,
            resume=resume,
            actions={(point, step): does[what] for what, point, step in plan},
        )
    )


if __name__ == "__main__":
    main()
