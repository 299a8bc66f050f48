"""Exact resume of loaders that a wrapper reads ahead, as Accelerate's does."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from memckpt.capture import dataloader as data
from memckpt.state import codec, rng
from tests.data_jobs import NONE
from tests.loader_cases import make


def _read_ahead(
    loader: DataLoader[Any], position: dict[str, Any] | None, take: int
) -> tuple[list[Any], dict[str, Any]]:
    """Take batches as a wrapper does that is one ahead; a position after the last one, with the global generators."""
    data.graft(loader, lookahead=1)
    if position is not None:
        random.random()
        torch.rand(3)
        data.resume(loader, position["loader"], on_live=lambda: rng.restore(position["rng"]))
    batches = iter(loader)
    seen = []
    following = next(batches)
    for _ in range(take):
        current, following = following, next(batches, None)
        seen.append((current, torch.rand(()).item()))  # training draws, too
    found = {"loader": data.position(loader, ahead=1), "rng": rng.capture()}
    return seen, codec.decode(codec.encode(found))


@pytest.mark.parametrize("name", ["sequential", "shuffle", "own-generator", "random-object", "dataset-generators"])
@pytest.mark.parametrize("taken", [1, 3])
def test_what_was_read_ahead_is_loaded_again_as_it_was(name: str, taken: int) -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected, _ = _read_ahead(make(name, NONE), None, 5)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    first, position = _read_ahead(make(name, NONE), None, taken)
    rest, _ = _read_ahead(make(name, NONE), position, 5 - taken)
    assert str(first + rest) == str(expected)


def test_without_lookahead_what_was_read_ahead_is_something_else() -> None:
    """So the comparison above notices."""
    torch.manual_seed(1)
    expected, _ = _read_ahead(make("shuffle", NONE), None, 5)
    torch.manual_seed(1)
    first, position = _read_ahead(make("shuffle", NONE), None, 3)
    position["loader"]["pass"]["fetches"] = []
    rest, _ = _read_ahead(make("shuffle", NONE), position, 2)
    assert str(first + rest) != str(expected)
