"""Re-entry: lets a resumed fit loop run the killed process's remaining hooks before its stop conditions end it.

After the last step of a run (`max_steps` reached, or `trainer.should_stop` set) a validation and the epoch's end hooks
still follow. A new fit loop that finds such a stop condition returns without running them. So stop conditions are
lifted when the loops are loaded, and restored inside the epoch loop, after the check that would have ended it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from lightning_memckpt.internals import TrainerInternals
from lightning_memckpt.shadowing import Shadows


class Reentry:
    """Re-entry of one resumed fit into its loops; without effect after the first `on_train_epoch_end`.

    Args:
        trainer: the trainer, whose loops have loaded the edited state.
        internals: the trainer's internals.
        validation_owed: whether a validation follows the captured batch.
        epoch_over: whether the captured batch was the last one of its epoch.
        should_stop: `trainer.should_stop` as captured.
        val_has_run: whether any validation had run in the killed process.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        internals: TrainerInternals,
        *,
        validation_owed: bool,
        epoch_over: bool,
        should_stop: bool,
        val_has_run: bool,
    ) -> None:
        self._trainer = trainer
        self._internals = internals
        self._validation_owed = validation_owed
        self._epoch_over = epoch_over
        self._should_stop = should_stop
        self._val_has_run = val_has_run
        self._shadows = Shadows()
        self._max_steps: int | None = None

    def lift(self) -> None:
        """Lift the stop conditions; call before the fit loop runs."""
        epoch_loop = self._internals.epoch_loop
        if epoch_loop.max_steps != -1 and epoch_loop.global_step >= epoch_loop.max_steps:
            self._max_steps = epoch_loop.max_steps
            epoch_loop.max_steps = epoch_loop.global_step + 1
        if self._validation_owed:
            # Lightning decides again, from the clock or from should_stop; the killed process's decision holds.
            self._shadows.put(epoch_loop, "_should_check_val_fx", lambda _: lambda *args: True)
            self._shadows.put(epoch_loop, "on_advance_end", self._around_advance_end)
        else:
            # A finished epoch must not fetch another batch. `_has_run` means "the validation after the last batch is
            # done", which lets the epoch loop end before its first `advance`.
            self._internals.set_val_has_run(self._epoch_over or self._val_has_run)
            self._shadows.put(epoch_loop, "on_run_start", self._around_run_start)

    def _around_run_start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def on_run_start(*args: Any, **kwargs: Any) -> Any:
            self._shadows.remove(self._internals.epoch_loop, "on_run_start")
            result = original(*args, **kwargs)
            self._put_back()
            return result

        return on_run_start

    def _around_advance_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def on_advance_end(*args: Any, **kwargs: Any) -> Any:
            self._shadows.remove(self._internals.epoch_loop, "on_advance_end")
            self._put_back()
            # The original asks `_should_check_val_fx` once, at its start, before any user code runs.
            validate = self._internals.val_loop.run

            def run(*run_args: Any, **run_kwargs: Any) -> Any:
                self._shadows.remove(self._internals.val_loop, "run")
                self._shadows.remove(self._internals.epoch_loop, "_should_check_val_fx")
                self._internals.settle_validation()
                return validate(*run_args, **run_kwargs)

            self._shadows.put(self._internals.val_loop, "run", lambda _: run)
            return original(*args, **kwargs)

        return on_advance_end

    def _put_back(self) -> None:
        if self._max_steps is not None:
            self._internals.epoch_loop.max_steps = self._max_steps
            self._max_steps = None
        if self._should_stop:
            self._trainer.should_stop = True
            self._should_stop = False

    def finish(self) -> None:
        """End the restart; call in the first `on_train_epoch_end`.

        Lightning clears its restart flags after each iteration, but an epoch that ends before its first iteration keeps
        them. The fit loop keeps its own until after this hook, where it would leave ReduceLROnPlateau(interval="epoch")
        without its step.
        """
        self._internals.epoch_loop.on_iteration_done()
        self._internals.fit_loop.on_iteration_done()
        if not self._validation_owed and self._epoch_over:
            self._internals.set_val_has_run(self._val_has_run)
        self.abandon()

    def abandon(self) -> None:
        """Remove everything of ours from the loops, whatever has happened."""
        self._put_back()
        self._shadows.remove_all()
