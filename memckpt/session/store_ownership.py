"""Whose a store is: claimed for a run, refused to others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from memckpt.errors import StorageError
from memckpt.storage.catalog import Catalog
from memckpt.storage.owner import (
    CLAIM,
    INSIDE,
    Kept,
    choose_run,
    claim,
    new_run,
    read_claim,
    refuse_copy,
    refuse_other,
    url_outside,
)
from memckpt.storage.store import Store

_log = logging.getLogger("memckpt")


class StoreOwnership:
    """The run that a store belongs to. Methods are called on rank 0.

    Args:
        store: store that is about to be used.
        run_dir: run directory.
        given: configured id of the run; None without one.
        kept: notes in the nodes' run directories, by rank.
        originals: for each rank, the directory that its run directory is a copy of; empty if it is none.

    Attributes:
        run_dir: run directory.
        kept: notes in the nodes' run directories, by rank.
        url: URL of the store; empty if it lies inside the run directory.
        here: note of a run directory that has claimed this store.
        claimed_before: note of the store that the run has claimed before; empty if none is known.
        absent: why the run's store is not there, in words; empty if it is.
    """

    def __init__(
        self, store: Store, run_dir: Path, given: str | None, kept: Sequence[Kept], originals: Sequence[str]
    ) -> None:
        self._store = store
        self.run_dir = run_dir
        self._given = given
        self.kept = kept
        self._original = next(filter(None, originals), "")
        self.claimed_before = next((one.claimed for one in kept if one.claimed), "")
        self.absent = ""
        #: The id of a run that has none yet.
        self._new = new_run(run_dir)
        self.url = url_outside(store, run_dir)
        self.here = self.url or INSIDE

    def id_for(self, owner: str) -> str:
        """The id of this run; a new one if it has none yet.

        Args:
            owner: run that the store belongs to; empty if to none.

        Raises:
            ForeignStateError: the store belongs to another run.
        """
        run = choose_run(owner, self._given, [one.run for one in self.kept], not self.url)
        if run is None and owner == self._new:  # claimed when storage was looked into before
            run = owner
        refuse_other(self._store.url, owner, run, self.run_dir)
        return run or self._new

    def is_news(self, run: str) -> bool:
        """Whether some node's run directory does not know this id of the run."""
        return any(one.run != run and (self._given is not None or not one.run) for one in self.kept)

    def take(self, catalog: Catalog) -> tuple[str, bool]:
        """Claim the store for this run, if no run has.

        Sets `absent`, and claims nothing, where the run has stored before and the store is empty.

        Args:
            catalog: contents of the store.

        Returns:
            The id of the run, and whether the store is claimed.

        Raises:
            ForeignStateError: the store belongs to another run, or to the original of a copied run directory.
        """
        run = self.id_for(catalog.owner)
        if catalog.owner == run and self._given is None and self.url:
            refuse_copy(self.url, run, self.run_dir, self._original)
        known = any(one.run for one in self.kept)
        empty = not catalog.claimed and CLAIM not in catalog.damaged
        empty = empty and not (catalog.checkpoints or catalog.batches or catalog.unreadable)
        self.absent = ""
        if empty and self.claimed_before:
            place = self.run_dir / "storage" if self.claimed_before == INSIDE else self.claimed_before
            before = "before" if self.claimed_before == self.here else f"in {place}"
            self.absent = (
                f"{self._store.url} has nothing of the run {run}, which has stored {before}: is its disk mounted?"
            )
            return run, False
        if catalog.owner and not known and self._given is None:
            _log.warning("memckpt: %s belongs to the run %s, as which this one goes on", self._store.url, run)
        elif not catalog.owner and (catalog.checkpoints or catalog.batches):
            _log.warning("memckpt: %s belonged to no run, and now does to %s", self._store.url, run)
        elif not catalog.claimed and known:
            _log.warning(
                "memckpt: %s is empty, and the run %s has had storage before: is it mounted, and storage.url as it "
                "was? What memory does not hold cannot be resumed from here",
                self._store.url,
                run,
            )
        if catalog.others:
            others = ", ".join(catalog.others)
            _log.warning("memckpt: %s also has files of other runs, which are left alone: %s", self._store.url, others)
        return run, catalog.claimed or self.claim(run, replace=CLAIM in catalog.damaged)

    def claim(self, run: str, replace: bool) -> bool:
        """Claim the store; False if it cannot be written. Raises ForeignStateError if another run was faster."""
        try:
            claimed = claim(self._store, run, replace)
        except StorageError as error:  # training goes on without storage; the ids on commit files still tell
            _log.warning("memckpt: storage cannot be claimed for this run: %s", error)
            return False
        found = read_claim(self._store) if not claimed else None
        if found is not None:
            refuse_other(self._store.url, found.run, run, self.run_dir)
        return True
