"""Time of a step's copies over an accelerator's link, and the share that compute hides. Torch-free, for ``plan``, too.

A forward takes 2 operations for each parameter and token, a backward 4: a third and two thirds of the compute. Anchors
are copied beside the forward and what follows it, gradients beside the last backward before a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

#: Wait, as a share of a step, that is worth a remedy.
_WORTH = 0.01


@dataclass(frozen=True)
class LinkTime:
    """Seconds of one step of one device: copies of gradients and of anchors, and compute without waits for them."""

    gradient_seconds: float
    anchor_seconds: float
    compute_seconds: float
    period: int  #: T
    batches: int = 1  #: backwards of a step, of which the last one's gradients are copied

    @property
    def copy_seconds(self) -> float:
        return self.gradient_seconds + self.anchor_seconds

    @property
    def exposed_seconds(self) -> float:
        """Seconds that a step waits; anchors that are not copied before the last backward delay gradients."""
        backward = self.compute_seconds * 2 / 3 / self.batches
        late = max(0.0, self.anchor_seconds - (self.compute_seconds - backward))
        return max(0.0, late + self.gradient_seconds - backward)

    @property
    def share(self) -> float:
        """The wait as a share of a step."""
        return self.exposed_seconds / (self.compute_seconds + self.exposed_seconds)

    def describe(self, nbytes: float, waits: float, halves: bool, ranks: int) -> str:
        """Describe the share of copies of `nbytes` a step that compute hides, and what would help.

        `halves`: whether gradients are in fp32. `ranks`: number of the node's ranks. `waits`: seconds, as measured.
        """
        step, copies = self.compute_seconds + waits, self.copy_seconds
        found = (
            f"copies to the host take {copies * 1e3:.3g} ms of a step of {step:.3g} s, at "
            f"{nbytes / copies / 1e9:.3g} GB/s; {1 - waits / copies:.0%} of that hides behind compute"
        )
        if waits <= _WORTH * step:
            return found
        found += f", and a step waits {waits * 1e3:.3g} ms for the rest"
        if self.share <= _WORTH:
            return f"{found}: it is what backward makes last, the gradient of a tied embedding for instance"
        remedies = [f"{name} (to {one.share:.1%})" for name, one in self._remedies(halves, ranks)]
        return f"{found}, {self.share:.1%} of it by the formula; less with {', '.join(remedies)}"

    def _remedies(self, halves: bool, ranks: int) -> Iterable[tuple[str, LinkTime]]:
        for name, ways in (
            ("anchor_period_steps={}", {one: self._with_period(one) for one in (8, 16, 32, 64) if one > self.period}),
            ("gradients in bf16", {2: replace(self, gradient_seconds=self.gradient_seconds / 2)} if halves else {}),
            ("gradients accumulated over {} batches", {one: self._accumulated(one) for one in (2, 4, 8)}),
            (
                "{} ranks on a node, which share the copies",
                {one: self._divided(one / ranks) for one in (2, 4, 8) if one > ranks},
            ),
        ):
            ways = {count: one for count, one in ways.items() if one.share < 0.95 * self.share}
            if ways:  # the first that suffices, else what helps most
                count = next((each for each, one in ways.items() if one.share <= _WORTH), max(ways))
                yield name.format(count), ways[count]

    def _with_period(self, period: int) -> LinkTime:
        return replace(self, anchor_seconds=self.anchor_seconds * self.period / period, period=period)

    def _divided(self, by: float) -> LinkTime:
        return replace(self, gradient_seconds=self.gradient_seconds / by, anchor_seconds=self.anchor_seconds / by)

    def _accumulated(self, by: int) -> LinkTime:
        return replace(self, compute_seconds=self.compute_seconds * by, batches=self.batches * by)
