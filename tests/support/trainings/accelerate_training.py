"""The training with Accelerate whose processes are killed, and the places where they are."""

from __future__ import annotations

import os
import pickle
import random
import select
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset

import memckpt
from accelerate_plugin import MemCheckpointPlugin
from memckpt.config import CompressionConfig, MemckptConfig
from tests.support.cluster.processes import die_after, kill_and_wait, live_on
from tests.support.faults.frozen import freeze
from tests.support.trainings.compressed import average_plainly, note_encodings
from tests.support.trainings.engine_child import Journal, config

EPOCHS = 3
#: Place of a process's death in the training, and the number of its passes there.
Kill = tuple[str, int]
#: A pseudo-place: so many milliseconds after the first batch.
INSTANT = "instant"


@dataclass(frozen=True)
class Case:
    """Variant of the training.

    Attributes:
        loading: arguments of Accelerate's DataLoaderConfiguration.
        loader: arguments of the DataLoader.
        accumulate: micro-batches of a step.
        accelerator: further arguments of the Accelerator.
        scaler: scale gradients as in fp16, in a range in which some steps overflow.
        evaluate_every: batches between evaluations inside the loop, before the commit.
        limit: batches after which each epoch is left.
        stream: an IterableDataset.
        own_loader: the user's loader is torchdata's.
        two: a second loader, iterated together with the first.
        evaluation_loader: evaluate on a prepared loader, with these arguments; ``elsewhere``: one that the plugin does
            not prepare.
        cut: sharding by the user before the model is prepared: "", "fsdp2" or "fsdp1".
        saves: Accelerate's own save_state in the first epoch, and load_state some batches later.
        compression: how gradients are averaged.
    """

    name: str
    samples: int = 44
    loading: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    accelerator: dict[str, Any] = field(default_factory=dict)
    scaler: bool = False
    evaluate_every: int = 0
    limit: int = 0
    stream: bool = False
    own_loader: bool = False
    two: bool = False
    cut: str = ""
    saves: bool = False
    evaluation_loader: dict[str, Any] | None = None
    compression: CompressionConfig | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Run:
    """Parameters of a run's processes.

    Attributes:
        directory: directory of this run alone.
        protected: with the plugin, or without for the reference.
        kill: point at which a rank dies; None to train to the end.
        victim: the rank that dies.
        hooks: further actions, by place.
        config: configuration of the plugin.
        sabotage: called before anything else.
    """

    case: Case
    directory: Path
    protected: bool = True
    kill: Kill | None = None
    ranks: int = 1
    victim: int = 0
    config: MemckptConfig = field(default_factory=config)
    hooks: dict[Kill, Callable[[Training], None]] = field(default_factory=dict)
    sabotage: Callable[[], None] | None = None


def cut(model: Any, how: str) -> Any:
    """The model, with its parameters sharded over the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    if how == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for each in (model[0], model[4], model):
        fully_shard(each, mesh=mesh)
    return model


def held(value: Any) -> Any:
    """This rank's shard of a DTensor; any other value as it is."""
    return value.to_local() if hasattr(value, "to_local") else value


