"""A loader that is read ahead of training: any batch of any pass can be gone back to, and the rest is the same.

The processes of the promise are new loaders here, with generators that are somewhere else.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from memckpt.capture.dataloader import DataPositionError, Lookahead, is_grafted, restore_generators
from memckpt.state import codec, rng
from tests.loader_cases import BATCH, BATCHES, Augmented, OwnGenerator, ShuffledBatches

PASSES = 2
LOADERS: dict[str, Any] = {
    "shuffled": lambda: DataLoader(Augmented(), BATCH, shuffle=True),
    "own generator": lambda: DataLoader(
        Augmented(), BATCH, sampler=RandomSampler(range(22), generator=torch.Generator().manual_seed(4))
    ),
    "generators of the dataset": lambda: DataLoader(OwnGenerator(), BATCH, shuffle=True),
    "user's batches": lambda: DataLoader(Augmented(), batch_sampler=ShuffledBatches()),
}
WITH_WORKERS: dict[str, Any] = {
    "workers": lambda: DataLoader(Augmented(), BATCH, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(Augmented(), BATCH, shuffle=True, num_workers=2, persistent_workers=True),
}
Step = tuple[int, int, str, float]


class Training:
    """Takes batches `group` at a time, with one more fetched ahead, and draws between them as dropout does."""

    def __init__(self, loader: DataLoader[Any], group: int, lookahead: Lookahead | None) -> None:
        self.loader = loader
        self.group = group
        self.lookahead = lookahead

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
                elif self.lookahead is not None:
                    self.commit = codec.encode(
                        {
                            "pass": number,
                            "behind": behind,
                            "loader": self.lookahead.position(behind),
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
        assert self.lookahead is not None
        self.lookahead.restore_generators(held["loader"])
        rng.restore(held["rng"])


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def check_every_step(make: Any, group: int, stride: int = 1) -> None:
    seed(1)
    expected = list(Training(make(), group, None).steps())
    seed(1)
    loader = make()
    training = Training(loader, group, Lookahead(loader))
    assert list(training.steps()) == expected, "a loader that is followed yields something else"
    for killed in range(0, len(expected) - 1, stride):
        seed(1)
        loader = make()
        first = Training(loader, group, Lookahead(loader))
        list(itertools.islice(first.steps(), killed + 1))
        again = resumed(make, group, first.commit)
        assert list(itertools.islice(again[1], 2)) == expected[killed : killed + 2], f"killed in step {killed}"
        last = resumed(make, group, again[0].commit)  # and in the step after
        assert list(last[1]) == expected[killed + 1 :], f"killed in steps {killed} and {killed + 1}"


def resumed(make: Any, group: int, commit: bytes) -> tuple[Training, Iterator[Step]]:
    """A new process."""
    held: Any = codec.decode(commit)
    seed(1000)
    loader = make()
    lookahead = Lookahead(loader)
    lookahead.resume(held["loader"])
    training = Training(loader, group, lookahead)
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


def test_between_two_passes() -> None:
    seed(1)
    loader = LOADERS["own generator"]()
    lookahead = Lookahead(loader)
    list(loader)
    held, state = lookahead.between_passes(), rng.capture()
    expected = str(list(loader))
    loader = LOADERS["own generator"]()
    lookahead = Lookahead(loader)
    lookahead.resume(held)
    lookahead.restore_generators(held)
    rng.restore(state)
    assert str(list(loader)) == expected


def test_a_released_loader_is_what_it_was() -> None:
    loader = LOADERS["shuffled"]()
    lookahead = Lookahead(loader)
    list(loader)
    lookahead.release()
    assert type(loader) is DataLoader
    assert not is_grafted(loader)
    assert len(list(loader)) == BATCHES


def test_a_batch_that_was_not_fetched_is_no_position() -> None:
    loader = LOADERS["shuffled"]()
    lookahead = Lookahead(loader)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    assert lookahead.position(1)["fetched"] == 2
    with pytest.raises(
        DataPositionError, match=r"expected a position behind batch 5 of this pass, found notes of \[1\]"
    ):
        lookahead.position(5)
    with pytest.raises(DataPositionError, match="expected a grafted loader"):
        restore_generators(LOADERS["shuffled"](), lookahead.position(1))
