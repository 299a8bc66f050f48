"""A training for a service manager: dies where it is told to, once per attempt.

Takes memckpt's own flags. Its working directory has ``plan.json``: the actions of each attempt by point and step,
"kill" itself or "wait" until a file ``go-N`` exists. Each attempt writes a ``report-N`` there.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

import torch

import memckpt
from memckpt.config import StorageConfig
from tests.support.cluster.waiting import until
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import REFERENCE_SEED, Action, Attempt, config, kill_self, train

#: Nothing is stored while training runs: a checkpoint in storage was written because of a stop request.
SETTINGS = config("lazy", storage=StorageConfig(min_seconds=3600))


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
    go = Path(f"go-{number}").resolve()
    does: dict[str, Action] = {"kill": kill_self, "wait": lambda control: until(go.exists, "a go")}
    actions = {(point, step): does[what] for what, point, step in plan}
    seed = REFERENCE_SEED + number
    train(Attempt(PLAIN, Path(run_dir), report, SETTINGS, seed=seed, resume=resume, actions=actions))


if __name__ == "__main__":
    main()
