"""Averages in fewer bits for each element: signed bytes with scales, and 16 bits."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from memckpt.compression.reduction import (
    Bucket,
    Encoded,
    Reducer,
    behind,
    drop_unless_finite,
    pack,
    spread,
    unpack,
)
from memckpt.config.schema import HalfPrecision, Quantized8
from memckpt.state.encodings import decode, quantized_parts
from memckpt.state.spec import GradientEncoding

_HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class QuantizedReducer(Reducer):
    """Signed bytes, gathered from all ranks, averaged, and rounded to signed bytes once more.

    All ranks round the same average in the same way, so that the result is a byte for each element however many ranks
    there are. Both roundings go to the residual: each rank's own, and that of the average on all of them.
    """

    def __init__(
        self, config: Quantized8, params: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(config, params, group)
        self._block = config.block_elements

    def encoding(self, param: torch.Tensor) -> GradientEncoding | None:
        return GradientEncoding("quantized", self._block) if self.compresses(param) else None

    def _decode(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return decode(GradientEncoding("quantized", self._block), parts, parts[0].numel(), torch.float32)

    def average(self, bucket: Bucket, last: bool) -> torch.futures.Future[Encoded]:
        compressed = [self.compresses(param) for param in bucket.params]
        totals, steps, scales = [], [], []
        for at, (param, gradient) in enumerate(zip(bucket.params, bucket.gradients, strict=True)):
            if compressed[at]:
                total = self._total(param, gradient)
                parts = quantized_parts(total, self._block)
                if self.error_feedback:
                    total.sub_(self._decode(parts))
                totals.append(total)
                steps.append(parts[0])
                scales.append(parts[1])
        rest = [one for at, one in enumerate(bucket.gradients) if not compressed[at]]
        whole, futures = torch.cat(rest) if rest else None, []
        rows = None
        if totals:
            rows, future = self._gather(pack([torch.cat(steps), torch.cat(scales)]))
            futures.append(future)
        if whole is not None:
            futures.append(self._sum(whole))
        lengths, blocks = [one.numel() for one in steps], [one.numel() for one in scales]

        def averaged() -> Encoded:
            if whole is not None:
                spread(whole.mul_(1 / self._world_size), rest)
            sums = [torch.zeros_like(one) for one in totals]
            for row in rows if rows is not None else ():
                theirs = unpack(row, [(sum(lengths), torch.int8), (sum(blocks), torch.float32)])
                for total, part, scale in zip(sums, theirs[0].split(lengths), theirs[1].split(blocks), strict=True):
                    total.add_(self._decode([part, scale]))
            found, each = [], iter(zip(totals, sums, strict=True))
            for at, gradient in enumerate(bucket.gradients):
                found.append(self._round(gradient, *next(each)) if compressed[at] else None)
            return found

        return behind(futures, bucket.buffer.device, averaged)

    def _round(self, gradient: torch.Tensor, residual: torch.Tensor, total: torch.Tensor) -> list[torch.Tensor]:
        """Round a sum over all ranks to the average that is used."""
        average = total.mul_(1 / self._world_size)
        parts = quantized_parts(average, self._block)
        rounded = self._decode(parts)
        gradient.copy_(rounded)
        if self.error_feedback:
            drop_unless_finite(residual.add_(average).sub_(rounded), parts[1])
        return parts


class HalfReducer(Reducer):
    """16 bits for each element, divided and summed in that type, as torch's ``bf16_compress_hook`` does."""

    def __init__(
        self, config: HalfPrecision, params: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(config, params, group)
        self._dtype = _HALF_TYPES[config.dtype]

    def encoding(self, param: torch.Tensor) -> GradientEncoding | None:
        if param.dtype not in (torch.float32, torch.float64) or not param.is_contiguous():
            return None
        return GradientEncoding("half", dtype=str(self._dtype).removeprefix("torch."))

    def average(self, bucket: Bucket, last: bool) -> torch.futures.Future[Encoded]:
        small = bucket.buffer.to(self._dtype).div_(self._world_size)
        first = bucket.buffer.storage_offset()
        starts = [one.storage_offset() - first for one in bucket.gradients]

        def averaged() -> Encoded:
            bucket.buffer.copy_(small)
            return [
                [small[start : start + one.numel()]] if self.encoding(param) is not None else None
                for start, one, param in zip(starts, bucket.gradients, bucket.params, strict=True)
            ]

        return behind([self._sum(small)], bucket.buffer.device, averaged)
