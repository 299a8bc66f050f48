"""A small GPT-2 trained with transformers.Trainer in processes that are killed, and the comparison of the results.

Everything draws from every generator it can (data, dropout, hooks), so that one that is off by a number shows in the
weights. Children are forked from the pytest process, which has imported transformers and never trained.
"""

from __future__ import annotations

import copy
import ctypes
import json
import os
import pickle
import random
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
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
from memckpt.capture import data as dataloader
from memckpt.config import AgentConfig, CompressionConfig, MemckptConfig, StorageConfig
from memckpt.storage.catalog import read_catalog
from memckpt.storage.local_store import LocalStore
from tests.support.cluster.processes import die_after, live_on
from tests.support.faults.check_lines import unproved
from tests.support.faults.frozen import differences, freeze
from tests.support.trainings.compressed import average_plainly, note_encodings
from tests.support.trainings.engine_child import Journal
from tests.support.trainings.engine_harness import Lab
from transformers_memckpt import protect
from transformers_memckpt.protection import Protection
from transformers_memckpt.trainer_state import TrainerStates

Kill = tuple[str, int]
"""A hook, and the number of its call at which the process dies."""
INSTANT = "instant"
"""A pseudo-hook: so many milliseconds after the first batch."""

_PR_SET_PDEATHSIG = 1
_MOST_ATTEMPTS = 40
_WALL_CLOCK = ("runtime", "per_second")


@dataclass(frozen=True)
class Case:
    """One way of training.

    Attributes:
        arguments: TrainingArguments beside those of all cases.
        samples: number of training samples; batches have four.
        augmented: whether the data draw random numbers.
        patience: patience of EarlyStoppingCallback; None: without it.
        stream: whether the training data are an IterableDataset.
        sharded: whether from_pretrained() shards the model over the ranks.
        compression: how gradients are averaged.
        second: whether the Trainer has an average of the weights, and a generator, which its losses depend on.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    samples: int = 44
    augmented: bool = True
    patience: int | None = None
    stream: bool = False
    sharded: bool = False
    compression: CompressionConfig | None = None
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
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        tokens = self.tokens[index].clone()
        if self.augmented and random.random() < 0.5:
            tokens[int(torch.randint(0, 8, ()))] = int(np.random.randint(50))
        return {"input_ids": tokens, "labels": tokens}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The same sequences in order, each time."""

    def __init__(self, samples: int, augmented: bool) -> None:
        self.windows = Windows(samples, augmented)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for index in range(len(self.windows)):
            yield self.windows[index]


#: Plain attributes in which the callbacks below keep state.
NAMES = ["callbacks.Probe.plain.steps"]


class Probe(TrainerCallback):
    """Counts hooks, dies in the planned one, draws in most of them, and keeps a tally as state."""

    def __init__(self, journal: Journal, kill: Kill | None) -> None:
        self.journal = journal
        self.kill = kill
        self.calls: Counter[str] = Counter()
        self.tally: list[float] = []
        self.plain = {"steps": 0}

    def reach(self, hook: str) -> None:
        self.calls[hook] += 1
        if self.kill is not None and self.kill[0] == INSTANT and (hook, self.calls[hook]) == ("micro", 1):
            die_after(self.kill[1] / 1000)
        if self.kill == (hook, self.calls[hook]):
            self.journal.note("killed", hook=hook)
            os.kill(os.getpid(), signal.SIGKILL)

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

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.reach("step_begin")
        self.plain["steps"] += 1
        self.tally.append(random.random())

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.reach("substep_end")

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.reach("pre_optimizer")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.reach("optimizer")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tally.append(state.epoch)
        self.reach("step_end")

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        torch.rand(1)
        self.reach("prediction")

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.reach("evaluate")

    def on_log(self, *_: Any, **__: Any) -> None:
        self.reach("log")

    def on_save(self, *_: Any, **__: Any) -> None:
        self.reach("save")

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.tally.append(float(np.random.rand()))
        self.reach("epoch_end")

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.reach("train_end")
        live_on()  # a process that dies after the end has nothing to continue


class JournalingTrainer(Trainer):
    """Writes each loss at once, so that those of killed processes are checked, too."""

    journal: Journal
    probe: Probe
    average: Any = None
    noise: random.Random

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
        self.journal.note("loss", step=self.state.global_step, value=float(loss).hex())
        return loss


