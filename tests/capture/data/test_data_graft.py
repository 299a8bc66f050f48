"""A grafted loader stays the user's own (attributes, state_dict, copies); and what indices are compared by."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from memckpt.capture.data import graft as data
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
