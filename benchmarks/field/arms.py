"""The training with each protection, in the form that its documentation shows.

Each program adds to the same training only what its protection asks for. Those that save what they are given get
everything from :meth:`Training.state_dict`: generators, schedule and place in the data, too.
"""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.field.gate import Gate
from benchmarks.field.training import (
    CLIP,
    SEED,
    Training,
    digests_of,
    make_loader,
    make_model,
    make_optimizer,
    make_schedule,
    make_stateful_loader,
)


@dataclass(frozen=True)
class Run:
    """Inputs of a program, from the benchmark.

    Attributes:
        gate: the way to the benchmark.
        directory: where it may write; the same at every start of the run.
        size, epochs, batches: of the training.
        every: steps between two saves.
        disk_every: steps between two saves to a disk, for those that save to memory, too.
    """

    gate: Gate
    directory: Path
    size: str
    epochs: int
    batches: int
    every: int
    disk_every: int

    def training(self, stateful: bool = False) -> Training:
        return Training(self.size, self.epochs, self.batches, stateful)


# Plain loops


def plain(run: Run) -> None:
    """Train without protection."""
    training = run.training()
    for batch in training.batches():
        run.gate.begin(training.step + 1)
        training.take_step(batch, run.gate)
    training.finish(run.gate)


def memckpt_plain(run: Run) -> None:
    import memckpt

    training = run.training()
    session = memckpt.attach(training.model, training.optimizer, run_dir=run.directory / "run")
    session.register("schedule", training.schedule)
    loader = session.loader(training.loader)
    session.restore()
    for _ in session.epochs(run.epochs):
        for batch in loader:
            run.gate.begin(training.step + 1)
            training.take_step(batch, run.gate)
            session.commit()
    training.finish(run.gate)
    session.close()


def ravex(run: Run) -> None:
    import ravex as library

    def train() -> None:
        training = run.training()
        for _ in range(run.epochs):
            for batch in training.loader:
                run.gate.begin(training.step + 1)
                training.take_step(batch, run.gate)
        training.finish(run.gate)

    storage = {"type": "local", "path": str(run.directory / "checkpoints")}
    library.train_loop(train, storage=storage, max_steps=run.epochs * run.batches)()


def torch_save(run: Run) -> None:
    """Save by ``torch.save``, under another name first."""
    training = run.training(stateful=True)
    path, unfinished = run.directory / "saved.pt", run.directory / "unfinished.pt"
    if path.exists():
        training.load_state_dict(torch.load(path, weights_only=True))
    for batch in training.batches():
        run.gate.begin(training.step + 1)
        training.take_step(batch, run.gate)
        if training.step % run.every == 0:
            torch.save(training.state_dict(), unfinished)
            unfinished.replace(path)
    training.finish(run.gate)


def dcp_async(run: Run) -> None:
    """Save by ``torch.distributed.checkpoint.async_save``; a checkpoint counts once it has its ``.metadata``."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import async_save

    training = run.training(stateful=True)
    saves = Saves(run.directory, ".metadata")

    def state() -> dict[str, Any]:
        model, optimizer = get_state_dict(training.model, training.optimizer)
        return {"model": model, "optimizer": optimizer, **training.surroundings()}

    newest = saves.newest()
    if newest is not None:
        found = state()
        load(found, checkpoint_id=newest, no_dist=True)
        set_state_dict(
            training.model, training.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
        )
        training.load_surroundings(found)
    pending: Any = None
    for batch in training.batches():
        run.gate.begin(training.step + 1)
        training.take_step(batch, run.gate)
        if training.step % run.every == 0:
            if pending is not None:
                pending.result()
            saves.keep(2)
            pending = async_save(state(), checkpoint_id=saves.path(training.step), no_dist=True)
    if pending is not None:
        pending.result()
    training.finish(run.gate)


def torch_checkpointing(run: Run) -> None:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    training = run.training(stateful=True)
    saves = Saves(run.directory)
    config = CheckpointManager.Config.with_async_save()
    # Its remedy for disks on which direct writes fail; where they work, they are for large files.
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = CheckpointManager(config)
    try:
        newest = saves.newest()
        if newest is not None:
            templates = dict.fromkeys(training.state_dict()) | {"model": training.model.state_dict()}
            training.load_state_dict(dict(manager.load(str(newest), into=templates)))

        for batch in training.batches():
            run.gate.begin(training.step + 1)
            training.take_step(batch, run.gate, manager.lock())  # parameters must not change while they are copied
            if training.step % run.every == 0:
                saves.keep(2)
                manager.save(str(saves.path(training.step)), training.state_dict())
        training.finish(run.gate)
    finally:
        manager.close()


def dlrover(run: Run) -> None:
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

    training = run.training(stateful=True)
    saves = Saves(run.directory)
    checkpointer = DdpCheckpointer(str(saves.root))
    found = checkpointer.load_checkpoint()
    if found:
        # On a CPU the optimizer would go on in the shared memory itself, beside parameters of the step before.
        training.load_state_dict(copy.deepcopy(found))
    for batch in training.batches():
        run.gate.begin(training.step + 1)
        training.take_step(batch, run.gate)
        step = training.step
        if step % run.disk_every == 0:
            checkpointer.save_checkpoint(step, training.state_dict(), storage_type=StorageType.DISK)
        elif step % run.every == 0:
            checkpointer.save_checkpoint(step, training.state_dict(), storage_type=StorageType.MEMORY)
    training.finish(run.gate)


def nvrx_local(run: Run) -> None:
    """Save by the local checkpoints of NVIDIA's resiliency extension."""
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

    rendezvous = (run.directory / "rendezvous").as_uri()
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    training = run.training(stateful=True)
    manager = LocalCheckpointManager(run.directory / "local")
    if manager.find_latest() != -1:
        found, _ = manager.load()
        training.load_state_dict(found.state_dict)
    for batch in training.batches():
        run.gate.begin(training.step + 1)
        training.take_step(batch, run.gate)
        if training.step % run.every == 0:
            manager.save(BasicTensorAwareStateDict(training.state_dict()), training.step)
    training.finish(run.gate)


