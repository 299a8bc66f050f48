"""A small GPT-2 trained with transformers.Trainer in processes that are killed, and the comparison of the results.

Everything draws from every generator it can (data, dropout, hooks), so that one that is off by a number shows in the
weights.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from memckpt import Session
from memckpt.capture.data import graft as dataloader
from memckpt.config import AgentConfig, CompressionConfig, MemckptConfig, StorageConfig
from memckpt.storage.catalog import read_catalog
from memckpt.storage.local_store import LocalStore
from tests.support.cluster.processes import die_with_parent, live_on
from tests.support.faults.frozen import freeze
from tests.support.trainings import killed_programs
from tests.support.trainings.compressed import average_plainly, note_encodings
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_programs import Ended, Kill, Process, Run, attempt, unproved
from transformers_memckpt import protect
from transformers_memckpt.protection import Protection
from transformers_memckpt.trainer_state import TrainerStates


@dataclass(frozen=True)
class Case:
    """One way of training."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)  # TrainingArguments beside those of all cases
    samples: int = 44  # number of training samples; batches have four
    augmented: bool = True  # whether the data draw random numbers
    patience: int | None = None  # patience of EarlyStoppingCallback; None: without it
    stream: bool = False  # whether the training data are an IterableDataset
    sharded: bool = False  # whether from_pretrained() shards the model over the ranks
    compression: CompressionConfig | None = None  # how gradients are averaged
    #: Whether the Trainer has an average of the weights, and a generator, which its losses depend on, and a callback
    #: that changes the schedule.
    second: bool = False


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Sequences of eight tokens, of which some are replaced at random."""

    def __init__(self, samples: int, augmented: bool) -> None:
        self.tokens = torch.randint(0, 50, (samples, 8), generator=torch.Generator().manual_seed(3))
        self.augmented = augmented

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if get_worker_info() is not None:  # a worker ends with its killed trainer
            die_with_parent()
        tokens = self.tokens[index].clone()
        if self.augmented and random.random() < 0.5:
            tokens[int(torch.randint(0, 8, ()))] = int(np.random.randint(50))
        return {"input_ids": tokens, "labels": tokens}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The sequences in an order of each pass."""

    def __init__(self, samples: int, augmented: bool) -> None:
        self.windows, self.passes = Windows(samples, augmented), 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self.passes += 1
        for index in random.Random(self.passes).sample(range(len(self.windows)), len(self.windows)):
            yield self.windows[index]


def _at(place: str) -> Any:
    """A hook that comes by a place."""
    return lambda self, *_, **__: self.reach(place)


