"""The recipe for Slurm, played: a cluster of machines of namespaces, on which `spare.sbatch` runs."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster.launcher_lab import BIN, TRAINING, Launched, environment, needs_machines
from tests.support.cluster.machines import Machines
from tests.support.cluster.waiting import until
from tests.support.trainings.script_runs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
_CONTROL = 4


class Slurm(Launched):
    """Four nodes with a slurmd each, and a fifth machine with slurmctld."""

    names = ("node0", "node1", "node2", "node3", "control")

    def __init__(self, machines: Machines, directory: Path) -> None:
        more = {"SLURM_CONF": str(directory / "slurm.conf"), "TRAIN_NODES": "3", "JOIN_SECONDS": "45"}
        super().__init__(machines, directory, environment(directory, data=2, **more))
        for name in ("state", *(f"spool-{name}" for name in self.names)):
            (directory / name).mkdir()
        activate = directory / "venv/bin/activate"
        activate.parent.mkdir(parents=True)
        activate.write_text(f"export PATH={BIN}:$PATH\n")
        script = (ROOT / "deploy/slurm/spare.sbatch").read_text()
        for old, new in [("--nodes=5", "--nodes=4"), ("--cpus-per-task=16", "--cpus-per-task=2")]:
            assert old in script
            script = script.replace(old, new)
        script = re.sub(r"\n        train\.py\n", "\n        " + " ".join(TRAINING) + "\n", script)
        (directory / "spare.sbatch").write_text(script.replace("%x-%j.out", "%x-%j.log"))
        self._configure()
        self.start(_CONTROL, ["slurmctld", "-D", "-i"], "slurmctld.out")
        for node in range(4):
            self.start(node, ["slurmd", "-D"], f"slurmd-{node}.out")
        until(lambda: self.ask("sinfo", "-h", "-o", "%T %D").strip() == "idle 4", "four idle nodes")

    def _configure(self) -> None:
        at = self.directory
        (at / "slurm.conf").write_text(
            f"""ClusterName=lab
SlurmctldHost=control({self.machines.addresses[_CONTROL]})
AuthType=auth/munge
AuthInfo=socket={at}/munge.sock
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool-%n
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmdTimeout=30
ReturnToService=0
KillWait=30
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=node[0-3] CPUs=4 RealMemory=2000 State=UNKNOWN
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
        )

    def ask(self, *command: str) -> str:
        """What a command of Slurm's prints, in the directory from which the job is submitted."""
        where = ["nsenter", f"--wd={self.directory}", *command]
        return self.machines.run(_CONTROL, where, env=self.environment).stdout


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    needs_machines()
    missing = [name for name in ("slurmctld", "slurmd", "munged") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here")
    (tmp_path / "munge.key").write_bytes(secrets.token_bytes(128))
    (tmp_path / "munge.key").chmod(0o400)
    files = [f"--{name}={tmp_path}/munge.{end}" for name, end in [("socket", "sock"), ("key-file", "key")]]
    files += [f"--{name}={tmp_path}/munge.{end}" for name, end in [("pid-file", "pid"), ("seed-file", "seed")]]
    # --force: the directories of a test are not as private as it wants them.
    command = ["munged", "-F", "--force", *files, f"--log-file={tmp_path}/munge.log"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as munged:
        try:
            with Machines(Slurm.names) as machines:
                yield Slurm(machines, tmp_path)
        finally:
            munged.terminate()


@pytest.fixture(scope="module")
def digests() -> set[str]:
    """Of each training here: all are the same, whatever has happened."""
    return set()


@pytest.mark.promise(
    "lost nodes are replaced by spare ones under torchrun, Slurm and Kubernetes (simulated), and training goes on "
    "from peers while the other nodes' agents keep running"
)
@pytest.mark.parametrize("what", ["rank", "node"])
def test_training_goes_on_behind_its_last_step(slurm: Slurm, digests: set[str], what: str) -> None:
    assert "Submitted batch job 1" in slurm.ask("sbatch", "spare.sbatch")
    slurm.wait_for("step 10: loss")
    assert "attempt 1 of start 0 of job 1 on node0,node1,node2\n" in slurm.said
    agents = [slurm.agent(node) for node in range(4)]
    assert [len(found) for found in agents] == [1, 1, 1, 1]
    if what == "rank":
        os.kill(slurm.rank(1), signal.SIGKILL)
    else:
        slurm.machines.lose(1)
    slurm.resumed("peers" if what == "node" else "local memory")
    if what == "node":
        assert "attempt 2 of start 0 of job 1 on node0,node2,node3\n" in slurm.said
    for node in {0, 1, 2, 3} - ({1} if what == "node" else set()):
        assert slurm.agent(node) == agents[node]
    digests.add(slurm.digest())
    until(lambda: not slurm.ask("squeue", "--noheader"), "the end of the job")
    assert "JobState=COMPLETED" in slurm.ask("scontrol", "show", "job", "1")
    assert len(digests) == 1
