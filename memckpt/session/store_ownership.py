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
    """Who a store belongs to, seen by rank 0 of a job that is about to use it.

    Args:
        store: to be used.
        run_dir: of the job.
        given: the configured id of the run, or None.
        kept: what the nodes' run directories keep, by rank.
        originals: of which other ones they are copies, by rank; empty: of none.

    Attributes:
        claimed_before: the store that the run has claimed before; empty: none, as far as is known.
        here: what a run directory says that has claimed this store.
        absent: as for the tier.
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
        #: URL of the store, if it lies outside the run directory.
        self.url = url_outside(store, run_dir)
        self.here = self.url or INSIDE

    def id_for(self, owner: str) -> str:
        """The id of this run, which is made if there is none yet.

        Raises:
            ForeignStateError: `owner`, to whom the store belongs, is another one.
        """
        run = choose_run(owner, self._given, [one.run for one in self.kept], not self.url)
        if run is None and owner == self._new:  # claimed when storage was looked into before
            run = owner
        refuse_other(self._store.url, owner, run, self.run_dir)
        return run or self._new

    def is_news(self, run: str) -> bool:
        """Whether some node's run directory has to learn which run this is."""
        return any(one.run != run and (self._given is not None or not one.run) for one in self.kept)

    def take(self, catalog: Catalog) -> tuple[str, bool]:
        """The id of this run, for which the store is claimed if nobody has claimed it, and whether it is.

        Nothing is claimed where the run has stored before and nothing is left of that: see `absent`.

        Raises:
            ForeignStateError: it belongs to another run, or to the one whose directory this one is a copy of.
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
        """Claim the store; False: that could not be done. Raises ForeignStateError if another run was faster."""
        try:
            claimed = claim(self._store, run, replace)
        except StorageError as error:  # training goes on without storage; the ids on commit files still tell
            _log.warning("memckpt: storage cannot be claimed for this run: %s", error)
            return False
        found = read_claim(self._store) if not claimed else None
        if found is not None:
            refuse_other(self._store.url, found.run, run, self.run_dir)
        return True
