"""The recipe for torchrun, played: machines of namespaces, spare ones among them, that are lost as a whole."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.support.cluster.launcher_lab import TRAINING, Launched, environment, needs_machines
from tests.support.cluster.machines import Machines
from tests.support.cluster.waiting import until
from tests.support.trainings.script_runs import ROOT

PLACES = str(ROOT / "deploy/torchrun/places.py")
_LIMIT_SECONDS = 30.0


# Places, alone


@pytest.fixture
def places() -> Iterator[str]:
    """The address of somebody who gives two places."""
    command = [sys.executable, "-u", PLACES, "serve", "--places", "2", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        yield f"127.0.0.1:{serving.stdout.readline().split()[-1]}"
        serving.kill()


class Node:
    """Asks for a place, and in it prints a line, and ends with what it is told."""

    def __init__(self, at: str) -> None:
        inside = "echo placed; read status; exit $status"
        self.process = subprocess.Popen(
            [sys.executable, PLACES, "take", "--at", at, "--", "sh", "-c", inside],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    @property
    def _output(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def is_placed(self) -> bool:
        """Waits until it is."""
        return bool(select.select([self._output], [], [], _LIMIT_SECONDS)[0]) and self._output.readline() == "placed\n"

    def waits(self) -> bool:
        return not select.select([self._output], [], [], 0)[0] and self.process.poll() is None

    def told(self) -> str:
        """The line on the error stream that comes next."""
        assert self.process.stderr is not None
        return self.process.stderr.readline() if select.select([self.process.stderr], [], [], _LIMIT_SECONDS)[0] else ""

    def ends(self, status: int) -> int:
        self.process.communicate(f"{status}\n", timeout=_LIMIT_SECONDS)
        return self.process.returncode

    def die(self) -> None:
        with self.process:
            self.process.kill()


@pytest.mark.promise(
    "lost nodes are replaced by spare ones under torchrun, Slurm and Kubernetes (simulated), and training goes on "
    "from peers while the other nodes' agents keep running"
)
def test_a_spare_node_starts_when_a_node_is_gone_or_has_failed_and_not_when_one_has_finished(places: str) -> None:
    nodes = [Node(places) for _ in range(2)]
    assert all(node.is_placed() for node in nodes)
    spares = [Node(places) for _ in range(3)]
    nodes[0].die()
    until(lambda: not all(spare.waits() for spare in spares), "a spare node that starts", _LIMIT_SECONDS)
    (first,) = [spare for spare in spares if not spare.waits()]
    spares.remove(first)
    assert first.is_placed()
    assert nodes[1].ends(3) == 3
    until(lambda: not all(spare.waits() for spare in spares), "another", _LIMIT_SECONDS)
    (second,) = [spare for spare in spares if not spare.waits()]
    spares.remove(second)
    assert second.is_placed()
    assert [first.ends(0), second.ends(0)] == [0, 0]
    # Who asks now is answered behind these two ends: nobody has a place to give, and both are told.
    late = Node(places)
    for node in (spares[0], late):
        assert "has ended; for the next one start `places.py serve` anew" in node.told()
        assert node.waits()
        node.die()


def test_a_node_may_be_started_before_the_one_who_gives_places() -> None:
    with socket.socket() as taken:  # a port that is ours, and on which nobody listens yet
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        command = [
            sys.executable, PLACES, "take", "--at", f"127.0.0.1:{taken.getsockname()[1]}", "--", "echo", "placed",
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as node:
            assert "gives no places yet" in node.stderr.readline()
            taken.listen()
            connection, _ = taken.accept()
            with connection:
                connection.sendall(b"go\n")
                assert connection.recv(16) == b"done\n"
            assert node.wait(_LIMIT_SECONDS) == 0


def test_a_node_without_the_one_who_gives_places_ends_its_command() -> None:
    command = [sys.executable, "-u", PLACES, "serve", "--places", "1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        node = Node(f"127.0.0.1:{serving.stdout.readline().split()[-1]}")
        assert node.is_placed()
        serving.kill()
    assert node.process.wait(_LIMIT_SECONDS) == 75
    node.die()


# The whole


class Cluster(Launched):
    """Four machines and a fifth that gives three places, with the files of the recipe."""

    names = ("node0", "node1", "node2", "node3", "rendezvous")

    def __init__(self, machines: Machines, directory: Path) -> None:
        super().__init__(machines, directory, environment(directory, data=2))
        serve = [sys.executable, PLACES, "serve", "--places", "3", "--port", "29401", "--store-port", "29400"]
        self.start(4, serve, "rendezvous.log")
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        self.wait_for("places are given")

    def _join(self, node: int) -> None:
        command = [
            "torchrun", "--nnodes=3", "--nproc-per-node=1", "--max-restarts=20", "--rdzv-backend=c10d",
            "--rdzv-endpoint=rendezvous:29400", "--rdzv-conf=is_host=false", "--rdzv-id=my-run", *TRAINING,
        ]  # fmt: skip
        take = [sys.executable, PLACES, "take", "--at", "rendezvous:29401", "--"]
        self._started[node] = self.start(node, [*take, *command], f"node{node}.log")

    def train_up_to(self, step: int) -> dict[int, list[int]]:
        """Three nodes have places, and are at this step; the fourth waits. Their agents."""
        for node in range(4):
            self._join(node)
            until(lambda node=node: self.said.count("asks for a place") > node, "somebody who asks")
        self.wait_for(f"step {step}: loss")
        agents = {node: self.agent(node) for node in range(4)}
        assert [len(found) for found in agents.values()] == [1, 1, 1, 0]
        return agents

    def all_end(self, nodes: set[int]) -> None:
        for node in nodes:
            assert self._started[node].wait(60) == 0, self.said[-4000:]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    needs_machines()
    with Machines(Cluster.names) as machines:
        yield Cluster(machines, tmp_path)


@pytest.fixture(scope="module")
def digests() -> set[str]:
    """Of each training here: all are the same, whatever has happened."""
    return set()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", ["nothing", "rank", "node", "first node"])
def test_training_goes_on_behind_its_last_step(cluster: Cluster, digests: set[str], what: str) -> None:
    agents = cluster.train_up_to(10)
    lost = {"node": {1}, "first node": {0}}.get(what, set())
    if what == "rank":
        os.kill(cluster.rank(1), signal.SIGKILL)
    for node in lost:
        cluster.machines.lose(node)
    if what != "nothing":
        cluster.resumed("local memory" if what == "rank" else "peers")
        # The memory of those that are left was not touched: the same agents.
        for node in {0, 1, 2} - lost:
            assert cluster.agent(node) == agents[node]
    digests.add(cluster.digest())
    cluster.all_end({0, 1, 2} - lost | ({3} if lost else set()))
    assert len(digests) == 1
