"""Loops over DataLoaders that are written by hand: killed, gone on with, and compared with one without memckpt."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import os
import pickle
import random
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

import memckpt
from memckpt.errors import ForeignStateError, UnsupportedError, UsageError
from memckpt.session import session
from tests.support.trainings.data_jobs import NONE, PERSISTENT, TWO
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.hand_loops import Process, in_child, process_of, survives
from tests.support.trainings.loader_cases import BATCH, BATCHES, SAMPLES, Augmented, Workers, make

KILLS = [("committed", 3), ("backward", 2), ("epoch end", 1), ("epoch begins", 2), ("committed", 2)]
#: With a replay a process takes one more batch of the iteration in which it resumes.
CHECKED = pytest.mark.parametrize("check", ["replay", "off"])


def plain(process: Process, loader: Any, epochs: int = 3) -> None:
    """What a tutorial shows: shuffled batches, an evaluation behind each epoch, a scheduler for each."""
    session = process.session
    evaluated = session.loader(DataLoader(Augmented(6), BATCH))
    loader = session.loader(loader)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(process.optimizer, 0.9)
    session.register("scheduler", scheduler)
    session.restore()
    for epoch in session.epochs(epochs):
        process.at("epoch begins")
        torch.rand(())  # a resumed process draws it once more
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(loader, start=session.batch):
            process.backward(f"batch {epoch}.{number}", batch)
            process.at("backward")
            process.step()
            session.commit()
            process.at("committed")
        process.at("epoch end")
        with torch.no_grad():
            for batch in evaluated:
                process.note(f"evaluated {epoch}", batch)
        scheduler.step()
        process.note(f"epoch {epoch}", scheduler.get_last_lr())
    session.close()


@pytest.mark.promise(
    "data position, workers' generators, and those of everything below dataset, samplers and collate function: "
    "transforms, lists, what functions name (made at once, or with the first sample)"
)
@pytest.mark.promise("loops' counters, an owed validation, an owed end of epoch")
@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("shuffle", NONE),
        ("own-generator", NONE),
        ("shuffle", TWO),
        ("distributed", NONE),
        ("shuffle", PERSISTENT),
        ("stateful", TWO),
        ("distributed", PERSISTENT),
        ("generator-iter", NONE),
        ("random-object", NONE),
        ("unbatched", TWO),
    ],
    ids=str,
)
def test_a_loop_over_epochs(lab: Lab, name: str, workers: Workers) -> None:
    log = survives(lab, lambda process: plain(process, make(name, workers)), KILLS)
    said = "will not be exact: loader 1: Doubling overrides __iter__"
    assert (said in log) is (name == "generator-iter")


def test_a_run_that_has_ended_and_is_started_again_takes_no_step(lab: Lab) -> None:
    survives(lab, lambda process: plain(process, make("shuffle", NONE), epochs=2), [("epoch end", 2)])


@pytest.mark.parametrize("workers", [NONE, pytest.param(TWO, marks=pytest.mark.slow)], ids=str)
def test_a_stream_is_read_again_and_that_is_said(lab: Lab, workers: Workers) -> None:
    def loop(process: Process) -> None:
        plain(process, make("iterable", workers))

    log = survives(lab, loop, [("committed", 3), ("epoch end", 1)])
    assert "loader 1: Counting is an IterableDataset: a resume reads it again from its beginning" in log
    assert "not be exact" not in log
    assert "was left after a commit" not in log


def _forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _twice_at_a_time(process: Process, workers: Workers) -> None:
    session = process.session
    loader = session.loader(make("shuffle", workers))
    session.restore()
    for epoch in session.epochs(2):
        for number, pair in enumerate(zip(loader, loader, strict=True), start=session.batch):
            process.take(f"batch {epoch}.{number}", pair)
    session.close()


def _ahead_of_steps(process: Process, workers: Workers, depth: int = 1) -> None:
    session = process.session
    batches = _forever(session.loader(make("shuffle", workers)))
    report = session.restore()
    waiting = [next(batches) for _ in range(depth)]
    for step in range(report.step + 1 if report else 1, 3 * BATCHES):
        waiting.append(next(batches))
        batch = waiting.pop(0)
        process.take(f"step {step}", batch)
    session.close()


def _ahead_in_epochs(process: Process, workers: Workers) -> None:
    session = process.session
    loader = session.loader(make("own-generator", workers))
    session.restore()
    for epoch in session.epochs(2):
        batches = iter(loader)
        number, following = session.batch, next(batches, None)
        while following is not None:
            batch, following = following, next(batches, None)
            process.backward(f"batch {epoch}.{number}", batch)
            process.step()
            number += 1
            session.commit()
            process.at("committed")
    session.close()


@pytest.mark.parametrize("workers", [NONE, pytest.param(TWO, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    "loop",
    [_twice_at_a_time, _ahead_of_steps, partial(_ahead_of_steps, depth=2), _ahead_in_epochs],
    ids=["zip", "ahead", "two-ahead", "ahead-in-epochs"],
)
def test_batches_that_wait_come_again(lab: Lab, loop: Any, workers: Workers) -> None:
    log = survives(lab, partial(loop, workers=workers), [("committed", kill) for kill in (3, 3, 1, 2)], "off")
    # Where batches of two iterations wait, a restart cannot go back to both.
    assert ("not be exact" in log) is (getattr(loop, "keywords", None) == {"depth": 2})


def test_a_loop_that_converts_what_it_fetches_ahead_is_exact_from_its_first_epoch_on(lab: Lab) -> None:
    """Until then it may be one that has left a batch out."""

    def loop(process: Process) -> None:
        loader = process.session.loader(make("shuffle", NONE))
        report = process.session.restore()
        assert report is None or report.exact == (report.step > BATCHES)
        for epoch in process.session.epochs(3):
            batches = ([part + 0 for part in batch] for batch in loader)
            number, following = process.session.batch, next(batches, None)
            while following is not None:
                batch, following = following, next(batches, None)
                process.take(f"batch {epoch}.{number}", batch)
                number += 1
        process.session.close()

    log = survives(lab, loop, [("committed", 3), ("committed", BATCHES), ("committed", 3)], "off")
    assert "no reason any more" in log


@pytest.mark.parametrize("accumulated", ["no", "from a list", "one at a time"])
def test_batches_that_do_not_wait_are_not_taken_again(lab: Lab, accumulated: str) -> None:
    def loop(process: Process) -> None:
        session = process.session
        batches = _forever(session.loader(make("shuffle", NONE)))
        report = session.restore()
        for step in range(report.step + 1 if report else 1, 9):
            taken = (next(batches) for _ in range(1 if accumulated == "no" else 2))
            for number, batch in enumerate([*taken] if accumulated == "from a list" else taken):
                process.backward(f"step {step}.{number}", batch)
            process.step()
            session.commit()
            process.at("committed")
        session.close()

    # Until the third commit, a list may be a loop that fetches ahead and has left a batch out.
    kills = [("committed", 3 if accumulated == "from a list" else 1), ("committed", 2)]
    assert " exact" not in survives(lab, loop, kills, "off")


def said_of(lab: Lab, loop: Any, kill: tuple[str, int] | None = None, check: str = "off") -> str:
    """What a process says that runs a loop, and dies in it or ends."""
    return in_child(lab, lambda: loop(process_of(lab, kill, check)), status=-signal.SIGKILL if kill else 0)


def dies_and_goes_on(lab: Lab, loop: Any, kill: tuple[str, int], check: str = "off") -> tuple[str, str]:
    """What a process says that dies, and the next one, which ends."""
    return said_of(lab, loop, kill, check), said_of(lab, loop, None, check)


def _taken_by_a_thread(loader: Any) -> Iterator[Any]:
    batches = iter(loader)
    with ThreadPoolExecutor(1) as taker:
        while True:
            yield taker.submit(next, batches).result()


def _taken_long_before(loader: Any) -> Iterator[Any]:
    """Its end, too."""
    with ThreadPoolExecutor(1) as taker:
        yield from taker.submit(list, loader).result()


def _draws_first(loader: Any) -> Iterator[Any]:
    batches = iter(loader)
    while True:
        torch.rand(())
        yield next(batches)


@pytest.mark.parametrize(
    ("take", "line"),
    [
        (_taken_by_a_thread, "another thread than the one that trains takes the batches"),
        (_taken_long_before, "another thread than the one that trains takes the batches"),
        (_draws_first, "drew from the global generators after iter()"),
    ],
)
def test_a_loop_that_takes_its_batches_otherwise_is_told(lab: Lab, take: Any, line: str) -> None:
    def loop(process: Process) -> None:
        loader = process.session.loader(make("shuffle", NONE))
        process.session.restore()
        for _ in process.session.epochs(1):
            batches = take(loader)
            for number in range(4 - process.session.batch):
                process.take(f"batch {number}", next(batches))
        process.session.close()

    assert line in dies_and_goes_on(lab, loop, ("committed", 2))[1]


def test_a_loop_that_may_leave_batches_out_is_told(lab: Lab) -> None:
    def loop(process: Process) -> None:
        loader = process.session.loader(make("shuffle", NONE))
        process.session.restore()
        for number, batch in enumerate(loader):
            if number == 0:
                continue
            process.take(f"batch {number}", batch)
        process.session.close()

    assert "the loop took 2 batches before its first commit and 1 before each later one" in said_of(lab, loop)


def test_a_loop_that_fetches_ahead_of_several_batches_a_commit_is_told_at_first(lab: Lab) -> None:
    def loop(process: Process) -> None:
        batches = _forever(process.session.loader(make("shuffle", NONE)))
        report = process.session.restore()
        assert report is None or "may have waited for the next step" in report.reasons[0]
        following = next(batches)
        for step in range(4):
            batch, following = following, next(batches)
            process.backward(f"step {step}", batch)
            process.step()
            if step % 2:
                process.session.commit()
                process.at("committed")
        process.session.close()

    dies_and_goes_on(lab, loop, ("committed", 1))


_UNKNOWN, _TAKEN_AGAIN = "may have waited for the next step", "a restart takes the last 1 again"


@pytest.mark.parametrize(
    ("left_out", "converts", "kill", "said"),
    [
        ([1], False, 2, _UNKNOWN),
        ([1], False, 4, "not always as many"),
        ([1], True, 2, _UNKNOWN),
        ([1], True, 4, _TAKEN_AGAIN),
        ([1, 3], True, 4, _TAKEN_AGAIN),
    ],
)
def test_a_loop_that_fetches_ahead_and_leaves_batches_out_is_told(
    lab: Lab, left_out: list[int], converts: bool, kill: int, said: str
) -> None:
    def loop(process: Process) -> None:
        loader = _forever(process.session.loader(make("shuffle", NONE)))
        batches = ([part + 0 for part in batch] for batch in loader) if converts else loader
        report = process.session.restore()
        assert report is None or not report.exact
        following = next(batches)
        for step in range(8):
            batch, following = following, next(batches)
            if step not in left_out:
                process.take(f"step {step}", batch)
        process.session.close()

    assert said in "".join(dies_and_goes_on(lab, loop, ("committed", kill)))


def test_a_look_at_the_data_before_the_loop_is_no_batch_fetched_ahead(lab: Lab) -> None:
    def loop(process: Process) -> None:
        loader = process.session.loader(make("shuffle", NONE))
        for batch in loader:
            assert batch
        report = process.session.restore()
        assert report is None or report.exact
        for step, batch in enumerate(loader, report.step if report else 0):
            process.backward(f"step {step}", batch)
            process.step()
            process.session.commit()
            process.at("committed")
        process.session.close()

    assert "not be exact" not in survives(lab, loop, [("committed", 3), ("committed", 2)], "off")


def _epochs(process: Process, exact: bool = True) -> Iterator[tuple[str, Any, Any]]:
    """Names of batches, the loader, and its batches, over two epochs."""
    loader = process.session.loader(make("shuffle", NONE))
    report = process.session.restore()
    assert report is None or report.exact == exact
    for epoch in process.session.epochs(2):
        for number, batch in enumerate(loader, start=process.session.batch):
            yield f"{epoch}.{number}", loader, batch
    process.session.close()


def _takes_a_picture(process: Process) -> None:
    for name, loader, batch in _epochs(process):
        process.backward(name, batch)
        if name[-1] in "14":
            process.note(f"picture {name}", next(iter(loader)))
        process.step()
        process.session.commit()
        process.at("committed")


def _evaluates_and_keeps(process: Process) -> None:
    kept = None
    for name, loader, batch in _epochs(process):
        process.backward(name, batch)
        process.step()
        if name[-1] in "14":
            kept = iter(loader)
            process.note(f"evaluated {name}", next(kept))
        process.session.commit()
        process.at("committed")


def _evaluates_all(process: Process) -> None:
    for name, loader, batch in _epochs(process):
        process.backward(name, batch)
        process.step()
        if name[-1] == "2":
            process.note(f"evaluated {name}", [*loader])
        process.session.commit()
        process.at("committed")


@pytest.mark.parametrize("loop", [_takes_a_picture, _evaluates_and_keeps, _evaluates_all])
def test_a_look_at_the_same_loader_does_not_lose_the_place_in_its_pass(lab: Lab, loop: Any) -> None:
    assert "not be exact" not in survives(lab, loop, [("committed", 2), ("committed", 3), ("committed", 5)])


def test_a_look_above_the_pass_leaves_the_place_to_it(lab: Lab) -> None:
    def loop(process: Process) -> None:
        loader = process.session.loader(make("shuffle", NONE))
        process.session.restore()
        for epoch in process.session.epochs(2):
            next(iter(loader))
            for number, batch in enumerate(loader, start=process.session.batch):
                process.take(f"{epoch}.{number}", batch)
        process.session.close()

    survives(lab, loop, [("committed", 1), ("committed", 3), ("committed", 3)], "off")


def test_lists_of_batches_up_to_the_end_of_each_pass(lab: Lab) -> None:
    """The last list is shorter, and the loader's end is known before its step."""

    def loop(process: Process) -> None:
        loader = process.session.loader(make("shuffle", NONE))
        process.session.restore()
        for epoch in process.session.epochs(6):
            batches = iter(loader)
            while taken := list(itertools.islice(batches, 4)):
                for batch in taken:
                    process.backward(f"epoch {epoch}", batch)
                process.step()
                process.session.commit()
                process.at("committed")
        process.session.close()

    assert BATCHES % 4
    survives(lab, loop, [("committed", 5), ("committed", 2), ("committed", 3)], "off")


