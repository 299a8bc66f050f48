"""Programs with habits that Lightning allows: after kills they end as if they had never been killed, or say so.

A program says values under keys. What it says in all of its attempts has to be what an undisturbed run without memckpt
says.
"""

from __future__ import annotations

import copy
import csv
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from lightning_memckpt import MemCheckpoint
from memckpt.config import AgentConfig, MemckptConfig, StorageConfig
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_programs import Process, Run, finish, values

CONFIG = MemckptConfig(agent=AgentConfig(linger_seconds=30), storage=None, resume_check="replay")
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class Attempt(Process):
    """One process of a program, which may die where it comes by a point for the first time.

    Attributes:
        variant: what the program shall do otherwise.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.directory, self.variant = run.directory, run.case

    def reach(self, point: object) -> None:
        self.at(str(point))

    def say(self, key: str, *values: Any) -> None:
        self.note(key, "", values)

    def trainer(
        self,
        *callbacks: pl.Callback,
        attributes: Sequence[str] = (),
        storage: StorageConfig | None = None,
        **arguments: Any,
    ) -> pl.Trainer:
        config = replace(CONFIG, storage=storage)
        ours = (
            [MemCheckpoint(self.directory / "run", config=config, attributes=attributes)] if self.run.protected else []
        )
        return pl.Trainer(
            callbacks=[*callbacks, *ours], default_root_dir=self.directory / "files", **{**QUIET, **arguments}
        )


def samples(count: int = 40, seed: int = 3) -> TensorDataset:
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def shuffled(count: int = 40, seed: int = 3) -> DataLoader[Any]:
    return DataLoader(samples(count, seed), batch_size=8, shuffle=True)


class Small(pl.LightningModule):
    def __init__(self, attempt: Attempt) -> None:
        super().__init__()
        self.__dict__["attempt"] = attempt
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            return torch.stack([self.loss(each) for each in batch.values() if each is not None]).sum()
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.attempt.reach(self.global_step)
        loss = self.loss(batch)
        self.attempt.say(f"train {self.current_epoch} {batch_idx}", self.global_step, loss.item().hex())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.attempt.reach(f"val{self.global_step}")
        loss = self.loss(batch)
        self.log("val_loss", loss)
        self.attempt.say(f"val {self.global_step} {batch_idx}", loss.item().hex())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)

    def on_train_end(self) -> None:
        self.attempt.say("end", self.current_epoch, self.global_step, torch.rand(1).item().hex())


# What loaders are built from


class Chunks(pl.LightningDataModule):
    """Each building takes the next chunk; validation loaders draw, and read the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.chunk = {"train": 0, "validation": 0}

    def train_dataloader(self) -> Any:
        self.chunk["train"] += 1
        return shuffled(40, 100 + self.chunk["train"])

    def val_dataloader(self) -> Any:
        self.chunk["validation"] += 1
        drawn = int(torch.randint(0, 9, ()))
        return DataLoader(samples(16, 200 + 10 * self.trainer.current_epoch + self.chunk["validation"] + drawn), 8)  # type: ignore[union-attr]


class KeepsChunks(Chunks):
    def state_dict(self) -> dict[str, Any]:
        return dict(self.chunk)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.chunk = dict(state)


