"""The callback for transformers.Trainer: translates hooks, holds no policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from memckpt import ProtectionArguments
from memckpt.capture.beside.attributes import checked_names
from memckpt.config import MemckptConfig, ResumeChoice
from memckpt.config.arguments import disabled_by_environment, with_environment
from memckpt.errors import UsageError
from transformers_memckpt import notes
from transformers_memckpt.protection import Protection, Unprotected


class MemCheckpointTrainerCallback(TrainerCallback):
    """Protects every optimizer step of `Trainer.train()`, and resumes at the exact step after any crash.

    transformers does not tell a callback its Trainer, so pass it to `attach`, or use `protect`. Start the same script
    again, and training continues after the last step taken. Weights, optimizer, scheduler, data order, generators,
    `TrainerState` and the logged losses are, bit for bit, those of an uninterrupted run. `train` needs no arguments for
    that.

    Args:
        run_dir, resume, config, replicated: as for :func:`memckpt.attach`.
        attributes: dotted names of plain attributes that training changes and no state_dict() has, to be stored, too:
            ``"model.level"``, ``"trainer.train_dataset.level"``, ``"callbacks.Curriculum.level"``.

    Raises:
        ConfigurationError: an invalid setting, in the arguments or in the environment.
    """

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
        self._trainer: Any = None
        self._protection: Protection | None = None

    def attach(self, trainer: Trainer) -> None:
        """Protect later calls of `trainer.train()`; adds the callback to the trainer if it is missing.

        Raises:
            TypeError: not a transformers.Trainer.
            UnsupportedError: this version of transformers lacks names that the callback relies on.
            UsageError: the trainer has such a callback already, or this callback another trainer.
        """
        if not disabled_by_environment():
            notes.verify(trainer)
        callbacks = trainer.callback_handler.callbacks
        others = [each for each in callbacks if isinstance(each, MemCheckpointTrainerCallback) and each is not self]
        if others:
            raise UsageError(f"expected one MemCheckpointTrainerCallback on a Trainer, found {len(others) + 1}")
        if self._trainer is not None:
            raise UsageError("attach(): expected a callback without a Trainer, found one that has been attached before")
        self._trainer = trainer
        # First of all callbacks: it captures before others act in the same hook, and restores before they run.
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)
        printers = [at for at, each in enumerate(callbacks) if isinstance(each, PrinterCallback | ProgressCallback)]
        if printers:
            callbacks.insert(printers[0], _UnprintedFigures())
        vars(trainer)["_inner_training_loop"] = partial(self._train, trainer._inner_training_loop)

    def _train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        disabled = disabled_by_environment()
        if not disabled:
            notes.refuse(self._trainer, kwargs.get("trial"))
        self._protection = (Unprotected if disabled else Protection)(
            self._trainer,
            self,
            arguments=ProtectionArguments(self.run_dir, self.resume, self.config),
            replicated=self.replicated,
            attributes=self.attributes,
        )
        try:
            return self._protection.train(original, *args, **kwargs)
        finally:
            self._protection = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Connect to the held state. Raises UsageError if the callback does not know its Trainer."""
        if self._protection is None:
            raise UsageError(
                "MemCheckpointTrainerCallback: expected to be attached, found a Trainer that it does not know; call "
                "callback.attach(trainer) before trainer.train(), or protect(trainer, run_dir) without the callback"
            )
        self._protection.attach_and_prepare()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Commit the steps before this one; in a resumed epoch, restore first."""
        if self._protection is not None:
            self._protection.begin_step()

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Note one more batch of an accumulation."""
        if self._protection is not None:
            self._protection.end_batch(stepped=False)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Note one more batch, and a step."""
        if self._protection is not None:
            self._protection.end_batch(stepped=True)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Exclude the step from a repetition: an evaluation is not repeated."""
        if self._protection is not None:
            self._protection.unrepeatable("an evaluation followed it")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Exclude the step from a repetition: a checkpoint file is not written again."""
        if self._protection is not None:
            self._protection.unrepeatable("a checkpoint file was written after it")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Add our metrics to those that trackers report; `log_history` has its copy already."""
        if self._protection is not None and logs is not None:
            self._protection.log(logs)
            if "loss" in logs:
                logs.update(self._protection.metrics())


class _UnprintedFigures(TrainerCallback):
    """Takes our metrics out of the logs again, behind the trackers and before the callbacks that print."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if logs is not None:
            for name in [name for name in logs if name.startswith("memckpt/")]:
                del logs[name]


def protect(
    trainer: Trainer,
    run_dir: str | os.PathLike[str] | None = None,
    *,
    resume: ResumeChoice | int | None = None,
    config: MemckptConfig | dict[str, Any] | None = None,
    replicated: Sequence[str] = (),
    attributes: Sequence[str] = (),
) -> MemCheckpointTrainerCallback:
    """Attach a new MemCheckpointTrainerCallback to `trainer`; arguments and errors are the callback's."""
    callback = MemCheckpointTrainerCallback(
        run_dir, resume=resume, config=config, replicated=replicated, attributes=attributes
    )
    callback.attach(trainer)
    return callback
