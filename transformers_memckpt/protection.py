"""The callback's work during one `Trainer.train()`.

The state is captured when nothing is pending: when a step begins, so that the previous step's actions (log, evaluate,
save) are done, and when an epoch has ended. A process that dies in an evaluation repeats the step before it, and the
whole evaluation.

With ``resume_check="replay"`` the held state is the one before the last step, and the first step repeats the killed
process's last one. Steps that an evaluation, a file or an epoch's end followed are not repeated.

A resumed training has three stages:

1. `on_train_begin`: model, optimizer and loader exist, and no epoch has begun. The session is attached; held state
   decides with which epoch the Trainer begins, and the loader learns where it continues.
2. `_run_epoch` of a resumed epoch is told that the epoch has only the remaining batches. Its own counting of
   accumulations then matches the first run's.
3. The first step, or between two epochs the beginning of the next, after all hooks of a new start: tensors, scheduler,
   counters, callbacks and last of all the generators.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SeedableRandomSampler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import memckpt
from memckpt.capture.beside.attributes import Attributes, FoundObjects, tensors_in
from memckpt.capture.data import graft as dataloader
from memckpt.config import ResumeChoice
from memckpt.errors import ForeignStateError, UnsupportedError, UnsupportedStateError
from memckpt.user_file import UserFile, connect
from memckpt.user_messages import Messages
from transformers_memckpt import notes
from transformers_memckpt.trainer_state import TrainerStates, attribute_roots, beside, check_parts


class Follower:
    """Follows the torch loader inside the Trainer's own, Accelerate's DataLoaderShard; `release` restores it.

    The shard reads one batch ahead of the one it hands out, and the Trainer takes the batches of a whole accumulation
    before it trains on the first. `accumulated`: number of these. Raises UnsupportedError for another loader.
    """

    def __init__(self, prepared: Any, accumulated: int) -> None:
        self.inside = _inside(prepared)
        _make_generator(self.inside)
        dataloader.graft(self.inside, lookahead=accumulated + 1)
        self._held: dict[str, Any] | None = None

    def position(self, trained: int | None) -> dict[str, Any]:
        """The position to continue at, as plain values.

        Args:
            trained: number of batches of this epoch that were trained on; None: the next epoch is about to begin.

        Raises:
            DataPositionError: later batches were fetched too long ago to be remembered.
        """
        if trained is None:
            return {"between": True, "position": dataloader.position(self.inside, exhausted=True)}
        ahead = dataloader.handed_out(self.inside) - trained
        return {"between": False, "position": dataloader.position(self.inside, ahead=ahead)}

    def resume(self, held: dict[str, Any]) -> None:
        """Make the next epoch continue at the position `held`; global generators may move until training restores them.

        Raises as :func:`memckpt.capture.data.resume`.
        """
        self._held = held
        start = dataloader.recreate_persistent_iterator if held["between"] else dataloader.resume
        start(self.inside, held["position"])

    def go_live(self) -> None:
        """Restore the loader's own generators: the batches fetched ahead have been fetched again."""
        assert self._held is not None
        dataloader.go_live(self.inside)
        # An attempt to fetch beyond the last batch may have moved them since.
        dataloader.restore_generators(self.inside, self._held["position"])

    def release(self) -> None:
        """Restore the loader."""
        dataloader.release(self.inside)


def _inside(prepared: Any) -> DataLoader[Any]:
    # Not isinstance(): Accelerate's adapters claim the class of the loader that they hold.
    if issubclass(type(prepared), DataLoaderDispatcher):
        raise UnsupportedError(
            "expected a train dataloader that each rank reads, found one whose first rank dispatches batches, as "
            "Accelerate has it for every IterableDataset by itself; pass "
            'TrainingArguments(accelerator_config={"dispatch_batches": False})'
        )
    if not issubclass(type(prepared), DataLoaderShard) or not isinstance(prepared.base_dataloader, DataLoader):
        raise UnsupportedError(
            f"expected a train dataloader that Accelerate has prepared as a DataLoaderShard, found "
            f"{type(prepared).__name__}; return a torch DataLoader from get_train_dataloader()"
        )
    loader: DataLoader[Any] = prepared.base_dataloader
    return loader


def _make_generator(loader: DataLoader[Any]) -> None:
    """Create the generator that Accelerate's sampler makes at its first iteration, so that a resume can restore it."""
    sampler: Any = loader.batch_sampler
    while sampler is not None and not isinstance(sampler, SeedableRandomSampler):
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    if sampler is not None and sampler.generator is None:
        sampler.generator = torch.Generator(device=torch.get_default_device())
        sampler.generator.manual_seed(sampler.initial_seed)


