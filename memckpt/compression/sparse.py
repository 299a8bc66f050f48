"""Sparse averages: top-k and random-k."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
from memckpt.config.schema import RandomK, TopK
from memckpt.state.encodings import sparse_parts
from memckpt.state.optimizers import dtype_name
from memckpt.state.spec import GradientEncoding, encoded_bytes

#: Odd, with bits all over: seeds of neighbours are far apart.
_MIX = 0x9E3779B97F4A7C15


class _SparseReducer(Reducer):
    """Gradients of which a share of the elements is averaged."""

    _ratio: float
    #: Number of ranks whose choices of elements may differ.
    _choices: int
    _sends_largest = False

    def _count(self, numel: int) -> int:
        return max(1, round(self._ratio * numel))

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


class TopKReducer(_SparseReducer):
    """Each rank's largest elements, gathered from all and averaged (LowDiff, section IV-A; Lin et al., 2018).

    Each rank adds what it gathered in the order of ranks, so that all get the same bits.
    """

    _sends_largest = True

    def __init__(self, config: TopK, params: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
        super().__init__(config, params, group)
        self._ratio, self._choices = config.ratio, self._world_size
        #: Whether a parameter's averages are recorded as unions, by its id.
        self._encodes: dict[int, bool] = {}
        #: Offsets of :meth:`_offsets` by bucket: where its gradients begin, and how many elements of each are sent.
        self._starts: dict[tuple[int, ...], torch.Tensor] = {}

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

    def average(self, bucket: Bucket, last: bool) -> torch.futures.Future[Encoded]:
        compressed = [self.compresses(param) for param in bucket.params]
        starts = [int(one.storage_offset() - bucket.buffer.storage_offset()) for one in bucket.gradients]
        chosen, values = [], []
        for at, (param, gradient) in enumerate(zip(bucket.params, bucket.gradients, strict=True)):
            if compressed[at]:
                total = self._total(param, gradient)
                indices = torch.topk(total.abs(), self._count(gradient.numel()), sorted=False).indices
                values.append(self._take_sent(total, indices, gradient.dtype))
                chosen.append(indices.to(torch.int32))
        rest = [one for at, one in enumerate(bucket.gradients) if not compressed[at]]
        whole, futures = torch.cat(rest) if rest else None, []
        rows = None
        if chosen:
            rows, future = self._gather(pack([torch.cat(chosen), torch.cat(values)]))
            futures.append(future)
        if whole is not None:
            futures.append(self._sum(whole))
        counts = [one.numel() for one in chosen]

        def averaged() -> Encoded:
            if whole is not None:
                spread(whole.mul_(1 / self._world_size), rest)
            if rows is None:
                return [None] * len(compressed)
            sizes = [(sum(counts), torch.int32), (sum(counts), bucket.buffer.dtype)]
            told = [unpack(row, sizes) for row in rows]
            found = iter(_by_gradient([indices for indices, _ in told], counts))
            mine = [(starts[at], one) for at, one in enumerate(bucket.gradients) if compressed[at]]
            offsets = self._offsets([start for start, _ in mine], counts, bucket.buffer.device)
            for _, gradient in mine:
                gradient.zero_()
            flat = bucket.buffer
            for indices, sent in told:
                # No element twice in one rank's: nothing depends on an order.
                flat[indices + offsets] += sent
            for _, gradient in mine:
                gradient.mul_(1 / self._world_size)
            parts: Encoded = []
            for at, (param, gradient) in enumerate(zip(bucket.params, bucket.gradients, strict=True)):
                union = next(found) if compressed[at] else None
                if union is None or not self._is_encoded(param):
                    parts.append(None)
                else:
                    parts.append(_union(gradient, union))
            return parts

        return behind(futures, bucket.buffer.device, averaged)


class RandomKReducer(_SparseReducer):
    """Elements drawn from a seed, alike on all ranks, so that values alone are summed."""

    def __init__(self, config: RandomK, params: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
        super().__init__(config, params, group)
        self._ratio, self._choices, self._seed = config.ratio, 1, config.seed
        #: Number of backwards so far; a part of the training's state.
        self.backwards = 0

    def state_dict(self) -> dict[str, int]:
        return {"backwards": self.backwards}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.backwards = state["backwards"]

    def _draw(self, param: torch.Tensor) -> torch.Tensor:
        """Ascending positions. They depend on the seed, the backward and the parameter, not on the bucket."""
        seed = (self._seed * _MIX + self.backwards) * _MIX + self._positions[id(param)]
        numbers = torch.Generator().manual_seed(seed & (1 << 63) - 1)
        drawn: torch.Tensor = torch.randint(param.numel(), (self._count(param.numel()),), generator=numbers).unique()
        return drawn

    def average(self, bucket: Bucket, last: bool) -> torch.futures.Future[Encoded]:
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
                entries = self._count(gradient.numel())
                room = entries - indices.numel()
                count = torch.full((1,), indices.numel(), device=gradient.device)
                padded = [torch.nn.functional.pad(one, (0, room)) for one in (indices, mine)]
                found.append(sparse_parts(gradient.numel(), padded[0], padded[1], count))
            return found

        return behind([self._sum(together)], bucket.buffer.device, averaged)


def _by_gradient(indices: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
    """Positions that any rank has sent, of each gradient, in the order of ranks."""
    return [torch.cat(each) for each in zip(*(one.split(list(counts)) for one in indices), strict=True)]


def _union(gradient: torch.Tensor, indices: torch.Tensor) -> list[torch.Tensor]:
    """Parts of an average, from the positions that any rank has sent, some of them twice."""
    ordered = indices.to(torch.int64).sort().values
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    entries = min(gradient.numel(), ordered.numel())
    places = first.cumsum(0) - 1
    union = ordered.new_zeros(entries).scatter_(0, places, ordered)
    return sparse_parts(gradient.numel(), union, gradient[union], first.sum().reshape(1))
