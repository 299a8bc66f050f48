"""Loops of other shapes with Accelerate: killed, gone on with, and compared with one that never saw the plugin."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memckpt
from accelerate_plugin import MemCheckpointPlugin
from memckpt.errors import UsageError
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import stop_agent
from tests.support.trainings import hand_loops
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.hand_loops import in_child
from tests.support.trainings.killed_programs import Kill, Run


class _Unprotected:
    """What a loop calls of the plugin, without it."""

    step = epoch = batch = 0

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.prepare = accelerator.prepare

    def epochs(self, total: int) -> Iterator[int]:
        return iter(range(total))

    def commit(self, *, epoch_over: bool = False) -> bool:
        return True

    def close(self) -> None:
        pass


class Process(hand_loops.Process):
    """One process of a run: what its loop is given.

    Args:
        ckpt: the plugin, or what stands for it in the undisturbed run; None: made here.
    """

    def __init__(self, run: Run, check: str = "replay", ckpt: Any = None) -> None:
        super().__init__(replace(run, protected=False))
        torch.manual_seed(3)  # some loops draw before the state is restored
        if ckpt is None:
            accelerator = Accelerator(cpu=True)
            ckpt = _Unprotected(accelerator)
            if run.protected:
                ckpt = MemCheckpointPlugin(accelerator, run.directory / "run", config=config(resume_check=check))
        self.ckpt: Any = ckpt

    def note(self, what: str, value: Any) -> None:
        super().note(what, float(value).hex())

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def train(self, what: str, model: Any, optimizer: Any, batch: Any) -> None:
        loss = self.loss(model, batch)
        self.ckpt.accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.note(what, loss.detach() + batch[0].sum())


def loader(samples: int, **arguments: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(samples)
    x, y = torch.randn(samples, 4, generator=generator), torch.randn(samples, 1, generator=generator)
    return DataLoader(TensorDataset(x, y), 4, shuffle=True, **arguments)


def survives(lab: Lab, loop: Callable[[Any], None], kills: list[Kill]) -> str:
    """Kill `loop` at each of `kills` in turn, let it end, and compare; what the processes have printed."""
    return hand_loops.survives(lab, loop, kills, kind=Process)


# Several loaders


@pytest.mark.parametrize(
    "arguments",
    [{}, pytest.param({"num_workers": 1, "persistent_workers": True}, marks=pytest.mark.slow)],
    ids=["alone", "persistent"],
)
@pytest.mark.parametrize("samples", [(12, 20), (20, 12)], ids=["short_first", "long_first"])
def test_loaders_of_unequal_length_in_a_zip(lab: Lab, samples: tuple[int, int], arguments: dict[str, Any]) -> None:
    def loop(process: Process) -> None:
        ckpt = process.ckpt
        model, optimizer, one, other = ckpt.prepare(
            *process.objects(), loader(samples[0], **arguments), loader(samples[1], **arguments)
        )
        for epoch in ckpt.epochs(3):
            for number, (first, second) in enumerate(zip(one, other, strict=False), start=ckpt.batch):
                process.note(f"second {epoch} {number}", second[0].sum())
                process.train(f"loss {epoch} {number}", model, optimizer, first)
                ckpt.commit()
                process.at("committed")
            process.at("epoch end")
        ckpt.close()

    survives(lab, loop, [("epoch end", 1), ("committed", 1), ("committed", 2)])


def _counted(batches: Any) -> Iterator[Any]:
    return (batch for _, batch in enumerate(batches))


def _bounded(batches: Any) -> Iterator[Any]:
    return itertools.islice(batches, 2)


@pytest.mark.parametrize(
    ("around", "kill", "said"),
    [
        (_counted, 1, "enumerate() counts from 0 again"),
        (_bounded, 1, "islice(loader, n - ckpt.batch)"),
        (iter, 4, "persistent workers, which torch seeds once"),
    ],
)
def test_what_a_loop_does_otherwise_behind_a_resume_is_said(
    lab: Lab, around: Callable[[Any], Iterator[Any]], kill: int, said: str
) -> None:
    def body(dies: Kill | None) -> None:
        process = hand_loops.process_of(lab, dies, "off", kind=Process)
        ckpt = process.ckpt
        evaluated = ckpt.accelerator.prepare(loader(4, num_workers=1, persistent_workers=True))
        model, optimizer, batches = ckpt.prepare(*process.objects(), loader(12))
        for _ in ckpt.epochs(2):
            for batch in around(batches):
                process.train("loss", model, optimizer, batch)
                ckpt.commit()
                process.at("committed")
            for _ in evaluated if around is iter else ():
                pass
        ckpt.close()

    log = in_child(lab, lambda: body(("committed", kill)), status=-signal.SIGKILL) + in_child(lab, lambda: body(None))
    assert said in log


def test_a_loader_that_is_given_twice_is_followed_once(lab: Lab) -> None:
    def loop(process: Process) -> None:
        ckpt = process.ckpt
        prepared = ckpt.accelerator.prepare(loader(12))
        model, optimizer, one, other = ckpt.prepare(*process.objects(), prepared, prepared)
        assert one is other is prepared
        for epoch in ckpt.epochs(2):
            for number, batch in enumerate(one, start=ckpt.batch):
                process.train(f"loss {epoch} {number}", model, optimizer, batch)
                ckpt.commit()
                process.at("committed")
        ckpt.close()
        assert "Followed" not in type(prepared).__name__

    survives(lab, loop, [("committed", 2)])


def test_a_loader_of_another_plugin_is_refused(lab: Lab) -> None:
    def body() -> None:
        accelerator = Accelerator(cpu=True)
        prepared = accelerator.prepare(loader(12))
        plugins = [
            MemCheckpointPlugin(accelerator, each, config=config()) for each in (lab.directory / "a", lab.run_dir)
        ]
        process = Process(Run(3, lab.directory, protected=False))
        plugins[0].prepare(*process.objects(), prepared)
        with pytest.raises(UsageError, match=r"loader 0: .* another plugin follows; close\(\) that one"):
            plugins[1].prepare(*process.objects(), prepared)
        plugins[0].close()
        assert len(list(prepared)) == 3

    in_child(lab, body)
    lab.stop()


# Steps that the gradient scaler skips


def _scale(process: Process, scale: float) -> None:
    """As fp16 does; Accelerate itself makes a scaler for accelerators only."""
    process.ckpt.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)


def test_gradients_that_are_due_behind_a_skipped_step(lab: Lab) -> None:
    def loop(process: Process) -> None:
        ckpt = process.ckpt
        _scale(process, 2.0**121)
        model, optimizer, batches = ckpt.prepare(*process.objects(), loader(48))
        for epoch in ckpt.epochs(2):
            for number, batch in enumerate(batches, start=ckpt.batch):
                loss = process.loss(model, batch) * 100
                process.note(f"loss {epoch} {number}", loss)
                ckpt.accelerator.backward(loss)
                due = (number + 1) % 3 != 0  # accumulates by hand: Accelerate knows nothing of it
                if not due:
                    optimizer.step()
                    optimizer.zero_grad()
                    if ckpt.accelerator.optimizer_step_was_skipped:
                        print("skipped")
                assert ckpt.commit() is not due or isinstance(ckpt, _Unprotected)
                process.at("committed")
        ckpt.close()

    log = survives(lab, loop, [("committed", 4), *[("committed", 3)] * 4])
    assert "skipped" in log


def test_a_scheduler_that_is_stepped_behind_a_skipped_last_step(lab: Lab) -> None:
    def loop(process: Process) -> None:
        ckpt = process.ckpt
        _scale(process, 2.0**127)
        model, optimizer = process.objects()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer, batches, scheduler = ckpt.prepare(model, optimizer, loader(4), scheduler)
        for epoch in ckpt.epochs(2):
            for batch in batches:
                ckpt.accelerator.backward(process.loss(model, batch) * 100)
                optimizer.step()
                optimizer.zero_grad()
                ckpt.commit()
            process.at("epoch end")
            scheduler.step()
            process.note(f"rate {epoch}", optimizer.param_groups[0]["lr"])
        assert ckpt.accelerator.optimizer_step_was_skipped
        ckpt.close()

    survives(lab, loop, [("epoch end", 1)])


# Looks at the data before the loop


def test_a_look_at_the_data_before_the_loop(lab: Lab) -> None:
    def loop(process: Process) -> None:
        ckpt = process.ckpt
        model, optimizer, batches = ckpt.prepare(*process.objects(), loader(24))
        process.note("mean", torch.cat([batch[0] for batch in batches]).mean())
        process.note("first", next(iter(batches))[0].sum())
        for epoch in ckpt.epochs(2):
            for number, batch in enumerate(batches, start=ckpt.batch):
                process.train(f"loss {epoch} {number}", model, optimizer, batch)
                ckpt.commit()
                process.at("committed")
        ckpt.close()

    survives(lab, loop, [("committed", 2), ("committed", 6)])


def test_a_place_that_is_asked_for_inside_the_loop(lab: Lab) -> None:
    def body() -> None:
        with MemCheckpointPlugin(Accelerator(cpu=True), lab.run_dir, config=config()) as ckpt:
            process = Process(Run(3, lab.directory), ckpt=ckpt)
            _, _, batches = ckpt.prepare(*process.objects(), loader(12))
            looks: list[Callable[[], Any]] = [lambda: ckpt.step, lambda: ckpt.epoch, lambda: next(ckpt.epochs(1))]
            for _ in batches:
                for look in looks:
                    with pytest.raises(
                        UsageError, match=r"ckpt\.\w+(\(\))?: expected its first use .* found it inside"
                    ):
                        look()
            assert ckpt.step == 0

    in_child(lab, body)


# Loops that a restart cannot repeat


def _said(lab: Lab, epoch: Callable[[Any, Any, Any, Callable[[Any], None]], None]) -> str:
    def body() -> None:
        with MemCheckpointPlugin(Accelerator(cpu=True), lab.run_dir, config=config()) as ckpt:
            process = Process(Run(3, lab.directory), ckpt=ckpt)
            model, optimizer, one, other = ckpt.prepare(*process.objects(), loader(12), loader(20))
            for _ in ckpt.epochs(2):
                epoch(ckpt, one, other, lambda batch: process.train("loss", model, optimizer, batch))

    return in_child(lab, body)


def _two_loops(ckpt: Any, one: Any, other: Any, train: Callable[[Any], None]) -> None:
    for each in (one, other):
        for batch in each:
            train(batch)
            ckpt.commit()


def _one_loader_twice(ckpt: Any, one: Any, other: Any, train: Callable[[Any], None]) -> None:
    _two_loops(ckpt, one, one, train)


def _left_behind_a_commit(ckpt: Any, one: Any, other: Any, train: Callable[[Any], None]) -> None:
    for number, batch in enumerate(one):
        train(batch)
        ckpt.commit()
        if number == 1:
            break


@pytest.mark.parametrize(
    ("epoch", "line"),
    [
        (_two_loops, "a second loop over batches in one epoch"),
        (_one_loader_twice, "a second loop over batches in one epoch"),
        (_left_behind_a_commit, r"the loop over batches was left after a commit .* commit\(epoch_over=True\)"),
    ],
)
def test_a_loop_that_a_restart_cannot_repeat_is_said(lab: Lab, epoch: Any, line: str) -> None:
    assert re.search(f"will not be exact: {line}", _said(lab, epoch))


def test_a_loop_without_a_step_left_has_its_last_state(lab: Lab) -> None:
    def body() -> None:
        accelerator = Accelerator(cpu=True)
        settings = config(storage=memckpt.StorageConfig())
        process = Process(Run(3, lab.directory), ckpt=MemCheckpointPlugin(accelerator, lab.run_dir, config=settings))
        model, optimizer, batches = process.ckpt.prepare(*process.objects(), loader(12))
        while process.ckpt.step < 2:
            for batch in batches:
                process.train("loss", model, optimizer, batch)
                process.ckpt.commit()
        process.ckpt.close()
        print("ends with", [each.tolist() for each in model.parameters()])

    first, second = (re.findall("ends with .*", in_child(lab, body)) for _ in range(2))
    stop_agent(AgentAddress.of(lab.run_dir))  # a training that was not gone on with stays held
    assert first == second != []


def test_a_draw_between_iter_and_the_first_batch_is_said(lab: Lab) -> None:
    def body(dies: Kill | None) -> None:
        process = Process(Run(3, lab.directory, kill=dies), "off")
        model, optimizer, batches = process.ckpt.prepare(*process.objects(), loader(12))
        for _ in process.ckpt.epochs(1):
            taken = iter(batches)
            for _ in range(process.ckpt.batch, 2):
                torch.rand(())
                process.train("loss", model, optimizer, next(taken))
                process.ckpt.commit()
                process.at("committed")
        process.ckpt.close()

    in_child(lab, lambda: body(("committed", 1)), status=-signal.SIGKILL)
    assert "drew from the global generators after iter()" in in_child(lab, lambda: body(None))


def _left_as_said(ckpt: Any, one: Any, other: Any, train: Callable[[Any], None]) -> None:
    for number, batch in enumerate(one, start=ckpt.batch):
        train(batch)
        ckpt.commit(epoch_over=number == 1)
        if number == 1:
            break


def _left_at_the_top(ckpt: Any, one: Any, other: Any, train: Callable[[Any], None]) -> None:
    for number, batch in enumerate(one, start=ckpt.batch):
        if number == 2:
            break
        train(batch)
        ckpt.commit()


def _together(ckpt: Any, one: Any, other: Any, train: Callable[[Any], None]) -> None:
    short = iter(one)
    for batch in other:
        try:
            extra = next(short)
        except StopIteration:
            short = iter(one)
            extra = next(short)
        train(batch)
        train(extra)
        ckpt.commit()


def _with_an_evaluation(ckpt: Any, one: Any, other: Any, train: Callable[[Any], None]) -> None:
    for batch in one:
        train(batch)
        next(iter(other))
        ckpt.commit()
    list(other)


@pytest.mark.parametrize("epoch", [_left_as_said, _left_at_the_top, _together, _with_an_evaluation])
def test_of_other_loops_nothing_is_said(lab: Lab, epoch: Any) -> None:
    assert "not exact" not in _said(lab, epoch)