class Samples(Dataset[Any]):
    """Adds noise from all three global generators to each sample."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = torch.randn(count, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(8) * 0.01 + random.random() * 0.01 + float(np.random.rand()) * 0.01
        return self.x[index] + noise, self.y[index]


class Stream(IterableDataset[Any]):
    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self.samples)):
            yield self.samples[index]


class Average:
    """A user object, registered with the Accelerator, that every step changes."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class Probe:
    """An object registered with the plugin: called in the middle of a commit."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def state_dict(self) -> dict[str, int]:
        self._training.at("commit")
        return {"nothing": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"nothing": 0}


class Training:
    """One process of a run."""

    def __init__(self, run: Run, rank: int) -> None:
        self.run, self.rank = run, rank
        self.journal = Journal(run.directory / f"journal-{rank}")
        self.plugin: MemCheckpointPlugin | None = None
        self._visits: dict[str, int] = {}
        self._dies = run.kill if rank == run.victim else None
        case = run.case
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=case.accumulate,
            dataloader_config=DataLoaderConfiguration(**case.loading),
            **case.accelerator,
        )
        if case.scaler:  # Accelerate makes one for accelerators only
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
        torch.manual_seed(1)
        self.model: Any = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.LayerNorm(16), nn.Dropout(0.3), nn.Linear(16, 1)
        )
        if case.cut:
            self.model = cut(self.model, case.cut)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 60)
        self.samples = Samples(case.samples)
        self.average = Average()
        self.accelerator.register_for_checkpointing(self.average)
        seed = 50 + rank
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)

    def at(self, place: str) -> None:
        """Note that training passes a named place: die here, or run its hook."""
        visit = self._visits[place] = self._visits.get(place, 0) + 1
        if self._dies is not None and self._dies[0] == INSTANT and (place, visit) == ("batch", 1):
            die_after(self._dies[1] / 1000)
        hook = self.run.hooks.get((place, visit))
        if hook is not None:
            hook(self)
        if self._dies == (place, visit):
            self.journal.note("killed", place=place, visit=visit)
            os.kill(os.getpid(), signal.SIGKILL)

    def _loader(self) -> Any:
        case = self.run.case
        kind: Any = DataLoader
        if case.own_loader:
            from torchdata.stateful_dataloader import StatefulDataLoader

            kind = StatefulDataLoader
        if case.loader.get("num_workers"):
            arguments = {"multiprocessing_context": "fork", "worker_init_fn": self._note_worker, **case.loader}
        else:
            arguments = case.loader
        if case.stream:
            return kind(Stream(self.samples), 4, **arguments)
        return kind(self.samples, 4, shuffle=True, **arguments)

    def _note_worker(self, number: int) -> None:
        self.journal.note("worker", pid=os.getpid())

    def _prepare(self) -> list[Any]:
        objects = [self.model, self.optimizer, self._loader(), self.scheduler]
        if self.run.case.two:
            objects.append(self._loader())
        if self.run.case.evaluation_loader is not None:
            arguments = dict(self.run.case.evaluation_loader)
            elsewhere = arguments.pop("elsewhere", False)
            evaluated = DataLoader(Samples(12), 4, shuffle=True, **arguments)
            objects.append(self.accelerator.prepare(evaluated) if elsewhere else evaluated)
        if not self.run.protected:
            if self.run.case.cut:  # otherwise Accelerate would wrap it into DDP
                objects[0] = self.accelerator.prepare_model(self.model, evaluation_mode=True)
            plain = list(self.accelerator.prepare(*objects))
            if self.run.case.compression is not None:
                average_plainly(plain[0], self.run.case.compression)
            return plain
        settings = replace(self.run.config, compression=self.run.case.compression)
        if settings.compression is not None:
            note_encodings(self.run.directory / f"encodings-{self.rank}")
        self.plugin = MemCheckpointPlugin(self.accelerator, self.run.directory / "run", config=settings)
        prepared = self.plugin.prepare(*objects)
        self.plugin.register("probe", Probe(self))
        session = self.plugin._session
        assert session is not None
        step = self.plugin.step if session.check.step is None else session.check.step  # the held step is repeated
        self.journal.note("attached", step=step, agent=session.agent_pid)
        return list(prepared)

    def train(self) -> None:
        prepared = self._prepare()
        self.model, self.optimizer, loader, self.scheduler = prepared[:4]
        self.loader = loader
        if self.run.case.evaluation_loader is not None:
            self.evaluation_loader = prepared[-1]
        if self.run.case.cut:
            self._evaluate((-1,))  # leaves whole parameters with initial values in the outermost module
        plugin = self.plugin
        for epoch in range(EPOCHS) if plugin is None else plugin.epochs(EPOCHS):
            first = 0 if plugin is None else plugin.batch
            self.journal.note("epoch", epoch=epoch)
            torch.rand(first + 1)  # draws at the top of an epoch must not affect the resume
            if first == 0:
                self.note("draw", (epoch,), torch.rand(()))
            batches = zip(loader, prepared[4], strict=True) if self.run.case.two else loader
            for number, batch in enumerate(batches, start=first):
                self._batch(epoch, number, batch)
                if number + 1 == self.run.case.limit:
                    break
            self.at("epoch end")
            self._evaluate((epoch,))
            self.at("evaluated")
        self.at("end")
        live_on()  # a process that dies after the end has nothing to continue
        self.report("result")
        if plugin is not None:
            plugin.close()

    def note(self, kind: str, place: tuple[int, ...], value: torch.Tensor) -> None:
        self.journal.note(kind, place=list(place), value=float(value.detach()).hex())

    def _batch(self, epoch: int, number: int, batch: Any) -> None:
        self.at("batch")
        parts = batch if self.run.case.two else [batch]
        x, y = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        with self.accelerator.accumulate(self.model):
            with self.accelerator.autocast():
                loss = nn.functional.mse_loss(self.model(x), y)
            self.accelerator.backward(loss)
            self.at("backward")
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.at("stepped")
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.average.value = 0.9 * self.average.value + float(loss.detach())
        self.note("loss", (epoch, number, len(x)), loss + x.sum())
        if self.run.case.evaluate_every and (number + 1) % self.run.case.evaluate_every == 0:
            self._evaluate((epoch, number))
        if self.accelerator.optimizer_step_was_skipped:
            self.journal.note("skipped", place=[epoch, number])
        if self.run.case.saves and (epoch, number) == (0, 4):
            self.accelerator.save_state(str(self.run.directory / "saved"))
        if self.run.case.saves and (epoch, number) == (0, 7):
            self.accelerator.load_state(str(self.run.directory / "saved"))
        if self.plugin is not None:
            done = self.plugin.commit(epoch_over=number + 1 == self.run.case.limit)
            assert done is bool(self.accelerator.sync_gradients)
            if done:
                self.journal.note("committed", step=self.plugin.step)
        self.at("committed")

    def _evaluate(self, place: tuple[int, ...]) -> None:
        self.at("evaluation")
        self.model.eval()
        total = torch.rand(())
        with torch.no_grad():
            if self.run.case.evaluation_loader is None:
                total += self.model(self.samples.x).sum()
            else:
                for x, _ in self.evaluation_loader:
                    total += self.model(x).sum()
                    self.at("evaluated batch")
            self.note("evaluation", place, total)
        self.model.train()

    def report(self, name: str) -> None:
        """Write all state that an interruption might have changed."""
        bare = self.accelerator.unwrap_model(self.model)
        result = {
            "parameters": {name: freeze(held(each)) for name, each in bare.named_parameters()},
            "buffers": {name: freeze(each) for name, each in bare.named_buffers()},
            "optimizer": freeze(tree_map(held, self.optimizer.state_dict())),
            "scheduler": freeze(self.scheduler.state_dict()),
            "scaler": freeze(None if self.accelerator.scaler is None else self.accelerator.scaler.state_dict()),
            "torch": freeze(torch.get_rng_state()),
            "numpy": freeze(np.random.get_state()),
            "python": freeze(random.getstate()),
            "average": freeze(self.average.value),
            "micro step": self.accelerator.step,
            "iteration": self.loader.iteration,
        }
        (self.run.directory / f"{name}-{self.rank}").write_bytes(pickle.dumps(result))


# Actions at a place


def kill_agent(training: Training) -> None:
    """Kill the agent; returns when it is dead."""
    assert training.plugin is not None
    assert training.plugin._session is not None
    pid = training.plugin._session.agent_pid
    assert pid is not None
    kill_and_wait(pid)
    training.journal.note("agent killed", pid=pid)


def wait_until_ordered(training: Training) -> None:
    """Return when the agent has ordered a snapshot; one that comes late is ordered for a later step."""
    _listen_until(training, lambda session: session._link.connection.order is not None, "no snapshot was ordered")


def wait_until_stored(training: Training) -> None:
    """Return when a checkpoint is in storage."""
    _listen_until(training, lambda session: session.stored_step is not None, "nothing got to storage")


def _listen_until(training: Training, there: Callable[[memckpt.Session], bool], otherwise: str) -> None:
    assert training.plugin is not None
    session = training.plugin._session
    assert session is not None
    deadline = time.monotonic() + 30
    while not there(session):
        left = deadline - time.monotonic()
        assert left > 0, otherwise
        assert select.select([session._link.connection.channel], [], [], left)[0], otherwise
        session._protection.listen()
