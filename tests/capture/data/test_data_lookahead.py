"""Loaders that are read ahead of training: any batch of any pass can be gone back to, and the rest is the same.

The processes of the promise are new loaders here, with generators that are somewhere else.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import DataLoader, RandomSampler

from memckpt.capture.data import graft as data
from memckpt.errors import DataPositionError
from memckpt.state import codec, rng
from tests.support.trainings.data_jobs import NONE
from tests.support.trainings.loader_cases import BATCH, Augmented, OwnGenerator, ShuffledBatches, make

PASSES = 2
LOADERS: dict[str, Any] = {
    "shuffled": lambda: DataLoader(Augmented(), BATCH, shuffle=True),
    "own generator": lambda: DataLoader(
        Augmented(), BATCH, sampler=RandomSampler(range(22), generator=torch.Generator().manual_seed(4))
    ),
    "generators of the dataset": lambda: DataLoader(OwnGenerator(), BATCH, shuffle=True),
    "user's batches": lambda: DataLoader(Augmented(), batch_sampler=ShuffledBatches()),
    "random object": lambda: make("random-object", NONE),
}
WITH_WORKERS: dict[str, Any] = {
    "workers": lambda: DataLoader(Augmented(), BATCH, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(Augmented(), BATCH, shuffle=True, num_workers=2, persistent_workers=True),
}
Step = tuple[int, int, str, float]


def graft(make: Any, group: int) -> DataLoader[Any]:
    loader: DataLoader[Any] = make()
    data.graft(loader, lookahead=group + 1)
    return loader


class Training:
    """Takes batches `group` at a time, with one more fetched ahead, and draws between them as dropout does."""

    def __init__(self, loader: DataLoader[Any], group: int) -> None:
        self.loader = loader
        self.group = group

    def steps(self, held: dict[str, Any] | None = None) -> Iterator[Step]:
        """(pass, batches behind, batches, a draw of training) of each step; `self.commit` is from before it."""
        first = held["pass"] if held else 0
        for number in range(first, PASSES):
            behind = held["behind"] if held and number == first else 0
            batches = self._ahead()
            while group := list(itertools.islice(batches, self.group)):
                if held is not None:
                    self._restore(held)
                    held = None
                elif data.is_grafted(self.loader):
                    ahead = data.handed_out(self.loader) - behind
                    self.commit = codec.encode(
                        {
                            "pass": number,
                            "behind": behind,
                            "loader": data.position(self.loader, ahead=ahead),
                            "rng": rng.capture(),
                        }
                    )
                drawn = float(torch.rand(())) + random.random() + float(np.random.rand())
                yield number, behind, str(group), drawn
                behind += len(group)

    def _ahead(self) -> Iterator[Any]:
        iterator = iter(self.loader)
        current = next(iterator, None)
        while current is not None:
            following = next(iterator, None)
            yield current
            current = following

    def _restore(self, held: dict[str, Any]) -> None:
        data.go_live(self.loader)
        data.restore_generators(self.loader, held["loader"])
        rng.restore(held["rng"])


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def check_every_step(make: Any, group: int, stride: int = 1) -> None:
    seed(1)
    expected = list(Training(make(), group).steps())
    seed(1)
    training = Training(graft(make, group), group)
    assert list(training.steps()) == expected, "a loader that is followed yields something else"
    for killed in range(0, len(expected) - 1, stride):
        seed(1)
        first = Training(graft(make, group), group)
        list(itertools.islice(first.steps(), killed + 1))
        again = resumed(make, group, first.commit)
        assert list(itertools.islice(again[1], 2)) == expected[killed : killed + 2], f"killed in step {killed}"
        last = resumed(make, group, again[0].commit)  # and in the step after
        assert list(last[1]) == expected[killed + 1 :], f"killed in steps {killed} and {killed + 1}"


def resumed(make: Any, group: int, commit: bytes) -> tuple[Training, Iterator[Step]]:
    """A new process."""
    held: Any = codec.decode(commit)
    seed(1000)
    loader = graft(make, group)
    data.resume(loader, held["loader"])
    training = Training(loader, group)
    return training, training.steps(held)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("group", [1, 4])
def test_every_step_of_every_pass_can_be_gone_back_to(name: str, group: int) -> None:
    check_every_step(LOADERS[name], group)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_WORKERS)
@pytest.mark.parametrize("group", [1, 4])
def test_the_same_with_workers(name: str, group: int) -> None:
    check_every_step(WITH_WORKERS[name], group, stride=3)


def test_a_batch_that_was_fetched_too_long_ago_is_no_position() -> None:
    loader = graft(LOADERS["shuffled"], 1)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    assert data.position(loader, ahead=1)["pass"]["batches"] == 1
    with pytest.raises(DataPositionError, match="expected to go back by at most 2 batches, found a caller"):
        data.position(loader, ahead=5)


def test_where_nothing_draws_a_position_stays_small() -> None:
    def size(group: int) -> int:
        loader = graft(lambda: DataLoader(range(100), shuffle=True), group)
        list(itertools.islice(loader, group + 1))
        return len(codec.encode(data.position(loader, ahead=group + 1)))

    assert size(64) < size(2) + 1000


@pytest.mark.promise(
    "an attribute that a dataset reads and that changes within an epoch, named in `attributes` or not: loaders "
    "read ahead of training, and workers hold copies"
)
def test_without_lookahead_what_was_read_ahead_is_something_else() -> None:
    """So the comparison above notices."""
    shuffled = LOADERS["shuffled"]
    seed(1)
    expected = list(Training(shuffled(), 1).steps())
    seed(1)
    first = Training(graft(shuffled, 1), 1)
    list(itertools.islice(first.steps(), 3))
    held: Any = codec.decode(first.commit)
    held["loader"]["pass"]["fetches"] = []
    _, again = resumed(shuffled, 1, codec.encode(held))
    assert list(itertools.islice(again, 2)) != expected[2:4]


@pytest.mark.parametrize("seed", [7, 2**64 - 3])
def test_a_sampler_whose_seed_is_another_in_each_process_goes_on_with_the_first_one(seed: int) -> None:
    def seeded(number: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(number % 1000)
        sampler: Any = SeedableRandomSampler(range(20), generator=generator, data_seed=number)
        loader: DataLoader[Any] = DataLoader(range(20), 4, sampler=sampler)  # type: ignore[arg-type]
        data.graft(loader)
        return loader

    def passes(loader: DataLoader[Any], number: int) -> list[Any]:
        found = []
        for epoch in range(number):
            cast(Any, loader.sampler).set_epoch(epoch)
            found.append([batch.tolist() for batch in loader])
        return found

    expected = passes(seeded(seed), 2)
    first = seeded(seed)
    cast(Any, first.sampler).set_epoch(0)
    taken = list(itertools.islice(first, 2))
    held: Any = codec.decode(codec.encode(data.position(first)))
    second = seeded(11)
    data.resume(second, held)
    rest = [batch.tolist() for batch in second]
    assert [batch.tolist() for batch in taken] + rest == expected[0]
    cast(Any, second.sampler).set_epoch(1)
    assert [batch.tolist() for batch in second] == expected[1]