class Probe(TrainerCallback):
    """Comes by a place in each hook, draws in most of them, and keeps a tally as state."""

    on_substep_end, on_pre_optimizer_step = _at("substep_end"), _at("pre_optimizer")
    on_optimizer_step, on_evaluate = _at("optimizer"), _at("evaluate")
    on_log, on_save = _at("log"), _at("save")

    def __init__(self, run: Run) -> None:
        self.process = Process(run)
        self.process.first = "micro"
        self.tally: list[float] = []
        self.plain = {"steps": 0}

    def reach(self, hook: str) -> None:
        self.process.at(hook)

    def state_dict(self) -> dict[str, Any]:
        return {"tally": list(self.tally)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tally = state["tally"]

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        torch.rand(2)
        self.tally = []
        self.plain["steps"] = 0
        self.reach("train_begin")

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.tally.append(float(torch.rand(())))
        self.reach("epoch_begin")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.reach("step_begin")
        if state.global_step == 3 and self.process.run.case.second:
            state.logging_steps = 3
        self.plain["steps"] += 1
        self.tally.append(random.random())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tally.append(state.epoch)
        self.reach("step_end")

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        torch.rand(1)
        self.reach("prediction")

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.tally.append(float(np.random.rand()))
        self.reach("epoch_end")

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.reach("train_end")
        live_on()


class JournalingTrainer(Trainer):
    """Writes each loss at once, so that those of killed processes are checked, too."""

    probe: Probe
    average: Any = None
    noise: random.Random
    #: The step that is trained, and the number of its micro-batch.
    place = (-1, 0)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if self.average is None or not self.model.training:
            return loss
        with torch.no_grad():
            for mean, param in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(param, 0.2)
        return loss * (1 + self.noise.random() + next(self.average.parameters()).mean())

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.probe.reach("micro")
        loss = super().training_step(*args, **kwargs)
        step, micro = self.place
        self.place = (self.state.global_step, micro + 1 if step == self.state.global_step else 0)
        self.probe.process.note("loss", self.place, loss)
        return loss


@dataclass(frozen=True)
class Attempt(Run):
    """Parameters of one attempt; `changed`: TrainingArguments beside those of the case."""

    config: MemckptConfig | None = None
    seed: int = 0
    resume: Any = "auto"
    changed: dict[str, Any] = field(default_factory=dict)
    checkpoint: Any = None


def settings(storage: StorageConfig | None = None, **changed: Any) -> MemckptConfig:
    values: dict[str, Any] = {"redo": "lazy", "anchor_period_steps": 4, "resume_check": "replay", **changed}
    return MemckptConfig(agent=AgentConfig(linger_seconds=60), storage=storage, **values)


def make_trainer(attempt: Attempt) -> JournalingTrainer:
    case = attempt.case
    arguments: dict[str, Any] = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "logging_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 5,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "learning_rate": 1e-2,
        **case.arguments,
        **attempt.changed,
    }
    torch.manual_seed(attempt.seed)
    model: Any = GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0)
    )
    if case.sharded:
        model = load_sharded(attempt.directory / "model")
    probe = Probe(attempt)
    callbacks: list[TrainerCallback] = [probe]
    if case.patience is not None:
        callbacks.append(EarlyStoppingCallback(early_stopping_patience=case.patience))
    trainer = JournalingTrainer(
        model=model,
        args=TrainingArguments(output_dir=str(attempt.directory / "files"), **arguments),
        train_dataset=(Stream if case.stream else Windows)(case.samples, case.augmented),
        eval_dataset=Windows(12, False) if arguments["eval_strategy"] != "no" else None,
        callbacks=callbacks,
    )
    trainer.probe = probe
    if case.second:
        trainer.average, trainer.noise = copy.deepcopy(model), random.Random(5)
    if attempt.protected:
        assert attempt.config is not None
        config = replace(attempt.config, compression=case.compression)
        names = ["callbacks.Probe.plain.steps"]
        protect(trainer, attempt.directory / "run", resume=attempt.resume, config=config, attributes=names)
    if case.compression is not None and attempt.protected:
        note_encodings(attempt.directory / f"encodings-{attempt.rank}")
    elif case.compression is not None:
        trainer.add_callback(AveragePlainly(trainer, case.compression))
    return trainer


class AveragePlainly(TrainerCallback):
    """Averages gradients in compressed form without memckpt's callback."""

    def __init__(self, trainer: Trainer, compression: CompressionConfig) -> None:
        self.trainer, self.compression = trainer, compression

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        average_plainly(self.trainer.model_wrapped, self.compression)


def load_sharded(directory: Path) -> Any:
    """A small Llama, sharded over the ranks as it is loaded."""
    from transformers.distributed import DistributedConfig

    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
    numbers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **numbers, attention_dropout=0.1))
    model.save_pretrained(directory)  # on rank 0
    torch.distributed.barrier()
    ranks = torch.distributed.get_world_size()
    return LlamaForCausalLM.from_pretrained(directory, distributed_config=DistributedConfig(fsdp_size=ranks))


