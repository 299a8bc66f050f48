"""Parameters that are trained only after training was attached: what is left out of them is not held, and said."""

from __future__ import annotations

import pytest
import torch

from memckpt.compression import CompressionConfig, PowerSGD, Quantized8, RandomK, TopK, reducer_for
from memckpt.compression.reduction import Bucket
from memckpt.session.gradient_tap import _Settings
from tests.gpu.cases import alone
from tests.support.trainings.engine_harness import Lab


def train_another(config: CompressionConfig) -> None:
    alone()
    params = [torch.zeros(64, 64), torch.zeros(64, 64)]
    reducer = reducer_for(config, params)
    reducer.carried(params[:1])
    settings = _Settings(config, reducer)

    def average(trained: list[torch.Tensor]) -> None:
        buffer = torch.randn(sum(param.numel() for param in trained))
        gradients = buffer.split([param.numel() for param in trained])
        reducer.average(Bucket(trained, gradients, buffer), last=True).wait()

    average(params[:1])
    assert settings.state_dict()["whole"]
    average(params)
    held = settings.state_dict()
    assert not held["whole"]
    resumed = _Settings(config, reducer_for(config, params))
    resumed.load_state_dict(held)
    assert not resumed.whole


@pytest.mark.parametrize(
    "config", [TopK(ratio=0.1), RandomK(ratio=0.1), Quantized8(), PowerSGD()], ids=lambda one: type(one).__name__
)
def test_left_out_parts_of_a_parameter_trained_since_are_not_held(lab: Lab, config: CompressionConfig) -> None:
    child = lab.fork(lambda: train_another(config), "later")
    assert child.wait() == 0, child.log.read_text()[-4000:]
