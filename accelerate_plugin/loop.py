"""Detection of user loops that would be unprotected, with messages that name the call to add."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from memckpt.capture.data.places import Place, PlaceWatch
from memckpt.errors import UsageError

_log = logging.getLogger("accelerate_plugin")
#: Steps without a commit, or commits without a step, from which on it is no accumulation.
_LONG = 1000

_NEVER_COMMITTED = (
    "the optimizer has stepped and no step was committed: call ckpt.commit() as the last statement of the loop over "
    "batches"
)
_NOT_COMMITTED = (
    "no step of this epoch could be committed, and a restart would begin before it: gradients that no optimizer used "
    "waited at each call of ckpt.commit(); let all optimizers step, or zero what they leave, in the batch in which "
    "gradients are synchronized"
)
_NEVER_STEPPED = (
    "ckpt.commit() was called and no optimizer has stepped: call step() of the optimizer that ckpt.prepare() returned, "
    "inside accelerator.accumulate(model) where gradients are accumulated"
)


class LoopWatch:
    """Counts steps, batches and commits of the user's loop."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._steps = 0
        self._empty_commits = 0
        self._commits_in_epoch = 0
        self._steps_in_epoch = 0
        self._empty_in_epoch = 0
        self._commits = 0
        self._last_place: Any = None
        self._warned = False
        self._places = PlaceWatch()
        #: Whether the loop has asked where it resumes.
        self.place_is_known = False

    def install(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_post_hook(self._stepped))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def stepped(self) -> bool:
        """Whether an optimizer has stepped since the last commit."""
        return self._steps > 0

    def _stepped(self, *_: Any) -> None:
        self._steps += 1
        self._steps_in_epoch += 1
        if self._steps == _LONG:
            self._warn(_NEVER_COMMITTED)

    def check_commit(self, place: Any, has_loaders: bool) -> None:
        """Check a commit at `place` in the loaders (None: outside the loops over them). Raises UsageError."""
        if not self.place_is_known:
            raise UsageError(
                "commit(): expected a loop that knows where it resumes, found neither `for epoch in ckpt.epochs(n)` "
                "nor a use of ckpt.step; begin the loop with one of them"
            )
        if has_loaders and place is None:
            raise UsageError(
                "commit(): expected it inside the loop over a prepared loader, found it outside; call it as the last "
                "statement of that loop. What accelerator.skip_first_batches() returns is another loader; iterate the "
                "prepared one, which skips by itself behind a resume"
            )
        if place is not None and place == self._last_place and not self.stepped:
            raise UsageError(
                "commit() was called twice for one batch; call it once, as the last statement of the loop over batches"
            )
        self._last_place = place

    def nothing_to_commit(self) -> None:
        self._empty_commits += 1
        self._empty_in_epoch += 1
        if self._empty_commits == _LONG and not self.stepped:
            self._warn(_NEVER_STEPPED)

    def committed(self, places: list[Place], in_epochs: bool) -> str | None:
        """One line on why a restart would not be exact, judged by the `places` in the prepared loaders."""
        self._steps = self._empty_commits = 0
        self._commits += 1
        self._commits_in_epoch += 1
        return self._places.committed(places, in_epochs)

    def left(self, places: list[Place]) -> str | None:
        """As :meth:`committed`, after the loop over batches."""
        return self._places.left(places)

    def check_epoch(self, has_stepped: bool) -> None:
        """Check the epoch that has ended. Raises UsageError if it protected nothing of what there was to protect.

        `has_stepped`: whether the training has taken a step, in any attempt.
        """
        commits, steps, empty = self._commits_in_epoch, self._steps_in_epoch, self._empty_in_epoch
        self._commits_in_epoch = self._steps_in_epoch = self._empty_in_epoch = 0
        if steps and not commits:
            if not empty:
                raise UsageError(_NEVER_COMMITTED)
            self._warn(_NOT_COMMITTED)
        if empty and not steps and not commits and not has_stepped:
            raise UsageError(_NEVER_STEPPED)

    def check_end(self) -> None:
        """Check the training that has ended. Raises UsageError if it stepped without a commit."""
        if self._steps and not self._commits and not self._empty_commits:
            raise UsageError(_NEVER_COMMITTED)

    def _warn(self, line: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("memckpt: %s", line)


class Unwatched(LoopWatch):
    """Stand-in under MEMCKPT_DISABLE=1: nothing is refused, and nothing said."""

    def check_commit(self, place: Any, has_loaders: bool) -> None: ...
    def check_epoch(self, has_stepped: bool) -> None: ...
    def check_end(self) -> None: ...
    def _warn(self, line: str) -> None: ...
