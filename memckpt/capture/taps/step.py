"""The step tap: gradients are taken at the optimizer's step. Correct for any training."""

from __future__ import annotations

import torch

from memckpt.capture.taps.tap import ParameterHooks


class StepTap(ParameterHooks):
    """Stages nothing during backward; notes that it has run: a batch inside an accumulation is no restore point."""

    name = "step"

    def _fired(self, param: torch.Tensor, gradient: torch.Tensor) -> None:
        self._recorder.gradient_seen(param)