@dataclass(frozen=True)
class Attempt:
    """Parameters of one process."""

    case: Case
    directory: Path
    report: Path
    config: MemckptConfig | None
    kill: Kill | None = None
    seed: int = 0
    resume: Any = "auto"
    changed: dict[str, Any] = field(default_factory=dict)
    checkpoint: Any = None
    sabotage: str | None = None


def settings(storage: StorageConfig | None = None, **changed: Any) -> MemckptConfig:
    values: dict[str, Any] = {"redo": "lazy", "anchor_period_steps": 4, "resume_check": "replay", **changed}
    return MemckptConfig(agent=AgentConfig(linger_seconds=60), storage=storage, **values)


def make_trainer(attempt: Attempt) -> JournalingTrainer:
    case = attempt.case
    rank = os.environ.get("RANK", "0")
    journal = Journal(attempt.report / f"journal-{rank}")
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
        model = load_sharded(attempt.report / "model")
    dies = int(rank) == int(os.environ.get("WORLD_SIZE", "1")) - 1
    probe = Probe(journal, attempt.kill if dies else None)
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
    trainer.journal, trainer.probe = journal, probe
    if case.second:
        trainer.average, trainer.noise = copy.deepcopy(model), random.Random(5)
    if attempt.config is not None:
        config = replace(attempt.config, compression=case.compression)
        protect(trainer, attempt.directory / "run", resume=attempt.resume, config=config, attributes=NAMES)
    if case.compression is not None and attempt.config is not None:
        note_encodings(attempt.directory / f"encodings-{rank}")
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

    torch.distributed.init_process_group("gloo")
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=16,
            attention_dropout=0.1,
        )
    ).save_pretrained(directory)  # on rank 0
    torch.distributed.barrier()
    ranks = torch.distributed.get_world_size()
    return LlamaForCausalLM.from_pretrained(directory, distributed_config=DistributedConfig(fsdp_size=ranks))


def held(value: Any) -> Any:
    """This rank's shard of a DTensor; any other value as it is."""
    return value.to_local() if hasattr(value, "to_local") else value


