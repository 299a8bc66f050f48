"""The tap in use: how gradients get into slots, and the change to a later one."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch.nn.parallel import DistributedDataParallel

from memckpt.capture.taps import CommHookTap, ParameterTap, PendingTap, Tap
from memckpt.session.local_training import LocalTraining
from memckpt.session.policy import choose_tap

_log = logging.getLogger("memckpt")


class GradientTap:
    """Chooses a tap, and replaces it where it turns out not to fit.

    Args:
        training: whose gradients are taken.
        data_parallel: the DDP wrapper; None without one.
        before_reduction: called before a reduction of all ranks begins.

    Attributes:
        reason: why this tap, in words.
    """

    def __init__(
        self,
        training: LocalTraining,
        data_parallel: DistributedDataParallel | None,
        before_reduction: Callable[[], None],
    ) -> None:
        self._live = training.live
        self._recorder = training.recorder
        self._tap, self.reason, caveats = choose_tap(
            training.config, training.live, training.recorder, training.copier, data_parallel, before_reduction
        )
        training.caveats.extend(caveats)
        self._recorder.tap = self._tap.name

    @property
    def current(self) -> Tap:
        """The tap that takes gradients now."""
        return self._tap

    @property
    def name(self) -> str:
        return self._tap.name

    @property
    def reductions(self) -> int:
        """Number of reductions over all ranks that have been seen."""
        return self._tap.reductions

    @property
    def layout(self) -> list[list[int]] | None:
        """Bucket layout in which DDP reduces gradients; None without one."""
        return self._tap.layout if isinstance(self._tap, CommHookTap) else None

    @property
    def holds_reductions_back(self) -> bool:
        """Whether it stands where a reduction can be held back until the last commit has been sent."""
        return not isinstance(self._tap, PendingTap)

    def install(self) -> None:
        self._tap.install()

    def remove(self) -> None:
        self._tap.remove()

    def reinstall(self) -> None:
        """Move hooks to the parameters that are trained now."""
        if isinstance(self._tap, (ParameterTap, PendingTap)):
            self._tap.remove()
            self._tap.install()

    def take_later(self, reason: str) -> None:
        """Take gradients behind the optimizer's step from now on."""
        self._recorder.tap_mismatch = None
        self._recorder.streams = False
        self._recorder.tap = PendingTap.name
        self.reason = reason
        _log.warning("memckpt: gradients are now taken after the optimizer's step: %s", reason)
        if isinstance(self._tap, ParameterTap):
            self._tap.remove()
            params = [p for o in self._live.optimizers for g in o.param_groups for p in g["params"]]
            reductions, self._tap = self._tap.reductions, PendingTap(params, self._recorder)
            self._tap.reductions = reductions  # it goes on counting: what was seen at the last commit is remembered
            self._tap.install()
