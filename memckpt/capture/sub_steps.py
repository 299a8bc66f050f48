"""Sub-steps as the recorder notes them; encoded once what lies on a device has arrived."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from memckpt.capture.copier import Copier
from memckpt.state import codec
from memckpt.state.records import GradientOp, SparseGradient, SubStep
from memckpt.state.tensors import local


@dataclass
class NotedOp:
    """An in-place change of gradients: as GradientOp, with an operand that may still be on its way to the host."""

    kind: str
    operand: Any
    params: tuple[int, ...]


@dataclass
class NotedSubStep:
    """A step that an optimizer is about to take."""

    optimizer: int
    index: int
    groups: codec.Packed
    ambient: bytes = b""
    absent: list[int] = field(default_factory=list)
    #: Flag in host memory, once its copy has arrived: a fused step under a gradient scaler had no effect.
    found_inf: torch.Tensor | None = None
    sparse: list[SparseGradient] = field(default_factory=list)
    ops: list[NotedOp] = field(default_factory=list)

    @property
    def had_effect(self) -> bool:
        """Whether the step had an effect; waits for no copy."""
        return self.found_inf is None or not self.found_inf.any()

    def encode(self) -> SubStep:
        """The sub-step for the record; call once the copies have arrived."""
        return SubStep(
            optimizer=self.optimizer,
            index=self.index,
            groups=self.groups.encode(),
            absent=tuple(self.absent),
            sparse=tuple(self.sparse),
            ops=tuple(GradientOp(op.kind, codec.encode(op.operand), op.params) for op in self.ops),
            ambient=self.ambient,
        )


def on_the_host(tensor: torch.Tensor, copier: Copier) -> torch.Tensor:
    """A small tensor's value at this point, in host memory; a copy from a device may still be in flight."""
    tensor = local(tensor)
    return tensor.clone() if codec.on_host(tensor) else copier.fetch(tensor)


def is_skipped(optimizer: Optimizer, wait: bool = False) -> bool:
    """Whether a gradient scaler makes this step void: fused optimizers run it nevertheless.

    If only the device knows, `wait` waits for it; else the step is noted, and dropped when it is encoded.
    """
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and (wait or codec.on_host(found)) and bool(found.item())
