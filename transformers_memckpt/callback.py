"""The callback for transformers.Trainer: translates hooks, holds no policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from memckpt.capture.attributes import checked_names
from memckpt.config import MemckptConfig, ResumeChoice
from memckpt.config.arguments import with_environment
from memckpt.errors import UsageError
from transformers_memckpt import notes
from transformers_memckpt.protection import Protection


class MemCheckpointTrainerCallback(TrainerCallback):
    """Protects every optimizer step of `Trainer.train()`, and resumes at the very step after any crash.

    A callback is never told its Trainer, so it has to be given: by `attach`, or all in one by `protect`. Start the
    same script again and training continues behind the last step that was taken: weights, optimizer, scheduler, data
    order, generators, `TrainerState` and the logged losses are, bit for bit, those of a run that was never
    interrupted. Nothing has to be passed to `train`.

    Args:
        run_dir: names the run; a directory for what has to be on disk, the same at every start. None: MEMCKPT_RUN_DIR.
        resume: ``"auto"`` continues if anything is held, ``"require"`` refuses to start without, ``"never"`` starts
            anew; an int continues at that `global_step`. None: MEMCKPT_RESUME, or ``"auto"``.
        config: how the run is protected. None: what MEMCKPT_* variables say, else the defaults.
        replicated: names, or patterns of names, of parameters that are plain tensors in a sharded model and the same
            on all ranks. Others are taken for a rank's own.
        attributes: dotted names of plain attributes that training changes and no state_dict() has, to be carried, too:
            ``"model.level"``, ``"trainer.train_dataset.level"``, ``"callbacks.Curriculum.level"``.

    Raises:
        ConfigurationError: a setting that cannot be, in the arguments or in the environment.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        resume: ResumeChoice | int | None = None,
        config: MemckptConfig | None = None,
        replicated: Sequence[str] = (),
        attributes: Sequence[str] = (),
    ) -> None:
        self.run_dir, self.resume, self.config = with_environment(run_dir, resume, config)
        self.replicated = tuple(replicated)
        self.attributes = checked_names(attributes)
        self._trainer: Any = None
        self._protection: Protection | None = None

    def attach(self, trainer: Trainer) -> None:
        """Protect what `trainer.train()` does from now on; adds the callback to it if it is not there yet.

        Raises:
            TypeError: not a transformers.Trainer.
            UnsupportedError: this version of transformers lacks what the callback relies on.
            UsageError: the trainer has such a callback already, or this callback another trainer.
        """
        notes.verify(trainer)
        callbacks = trainer.callback_handler.callbacks
        others = [each for each in callbacks if isinstance(each, MemCheckpointTrainerCallback) and each is not self]
        if others:
            raise UsageError(f"expected one MemCheckpointTrainerCallback on a Trainer, found {len(others) + 1}")
        if self._trainer is not None:
            raise UsageError("attach(): expected a callback without a Trainer, found one that has been attached before")
        self._trainer = trainer
        # The first of all: it captures before others act in the same hook, and puts back before they see it.
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)
        vars(trainer)["_inner_training_loop"] = self._around_training(trainer._inner_training_loop)

    def _around_training(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def inner_training_loop(*args: Any, **kwargs: Any) -> Any:
            notes.refuse(self._trainer, kwargs.get("trial"))
            self._protection = Protection(
                self._trainer,
                self,
                run_dir=self.run_dir,
                resume=self.resume,
                config=self.config,
                replicated=self.replicated,
                attributes=self.attributes,
            )
            try:
                return self._protection.train(original, *args, **kwargs)
            finally:
                self._protection = None

        return inner_training_loop

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Connect to what is held.

        Raises:
            UsageError: the callback does not know its Trainer.
        """
        if self._protection is None:
            raise UsageError(
                "MemCheckpointTrainerCallback: expected to be attached, found a Trainer that it does not know; call "
                "callback.attach(trainer) before trainer.train(), or protect(trainer, run_dir) without the callback"
            )
        self._protection.begin()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The steps before this one are done: commit them; in a resumed epoch, put everything back first."""
        if self._protection is not None:
            self._protection.begin_step()

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """One more batch of an accumulation."""
        if self._protection is not None:
            self._protection.end_batch(stepped=False)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """One more batch, and a step."""
        if self._protection is not None:
            self._protection.end_batch(stepped=True)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """A step is repeated as a proof, an evaluation is not."""
        if self._protection is not None:
            self._protection.unrepeatable("an evaluation followed it")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Nor is the writing of a checkpoint."""
        if self._protection is not None:
            self._protection.unrepeatable("a checkpoint file was written behind it")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Add our figures to what other callbacks report; `log_history` has its copy already."""
        if self._protection is not None and logs is not None and "loss" in logs:
            logs.update(self._protection.metrics())


def protect(
    trainer: Trainer,
    run_dir: str | os.PathLike[str] | None = None,
    *,
    resume: ResumeChoice | int | None = None,
    config: MemckptConfig | None = None,
    replicated: Sequence[str] = (),
    attributes: Sequence[str] = (),
) -> MemCheckpointTrainerCallback:
    """Add a MemCheckpointTrainerCallback to `trainer`, which it then knows; arguments and errors are the callback's."""
    callback = MemCheckpointTrainerCallback(
        run_dir, resume=resume, config=config, replicated=replicated, attributes=attributes
    )
    callback.attach(trainer)
    return callback
