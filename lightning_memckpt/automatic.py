"""The callback that protects a script which does not know of it: MEMCKPT_AUTO=1."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import lightning.pytorch as pl

from lightning_memckpt.callback import MemCheckpoint
from lightning_memckpt.notes import is_tuning, list_callbacks
from memckpt.config.arguments import AUTO, RUN_DIR, run_dir_from_environment
from memckpt.errors import ConfigurationError
from memckpt.user_messages import Messages

_log = logging.getLogger("lightning_memckpt")
#: The Trainer of this process's first fit. A run directory names one training.
_first: weakref.ref[Any] | None = None


class AutomaticMemCheckpoint(MemCheckpoint):
    """A `MemCheckpoint` with the settings of the environment, in the first Trainer of the process that fits.

    It steps aside for one that the script has passed. The other settings of the environment are read, and a Trainer is
    refused, when a fit begins.
    """

    steps_aside = True

    def __init__(self) -> None:
        self._protection = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Protect the fit that begins, or step aside.

        Raises:
            ConfigurationError: the environment has no run directory, or an invalid setting.
            MisconfigurationException: as `MemCheckpoint`, of a Trainer that cannot be protected.
        """
        if stage != "fit" or is_tuning(trainer) or not self._is_due(trainer):
            return
        if run_dir_from_environment() is None:
            raise ConfigurationError(
                f"{AUTO}=1: expected {RUN_DIR} beside it, the directory that names the run, found none; set it, or "
                f"unset {AUTO} to train without memckpt"
            )
        super().__init__()
        Messages(_log, trainer.is_global_zero).inform(
            f"on by {AUTO}=1, run directory {self.run_dir!r}; unset it to train without memckpt"
        )
        super().setup(trainer, pl_module, stage)

    def _is_due(self, trainer: pl.Trainer) -> bool:
        global _first
        callbacks = list_callbacks(trainer)
        # Lightning adds a callback to the script's own list, which a second Trainer may be given as well.
        if self is not next(each for each in callbacks if isinstance(each, AutomaticMemCheckpoint)):
            return False
        messages = Messages(_log, trainer.is_global_zero)
        untyped: Any = trainer  # a dynamic attribute that type checkers do not see
        if untyped.fast_dev_run:
            return False
        if _first is not None and _first() is not trainer:
            if not _is_passed(callbacks):
                messages.inform(
                    f"not active in this fit: {AUTO}=1 protects the first Trainer of a process that fits; pass "
                    "MemCheckpoint(run_dir) to this one, with a directory of its own"
                )
            return False
        _first = weakref.ref(trainer)
        return not _is_passed(callbacks)


def _is_passed(callbacks: list[Any]) -> bool:
    return any(isinstance(each, MemCheckpoint) and not each.steps_aside for each in callbacks)