def test_accumulation_of_another_number_each_time_fetches_nothing_ahead(lab: Lab) -> None:
    def loop(process: Process) -> None:
        session = process.session
        batches = _forever(session.loader(make("shuffle", NONE)))
        report = session.restore()
        for step in range(report.step + 1 if report else 1, 9):
            for number in range((3, 1, 2)[step % 3]):
                process.backward(f"step {step}.{number}", next(batches))
            process.step()
            session.commit()
            process.at("committed")
        session.close()

    assert " exact" not in survives(lab, loop, [("committed", 1), ("committed", 3), ("committed", 2)], "off")


def test_a_repeated_step_proves_the_batch_that_was_fetched_ahead(lab: Lab) -> None:
    def loop(process: Process) -> None:
        loader = process.session.loader(make("shuffle", NONE))
        report = process.session.restore()
        batches = ([part + 0 for part in batch] for batch in _forever(loader))
        following = next(batches)
        for step in range(report.step + 1 if report else 1, 10):
            batch, following = following, next(batches)
            process.take(f"step {step}", batch)
        process.session.close()

    assert "no reason any more" in survives(lab, loop, [("committed", 4), ("committed", 3)])


def _draws_before_a_batch(process: Process) -> None:
    loader = process.session.loader(make("shuffle", NONE))
    process.session.restore()
    batches = iter(loader)
    for _ in range(4):
        torch.rand(())
        process.take("batch", next(batches))
    process.session.close()


