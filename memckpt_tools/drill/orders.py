"""What ``memckpt drill`` orders the sessions of the training to do that it runs. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from memckpt.config.observers import with_observer
from memckpt.config.schema import ErasureConfig, MemckptConfig


@dataclass(frozen=True)
class DrillOrders:
    """What a session does while it is drilled: it uses another run directory, and writes a line for each step.

    Attributes:
        directory: directory of this run of the drill.
        nodes: number of nodes that the drill simulates.
    """

    directory: Path
    nodes: int = 1

    def variables(self) -> dict[str, str]:
        """What has the sessions of a training observed."""
        return with_observer("memckpt_tools.drill.probe:Probe", str(self.directory), self.nodes)

    @property
    def run_dir(self) -> Path:
        """The run directory, in place of the script's own."""
        return self.directory / "run"

    def lines_of(self, rank: int) -> Path:
        """The file of a rank's lines."""
        return self.directory / f"rank-{rank}.jsonl"

    def configure(self, config: MemckptConfig) -> MemckptConfig:
        """The script's settings, with storage in the run directory, and every resume proved by repeating a step.

        A script without peers gets them where nodes are simulated; :attr:`lent_peers` tells the drill.
        """
        storage = config.storage
        if storage is not None:
            storage = replace(storage, url=None, owner=None)
        peers = config.peers
        if peers is None and self.nodes > 1:
            peers = self.peers
            self._lent.touch()
        return replace(config, storage=storage, peers=peers, resume_check="replay")

    @property
    def peers(self) -> ErasureConfig:
        """Peers for a script that configures none: any one of the nodes may be lost."""
        return ErasureConfig(data=self.nodes - 1, tolerate=1)

    @property
    def lent_peers(self) -> bool:
        """Whether the script of this run configures no peers, and was given :attr:`peers`."""
        return self._lent.exists()

    @property
    def _lent(self) -> Path:
        return self.directory / "lent-peers"
