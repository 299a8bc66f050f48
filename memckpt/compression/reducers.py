"""The compressors: averages of some elements (top-k, random-k), of all in fewer bits, or of low rank (PowerSGD)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from memckpt.compression.reduction import (
    Averaged,
    Bucket,
    Encoded,
    Reducer,
    behind,
    drop_unless_finite,
    pack,
    spread,
    unpack,
)
from memckpt.config import HalfPrecision, PowerSGD, Quantized8, RandomK, TopK
from memckpt.state.encodings import decode, product, quantized_parts, sparse_parts
from memckpt.state.optimizers import dtype_name
from memckpt.state.spec import GradientEncoding, encoded_bytes

#: Odd, with bits all over: seeds of neighbours are far apart.
_MIX = 0x9E3779B97F4A7C15
_HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


#: Averages the messages of all ranks, a row each: the parts of each compressed gradient.
_AverageRows = Callable[[torch.Tensor], Encoded]


class _GatheringReducer(Reducer):
    """Gathers what each rank makes of its gradients, and has all ranks average it alike; sums the other gradients."""

    def average(self, bucket: Bucket, last: bool) -> torch.futures.Future[Averaged]:
        compressed = [at for at, param in enumerate(bucket.params) if self.compresses(param)]
        rest = [gradient for at, gradient in enumerate(bucket.gradients) if at not in set(compressed)]
        rows, futures = None, []
        if compressed:
            message, average_rows = self._compress(bucket, compressed)
            rows, future = self._gather(message)
            futures.append(future)
        whole = torch.cat(rest) if rest else None
        if whole is not None:
            futures.append(self._sum(whole))

        def averaged() -> Encoded:
            if whole is not None:
                spread(whole.mul_(1 / self._world_size), rest)
            found: Encoded = [None] * len(bucket.params)
            for at, parts in zip(compressed, average_rows(rows) if rows is not None else (), strict=True):
                found[at] = parts
            return found

        return behind(futures, bucket.buffer, averaged)

    @abstractmethod
    def _compress(self, bucket: Bucket, compressed: Sequence[int]) -> tuple[torch.Tensor, _AverageRows]:
        """This rank's message of the gradients at these positions, and what averages all ranks' messages."""


class QuantizedReducer(_GatheringReducer):
    """Signed bytes, gathered from all ranks, averaged, and rounded to signed bytes once more.

    All ranks round the same average in the same way, so that the result is a byte for each element however many ranks
    there are. Both roundings go to the residual: each rank's own, and that of the average on all of them.
    """

    _config: Quantized8

    def encoding(self, param: torch.Tensor) -> GradientEncoding | None:
        return GradientEncoding("quantized", self._config.block_elements) if self.compresses(param) else None

    def _decode(self, parts: list[torch.Tensor]) -> torch.Tensor:
        encoding = GradientEncoding("quantized", self._config.block_elements)
        return decode(encoding, parts, parts[0].numel(), torch.float32)

    def _compress(self, bucket: Bucket, compressed: Sequence[int]) -> tuple[torch.Tensor, _AverageRows]:
        totals, steps, scales = [], [], []
        for at in compressed:
            total = self._total(bucket.params[at], bucket.gradients[at])
            parts = quantized_parts(total, self._config.block_elements)
            if self.error_feedback:
                total.sub_(self._decode(parts))
            totals.append(total)
            steps.append(parts[0])
            scales.append(parts[1])
        lengths, blocks = [one.numel() for one in steps], [one.numel() for one in scales]

        def average_rows(rows: torch.Tensor) -> Encoded:
            sums = [torch.zeros_like(one) for one in totals]
            for row in rows:
                theirs = unpack(row, [(sum(lengths), torch.int8), (sum(blocks), torch.float32)])
                for total, part, scale in zip(sums, theirs[0].split(lengths), theirs[1].split(blocks), strict=True):
                    total.add_(self._decode([part, scale]))
            each = zip(compressed, totals, sums, strict=True)
            return [self._round(bucket.gradients[at], residual, total) for at, residual, total in each]

        return pack([torch.cat(steps), torch.cat(scales)]), average_rows

    def _round(self, gradient: torch.Tensor, residual: torch.Tensor, total: torch.Tensor) -> list[torch.Tensor]:
        """Round a sum over all ranks to the average that is used."""
        average = total.mul_(1 / self._world_size)
        parts = quantized_parts(average, self._config.block_elements)
        rounded = self._decode(parts)
        gradient.copy_(rounded)
        if self.error_feedback:
            drop_unless_finite(residual.add_(average).sub_(rounded), parts[1])
        return parts


class HalfReducer(Reducer):
    """16 bits for each element, divided and summed in that type, as torch's ``bf16_compress_hook`` does."""

    _config: HalfPrecision

    def encoding(self, param: torch.Tensor) -> GradientEncoding | None:
        if param.dtype not in (torch.float32, torch.float64) or not param.is_contiguous():
            return None
        return GradientEncoding("half", dtype=dtype_name(_HALF_TYPES[self._config.dtype]))

    def average(self, bucket: Bucket, last: bool) -> torch.futures.Future[Averaged]:
        small = bucket.buffer.to(_HALF_TYPES[self._config.dtype]).div_(self._world_size)
        starts = bucket.starts

        def averaged() -> Encoded:
            bucket.buffer.copy_(small)
            return [
                [small[start : start + one.numel()]] if self.encoding(param) is not None else None
                for start, one, param in zip(starts, bucket.gradients, bucket.params, strict=True)
            ]

        return behind([self._sum(small)], bucket.buffer, averaged)


