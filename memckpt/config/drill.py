"""Orders of ``memckpt drill`` to the sessions of the training that it runs. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from memckpt.config.schema import ErasureConfig, MemckptConfig
from memckpt.errors import ConfigurationError

#: Directory of one run of a drill. Set by ``memckpt drill``, and by nobody else.
DRILL = "MEMCKPT_DRILL"
#: Number of the nodes that ``memckpt drill`` simulates. Set by it.
DRILL_NODES = "MEMCKPT_DRILL_NODES"


@dataclass(frozen=True)
class DrillOrders:
    """What a session does while it is drilled: it uses another run directory, and writes a line for each step.

    Attributes:
        directory: directory of this run of the drill.
        nodes: number of nodes that the drill simulates.
    """

    directory: Path
    nodes: int = 1

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


def drill_orders(environment: Mapping[str, str] = os.environ) -> DrillOrders | None:
    """The orders in MEMCKPT_DRILL; None where training is not drilled.

    Raises:
        ConfigurationError: the directory does not exist.
    """
    found = environment.get(DRILL)
    if found is None:
        return None
    directory = Path(found)
    if not found or not directory.is_dir():
        raise ConfigurationError(
            f"{DRILL}: expected the directory of a running `memckpt drill`, which alone sets it, found {found!r}; "
            "unset it"
        )
    return DrillOrders(directory, int(environment.get(DRILL_NODES, "1")))
