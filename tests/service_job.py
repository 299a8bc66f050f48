"""A training for a service manager: dies where it is told to, once in each attempt.

Takes memckpt's own flags. The directory that it is started in has ``plan.json``, the point and step at which each
attempt dies (null: it does not), and gets a ``report-N`` from each.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

import torch

import memckpt
from memckpt.config import StorageConfig
from tests.engine_cases import PLAIN
from tests.engine_child import REFERENCE_SEED, Attempt, config, kill_self, train

#: Nothing is stored while training runs: what is in storage came there because somebody was told to go.
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
    kill = json.loads(Path("plan.json").read_text())[number]
    train(
        Attempt(
            PLAIN,
            Path(run_dir),
            report,
            SETTINGS,
            seed=REFERENCE_SEED + number,
            resume=resume,
            actions={} if kill is None else {(kill[0], kill[1]): kill_self},
        )
    )


if __name__ == "__main__":
    main()
