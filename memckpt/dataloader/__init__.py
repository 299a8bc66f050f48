"""Exact resume of the data position of a PyTorch DataLoader, after its process was killed.

A loader is grafted in place (`graft`), its `position` is read after every step, and in a new process
`resume` makes the next iteration go on behind that position: same indices in the same order, same random
augmentation in the same workers, and no skipped sample is loaded.

    graft.py        the public functions
    iteration.py    the record of a loader, and the classes of it and of its iterators
    sampler_tap.py  between loader and sampler: how a pass began, what was drawn, replay with checksums
    worker_rng.py   in the workers: ships their generators behind each batch, sets them again
    own_state.py    generators and sampler counters that the loader's own objects hold
    passes.py       book-keeping of one pass
"""

from memckpt.dataloader.graft import (
    comparable,
    derived,
    global_generators,
    go_live,
    graft,
    handed_out,
    is_grafted,
    position,
    recreate_persistent_iterator,
    release,
    restore_generators,
    resume,
    under_generators,
    unreplayable,
)
from memckpt.errors import DataPositionError

__all__ = [
    "DataPositionError",
    "comparable",
    "derived",
    "global_generators",
    "go_live",
    "graft",
    "handed_out",
    "is_grafted",
    "position",
    "recreate_persistent_iterator",
    "release",
    "restore_generators",
    "resume",
    "under_generators",
    "unreplayable",
]
