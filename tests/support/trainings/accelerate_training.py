"""The training with Accelerate whose processes are killed, and the places where they are.

Every process is told only the same directory; each must begin after the last committed step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import memckpt
from accelerate_plugin import MemCheckpointPlugin
from memckpt.config import CompressionConfig, MemckptConfig
from tests.support.cluster.processes import die_with_parent, kill_and_wait, live_on
from tests.support.faults.frozen import freeze
from tests.support.trainings import killed_programs
from tests.support.trainings.compressed import average_plainly, note_encodings
from tests.support.trainings.engine_child import Probe, config, listen_until, seed_everything
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_programs import Ended, Kill, Process, Run, unproved

EPOCHS = 3


@dataclass(frozen=True)
class Case:
    """Variant of the training."""

    name: str
    samples: int = 44
    loading: dict[str, Any] = field(default_factory=dict)  # arguments of Accelerate's DataLoaderConfiguration
    loader: dict[str, Any] = field(default_factory=dict)  # arguments of the DataLoader
    accumulate: int = 1  # micro-batches of a step
    accelerator: dict[str, Any] = field(default_factory=dict)  # further arguments of the Accelerator
    scaler: bool = False  # scale gradients as in fp16, in a range in which some steps overflow
    evaluate_every: int = 0  # batches between evaluations inside the loop, before the commit
    limit: int = 0  # batches after which each epoch is left
    stream: bool = False  # an IterableDataset
    own_loader: bool = False  # the user's loader is torchdata's
    two: bool = False  # a second loader, iterated together with the first
    in_turns: bool = False  # a second loader, of which the second batch of each epoch takes one
    #: Evaluations at the top of an epoch, and inside the loop, leave their loader behind its first batch.
    left: bool = False
    cut: str = ""  # sharding by the user before the model is prepared: "", "fsdp2" or "fsdp1"
    saves: bool = False  # Accelerate's own save_state in the first epoch, and load_state some batches later
    numbered: bool = False  # save_state() every four batches, in directories that Accelerate numbers
    #: Evaluate on a prepared loader, with these arguments; ``elsewhere``: one that the plugin does not prepare.
    evaluation_loader: dict[str, Any] | None = None
    compression: CompressionConfig | None = None  # how gradients are averaged

    def __str__(self) -> str:
        return self.name


PLAIN = Case("plain")


@dataclass(frozen=True)
class AccelerateRun(Run):
    """Parameters of one attempt; `config`: configuration of the plugin."""

    victim: int = 0
    config: MemckptConfig = field(default_factory=config)


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


class Training(Process):
    """One process of a run."""

    run: AccelerateRun

    def __init__(self, run: AccelerateRun) -> None:
        super().__init__(run)
        self.plugin: MemCheckpointPlugin | None = None
        self.others: Iterator[Any] | None = None
        # Earlier tests in this process may have made an Accelerator, whose state all later ones share.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        case = run.case
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=case.accumulate,
            dataloader_config=DataLoaderConfiguration(**case.loading),
            project_config=ProjectConfiguration(
                str(run.directory / "project"), automatic_checkpoint_naming=case.numbered, total_limit=3
            ),
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
        seed_everything(50 + run.rank)

    def _loader(self) -> Any:
        case = self.run.case
        kind: Any = DataLoader
        if case.own_loader:
            from torchdata.stateful_dataloader import StatefulDataLoader

            kind = StatefulDataLoader
        arguments = dict(case.loader)
        if case.loader.get("num_workers"):  # a worker ends with its trainer, whose lock it might wait for
            arguments |= {"multiprocessing_context": "fork", "worker_init_fn": lambda number: die_with_parent()}
        if case.stream:
            return kind(Stream(self.samples), 4, **arguments)
        return kind(self.samples, 4, shuffle=True, **arguments)

    def _prepare(self) -> list[Any]:
        objects = [self.model, self.optimizer, self._loader(), self.scheduler]
        if self.run.case.two or self.run.case.in_turns:
            objects.append(self._loader())
        if self.run.case.evaluation_loader is not None:
            arguments = dict(self.run.case.evaluation_loader)
            elsewhere = arguments.pop("elsewhere", False)
            if "seed" in arguments:
                arguments["generator"] = torch.Generator().manual_seed(arguments.pop("seed"))
            evaluated = DataLoader(Samples(12), 4, shuffle=True, **arguments)
            if elsewhere:
                self.evaluation_loader = self.accelerator.prepare(evaluated)
            else:
                objects.append(evaluated)
        if not self.run.protected:
            if self.run.case.cut:  # otherwise Accelerate would wrap it into DDP
                objects[0] = self.accelerator.prepare_model(self.model, evaluation_mode=True)
            plain = list(self.accelerator.prepare(*objects))
            if self.run.case.compression is not None:
                average_plainly(plain[0], self.run.case.compression)
            return plain
        settings = replace(self.run.config, compression=self.run.case.compression)
        if settings.compression is not None:
            note_encodings(self.run.directory / f"encodings-{self.run.rank}")
        self.plugin = MemCheckpointPlugin(self.accelerator, self.run.directory / "run", config=settings)
        prepared = self.plugin.prepare(*objects)
        self.plugin.register("probe", Probe(self.at, "commit"))
        session = self.plugin._session
        assert session is not None
        step = self.plugin.step if session.check.step is None else session.check.step  # the held step is repeated
        self.journal.note("attached", step=step, agent=session.agent_pid)
        return list(prepared)

    def train(self) -> dict[str, Any]:
        prepared = self._prepare()
        self.model, self.optimizer, loader, self.scheduler = prepared[:4]
        self.loader = loader
        if self.run.case.evaluation_loader is not None and "elsewhere" not in self.run.case.evaluation_loader:
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
            if self.run.case.left:
                next(iter(self.evaluation_loader))
            batches = zip(loader, prepared[4], strict=True) if self.run.case.two else loader
            self.others = iter(prepared[4]) if self.run.case.in_turns else None
            for number, batch in enumerate(batches, start=first):
                self._batch(epoch, number, batch)
                if number + 1 == self.run.case.limit:
                    break
            self.at("epoch end")
            self._evaluate((epoch,))
            self.at("evaluated")
        self.at("end")
        live_on()
        result = self.report()
        if plugin is not None:
            plugin.close()
        return result

    def _batch(self, epoch: int, number: int, batch: Any) -> None:
        self.at("batch")
        parts = batch if self.run.case.two else [batch]
        if self.others is not None and number == 1:
            parts = [*parts, next(self.others)]
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
        self.note("loss", (epoch, number, len(x)), (loss + x.sum()).detach())
        if self.run.case.evaluate_every and (number + 1) % self.run.case.evaluate_every == 0:
            self._evaluate((epoch, number))
        if self.accelerator.optimizer_step_was_skipped:
            self.journal.note("skipped", place=[epoch, number])
        if self.run.case.saves and (epoch, number) == (0, 4):
            self.accelerator.save_state(str(self.run.directory / "saved"))
        if self.run.case.saves and (epoch, number) == (0, 7):
            self.accelerator.load_state(str(self.run.directory / "saved"))
        if self.run.case.numbered and number % 4 == 3:
            self.accelerator.save_state()
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
                    total = total / 2 + self.model(x).sum()  # other samples, and another order of them, show
                    self.at("evaluated batch")
                    if self.run.case.left and len(place) > 1:
                        break
            self.note("evaluation", place, total)
        self.model.train()

    def report(self) -> dict[str, Any]:
        """All state that an interruption might have changed."""
        bare = self.accelerator.unwrap_model(self.model)
        return {
            "parameters": freeze(dict(bare.named_parameters())),
            "buffers": freeze(dict(bare.named_buffers())),
            "optimizer": freeze(self.optimizer.state_dict()),
            "scheduler": freeze(self.scheduler.state_dict()),
            "scaler": freeze(None if self.accelerator.scaler is None else self.accelerator.scaler.state_dict()),
            "torch": freeze(torch.get_rng_state()),
            "numpy": freeze(np.random.get_state()),
            "python": freeze(random.getstate()),
            "average": freeze(self.average.value),
            "micro step": self.accelerator.step,
            "iteration": self.loader.iteration,
            "saved": sorted(each.name for each in self.run.directory.glob("project/checkpoints/*")),
        }


def train(run: AccelerateRun) -> dict[str, Any]:
    return Training(run).train()


def survives(lab: Lab, run: AccelerateRun, kills: list[Kill]) -> list[Ended]:
    """Kill a run at each of `kills` in turn, let the next process continue, and compare."""
    attempts = killed_programs.survives(lab, train, run, kills)
    # With several ranks one may have committed a step that another has not; it is repeated. And the first one is killed
    # at any instant once the victim is dead, also between a commit and its note.
    check_resumes(attempts, run, *((0, 0) if run.ranks == 1 else (1, 1)))
    assert unproved("".join(each.logs[0] for each in attempts)) == []
    return attempts


def survives_chance(lab: Lab, run: AccelerateRun, chance: random.Random) -> int:
    """Kill a run at random instants, let the last attempt end, and compare; returns the number of kills."""
    attempts = killed_programs.survives_chance(lab, train, run, chance, 20)
    # It may have died between a commit and its note; with several ranks another one may be ahead.
    check_resumes(attempts, run, int(run.ranks > 1), 1)
    # A process killed between the check and its line about the restore does not name its step.
    assert unproved("".join(each.logs[0] for each in attempts), ["the replica has gone past"]) == []
    return len(attempts) - 1


def check_resumes(attempts: Sequence[Ended], run: AccelerateRun, behind: int, ahead: int) -> None:
    """Check that each attempt begins after the last step that was committed, or so many steps before or behind it."""
    last = 0
    for number, each in enumerate(attempts):
        resumed = each.events("attached", run.victim)[0]["step"]
        assert last - behind <= resumed <= last + ahead, f"attempt {number} resumed at {resumed}, had noted {last}"
        last = max([last, resumed, *(one["step"] for one in each.events("committed"))])


# Actions at a place


def kill_agent(training: Training) -> None:
    """Kill the agent; returns when it is dead."""
    pid = session_of(training).agent_pid
    assert pid is not None
    kill_and_wait(pid)
    training.journal.note("agent killed", pid=pid)


def session_of(training: Training) -> memckpt.Session:
    assert training.plugin is not None
    assert training.plugin._session is not None
    return training.plugin._session


def wait_until_ordered(training: Training) -> None:
    """Return when the agent has ordered a copy; one that comes late is ordered for a later step."""
    session = session_of(training)
    listen_until(session, lambda: session._link.connection.order is not None, "no copy was ordered")


def wait_until_stored(training: Training) -> None:
    """Return when a checkpoint is in storage."""
    session = session_of(training)
    listen_until(session, lambda: session.stored_step is not None, "nothing got to storage")