class MakesUp(KeepsChunks):
    """As one does for Lightning's own restarts, which build the loaders once more."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.chunk = {name: count - 1 for name, count in state.items()}


class ReadsTheTrainer(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        trainer: Any = self.trainer
        loss = trainer.callback_metrics.get("val_loss", torch.zeros(()))
        return shuffled(40, 100 + trainer.current_epoch + 7 * trainer.global_step + int(loss * 1000) % 97)

    def val_dataloader(self) -> Any:
        return DataLoader(samples(16, 200 + self.trainer.current_epoch), 8)  # type: ignore[union-attr]


def loaders_that_are_built_anew(attempt: Attempt) -> None:
    kind, every, *more = attempt.variant.split()
    data = {"chunks": Chunks, "keeps": KeepsChunks, "makes-up": MakesUp, "reads": ReadsTheTrainer}[kind]()
    names = ["datamodule.chunk"] if kind == "chunks" else []
    arguments = {"check_val_every_n_epoch": 2} if "seldom" in more else {}
    sanity = 2 if "sanity" in more else 0
    attempt.trainer(
        max_epochs=4,
        attributes=names,
        reload_dataloaders_every_n_epochs=int(every),
        num_sanity_val_steps=sanity,
        **arguments,
    ).fit(Small(attempt), datamodule=data)


def loaders_of_a_module(attempt: Attempt) -> None:
    class Own(Small):
        chunk = 0

        def train_dataloader(self) -> Any:
            self.chunk += 1
            return shuffled(40, 100 + self.chunk)

        if attempt.variant == "hooks":

            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                checkpoint["chunk"] = self.chunk

            def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                self.chunk = checkpoint["chunk"]

    names = [] if attempt.variant == "hooks" else ["module.chunk"]
    attempt.trainer(max_epochs=4, attributes=names, reload_dataloaders_every_n_epochs=2).fit(Own(attempt))


def the_model_chooses_the_data(attempt: Attempt) -> None:
    class Hard(Small):
        def train_dataloader(self) -> Any:
            with torch.no_grad():
                order = self.net.eval()(samples()[:][0]).squeeze(1).argsort()
            self.net.train()
            return DataLoader(torch.utils.data.Subset(samples(), order[:24].tolist()), 8)

    attempt.trainer(max_epochs=4, reload_dataloaders_every_n_epochs=2).fit(Hard(attempt))


# Loaders without a length


class Endless(Sampler[int]):
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(4)

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(40, generator=self.generator).tolist()


class Uneven(Sampler[list[int]]):
    """Batches of a length that shows only when they come."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(40).tolist()
        while order:
            size = 3 + order[0] % 5
            yield order[:size]
            order = order[size:]


class Stream(IterableDataset[Any]):
    def __init__(self, count: int = 22, noise: float = 0.0) -> None:
        self.count = count
        self.noise = noise

    def __iter__(self) -> Iterator[Any]:
        for row in range(self.count):
            inputs = torch.randn(8, generator=torch.Generator().manual_seed(row))
            if self.noise:
                inputs += torch.rand(8) * self.noise
            yield inputs, inputs.sum(0, keepdim=True)


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        inputs = torch.randn(8, generator=torch.Generator().manual_seed(index)) + torch.rand(8) * 0.1
        return inputs, inputs.sum(0, keepdim=True) + random.random() * 0.1


def loaders_without_a_length(attempt: Attempt) -> None:
    kind, *more = attempt.variant.split()
    workers: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"} if "workers" in more else {}
    arguments: dict[str, Any] = {"max_epochs": 3}
    if kind == "sampler":
        loader: Any = DataLoader(Noisy(), 8, sampler=Endless(), **workers)
        arguments = {"max_steps": 16, "max_epochs": -1}
    elif kind == "batches":
        loader = DataLoader(Noisy(), batch_sampler=Uneven(), **workers)
    elif kind == "stream":
        loader = DataLoader(Stream(noise=0.1 if "noisy" in more else 0.0), 4, **workers)
    else:
        both = {"a": DataLoader(Noisy(), 8, shuffle=True, **workers), "b": DataLoader(Stream(60), 4, **workers)}
        loader = CombinedLoader(dict(reversed(both.items())) if "reversed" in more else both, kind)  # type: ignore[arg-type]
        if "limited" in more:
            arguments["limit_train_batches"] = 9
    attempt.trainer(**arguments).fit(Small(attempt), loader, DataLoader(samples(16, 5), 8))


def steps_that_take_their_batches(attempt: Attempt) -> None:
    each, *more = attempt.variant.split()

    class Takes(Small):
        waiting: Any = None

        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            self.attempt.reach(self.global_step)
            if "ahead" in more and self.waiting is None:
                self.waiting = next(dataloader_iter)
            taken = [next(dataloader_iter) for _ in range(int(each))]
            if "ahead" in more:
                taken, self.waiting = [self.waiting], taken[0]
            loss = torch.stack([self.loss(batch) for batch, _, _ in taken]).sum()
            self.attempt.say(f"train {self.global_step}", loss.item().hex(), [number for _, number, _ in taken])
            return loss

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.attempt.say(f"batch {self.global_step}", batch_idx)

    loader = DataLoader(samples(48), 8, sampler=Endless()) if "endless" in more else shuffled(48)
    limit = {"limit_train_batches": 6} if "endless" in more else {}
    attempt.trainer(max_epochs=3, **limit).fit(Takes(attempt), loader, DataLoader(samples(16, 5), 8))


