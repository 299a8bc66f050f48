"""Step time with and without the governor, on a slow link: ``python -m benchmarks.governor``."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.command import Options, run
from benchmarks.harness.report import Report, median_and_spread, millions
from benchmarks.harness.scratch import scratch_directory
from benchmarks.workloads.governor_rank import ARMS
from tests.support.cluster.netns import Network, problem

TITLE = "What sending records to peers costs training on a slow link, with and without the governor"
METHOD = """Two nodes, each with one rank of a GPT under fully_shard and one compute thread, in network namespaces that
a bridge joins. Every step gathers parameters and reduces gradients over the same cables as records. The first rows have
the cables as they are, and show what the replicators' work (encryption, checksums, copies) costs ranks with which they
share the cores; for the others, tc's token bucket limits each cable in both directions. In the last, ranks wait for
most of each step as for an accelerator, so that cores are free and the link alone is shared. Trainings without memckpt,
with it but without peers, with peers but without the governor (nothing is marked, so that records go as soon as they
are made), and with it follow one another, in another order in each round. Of each training the second half of its steps
counts. A share is the median step over that of the same round without memckpt, less one. Each record has to go,
whatever that costs: training waits for peers (`ack="wait"`), so that the governor chooses when, and not whether."""

NAMES = {
    "nothing": "no memckpt",
    "local": "no peers",
    "without": "peers, no governor",
    "with": "peers, governor",
}
_PATIENCE_SECONDS = 900.0
_PORT = 29500  # in a network of its own


@dataclass(frozen=True)
class Setting:
    """A training and its repetitions.

    Args:
        title: its name.
        size: name of the model's size.
        batch: sequences per rank.
        steps: steps of each training.
        rounds: number of trainings of each kind.
        elsewhere: seconds of each step that use no core.
    """

    title: str
    size: str
    batch: int
    steps: int
    rounds: int
    elsewhere: float = 0.0


class TrainingFailed(RuntimeError):
    """A rank has failed."""


def train(network: Network, directory: Path, arm: str, setting: Setting) -> dict[str, Any]:
    """One training on both nodes. Returns the output of rank 0.

    Raises:
        TrainingFailed: a rank failed, or took too long.
    """
    ranks = []
    try:
        for rank in range(2):
            environment = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0",
                "MASTER_ADDR": network.addresses[0], "MASTER_PORT": str(_PORT),
                "GLOO_SOCKET_IFNAME": "eth0", "MEMCKPT_NODE": f"node{rank}",
            }  # fmt: skip
            command = [
                sys.executable, "-m", "benchmarks.workloads.governor_rank", "--arm", arm, "--size", setting.size,
                "--batch", str(setting.batch), "--steps", str(setting.steps), "--run-dir", str(directory),
                "--elsewhere", str(setting.elsewhere),
            ]  # fmt: skip
            ranks.append(network.popen(rank, command, env=environment, stdout=subprocess.PIPE, text=True))
        said = [one.communicate(timeout=_PATIENCE_SECONDS)[0] for one in ranks]
    except subprocess.TimeoutExpired:
        raise TrainingFailed(f"{NAMES[arm]}: not through within {_PATIENCE_SECONDS:.0f} s") from None
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    if any(one.returncode for one in ranks):
        raise TrainingFailed(f"{NAMES[arm]}: ranks ended with {[one.returncode for one in ranks]}")
    found: dict[str, Any] = json.loads(said[0].splitlines()[-1])
    return found


def measure(report: Report, network: Network, setting: Setting) -> None:
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for number in range(setting.rounds):
        shift = number % len(ARMS)
        for arm in ARMS[shift:] + ARMS[:shift]:
            with scratch_directory() as directory:
                found[arm].append(train(network, directory, arm, setting))
    alone = [_median(one) for one in found["nothing"]]
    for arm in ARMS:
        _add(report, setting.title, arm, found[arm], alone)


def _median(training: dict[str, Any]) -> float:
    seconds: list[float] = training["seconds"]
    return statistics.median(seconds[len(seconds) // 2 :])


def _add(report: Report, title: str, arm: str, trainings: list[dict[str, Any]], alone: list[float]) -> None:
    medians = [_median(one) for one in trainings]
    step, _ = median_and_spread(medians)
    shares = [mine / base - 1 for mine, base in zip(medians, alone, strict=True)]
    share, spread = median_and_spread(shares)
    around = f" +- {spread:.1%}" if len(shares) > 1 else ""
    peers = trainings[-1]["peers"] or {}
    record, limit = peers.get("bytes_per_record"), peers.get("limit")
    stall = statistics.median(one.get("stall", 0.0) for one in trainings)
    report.add(
        millions(trainings[0]["numel"]), title, NAMES[arm],
        f"{step * 1e3:.0f}", f"{share:+.1%}{around}", str(len(trainings)), f"{stall * 1e3:.1f}",
        "-" if record is None else f"{record / 1e6:.1f}", "-" if limit is None else f"{limit / 1e6:.1f}",
        peers.get("pace", "-"),
        setting=title, arm=arm, step_seconds=step, share=share, share_spread=spread, stall_seconds=stall, peers=peers,
        medians=medians,
    )  # fmt: skip


def main(options: Options) -> None:
    report = options.report(
        TITLE, METHOD, "parameters", "cables", "training with", "step, ms", "share", "rounds", "stall, ms",
        "sent per record, MB", "limit, MB/s", "at the end",
    )  # fmt: skip
    missing = problem()
    if missing is not None:
        report.leave_out("all of it", missing)
        report.write()
        return
    quick = options.quick
    size, steps, rounds = ("tiny", 40, 1) if quick else ("demo", 150, 2)
    waits = 0.05 if quick else 0.75
    with Network(2) as network:
        measure(report, network, Setting("no limit", size, 16, 40 if quick else 60, 1))
        for node in range(2):
            network.limit(node, 10**9)
        measure(report, network, Setting("1 Gbit/s", size, 16, steps, 1))
        title = f"1 Gbit/s, {waits * 1e3:.0f} ms of each step computed elsewhere"
        measure(report, network, Setting(title, size, 1, steps, rounds, waits))
    report.write()


if __name__ == "__main__":
    run("governor", main)
