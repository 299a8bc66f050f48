"""Runs of a case with Lightning in processes that are killed, and checks of their results."""

from __future__ import annotations

import itertools
import os
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn

from lightning_memckpt import MemCheckpoint
from lightning_memckpt.reentry import Reentry
from lightning_memckpt.trainer_state import LoggingState
from memckpt.capture.objects import MetricStates
from memckpt.config import AgentConfig, MemckptConfig, StorageConfig
from memckpt.session.resume import chosen, first_steps
from memckpt.state import rng
from tests.support.faults.check_lines import unproved
from tests.support.trainings import lightning_cases
from tests.support.trainings.compressed import note_encodings
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_programs import Ended, Kill, Run, finish, values
from tests.support.trainings.lightning_data import Case, Data, train_loader, validation_loader

EPOCHS = 3

# A failed test leaves an agent behind, which then ends soon.
CONFIG = MemckptConfig(agent=AgentConfig(linger_seconds=30), storage=None, resume_check="replay")


@dataclass(frozen=True)
class LightningRun(Run):
    """Parameters of one attempt.

    Attributes:
        resume, checkpoint: arguments of the callback, and of fit().
        storage: whether the run has a storage tier.
    """

    resume: str | int = "auto"
    checkpoint: str | None = None
    storage: bool = False


def train(run: LightningRun) -> dict[str, Any]:
    """Train the case to its end, in this process; dies at its planned point."""
    case = run.case
    control = lightning_cases.Control(run)
    if run.ranks > 1:  # as torchrun does
        os.environ.update(GROUP_RANK="0", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="test")
    pl.seed_everything(1, workers=case.seed_workers, verbose=False)
    plain, sharded = (
        (lightning_cases.NetWithHooks, lightning_cases.ShardedNetWithHooks)
        if case.user_hooks
        else (lightning_cases.Net, lightning_cases.ShardedNet)
    )
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


def make_trainer(run: LightningRun, control: lightning_cases.Control) -> Any:
    case = run.case
    callbacks: list[pl.Callback] = [lightning_cases.Watch(control)]
    if run.protected:
        config = replace(CONFIG, storage=StorageConfig() if run.storage else None, compression=case.compression)
        callbacks.insert(
            0, MemCheckpoint(run.directory / "run", resume=run.resume, config=config, attributes=case.attributes)
        )
    elif case.compression is not None:
        callbacks.append(lightning_cases.AveragePlainly(case.compression))
    files = ModelCheckpoint(
        run.directory / "files",
        monitor="val_loss" if case.validate else None,
        save_top_k=2 if case.validate else 1,
        save_last=True,
        every_n_train_steps=case.every_n_train_steps,
    )
    if case.strategy != "fsdp1":  # gathering its shards on the CPU crashes torch 2.13 with SIGSEGV
        callbacks.append(files)
    if case.validate:
        callbacks.append(EarlyStopping("val_loss", patience=50))
    if case.ema:
        from lightning.pytorch.callbacks import EMAWeightAveraging

        callbacks.append(EMAWeightAveraging(decay=0.9))
    if case.model == "finetuned":
        callbacks.append(BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=_half_more))
    if case.accumulation_schedule is not None:
        callbacks.append(GradientAccumulationScheduler(case.accumulation_schedule))
    if case.attributes:
        callbacks.append(lightning_cases.Curriculum())
    if case.user_hooks:
        callbacks.append(lightning_cases.Tally())
    if case.logger:
        callbacks.append(LearningRateMonitor())
    arguments: dict[str, Any] = {"max_epochs": EPOCHS, "accelerator": "cpu", **case.trainer}
    if run.ranks > 1 or case.strategy != "ddp":
        strategy = "ddp" if case.strategy == "ddp" else lightning_cases.strategy_of(case.strategy, run.ranks)
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


def outcome(trainer: Any, model: lightning_cases.Net, control: lightning_cases.Control) -> dict[str, Any]:
    """All state that an interruption might have changed."""
    files = trainer.checkpoint_callback or ModelCheckpoint("nowhere")
    stopping = [each for each in trainer.callbacks if isinstance(each, EarlyStopping)]
    average = [each._average_model for each in trainer.callbacks if hasattr(each, "_average_model")]
    tally = [each for each in trainer.callbacks if isinstance(each, lightning_cases.Tally)]
    loops = trainer.fit_loop.epoch_loop
    return {
        "tensors": lightning_cases.held_by_this_rank(
            dict(itertools.chain(model.named_parameters(), model.named_buffers()))
        ),
        "requires_grad": {name: each.requires_grad for name, each in model.named_parameters()},
        "optimizers": lightning_cases.held_by_this_rank([optimizer.state_dict() for optimizer in trainer.optimizers]),
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "rng": (torch.get_rng_state(), random.getstate(), np.random.get_state()),
        "losses": dict(control.losses),
        "events": list(control.events),
        "callback_metrics": {name: float(value).hex() for name, value in trainer.callback_metrics.items()},
        "early_stopping": [each.state_dict() for each in stopping],
        "best_score": files.best_model_score,
        "best_scores": sorted(float(score) for score in files.best_k_models.values()),
        "average": [None if each is None else each.state_dict() for each in average],
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


# Results that must equal the uninterrupted run's.
_EQUAL = (
    "tensors",
    "requires_grad",
    "optimizers",
    "schedulers",
    "rng",
    "callback_metrics",
    "early_stopping",
    "best_score",
    "best_scores",
    "average",
    "tally",
    "reloads",
    "global_step",
    "epoch",
    "should_stop",
    "batches_that_stepped",
    "total_batches",
    "accumulate",
    "files",
)


def differences(reference: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Differences, in any bit, between an interrupted run and the uninterrupted one."""
    names = [name for name in _EQUAL if not same(reference[name], found[name])]
    events = found["events"]
    if events and reference["events"][-len(events) :] != events:
        names.append("events")
    return names + found["residue"]


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, np.ndarray):
        return bool(np.array_equal(first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def sabotage(what: str) -> None:
    """Leave one part of the restore out, to test the comparison."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    match what:
        case "rng":
            for module in (chosen, first_steps):
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