def _leaves_a_validation(process: Process) -> None:
    validation = process.session.loader(DataLoader(Augmented(6), BATCH))
    for name, _, batch in _epochs(process, exact=False):
        process.take(name, batch)
        if name == "0.1":
            kept = iter(validation)
            process.note("validated", next(kept))


def _counts_anew(process: Process) -> None:
    loader = process.session.loader(make("shuffle", NONE))
    process.session.restore()
    for _ in process.session.epochs(1):
        for _, batch in enumerate(loader):
            process.take("batch", batch)
    process.session.close()


def _bounded(process: Process, zipped: bool = False) -> None:
    loader = process.session.loader(make("shuffle", NONE))
    process.session.restore()
    for _ in process.session.epochs(1):
        for batch in zip(range(3), loader, strict=False) if zipped else itertools.islice(loader, 3):
            process.take("batch", batch[1] if zipped else batch)
    process.session.close()


def _seeds_evaluation_once(process: Process) -> None:
    loader = process.session.loader(make("shuffle", NONE))
    evaluated = DataLoader(Augmented(6), BATCH, num_workers=1, persistent_workers=True)
    process.session.restore()
    for _ in process.session.epochs(2):
        for batch in loader:
            process.take("batch", batch)
        for _ in evaluated:
            pass
    process.session.close()


def _choose_samples(process: Process, again: bool = False) -> None:
    chosen = torch.utils.data.Subset(Augmented(6), range(4))
    loader = process.session.loader(DataLoader(chosen, 2))
    report = process.session.restore()
    for epoch in process.session.epochs(3):
        if again:
            chosen.indices = [epoch, 1, 2, 3]
        for batch in loader:
            process.take("batch", batch)
        chosen.indices = [epoch, 5, 1, 2]
    process.session.close()
    assert not again or report is None or report.exact


class OfEpoch(Dataset[Any]):
    """Samples follow from attributes that a loop sets."""

    def __init__(self) -> None:
        self.epoch, self.ahead, self.order = 0, False, [*range(SAMPLES)]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(1000 * self.epoch + 100 * self.ahead + self.order[index])


def _sets_the_epoch(process: Process, workers: Workers, orders: bool = False) -> None:
    """Workers that persist keep the copy of the first epoch; others get one of each."""
    data = OfEpoch()
    loader = process.session.loader(DataLoader(data, BATCH, shuffle=True, **workers.arguments()))
    report = process.session.restore()
    for epoch in process.session.epochs(4):
        data.epoch, data.ahead = epoch + 7, epoch > 1
        if orders and epoch:
            data.order = [*reversed(data.order)]
        for number, batch in enumerate(loader, start=process.session.batch):
            process.take(f"batch {epoch}.{number}", batch)
        process.at("epoch end")
    process.session.close()
    if not orders:
        _is_exact(report)


@pytest.mark.promise("numbers of a dataset, as the workers have them that were made of it")
@CHECKED
@pytest.mark.parametrize("workers", [PERSISTENT, TWO], ids=str)
def test_workers_get_the_copy_of_the_dataset_that_they_had(lab: Lab, workers: Workers, check: str) -> None:
    kills = [("committed", 2), ("committed", BATCHES), ("epoch end", 1), ("committed", 1)]
    survives(lab, lambda process: _sets_the_epoch(process, workers), kills, check)


def test_samples_that_are_chosen_again_behind_a_resume_are_the_same(lab: Lab) -> None:
    dies_and_goes_on(lab, partial(_choose_samples, again=True), ("committed", 3))