def train(attempt: Attempt) -> None:
    """The body of a training child."""
    if attempt.sabotage is not None:
        sabotage(attempt.sabotage)
    trainer = make_trainer(attempt)
    result = trainer.train(resume_from_checkpoint=attempt.checkpoint)
    early = [each for each in trainer.callback_handler.callbacks if isinstance(each, EarlyStoppingCallback)]
    state, wrapped = trainer.state, trainer.callback_handler.train_dataloader
    found = {
        "weights": freeze(tree_map(held, dict(trainer.model.state_dict()))),
        "optimizer": freeze(tree_map(held, trainer.optimizer.state_dict())),
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
    rank = os.environ.get("RANK", "0")
    (attempt.report / f"outcome-{rank}").write_bytes(pickle.dumps(found))
    if torch.distributed.is_initialized():
        os._exit(0)  # gloo's teardown may hang


def sabotage(what: str) -> None:
    """Leave one part of a resume out, to test the comparison."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    match what:
        case "generators":
            Session.restore_rng = nothing  # type: ignore[method-assign]
        case "generators of fetches":
            dataloader.resume = _resume_without_fetches
        case "trainer":
            TrainerStates.restore = TrainerStates.restore_counters  # type: ignore[method-assign]
        case "epoch":
            Protection.end_batch = _end_batch_without_epoch  # type: ignore[method-assign]
        case _:
            raise KeyError(what)


_resume = dataloader.resume


def _resume_without_fetches(loader: DataLoader[Any], position: dict[str, Any]) -> None:
    _resume(loader, {**position, "pass": {**position["pass"], "fetches": []}})


def _end_batch_without_epoch(self: Protection, *, stepped: bool) -> None:
    self._taken += 1


def _without_times(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not name.endswith(_WALL_CLOCK)}


# In the pytest process


@dataclass(frozen=True)
class Ended:
    """One attempt that has ended, of one rank or several."""

    codes: list[int]
    report: Path
    logs: list[str]

    @property
    def log(self) -> str:
        return "\n".join(self.logs)

    def events(self, rank: int, event: str) -> list[dict[str, Any]]:
        path = self.report / f"journal-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [each for each in map(json.loads, lines) if each["event"] == event]

    def losses(self, rank: int) -> list[tuple[int, str]]:
        return [(each["step"], each["value"]) for each in self.events(rank, "loss")]

    def outcome(self, rank: int) -> Any:
        return pickle.loads((self.report / f"outcome-{rank}").read_bytes())


class Trainings:
    """Runs attempts of cases in children of a lab."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._count = 0

    def run(self, case: Case, config: MemckptConfig | None, *, ranks: int = 1, **arguments: Any) -> Ended:
        """Train to the end, or to the planned death."""
        self._count += 1
        report = self.lab.directory / f"attempt-{self._count}"
        report.mkdir()
        directory = arguments.pop("directory", self.lab.directory)
        attempt = Attempt(case, directory, report, config, **arguments)
        environments = [_rank_environment(rank, ranks, port) for port in [_free_port()] for rank in range(ranks)]
        children = [self.lab.fork(partial(_train_in, each, attempt), case.name) for each in environments]
        codes = [children[-1].wait()]
        for child in children[-2::-1]:
            if codes[-1] and child.alive():
                os.kill(child.pid, signal.SIGKILL)  # as torchrun does
            codes.insert(0, child.wait())
        logs = [child.log.read_text() for child in children]
        if codes[-1] > 0 and "connectFullMesh" in logs[-1] and self._count < _MOST_ATTEMPTS:
            # On loopback gloo's ranks occasionally do not find each other, with or without memckpt.
            return self.run(case, config, ranks=ranks, directory=directory, **arguments)
        return Ended(codes, report, logs)

    def survives(
        self,
        case: Case,
        config: MemckptConfig,
        kills: list[Kill],
        *,
        ranks: int = 1,
        between: Callable[[], None] | None = None,
        **arguments: Any,
    ) -> list[Ended]:
        """Kill a training at each of `kills` in turn, resume it each time, and compare with an undisturbed one.

        Args:
            between: called after each kill.
        """
        expected = self.run(case, None, ranks=ranks, directory=self.lab.directory / "reference")
        assert expected.codes == [0] * ranks, expected.log[-6000:]
        attempts = []
        for number, kill in enumerate([*kills, None]):
            # If state is held, another seed than the reference's: weights that are not restored show.
            held = number > 0 and self.is_held()
            ended = self.run(case, config, ranks=ranks, kill=kill, seed=100 + number if held else 0, **arguments)
            assert ("starting over" in ended.logs[0]) != held, ended.logs[0][-3000:]
            code = -signal.SIGKILL if kill is not None else 0
            assert ended.codes[-1] == code, f"{kill}: exit codes {ended.codes}\n{ended.log[-6000:]}"
            attempts.append(ended)
            if between is not None and kill is not None:
                between()
        for rank in range(ranks):
            compare(expected, attempts, rank)
        assert unproved("".join(each.logs[0] for each in attempts)) == []
        return attempts

    def is_held(self) -> bool:
        """Whether a resume finds something, in memory or in storage."""
        if self.lab.agent_answers():
            return self.lab.status().step is not None
        return bool(read_catalog(LocalStore(self.lab.run_dir / "storage")).complete)

    def survive_chance(self, case: Case, config: MemckptConfig, chance: random.Random) -> int:
        """Kill a training at random instants, let the last attempt end, and compare; returns the number of kills."""
        expected = self.run(case, None, directory=self.lab.directory / "reference")
        assert expected.codes == [0], expected.log[-6000:]
        attempts = []
        while not attempts or attempts[-1].codes != [0]:
            seed = 100 + len(attempts) if attempts and self.is_held() else 0
            kill = (INSTANT, chance.randrange(1, 100)) if len(attempts) < 8 else None
            attempts.append(self.run(case, config, kill=kill, seed=seed))
            assert attempts[-1].codes[0] in (0, -signal.SIGALRM), attempts[-1].log[-6000:]
        compare(expected, attempts)
        # A process killed between the check and its line about the restore does not name its step.
        assert unproved("".join(each.logs[0] for each in attempts), ["the replica has gone past"]) == []
        return len(attempts) - 1


def compare(expected: Ended, attempts: list[Ended], rank: int = 0) -> None:
    """Check that the last outcome and every attempt's losses equal the undisturbed training's, bit for bit."""
    right = expected.losses(rank)
    for attempt in attempts:
        found = attempt.losses(rank)
        if not found:
            continue
        starts = [index for index, each in enumerate(right) if each == found[0]]
        assert any(right[start : start + len(found)] == found for start in starts), (
            f"losses differ: {attempt.log[-3000:]}"
        )
    different = differences(expected.outcome(rank), attempts[-1].outcome(rank))
    assert not different, "\n".join(different[:10]) + attempts[-1].log[-3000:]


def _train_in(environment: dict[str, str], attempt: Attempt) -> None:
    os.environ.update(environment)
    train(attempt)


def _rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if ranks == 1:
        return offline
    return {
        **offline,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
