"""The same training in a plain loop, with Lightning, with Accelerate and with transformers.Trainer."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from accelerate import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Subset
from transformers import PreTrainedConfig, PreTrainedModel, PrinterCallback, Trainer, TrainingArguments
from transformers.utils.logging import disable_progress_bar

import memckpt
from accelerate_plugin import MemCheckpointPlugin
from benchmarks.harness.turns import telling_failure
from benchmarks.workloads.gate import Ended, Gate, Task
from benchmarks.workloads.gpt import BATCH, OPTIMIZERS, redo_config
from examples.gpt import GPT, SIZES, Corpus
from lightning_memckpt import MemCheckpoint
from memckpt import AgentConfig
from transformers_memckpt import protect

#: The measured protection. Its agent soon leaves by itself if the measuring process is killed.
PROTECTION = replace(redo_config("lazy T=8"), agent=AgentConfig(linger_seconds=5.0))
#: The usual sizes, and a minimal one whose steps are mostly overhead of calls.
SHAPES = {**SIZES, "minimal": replace(SIZES["tiny"], layers=1, width=16, heads=1, context=16)}
_WINDOWS = 40_000
_STEPS = 1_000_000  # more than are ever run
_TALKATIVE = ("lightning.pytorch", "transformers", "lightning_memckpt", "accelerate_plugin", "transformers_memckpt")

# The first optimizer of a process imports torch's compiler: do it before processes are forked.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


def make_model(size: str) -> GPT:
    torch.manual_seed(0)
    return GPT(replace(SHAPES[size], dropout=0.0))


def make_optimizer(parameters: Iterable[torch.nn.Parameter]) -> tuple[Optimizer, Any]:
    """The optimizer and its scheduler; each framework annotates the latter's type differently."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, **OPTIMIZERS["fused"])
    return optimizer, CosineAnnealingLR(optimizer, _STEPS)


def make_data(size: str) -> Subset[tuple[Tensor, Tensor]]:
    corpus = Corpus(SHAPES[size].context)
    return Subset(corpus, range(min(_WINDOWS, len(corpus))))


def make_loader(size: str, gate: Gate) -> DataLoader[Any]:
    return DataLoader(make_data(size), BATCH, shuffle=True, collate_fn=gate)


# The loops


def plain_loop(task: Task, directory: Path, gate: Gate) -> None:
    model = make_model(task.size)
    optimizer, scheduler = make_optimizer(model.parameters())
    loader = make_loader(task.size, gate)
    gate.model = model
    with ExitStack() as stack:
        session: memckpt.Session | None = None
        if task.side == "memckpt":
            session = memckpt.attach(model, optimizer, run_dir=directory, config=PROTECTION)
            stack.enter_context(session)
            session.register("scheduler", scheduler)
            session.restore()
            gate.session = lambda: session
        for _ in range(_STEPS):
            for batch in loader:
                model.loss(*batch).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if session is not None:
                    session.commit()


class Module(pl.LightningModule):
    def __init__(self, size: str) -> None:
        super().__init__()
        self.gpt = make_model(size)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.gpt.loss(*batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = make_optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def lightning(task: Task, directory: Path, gate: Gate) -> None:
    module = Module(task.size)
    gate.model = module
    callbacks: list[pl.Callback] = []
    if task.side == "memckpt":
        ours = MemCheckpoint(directory, config=PROTECTION)
        callbacks.append(ours)
        gate.session = lambda: _session_of(ours)
    if task.side == "own":
        callbacks.append(ModelCheckpoint(directory, every_n_train_steps=1))
    trainer = pl.Trainer(
        max_epochs=-1,
        accelerator="cpu",
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=task.side == "own",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, make_loader(task.size, gate))


def accelerate(task: Task, directory: Path, gate: Gate) -> None:
    accelerator = Accelerator(cpu=True)
    gpt = make_model(task.size)
    objects: tuple[Any, ...] = (gpt, *make_optimizer(gpt.parameters()), make_loader(task.size, gate))
    gate.model = gpt
    with ExitStack() as stack:
        plugin: MemCheckpointPlugin | None = None
        epochs: Iterable[int] = range(_STEPS)
        if task.side == "memckpt":
            ours = plugin = MemCheckpointPlugin(accelerator, directory, config=PROTECTION)
            stack.enter_context(ours)
            objects = ours.prepare(*objects)
            epochs = ours.epochs(_STEPS)
            gate.session = lambda: ours._session
        else:
            objects = accelerator.prepare(*objects)
        model, optimizer, scheduler, loader = objects
        for _ in epochs:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model.loss(*batch))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if plugin is not None:
                    plugin.commit()
                if task.side == "own":
                    accelerator.save_state(str(directory / "state"))


class TransformersGPT(PreTrainedModel):
    """The same model for the Trainer, which saves models with tied tensors only if these are declared."""

    config_class = PreTrainedConfig
    _tied_weights_keys = {"gpt.head.weight": "gpt.tokens.weight"}  # noqa: RUF012

    def __init__(self, size: str) -> None:
        super().__init__(PreTrainedConfig())
        self.gpt = make_model(size)
        untyped: Any = self
        untyped.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Do nothing: the model is initialized already."""

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": self.gpt.loss(tokens, targets)}


def transformers(task: Task, directory: Path, gate: Gate) -> None:
    model = TransformersGPT(task.size)
    gate.model = model
    saving = task.side == "own"
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(directory / "trainer"),
            max_steps=_STEPS,
            per_device_train_batch_size=BATCH,
            max_grad_norm=0.0,  # the other loops do not clip
            save_strategy="steps" if saving else "no",
            save_steps=1,
            save_total_limit=1,
            remove_unused_columns=False,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        ),
        data_collator=lambda samples: dict(zip(("tokens", "targets"), gate(samples), strict=True)),
        train_dataset=make_data(task.size),
        optimizers=make_optimizer(model.parameters()),
    )
    trainer.remove_callback(PrinterCallback)
    if task.side == "memckpt":
        ours = protect(trainer, directory / "memckpt", config=PROTECTION)
        gate.session = lambda: _session_of(ours)
    trainer.train()


def _session_of(callback: MemCheckpoint | Any) -> memckpt.Session | None:
    protection: Any = callback._protection
    return protection._session if protection is not None else None


LOOPS: dict[str, Callable[[Task, Path, Gate], None]] = {
    "plain loop": plain_loop,
    "Lightning": lightning,
    "Accelerate": accelerate,
    "transformers.Trainer": transformers,
}


def train(task: Task, directory: Path, orders: Connection) -> None:
    """Main function of a process: train until no further steps are ordered."""
    logging.basicConfig(level=logging.ERROR)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    disable_progress_bar()  # of saving
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    gate = Gate(orders)
    try:
        with warnings.catch_warnings(), telling_failure(orders), suppress(Ended):
            warnings.simplefilter("ignore")
            LOOPS[task.framework](task, directory, gate)
    finally:
        gate.end_agent()