def test_loaders_that_are_drawn_in_turn_raise_no_alarm(lab: Lab) -> None:
    def forever(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    def loop(process: Process) -> None:
        loaders = [process.session.loader(DataLoader(Augmented(size), 4, shuffle=True)) for size in (20, 12)]
        report = process.session.restore()
        pairs = [forever(each) for each in loaders]
        for step in range(report.step + 1 if report else 1, 31):
            process.take(f"batch {step}", next(pairs[step % 2]))
        process.session.close()
        assert report is None or report.exact

    survives(lab, loop, [("committed", 11), ("committed", 7)])


@pytest.mark.parametrize("counts", [True, False])
def test_what_the_top_of_an_epoch_changes_is_not_changed_twice(lab: Lab, counts: bool) -> None:
    """Settings of optimizer, modules and parameters, and a registered schedule.

    What only `epochs()` knows is no change that the user means.
    """

    def loop(process: Process) -> None:
        session, group = process.session, process.optimizer.param_groups[0]
        first, dropout, last = process.model
        loader = session.loader(make("shuffle", NONE))
        schedule = torch.optim.lr_scheduler.StepLR(process.optimizer, 1, 0.5)
        session.register("schedule", schedule)
        report = session.restore()
        for epoch in session.epochs(3) if counts else range(2):
            group["weight_decay"] = group.get("weight_decay", 0) + 0.1
            schedule.step()
            first.bias.requires_grad_(not first.bias.requires_grad)
            dropout.p *= 1.5
            last.train(not last.training)
            for number, batch in enumerate(loader, start=session.batch):
                process.note(f"rates {epoch}.{number}", (group["lr"], group["weight_decay"], schedule.last_epoch))
                process.note(f"modules {epoch}.{number}", (first.bias.requires_grad, dropout.p, last.training))
                process.take(f"batch {epoch}.{number}", batch)
        session.close()
        assert report is None or report.exact is counts

    if counts:
        survives(lab, loop, [("committed", 3), ("committed", 2), ("committed", 5)])
    else:
        _, second = dies_and_goes_on(lab, loop, ("committed", 2))
        assert "groups was changed between restore() and the first batch" in second


def test_what_stands_between_two_loops_is_not_done_twice(lab: Lab) -> None:
    """Killed in each of them, and behind the last commit of the first."""

    def loop(process: Process) -> None:
        session, group = process.session, process.optimizer.param_groups[0]
        loader = session.loader(make("shuffle", NONE))
        report = session.restore()
        group["weight_decay"] = 0.125
        for total in (2, 4):
            if total == 4:
                group["lr"] = 0.02
            for epoch in session.epochs(total):
                for number, batch in enumerate(loader, start=session.batch):
                    process.note(f"rate {epoch}.{number}", (group["lr"], group["weight_decay"]))
                    process.take(f"batch {epoch}.{number}", batch)
                group["lr"] *= 0.5
        session.close()
        assert report is None or report.exact

    survives(
        lab, loop, [("committed", 2), ("committed", 2 * BATCHES - 2), ("committed", 2), ("committed", BATCHES + 3)]
    )


@pytest.mark.promise(
    "settings of optimizers, or what is registered, changed between `restore()` and `epochs()`; tensors written "
    "between `restore()` and the first batch"
)
def test_a_rate_that_is_set_before_the_loop_again_is_kept_and_said(lab: Lab) -> None:
    """It may be meant. Where it is no other one than the run had come to, nothing is said."""

    def loop(process: Process) -> None:
        loader = process.session.loader(make("shuffle", NONE))
        process.session.restore()
        process.optimizer.param_groups[0]["lr"] = 0.25
        for _ in process.session.epochs(2):
            for batch in loader:
                process.take("batch", batch)
            process.optimizer.param_groups[0]["lr"] *= 0.5
        process.session.close()

    said = "groups was changed between restore() and the first batch"
    assert said not in said_of(lab, loop, ("committed", 2))
    assert said not in said_of(lab, loop, ("committed", BATCHES - 1))
    assert said in said_of(lab, loop)


def test_a_tensor_that_is_written_above_a_resumed_pass_is_named(lab: Lab) -> None:
    def loop(process: Process) -> None:
        loader = process.session.loader(make("shuffle", NONE))
        process.session.restore()
        for _ in process.session.epochs(1):
            with torch.no_grad():
                next(process.model.parameters()).mul_(0.9)
            for batch in loader:
                process.take("batch", batch)
        process.session.close()

    assert "was written between restore() and the first batch" in dies_and_goes_on(lab, loop, ("committed", 2))[1]


def _evaluates_a_part(process: Process) -> None:
    """Another one behind each epoch."""
    loader = process.session.loader(make("shuffle", NONE))
    some = RandomSampler(range(20), num_samples=3, generator=torch.Generator().manual_seed(5))
    evaluated = DataLoader(range(20), 3, sampler=some)
    process.session.restore()
    for _ in process.session.epochs(3):
        for batch in loader:
            process.take("batch", batch)
        process.note("evaluated", [batch.tolist() for batch in evaluated])
    process.session.close()


def _draws_now_and_then(process: Process, loads: bool = True) -> None:
    generator = np.random.default_rng(3)
    loader = process.session.loader(make("shuffle", NONE)) if loads else None
    report = process.session.restore()
    if loader is None:
        for step in range(report.step + 1 if report else 1, 12):
            process.take("batch", torch.tensor(generator.random(4) if step % 3 == 0 else 1.0))
    for _ in process.session.epochs(3) if loader is not None else ():
        for number, batch in enumerate(loader, start=process.session.batch):
            process.take("batch", [batch, generator.random() if number % 3 == 0 else 0.0])
    process.session.close()


def test_a_generator_in_a_variable_that_the_repeated_step_does_not_use_is_said(lab: Lab) -> None:
    _, second = dies_and_goes_on(lab, partial(_draws_now_and_then, loads=False), ("committed", 8), "replay")
    assert "DIFFERENT: generators the variable generator of _draws_now_and_then()" in second


def _is_exact(report: Any) -> None:
    """Asserts, since a function with an assertion of pytest's is not looked into."""
    assert report is None or report.exact, report.reasons


def _draws_what_comes_again(process: Process) -> None:
    seeded, registered, own = torch.Generator(), torch.Generator(), torch.Generator().manual_seed(4)
    unused, before = np.random.default_rng(), random.Random(3)
    before.shuffle([1, 2, 3])
    loader = process.session.loader(DataLoader(Augmented(SAMPLES), BATCH, shuffle=True, generator=own))
    process.session.register("registered", registered)
    report = process.session.restore()
    for epoch in process.session.epochs(3):
        seeded.manual_seed(epoch)
        noise = torch.rand(3, generator=seeded)
        for batch in loader:
            process.take("batch", [batch, noise, torch.rand(2, generator=registered)])
        process.note("unused", type(unused).__name__)
    process.session.close()
    _is_exact(report)


def _seeds_each_batch(process: Process) -> None:
    generator = torch.Generator()
    loader = process.session.loader(make("shuffle", NONE))
    report = process.session.restore()
    for epoch in process.session.epochs(3):
        for number, batch in enumerate(loader, start=process.session.batch):
            generator.manual_seed(BATCHES * epoch + number)
            process.take("batch", [batch, torch.rand(2, generator=generator)])
    process.session.close()
    _is_exact(report)


def _seeds_each_step(process: Process) -> None:
    generator = torch.Generator()
    report = process.session.restore()
    for step in range(report.step + 1 if report else 1, 12):
        process.take("batch", torch.rand(4, generator=generator.manual_seed(step)))
    process.session.close()
    _is_exact(report)


@pytest.mark.parametrize("check", ["replay", "off"])
@pytest.mark.parametrize("loop", [_draws_what_comes_again, _seeds_each_batch, _seeds_each_step])
def test_generators_that_are_carried_or_seeded_again_raise_no_alarm(lab: Lab, loop: Any, check: str) -> None:
    survives(lab, loop, [("committed", 7), ("committed", 3)], check)


@pytest.mark.promise("a generator in a variable of the loop, or of a loader there, that has drawn in training")
@pytest.mark.promise("numbers and indices of a dataset that were changed before the pass, and are not made again")
@pytest.mark.promise("indices of a dataset that were changed after workers were made, which keep a copy")
@pytest.mark.promise(
    "a plain loop of which it is not known how many batches it has fetched ahead; one that draws from the global "
    "generators between `iter()` and the first batch; a pass over a second loader that may have been left"
)
@pytest.mark.promise("a loop that counts the batches of a pass with `enumerate()` from 0 again")
@pytest.mark.promise("a pass that `islice()` or `zip(range(n), ...)` ends, in a loop that does not ask for `batch`")
@pytest.mark.promise("a loader with persistent workers that is not followed: an evaluation's, say")
@pytest.mark.parametrize(
    ("loop", "kill", "said"),
    [
        (_draws_before_a_batch, 2, "before its first batch, and a resume takes these draws twice"),
        (_leaves_a_validation, 4, "its pass has given batches for one step, and none since"),
        (_counts_anew, 2, "enumerate() counts from 0 again"),
        (_bounded, 2, "the pass becomes longer than it was"),
        (partial(_bounded, zipped=True), 2, "the pass becomes longer than it was"),
        (_seeds_evaluation_once, 5, "persistent workers, which torch seeds once"),
        (_choose_samples, 3, "loader.dataset.indices had been changed before this pass"),
        (
            partial(_sets_the_epoch, workers=PERSISTENT, orders=True),
            BATCHES + 2,
            "loader.dataset.order was another one in the copy of the dataset that the workers had",
        ),
        (_evaluates_a_part, BATCHES + 2, "the variable some.generator of _evaluates_a_part() is not carried"),
        (_draws_now_and_then, 6, "the variable generator of _draws_now_and_then() is not carried"),
    ],
)
def test_what_a_loop_does_otherwise_behind_a_resume_is_said(lab: Lab, loop: Any, kill: int, said: str) -> None:
    assert said in "".join(dies_and_goes_on(lab, loop, ("committed", kill)))


def _commits_twice(process: Process) -> None:
    loader = process.session.loader(make("shuffle", NONE))
    process.session.restore()
    for _ in process.session.epochs(2):
        for batch in loader:
            process.take("batch", batch)
            process.session.commit()
    process.session.close()


def _counts_passes(process: Process, total: int = 2, asks: bool = False) -> None:
    loader = process.session.loader(make("shuffle", NONE))
    process.session.restore()
    assert not asks or process.session.batch < BATCHES
    for _ in range(total):
        for batch in loader:
            process.take("batch", batch)
    process.session.close()


def _skips_passes(process: Process, total: int = 2) -> None:
    loader = process.session.loader(make("shuffle", NONE))
    report = process.session.restore()
    for epoch in range(total):
        if report and epoch < report.step // BATCHES:
            continue
        for batch in loader:
            process.take("batch", batch)
    process.session.close()


@pytest.mark.parametrize(
    ("loop", "kill", "said"),
    [
        (_commits_twice, BATCHES + 2, "call it once for each batch, behind all that belongs to it"),
        (_counts_passes, BATCHES + 2, "write `for epoch in session.epochs(n)`"),
    ],
)
def test_a_commit_too_many_and_a_range_of_passes_are_said_with_the_line_to_write(
    lab: Lab, loop: Any, kill: int, said: str
) -> None:
    first, second = dies_and_goes_on(lab, loop, ("committed", kill))
    assert [log.count(said) for log in (first, second)] == [loop is _commits_twice, 1]


@pytest.mark.parametrize(
    ("loop", "kill"),
    [
        (_counts_passes, 2),  # of the first pass: nothing is trained twice
        (_skips_passes, BATCHES + 2),
        (partial(_counts_passes, asks=True), BATCHES + 2),
    ],
)
def test_a_range_of_passes_that_resumes_right_is_not_told(lab: Lab, loop: Any, kill: int) -> None:
    assert "session.epochs(n)" not in "".join(dies_and_goes_on(lab, loop, ("committed", kill)))


def test_a_pass_that_is_bounded_by_what_is_left_is_exact(lab: Lab) -> None:
    """So is one whose bound is no less than what is left."""

    def loop(process: Process) -> None:
        session = process.session
        loader = session.loader(make("shuffle", NONE))
        report = session.restore()
        for epoch in session.epochs(2):
            if epoch:
                batches = itertools.islice(loader, 3 - session.batch)
            else:
                batches = (batch for _, batch in zip(range(BATCHES), loader, strict=False))
            for batch in batches:
                process.take("batch", batch)
                assert report is None or report.exact
        session.close()

    log = survives(lab, loop, [("committed", 2), ("committed", BATCHES)])
    assert "bounds its pass" not in log


@pytest.mark.promise("a loader in `itertools.cycle`, which hands out again the batches that it has kept")
@pytest.mark.parametrize("how", ["zip", "alone", "zipped inside"])
def test_a_cycle_that_keeps_batches_is_told_from_its_first_commit_on(lab: Lab, how: str) -> None:
    """A resumed process keeps only the batches behind the one that it resumes at."""

    def loop(process: Process) -> None:
        one, other = process.session.loader(make("shuffle", NONE)), process.session.loader(DataLoader(Augmented(6), 3))
        report = process.session.restore()
        assert report is None or "itertools.cycle" in report.reasons[0]
        pairs = {
            "zip": lambda: zip(one, itertools.cycle(other), strict=False),
            "alone": lambda: itertools.cycle(one),
            "zipped inside": lambda: itertools.cycle(zip(one, map(list, other), strict=False)),
        }
        for batch in itertools.islice(pairs[how](), 4):
            process.take("batch", batch)
        process.session.close()

    first, second = dies_and_goes_on(lab, loop, ("committed", 1))
    assert f"loader {int(how == 'zip')}: itertools.cycle" in first
    assert "second loop" not in first + second


@pytest.mark.parametrize(("settings", "held"), [({}, 6), ({"redo": "snapshot", "snapshot_every_steps": 4}, 4)])
def test_what_stays_held_behind_a_process_is_said_once_with_how_to_let_go_of_it(
    lab: Lab, settings: dict[str, Any], held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With snapshots that is an older step than the last one."""
    monkeypatch.setattr(Process, "settings", {"slots": 3, **settings})

    def loop(process: Process) -> None:
        process.session.restore()
        for _ in range(6):
            process.take("batch", torch.ones(1))
        assert process.session in session._sessions  # which are asked as the process ends
        process.session.close(finished=False)
        process.session._say_what_stays()

    log = said_of(lab, loop)
    lab.stop()
    assert log.count("stays in memory (") == log.count(f"step {held} stays in memory (") == 1
    assert "let go of it with `memckpt stop " in log


def test_metrics_stay_behind_the_end_and_know_of_the_final_step_in_storage(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Process, "settings", {"slots": 3, "storage": memckpt.StorageConfig()})

    def loop(process: Process) -> None:
        process.session.restore()
        for _ in range(3):
            process.take("batch", torch.ones(1))
        before = process.session.metrics()
        process.session.close()
        after = process.session.metrics()
        assert before["held_bytes"] > 0
        assert after["stored_bytes"] > before["stored_bytes"]
        changing = ("stored_bytes", "stored_age_s", "stall_ms")
        assert after == before | {"stored_step": 3.0} | {name: after[name] for name in changing}
        assert process.session.metrics() == after
        assert process.session.stored_step == 3

    said_of(lab, loop)


def test_a_protected_model_can_be_copied_and_pickled(lab: Lab) -> None:
    def loop(process: Process) -> None:
        process.session.restore()
        copied = pickle.loads(pickle.dumps(copy.deepcopy(process.model)))
        assert [*copied.state_dict()] == [*process.model.state_dict()]
        process.session.close()

    said_of(lab, loop)


@pytest.mark.parametrize("made", ["in each epoch", "once"])
def test_a_pass_that_is_taken_up_in_a_later_epoch_is_told(lab: Lab, made: str) -> None:
    """A generator around a loader: whether it is a new one in each epoch, the resumed process cannot know."""

    def forever(loader: Iterable[Any]) -> Iterator[Any]:
        while True:
            yield from loader

    def loop(process: Process) -> None:
        session = process.session
        one, other = session.loader(DataLoader(Augmented(6), BATCH)), session.loader(make("shuffle", NONE))
        report, once = session.restore(), forever(other)
        for _ in session.epochs(2):
            pairs = zip(one, once if made == "once" else forever(other), strict=False)
            for number, batch in enumerate(pairs, start=session.batch):
                process.take(f"batch {number}", list(batch))
            process.at("epoch end")
        session.close()
        assert report is None or (not report.exact and "in the middle of a pass" in report.reasons[0])

    dies_and_goes_on(lab, loop, ("epoch end", 1))


def test_a_function_that_names_a_cycle_of_something_else_is_not_told(lab: Lab) -> None:
    def loop(process: Process) -> None:
        loader = process.session.loader(make("shuffle", NONE))
        names = itertools.cycle("ab")
        process.session.restore()
        for epoch in process.session.epochs(2):
            for number, batch in enumerate(loader, start=process.session.batch):
                process.take(f"batch {epoch}.{number}{next(names) * 0}", batch)
        process.session.close()

    assert "not be exact" not in survives(lab, loop, [("committed", 3), ("committed", 2)], "off")


class Counted(Augmented):
    """Counts the samples that it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.given = 0

    def __getitem__(self, index: int) -> Any:
        self.given += 1
        return self.given


class Refined(Augmented):
    """Keeps samples as it reads them first; training may write to them."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(SAMPLES)

    def __getitem__(self, index: int) -> Any:
        self.kept[index] = index
        return self.kept[index]


@pytest.mark.parametrize("refines", [False, True])
def test_a_dataset_that_training_writes_to_is_told(lab: Lab, refines: bool) -> None:
    """Not one that keeps what it has read."""

    def loop(process: Process) -> None:
        dataset = Refined()
        loader = process.session.loader(DataLoader(dataset, BATCH))
        process.session.restore()
        for batch in loader:
            if refines:
                dataset.kept[0] = 0.5
            process.take("batch", batch)
        process.session.close()

    assert ("training writes to the tensor Refined.kept of a dataset" in said_of(lab, loop)) is refines


@pytest.mark.parametrize("registered", [False, True])
def test_a_dataset_that_counts_is_told_unless_it_is_registered(lab: Lab, registered: bool) -> None:
    def loop(process: Process) -> None:
        loader = process.session.loader(DataLoader(Counted(), BATCH))
        if registered:
            process.session.register("data", loader.dataset, attributes=["given"])
        process.session.restore()
        for batch in loader:
            process.take("batch", batch)
        process.session.close()

    assert ("the number Counted.given of a dataset changes" in said_of(lab, loop)) is not registered


class Unseeded(torch.utils.data.IterableDataset[Any]):
    """A stream in another order in each process."""

    def __iter__(self) -> Iterator[Any]:
        return iter(random.Random(os.getpid()).sample(range(24), 24))


@pytest.mark.promise("a stream that gives other samples when it is read again")
def test_a_stream_that_is_another_when_it_is_read_again_is_told(lab: Lab) -> None:
    def loop(process: Process) -> None:
        loader = process.session.loader(DataLoader(Unseeded(), 4))
        report = process.session.restore()
        assert report is None or report.exact
        for batch in loader:
            assert report is None or (process.session.report is report and not report.exact)
            process.take("batch", batch)
        process.session.close()

    _, log = dies_and_goes_on(lab, loop, ("committed", 3))
    assert "the stream Unseeded gave other samples when its first 3 batches were read again" in log


class CountsPasses(IterableDataset[Any]):
    """Each pass is another one, and each sample is counted."""

    def __init__(self, at_once: bool) -> None:
        self.passes, self.given, self.size, self._at_once = 0, 0.0, 10, at_once

    def __iter__(self) -> Iterator[Any]:
        if not self._at_once:
            return self._samples()
        self.passes += 1
        return iter([torch.tensor(100.0 * self.passes + number) for number in range(self.size)])

    def _samples(self) -> Iterator[Any]:
        self.passes += 1
        for number in range(self.size):
            self.given += 0.5
            yield torch.tensor(100 * self.passes + number + self.given)


@pytest.mark.promise("numbers that a stream keeps: of passes, of samples")
@CHECKED
@pytest.mark.parametrize("at_once", [False, True])
def test_a_stream_that_counts_its_passes(lab: Lab, at_once: bool, check: str) -> None:
    """It begins to count when `iter()` is called, or with its first sample."""

    def loop(process: Process) -> None:
        session = process.session
        loader = session.loader(DataLoader(CountsPasses(at_once), 4))
        report = session.restore()
        for epoch in session.epochs(4):
            for number, batch in enumerate(loader, start=session.batch):
                process.take(f"batch {epoch}.{number}", batch)
            process.at("epoch end")
        session.close()
        assert report is None or report.exact

    survives(lab, loop, [("committed", 5), ("epoch end", 1), ("committed", 3), ("committed", 2)], check)


def test_accumulated_batches_are_taken_again(lab: Lab) -> None:
    def loop(process: Process) -> None:
        session = process.session
        loader = session.loader(make("shuffle", NONE))
        session.restore()
        for epoch in session.epochs(2):
            for number, batch in enumerate(loader, start=session.batch):
                process.backward(f"batch {epoch}.{number}", batch)
                process.at("backward")
                if number % 2:
                    process.step()
                    session.commit()
                process.at("batch ends")
        session.close()

    survives(lab, loop, [("backward", 4), ("batch ends", 3), ("batch ends", 4)])


@pytest.mark.promise("the remainder of an accumulation, committed behind the loop over a followed loader")
@pytest.mark.parametrize("redo", ["lazy", "eager", "snapshot"])
def test_a_remainder_behind_the_loop_over_batches_is_taken_again(lab: Lab, redo: str) -> None:
    """So is what the epoch's end does; a record that ends in the next epoch has two steps."""

    class Redone(Process):
        settings: ClassVar[dict[str, Any]] = {**Process.settings, "redo": redo}

    def loop(process: Process) -> None:
        session = process.session
        loader = session.loader(make("shuffle", NONE))
        schedule = torch.optim.lr_scheduler.ExponentialLR(process.optimizer, 0.9)
        session.register("schedule", schedule)
        report = session.restore()
        for epoch in session.epochs(5):
            number = session.batch - 1
            for number, batch in enumerate(loader, start=session.batch):
                process.backward(f"batch {epoch}.{number}", batch)
                if number % 4 == 3:
                    process.step()
                    session.commit()
                    process.at("committed")
            if number % 4 != 3:
                process.step()
                assert session.commit() is not process.run.protected
                process.at("remainder")
            schedule.step()
            process.note(f"rate {epoch}", schedule.get_last_lr())
        session.close()
        assert report is None or report.exact

    kills = [("remainder", 1), ("committed", 2), ("remainder", 2), ("committed", 1)]
    log = survives(lab, loop, kills, "off", kind=Redone)
    assert "ends no record" in log
    assert "nothing was left" not in log


@CHECKED
def test_an_epoch_that_ends_before_its_data_does(lab: Lab, check: str) -> None:
    def loop(process: Process) -> None:
        session = process.session
        loader = session.loader(make("shuffle", NONE))
        session.restore()
        for epoch in session.epochs(3):
            for number, batch in enumerate(loader, start=session.batch):
                process.backward(f"batch {epoch}.{number}", batch)
                process.step()
                session.commit(epoch_over=number == 2)
                process.at("committed")
                if number == 2:
                    break
            process.at("epoch end")
        session.close()

    log = survives(lab, loop, [("committed", 2), ("committed", 1), ("epoch end", 1)], check)
    assert "was left after a commit" not in log


@CHECKED
def test_two_loaders_of_unequal_length_in_a_zip(lab: Lab, check: str) -> None:
    def loop(process: Process) -> None:
        session = process.session
        one, other = session.loader(DataLoader(Augmented(12), BATCH)), session.loader(make("shuffle", NONE))
        session.restore()
        for epoch in session.epochs(3):
            for number, (first, second) in enumerate(zip(one, other, strict=False), start=session.batch):
                process.take(f"batch {epoch}.{number}", [first, second])
            process.at("epoch end")
        session.close()

    survives(lab, loop, [("epoch end", 1), ("committed", 1), ("committed", 2)], check)


@CHECKED
def test_a_loader_whose_passes_outlive_epochs_beside_one_that_is_counted(lab: Lab, check: str) -> None:
    """As in FixMatch: the loop counts the batches of the first, which has another length."""

    def loop(process: Process) -> None:
        session = process.session
        counted, beside = session.loader(DataLoader(Augmented(16), BATCH)), session.loader(make("shuffle", NONE))
        session.restore()
        others: Iterator[Any] | None = None
        for epoch in session.epochs(3):
            for number, batch in enumerate(counted, session.batch):
                if others is None:
                    others = iter(beside)
                try:
                    other = next(others)
                except StopIteration:
                    others = iter(beside)
                    other = next(others)
                process.take(f"batch {epoch}.{number}", [batch, other])
        session.close()

    survives(lab, loop, [("committed", 6), ("committed", 1), ("committed", 2)], check)


def test_a_loop_that_counts_steps_and_a_look_before_it(lab: Lab) -> None:
    def loop(process: Process) -> None:
        session = process.session
        loader = session.loader(make("shuffle", NONE))
        process.note("look", [each.shape for each in next(iter(loader))])
        report = session.restore()
        step = report.step if report else 0
        while step < 15:
            for batch in loader:
                step += 1
                process.take(f"step {step}", batch)
                if step == 15:
                    break
        session.close()

    survives(lab, loop, [("committed", 4), ("committed", 2), ("committed", 5)])


def test_a_batch_drawn_anew_for_each_step(lab: Lab) -> None:
    def loop(process: Process) -> None:
        session = process.session
        loader = session.loader(make("shuffle", NONE))
        report = session.restore()
        for step in range(report.step + 1 if report else 1, 8):
            process.take(f"step {step}", next(iter(loader)))
        session.close()

    survives(lab, loop, [("committed", 3), ("committed", 2)])


# What is said, and refused


def follow_too_late(process: Process, loader: Any) -> None:
    process.session.restore()
    process.session.loader(loader)


def follow_a_list(process: Process, loader: Any) -> None:
    process.session.loader([1, 2])


def follow_another_s(process: Process, loader: Any) -> None:
    process.session.loader(loader)
    elsewhere = process.run.directory / "other"
    with contextlib.closing(
        memckpt.attach(process.model, process.optimizer, run_dir=elsewhere, config=config())
    ) as one:
        one.loader(loader)


def commit_behind_the_batches(process: Process, loader: Any) -> None:
    process.session.loader(loader)
    process.session.restore()
    for _ in process.session.epochs(1):
        for batch in loader:
            process.backward("", batch)
        process.step()
        process.session.commit()


def commit_behind_the_batches_twice(process: Process, loader: Any) -> None:
    process.session.loader(loader)
    process.session.restore()
    for _ in process.session.epochs(1):
        for batch in loader:
            process.take("", batch)
        for _ in range(2):
            process.step()
            process.session.commit()


def go_on_in_an_epoch_that_is_over(process: Process, loader: Any) -> None:
    process.session.loader(loader)
    process.session.restore()
    for _ in process.session.epochs(1):
        for batch in loader:
            process.backward("", batch)
            process.step()
            process.session.commit(epoch_over=True)


def restore_without_loaders(process: Process, loader: Any) -> None:
    process.session.restore()


def count_epochs(process: Process, loader: Any) -> None:
    process.session.loader(loader)
    process.session.restore()
    next(process.session.epochs(2))


def count_before_the_restore(process: Process, loader: Any) -> None:
    process.session.epochs(2)


def look_before_the_epochs(process: Process, loader: Any) -> None:
    process.session.loader(loader)
    process.session.restore()
    next(iter(loader))
    next(process.session.epochs(2))


@pytest.mark.parametrize(
    ("continues", "loop", "error", "words"),
    [
        ("", follow_too_late, UsageError, ["before restore()"]),
        ("", follow_a_list, UnsupportedError, ["found list", "register()"]),
        ("", follow_another_s, UsageError, ["another session follows"]),
        ("", commit_behind_the_batches, UsageError, ["inside the loop over a followed loader", "epochs()"]),
        ("", commit_behind_the_batches_twice, UsageError, ["remainder may be committed, once"]),
        ("", go_on_in_an_epoch_that_is_over, UsageError, ["after commit(epoch_over=True)"]),
        ("epochs", restore_without_loaders, ForeignStateError, ["expected 1 loader(s)", "found 0"]),
        ("batches", count_epochs, ForeignStateError, ["epochs()", 'resume="never"']),
        ("epochs", count_before_the_restore, UsageError, ["epochs() before restore()"]),
        ("epochs", look_before_the_epochs, UsageError, ["before restore()"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_refused(lab: Lab, continues: str, loop: Any, error: type[Exception], words: list[str]) -> None:
    """Some of it in a run that goes on behind its second batch, and has counted epochs, or has not."""

    def begin(process: Process) -> None:
        loader = process.session.loader(make("shuffle", NONE))
        process.session.restore()
        for _ in process.session.epochs(1) if continues == "epochs" else range(1):
            for batch in loader:
                process.take("", batch)

    def go_on(process: Process) -> None:
        with pytest.raises(error) as caught:
            loop(process, make("shuffle", NONE))
        assert all(word in str(caught.value) for word in words), str(caught.value)
        process.session.close()

    if continues:
        said_of(lab, begin, ("committed", 2), "replay")
    said_of(lab, go_on, check="replay")


def test_loops_that_a_restart_would_not_repeat_are_named(lab: Lab) -> None:
    def loop(process: Process) -> None:
        session = process.session
        loader = session.loader(make("shuffle", NONE))
        session.restore()
        for _ in session.epochs(1):
            for _ in range(2):
                for number, batch in enumerate(loader):
                    process.take("", batch)
                    if number == BATCHES - 2:
                        break
        session.close()
        assert type(loader) is DataLoader
        assert not [name for name in vars(loader) if "memckpt" in name]

    log = said_of(lab, loop, check="replay")
    assert "a second loop over batches in one epoch" in log
    assert "the loop over batches was left after a commit" in log


@pytest.mark.parametrize("kind", ["followed", "not followed", "counted", "one step an epoch", "no commit"])
def test_a_loop_that_a_resume_cannot_follow_is_told(lab: Lab, kind: str) -> None:
    """A loader that was forgotten, and commits that were."""

    def loop(process: Process) -> None:
        session, loader = process.session, make("shuffle", NONE)
        if kind == "followed":
            session.loader(loader)
        session.restore()
        for _ in session.epochs(2):
            for _, batch in enumerate(loader, start=session.batch if kind == "counted" else 0):
                process.backward("", batch)
                process.step()
                if kind != "no commit":
                    session.commit()
                if kind == "one step an epoch":
                    break
        session.close()

    log = said_of(lab, loop, check="replay")
    assert ("no loader was given to session.loader()" in log) is (kind == "not followed")
    assert ("training has ended without a single commit" in log) is (kind == "no commit")


@pytest.mark.parametrize("check", ["off", "replay"])
@pytest.mark.parametrize("how", ["accumulated", "skipped"])
def test_each_commit_counts_a_step(lab: Lab, how: str, check: str) -> None:
    """A loop that counts from the report's step takes each number once: batches come from it."""

    def loop(process: Process) -> None:
        session = process.session
        report = session.restore()
        for number in range(report.step + 1 if report else 1, 13):
            if how == "skipped":
                process.optimizer.zero_grad()  # no step has used those of a skipped step
            process.backward(f"step {number}", [number])
            process.at("backward")
            if number % 3 == 0 if how == "accumulated" else number not in (3, 7, 8):
                process.step()
            session.commit()
            process.at("committed")
        session.close()

    survives(lab, loop, [("backward", 5), ("committed", 2), ("committed", 4)], check)


class _Seeded(Process):
    def objects(self) -> tuple[Any, Any]:
        torch.manual_seed(5)
        return super().objects()


class _Stored(_Seeded):
    settings: ClassVar[dict[str, Any]] = {**Process.settings, "storage": memckpt.StorageConfig()}


@pytest.mark.promise("several trainings of one script, with one run directory")
@pytest.mark.parametrize("kind", [_Seeded, _Stored], ids=["memory", "storage"])
def test_each_training_of_a_script_goes_on_from_its_own_steps(lab: Lab, kind: type[Process]) -> None:
    def train(process: Process, phase: str) -> None:
        report = process.session.restore()
        for number in range(report.step + 1 if report else 1, 7):
            process.backward(f"{phase} {number}", [number])
            process.step()
            process.session.commit()
            process.at(phase)
        process.note(f"{phase} ends", [each.tolist() for each in process.model.parameters()])
        process.session.close()

    def loop(process: Process) -> None:
        train(process, "pretrains")
        process.optimizer = torch.optim.AdamW(process.model.parameters(), 0.001)
        process.attach()
        train(process, "finetunes")

    said = survives(lab, loop, [("pretrains", 2), ("finetunes", 3), ("finetunes", 1)], "off", kind=kind)
    assert said.count("training 2 is held in") == 3
    resumed = said.count("resuming from")
    assert resumed == (5 if kind is _Stored else 3), "pretraining is run again where its end is not in storage"


class _Grouped(Process):
    """One of several groups, which share settings."""

    def objects(self) -> tuple[Any, Any]:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)).eval()
        first, second, third = ({"params": [*model[index].parameters()]} for index in (0, 1, 3))
        return model, torch.optim.Adam([first, {**second, "lr": 0.01}, third], 0.1)


@pytest.mark.parametrize(
    ("settings", "check"),
    [
        ({"redo": "lazy"}, "replay"),
        ({"redo": "eager"}, "off"),
        ({"redo": "snapshot", "snapshot_every_steps": 1}, "off"),
    ],
    ids=["lazy", "eager", "snapshot"],
)
def test_state_dicts_are_saved_as_the_same_bytes(lab: Lab, settings: dict[str, Any], check: str) -> None:
    """Pickle shows more than values: the order of keys, and which keys and tuples are one object."""

    def loop(process: Process) -> None:
        session = process.session
        loader = session.loader(make("shuffle", NONE))
        scheduler = torch.optim.lr_scheduler.OneCycleLR(process.optimizer, 0.1, total_steps=100, cycle_momentum=False)
        session.register("scheduler", scheduler)
        session.restore()
        for epoch in session.epochs(2):
            for number, batch in enumerate(loader, start=session.batch):
                process.backward(f"batch {epoch}.{number}", batch)
                process.step()
                scheduler.step()
                session.commit()
                saved = {"model": process.model, "optimizer": process.optimizer, "scheduler": scheduler}
                for name, each in saved.items():
                    torch.save(each.state_dict(), buffer := io.BytesIO())
                    process.note(f"{name} {epoch}.{number}", buffer.getvalue())
                process.at("committed")
        session.close()

    class Kind(_Grouped):
        settings: ClassVar[dict[str, Any]] = {}

    Kind.settings = {**Process.settings, **settings}
    survives(lab, loop, [("committed", 3), ("committed", 2)], check, kind=Kind)
