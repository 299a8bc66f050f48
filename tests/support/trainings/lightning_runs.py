"""The model, the callbacks and the runs for the tests of exact resume with Lightning.

Everything here draws from every RNG it can, in every hook, so that a generator that is off by one number anywhere shows
in the weights.
"""

from __future__ import annotations

import itertools
import os
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from lightning.pytorch import callbacks as hooks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as kinds

from lightning_memckpt import MemCheckpoint
from lightning_memckpt.reentry import Reentry
from lightning_memckpt.trainer_state import LoggingState
from memckpt.capture.beside.objects import MetricStates
from memckpt.config import AgentConfig, CompressionConfig, MemckptConfig, StorageConfig
from memckpt.session.resume import first_steps, resume
from memckpt.state import rng
from tests.support.faults.frozen import freeze
from tests.support.trainings.compressed import average_plainly, note_encodings
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_programs import Ended, Kill, Process, Run, finish, unproved, values
from tests.support.trainings.lightning_data import BATCH_SIZE, Case, Data, train_loader, validation_loader

EPOCHS = 3

# A failed test leaves an agent behind, which then ends soon.
CONFIG = MemckptConfig(agent=AgentConfig(linger_seconds=30), storage=None, resume_check="replay")


# The model and its callbacks


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
        return {"optimizer": optimizer, "lr_scheduler": _scheduler(case.scheduler, optimizer)}


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


def _scheduler(name: str, optimizer: Optimizer) -> dict[str, Any]:
    def warmup() -> Any:
        phases: list[Any] = [kinds.LinearLR(optimizer, 0.1, total_iters=8), kinds.CosineAnnealingLR(optimizer, 30)]
        return kinds.SequentialLR(optimizer, phases, [8])

    makers: dict[str, Callable[[], Any]] = {
        "cosine": lambda: kinds.CosineAnnealingLR(optimizer, 50),
        "epoch": lambda: kinds.StepLR(optimizer, 1, 0.7),
        "milestones": lambda: kinds.MultiStepLR(optimizer, [4, 15, 15, 25], 0.6),
        "warmup": warmup,
        "one_cycle": lambda: kinds.OneCycleLR(optimizer, 2e-2, total_steps=60),
        "plateau_epoch": lambda: kinds.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
        "plateau_step": lambda: kinds.ReduceLROnPlateau(optimizer, patience=1, factor=0.9),
    }
    monitor = {"plateau_epoch": {"monitor": "val_loss"}, "plateau_step": {"monitor": "train_loss"}}.get(name, {})
    return {"scheduler": makers[name](), "interval": "epoch" if "epoch" in name else "step", **monitor}


def _at(place: str) -> Any:
    """A hook that comes by a place."""

    def hook(self: Watch, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.control.at(place)

    return hook


class Watch(pl.Callback):
    """Kill points in callback hooks, which run at other times than the module's."""

    on_train_batch_start, on_train_batch_end = _at("callback_batch_start"), _at("callback_batch_end")
    on_validation_start, on_validation_end = _at("callback_val_start"), _at("callback_val_end")
    on_train_epoch_end, on_train_end = _at("callback_epoch_end"), _at("train_end")

    def __init__(self, control: Control) -> None:
        self.control = control


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
    if name == "fsdp1":
        return FSDPOnCPU()
    data, tensor = {"fsdp2": (ranks, 1), "tp": (1, ranks)}[name]
    return ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor)


