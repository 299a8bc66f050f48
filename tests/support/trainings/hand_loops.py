"""Loops over data that are written by hand: run in processes that die, and once without memckpt."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

import memckpt
from tests.support.trainings import killed_programs
from tests.support.trainings.engine_child import config, seed_everything
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_programs import REASONS, Kill, Run, check_same, finish


def _nothing(*_: Any) -> None:
    """What a call does without memckpt."""


class Unprotected:
    """What a loop calls of a session, without memckpt."""

    held = None
    epoch = batch = 0
    describe = register = restore = close = _nothing

    def loader(self, loader: Any) -> Any:
        return loader

    def epochs(self, total: int) -> Iterator[int]:
        while self.epoch < total:
            yield self.epoch
            self.epoch += 1

    def commit(self, *, epoch_over: bool = False) -> bool:
        return True


class Process(killed_programs.Process):
    """One process of a run: model, optimizer and session, as its loop is given them."""

    settings: ClassVar[dict[str, Any]] = {"slots": 3}  # beside those of :func:`config`

    def __init__(self, run: Run, check: str = "replay") -> None:
        super().__init__(run)
        self._check = check
        self.model, self.optimizer = self.objects()
        self.session: Any = Unprotected()
        self.attach()

    def attach(self) -> None:
        """Make the session of a training, with the model and optimizer of now."""
        if self.run.protected:
            settings = config(resume_check=self._check, **self.settings)
            run_dir = self.run.directory / "run"
            self.session = memckpt.attach(self.model, self.optimizer, run_dir=run_dir, config=settings)

    def objects(self) -> tuple[Any, Any]:
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        return model, torch.optim.AdamW(model.parameters(), 0.01)

    def note(self, event: str, value: Any) -> None:  # type: ignore[override]
        super().note(event, "", value)

    def backward(self, what: str, batch: Any) -> None:
        """The backward of a batch, which is noted with the loss."""
        numbers = torch.tensor([[float(each) for each in _flat(batch)]]).sum() / 50
        loss = (self.model(torch.ones(1, 4) * numbers) - 1).square().mean()
        self.differentiate(loss)
        self.note(what, (list(_flat(batch)), loss.item().hex()))

    def differentiate(self, loss: Any) -> None:
        loss.backward()

    def take(self, what: str, batch: Any) -> None:
        """Train a batch as most loops do: backward, step, commit."""
        self.backward(what, batch)
        self.step()
        self.session.commit()
        self.at("committed")

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
    lab: Lab, loop: Callable[[Any], None], kills: list[Kill], check: str = "replay", kind: Any = Process, ranks: int = 1
) -> str:
    """Kill `loop` at each of `kills` in turn, let it end, and compare what its processes noted with an undisturbed run.

    Every process begins with other random numbers, so that what is not restored shows. With ``"replay"`` as its check
    a process begins one step earlier than with ``"off"``. Of several ranks the last one dies. The output of the first
    one's processes in the killed run is returned.
    """

    def program(run: Run) -> None:
        seed_everything(run.case)
        loop(kind(run, check))

    run = Run(3, lab.directory, ranks=ranks)
    expected = finish(lab, program, replace(run, directory=lab.directory / "undisturbed", protected=False))
    attempts = [
        finish(lab, program, replace(run, kill=kill, case=3 + 100 * number))
        for number, kill in enumerate([*kills, None])
    ]
    check_same(expected, attempts)
    verdicts = [re.findall("resume check: (.*)", each.logs[0]) for each in attempts]
    assert not verdicts[0]
    assert len(verdicts[-1]) == (check != "off"), "one that dies in its first steps may have none"
    for verdict in (line for each in verdicts for line in each):
        assert "equal, bit for bit" in verdict or any(reason in verdict for reason in REASONS), verdict
    return "".join(each.logs[0] for each in attempts)


def process_of(lab: Lab, dies: Kill | None = None, check: str = "replay", kind: Callable[..., Any] = Process) -> Any:
    """A process for a test's own body: of the run in the lab's directory."""
    return kind(Run(3, lab.directory, kill=dies), check)


def in_child(lab: Lab, body: Callable[[], None], *, status: int = 0) -> str:
    """Run `body` in a new process, which ends with `status`; returns its output."""
    child = lab.fork(body, "child")
    found = child.wait()
    log = child.log.read_text()
    assert found == status, log[-6000:]
    return log