# Files and rows


def checkpoint_files(attempt: Attempt) -> None:
    files = attempt.directory / "kept"
    saves: dict[str, Any] = {"filename": "{epoch}-{step}", "save_top_k": -1}
    saves |= {"every_n_train_steps": 2} if "steps" in attempt.variant else {"save_on_train_epoch_end": False}
    arguments: dict[str, Any] = {"val_check_interval": 3} if "often" in attempt.variant else {}
    callback = ModelCheckpoint(files, **saves)
    attempt.trainer(callback, max_epochs=3, enable_checkpointing=True, **arguments).fit(
        Small(attempt), shuffled(), DataLoader(samples(24, 5), 8)
    )
    for file in sorted(files.iterdir()):
        attempt.say(file.name, torch.load(file, weights_only=False)["loops"]["fit_loop"])


def rows_of_a_table(attempt: Attempt) -> None:
    class Logged(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_step=True, on_epoch=True)
            if self.global_step > 8:
                self.log("late", loss * 2)
            return loss

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.attempt.reach(f"start{self.global_step}")

    logger = CSVLogger(attempt.directory, name="table", version="fixed")
    each, *stored = attempt.variant.split()
    storage = StorageConfig() if stored else None
    attempt.trainer(max_epochs=3, logger=logger, log_every_n_steps=int(each), storage=storage).fit(
        Logged(attempt), shuffled(), DataLoader(samples(16, 5), 8)
    )
    with (attempt.directory / "table" / "fixed" / "metrics.csv").open() as file:
        rows = [{key: value for key, value in row.items() if "memckpt/" not in key} for row in csv.DictReader(file)]
    kept = [row for row in rows if any(value for key, value in row.items() if key not in ("step", "epoch"))]
    attempt.say("rows", [sorted((key, value) for key, value in row.items() if value) for row in kept])
    visible = [each for each in os.listdir(attempt.directory / "table" / "fixed") if not each.startswith(".")]
    attempt.say("files", sorted(visible))


# Objects beside tensors


class Anneals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generators = {"python": random.Random(3)}

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.generators["python"].random() * 0.01


class Adds(pl.Callback):
    def __init__(self) -> None:
        self.noise = np.random.default_rng(7)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        module.added = float(self.noise.random())


class Average:
    """As libraries keep one, with tensors in its state."""

    def __init__(self, size: int) -> None:
        self.mean = torch.zeros(size)

    def update(self, value: Tensor) -> None:
        self.mean = self.mean * 0.9 + value

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


def objects_of_the_module(attempt: Attempt) -> None:
    class Own(Small):
        def __init__(self, attempt: Attempt) -> None:
            super().__init__(attempt)
            self.noise = torch.Generator().manual_seed(5)
            self.several = [np.random.default_rng(3), np.random.RandomState(2)]
            self.net.append(Anneals())
            self.average = Average(1 << 17 if "large" in attempt.variant else 1)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.02)
            milestones = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 8, 8, 12], 0.5)
            self.schedule = torch.optim.lr_scheduler.ChainedScheduler([milestones], optimizer)
            return optimizer

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            moved = (
                torch.randn(batch[0].shape, generator=self.noise) + self.several[0].random() + self.several[1].rand()
            )
            loss = super().training_step((batch[0] + moved * 0.1 + self.added, batch[1]), batch_idx)
            self.average.update(loss.detach())
            return loss + 0.01 * self.average.mean[0] * self.net[0].weight.sum()

        def on_train_batch_end(self, *_: Any) -> None:
            self.schedule.step()

    names = ["module.noise", "module.several.0", "module.schedule", "callbacks.Adds.noise"]
    names += ["module.average"] if "large named" in attempt.variant else []
    attempt.trainer(Adds(), max_epochs=3, attributes=names if "named" in attempt.variant else ()).fit(
        Own(attempt), shuffled()
    )


class KeepsAnAverage(pl.Callback):
    average: nn.Module | None = None

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.average is None and trainer.global_step >= 2:
            self.average = copy.deepcopy(module.net)
        for mine, new in zip(self.average.parameters() if self.average else (), module.net.parameters(), strict=False):
            mine.data.lerp_(new.data, 0.1)


