"""Overwriting of files that ModelCheckpoint writes a second time.

A process killed after ModelCheckpoint had written a file, and before the next restore point, resumes before that file.
The repeated save would find the file and write a copy beside it, `epoch=0-step=11-v1.ckpt`. This run wrote the orphan
at the same step, so the repeated save may overwrite it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_memckpt.notes import list_callbacks
from lightning_memckpt.shadowing import Shadows


class OverwriteOrphans:
    """Lets ModelCheckpoint overwrite, once each, the files written after the restored state was captured.

    Only local directories are checked. A file that the restored state knows is no orphan, whatever its age.
    """

    def __init__(self, trainer: pl.Trainer, captured_at: float) -> None:
        self._shadows = Shadows()
        for callback in list_callbacks(trainer):
            if isinstance(callback, ModelCheckpoint):
                found = _orphans(callback, captured_at) if trainer.is_global_zero else set()
                # All ranks have to decide alike: ModelCheckpoint's check for a file is a collective operation.
                orphans: set[str] = trainer.strategy.broadcast(found)
                if orphans:
                    self._shadows.put(callback, "file_exists", _forgetting(orphans))

    def remove_wrappers(self) -> None:
        """Remove the wrappers from the callbacks."""
        self._shadows.remove_all()


def _forgetting(orphans: set[str]) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
    def around(original: Callable[..., bool]) -> Callable[..., bool]:
        def file_exists(filepath: Any, trainer: pl.Trainer) -> bool:
            if os.path.abspath(filepath) in orphans:
                # The caller writes the file next: from then on it is an ordinary file.
                orphans.discard(os.path.abspath(filepath))
                return False
            return original(filepath, trainer)

        return file_exists

    return around


def _orphans(callback: ModelCheckpoint, captured_at: float) -> set[str]:
    directory = callback.dirpath
    if directory is None or not os.path.isdir(directory):
        return set()
    known = {callback.best_model_path, callback.last_model_path, callback.kth_best_model_path}
    known.update(callback.best_k_models)
    known = {os.path.abspath(path) for path in known if path}
    found = set()
    with os.scandir(directory) as entries:
        for entry in entries:
            path = os.path.abspath(entry.path)
            ours = path.endswith(callback.FILE_EXTENSION) and path not in known
            if ours and entry.stat(follow_symlinks=False).st_mtime > captured_at:
                found.add(path)
    return found
