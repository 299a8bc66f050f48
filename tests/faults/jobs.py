"""Jobs under faults: their protection, and where it is kept."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import memckpt.agent
import memckpt.agent.saving
import memckpt.recovery
import memckpt.session
import memckpt.storage
from memckpt.config import AgentConfig, ErasureConfig, MemckptConfig, RedoChoice, StorageConfig
from tests.faults.cluster import Cluster
from tests.faults.injector import DiskSwitch, Injector
from tests.faults.kinds import INJECTED, OF_PEERS, Kind
from tests.faults.model import Truth
from tests.support.cluster import netns
from tests.support.cluster.netns import Network
from tests.support.cluster.sharded_cases import Setup
from tests.support.trainings.engine_harness import Lab, import_ahead

#: A stopped process counts as standing still, and a silent peer as overdue, after so many seconds.
_LIVENESS_SECONDS, _ACK_SECONDS = 4.0, 4.0
#: Seconds for which a resume asks silent nodes again: shorter than what the cluster waits for a start.
_PATIENCE_SECONDS = 30.0
#: Seconds for which an agent that is told to end tries to save: a start waits for it.
_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Job:
    """A training and its protection."""

    nodes: int = 3  # number of nodes, with one rank each; more than one have peers, of which one may be lost
    kind: str = "fsdp"  # "fsdp" (each node holds its own shards), "ddp" or, on one node, "plain"
    redo: RedoChoice = "lazy"
    every_steps: int = 20  # steps between two checkpoints in storage

    @property
    def setup(self) -> Setup:
        return Setup(self.kind, self.nodes)

    @property
    def tolerated(self) -> int:
        return 1 if self.nodes > 1 else 0

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Faults that can befall it."""
        return tuple(kind for kind in INJECTED if self.nodes > 1 or kind not in OF_PEERS)

    def config(self, store: Path) -> MemckptConfig:
        peers = None
        if self.nodes > 1:
            peers = ErasureConfig(
                data=self.nodes - 1,
                tolerate=1,
                host="127.0.0.1",
                ack_timeout_seconds=_ACK_SECONDS,
                recovery_patience_seconds=_PATIENCE_SECONDS,
            )
        return MemckptConfig(
            redo=self.redo,
            anchor_period_steps=4,
            agent=AgentConfig(linger_seconds=60.0, liveness_seconds=_LIVENESS_SECONDS, niceness=0),
            peers=peers,
            resume_check="witness",  # a resume is at the newest step, and not at the one before it
            storage=StorageConfig(
                url=str(store),
                mode="replica",
                every_steps=self.every_steps,
                min_seconds=0.0,
                overhead=1.0,
                grace_seconds=_GRACE_SECONDS,
            ),
        )


def import_everything() -> None:
    """Import what trainers and agents import in their course, so that those forked from this process need not."""
    import_ahead()
    for package in (memckpt.session, memckpt.recovery, memckpt.storage, memckpt.agent, memckpt.agent.saving):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)


@contextlib.contextmanager
def faulty(
    job: Job, directory: Path, chance: random.Random, *, paced: bool, truth: Truth | None = None
) -> Iterator[tuple[Cluster, Injector]]:
    """A cluster that trains a job, and its faults. At the end all trainers are ended, and all faults."""
    store = directory / "store"
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(DiskSwitch(directory / "disk").installed())
        network = None
        if job.nodes > 1 and netns.problem(as_root=True) is None:
            network = stack.enter_context(Network(job.nodes))
        lab = stack.enter_context(contextlib.closing(Lab(directory)))  # what exists already is not the job's
        settings = {"tolerated": job.tolerated, "network": network, "paced": paced, "truth": truth}
        cluster = stack.enter_context(contextlib.closing(Cluster(lab, job.setup, job.config(store), **settings)))
        injector = Injector(cluster, store, switch, chance)
        stack.callback(injector.end_all)
        yield cluster, injector
