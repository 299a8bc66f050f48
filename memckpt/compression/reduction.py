"""Averages of gradients over all ranks in compressed form: what compressors have in common.

A compressor averages a bucket of DDP's and leaves it as DDP expects, with the values that compression leaves. The same
compressed average, alike on all ranks, is what a record holds: it is compressed once, for the network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from memckpt.config import CompressionConfig, LossyConfig
from memckpt.state.spec import GradientEncoding

#: Parts of the encoding of each gradient in a bucket; None: the gradient is recorded as it is.
Encoded = list[list[torch.Tensor] | None]


class Averaged(NamedTuple):
    """The value of a bucket's future. Torch has streams wait for the tensors in it, and for no others."""

    encoded: Encoded
    buffer: torch.Tensor


class Bucket(NamedTuple):
    """Parameters whose gradients, views of one buffer in the order of memory, are averaged together."""

    params: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    buffer: torch.Tensor

    @property
    def starts(self) -> list[int]:
        """The element of the buffer at which each gradient begins."""
        return [int(one.storage_offset() - self.buffer.storage_offset()) for one in self.gradients]


class Reducer(ABC):
    """Averages buckets in compressed form; one for each model and process. As :func:`memckpt.compression.state`."""

    def __init__(
        self, config: CompressionConfig, params: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None
    ) -> None:
        self._config = config
        lossy = config if isinstance(config, LossyConfig) else None
        #: Whether what is left out of a gradient is added to the next one.
        self.error_feedback = lossy is not None and lossy.error_feedback
        self._min_elements = lossy.min_elements if lossy is not None else 1
        self._positions = {id(param): position for position, param in enumerate(params)}
        self._group = group
        self._world_size = dist.get_world_size(group)
        #: By parameter's id, what was left out of its last gradient (float32, one-dimensional), with error feedback.
        self.residuals: dict[int, torch.Tensor] = {}
        #: Whether all that is left out is in the tensors of :meth:`carried`: not that of parameters trained since.
        self.carries_all = True
        self._carried = False

    def knows(self, param: torch.Tensor) -> bool:
        """Whether it is one of the parameters that this was made for."""
        return id(param) in self._positions

    def carried(self, params: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Make the tensors that are carried from one backward to the next, by a name for each."""
        self._carried = True
        compressed = [one for one in params if self.compresses(one)] if self.error_feedback else []
        for param in compressed:
            self.residuals[id(param)] = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
        return {str(self._positions[id(one)]): self.residuals[id(one)] for one in compressed}

    def compresses(self, param: torch.Tensor) -> bool:
        """Whether gradients of a parameter are averaged in compressed form: not if it is small, or not contiguous."""
        return param.numel() >= self._min_elements and param.is_floating_point() and param.is_contiguous()

    @abstractmethod
    def encoding(self, param: torch.Tensor) -> GradientEncoding | None:
        """Encoding of a parameter's gradients in records; None: they are recorded uncompressed."""

    def restart(self) -> None:
        """Begin anew: nothing was left out, and nothing is carried."""
        for residual in self.residuals.values():
            residual.zero_()

    @abstractmethod
    def average(self, bucket: Bucket, last: bool) -> torch.futures.Future[Averaged]:
        """Average a bucket, if `last` the last one of its backward, in place and without blocking.

        The future has the parts of each gradient's encoding, or None; it is done when the buffer has the average.
        """

    def state_dict(self) -> dict[str, int]:
        """State beside the residuals, alike on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:  # noqa: B027  most have none
        """Take over what :meth:`state_dict` returned."""

    # For subclasses

    def _total(self, param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient and what was left out before it, in float32; with error feedback it is the residual itself."""
        if not self.error_feedback:
            return gradient.to(torch.float32)
        residual = self.residuals.get(id(param))
        if residual is None:
            self.carries_all = self.carries_all and not self._carried
            residual = self.residuals[id(param)] = torch.zeros_like(gradient, dtype=torch.float32)
        return residual.add_(gradient)

    def _gather(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.futures.Future[Any]]:
        """All ranks' messages (bytes), a row each; valid once the future is done."""
        gathered = message.new_empty(self._world_size * message.numel())
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = gather(gathered, message, group=self._group, async_op=True)
        return gathered.view(self._world_size, -1), work.get_future()

    def _sum(self, values: torch.Tensor) -> torch.futures.Future[Any]:
        """Add up over all ranks, in place."""
        work = dist.all_reduce(values, group=self._group, async_op=True)
        assert work is not None
        future: torch.futures.Future[Any] = work.get_future()
        return future


def behind(
    futures: Sequence[torch.futures.Future[Any]], buffer: torch.Tensor, action: Callable[[], Encoded]
) -> torch.futures.Future[Averaged]:
    """Fill a bucket's buffer once all collectives, at least one, are done; what one has raised is the result's.

    If their tensors are on an accelerator, the action runs on another stream, which waits for them. A future of
    torch's that collects others knows no device, and would have the caller's stream wait.
    """
    first, *others = futures
    if others and buffer.device.type == "cpu":  # a callback that waited would keep a thread that the others need

        def collected(done: torch.futures.Future[list[torch.futures.Future[Any]]]) -> Averaged:
            for one in done.value():
                one.value()
            return Averaged(action(), buffer)

        return torch.futures.collect_all(list(futures)).then(collected)

    def finished(done: torch.futures.Future[Any]) -> Averaged:
        done.value()
        for one in others:
            one.wait()
        return Averaged(action(), buffer)

    return first.then(finished)


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Contiguous tensors as bytes, each at a multiple of 8."""
    found = []
    for tensor in tensors:
        raw = tensor.contiguous().view(torch.uint8).view(-1)
        found.append(torch.nn.functional.pad(raw, (0, -raw.numel() % 8)))
    return torch.cat(found)


def unpack(row: torch.Tensor, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    """The tensors of :func:`pack`, from their lengths and dtypes; views."""
    found, offset = [], 0
    for length, dtype in sizes:
        nbytes = length * dtype.itemsize
        found.append(row[offset : offset + nbytes].view(dtype))
        offset += -(-nbytes // 8) * 8
    return found


def drop_unless_finite(total: torch.Tensor, sent: torch.Tensor) -> None:
    """Set a residual to zero where an overflow was sent: a scaler skips that step, and nothing is to come of it."""
    if total.device.type == "cpu":
        if not bool(sent.isfinite().all()):
            total.zero_()
    else:  # without the host waiting
        finite = sent.isfinite().all()
        total.nan_to_num_(0.0, 0.0, 0.0).mul_(finite)


def spread(flat: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Copy consecutive parts of a tensor to the targets, in their order."""
    for target, source in zip(targets, flat.split([one.numel() for one in targets]), strict=True):
        target.copy_(source)