def lm_resiliency(run: Run) -> None:
    from lm_resiliency import InMemoryCkptConfig, enable_resiliency

    training = run.training(stateful=True)

    def load(state: dict[str, Any]) -> None:
        training.load_surroundings(state)
        training.schedule.step()  # what is saved is the state behind optimizer.step(), in front of this

    handle = enable_resiliency(
        training.model,
        training.optimizer,
        interval=run.every,
        enable_detection=False,
        checkpoint=InMemoryCkptConfig(
            disk_flush_interval=run.disk_every,
            disk_folder=str(run.directory / "checkpoints"),
            run_id="field",
            pin_memory=False,
            verify_integrity=True,
        ),
        device=torch.device("cpu"),
        extra_state_fn=training.surroundings,
        load_extra_state_fn=load,
    )
    for batch in training.batches():
        run.gate.begin(training.step + 1)
        training.take_step(batch, run.gate)
    training.finish(run.gate)
    handle.close()


class Saves:
    """Directories of checkpoints named after their steps.

    Args:
        directory: of the run.
        mark: a file that a complete checkpoint has; empty: a checkpoint has its name only when it is complete.
    """

    def __init__(self, directory: Path, mark: str = "") -> None:
        self.root = directory / "saves"
        self.root.mkdir(exist_ok=True)
        self._mark = mark

    def path(self, step: int) -> Path:
        """Path of a step's checkpoint; what a kill has left there is removed."""
        path = self.root / f"step_{step}"
        shutil.rmtree(path, ignore_errors=True)
        return path

    def complete(self) -> list[Path]:
        """Complete checkpoints, the oldest first."""
        found = [path for path in self.root.iterdir() if re.fullmatch(r"step_\d+", path.name)]
        found = [path for path in found if (path / self._mark).exists()]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        return next(reversed(self.complete()), None)

    def keep(self, count: int) -> None:
        """Delete all but the newest complete ones."""
        for path in self.complete()[:-count]:
            shutil.rmtree(path)


# Lightning


def lightning(run: Run) -> None:
    """Train with Lightning, without protection."""
    _fit(run, make_loader(run.size, run.batches))


def lightning_steps(run: Run) -> None:
    """Save with ``ModelCheckpoint`` every so many steps."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(run.directory / "saves", every_n_train_steps=run.every, save_last="link")
    _fit(run, make_stateful_loader(run.size, run.batches), saving, ckpt_path="last")


def lightning_epochs(run: Run) -> None:
    """Save with ``ModelCheckpoint`` as it comes: behind each epoch."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(run.directory / "saves", save_last="link")
    _fit(run, make_stateful_loader(run.size, run.batches), saving, ckpt_path="last")


def memckpt_lightning(run: Run) -> None:
    from lightning_memckpt import MemCheckpoint

    _fit(run, make_loader(run.size, run.batches), MemCheckpoint(run.directory / "run"))


