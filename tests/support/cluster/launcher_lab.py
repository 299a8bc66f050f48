"""Trainings that a launcher starts on machines made of namespaces: their output, processes and resumes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import netns
from tests.support.cluster.machines import Machines
from tests.support.cluster.waiting import until
from tests.support.trainings.script_runs import ROOT, last_words

#: Longest time, in seconds, for a launcher's start or restart beside other tests.
PATIENCE_SECONDS = 240.0
#: Command of the training, with pauses in which it is disturbed.
TRAINING = [str(ROOT / "examples/many_nodes.py"), "--size", "tiny", "--steps", "30", "--pause", "0.2"]
BIN = Path(sys.executable).parent


def needs_machines() -> None:
    """Skip the test if machines cannot be made here."""
    if os.geteuid() != 0 or netns.problem():
        pytest.skip("machines made of namespaces require root and network tools")


def environment(directory: Path, data: int, **more: str) -> dict[str, str]:
    """Environment of a node, with peers of data + 1 nodes."""
    return {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "MEMCKPT_RUN_DIR": str(directory / "run"),
        "MEMCKPT_PEERS": "erasure",
        "MEMCKPT_PEERS_DATA": str(data),
        "MEMCKPT_PEERS_TOLERATE": "1",
        "MEMCKPT_STORAGE": "none",
        "MEMCKPT_AGENT_LINGER_SECONDS": "60",
        **more,
    }


class Launched:
    """A training on machines, whose processes write to files in a directory."""

    def __init__(self, machines: Machines, directory: Path, variables: dict[str, str]) -> None:
        self.machines = machines
        self.directory = directory
        self.environment = variables
        machines.know_each_other(directory / "hosts")

    def start(self, node: int, command: Sequence[str], log: str, **variables: str) -> subprocess.Popen[Any]:
        """Start a program on a machine; it writes to `log`."""
        with (self.directory / log).open("ab") as file:
            known = {**self.environment, **variables}
            return self.machines.popen(node, command, env=known, stdout=file, stderr=file)

    @property
    def said(self) -> str:
        """All output of one training."""
        return "".join(path.read_text() for path in sorted(self.directory.glob("*.log")))

    def wait_for(self, text: str) -> None:
        until(lambda: text in self.said, f"{text!r}:\n{self.said[-4000:]}", PATIENCE_SECONDS)

    def pids(self, node: int, pattern: str) -> list[int]:
        return [pid for pid, line in self.machines.processes(node).items() if re.search(pattern, line)]

    def agent(self, node: int) -> list[int]:
        return self.pids(node, r"^\S*python\S* (-m memckpt\.agent|\S*/memckpt agent) ")

    def rank(self, node: int) -> int:
        """Process id of the rank."""
        (pid,) = self.pids(node, r"^\S*python\S* (-u )?\S*many_nodes\.py")
        return pid

    def resumed(self, tier: str) -> None:
        """Wait for the resume, and check its step and its tier, a regular expression."""
        self.wait_for("resumed at step")
        before, _, after = self.said.partition("resumed at step")
        report = re.match(r" (\d+) from ([a-z ]+) in .*; exact", after)
        assert report is not None, after[:300]
        last = max(int(step) for step in re.findall(r"step (\d+): loss", before))
        print(f"resumed at step {report[1]} from {report[2]}; the last that was shown was {last}")
        # The records in flight have not been acknowledged; one more may be committed and not shown.
        assert last - 3 <= int(report[1]) <= last + 1
        assert re.fullmatch(tier, report[2])

    def digest(self) -> str:
        """Digest of the weights, once training has ended."""
        self.wait_for("done at step")
        return last_words(self.said)
