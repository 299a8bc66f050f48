"""Averages of low rank (PowerSGD)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from memckpt.compression.reduction import Averaged, Bucket, Encoded, Reducer, drop_unless_finite, spread
from memckpt.config import PowerSGD
from memckpt.state.encodings import product
from memckpt.state.spec import GradientEncoding

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
    bucket waits for all P and begins to average Q itself: ranks must begin their communication in the same order, which
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
