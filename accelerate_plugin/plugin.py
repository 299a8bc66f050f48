"""The plugin: the interface for a training around an `Accelerator`.

A resumed training has three stages:

1. `prepare`: the session is attached; it knows the held state.
2. Start of the loop (`epochs`, or the first iteration over a prepared loader): tensors, optimizers, schedulers, scaler,
   registered objects and generators are restored, and loaders get their positions.
3. The resumed iteration is about to fetch its first new batch: the global generators are restored once more. Draws at
   the top of an epoch were made by the killed process, too, before it committed.

With ``resume_check="replay"`` the held state is the one before the last step, and the first step repeats the killed
process's last one. Steps before which an epoch ended, or in which Accelerate saved, are not repeated.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import accelerate
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

import memckpt
from accelerate_plugin.loaders import (
    Followers,
    GeneratorsElsewhere,
    begun_loaders,
    drop_unused_iterator,
    grafting_stateful_loaders,
    iterator_used,
    restore_begun,
)
from accelerate_plugin.loop import LoopWatch, Unwatched
from accelerate_plugin.prepared import (
    ObjectStates,
    Prepared,
    check_parts,
    move_orphans_aside,
    prepare,
    refuse,
    require_training,
    sort_prepared,
)
from memckpt.capture.beside.attributes import same
from memckpt.capture.data.places import DrawsAtOpen
from memckpt.capture.data.prefetch import TAKEN_APART
from memckpt.config import MemckptConfig, ResumeChoice
from memckpt.config.arguments import disabled_by_environment, with_environment
from memckpt.errors import ConfigurationError, UsageError
from memckpt.user_messages import Messages

STATE = "accelerate"
_log = logging.getLogger("accelerate_plugin")


class MemCheckpointPlugin:
    """Protects every optimizer step of a training with Accelerate, and resumes at the exact step after any crash.

    `prepare` replaces `accelerator.prepare`, `epochs` replaces `range`, and `commit` is the last statement of the loop
    over batches. Everything else stays as it is. Start the same script again, and training continues after the last
    committed step, bit for bit. End with `close`, or use the plugin as a context manager.

    Args:
        accelerator: an Accelerator of a single process, of DDP, or of FSDP.
        run_dir, resume, config, replicated: as for :func:`memckpt.attach`.
        log_every: steps between metrics for the Accelerator's trackers; None: no metrics.

    Raises:
        ConfigurationError: an invalid setting, in the arguments or in the environment.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        resume: ResumeChoice | int | None = None,
        config: MemckptConfig | dict[str, Any] | None = None,
        replicated: Sequence[str] = (),
        log_every: int | None = 50,
    ) -> None:
        if log_every is not None and log_every < 1:
            raise ConfigurationError(f"log_every: expected None or 1 or more, found {log_every!r}")
        self.run_dir, self.resume, self.config = with_environment(run_dir, resume, config)
        self._replicated = tuple(replicated)
        self.accelerator: Any = accelerator
        self._log_every = log_every
        self._objects = ObjectStates(accelerator)
        self._session: memckpt.Session | None = None
        #: What was resumed, and whether exactly as far as is known by now; None on a first start, and before the loop.
        self.report: memckpt.RestoreReport | None = None
        self._followers = Followers(self._note_open, self._begin_loop, self._restore_rng)
        self._draws = DrawsAtOpen()
        self._elsewhere = GeneratorsElsewhere()
        self._at_begin: dict[str, Any] = {}
        self._disabled = disabled_by_environment()
        self._watch = Unwatched() if self._disabled else LoopWatch()
        self._messages = Messages(_log, accelerator.is_main_process)
        self._begun = False
        self._rng_pending = False
        self._in_epochs = False
        self._closed = False
        self._step = 0
        self._epoch = 0
        self._batch = 0
        self._commits = 0
        self._ended_at_commit = 0
        #: Batches of an accumulation, as this attempt began.
        self._accumulation = 1
        self._handles: list[Any] = []
        #: What stood in the Accelerator's place of its method `log`.
        self._own_log: Any = None
        #: As :func:`begun_loaders` found it in the killed process.
        self._begun_before: Sequence[Any] = ()

    # Before the loop

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Call `accelerator.prepare`, and connect to the agent. Call once, with all trained and iterated objects.

        Args:
            objects: model, optimizer, loaders, schedulers, in any order; returned in the same order. A model that you
                have sharded yourself (fully_shard, parallelize_module) stays as it is.
            device_placement: as for `accelerator.prepare`.

        Raises:
            UsageError: a second call, or nothing to train among the arguments.
            UnsupportedError: the Accelerator trains in an unsupported way, or a loader cannot be followed.
            MemckptError: as :func:`memckpt.attach`.
        """
        if self._session is not None:
            raise UsageError(
                "prepare() was called twice: expected one call with everything that is trained; loaders that only "
                "evaluate may go to accelerator.prepare()"
            )
        if self._disabled:
            return self._prepare_unprotected(objects, device_placement)
        refuse(self.accelerator)
        require_training(objects)
        with grafting_stateful_loaders(lookahead=self.accelerator.num_processes):
            result = prepare(self.accelerator, objects, device_placement)
        self._objects.prepared = prepared = sort_prepared(self.accelerator, result)
        self._session = session = memckpt.attach(
            prepared.model,
            prepared.torch_optimizers,
            run_dir=self.run_dir,
            resume=self.resume,
            config=self.config,
            data_parallel=prepared.data_parallel,
            replicated=self._replicated,
        )
        try:
            self._attached(session, prepared)
        except BaseException:  # raised again: an error must not leave the session open
            self.close(finished=False)
            raise
        return tuple(result)

    def _prepare_unprotected(self, objects: Sequence[Any], device_placement: list[bool] | None) -> tuple[Any, ...]:
        found = tuple(prepare(self.accelerator, objects, device_placement))
        model = next((each for each in found if isinstance(each, nn.Module)), nn.Module())
        optimizers = [getattr(each, "optimizer", each) for each in found if isinstance(each, Optimizer)]
        self._session = memckpt.attach(model, optimizers, run_dir=self.run_dir, config=self.config)
        self._watch.install(optimizers)
        return found

    def _attached(self, session: memckpt.Session, prepared: Prepared) -> None:
        if session.held is not None:
            state = session.held.provided_as(STATE, "MemCheckpointPlugin", self.accelerator.num_processes)
            self._step, self._epoch, self._batch = session.held.step, state["epoch"], state["batch"]
        self._accumulation = self.accelerator.gradient_accumulation_steps
        session.provide(STATE, self._capture, check_parts, self._objects.restore)
        session.carried(self._objects.carried)
        session.announce_accumulation(lambda: not self.accelerator.sync_gradients)
        self._watch.install(prepared.torch_optimizers)
        self._handles = [
            self.accelerator.register_save_state_pre_hook(lambda *_: session.unrepeatable("save_state() ran in it")),
            self.accelerator.register_load_state_pre_hook(lambda *_: session.unrepeatable("load_state() ran in it")),
        ]
        own = vars(self.accelerator)
        self._own_log = own.get("log")
        own["log"] = partial(self._note_logged, self.accelerator.log)
        self._followers.follow(prepared.loaders)
        self._messages.inform(session.describe().removeprefix("memckpt: "))
        self._look_at_loaders()
        for line in self._followers.remarks():
            self._messages.inform(line)

    def register(self, name: str, obj: Any, attributes: Sequence[str] = ()) -> None:
        """Make an object with `state_dict` and `load_state_dict` part of the state. Call before the loop.

        Objects of `accelerator.register_for_checkpointing` are included anyway.

        Args:
            name: name under which its state is stored.
            obj: the object; with `attributes` it may be of any type.
            attributes: names of plain attributes of the object to store instead of its `state_dict`.

        Raises:
            UsageError: the loop has begun, the name is taken, or the object lacks these methods.
            ConfigurationError, UnsupportedStateError: an attribute is missing, or cannot be stored.
        """
        if self._disabled:
            return
        if self._begun:
            raise UsageError(f"register({name!r}): expected it before the loop, which has begun")
        self._objects.register(name, obj, attributes)

    # Position in the training

    @property
    def step(self) -> int:
        """Number of committed optimizer steps; from `prepare` on that of the continued run.

        Raises:
            UsageError: first read inside the loop over a prepared loader.
        """
        self._place_is_asked("ckpt.step")
        return self._step

    @property
    def epoch(self) -> int:
        """The current or next epoch of `epochs`. Raises as `step`."""
        self._place_is_asked("ckpt.epoch")
        return self._epoch

    @property
    def batch(self) -> int:
        """Batches of this epoch before the last commit; the start of a batch counter of your own."""
        self._followers.place_asked = True
        return self._batch

    def epochs(self, total: int) -> Iterator[int]:
        """Replacement of ``range(total)`` that begins with the epoch to resume.

        Raises:
            UsageError: called before `prepare`, or inside the loop over a prepared loader; or no step of an epoch was
                ended with `commit`.
        """
        self._attached_session("epochs()")
        self._place_is_asked("ckpt.epochs()")
        self._restore_once()
        self._in_epochs = True
        while self._epoch < total:
            yield self._epoch
            self._watch.check_epoch(self._step > 0)
            self._warn_inexact(self._watch.left(self._followers.places()))
            self._followers.ended += 1
            self._epoch += 1
            self._batch = 0

    def _place_is_asked(self, what: str) -> None:
        """Note that the loop knows where it resumes: later iterations continue there."""
        if not self._watch.place_is_known and self._followers.active:
            raise UsageError(
                f"{what}: expected its first use before the loop over a prepared loader, found it inside: "
                "that loop has begun with its first batch, whatever is held; read ckpt.step before it"
            )
        self._watch.place_is_known = True

    # Each step

    def commit(self, *, epoch_over: bool = False) -> bool:
        """End a step. The last statement of the loop over batches, after everything that belongs to the step.

        Args:
            epoch_over: the loop is left after this batch although the loader has more.

        Returns:
            True if an optimizer step (or one that the gradient scaler skipped) was committed; False while gradients are
            accumulated.

        Raises:
            UsageError: called before `prepare`, outside the loop over a prepared loader, or twice for one batch.
        """
        session = self._attached_session("commit()")
        place = tuple(each.at for each in self._followers) if self._followers.active else None
        apart = place is None and self._followers.taken_apart
        self._warn_inexact(TAKEN_APART if apart else None)
        self._watch.check_commit(place, bool(self._followers) and not apart)
        self._followers.committing()
        if epoch_over:
            self._followers.leave()
        stepped = self._watch.stepped
        skipped = self.accelerator.sync_gradients and self._objects.scaler_skipped(stepped)
        pending = False if skipped and not stepped else None
        if not (stepped or skipped) or not self.accelerator.sync_gradients:
            self._watch.nothing_to_commit()
            return False
        before = self._step, self._batch
        self._step += int(stepped)
        self._look_at_loaders()  # of which none is followed where protection is disabled
        batches = self._followers.batches
        self._batch = self._batch + 1 if batches is None else batches
        if self._followers.ended != self._ended_at_commit:
            session.unrepeatable("an epoch, or another iteration over a loader, ended before it")
        if not session.commit(step=self._step, gradients_pending=pending):
            self._step, self._batch = before
            self._watch.nothing_to_commit()
            return False
        self._ended_at_commit = self._followers.ended
        self._warn_inexact(self._watch.committed(self._followers.places(), self._in_epochs))
        self._commits += 1
        self._log_metrics(session)
        return True

    def metrics(self) -> dict[str, float]:
        """The cost of steps since the last call, such as stalled milliseconds; see docs/lightning.md."""
        session = self._attached_session("metrics()")
        return {f"memckpt/{name}": value for name, value in session.metrics().items()}

    def _log_metrics(self, session: memckpt.Session) -> None:
        if self._log_every is None or self._commits % self._log_every or not self.accelerator.trackers:
            return
        if metrics := session.logger_metrics():
            self.accelerator.log(metrics, step=self._step)

    def _note_logged(self, original: Callable[..., Any], values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if self._session is not None:
            self._session.log(values)
        original(values, *args, **kwargs)

    def _warn_inexact(self, line: str | None) -> None:
        if line is not None and self._session is not None:
            self._session.inexact(line)

    # State

    def _capture(self) -> dict[str, Any]:
        assert self._objects.prepared is not None
        elsewhere = self._loaders_prepared_elsewhere()
        return {
            "accelerate": accelerate.__version__,
            "epoch": self._epoch,
            "batch": self._batch,
            "models": len(self._objects.prepared.models),
            "micro_step": self.accelerator.step,
            "save_iteration": self.accelerator.save_iteration,
            "accumulation": (self._accumulation, self.accelerator.gradient_accumulation_steps),
            **self._objects.capture(),
            "loaders": self._followers.states(),
            "prepared_elsewhere": [iterator_used(each) for each in elsewhere],
            "generators_elsewhere": self._elsewhere.capture(elsewhere),
            "begun": begun_loaders(self.accelerator),
        }

    def _loaders_prepared_elsewhere(self) -> list[Any]:
        """The torch loaders inside those that went to `accelerator.prepare`: for evaluation, say."""
        assert self._objects.prepared is not None
        followed = {id(each) for each in self._objects.prepared.loaders}
        return [each.base_dataloader for each in self.accelerator._dataloaders if id(each) not in followed]

    def _note_open(self) -> None:
        resumes = self._session is not None and self._session.held is not None
        if resumes and (self._rng_pending or not self._begun):
            self._draws.note_open()

    def _begin_loop(self) -> None:
        """Restore at the first iteration of a prepared loader, unless the loop only looks at the data so far."""
        self._warn_inexact(self._draws.find())
        if self._watch.place_is_known:
            self._restore_once()

    def _restore_once(self) -> None:
        """Restore everything, once, at the start of the loop."""
        if self._begun:
            return
        self._begun = True
        session = self._attached_session("the loop")
        if session.held is None:
            return
        state: Mapping[str, Any] = session.held.rank_state[STATE]
        report = session.restore_tensors()
        self._objects.restore(state)
        self.accelerator.step = state["micro_step"]
        self.accelerator.project_configuration.iteration = state["save_iteration"]
        for path in move_orphans_aside(self.accelerator):
            self._messages.inform(f"the killed attempt saved behind the step that is resumed: moved to {path}")
        began_with, last = state["accumulation"]
        if began_with == self._accumulation:  # what has changed it since was training
            self.accelerator.gradient_accumulation_steps = last
        else:
            session.inexact(
                f"gradient_accumulation_steps was {began_with} in the run that is continued, and is "
                f"{self._accumulation} now"
            )
        self._followers.continue_after(state["loaders"])
        self._begun_before = state["begun"]
        self._warn_inexact(restore_begun(self.accelerator, self._begun_before))
        for line in self._followers.unreplayable():
            session.inexact(line)
        # Those that are prepared later, in the loop, draw in `prepare` as they did in the killed process.
        for loader, used in zip(self._loaders_prepared_elsewhere(), state["prepared_elsewhere"], strict=False):
            if used:
                drop_unused_iterator(loader)
        self._rng_pending = True
        session.restore_rng()
        self._at_begin = copy.deepcopy(self._objects.capture())  # with rates that the session has overridden
        self.report = report
        if report is not None:
            self._messages.resumed(report)

    def _restore_rng(self) -> None:
        """Restore the generators once, for the first loader that reaches new batches."""
        if self._rng_pending:
            self._rng_pending = False
            # What stands above the loop over batches had been done before these.
            session = self._attached_session("the loop")
            assert session.held is not None
            states = session.held.rank_state[STATE]["generators_elsewhere"]
            self._warn_inexact(self._elsewhere.restore(self._loaders_prepared_elsewhere(), states))
            session.restore_rng()
            if not same(self._objects.capture(), self._at_begin):
                self._objects.restore(self._at_begin)
            restore_begun(self.accelerator, self._begun_before, in_loop=True)

    def _attached_session(self, what: str) -> memckpt.Session:
        if self._session is None:
            state = "the plugin is closed" if self._closed else "prepare() has not been called"
            raise UsageError(
                f"{what}: {state}; call model, optimizer, loader, scheduler = ckpt.prepare(model, optimizer, loader, "
                "scheduler) first"
            )
        return self._session

    def _look_at_loaders(self) -> None:
        for line in self._followers.unreplayable():
            self._warn_inexact(line)

    # The end

    def close(self, finished: bool = True) -> None:
        """End the protection, and leave nothing on loaders and optimizers.

        With `finished` no state has to be held any more: the agent writes the last step to storage and ends. Otherwise
        it keeps the state.

        Raises:
            UsageError: the training has stepped its optimizer and never committed.
        """
        if self._closed:
            return
        never_begun = not self._begun and self._session is not None and self._session.held is not None
        if finished and never_begun and self._watch.place_is_known:
            self._restore_once()  # the loop had no step left
        self._closed = True
        self._watch.remove()
        vars(self.accelerator).pop("log", None)
        if self._own_log is not None:
            vars(self.accelerator)["log"] = self._own_log
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if finished:
            self._warn_inexact(self._watch.left(self._followers.places()))
        self._followers.release()
        session, self._session = self._session, None
        if session is not None:
            # A run whose loop was never entered has not finished its held training.
            session.close(finished=finished, keep_held=never_begun)
        if finished:
            self._watch.check_end()

    def __enter__(self) -> MemCheckpointPlugin:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(finished=kind is None)
