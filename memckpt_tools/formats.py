"""``memckpt export --format torch_checkpointing``: a directory for ``CheckpointManager.load``."""

from __future__ import annotations

from pathlib import Path

from torch_checkpointing import CheckpointManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from memckpt import ExportedState


def write_torch_checkpointing(state: ExportedState, target: Path) -> None:
    """Write the items ``model``, ``optimizer`` (the next ones ``optimizer_1``, ...) and ``step``."""
    optimizers = {
        f"optimizer_{number}" if number else "optimizer": each for number, each in enumerate(state.optimizers)
    }
    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)  # some file systems refuse direct writes
    manager = CheckpointManager(config)
    try:
        manager.save(str(target), {"model": state.model, **optimizers, "step": state.step})
    finally:
        manager.close()
