"""Trainings that consume a loader in successive child processes, of which all but the last are killed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from memckpt.capture.data import graft as data
from memckpt.state import codec, rng
from tests.support.trainings.loader_cases import Workers, kill_myself

torch.set_num_threads(1)  # the children are forked from here

NONE, TWO, PERSISTENT = Workers(), Workers(2), Workers(2, persistent=True)
EPOCHS = 3
each_kind_of_workers = pytest.mark.parametrize("workers", [NONE, TWO, PERSISTENT], ids=str)

Tamper = Callable[[dict[str, Any]], None]


def in_child(path: Path, function: Callable[[], Any]) -> Any:
    """Run `function` in a forked child of its own process group; returns its result.

    Returns the exception it raised, or None if it killed itself. Afterwards the whole group is dead.
    """
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            try:
                result = function()
            except Exception as error:
                traceback.print_exc()
                result = error
            path.write_bytes(pickle.dumps(result))
        finally:
            os._exit(0)
    try:
        _, status = os.waitpid(pid, 0)
    finally:
        _end_group(pid)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return None
    assert os.WEXITSTATUS(status) == 0
    return pickle.loads(path.read_bytes())


def _end_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
        while True:
            os.waitpid(-group, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


@dataclass
class Seen:
    """One process's observations: per step the batch and a checksum of all generators."""

    steps: list[tuple[str, int]] = field(default_factory=list)
    end: int = 0


@dataclass
class Job:
    """A training that can be run in one process or in several."""

    make: Callable[[], DataLoader[Any]]
    folder: Path
    epochs: int = EPOCHS
    limit: int | None = None
    make_validation: Callable[[], DataLoader[Any]] | None = None
    tamper: Tamper | None = None
    iterate_first: bool = False

    def uninterrupted(self, *, grafted: bool = False) -> Seen:
        return self.process(lambda: Trainer(self, grafted=grafted).run(kill_at=None))

    def chain(self, kills: list[int]) -> Seen:
        """Run one process per kill, and one that finishes. Checks the deaths."""
        (self.folder / "position").unlink(missing_ok=True)
        total = Seen()
        for kill_at in kills:
            killed = self.process(lambda kill_at=kill_at: Trainer(self, grafted=True).run(kill_at))
            assert killed is None, f"the run was to be killed at step {kill_at}, got {killed}"
            total.steps += self._stored()["seen"].steps
        finished = self.process(lambda: Trainer(self, grafted=True).run(kill_at=None))
        if isinstance(finished, Exception):
            raise finished
        return Seen(total.steps + finished.steps, finished.end)

    def process(self, function: Callable[[], Any]) -> Any:
        return in_child(self.folder / "result", function)

    def store(self, state: dict[str, Any]) -> None:
        for name in ("position", "validation"):  # these must be encodable by the safe codec
            state[name] = codec.encode(state[name])
        (self.folder / "position").write_bytes(pickle.dumps(state))

    def _stored(self) -> Any:
        return pickle.loads((self.folder / "position").read_bytes())

    def load(self) -> Any:
        if not (self.folder / "position").exists():
            return None
        state = self._stored()
        for name in ("position", "validation"):
            state[name] = codec.decode(state[name])
        if self.tamper is not None:
            self.tamper(state)
        return state


class Trainer:
    """A plain training loop: dropout draws from the global generators between two batches."""

    def __init__(self, job: Job, *, grafted: bool) -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        self.job = job
        self.loader = job.make()
        self.validation = None if job.make_validation is None else job.make_validation()
        self.grafted = grafted
        if grafted:
            data.graft(self.loader)
            if self.validation is not None:
                data.graft(self.validation)
        self.seen = Seen()

    def run(self, kill_at: int | None) -> Seen:
        step, first_epoch, done = 0, 0, 0
        state = self.job.load() if self.grafted else None
        begun: Iterator[Any] | None = None
        if state is None:
            self._validate()
        else:
            step, first_epoch, done = state["step"], state["epoch"], state["done"]
            data.resume(self.loader, state["position"])
            if self.validation is not None:
                data.recreate_persistent_iterator(self.validation, state["validation"])
            if self.job.iterate_first:
                begun = iter(self.loader)
            torch.rand(5)
            data.restore_generators(self.loader, state["position"])
            if state["rng"] is not None:
                rng.restore(state["rng"])
        for epoch in range(first_epoch, self.job.epochs):
            if hasattr(self.loader.sampler, "set_epoch"):
                self.loader.sampler.set_epoch(epoch)
            for batch in begun or self.loader:
                torch.rand(3), random.random(), np.random.rand()
                step += 1
                done += 1
                last = done == self.job.limit
                self.seen.steps.append((repr(batch), _generators(self.loader)))
                if step == kill_at:
                    self._die(step, epoch, done, last)
                if last:
                    break
            begun = None
            done = 0
            self._validate()
        self.seen.end = _generators(self.loader)
        data.release(self.loader)
        if self.validation is not None:
            data.release(self.validation)
        batch = None
        del self.loader, self.validation
        if self.grafted:
            assert not multiprocessing.active_children()
        return self.seen

    def _validate(self) -> None:
        if self.validation is not None:
            self.seen.steps += [(repr(batch), 0) for batch in self.validation]

    def _die(self, step: int, epoch: int, done: int, last: bool) -> None:
        self.job.store(
            {
                "position": data.position(self.loader, exhausted=last),
                "validation": None if self.validation is None else data.position(self.validation),
                "rng": rng.capture(),
                "step": step,
                "epoch": epoch,
                "done": done,
                "seen": self.seen,
            }
        )
        kill_myself()


def _generators(loader: DataLoader[Any]) -> int:
    held = [loader.generator, getattr(loader.sampler, "generator", None)]
    own = [g.get_state().numpy().tobytes() for g in held if g is not None]
    return zlib.crc32(pickle.dumps((rng.capture(), own), protocol=4))
