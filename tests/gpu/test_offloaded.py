"""FSDP2 with parameters on the host, on the late device: exact, and no copy of a gradient is waited for in backward."""

from __future__ import annotations

import pytest
from torch import nn

from tests.gpu.cases import alone
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.engine_steps import Accumulation
from tests.support.trainings.engine_training import Case, Training


class Offloaded(Training):
    """One rank. Torch makes a gradient's copy blocking where its parameter has a hook behind the accumulation."""

    def make_model(self) -> nn.Module:
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        alone()
        model = super().make_model()
        policy = CPUOffloadPolicy(pin_memory=True)
        fully_shard(model[0], offload_policy=policy)
        return fully_shard(model, offload_policy=policy)

    def batch(self, step: int) -> float:
        if step > 4 and any(getattr(param, "_post_accumulate_grad_hooks", None) for param in self.model.parameters()):
            raise AssertionError("expected no hook behind the accumulation of offloaded gradients")
        return super().batch(step)


class Accumulated(Offloaded, Accumulation):
    """A step every third batch."""


@pytest.mark.usefixtures("only_late")
@pytest.mark.parametrize(
    ("training", "expected"), [(Offloaded, [6, 11]), (Accumulated, [6, 9])], ids=["each-step", "accumulated"]
)
def test_offloaded_gradients_are_taken_at_the_end_of_backward(
    gpu_lab: Lab, training: type[Training], expected: list[int | None]
) -> None:
    case = Case(f"offloaded-{training.__name__}", training)
    kills = [("after commit", 7), ("backward", 12)]
    gpu_lab.survives(case, config("lazy", resume_check="off"), kills, expected=expected)
