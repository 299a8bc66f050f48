"""Lightning Fabric: a session takes what `fabric.setup` returned; killed and gone on with, bit for bit."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from memckpt.errors import UnsupportedError
from memckpt.session.loop import bare_model
from tests.support.trainings.data_jobs import NONE
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.hand_loops import Process, survives
from tests.support.trainings.killed_programs import Kill
from tests.support.trainings.loader_cases import make


def _shard(model: nn.Module, mesh: Any) -> nn.Module:
    for each in (model[0], model[2]):  # type: ignore[index]
        fully_shard(each, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])  # type: ignore[no-any-return]


class FabricProcess(Process):
    """What Fabric makes of model and optimizer is what the session is given."""

    def __init__(self, strategy: str, *arguments: Any) -> None:
        chosen: Any = strategy
        if strategy == "fsdp2":
            chosen = ModelParallelStrategy(_shard, data_parallel_size=2, tensor_parallel_size=1)
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if ranks > 1:
            os.environ["TORCHELASTIC_RUN_ID"] = "test"  # by it Fabric knows that its ranks are there
        self.fabric = Fabric(accelerator="cpu", devices=ranks, strategy=chosen)
        self.fabric.launch()
        super().__init__(*arguments)

    def objects(self) -> tuple[Any, Any]:
        model, optimizer = super().objects()
        if isinstance(self.fabric.strategy, ModelParallelStrategy):
            model = self.fabric.setup_module(model)
            return model, self.fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), 0.01))
        return tuple(self.fabric.setup(model, optimizer))  # type: ignore[return-value]

    def differentiate(self, loss: Any) -> None:
        self.fabric.backward(loss)


def loop(process: FabricProcess) -> None:
    session, fabric = process.session, process.fabric
    loader = session.loader(fabric.setup_dataloaders(make("shuffle", NONE)))
    session.restore()
    print(session.describe())
    for epoch in session.epochs(3):
        for number, batch in enumerate(loader, start=session.batch):
            waits = number % 2 == 0 and fabric.world_size == 1
            with fabric.no_backward_sync(process.model, enabled=waits):
                process.backward(f"batch {epoch}.{number}", batch)
            process.at("backward")
            if waits:
                continue
            fabric.clip_gradients(process.model, process.optimizer, max_norm=1.0)
            process.step()
            session.commit()
            process.at("committed")
        process.at("epoch end")
    for name, parameter in process.model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        process.note(name, [each.hex() for each in local.flatten().tolist()])
    session.close()


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("auto", 1), pytest.param("ddp", 2, marks=pytest.mark.slow), ("fsdp2", 2)],
    ids=str,
)
def test_a_loop_over_epochs(lab: Lab, strategy: str, ranks: int) -> None:
    def kind(*arguments: Any) -> FabricProcess:
        return FabricProcess(strategy, *arguments)

    kills: list[Kill] = [("committed", 2), ("backward", 2), ("epoch end", 1), ("committed", 3)]
    log = survives(lab, loop, kills, kind=kind, ranks=ranks)
    tap = {"auto": "", "ddp": " (DDP communication hook)", "fsdp2": " (reduced shards)"}[strategy]
    assert f"tap: streaming{tap}, " in log


@pytest.mark.parametrize("package", ["deepspeed", "dp"])
def test_other_strategies_are_refused_by_name(package: str) -> None:
    from lightning.fabric.strategies import DataParallelStrategy, DeepSpeedStrategy
    from lightning.fabric.wrappers import _FabricModule

    kind = {"deepspeed": DeepSpeedStrategy, "dp": DataParallelStrategy}[package]
    model = _FabricModule(nn.Linear(2, 2), kind.__new__(kind))
    with pytest.raises(UnsupportedError, match=rf"SingleDeviceStrategy.*found {kind.__name__}"):
        bare_model(model)