def an_average_made_late(attempt: Attempt) -> None:
    attempt.trainer(KeepsAnAverage(), max_epochs=3).fit(Small(attempt), shuffled())


def an_average_that_is_saved(attempt: Attempt) -> None:
    """Its tensors, in a dict of a callback, are those that the callback saves."""

    class Saves(pl.Callback):
        shadow: dict[str, Tensor]

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            if not hasattr(self, "shadow"):
                self.shadow = {name: each.detach().clone() for name, each in module.state_dict().items()}

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            for name, each in module.state_dict().items():
                self.shadow[name].mul_(0.9).add_(each.detach(), alpha=0.1)

        def state_dict(self) -> dict[str, Any]:
            return {"shadow": self.shadow}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.shadow = state["shadow"]

        def on_fit_end(self, trainer: Any, module: Any) -> None:
            attempt.say("average", *(each.sum().item().hex() for each in self.shadow.values()))

    attempt.trainer(Saves(), max_epochs=3).fit(Small(attempt), shuffled(), DataLoader(samples(16, 5), 8))


# Steps and flags


class ChangesSettings(pl.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            trainer.accumulate_grad_batches, trainer.gradient_clip_val = 2, 0.01


def settings_that_training_changes(attempt: Attempt) -> None:
    attempt.trainer(ChangesSettings(), max_epochs=3).fit(Small(attempt), shuffled())


def accumulation_of_ones_own(attempt: Attempt) -> None:
    class Waits(Small):
        def optimizer_step(self, epoch: Any, batch_idx: Any, optimizer: Any, closure: Any = None) -> None:
            optimizer.step(closure=closure) if batch_idx % 3 == 2 else closure()

        def optimizer_zero_grad(self, epoch: Any, batch_idx: Any, optimizer: Any) -> None:
            if batch_idx % 3 == 0:
                optimizer.zero_grad()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.attempt.reach(f"{self.current_epoch} {batch_idx}")
            return super().training_step(batch, batch_idx)

    attempt.trainer(max_epochs=3, limit_train_batches=7).fit(Waits(attempt), shuffled(56))


def modes_of_modules(attempt: Attempt) -> None:
    class Frozen(Small):
        def __init__(self, attempt: Attempt) -> None:
            super().__init__(attempt)
            self.norm = nn.BatchNorm1d(8)

        def loss(self, batch: Any) -> Tensor:
            return super().loss((self.norm(batch[0]), batch[1]))

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.norm.eval()
                self.net[2].eval()

    attempt.trainer(max_epochs=3).fit(Frozen(attempt), shuffled(), DataLoader(samples(16, 5), 8))


def trainers_in_turns(attempt: Attempt) -> None:
    """Two Trainers with one run directory, each of which goes on with its own."""

    class Turn(Small):
        def __init__(self, name: str) -> None:
            super().__init__(attempt)
            self.named = name

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.attempt.reach(f"{self.named} {self.global_step}")
            loss = self.loss(batch)
            self.attempt.say(f"{self.named} {self.global_step}", loss.item().hex())
            return loss

        def on_train_end(self) -> None:
            self.attempt.say(f"{self.named} ends {self.global_step}", [each.tolist() for each in self.parameters()])

    storage = StorageConfig() if attempt.variant == "stored" else None
    both = [(attempt.trainer(max_epochs=0, storage=storage), Turn(name)) for name in ("first", "second")]
    for epochs in (1, 2):
        for trainer, module in both:
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(module, shuffled())


# Runs


def survive(lab: Lab, program: Callable[[Attempt], None], kills: Sequence[str], variant: str = "") -> tuple[Any, str]:
    """Kill a program at these points in turn, or let it end (""), then let it end.

    Returns:
        What differs from an undisturbed run, by key, and the output of all attempts.
    """

    def body(run: Run) -> None:
        pl.seed_everything(1, verbose=False)
        program(Attempt(run))

    run = Run(variant, lab.directory)
    expected = finish(lab, body, replace(run, directory=lab.directory / "undisturbed", protected=False))
    points = [*((kill, 1) if kill else None for kill in kills), None]
    attempts = [finish(lab, body, replace(run, kill=point)) for point in points]
    ours, theirs = values(attempts, 0), values([expected], 0)
    differing = {
        key: (theirs.get(key), ours.get(key)) for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)
    }
    return differing, "".join(each.log for each in attempts)


