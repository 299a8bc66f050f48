"""Streaming on one process: each gradient is staged as backward produces it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from memckpt.capture.copier import Copier
from memckpt.capture.recorder import Recorder
from memckpt.capture.taps.tap import OncePerBackward, ParameterHooks, survives


class StreamingTap(ParameterHooks):
    """Stages the accumulated gradient that a parameter's hook sees.

    With accumulation it fires for every micro-batch and the last firing counts.
    """

    name = "streaming"

    def __init__(self, params: Sequence[nn.Parameter], recorder: Recorder, copier: Copier) -> None:
        super().__init__(params, recorder)
        self._copier = copier
        self._at_end = OncePerBackward(self._backward_ended)

    def _fired(self, param: torch.Tensor, gradient: torch.Tensor) -> None:
        self._recorder.stage(param, gradient)
        if self._copier.asynchronous:
            # Gradients may be changed in place as soon as backward has ended.
            self._at_end.ask()

    @survives("ending a backward")
    def _backward_ended(self) -> None:
        with self._recorder.clock.in_hook():
            self._copier.wait_before_changes()