def _fit(run: Run, loader: Any, *callbacks: Any, ckpt_path: str | None = None) -> None:
    import lightning.pytorch as pl

    gate = run.gate

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = make_model(run.size)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            gate.begin(self.trainer.global_step + 1)
            loss: torch.Tensor = self.gpt.loss(*batch)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = make_optimizer(self)
            schedule = make_schedule(optimizer, run.epochs * run.batches)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Steps(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            gate.end(trainer.global_step, outputs["loss"], batch)

    module = Module()
    trainer = pl.Trainer(
        max_epochs=run.epochs,
        accelerator="cpu",
        devices=1,
        gradient_clip_val=CLIP,
        callbacks=[Steps(), *callbacks],
        enable_checkpointing=ckpt_path is not None,
        default_root_dir=run.directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    gate.finished(digests_of(module, trainer.optimizers[0]))


# Accelerate


def accelerate(run: Run) -> None:
    """Train with Accelerate, without protection."""
    from accelerate import Accelerator

    parts = Parts(run)
    parts.prepare(Accelerator(cpu=True))
    while parts.step < run.epochs * run.batches:
        for batch in parts.loader:
            parts.take_step(batch)
    parts.finish()


def accelerate_save_state(run: Run) -> None:
    """Save with ``save_state``, which numbers its checkpoints, a loader with a state and a sampler with a seed."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration

    project = ProjectConfiguration(str(run.directory), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(
        cpu=True,
        project_config=project,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True),
    )
    parts = Parts(run, own_generator=True)
    parts.prepare(accelerator)
    saved = [int(path.name.rpartition("_")[2]) for path in (run.directory / "checkpoints").glob("checkpoint_*")]
    if saved:
        accelerator.load_state()
        project.iteration = max(saved) + 1
    for epoch in range(parts.step // run.batches, run.epochs):
        parts.loader.set_epoch(epoch)
        for batch in parts.loader:
            parts.take_step(batch)
            if parts.step % run.every == 0:
                accelerator.save_state()
    parts.finish()


def memckpt_accelerate(run: Run) -> None:
    from accelerate import Accelerator

    from accelerate_plugin import MemCheckpointPlugin

    accelerator = Accelerator(cpu=True)
    parts = Parts(run)
    protection = MemCheckpointPlugin(accelerator, run.directory / "run")
    parts.prepare(accelerator, protection.prepare)
    for _ in protection.epochs(run.epochs):
        for batch in parts.loader:
            parts.take_step(batch)
            protection.commit()
    parts.finish()
    protection.close()


class Parts:
    """The training's parts for Accelerate, which wraps them."""

    def __init__(self, run: Run, own_generator: bool = False) -> None:
        from accelerate.utils import set_seed

        set_seed(SEED)
        self._run = run
        self.model: Any = make_model(run.size)
        self.optimizer: Any = make_optimizer(self.model)
        self.schedule: Any = make_schedule(self.optimizer, run.epochs * run.batches)
        self.loader: Any = make_loader(run.size, run.batches, own_generator)

    def prepare(self, accelerator: Any, prepare: Callable[..., Any] | None = None) -> None:
        """Have them wrapped; `prepare`: in place of the accelerator's own."""
        self._accelerator = accelerator
        wrapped = (prepare or accelerator.prepare)(self.model, self.optimizer, self.loader, self.schedule)
        self.model, self.optimizer, self.loader, self.schedule = wrapped

    @property
    def step(self) -> int:
        """Steps taken, by the schedule's count."""
        return int(self.schedule.scheduler.last_epoch)

    def take_step(self, batch: Any) -> None:
        """Take a step and report it."""
        step = self.step + 1
        self._run.gate.begin(step)
        tokens, targets = batch
        loss = torch.nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        self._accelerator.backward(loss)
        self._accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self._run.gate.end(step, loss.detach(), batch)

    def finish(self) -> None:
        """Report the final state."""
        optimizer = self.optimizer.optimizer
        self._run.gate.finished(digests_of(self._accelerator.unwrap_model(self.model), optimizer))


PROGRAMS: dict[str, Callable[[Run], None]] = {
    program.__name__: program
    for program in (
        plain, memckpt_plain, torch_save, dcp_async, torch_checkpointing, dlrover, nvrx_local, lm_resiliency, ravex,
        lightning, lightning_steps, lightning_epochs, memckpt_lightning,
        accelerate, accelerate_save_state, memckpt_accelerate,
    )
}  # fmt: skip
