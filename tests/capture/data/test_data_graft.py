"""A grafted loader stays the user's own (attributes, state_dict, copies); and what indices are compared by."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from memckpt.capture import data
from memckpt.capture.data.sampler_tap import index_digest
from tests.support.cluster.processes import be_subreaper
from tests.support.trainings.data_jobs import NONE, TWO, each_kind_of_workers, in_child
from tests.support.trainings.loader_cases import BATCHES, Workers, make


@pytest.fixture(autouse=True, scope="module")
def _orphans_come_to_us() -> Iterator[None]:
    """Workers of a killed child become our children, so that their end can be waited for."""
    be_subreaper(True)
    yield
    be_subreaper(False)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("name", ["shuffle", "stateful"])
def test_the_loader_stays_the_users_own(name: str) -> None:
    loader = make(name, NONE)
    before, kind = dict(vars(loader)), type(loader)
    stateful = hasattr(loader, "state_dict")
    data.graft(loader)
    graft = type(loader)
    data.graft(loader)
    assert type(loader) is graft
    assert data.is_grafted(loader)
    assert isinstance(loader, kind)
    assert hasattr(loader, "state_dict") == stateful
    list(loader)
    added = vars(loader).keys() - before.keys()
    assert all(name.startswith("_") for name in added)
    assert loader.sampler is before["sampler"]
    assert loader.collate_fn is before["collate_fn"]
    data.release(loader)
    assert type(loader) is kind
    assert not data.is_grafted(loader)
    assert {**vars(loader), "_iterator": None} == before
    assert type(loader._iterator).__module__.startswith(("torch", "builtins"))
    data.release(loader)
    assert len(list(loader)) == BATCHES


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [NONE, TWO], ids=str)
def test_a_users_own_checkpoint_of_a_stateful_loader(workers: Workers, tmp_path: Path) -> None:
    def states(*, grafted: bool) -> list[Any]:
        torch.manual_seed(1)
        loader = make("stateful", workers)
        if grafted:
            data.graft(loader)
        return [_plain(loader.state_dict()) for _ in loader]  # type: ignore[attr-defined]

    plain = in_child(tmp_path / "result", lambda: states(grafted=False))
    assert len(plain) == BATCHES
    assert in_child(tmp_path / "result", lambda: states(grafted=True)) == plain


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@each_kind_of_workers
def test_a_resumed_stateful_loader_continues_in_its_users_checkpoint(workers: Workers, tmp_path: Path) -> None:
    """The state_dict() of a resumed loader leads, without us, to the batch that comes next."""

    def resumed_state(position: dict[str, Any]) -> Any:
        torch.manual_seed(1)
        loader = make("stateful", workers)
        data.graft(loader)
        data.resume(loader, position)
        next(iter(loader))
        return loader.state_dict()  # type: ignore[attr-defined]

    def rest(state: Any, skip: int) -> list[list[int]]:
        torch.manual_seed(1)
        loader = make("stateful", workers)
        if state is not None:
            loader.load_state_dict(state)  # type: ignore[attr-defined]
        return [batch[0].tolist() for batch in loader][skip:]

    def positioned() -> dict[str, Any]:
        torch.manual_seed(1)
        loader = make("stateful", workers)
        data.graft(loader)
        iterator = iter(loader)
        next(iterator), next(iterator)
        return data.position(loader)

    path = tmp_path / "result"
    state = in_child(path, lambda: resumed_state(in_child(tmp_path / "inner", positioned)))
    expected = in_child(path, lambda: rest(None, 3))
    assert len(expected) == BATCHES - 3
    assert in_child(path, lambda: rest(state, 0)) == expected


def test_copies_and_pickles_are_of_a_loader_that_was_never_grafted() -> None:
    loader = make("shuffle", NONE)
    data.graft(loader)
    for twin in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert type(twin) is DataLoader
        assert vars(twin).keys() == vars(make("shuffle", NONE)).keys()
        assert len(list(twin)) == BATCHES
        data.graft(twin)
        assert data.is_grafted(twin)
    assert data.is_grafted(loader)
    assert data.position(loader)["pass"] is None


def _plain(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.tolist()
    return {key: _plain(value) for key, value in state.items()} if isinstance(state, dict) else state


def test_checksums_of_indices() -> None:
    seen = [
        index_digest(index, 0)
        for index in ([1, 2], [2, 1], [[1], [2]], 1, "1", None, [True, "a"], ["a", True], {"a": 1}, (1.5, 2))
    ]
    assert len(set(seen)) == len(seen)
    assert index_digest([1, 2], 0) == index_digest([np.int64(1), torch.tensor(2)], 0)
    assert index_digest([object()], 0) == index_digest([object()], 0)