STATE = "transformers"
_log = logging.getLogger("transformers_memckpt")
_LOOK_EVERY_COMMITS = 64
#: Commits of an attempt that look for state that is left out: loaders show what they do with their first batches.
_FIRST_LOOKS = 4


class _Later:
    """An int that is computed when it is used: `range()` asks for it after everything that precedes the first epoch."""

    def __init__(self, ask: Callable[[], int]) -> None:
        self._ask = ask

    def __index__(self) -> int:
        return self._ask()


class Protection:
    """One training of a supported Trainer under protection, from its beginning to its end or an exception."""

    def __init__(
        self,
        trainer: Any,
        callback: object,
        *,
        arguments: memckpt.ProtectionArguments,
        replicated: Sequence[str],
        attributes: Sequence[str],
    ) -> None:
        self._trainer = trainer
        self._arguments = arguments
        self._replicated = replicated
        self._messages = Messages(_log, trainer.is_world_process_zero())
        self._states = TrainerStates(trainer, callback)
        self._attributes = Attributes(attributes, lambda: attribute_roots(trainer))
        self._beside = beside(trainer)
        self._attributes.staged = {
            each for module in (trainer.model, *self._beside.values()) for each in module.modules()
        }
        #: What hangs on the Trainer and its callbacks; the engine looks at modules.
        self._objects = FoundObjects(
            lambda: {name: each for name, each in attribute_roots(trainer).items() if name != "model"},
            self._carried,
            self._inexact,
            "name {!r} in `attributes`",
        )
        self._session: memckpt.Session | None = None
        self._loader: Follower | None = None
        self._pending: dict[str, Any] | None = None
        self._captured: dict[str, Any] | None = None
        self._first_epoch = 0
        self._behind = 0
        self._taken = 0
        self._epoch = 0
        self._epoch_length = 0
        self._committed_step = 0
        self._commits = 0
        self._epoch_ended = False
        self._for_file: dict[str, Any] = {}
        self._file: tuple[str, int, int] | None = None

    def _carried(self) -> list[object]:
        """Objects whose state is carried here, and tensors that callbacks save."""
        callbacks = self._trainer.callback_handler.callbacks
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        scheduler = self._trainer.lr_scheduler
        schedulers = scheduler, getattr(scheduler, "scheduler", None)
        modules = (self._trainer.model, *self._beside.values())
        saved = tensors_in(self._captured["states"]) if self._captured is not None else ()
        return [*callbacks, *schedulers, scaler, *modules, *self._attributes.objects(), *saved]

    def _inexact(self, reason: str) -> None:
        assert self._session is not None, "begin() is called before anything is restored or captured"
        self._session.inexact(reason)

    def train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's own loop; removes everything of ours from it, however it ends."""
        with ExitStack() as stack:
            stack.enter_context(_replaced(self._trainer, "_init_training_state", self._init_training_state))
            stack.enter_context(_replaced(self._trainer, "_run_epoch", self._run_epoch))
            stack.callback(self._release)
            try:
                result = original(*args, **kwargs)
            except BaseException:
                self._close(finished=False)
                raise
            self._close(finished=True)
            return result

    def _init_training_state(
        self,
        original: Callable[..., Any],
        max_steps: int,
        per_epoch: int,
        epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[Any, int]:
        first, batches = original(max_steps, per_epoch, epochs, resume_from_checkpoint, trial)
        self._first_epoch = first
        self._states.compute_schedule(max_steps, epochs)
        if resume_from_checkpoint is not None:
            self._file = (resume_from_checkpoint, self._trainer.state.global_step, batches)
        return _Later(self._enter_epochs), batches

    def _run_epoch(self, original: Callable[..., Any], **kwargs: Any) -> None:
        self._epoch = kwargs["epoch"]
        self._epoch_length = kwargs["steps_in_epoch"]
        self._taken = 0
        self._behind = self._pending["batches"] if self._pending is not None else 0
        kwargs["steps_in_epoch"] -= self._behind
        kwargs["num_update_steps_per_epoch"] -= self._behind // self._trainer.args.gradient_accumulation_steps
        kwargs["epochs_trained"] = self._first_epoch
        if self._file is None:
            kwargs["resume_from_checkpoint"] = None
        original(**kwargs)
        self._end_epoch()

    # --- stage 1 --------------------------------------------------------------------------------------------

    def attach_and_prepare(self) -> None:
        """Attach and prepare a resume, in `on_train_begin`, before other callbacks."""
        trainer = self._trainer
        train_loader = trainer.callback_handler.train_dataloader
        self._loader = Follower(train_loader, trainer.args.gradient_accumulation_steps)
        file = UserFile(self._file[0], self._file[1], "resume_from_checkpoint") if self._file is not None else None
        run_dir, resume, _ = self._arguments
        self._session = connect(self._connect, resume, file, run_dir, self._messages)
        self._attributes.check()
        held = self._session.held
        self._session.carried(self._carried)
        self._session.provide(STATE, lambda: self._captured, check_parts, self._put_back)
        state = self._trainer.accelerator.gradient_state
        self._session.announce_accumulation(lambda: not state.sync_gradients)
        for line in notes.inexact(trainer):
            self._inexact(line)
        self._look_again()
        self._messages.inform(self._session.describe().removeprefix("memckpt: "))
        if held is None:
            self._committed_step = trainer.state.global_step
            self._refuse_middle_of_epoch()
            return
        self._file = None
        self._prepare_resume(self._checked(held))

    def _connect(self, resume: ResumeChoice | int) -> memckpt.Session:
        trainer = self._trainer
        wrapped = trainer.model_wrapped
        return memckpt.attach(
            trainer.model,
            getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            run_dir=self._arguments.run_dir,
            resume=resume,
            config=self._arguments.config,
            data_parallel=wrapped if isinstance(wrapped, DistributedDataParallel) else None,
            extra_modules=self._beside,
            replicated=self._replicated,
        )

    def _refuse_middle_of_epoch(self) -> None:
        if self._file is None or not self._file[2]:
            return
        raise UnsupportedError(
            f"expected a checkpoint from the end of an epoch, found {self._file[0]}, {self._file[2]} batches into one: "
            "the loader that skips them cannot be followed; set ignore_data_skip=True, take a checkpoint from an "
            "epoch's end, or restore from memckpt's own storage (no resume_from_checkpoint)"
        )

    def _checked(self, held: memckpt.HeldState) -> dict[str, Any]:
        trainer = self._trainer
        adapter = "the callback for transformers.Trainer"
        state: dict[str, Any] = held.provided_as(STATE, adapter, trainer.args.world_size)
        steps = trainer.args.gradient_accumulation_steps
        if state["batches"] % steps:
            raise ForeignStateError(
                f"expected gradient_accumulation_steps={state['settings']['gradient_accumulation_steps']}, as in the "
                f"run that is continued, found {steps}, and {state['batches']} trained batches are no multiple of it"
            )
        override = self._arguments.config.override
        for line, used in notes.changed_settings(trainer.args, state["settings"], override):
            (self._inexact if used else self._messages.warn)(line)
        for name, value in self._states.lost_schedule(state["states"]).items():
            self._inexact(f"state.{name} had become {value}, and is {getattr(trainer.state, name)} now")
        return state

    def _prepare_resume(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        assert self._loader is not None
        self._pending = state
        self._epoch_ended = state["loader"]["between"]
        ended = state["epoch"] >= trainer.state.num_train_epochs
        self._states.restore_counters(state["states"])
        self._attributes.restore(state["attributes"])  # before the loader's workers copy them
        self._objects.load_state_dict(state["objects"])
        self._first_epoch = state["epoch"]
        self._loader.resume(state["loader"])
        if ended or state["stopped"] or trainer.state.global_step >= trainer.state.max_steps:
            self._first_epoch = sys.maxsize  # no epoch is left

    # --- stage 3 --------------------------------------------------------------------------------------------

    def _enter_epochs(self) -> int:
        """The epoch to begin with; restores a training that is between two epochs or at its end."""
        if self._pending is not None and (self._pending["loader"]["between"] or self._first_epoch == sys.maxsize):
            self._restore()
        return self._first_epoch

    def begin_step(self) -> None:
        """Restore or commit, in `on_step_begin`, before other callbacks: earlier steps and their actions are done."""
        if self._pending is not None:
            self._restore()
        elif self._trainer.state.global_step != self._committed_step:
            self._commit(epoch=self._epoch, batches=self._behind + self._taken, stopped=False)

    def _restore(self) -> None:
        session, loader = self._active()
        assert self._pending is not None
        state, self._pending = self._pending, None
        report = session.restore_tensors()
        self._put_back(state)
        self._committed_step = self._trainer.state.global_step
        loader.go_live()
        session.restore_rng()
        if report is not None:
            self._messages.resumed(report)

    def _put_back(self, state: dict[str, Any]) -> None:
        """Restore the state beside tensors; also after a repeated step that differed from the held one."""
        self._states.restore(state["states"])
        self._attributes.restore(state["attributes"])
        self._objects.load_state_dict(state["objects"])

    def unrepeatable(self, reason: str) -> None:
        """Exclude the step from a repetition: further effects would happen twice."""
        if self._session is not None:
            self._session.unrepeatable(reason)

    def _active(self) -> tuple[memckpt.Session, Follower]:
        assert self._session is not None, "begin() is called before the first epoch"
        assert self._loader is not None, "made together with the session"
        return self._session, self._loader

    # --- each step ------------------------------------------------------------------------------------------

    def end_batch(self, *, stepped: bool) -> None:
        """Count a batch, in `on_substep_end` and `on_step_end`, before other callbacks."""
        self._taken += 1
        if stepped and self._behind:
            # The Trainer has divided by the number of remaining batches.
            self._trainer.state.epoch = self._epoch + (self._behind + self._taken) / self._epoch_length

    def _end_epoch(self) -> None:
        trainer = self._trainer
        if trainer.state.global_step == self._committed_step:
            return
        batches = self._behind + self._taken
        over = batches == self._epoch_length
        if not over and batches % trainer.args.gradient_accumulation_steps:
            return  # stopped within an accumulation: a restart repeats it
        stopping = trainer.control.should_training_stop
        stopped = stopping and trainer.state.global_step < trainer.state.max_steps
        if over or not stopping:
            self._commit(epoch=self._epoch + 1, batches=None, stopped=stopped)
        else:
            self._commit(epoch=self._epoch, batches=batches, stopped=stopped)

    def _commit(self, *, epoch: int, batches: int | None, stopped: bool) -> None:
        session, loader = self._active()
        if self._commits < _FIRST_LOOKS or self._commits % _LOOK_EVERY_COMMITS == 0:
            self._look_again()
        if not self._for_file:
            self._for_file = self._states.for_file()
        self._captured = {
            "epoch": epoch,
            "batches": batches or 0,
            "stopped": stopped,
            "settings": notes.settings(self._trainer.args),
            "loader": loader.position(batches),
            "states": self._states.capture(),
            "attributes": self._attributes.capture(),
            "file": self._for_file,
        }
        self._captured["objects"] = self._objects.state_dict()
        for line in self._attributes.left_out:
            self._inexact(f"not carried over a restart: {line}")
        step = self._trainer.state.global_step
        if self._epoch_ended or batches is None:
            session.unrepeatable(f"an epoch {'ended before' if self._epoch_ended else 'ends with'} it")
        try:
            session.commit(step=step, gradients_pending=False)
        except UnsupportedStateError:
            if not self._states.leave_out():
                raise
            self._look_again()
            self._captured["states"] = self._states.capture()
            session.commit(step=step, gradients_pending=False)
        finally:
            self._captured = None
        self._committed_step = step
        self._epoch_ended = batches is None
        self._commits += 1

    def _look_again(self) -> None:
        """Log state that is left out; some of it shows only while training runs."""
        _, loader = self._active()
        if (reason := dataloader.unreplayable(loader.inside)) is not None:
            self._inexact(f"a data loader: {reason}")
        if (remark := dataloader.remark(loader.inside)) is not None:
            self._messages.warn(f"a data loader: {remark}")
        self._states.leave_out()
        for name, paths in self._states.left_out.items():
            self._inexact(f"not carried over a restart: the state of callback {name}: {paths}")
        for name in beside(self._trainer).keys() - self._beside.keys():
            self._inexact(f"the module {name} was made after train() began and is not carried; make it before")

    def log(self, logs: dict[str, Any]) -> None:
        """Note what the Trainer logs."""
        if self._session is not None:
            self._session.log(logs)

    def metrics(self) -> dict[str, float]:
        """The session's metrics for loggers; empty before it begins."""
        return self._session.logger_metrics() if self._session is not None else {}

    # --- the end --------------------------------------------------------------------------------------------

    def _close(self, *, finished: bool) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close(finished=finished, keep_held=self._pending is not None)  # it was never used

    def _release(self) -> None:
        loader, self._loader = self._loader, None
        if loader is not None:
            loader.release()


class Unprotected(Protection):
    """One training with MEMCKPT_DISABLE=1: steps are counted for observers, and nothing is refused or replaced."""

    def train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's own loop."""
        try:
            result = original(*args, **kwargs)
            self.begin_step()
            return result
        finally:
            self._close(finished=True)

    def attach_and_prepare(self) -> None:
        """Attach a session that does nothing."""
        self._session = self._connect("auto")
        self._committed_step = self._trainer.state.global_step

    def begin_step(self) -> None:
        """Count the steps before this one."""
        step = self._trainer.state.global_step
        if self._session is not None and step != self._committed_step:
            self._session.commit(step=step, gradients_pending=False)
            self._committed_step = step


@contextmanager
def _replaced(instance: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Call `function(original, ...)` in place of a method of one instance; the class stays as it is."""
    own = vars(instance)
    kept = {name: own[name]} if name in own else {}
    own[name] = partial(function, getattr(instance, name))
    try:
        yield
    finally:
        del own[name]
        own.update(kept)
