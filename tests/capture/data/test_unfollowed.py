"""Loaders with persistent workers that nobody follows are named as they begin, and no other object is asked."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from memckpt.capture.beside.unfollowed import UnfollowedLoaders
from memckpt.capture.data.iteration import drop_iterator


def test_one_that_draws_from_the_global_generator_is_named_once() -> None:
    unfollowed, data = UnfollowedLoaders(), list(range(4))
    assert list(unfollowed.find()) == []
    half_made = DataLoader.__new__(DataLoader)  # as while it is unpickled
    shared = DataLoader(data, num_workers=1, persistent_workers=True)
    own = DataLoader(data, num_workers=1, persistent_workers=True, generator=torch.Generator())
    try:
        list(own)
        assert list(unfollowed.find()) == []
        list(shared)
        (line,) = unfollowed.find()
        assert line.startswith("a DataLoader of list has persistent workers")
        list(shared)
        assert list(unfollowed.find()) == []
    finally:
        for loader in (shared, own):
            drop_iterator(loader)
    assert vars(half_made) == {}
