"""The losses of a step, seen where backward begins."""

from __future__ import annotations

from typing import Any

import torch


class LossTap:
    """Notes the scalars that backward begins with. Replaces ``torch.autograd.backward`` until it is closed."""

    def __init__(self) -> None:
        self._noted: list[torch.Tensor] = []
        self._original = torch.autograd.backward
        torch.autograd.backward = self._backward

    def _backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            if isinstance(tensor, torch.Tensor) and tensor.numel() == 1:
                self._noted.append(tensor.detach().clone())
        self._original(tensors, *args, **kwargs)

    def take_losses(self) -> tuple[str, ...]:
        """The scalars since the last call, in order and exact."""
        noted, self._noted = self._noted, []
        return tuple(float(each).hex() for each in noted)

    def close(self) -> None:
        torch.autograd.backward = self._original
