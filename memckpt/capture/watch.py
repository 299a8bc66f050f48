"""Notices when parameters, frozen ones too, are changed by anything but their optimizer.

Such a change is in no gradient, so redo would not make it. Torch counts in-place changes of every tensor; what was
written through ``.data`` escapes that count and is looked for in a strided sample of the values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memckpt.capture.slot_writer import SlotWriter

STRIDE = 4099
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class ParameterWatch:
    """Remembers the stepped parameters as their optimizers left them.

    Samples are taken of host tensors only: reading them on an accelerator would make the trainer wait for it.
    """

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = writer
        self._versions = [param._version for param in writer.params]
        self._sampled = [i for i, param in enumerate(writer.params) if param.device.type == "cpu" and param.numel()]
        self._sample = self._take(self._sampled)

    def _take(self, indices: Sequence[int]) -> dict[torch.dtype, torch.Tensor]:
        slices: dict[torch.dtype, list[torch.Tensor]] = {}
        for index in indices:
            param = self._writer.params[index].detach()
            slices.setdefault(param.dtype, []).append(param.reshape(-1)[::STRIDE])
        return {dtype: torch.cat(parts) for dtype, parts in slices.items()}

    def note(self, optimizer: int) -> None:
        """An optimizer has just changed its parameters, as it should."""
        params = self._writer.params
        for index in self._writer.layout.optimizer_params(optimizer):
            self._versions[index] = params[index]._version
        self._sample = self._take(self._sampled)

    def changed(self) -> str | None:
        """The name of a parameter that is not as its optimizer left it; None if all are."""
        params = self._writer.params
        names = [param.tensor.name for param in self._writer.spec.params]
        for index, version in enumerate(self._versions):
            if params[index]._version != version:
                return names[index]
        for dtype, now in self._take(self._sampled).items():
            bits = _BITS[now.element_size()]
            if not torch.equal(now.view(bits), self._sample[dtype].view(bits)):
                return self._name_sampled(dtype, now)
        return None

    def _name_sampled(self, dtype: torch.dtype, now: torch.Tensor) -> str:
        bits = _BITS[now.element_size()]
        position = int((now.view(bits) != self._sample[dtype].view(bits)).nonzero()[0])
        for index in self._sampled:
            param = self._writer.params[index]
            if param.dtype == dtype:
                position -= len(range(0, param.numel(), STRIDE))
                if position < 0:
                    return self._writer.spec.params[index].tensor.name
        return "a parameter"


class StaticWatch:
    """Watches tensors that are staged once a generation: a changed count is settled by comparing with the copy."""

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = writer
        self._seen = [self._look(position) for position in range(len(writer.spec.static))]

    def _look(self, position: int) -> tuple[torch.Tensor | None, int]:
        tensor = self._writer.static_tensor(position)
        return tensor, -1 if tensor is None else tensor._version

    def changed(self) -> str | None:
        """The name of a static tensor whose values are no longer the staged ones; None if all are."""
        for position, (seen, version) in enumerate(self._seen):
            tensor, now = self._look(position)
            if tensor is seen and now == version:
                continue
            staged = self._writer.static_copy(position)
            # Equal floats of different bits (-0.0, NaN) are taken as changed, which only costs a copy.
            if tensor is None or not torch.equal(tensor.detach().to(staged.device), staged):
                return self._writer.spec.static[position].name
            self._seen[position] = (tensor, now)
        return None
