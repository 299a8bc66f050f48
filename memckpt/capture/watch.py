"""Notices when parameters, frozen ones too, are changed by anything but their optimizer.

Such a change is in no gradient, so redo would not make it. Torch counts in-place changes of every tensor; what was
written through ``.data`` escapes that count and is looked for in a sample of the values.
"""

from __future__ import annotations

import torch

from memckpt.capture.slot_writer import SlotWriter
from memckpt.state.tensors import local, version

#: A window of so many elements out of every so many. Neighbours share a cache line: a strided sample of as many
#: elements takes several times as long.
WINDOW = 64
SPACING = 1 << 16
#: So many checks look at every element.
FULL_CHECKS = 2
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class ParameterWatch:
    """Remembers the stepped parameters as their optimizers left them.

    Samples are taken of host tensors only: reading them on an accelerator would make the trainer wait for it.
    """

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = writer
        self._versions = [version(param) for param in writer.params]
        self._sampled = [
            i for i, param in enumerate(writer.params) if param.device.type == "cpu" and local(param).numel()
        ]
        self._pointers: list[int] = []
        #: By dtype and width, the parameters' indices and views of their windows: rows of that width.
        self._windows: dict[tuple[torch.dtype, int], list[tuple[int, torch.Tensor]]] = {}
        self._full_checks_left = FULL_CHECKS
        self._sample = self._take()

    def _window(self, param: torch.Tensor) -> torch.Tensor:
        """The part of a tensor that is looked at, as a view of equally wide rows."""
        flat = _flat(param)
        if self._full_checks_left:
            return flat.view(-1, 1)
        if flat.numel() < SPACING:
            return flat[:WINDOW].view(1, -1)
        rows = flat.numel() // SPACING
        return flat[: rows * SPACING].view(rows, SPACING)[:, :WINDOW]

    def _take(self) -> dict[tuple[torch.dtype, int], torch.Tensor]:
        """The sampled values, as copies. The views on them are kept as long as the parameters keep their memory."""
        params = {index: local(self._writer.params[index]) for index in self._sampled}
        pointers = [param.data_ptr() for param in params.values()]
        if pointers != self._pointers:
            self._pointers, self._windows = pointers, {}
            for index in self._sampled:
                window = self._window(params[index])
                self._windows.setdefault((window.dtype, window.shape[1]), []).append((index, window))
        return {key: torch.cat([window for _, window in windows]) for key, windows in self._windows.items()}

    def note(self, optimizer: int) -> None:
        """An optimizer has just changed its parameters, as it should."""
        params = self._writer.params
        for index in self._writer.layout.optimizer_params(optimizer):
            self._versions[index] = version(params[index])
        self._sample = self._take()

    def _end_full_check(self) -> None:
        if self._full_checks_left:
            self._full_checks_left -= 1
            if not self._full_checks_left:
                self._pointers = []  # the windows are others now
                self._sample = self._take()

    def counted_change(self) -> str | None:
        """The name of a parameter whose count of changes is not as its optimizer left it; None if all are."""
        for index, (param, noted) in enumerate(zip(self._writer.params, self._versions, strict=True)):
            if version(param) != noted:
                return self._writer.spec.params[index].tensor.name
        return None

    def changed(self) -> str | None:
        """Like :meth:`counted_change`, and where that finds nothing, by the sample of the values."""
        counted = self.counted_change()
        if counted is not None:
            return counted
        for key, now in self._take().items():
            bits = _BITS[now.element_size()]
            if not torch.equal(now.view(bits), self._sample[key].view(bits)):
                return self._name_sampled(key, now)
        self._end_full_check()
        return None

    def _name_sampled(self, key: tuple[torch.dtype, int], now: torch.Tensor) -> str:
        bits = _BITS[now.element_size()]
        row = int((now.view(bits) != self._sample[key].view(bits)).nonzero()[0, 0])
        for index, window in self._windows[key]:
            row -= window.shape[0]
            if row < 0:
                return self._writer.spec.params[index].tensor.name
        return "a parameter"


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in the order of memory: a view, whatever the strides of a dense tensor."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    dense = last == tensor.numel() - 1  # channels_last and other permutations
    return tensor.as_strided((tensor.numel(),), (1,)) if dense else tensor.flatten()


class StaticWatch:
    """Watches tensors that are staged once a generation: a changed count is settled by comparing with the copy."""

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = writer
        self._seen = [self._look(position) for position in range(len(writer.spec.static))]

    def _look(self, position: int) -> tuple[torch.Tensor | None, int]:
        tensor = self._writer.static_tensor(position)
        return tensor, -1 if tensor is None else version(tensor)

    def changed(self) -> str | None:
        """The name of a static tensor whose values are no longer the staged ones; None if all are."""
        for position, (seen, noted) in enumerate(self._seen):
            tensor, now = self._look(position)
            if tensor is seen and now == noted:
                continue
            staged = self._writer.static_copy(position)
            # Equal floats of different bits (-0.0, NaN) are taken as changed, which only costs a copy.
            if tensor is None or not torch.equal(local(tensor).to(staged.device), staged):
                return self._writer.spec.static[position].name
            self._seen[position] = (tensor, now)
        return None
