"""The state of one fit beside tensors: committed with each step, restored on a resume.

What the engine cannot store is left out and logged, and training goes on: a scheduler with a lambda must not cost the
user the protection of everything else.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning
import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, Timer

import memckpt
from lightning_memckpt import trainer_state
from lightning_memckpt.files import Tables
from lightning_memckpt.internals import TrainerInternals
from lightning_memckpt.loaders import Loaders
from lightning_memckpt.notes import list_callbacks, places_of_loggers
from lightning_memckpt.reentry import behind_batch, edited_part
from lightning_memckpt.trainer_state import LoggingState
from lightning_memckpt.user_state import UserState, attribute_roots, callbacks_by_key, modules_beside
from memckpt import ComparedKind
from memckpt.capture.beside.attributes import Attributes, FoundObjects, tensors_in
from memckpt.capture.data import graft as dataloader
from memckpt.errors import UnsupportedStateError
from memckpt.user_messages import Messages

# Duration of a user's hook at every step, in seconds, from which on a warning is logged.
_SLOW_HOOK_SECONDS = 0.005
# Commits between two checks of costs and of left-out state: figures have to settle first.
_LOOK_EVERY_COMMITS = 64
#: Commits of an attempt with such a check each: loaders show what they do with their first batches.
_FIRST_LOOKS = 4


Parts = dict[tuple[ComparedKind, str], Any]


class FitState:
    """State of Lightning's own objects, of logging, of user hooks and attributes, and the data positions.

    Args:
        callback: our own, which has no state.
        inexact: declares, with the reason, that resumes are not exact.

    Attributes:
        tables: the rows of its CSVLoggers.
        loggers: where its loggers log to.
        beside: modules that training changes and the LightningModule does not contain, by name.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        internals: TrainerInternals,
        loaders: Loaders,
        callback: pl.Callback,
        attributes: Sequence[str],
        messages: Messages,
        inexact: Callable[[str], None],
    ) -> None:
        self._trainer: Any = trainer
        self._pl_module = pl_module
        self._internals = internals
        self._loaders = loaders
        self._messages = messages
        self.inexact = inexact
        self.beside = modules_beside(trainer, pl_module)
        #: The arguments of the Trainer as the attempt began.
        self._settings = trainer_state.settings(trainer)
        self._user = UserState(trainer, pl_module, self.beside, skip=callback)
        self._attributes = Attributes(attributes, lambda: attribute_roots(trainer, pl_module))
        modules = (pl_module, *self.beside.values())
        self._attributes.staged = {each for module in modules for each in module.modules()}
        #: What hangs on datamodule and callbacks; the engine looks at the module.
        self._objects = FoundObjects(
            lambda: {name: each for name, each in attribute_roots(trainer, pl_module).items() if each is not pl_module},
            self.carried,
            self.inexact,
            "name {!r} in `attributes`",
        )
        self.loggers = places_of_loggers(trainer)
        self.tables = Tables(trainer, internals, messages.warn)
        self._logging = LoggingState(trainer, pl_module, self.beside, internals)
        self._captured: dict[str, Any] | None = None
        #: States that the user's hooks have saved for those who read them, until the first capture.
        self._saved: Mapping[str, Any] = {}
        self._commits = 0
        self._file_entries: dict[str, Any] = {}
        self._dropped: set[str] = set()

    # Restore

    def restore_early(self, state: Mapping[str, Any]) -> None:
        """Restore what `on_fit_start` hooks, and workers of the loaders, are to find."""
        self._user.restore_early(state["user"])
        self._attributes.restore(state["attributes"])
        self._objects.load_state_dict(state["objects"])

    def readable(self) -> dict[str, Any]:
        """A copy of what user code may read when it builds loaders, as far as it can be stored."""
        internals = self._internals
        loops = internals.loop_state()
        self._saved = self._user.states(loops)
        return {
            "loops": loops,
            "metrics": copy.deepcopy(internals.callback_metrics()),
            "user": self._saved,
            "attributes": self._attributes.present(),
            "objects": copy.deepcopy(self._objects.state_dict()),
        }

    @contextmanager
    def reading(self, then: Mapping[str, Any]) -> Iterator[None]:
        """Run a block under a state that :meth:`readable` returned, and go back to the current one."""
        now = self.readable()
        self._set_readable(then)
        if any(name.startswith("checkpoint/") for name in then["user"]):
            self._user.load_extras(then["user"], then["loops"])  # the held ones follow in restore_late()
        try:
            yield
        finally:
            self._set_readable(now)

    def _set_readable(self, state: Mapping[str, Any]) -> None:
        self._internals.fit_loop.load_state_dict(state["loops"])
        self._internals.set_callback_metrics(copy.deepcopy(state["metrics"]))
        self._user.set_states(state["user"])
        self._attributes.restore(state["attributes"])
        self._objects.load_state_dict(state["objects"])

    def carried(self) -> list[object]:
        """Objects whose state is carried here, and tensors that the user's hooks save."""
        schedulers = [config.scheduler for config in self._trainer.lr_scheduler_configs]
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        modules = (self._pl_module, *self.beside.values())
        saved = tensors_in(self._saved if self._captured is None else self._captured["user"])
        return [*list_callbacks(self._trainer), *schedulers, scaler, *modules, *self._attributes.objects(), *saved]

    def look_again(self) -> None:
        """Log, as training starts, what was made too late, and loaders that cannot be continued exactly."""
        for name in modules_beside(self._trainer, self._pl_module).keys() - self.beside.keys():
            self.inexact(f"{name} was made after setup() and is not carried over a restart; make it in setup()")
        for line in self._loaders.look_again():
            self._messages.warn(line)

    def check(self) -> None:
        """Check, as training starts, that every attribute can be carried. Raises as :meth:`Attributes.check`."""
        self._attributes.check()

    def restore_late(self, state: Mapping[str, Any]) -> None:
        """Restore everything but the data positions; tensors and optimizers are restored already."""
        self._user.restore_late(state["user"], state["loops"])
        if reason := self._user.check_datamodule(state["user"]):
            self.inexact(reason)
        self.put_back(state)

    def put_back(self, state: Mapping[str, Any]) -> None:
        """Restore the state after a repeated step that differed from the held one.

        The data position stays where the repeated step has left it.
        """
        self._attributes.restore(state["attributes"])
        self._objects.load_state_dict(state["objects"])
        trainer_state.restore(self._trainer, self._internals, state["trainer"])
        trainer_state.put_settings_back(self._trainer, state["settings"], state["changed_settings"])
        self._logging.restore(state["logging"])

    # Commit

    @property
    def captured(self) -> dict[str, Any] | None:
        """The state that is being committed; None at any other time."""
        return self._captured

    def commit(self, session: memckpt.Session) -> None:
        """Capture the state at the end of a training batch, and commit it with the session's own."""
        # The engine has seen every backward and every step, also those of hooks that step at times of their own.
        try:
            self._captured = self._capture()
            session.commit(step=self._trainer.global_step, gradients_pending=None)
        except UnsupportedStateError:
            if self._captured is None or not self._leave_out(self._captured):
                raise
            session.commit(step=self._trainer.global_step, gradients_pending=None)
        finally:
            self._captured = None
        self._commits += 1

    def _capture(self) -> dict[str, Any]:
        internals = self._internals
        validation_owed = internals.validation_follows()
        epoch_over = internals.epoch_is_over()
        unedited = internals.loop_state()
        loops = behind_batch(unedited, validation_follows=validation_owed)
        state = {
            "lightning": lightning.__version__,
            "captured_at": time.time(),
            "validation_owed": validation_owed,
            "epoch_over": epoch_over,
            "loops": loops,
            "unedited_loops": edited_part(unedited),  # for an export
            "settings": self._settings,
            "changed_settings": trainer_state.settings_changed_by_training(self._trainer, self._settings),
            "replicas": trainer_state.data_replicas(self._trainer),
            "trainer": trainer_state.capture(self._trainer, internals),
            "logging": self._logging.capture(),
            "user": self._user.capture(loops),
            "attributes": self._attributes.capture(),
            "loaders": self._loaders.capture(epoch_over=epoch_over),
            "built_under": self._loaders.built_under,
            "tables": self.tables.capture(),
            "loggers": self.loggers,
            "file": self._file_entries,
        }
        self._captured = state
        state["objects"] = self._objects.state_dict()
        if self._commits == 0:
            state["file"] = self._file_entries = trainer_state.file_entries(self._trainer, self._pl_module)
            self._find_unstorable(state)
        self._drop_unstorable(state)
        if self._commits < _FIRST_LOOKS or self._commits % _LOOK_EVERY_COMMITS == 0 or self._attributes.left_out:
            self._announce(state)
        return state

    # State that the engine cannot store

    @staticmethod
    def _foreign(state: Mapping[str, Any]) -> Iterator[tuple[str, list[Any], int]]:
        """States of schedulers and loaders, which users may have written: (name, list, index in it)."""
        for kind, states in (
            ("LR scheduler", state["trainer"]["schedulers"]),
            ("train loader", state["loaders"]["train"]),
        ):
            for index in range(len(states)):
                yield f"{kind} {index}", states, index

    def _find_unstorable(self, state: Mapping[str, Any]) -> bool:
        """Note those that the engine cannot store, and log them; True if there is a new one."""
        found = False
        for name, states, index in self._foreign(state):
            if name not in self._dropped and (paths := memckpt.unencodable_paths(states[index])):
                self._dropped.add(name)
                self.inexact(f"not carried over a restart: {name}: {', '.join(paths[:3])}")
                found = True
        return found

    def _drop_unstorable(self, state: Mapping[str, Any]) -> None:
        for name, states, index in self._foreign(state):
            if name in self._dropped:
                states[index] = None

    def _leave_out(self, captured: dict[str, Any]) -> bool:
        """Leave out the owner of a value that the engine has refused, and log it; True if there is a new one."""
        found = self._find_unstorable(captured)
        if not self._user.leave_out_unencodable(captured["user"]) and not found:
            return False
        captured["user"] = self._user.without_left_out(captured["user"])
        self._drop_unstorable(captured)
        self._announce(captured)
        return True

    def _announce(self, state: Mapping[str, Any]) -> None:
        """Log state that is left out, and costs that are too high; each once."""
        for line in (*self._user.left_out, *self._attributes.left_out, *sorted(self._logging.left_out)):
            self.inexact(f"not carried over a restart: {line}")
        for line in self._loaders.look_again():
            self._messages.warn(line)
        if self._commits and self._user.hook_seconds > _SLOW_HOOK_SECONDS:
            self._messages.warn(
                "state_dict() and on_save_checkpoint() hooks of callbacks and module are called at every step; "
                f"here they take more than {_SLOW_HOOK_SECONDS * 1000:.0f} ms each time"
            )

    # Comparison of a repeated step

    def check_parts(self, state: Mapping[str, Any]) -> Parts:
        """The parts of one captured state, as the user knows them.

        Excluded are the time of the capture, the measurements of `Timer`, and the directory of `ModelCheckpoint`, which
        each start may create anew.
        """
        trainer, logging = state["trainer"], state["logging"]
        parts: Parts = {}
        parts["data position", "combination of loaders"] = state["loaders"]["fetcher"]
        for role in ("train", "validation"):
            for index, position in enumerate(state["loaders"][role]):
                known = isinstance(position, dict) and "pass" in position  # else it is the loader's own state
                parts["data position", f"{role} loader {index}"] = (
                    dataloader.comparable(position, between_passes=role == "validation") if known else position
                )
        parts["data position", "loops"] = {
            **state["loops"],
            "validation owed": state["validation_owed"],
            "epoch over": state["epoch_over"],
            **trainer["loop_extras"],
        }
        for index, scheduler in enumerate(trainer["schedulers"]):
            parts["hyperparameters", f"LR scheduler {index}"] = scheduler
        parts["hyperparameters", "precision"] = trainer["precision"]
        parts["hyperparameters", "trainer"] = {
            **state["settings"],
            **state["changed_settings"],
            "should_stop": trainer["should_stop"],
        }
        for name, piece in self._without_clocks(state["user"]).items():
            parts["registered", name] = piece
        for name, value in {**state["attributes"], **state["objects"]}.items():
            parts["registered", f"attribute {name}"] = value
        parts["logged values", "self.log()"] = logging["results"]
        parts["logged values", "trainer"] = logging["logger"]
        return parts

    def _without_clocks(self, pieces: Mapping[str, Any]) -> dict[str, Any]:
        kept = dict(pieces)
        for key, callback in callbacks_by_key(self._trainer):
            name = f"callbacks/{key}"
            if isinstance(callback, Timer):
                kept.pop(name, None)
            elif isinstance(callback, ModelCheckpoint) and name in kept:
                kept[name] = {field: value for field, value in kept[name].items() if field != "dirpath"}
        return kept
