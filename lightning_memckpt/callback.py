"""The Lightning callback: translates hooks, holds no policy."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_memckpt.internals import check_version
from lightning_memckpt.notes import is_tuning, list_callbacks, refuse
from lightning_memckpt.protection import Protection
from memckpt import ProtectionArguments, RestoreReport
from memckpt.capture.beside.attributes import checked_names
from memckpt.config import MemckptConfig, ResumeChoice
from memckpt.config.arguments import DISABLE, disabled_by_environment, with_environment
from memckpt.user_messages import Messages

_log = logging.getLogger("lightning_memckpt")


class MemCheckpoint(pl.Callback):
    """Protects every optimizer step of `trainer.fit`, and resumes at the exact step after any crash.

    Start the same script again, and training continues after the last step taken. Weights, optimizer, schedulers,
    data order, RNG, logged epoch averages and callbacks are, bit for bit, those of an uninterrupted run. `fit` needs no
    arguments for that, and the position in the list of callbacks does not matter. State that cannot be repeated is
    reported before training starts.

    Works on a single device, with DDP, and with sharded models (`ModelParallelStrategy`). It does not replace
    ModelCheckpoint: files to keep are still its work.

    Args:
        run_dir, resume, config, replicated: as for :func:`memckpt.attach`.
        attributes: dotted names of plain attributes that training changes and no state_dict() has, to be stored, too:
            ``"module.level"``, ``"datamodule.stage"``, ``"callbacks.Curriculum.level"`` (its class, or its state_key).

    Raises:
        ConfigurationError: an invalid setting, in the arguments or in the environment.
    """

    #: Whether it protects nothing where the script has passed another one.
    steps_aside = False
    _report: RestoreReport | None = None

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        resume: ResumeChoice | int | None = None,
        config: MemckptConfig | dict[str, Any] | None = None,
        replicated: Sequence[str] = (),
        attributes: Sequence[str] = (),
    ) -> None:
        self.run_dir, self.resume, self.config = with_environment(run_dir, resume, config)
        self.replicated = tuple(replicated)
        self.attributes = checked_names(attributes)
        self._protection: Protection | None = None

    @property
    def report(self) -> RestoreReport | None:
        """What `fit` has resumed, and whether exactly as far as is known by now; None on a first start.

        It stays behind the end of training.
        """
        return self._report if self._protection is None else self._protection.report

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Wrap the strategy before it is set up."""
        if stage != "fit" or is_tuning(trainer):
            return
        messages = Messages(_log, trainer.is_global_zero)
        own = [each for each in list_callbacks(trainer) if isinstance(each, MemCheckpoint) and not each.steps_aside]
        try:
            check_version()
            refuse(trainer, len(own))
        except (TypeError, MisconfigurationException):
            if not disabled_by_environment():
                raise
            messages.inform(f"not active: {DISABLE} is set")  # no training is refused then
            return
        untyped: Any = trainer  # fast_dev_run is a dynamic attribute that type checkers do not see
        if untyped.fast_dev_run:
            messages.inform("not active: fast_dev_run neither saves nor resumes")
            return
        protection = Protection(
            trainer,
            pl_module,
            self,
            arguments=ProtectionArguments(self.run_dir, self.resume, self.config),
            replicated=self.replicated,
            attributes=self.attributes,
            messages=messages,
        )
        protection.install()
        self._protection = protection

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Exclude the step from a repetition: a validation is not repeated."""
        if self._protection is not None:
            self._protection.unrepeatable("a validation ran before it")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the special treatment of a resumed epoch."""
        if self._protection is not None:
            self._protection.finish_epoch()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Close after an error: held state stays held."""
        self._close(finished=False)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Close after a completed training; Lightning calls this only then."""
        if stage == "fit":
            self._close(finished=True)

    def _close(self, *, finished: bool) -> None:
        self._report = self.report
        protection, self._protection = self._protection, None
        if protection is not None:
            protection.close(finished=finished)
