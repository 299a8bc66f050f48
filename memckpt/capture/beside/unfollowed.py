"""Loaders with persistent workers that nobody follows: for evaluation, say."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator

from torch.utils.data import DataLoader

from memckpt.capture.data.iteration import made_iterators, record_of

_SEEDED_ANEW = (
    "a DataLoader of {} has persistent workers, which torch seeds once, from its global generator. A resumed process "
    "draws that seed again, and other numbers follow. Give it to session.loader(), or to prepare() of the plugin with "
    "what is trained, or set persistent_workers=False"
)


class UnfollowedLoaders:
    """Finds them by their processes, as they appear; a look at all objects takes some 50 ms."""

    def __init__(self) -> None:
        self._known: set[int | None] = set()

    def find(self) -> Iterator[str]:
        """One line for each that has begun since the last call; called in each commit."""
        running = {each.pid for each in multiprocessing.active_children()}
        new, self._known = running - self._known, running
        if not new or new <= {worker.pid for each in made_iterators for worker in getattr(each, "_workers", ())}:
            return
        for each in gc.get_objects():
            if issubclass(type(each), DataLoader) and record_of(each) is None:
                has = vars(each)  # one that is being unpickled has nothing yet
                workers = getattr(has.get("_iterator"), "_workers", ())
                if has.get("generator") is None and not new.isdisjoint(worker.pid for worker in workers):
                    yield _SEEDED_ANEW.format(type(each.dataset).__name__)
