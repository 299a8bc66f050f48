"""Loops over data that are written by hand: run in processes that die, and once without memckpt."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

import memckpt
from tests.support.faults.check_lines import REASONS
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import fresh_directory, join, run_ranks

#: Where a process dies, and the how-manieth time that it comes by.
Kill = tuple[str, int]


class Unprotected:
    """What a loop calls of a session, without memckpt."""

    held = None
    epoch = batch = 0

    def describe(self) -> str:
        return ""

    def loader(self, loader: Any) -> Any:
        return loader

    def register(self, name: str, obj: object) -> None:
        pass

    def restore(self) -> None:
        return None

    def epochs(self, total: int) -> Iterator[int]:
        return iter(range(total))

    def commit(self, *, epoch_over: bool = False) -> bool:
        return True

    def close(self) -> None:
        pass


class Process:
    """One process of a run: model, optimizer and session, as its loop is given them.

    Args:
        run_dir: of the session; None: without memckpt.
        noted: where the values go that have to come out the same.
        dies: as `Kill`; None to train to the end.
        check: the resume check.

    Attributes:
        settings: beside those of :func:`config`.
    """

    settings: ClassVar[dict[str, Any]] = {"slots": 3}

    def __init__(self, run_dir: Path | None, noted: Path, dies: Kill | None, check: str = "replay") -> None:
        self.model, self.optimizer = self.objects()
        self.session: Any = Unprotected()
        if run_dir is not None:
            self.session = memckpt.attach(
                self.model, self.optimizer, run_dir=run_dir, config=config(resume_check=check, **self.settings)
            )
        self._noted = noted
        self._dies = dies
        self._visits: dict[str, int] = {}

    def objects(self) -> tuple[Any, Any]:
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        return model, torch.optim.AdamW(model.parameters(), 0.01)

    def at(self, place: str) -> None:
        """Die here, if this is the place and the time."""
        self._visits[place] = self._visits.get(place, 0) + 1
        if self._dies == (place, self._visits[place]):
            for worker in multiprocessing.active_children():
                worker.kill()  # by themselves they would look for their parent every five seconds
            os.kill(os.getpid(), signal.SIGKILL)

    def note(self, what: str, value: object) -> None:
        with self._noted.open("a") as file:
            file.write(f"{what}: {value!r}\n")

    def backward(self, what: str, batch: Any) -> None:
        """The backward of a batch, which is noted with the loss."""
        numbers = torch.tensor([[float(each) for each in _flat(batch)]]).sum() / 50
        loss = (self.model(torch.ones(1, 4) * numbers) - 1).square().mean()
        self.differentiate(loss)
        self.note(what, (list(_flat(batch)), loss.item().hex()))

    def differentiate(self, loss: Any) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _flat(batch: Any) -> Iterator[Any]:
    if isinstance(batch, torch.Tensor):
        yield from _flat(batch.tolist())
    elif isinstance(batch, (list, tuple)):
        for each in batch:
            yield from _flat(each)
    else:
        yield batch


def survives(
    lab: Lab,
    loop: Callable[[Any], None],
    kills: list[Kill],
    check: str = "replay",
    *,
    kind: Callable[..., Process] = Process,
    ranks: int = 1,
) -> str:
    """Kill `loop` at each of `kills` in turn, let it end, and compare what its processes noted with an undisturbed run.

    Every process begins with other random numbers, so that what is not restored shows. With ``"replay"`` as its check
    a process begins one step earlier than with ``"off"``.

    Args:
        lab: starts the processes.
        loop: gets each `Process`.
        kills: one for each attempt; of several ranks the last one dies.
        check: the resume check.
        kind: makes a process, from the arguments of `Process`.
        ranks: number of ranks.

    Returns:
        The output of the first rank's processes of the killed run.
    """

    def body(noted: Path, protected: bool, seed: int, kill: Kill | None, store: Path, rank: int) -> None:
        if ranks > 1:
            join(rank, ranks, store / "store", launched=True)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        dies = kill if rank == ranks - 1 else None
        loop(kind(lab.run_dir if protected else None, noted.with_suffix(f".{rank}"), dies, check))

    def run(noted: Path, protected: bool, seed: int, kill: Kill | None) -> str:
        store = fresh_directory(lab)
        children = run_ranks(lab, ranks, partial(body, noted, protected, seed, kill, store), store, name="loop-")
        codes = [child.wait() for child in children]
        log = children[0].log.read_text()
        assert codes[-1] == (0 if kill is None else -signal.SIGKILL), children[-1].log.read_text()[-6000:]
        assert kill is not None or not any(codes), log[-6000:]
        return log

    expected, found = lab.directory / "expected", lab.directory / "found"
    run(expected, False, 3, None)
    logs = [run(found, True, 3 + 100 * number, kill) for number, kill in enumerate([*kills, None])]
    for rank in range(ranks):
        of_rank = f".{rank}"
        lines = set(found.with_suffix(of_rank).read_text().splitlines())
        assert sorted(lines) == sorted(expected.with_suffix(of_rank).read_text().splitlines())
    verdicts = [re.findall("resume check: (.*)", log) for log in logs]
    assert not verdicts[0]
    assert len(verdicts[-1]) == (check != "off"), "one that dies in its first steps may have none"
    for verdict in (line for each in verdicts for line in each):
        assert "equal, bit for bit" in verdict or any(reason in verdict for reason in REASONS), verdict
    return "".join(logs)


def in_child(lab: Lab, body: Callable[[], None], *, status: int = 0) -> str:
    """Run `body` in a new process, which ends with `status`; returns its output."""
    child = lab.fork(body, "child")
    found = child.wait()
    log = child.log.read_text()
    assert found == status, log[-6000:]
    return log
