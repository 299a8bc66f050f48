"""The recipe for Kubernetes, played: pods and containers of namespaces, with the commands of the manifest itself.

The test does what kubelet and Job controller do. A pod shares network, host name and processes; a container is a mount
namespace in it, with a `/dev/shm` of its own.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.cluster.launcher_lab import PATIENCE_SECONDS, TRAINING, Launched, environment, needs_machines
from tests.support.cluster.machines import Machines
from tests.support.cluster.waiting import until
from tests.support.trainings.script_runs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MANIFEST = ROOT / "deploy/kubernetes/peers-job.yaml"


class Pods(Launched):
    """Two pods of the Job, and that of the rendezvous."""

    names = ("my-run-0", "my-run-1", "my-run-rendezvous")

    def __init__(self, machines: Machines, directory: Path) -> None:
        own = environment(directory, data=1)
        # What the manifest sets is not there before.
        variables = {name: value for name, value in own.items() if not name.startswith(("MEMCKPT_PEERS", "TORCH_"))}
        super().__init__(machines, directory, variables | {"MEMCKPT_PEERS_DATA": "1"})
        (directory / "run").mkdir()
        found = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(MANIFEST.read_text())}
        self._pod = found["Job", "my-run"]["spec"]["template"]["spec"]
        store = found["Deployment", "my-run-rendezvous"]["spec"]["template"]["spec"]["containers"][0]
        self.start(2, store["command"], "rendezvous.out")

    def _here(self, words: list[str]) -> list[str]:
        """The words of a command, as they are on this machine, for two pods."""
        changed = [re.sub(r"^/runs/my-run$", str(self.directory / "run"), word) for word in words]
        changed = [word.replace("--nnodes=4", "--nnodes=2") for word in changed]
        return [each for word in changed for each in (TRAINING if word == "train.py" else [word])]

    def _variables(self, container: Any, index: int) -> dict[str, str]:
        variables = {}
        for each in container["env"]:
            field = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            # A label that a pod does not have is an empty value.
            variables[each["name"]] = each.get("value", str(index) if "completion-index" in field else "")
        return {**variables, "MEMCKPT_PEERS_DATA": "1"}

    def start_container(self, index: int, name: str) -> None:
        """As the kubelet does: its main process runs, in a mount namespace of its own; it has started by its probe."""
        (container,) = [each for each in self._pod["initContainers"] + self._pod["containers"] if each["name"] == name]
        inside = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", inside, name, *self._here(container["command"])]
        variables = self._variables(container, index)
        self.start(index, command, f"{name}-{index}.log", **variables)
        if probe := container.get("startupProbe"):
            asked = ["env", f"MEMCKPT_NODE={index}", *self._here(probe["exec"]["command"])]
            until(
                lambda: self.machines.run(index, asked, env=self.environment).returncode == 0,
                f"the container {name} of pod {index}", PATIENCE_SECONDS,
            )  # fmt: skip

    def start_pod(self, index: int) -> None:
        self.start_container(index, "agent")
        self.start_container(index, "train")

    def end_container(self, index: int) -> None:
        """The training's, with all that runs in it."""
        (torchrun,) = self.pids(index, r"^\S*python\S* \S*/torchrun ")
        inside = os.readlink(f"/proc/{torchrun}/ns/mnt")
        for pid in self.machines.processes(index):
            if os.readlink(f"/proc/{pid}/ns/mnt") == inside:
                os.kill(pid, signal.SIGKILL)
        until(lambda: not self.pids(index, "torchrun"), "the end of the container")


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    needs_machines()
    with Machines(Pods.names) as machines:
        yield Pods(machines, tmp_path)


@pytest.fixture(scope="module")
def digests() -> set[str]:
    """Of each training here: all are the same, whatever has happened."""
    return set()


@pytest.mark.promise(
    "lost nodes are replaced by spare ones under torchrun, Slurm and Kubernetes (simulated), and training goes on "
    "from peers while the other nodes' agents keep running"
)
@pytest.mark.parametrize("what", ["nothing", "container", "pod"])
def test_training_goes_on_behind_its_last_step(pods: Pods, digests: set[str], what: str) -> None:
    for index in range(2):
        pods.start_pod(index)
    pods.wait_for("step 10: loss")
    agents = [pods.agent(index) for index in range(2)]
    assert [len(found) for found in agents] == [1, 1], "no trainer has started one of its own"
    if what == "container":
        pods.end_container(1)
        pods.start_container(1, "train")
    elif what == "pod":
        pods.machines.lose(1)
        pods.machines.boot(1)
        pods.machines.know_each_other(pods.directory / "hosts")
        pods.start_pod(1)
    if what != "nothing":
        pods.resumed("local memory" if what == "container" else "peers")
        assert pods.agent(0) == agents[0]
        assert (pods.agent(1) == agents[1]) is (what == "container")
    digests.add(pods.digest())
    assert len(digests) == 1