class _SparseReducer(Reducer):
    """Gradients of which a share of the elements is averaged."""

    _config: TopK | RandomK
    _sends_largest = False

    @property
    def _choices(self) -> int:
        """Number of ranks whose choices of elements may differ."""
        return 1

    def _count(self, numel: int) -> int:
        return max(1, round(self._config.ratio * numel))

    def encoding(self, param: torch.Tensor) -> GradientEncoding | None:
        if not self.compresses(param):
            return None
        numel = param.numel()
        found = GradientEncoding("sparse", min(numel, self._choices * self._count(numel)))
        # With many ranks the room for what all of them choose is larger than the gradient.
        return found if encoded_bytes(found, numel, dtype_name(param.dtype)) < param.nbytes else None

    def _take_sent(self, total: torch.Tensor, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The elements that are sent, in the gradient's dtype; they leave the residual."""
        values = total[indices]
        sent = values.to(dtype)
        if self.error_feedback:
            total[indices] = values - sent.to(torch.float32)
            # What is largest is sent, an overflow first; else it may be in what is left.
            drop_unless_finite(total, sent if self._sends_largest else total)
        return sent


class TopKReducer(_SparseReducer, _GatheringReducer):
    """Each rank's largest elements, gathered from all and averaged (LowDiff, section IV-A; Lin et al., 2018).

    Each rank adds what it gathered in the order of ranks, so that all get the same bits.
    """

    _config: TopK
    _sends_largest = True

    def __init__(self, config: TopK, params: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
        super().__init__(config, params, group)
        #: Whether a parameter's averages are recorded as unions, by its id.
        self._encodes: dict[int, bool] = {}
        #: Offsets of :meth:`_offsets` by bucket: where its gradients begin, and how many elements of each are sent.
        self._starts: dict[tuple[int, ...], torch.Tensor] = {}

    @property
    def _choices(self) -> int:
        return self._world_size

    def _is_encoded(self, param: torch.Tensor) -> bool:
        if id(param) not in self._encodes:  # asked for each parameter of each step
            self._encodes[id(param)] = self.encoding(param) is not None
        return self._encodes[id(param)]

    def _offsets(self, starts: Sequence[int], counts: Sequence[int], device: torch.device) -> torch.Tensor:
        """Offset in the bucket of the gradient that each sent element belongs to, int64."""
        key = (*starts, *counts)
        if key not in self._starts:  # a copy to a device, for which the host would wait at each step
            each = torch.tensor(starts).repeat_interleave(torch.tensor(counts))
            self._starts[key] = each.to(device)
        return self._starts[key]

    def _compress(self, bucket: Bucket, compressed: Sequence[int]) -> tuple[torch.Tensor, _AverageRows]:
        chosen, values = [], []
        for at in compressed:
            gradient = bucket.gradients[at]
            total = self._total(bucket.params[at], gradient)
            indices = torch.topk(total.abs(), self._count(gradient.numel()), sorted=False).indices
            values.append(self._take_sent(total, indices, gradient.dtype))
            chosen.append(indices.to(torch.int32))
        counts, starts = [one.numel() for one in chosen], bucket.starts

        def average_rows(rows: torch.Tensor) -> Encoded:
            flat, mine = bucket.buffer, [bucket.gradients[at] for at in compressed]
            sizes = [(sum(counts), torch.int32), (sum(counts), flat.dtype)]
            told = [unpack(row, sizes) for row in rows]
            offsets = self._offsets([starts[at] for at in compressed], counts, flat.device)
            for gradient in mine:
                gradient.zero_()
            for indices, sent in told:
                # No element twice in one rank's: nothing depends on an order.
                flat[indices + offsets] += sent
            for gradient in mine:
                gradient.mul_(1 / self._world_size)
            # Positions that any rank has sent, of each gradient, in the order of ranks.
            unions = [torch.cat(each) for each in zip(*(one.split(counts) for one, _ in told), strict=True)]
            params = [bucket.params[at] for at in compressed]
            return [
                _union(gradient, union) if self._is_encoded(param) else None
                for param, gradient, union in zip(params, mine, unions, strict=True)
            ]

        return pack([torch.cat(chosen), torch.cat(values)]), average_rows


def _union(gradient: torch.Tensor, indices: torch.Tensor) -> list[torch.Tensor]:
    """Parts of an average, from the positions that any rank has sent, some of them twice."""
    ordered = indices.to(torch.int64).sort().values
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    entries = min(gradient.numel(), ordered.numel())
    places = first.cumsum(0) - 1
    union = ordered.new_zeros(entries).scatter_(0, places, ordered)
    return sparse_parts(gradient.numel(), union, gradient[union], first.sum().reshape(1))


class RandomKReducer(_SparseReducer):
    """Elements drawn from a seed, alike on all ranks, so that values alone are summed."""

    _config: RandomK
    backwards = 0  #: number of backwards so far; a part of the training's state

    def state_dict(self) -> dict[str, int]:
        return {"backwards": self.backwards}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.backwards = state["backwards"]

    def _draw(self, param: torch.Tensor) -> torch.Tensor:
        """Ascending positions. They depend on the seed, the backward and the parameter, not on the bucket."""
        seed = (self._config.seed * _MIX + self.backwards) * _MIX + self._positions[id(param)]
        numbers = torch.Generator().manual_seed(seed & (1 << 63) - 1)
        count = self._count(param.numel())
        drawn: torch.Tensor = torch.randint(param.numel(), (count,), generator=numbers, device="cpu").unique()
        return drawn

    def average(self, bucket: Bucket, last: bool) -> torch.futures.Future[Averaged]:
        chosen: list[torch.Tensor | None] = []
        sent: list[torch.Tensor] = []
        for param, gradient in zip(bucket.params, bucket.gradients, strict=True):
            if self.compresses(param):
                indices = self._draw(param).to(gradient.device, non_blocking=True)
                sent.append(self._take_sent(self._total(param, gradient), indices, gradient.dtype))
                chosen.append(indices)
            else:
                sent.append(gradient)
                chosen.append(None)
        self.backwards += last
        together = torch.cat(sent)
        sizes = [one.numel() for one in sent]

        def averaged() -> Encoded:
            found: Encoded = []
            values = together.mul_(1 / self._world_size).split(sizes)
            for gradient, indices, mine in zip(bucket.gradients, chosen, values, strict=True):
                if indices is None:
                    gradient.copy_(mine)
                    found.append(None)
                    continue
                gradient.zero_()
                gradient[indices] = mine
                room = self._count(gradient.numel()) - indices.numel()
                count = torch.full((1,), indices.numel(), device=gradient.device)
                padded = [torch.nn.functional.pad(one, (0, room)) for one in (indices, mine)]
                found.append(sparse_parts(gradient.numel(), padded[0], padded[1], count))
            return found

        return behind([self._sum(together)], bucket.buffer, averaged)


#: Added to lengths that vectors are divided by.
_EPSILON = 1e-8


class _Pending(NamedTuple):
    """A bucket whose first factors are being averaged."""

    bucket: Bucket
    totals: dict[int, torch.Tensor]  #: by position in the bucket, the gradient with what was left out before
    lefts: dict[int, torch.Tensor]  #: by position, its first factor
    whole: torch.Tensor  #: the uncompressed gradients, one behind the other, then the first factors; being summed
    result: torch.futures.Future[Averaged]  #: done when the bucket has its average


class PowerSgdReducer(Reducer):
    """A matrix M of each gradient as P Q^T: P = M Q with the Q of the step before, made orthonormal, then Q = M^T P.

    P is averaged a bucket at a time, as backward makes it, all Q together behind the last bucket. The hook of the last
    bucket waits for all P and begins to average Q itself. Ranks must begin their communication in the same order, which
    callbacks have not, and DDP begins more of it behind the last bucket. The gradient is computed from both factors as
    redo does it (:func:`~memckpt.state.encodings.product`), and not by a matrix product.
    """

    _config: PowerSGD

    def __init__(
        self, config: PowerSGD, params: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(config, params, group)
        self._rank = config.rank
        #: By parameter's id, the parameter and the second factor of the step before.
        self._rights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._begun: list[_Pending] = []
        self._sums: list[torch.futures.Future[Any]] = []

    def compresses(self, param: torch.Tensor) -> bool:
        if not super().compresses(param) or param.dim() < 2:
            return False
        rows, columns = param.shape[0], param.numel() // param.shape[0]
        return (rows + columns) * self._rank < param.numel()  # else factors take more

    def encoding(self, param: torch.Tensor) -> GradientEncoding | None:
        return GradientEncoding("factors", self._rank, rows=param.shape[0]) if self.compresses(param) else None

    def carried(self, params: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        found = super().carried(params)
        for param in params:
            if self.compresses(param):
                found[f"{self._positions[id(param)]}_right"] = self._right(param)
        return found

    def restart(self) -> None:
        super().restart()
        for param, right in self._rights.values():
            right.copy_(self._draw(param))

    def _draw(self, param: torch.Tensor) -> torch.Tensor:
        numbers = torch.Generator().manual_seed(self._config.start_seed * 1_000_003 + self._positions[id(param)])
        return torch.randn(param.numel() // param.shape[0], self._rank, generator=numbers, device="cpu")

    def _right(self, param: torch.Tensor) -> torch.Tensor:
        """The second factor, (columns, rank), drawn alike on all ranks at first."""
        if id(param) not in self._rights:
            self._rights[id(param)] = param, self._draw(param).to(param.device)
        return self._rights[id(param)][1]

    def average(self, bucket: Bucket, last: bool) -> torch.futures.Future[Averaged]:
        if any(bucket.params[0] is one for pending in self._begun for one in pending.bucket.params):
            self._begun, self._sums = [], []  # left by a backward that raised
        totals, lefts, rest = {}, {}, []
        for at, (param, gradient) in enumerate(zip(bucket.params, bucket.gradients, strict=True)):
            if not self.compresses(param):
                rest.append(gradient.to(torch.promote_types(gradient.dtype, torch.float32)))
                continue
            totals[at] = self._total(param, gradient).view(param.shape[0], -1)
            lefts[at] = totals[at] @ self._right(param)
        whole = torch.cat([*rest, *(left.view(-1) for left in lefts.values())])
        on = bucket.buffer.device
        result: torch.futures.Future[Averaged] = torch.futures.Future(devices=[on] if on.type != "cpu" else None)
        self._begun.append(_Pending(bucket, totals, lefts, whole, result))
        self._sums.append(self._sum(whole))
        if last:
            begun, self._begun = self._begun, []
            sums, self._sums = self._sums, []
            for one in sums:
                one.wait()  # raises if it failed; for CUDA, the stream waits and not the host
            self._average_rights(begun)
        return result

    def _average_rights(self, begun: Sequence[_Pending]) -> None:
        """Begin to average the second factors, all together."""
        rights = []
        for pending in begun:
            averages = pending.whole.mul_(1 / self._world_size)
            plain = [one for at, one in enumerate(pending.bucket.gradients) if at not in pending.lefts]
            count = sum(one.numel() for one in plain)
            spread(averages[:count], plain)
            spread(averages[count:], [left.view(-1) for left in pending.lefts.values()])
            for at, left in pending.lefts.items():
                _orthonormalize(left)
                rights.append((pending.totals[at].t() @ left).view(-1))
        if not rights:
            for pending in begun:
                pending.result.set_result(Averaged([None] * len(pending.bucket.params), pending.bucket.buffer))
            return
        together = torch.cat(rights)
        self._sum(together).then(partial(self._report, begun, together))

    def _report(self, begun: Sequence[_Pending], together: torch.Tensor, done: torch.futures.Future[Any]) -> None:
        """Give all buckets their results; a failure ends all of them: the training must see it."""
        try:
            done.value()
            self._finish(begun, together)
        except Exception as error:
            for pending in begun:
                if not pending.result.done():
                    pending.result.set_exception(error)  # type: ignore[arg-type]  # torch takes an exception, and annotates a result

    def _finish(self, begun: Sequence[_Pending], together: torch.Tensor) -> None:
        offset = 0
        for pending in begun:
            found: Encoded = [None] * len(pending.bucket.params)
            for at, left in pending.lefts.items():
                param, gradient = pending.bucket.params[at], pending.bucket.gradients[at]
                right = self._right(param)
                found_right = together[offset : offset + right.numel()].view_as(right).mul_(1 / self._world_size)
                offset += right.numel()
                used = product(left, found_right)
                gradient.copy_(used.view(-1))
                if self.error_feedback:
                    drop_unless_finite(pending.totals[at].sub_(used), left)
                found[at] = [left.view(-1), found_right.reshape(-1)]
                # An overflow, whose step a scaler skips, must not spoil all steps to come.
                right.copy_(torch.where(found_right.isfinite().all(), found_right, right))
            pending.result.set_result(Averaged(found, pending.bucket.buffer))


def _orthonormalize(matrix: torch.Tensor) -> None:
    """Make the columns orthogonal and of length one, in place (Gram and Schmidt), as torch's hook does."""
    for at in range(matrix.shape[1]):
        column = matrix[:, at : at + 1]
        column /= column.norm() + _EPSILON
        if at + 1 < matrix.shape[1]:
            rest = matrix[:, at + 1 :]
            rest -= (column * rest).sum(dim=0) * column
