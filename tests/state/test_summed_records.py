"""Records are redone one by one: a sum of gradients is another step."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def trained(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """A parameter after a step of Adam with each gradient."""
    param = torch.nn.Parameter(torch.ones(64))
    optimizer = torch.optim.Adam([param], lr=0.1)
    for gradient in gradients:
        param.grad = gradient.clone()
        optimizer.step()
    return param.detach()


def merged_in_pairs(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """LowDiff's parallel recovery (section VI-A): the first alone, the others added up in pairs at the same time."""
    rest = list(gradients[1:])
    pairs = [rest[at] + rest[at + 1] if at + 1 < len(rest) else rest[at] for at in range(0, len(rest), 2)]
    return [gradients[0], *pairs]


def test_a_sum_of_gradients_is_another_step() -> None:
    gradients = [torch.randn(64, generator=torch.Generator().manual_seed(seed)) for seed in range(9)]
    right = trained(gradients)
    assert torch.equal(right, trained(gradients))
    for merged in (merged_in_pairs(gradients), [sum(gradients[1:], gradients[0])]):
        wrong = trained(merged)
        assert float((right - wrong).abs().max()) > 0.05, "a learning rate of 0.1: half a step at least"