class ShardedNet(Net):
    def configure_model(self) -> None:
        if self.case.strategy == "fsdp2" and not isinstance(self.head, FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            for each in (self.backbone, self.head):
                fully_shard(each, mesh=mesh)
        elif self.case.strategy == "tp" and not isinstance(self.head.weight, DTensor):
            mesh = self.device_mesh["tensor_parallel"]
            parallelize_module(self.backbone[0], mesh, ColwiseParallel(output_layouts=Replicate()))
            parallelize_module(self.head, mesh, RowwiseParallel(input_layouts=Replicate()))


class ShardedNetWithHooks(ShardedNet, NetWithHooks):
    pass


# Runs


@dataclass(frozen=True)
class LightningRun(Run):
    """Parameters of one attempt."""

    resume: str | int = "auto"  # argument of the callback
    checkpoint: str | None = None  # argument of fit()
    storage: bool = False


def train(run: LightningRun) -> dict[str, Any]:
    """Train the case to its end, in this process; dies at its planned point."""
    case = run.case
    control = Control(run)
    if run.ranks > 1:  # as torchrun does
        os.environ.update(GROUP_RANK="0", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="test")
    pl.seed_everything(1, workers=case.seed_workers, verbose=False)
    plain, sharded = (NetWithHooks, ShardedNetWithHooks) if case.user_hooks else (Net, ShardedNet)
    if case.compression is not None:
        note_encodings(run.directory / f"encodings-{run.rank}")
    model: Any = (plain if case.strategy == "ddp" else sharded)(case, control)
    trainer = make_trainer(run, control)
    if case.datamodule:
        trainer.fit(model, datamodule=Data(case), ckpt_path=run.checkpoint)
    else:
        validation = validation_loader(case) if case.validate else None
        trainer.fit(model, train_loader(case), validation, ckpt_path=run.checkpoint)
    return outcome(trainer, model, control)


def make_trainer(run: LightningRun, control: Control) -> Any:
    case = run.case
    callbacks: list[pl.Callback] = [Watch(control)]
    if run.protected:
        config = replace(CONFIG, storage=StorageConfig() if run.storage else None, compression=case.compression)
        callbacks.insert(
            0, MemCheckpoint(run.directory / "run", resume=run.resume, config=config, attributes=case.attributes)
        )
    elif case.compression is not None:
        callbacks.append(AveragePlainly(case.compression))
    files = hooks.ModelCheckpoint(
        run.directory / "files",
        monitor="val_loss" if case.validate else None,
        save_top_k=2 if case.validate else 1,
        save_last=True,
        every_n_train_steps=case.every_n_train_steps,
    )
    if case.strategy != "fsdp1":  # gathering its shards on the CPU crashes torch 2.13 with SIGSEGV
        callbacks.append(files)
    if case.validate:
        callbacks.append(hooks.EarlyStopping("val_loss", patience=50))
    if case.ema:
        callbacks.append(hooks.EMAWeightAveraging(decay=0.9))
    if case.model == "finetuned":
        callbacks.append(hooks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=_half_more))
    if case.accumulation_schedule is not None:
        callbacks.append(hooks.GradientAccumulationScheduler(case.accumulation_schedule))
    if case.attributes:
        callbacks.append(Curriculum())
    if case.user_hooks:
        callbacks.append(Tally())
    if case.logger:
        callbacks.append(hooks.LearningRateMonitor())
    arguments: dict[str, Any] = {"max_epochs": EPOCHS, "accelerator": "cpu", **case.trainer}
    if run.ranks > 1 or case.strategy != "ddp":
        strategy = "ddp" if case.strategy == "ddp" else strategy_of(case.strategy, run.ranks)
        arguments |= {"strategy": strategy, "devices": run.ranks}
    if not case.validate:
        arguments["limit_val_batches"] = 0
    return pl.Trainer(
        logger=CSVLogger(run.directory / "csv") if case.logger else False,
        enable_checkpointing=files in callbacks,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **arguments,
    )


def _half_more(epoch: int) -> float:
    return 1.5


