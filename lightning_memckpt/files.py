"""Files that a start finds from the start before.

Rows of CSVLoggers: a logger with a fixed version deletes the file of the start before when it is made. A second name (a
hard link) keeps the rows, and a resume puts back those that the dead process had logged at the restored step.

Files of ModelCheckpoint: a process killed after it had written one, and before the next restore point, resumes before
that file. The repeated save would find it and write a copy beside it, `epoch=0-step=11-v1.ckpt`. This run wrote the
orphan at the same step, so the repeated save may overwrite it.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_memckpt.internals import TrainerInternals
from lightning_memckpt.notes import list_callbacks
from lightning_memckpt.shadowing import Shadows


class Tables:
    """The files of one trainer's CSVLoggers on a local disk. `warn` is called with a line if rows will be lost."""

    def __init__(self, trainer: pl.Trainer, internals: TrainerInternals, warn: Callable[[str], None]) -> None:
        self._trainer = trainer
        self._internals = internals
        self._warn = warn
        self._shadows = Shadows()
        self._saved: dict[str, int] = {}

    def _writers(self) -> Iterator[Any]:
        if self._trainer.is_global_zero:
            for logger in self._trainer.loggers:
                if isinstance(logger, CSVLogger) and os.path.isdir(logger.experiment.log_dir):
                    yield logger.experiment

    def follow_files(self, held: Mapping[str, Any]) -> None:
        """Follow the files; put the rows of `held`, a captured state, back into those that are still used."""
        for writer in self._writers():
            path = os.path.abspath(writer.metrics_file_path)
            self._saved[path] = self._put_back(writer, held[path]) if path in held else 0
            self._shadows.put(writer, "save", partial(self._save, writer, path))
        for path in {*held, *self._saved}:
            if os.path.lexists(_kept(path)):
                os.unlink(_kept(path))
        for path in self._saved:
            self._keep(path)

    def _save(self, writer: Any, path: str, original: Callable[[], None]) -> None:
        self._saved[path] += len(writer.metrics)
        original()
        self._keep(path)

    def _keep(self, path: str) -> None:
        if not os.path.exists(path) or os.path.lexists(_kept(path)):
            return
        try:
            os.link(path, _kept(path))
        except OSError as error:
            self._warn(
                f"{path}: a second name for it cannot be made ({error.strerror}), so that a restart of a CSVLogger "
                "with a fixed version loses its rows; leave out version="
            )

    @staticmethod
    def _put_back(writer: Any, state: Mapping[str, Any]) -> int:
        rows: list[dict[str, str]] = []
        path = os.path.abspath(writer.metrics_file_path)
        if os.path.exists(_kept(path)) and state["saved"]:
            with open(_kept(path), newline="") as file:
                reader = csv.DictReader(file)
                rows = list(reader)[: state["saved"]]
                writer.metrics_keys = list(reader.fieldnames or ())
            with open(path, "w", newline="") as file:
                table = csv.DictWriter(file, writer.metrics_keys)
                table.writeheader()
                table.writerows(rows)
        pending = [{name: _number(value) for name, value in row.items()} for row in state["pending"]]
        writer.metrics = [*pending, *writer.metrics]
        return len(rows)

    def capture(self) -> dict[str, Any]:
        """What has been logged, by file. The row of the step that ends follows only after it: it is added here."""
        if not self._saved:
            return {}
        row = self._internals.row_to_come()
        return {
            os.path.abspath(writer.metrics_file_path): {
                "saved": self._saved[os.path.abspath(writer.metrics_file_path)],
                "pending": [*writer.metrics, *([row] if row else [])],
            }
            for writer in self._writers()
        }

    def unfollow_files(self) -> None:
        """Stop following the files. Second names stay: who starts a finished training again deletes the first ones."""
        self._shadows.remove_all()
        self._saved = {}


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _kept(path: str) -> str:
    """The second name of a file."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.memckpt")


class OverwriteOrphans:
    """Lets ModelCheckpoint overwrite, once each, the files written after the restored state was captured.

    Only local directories are checked. A file that the restored state knows is no orphan.
    """

    def __init__(self, trainer: pl.Trainer, captured_at: float) -> None:
        self._shadows = Shadows()
        for callback in list_callbacks(trainer):
            if isinstance(callback, ModelCheckpoint):
                found = _orphans(callback, captured_at) if trainer.is_global_zero else set()
                # All ranks have to decide alike: ModelCheckpoint's check for a file is a collective operation.
                orphans: set[str] = trainer.strategy.broadcast(found)
                if orphans:
                    self._shadows.put(callback, "file_exists", partial(_exists, orphans))

    def remove_wrappers(self) -> None:
        """Remove the wrappers from the callbacks."""
        self._shadows.remove_all()


def _exists(orphans: set[str], original: Callable[..., bool], filepath: Any, trainer: pl.Trainer) -> bool:
    if os.path.abspath(filepath) in orphans:
        # The caller writes the file next: from then on it is an ordinary file.
        orphans.discard(os.path.abspath(filepath))
        return False
    return original(filepath, trainer)


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
