"""The callback's work during one fit.

A resumed fit has three stages:

1. `strategy.setup` is done and no `on_fit_start` has run: the session is attached, the loops learn where to re-enter,
   callbacks and datamodule get their state. Lightning would restore a checkpoint here; with strategies that shard it
   does so after `on_fit_start`, and so do we.
2. Loaders are processed: each gets its position.
3. The end of `strategy.on_train_start`, the very last start hook: tensors, optimizers, schedulers, logging and,
   last of all, the RNG. Earlier start hooks see the initial model, as in the first start; their changes to it are
   overwritten now, as training overwrote them then.

From then on the state is captured at the end of the module's own `on_train_batch_end`, after every callback's, whenever
the batch ended with an optimizer step. With ``resume_check="replay"`` the held state is the one before the last step,
and the first step repeats the killed process's last one. Steps with further effects (a validation, an epoch's end, a
file) are not repeated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.strategies import FSDPStrategy
from torch.nn.parallel import DistributedDataParallel

import memckpt
from lightning_memckpt import trainer_state
from lightning_memckpt.files import OverwriteOrphans
from lightning_memckpt.fit_state import FitState
from lightning_memckpt.internals import TrainerInternals
from lightning_memckpt.loaders import Loaders, derived_positions
from lightning_memckpt.notes import files_by_wall_clock, inexact, list_callbacks, loggers_elsewhere
from lightning_memckpt.reentry import Reentry, batches_behind, with_batches_behind
from lightning_memckpt.shadowing import Shadows
from memckpt.config import ResumeChoice
from memckpt.user_file import UserFile, connect
from memckpt.user_messages import Messages

STATE = "lightning"

# Lightning cannot know that the loaders of a resumed fit continue: they have no state_dict() on purpose, or our
# positions would end up in the user's own checkpoint files.
_MISLEADING_WARNING = "You're resuming from a checkpoint that ended before the epoch ended"


class Protection:
    """One fit of a supported trainer under protection, from its `setup` hook to `teardown` or an exception."""

    def __init__(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        callback: pl.Callback,
        *,
        arguments: memckpt.ProtectionArguments,
        replicated: Sequence[str],
        attributes: Sequence[str],
        messages: Messages,
    ) -> None:
        self._trainer: Any = trainer
        self._pl_module = pl_module
        self._callback = callback
        self._arguments = arguments
        self._replicated = replicated
        self._attributes = attributes
        self._messages = messages
        self._internals = TrainerInternals(trainer)
        self._internals.verify()
        self._shadows = Shadows()
        self._loaders = Loaders(trainer, self._internals)
        self._fit_state: FitState | None = None
        self._session: memckpt.Session | None = None
        #: What was resumed, and whether exactly; None on a first start.
        self.report: memckpt.RestoreReport | None = None
        self._pending: Mapping[str, Any] | None = None
        self._reentry: Reentry | None = None
        self._orphans: OverwriteOrphans | None = None
        self._silenced: Any = None

    def install(self) -> None:
        """Wrap methods of the strategy; the rest of the trainer is not touched before the strategy is set up."""
        strategy, shadows = self._trainer.strategy, self._shadows
        if self._internals.restores_late:
            self._internals.shadow_late_restore(shadows, self._restore_late)
        else:
            shadows.follow(strategy, "setup", lambda: self._attach(self._user_file()))
        shadows.put(strategy, "process_dataloader", lambda original, loader: self._loaders.process(original(loader)))
        shadows.follow(strategy, "on_train_start", self._start_training)
        shadows.put(self._internals.fit_loop, "setup_data", partial(self._set_up_data, "train"))
        shadows.put(self._internals.val_loop, "setup_data", partial(self._set_up_data, "validation"))
        shadows.follow(self._internals.fit_loop, "_load_combined_loader_states", self._loaders.resume_built)
        shadows.put(strategy, "save_checkpoint", self._save_checkpoint)

    def _restore_late(self, original: Callable[..., None], path: Any = None, *args: Any, **kwargs: Any) -> None:
        self._attach(self._late_file(path))
        if self._pending is None:
            original(path, *args, **kwargs)

    def _save_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.unrepeatable("a checkpoint file was written in it")
        return original(*args, **kwargs)

    def _set_up_data(self, role: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._internals.loaders_are_due[role]:
            return original(*args, **kwargs)
        with self._loaders.building(role):
            return original(*args, **kwargs)

    # --- stage 1 --------------------------------------------------------------------------------------------

    def _attach(self, file: UserFile | None) -> None:
        trainer = self._trainer
        self._fit_state = fit_state = FitState(
            trainer,
            self._pl_module,
            self._internals,
            self._loaders,
            self._callback,
            self._attributes,
            self._messages,
            self._inexact,
        )
        self._loaders.readable, self._loaders.reading = fit_state.readable, fit_state.reading
        self._loaders.inexact = self._inexact
        run_dir, resume, _ = self._arguments
        self._session = connect(self._connect, resume, file, run_dir, self._messages)
        held = self._session.held
        if held is not None and file is not None:
            self._internals.forget_user_checkpoint()
        self._session.provide(STATE, lambda: fit_state.captured, fit_state.check_parts, fit_state.put_back)
        self._session.announce_accumulation(self._accumulates)
        self._session.carried(fit_state.carried)
        for line in inexact(trainer, self._internals):
            self._inexact(line)
        if files_by_wall_clock(trainer):
            self._messages.warn("ModelCheckpoint(train_time_interval=...) saves at other steps after a restart")
        if held is None:
            fit_state.tables.follow_files({})
            self._loaders.take_over()
            return
        state = held.provided_as(STATE, "MemCheckpoint")
        for line in trainer_state.changed_settings(trainer, state["settings"], state["changed_settings"]):
            self._inexact(line)
        if held.world_size != trainer.world_size or state["replicas"] != trainer_state.data_replicas(trainer):
            state = self._for_other_ranks(state, held.world_size)
        for line in loggers_elsewhere(state["loggers"], fit_state.loggers):
            self._messages.warn(line)
        self._pending = state
        fit_state.tables.follow_files(state["tables"])
        fit_state.restore_early(state)
        self._internals.fit_loop.load_state_dict(state["loops"])
        self._reentry = Reentry(
            trainer,
            self._internals,
            validation_owed=state["validation_owed"],
            epoch_over=state["epoch_over"],
            should_stop=state["trainer"]["should_stop"],
            val_has_run=state["trainer"]["loop_extras"]["val_has_run"],
        )
        self._reentry.lift()
        self._loaders.continue_after(state["loaders"], epoch_over=state["epoch_over"], built_under=state["built_under"])
        self._loaders.take_over()

    def _for_other_ranks(self, state: dict[str, Any], world_size: int) -> dict[str, Any]:
        """Derive the place in the epoch from the number of trained samples, rounded down to whole batches."""
        before, now = batches_behind(state["loops"]), self._trainer.world_size
        # Tensor-parallel ranks see the same samples.
        batches = before * state["replicas"] // trainer_state.data_replicas(self._trainer)
        self._messages.warn(
            f"{world_size} ranks had trained {before} batches of this epoch each; {now} ranks resume after {batches}. "
            "Generators, sample order within a batch and logged averages differ from those of an uninterrupted run"
        )
        return {
            **state,
            "loops": with_batches_behind(state["loops"], batches),
            "loaders": derived_positions(state["loaders"], batches),
        }

    def _connect(self, resume: ResumeChoice | int) -> memckpt.Session:
        assert self._fit_state is not None
        strategy = self._trainer.strategy
        wrapped = strategy.model
        return memckpt.attach(
            # FSDP1 keeps parameters in flat ones, and those of its outermost wrapper are not in the module.
            wrapped if isinstance(strategy, FSDPStrategy) else self._pl_module,
            self._trainer.optimizers,
            run_dir=self._arguments.run_dir,
            resume=resume,
            config=self._arguments.config,
            data_parallel=wrapped if isinstance(wrapped, DistributedDataParallel) else None,
            extra_modules=self._fit_state.beside,
            replicated=self._replicated,
        )

    def _inexact(self, reason: str) -> None:
        assert self._session is not None, "connected before anything is restored or built"
        self._session.inexact(reason)

    def _accumulates(self) -> bool:
        """Whether another backward follows the running one before Lightning steps."""
        return self._pl_module.automatic_optimization and self._internals.should_accumulate()

    def _user_file(self) -> UserFile | None:
        checkpoint = self._internals.user_checkpoint()
        if not checkpoint:
            return None
        return UserFile(str(self._trainer.ckpt_path), checkpoint.get("global_step", 0), "ckpt_path")

    def _late_file(self, path: Any) -> UserFile | None:
        if not path:
            return None
        return UserFile(str(path), self._internals.read_late_checkpoint(str(path)).get("global_step", 0), "ckpt_path")

    # --- stage 3 --------------------------------------------------------------------------------------------

    def _start_training(self) -> None:
        session, fit_state = self._active()
        self._shadows.follow(self._pl_module, "on_train_batch_end", self._after_batch)
        self._loaders.training = True
        for logger in self._trainer.loggers:
            self._shadows.put(logger, "log_metrics", partial(self._note_logged, session))
        fit_state.look_again()
        self._messages.inform(session.describe().removeprefix("memckpt: "))
        fit_state.check()
        if self._pending is None:
            return
        state, self._pending = self._pending, None
        report = session.restore_tensors()
        fit_state.restore_late(state)
        if not state["validation_owed"]:
            # The killed batch's on_advance_end does not run again, and this is the part of it that affects training.
            self._internals.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)
        self._loaders.restore_late()
        self._orphans = OverwriteOrphans(self._trainer, state["captured_at"])
        self._silence()
        session.restore_rng()
        for bar in list_callbacks(self._trainer):
            if type(bar) in (TQDMProgressBar, RichProgressBar):
                bar.on_train_epoch_start(self._trainer)  # a resumed epoch does not start: no total, no epoch
        self.report = report
        if report is not None:
            self._messages.resumed(report)

    def _active(self) -> tuple[memckpt.Session, FitState]:
        assert self._session is not None, "the strategy is set up before training starts"
        assert self._fit_state is not None, "made together with the session"
        return self._session, self._fit_state

    def _silence(self) -> None:
        warnings.filterwarnings("ignore", message=_MISLEADING_WARNING)
        self._silenced = warnings.filters[0]

    def _end_silence(self) -> None:
        if self._silenced is not None and self._silenced in warnings.filters:
            cast("list[Any]", warnings.filters).remove(self._silenced)  # a list, declared as a Sequence
        self._silenced = None

    # --- each step ------------------------------------------------------------------------------------------

    def _after_batch(self) -> None:
        self._end_silence()
        if self._internals.should_accumulate():
            return
        session, fit_state = self._active()
        fit_state.commit(session)
        self._log_metrics(session)

    def _log_metrics(self, session: memckpt.Session) -> None:
        """Log to the loggers directly: self.log() would change callback_metrics, which training may depend on."""
        trainer = self._trainer
        step = self._internals.logger_axis_step
        if not trainer.log_every_n_steps or (step + 1) % trainer.log_every_n_steps:
            return
        if not trainer.loggers:
            session.log(trainer.callback_metrics)
            return
        metrics = session.logger_metrics()
        for logger in trainer.loggers if metrics else ():
            logger.log_metrics(metrics, step=step)

    @staticmethod
    def _note_logged(session: memckpt.Session, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note what goes to a logger: by now Lightning has read it from its device."""
        session.log(kwargs["metrics"] if "metrics" in kwargs else args[0])
        return original(*args, **kwargs)

    # --- the end --------------------------------------------------------------------------------------------

    def unrepeatable(self, reason: str) -> None:
        """Exclude the step from a repetition: further effects would happen twice."""
        if self._session is not None and not self._trainer.sanity_checking:
            self._session.unrepeatable(reason)

    def finish_epoch(self) -> None:
        """Note the end of a training epoch."""
        self.unrepeatable("an epoch ended before it")
        self._end_silence()
        if self._reentry is not None:
            self._reentry.finish()
            self._reentry = None

    def close(self, *, finished: bool) -> None:
        """Remove everything from trainer, module, callbacks and loaders; tell the engine how training ended.

        Held state that was never used stays held: a run whose stop conditions were met before its first step has not
        finished what the killed process began.
        """
        self._end_silence()
        if self._reentry is not None:
            self._reentry.abandon()
        if self._orphans is not None:
            self._orphans.remove_wrappers()
        self._shadows.remove_all()
        self._loaders.release()
        if self._fit_state is not None:
            self._fit_state.tables.unfollow_files()
        session, self._session = self._session, None
        if session is not None:
            session.close(finished=finished, keep_held=self._pending is not None)