def train(attempt: Attempt) -> dict[str, Any]:
    """Train in this process; returns what an interruption might have changed."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    trainer = make_trainer(attempt)
    result = trainer.train(resume_from_checkpoint=attempt.checkpoint)
    early = [each for each in trainer.callback_handler.callbacks if isinstance(each, EarlyStoppingCallback)]
    state, wrapped = trainer.state, trainer.callback_handler.train_dataloader
    return {
        "weights": freeze(dict(trainer.model.state_dict())),
        "optimizer": freeze(trainer.optimizer.state_dict()),
        "scheduler": freeze(trainer.lr_scheduler.state_dict()),
        "torch rng": freeze(torch.get_rng_state()),
        "numpy rng": freeze(np.random.get_state()),
        "python rng": freeze(random.getstate()),
        "state": freeze([state.global_step, state.epoch, state.total_flos, state.num_input_tokens_seen]),
        "best": freeze([state.best_metric, state.best_global_step]),
        "history": freeze([_without_times(entry) for entry in state.log_history]),
        "training loss": freeze(result.training_loss),
        "average": freeze(dict(trainer.average.state_dict()) if trainer.average is not None else {}),
        "tally": freeze(trainer.probe.tally),
        "plain": freeze(trainer.probe.plain),
        "patience": freeze([each.early_stopping_patience_counter for each in early]),
        "residue": freeze([name for name in ("_run_epoch", "_init_training_state") if name in vars(trainer)]),
        "loader": freeze(type(wrapped.base_dataloader).__name__),
    }


def sabotage(what: str) -> None:
    """Leave one part of a resume out, to test the comparison."""

    def end_batch_without_epoch(protection: Protection, *, stepped: bool) -> None:
        protection._taken += 1

    match what:
        case "generators":
            Session.restore_rng = lambda session: None  # type: ignore[method-assign]
        case "generators of fetches":
            resume = dataloader.resume
            dataloader.resume = lambda loader, position: resume(
                loader, {**position, "pass": {**position["pass"], "fetches": []}}
            )
        case "trainer":
            TrainerStates.restore = TrainerStates.restore_counters  # type: ignore[method-assign]
        case "epoch":
            Protection.end_batch = end_batch_without_epoch  # type: ignore[method-assign]
        case _:
            raise KeyError(what)


def _without_times(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not name.endswith(("runtime", "per_second"))}


# In the pytest process


class Trainings:
    """Runs attempts of cases in children of a lab."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    def run(self, case: Case, config: MemckptConfig | None, **arguments: Any) -> Ended:
        """Train to the end, or to the planned death; without a configuration in a directory of its own."""
        directory = self.lab.directory / ("undisturbed" if config is None else "")
        run = Attempt(case, directory, protected=config is not None, config=config, **arguments)
        return attempt(self.lab, train, run)

    def survives(
        self,
        case: Case,
        config: MemckptConfig,
        kills: list[Kill],
        *,
        between: Callable[[], None] = lambda: None,
        **arguments: Any,
    ) -> list[Ended]:
        """Kill a training at each of `kills` in turn, resume it each time, and compare; call `between` after each."""
        run = Attempt(case, self.lab.directory, config=config, **arguments)
        held: list[bool] = []

        def before_each(number: int, attempts: list[Ended]) -> dict[str, Any]:
            if number > 0:
                between()
            return self._seed(number, held)

        attempts = killed_programs.survives(self.lab, train, run, kills, each=before_each)
        assert [("resuming from" not in each.logs[0]) for each in attempts] == [not each for each in held]
        assert unproved("".join(each.logs[0] for each in attempts)) == []
        return attempts

    def _seed(self, number: int, held: list[bool]) -> dict[str, Any]:
        """If state is held, another seed than the reference's: weights that are not restored show."""
        held.append(number > 0 and self.is_held())
        return {"seed": 100 + number if held[-1] else 0}

    def is_held(self) -> bool:
        """Whether a resume finds something, in memory or in storage."""
        if self.lab.agent_answers():
            return self.lab.status().step is not None
        return bool(read_catalog(LocalStore(self.lab.run_dir / "storage")).complete)

    def survive_chance(self, case: Case, config: MemckptConfig, chance: random.Random) -> int:
        """Kill a training at random instants, let the last attempt end, and compare; returns the number of kills."""
        run = Attempt(case, self.lab.directory, config=config)
        held: list[bool] = []
        attempts = killed_programs.survives_chance(
            self.lab, train, run, chance, 100, each=lambda number, attempts: self._seed(number, held)
        )
        # A process killed between the check and its line about the restore does not name its step.
        assert unproved("".join(each.logs[0] for each in attempts), ["the replica has gone past"]) == []
        return len(attempts) - 1


def losses(ended: Ended, rank: int = 0) -> list[tuple[int, str]]:
    """Step and loss of each batch of an attempt."""
    return [(each["place"][0], each["value"]) for each in ended.events("loss", rank)]