def outcome(trainer: Any, model: Net, control: Control) -> dict[str, Any]:
    """All state that an interruption might have changed."""
    files = trainer.checkpoint_callback or hooks.ModelCheckpoint("nowhere")
    stopping = [each for each in trainer.callbacks if isinstance(each, hooks.EarlyStopping)]
    average = [each._average_model for each in trainer.callbacks if hasattr(each, "_average_model")]
    tally = [each for each in trainer.callbacks if isinstance(each, Tally)]
    loops = trainer.fit_loop.epoch_loop
    return {
        "tensors": freeze(dict(itertools.chain(model.named_parameters(), model.named_buffers()))),
        "optimizers": freeze([optimizer.state_dict() for optimizer in trainer.optimizers]),
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "rng": freeze([torch.get_rng_state(), random.getstate(), np.random.get_state()]),
        "losses": dict(control.losses),
        "events": list(control.events),
        "callback_metrics": {name: float(value).hex() for name, value in trainer.callback_metrics.items()},
        "early_stopping": freeze([each.state_dict() for each in stopping]),
        "best_score": freeze(files.best_model_score),
        "best_scores": sorted(float(score) for score in files.best_k_models.values()),
        "average": freeze([None if each is None else each.state_dict() for each in average]),
        "tally": [(each.batches, each.sums) for each in tally],
        "reloads": getattr(trainer.datamodule, "reloads", None),
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "should_stop": trainer.should_stop,
        "batches_that_stepped": loops._batches_that_stepped,
        "total_batches": loops.total_batch_idx,
        "accumulate": trainer.accumulate_grad_batches,
        "files": sorted(os.listdir(files.dirpath)) if os.path.isdir(files.dirpath) else [],
        "residue": residue(trainer, model),
    }


def residue(trainer: Any, model: nn.Module) -> list[str]:
    """Our traces that a finished fit has left behind; there must be none."""
    loaders = CombinedLoader([trainer.train_dataloader, trainer.val_dataloaders]).flattened
    holders = {
        "module": model,
        "strategy": trainer.strategy,
        "fit_loop": trainer.fit_loop,
        "epoch_loop": trainer.fit_loop.epoch_loop,
        "val_loop": trainer.fit_loop.epoch_loop.val_loop,
        **{f"loader {index}": loader for index, loader in enumerate(loaders)},
        **{type(callback).__name__: callback for callback in trainer.callbacks},
    }
    found = []
    for owner, holder in holders.items():
        if isinstance(holder, MemCheckpoint):
            ours = holder._protection is not None and ["_protection"]
        else:
            ours = [name for name, value in getattr(holder, "__dict__", {}).items() if _is_ours(name, value)]
            if _is_ours("", holder):
                found.append(f"{owner} is a {type(holder).__name__}")
        found += [f"{owner}.{name}" for name in ours or ()]
    found += [f"warnings filter {each}" for each in warnings.filters if "resuming" in str(each[1])]
    return found


def _is_ours(name: str, value: Any) -> bool:
    kind = type(value)
    return any("memckpt" in text for text in (name, kind.__module__)) or kind.__name__.startswith("Grafted")


def differences(reference: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Differences, in any bit, between an interrupted run and the uninterrupted one; losses are noted, too."""
    apart = ("losses", "events", "residue")
    names = [name for name, value in reference.items() if name not in apart and found[name] != value]
    events = found["events"]
    if events and reference["events"][-len(events) :] != events:
        names.append("events")
    return names + found["residue"]


def sabotage(what: str) -> None:
    """Leave one part of the restore out, to test the comparison."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    match what:
        case "rng":
            for module in (resume, first_steps):
                module.rng = SimpleNamespace(**{**vars(rng), "restore": nothing})  # type: ignore[attr-defined]
        case "aggregates":
            LoggingState._restore_result = nothing  # type: ignore[method-assign]
        case "metrics":
            MetricStates.state_dict = lambda _: {}  # type: ignore[method-assign]
        case "restart flags":
            Reentry.finish = Reentry.abandon  # type: ignore[method-assign]
        case _:
            raise KeyError(what)


def interrupted(lab: Lab, kills: Sequence[Kill], case: Case, directory: Path, **arguments: Any) -> list[Ended]:
    """Kill a process of the run at each point in turn, then let one finish; returns all attempts."""
    run = LightningRun(case, directory, **arguments)
    return [finish(lab, train, replace(run, kill=kill)) for kill in [*kills, None]]


def check_exact(expected: Ended, attempts: Sequence[Ended]) -> None:
    """Check that an interrupted run equals the uninterrupted one, and that repeated steps were equal."""
    for rank, (theirs, ours) in enumerate(zip(expected.outcomes, attempts[-1].outcomes, strict=True)):
        assert differences(theirs, ours) == [], f"rank {rank}"
        assert values(attempts, rank) == values([expected], rank)
    assert unproved("".join(each.logs[0] for each in attempts)) == []