Program = Callable[[Attempt], None]


BUILT = [("keeps 1", ["8", "17"]), ("keeps 0", ["3", "8"]), ("chunks 2", ["17"]), ("makes-up 2", ["17"])]
BUILT += [("reads 2 sanity", ["7", "val15", "17"]), ("keeps 2 seldom", ["8", "17"])]
UNSIZED = [("sampler", ["4", "9"]), ("batches", ["4", "13"]), ("stream", ["2", "8"]), ("sampler workers", ["4", "9"])]
UNSIZED += [("max_size_cycle", ["2", "7", "17"]), ("max_size", ["2", "7", "17"]), ("min_size", ["2", "7", "12"])]
UNSIZED += [("max_size_cycle reversed", ["2", "7", "17"]), ("max_size workers", ["7", "17"])]
UNSIZED += [("max_size_cycle limited", ["7", "12"])]
CASES: list[tuple[Program, str, list[str]]] = [
    (an_average_that_is_saved, "", ["4", "val10", "12"]),
    *((loaders_that_are_built_anew, *each) for each in BUILT),
    (loaders_of_a_module, "hooks", ["3", "12", "17"]),
    (loaders_of_a_module, "named", ["12"]),
    *((loaders_without_a_length, *each) for each in UNSIZED),
    (steps_that_take_their_batches, "2", ["1", "4"]),
    (steps_that_take_their_batches, "1", ["2", "8"]),
    (steps_that_take_their_batches, "1 endless", ["2", "8"]),
    (checkpoint_files, "", ["val5", "8", "val15"]),
    (checkpoint_files, "steps often", ["4", "val8", "12"]),
    (rows_of_a_table, "1", ["3", "val5", "start7", "12"]),
    (rows_of_a_table, "3", ["7", "val15"]),
    (rows_of_a_table, "1 stored", ["7", ""]),
    (objects_of_the_module, "", ["4", "11"]),
    (objects_of_the_module, "named", ["4", "11"]),
    (objects_of_the_module, "large named", ["4"]),
    (accumulation_of_ones_own, "", ["0 4", "1 1", "2 5"]),
    (modes_of_modules, "", ["7", "val10", "12"]),
    (settings_that_training_changes, "", ["4", "7"]),
    (trainers_in_turns, "stored", []),
    (trainers_in_turns, "", ["first 3", "second 3"]),
]


@pytest.mark.promise(
    "generators, and objects with `state_dict()` and `load_state_dict()`, on the model and its modules, also in a "
    "list, tuple, deque or dict there"
)
@pytest.mark.parametrize(
    ("program", "variant", "kills"),
    CASES,
    ids=[f"{program.__name__} {variant}".strip() + " unkilled" * (not kills) for program, variant, kills in CASES],
)
def test_as_if_never_killed(program: Program, variant: str, kills: list[str], lab: Lab) -> None:
    differing, log = survive(lab, program, kills, variant)
    assert differing == {}, log[-3000:]
    assert "not exact" not in log
    assert "DIFFERENT" not in log
    assert "will not be exact" not in log
    assert log.count("resumed at step") >= len(kills) - 1


def test_a_start_behind_a_later_training_says_which_it_takes_up(lab: Lab) -> None:
    differing, log = survive(lab, trainers_in_turns, ["second 3", "first 7", "second 8"], "stored")
    assert differing == {}, log[-3000:]
    assert "training-2. If this start has skipped those before it" in log


@pytest.mark.parametrize(
    ("program", "variant", "said"),
    [
        (the_model_chooses_the_data, "", "the model runs while train loaders are built"),
        (steps_that_take_their_batches, "1 ahead", "those taken in advance are left out"),
        (loaders_without_a_length, "stream noisy", "draws from the global generator of"),
        (objects_of_the_module, "large", "name it in `attributes`"),
        (an_average_made_late, "", "changes and is not carried: it came while training ran"),
    ],
)
def test_what_cannot_be_is_said(program: Program, variant: str, said: str, lab: Lab) -> None:
    _, log = survive(lab, program, ["4", "8"], variant)
    assert said in log
    assert "training does not go on exactly" in log
