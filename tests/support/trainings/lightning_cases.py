"""The model and the callbacks for the tests of exact resume with Lightning.

Everything here draws from every RNG it can, in every hook, so that a generator that is off by one number anywhere shows
in the weights.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.utils._pytree import tree_map

from memckpt.config import CompressionConfig
from tests.support.trainings.compressed import average_plainly
from tests.support.trainings.killed_programs import Process, Run
from tests.support.trainings.lightning_data import BATCH_SIZE, Case


class Control(Process):
    """Comes by a place in each hook, and keeps what hooks saw."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.events: list[tuple[Any, ...]] = []
        self.losses: dict[tuple[int, int], str] = {}

    def loss(self, epoch: int, batch: int, value: Tensor) -> None:
        self.losses[epoch, batch] = float(value).hex()
        self.note("loss", (epoch, batch), value.detach())


class Net(pl.LightningModule):
    """Dropout, BatchNorm, a non-persistent buffer, metrics, and hooks that draw random numbers."""

    def __init__(self, case: Case, control: Control) -> None:
        super().__init__()
        self.case = case
        self.control = control
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(16, 1)
        if case.compiled:
            self.backbone.compile(backend="eager")
        if case.model == "tied":
            self.middle = nn.Linear(16, 16)
            self.again = nn.Linear(16, 16)
            self.again.weight = self.middle.weight
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.error = torchmetrics.MeanAbsoluteError()
        self.both = torchmetrics.MetricCollection(
            [torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError(), torchmetrics.R2Score()]
        )
        self.automatic_optimization = not case.manual
        self.restored: list[str] = []
        self.level = 0

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.backbone(inputs)
        if self.case.model == "tied":
            features = self.again(torch.relu(self.middle(features)))
        return self.head(features)

    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            return self.loss(batch["a"]) + self.loss(batch["b"])
        inputs, targets = batch
        if self.case.attributes:
            (curriculum,) = [each for each in self.trainer.callbacks if isinstance(each, Curriculum)]  # type: ignore[attr-defined]
            inputs = inputs * self.trainer.datamodule.stage["scale"] + self.level + curriculum.noise  # type: ignore[attr-defined]
        outputs = self(inputs)
        self.latest = (outputs.detach(), targets)
        return nn.functional.mse_loss(outputs, targets)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.control.at("training_step")
        loss = self.loss(batch)
        if self.case.manual:
            self.step_by_hand(batch, batch_idx, loss)
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=BATCH_SIZE)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max", prog_bar=True)
        self.error(*self.latest)
        self.log("mae", self.error, on_epoch=True, on_step=False)
        self.both.update(*self.latest)
        self.log_dict(self.both, on_epoch=True, on_step=False)
        self.control.loss(self.current_epoch, batch_idx, loss)
        self.control.at("loss")
        if self.case.stop_at == self.global_step:
            self.trainer.should_stop = True
        return loss

    def step_by_hand(self, batch: Any, batch_idx: int, loss: Tensor) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.control.at("between_optimizers")
        if batch_idx % 2 == 0:
            again = self.loss(batch)
            second.zero_grad()
            self.manual_backward(again)
            second.step()

    def on_train_start(self) -> None:
        torch.rand(3)
        self.control.at("train_start")

    def on_train_epoch_start(self) -> None:
        torch.rand(1)
        if self.case.attributes:
            self.level = self.current_epoch + 1
            self.trainer.datamodule.stage["scale"] *= 0.5  # type: ignore[attr-defined]
        self.event("epoch_start", "mae")
        self.control.at("epoch_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.case.peeks and batch_idx % 4 == 0:
            for _ in zip(range(2), self.trainer.train_dataloader, strict=False):
                pass
        self.control.at("batch_start")

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        self.control.at("before_zero_grad")

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.control.at("before_optimizer")

    def on_train_batch_end(self, *_: Any) -> None:
        self.control.at("batch_end")
        self.seen += torch.rand(())  # user code after all callbacks

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.sanity_checking:
            self.control.at("sanity")
            return
        self.control.at("validation_step")
        inputs, targets = batch
        noise = torch.randn(()) * 0.01
        self.log("val_loss", nn.functional.mse_loss(self(inputs), targets) + noise, batch_size=len(inputs))

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.control.at("val_epoch_end")

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.event("validation", "val_loss")
            self.control.at("val_end")

    def on_train_epoch_end(self) -> None:
        torch.rand(2)
        self.event("epoch_end", "train_loss_epoch")
        self.control.at("epoch_end")

    def event(self, name: str, metric: str) -> None:
        value = float(self.trainer.callback_metrics.get(metric, -1)).hex()
        self.control.events.append((name, self.current_epoch, self.global_step, value))

    def setup(self, stage: str) -> None:
        if self.case.built_early == "setup":
            self.trainer.fit_loop.setup_data()

    def configure_optimizers(self) -> Any:
        case = self.case
        if case.built_early == "estimated" and not self.trainer.estimated_stepping_batches > 0:
            raise AssertionError("expected an estimate")
        if case.manual:
            return [AdamW(self.backbone.parameters(), 1e-2), SGD(self.head.parameters(), 1e-2, momentum=0.9)]
        if case.model == "finetuned":
            optimizer: Optimizer = AdamW(self.head.parameters(), 1e-2)
        elif case.model == "groups":
            optimizer = AdamW(
                [{"params": self.backbone.parameters(), "lr": 3e-3}, {"params": self.head.parameters()}], 1e-2
            )
        else:
            optimizer = AdamW(self.parameters(), 1e-2)
        if (scheduler := _scheduler(case.scheduler, optimizer)) is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class NetWithHooks(Net):
    """Puts its weights, and a value of its own, into every checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        torch.rand(1)
        checkpoint["weights_again"] = dict(checkpoint["state_dict"])
        checkpoint["seen_when_saved"] = self.global_step

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if not checkpoint["weights_again"]["head.weight"].equal(self.head.weight):
            raise AssertionError("expected the live weights behind the reference")
        self.restored.append(f"step {checkpoint['seen_when_saved']}")


def _scheduler(name: str, optimizer: Optimizer) -> dict[str, Any] | None:
    match name:
        case "cosine":
            return {"scheduler": schedulers.CosineAnnealingLR(optimizer, 50), "interval": "step"}
        case "epoch":
            return {"scheduler": schedulers.StepLR(optimizer, 1, 0.7), "interval": "epoch"}
        case "milestones":
            return {"scheduler": schedulers.MultiStepLR(optimizer, [4, 15, 15, 25], 0.6), "interval": "step"}
        case "warmup":
            phases: list[schedulers.LRScheduler] = [
                schedulers.LinearLR(optimizer, 0.1, total_iters=8),
                schedulers.CosineAnnealingLR(optimizer, 30),
            ]
            return {"scheduler": schedulers.SequentialLR(optimizer, phases, [8]), "interval": "step"}
        case "one_cycle":
            return {"scheduler": schedulers.OneCycleLR(optimizer, 2e-2, total_steps=60), "interval": "step"}
        case "plateau_epoch":
            plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"scheduler": plateau, "interval": "epoch", "monitor": "val_loss"}
        case "plateau_step":
            plateau = schedulers.ReduceLROnPlateau(optimizer, patience=1, factor=0.9)
            return {"scheduler": plateau, "interval": "step", "monitor": "train_loss"}
    return None


class Watch(pl.Callback):
    """Kill points in callback hooks, which run at other times than the module's."""

    def __init__(self, control: Control) -> None:
        self.control = control

    def on_train_batch_start(self, *_: Any) -> None:
        self.control.at("callback_batch_start")

    def on_train_batch_end(self, *_: Any) -> None:
        self.control.at("callback_batch_end")

    def on_train_epoch_end(self, *_: Any) -> None:
        self.control.at("callback_epoch_end")

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.control.at("callback_val_start")

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.control.at("callback_val_end")

    def on_train_end(self, *_: Any) -> None:
        self.control.at("train_end")


class AveragePlainly(pl.Callback):
    """Averages gradients in compressed form without MemCheckpoint."""

    def __init__(self, compression: CompressionConfig) -> None:
        self.compression = compression

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        average_plainly(trainer.strategy.model, self.compression)


class Curriculum(pl.Callback):
    """Keeps its state in a plain attribute, which every process initializes."""

    def __init__(self) -> None:
        self.noise = torch.zeros(())

    def on_train_start(self, *_: Any) -> None:
        self.noise = torch.zeros(())

    def on_train_batch_end(self, *_: Any) -> None:
        self.noise = self.noise + 0.01


class Tally(pl.Callback):
    """Keeps state, and resets it at the start of training as if there were no resume; draws when saved."""

    def __init__(self) -> None:
        self.batches = 0
        self.sums: dict[int, float] = {}
        self.loaded: list[int] = []

    def on_train_start(self, *_: Any) -> None:
        self.batches = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.batches += 1
        self.sums[trainer.current_epoch] = self.sums.get(trainer.current_epoch, 0.0) + self.batches

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches, self.sums = state["batches"], state["sums"]

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        torch.rand(1)
        checkpoint["tally"] = torch.tensor(self.batches)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.loaded.append(int(checkpoint["tally"]))


# Sharded over ranks


class FSDPOnCPU(FSDPStrategy):
    """FSDPStrategy on a CPU: Lightning permits GPUs only."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        policy = ModuleWrapPolicy({nn.Linear})
        return FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), auto_wrap_policy=policy, use_orig_params=True
        )


def strategy_of(name: str, ranks: int) -> Strategy:
    match name:
        case "fsdp2":
            return ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
        case "tp":
            return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=ranks)
        case "fsdp1":
            return FSDPOnCPU()
    raise KeyError(name)


class _Sharded(Net):
    def configure_model(self) -> None:
        if self.case.strategy == "fsdp2" and not isinstance(self.head, FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            for each in (self.backbone, self.head):
                fully_shard(each, mesh=mesh)
        elif self.case.strategy == "tp" and not isinstance(self.head.weight, DTensor):
            mesh = self.device_mesh["tensor_parallel"]
            parallelize_module(self.backbone[0], mesh, ColwiseParallel(output_layouts=Replicate()))
            parallelize_module(self.head, mesh, RowwiseParallel(input_layouts=Replicate()))


class ShardedNet(_Sharded):
    pass


class ShardedNetWithHooks(_Sharded, NetWithHooks):
    pass


def held_by_this_rank(values: Any) -> Any:
    """Values with DTensors replaced by this rank's shards, which can be compared without its process group."""
    return tree_map(lambda one: one.to_local().detach().clone() if isinstance(one, DTensor) else one, values)
