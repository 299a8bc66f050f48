"""The storage tier as a resume sees it: what is there, and the newest checkpoint that is whole."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from memckpt.config import StorageConfig
from memckpt.errors import DamagedStateError, ForeignStateError, StorageError
from memckpt.recovery.from_storage import StoredState
from memckpt.session.ranks import Ranks
from memckpt.state import rng
from memckpt.state.layout import StateSpec, first_difference
from memckpt.storage.catalog import Catalog, read_catalog
from memckpt.storage.chain import StoredPoint, point_before, stored_points
from memckpt.storage.owner import CLAIM, choose_run, claim, keep_run, kept_run, new_run, read_claim, refuse_other
from memckpt.storage.store import LocalStore, Store, matches, open_store

_log = logging.getLogger("memckpt")


class StorageTier:
    """Listed by rank 0, which tells the others; each rank checks a share of the files, then reads what it needs.

    Args:
        config: None: there is no store.
        run_dir: the run's.
        ranks: of the job.
        step: one that is asked for, or None.
        owned: whether the store belongs to a run, and not to one attempt alone.

    Attributes:
        run: id of the run that the store belongs to, which is this one; empty: it belongs to none.
        catalog: what the store holds; empty without a store.
        points: the states that it can produce, newest first.
        problem: why it could not be listed; empty if it could.

    Raises:
        ForeignStateError: it belongs to another run.
    """

    def __init__(
        self, config: StorageConfig | None, run_dir: Path, ranks: Ranks, step: int | None, owned: bool = True
    ) -> None:
        self._ranks = ranks
        self.run = ""
        self._store: Store | None = None
        self.catalog = Catalog((), {})
        self.points: tuple[StoredPoint, ...] = ()
        self.problem = ""
        if config is None:
            return
        self._store = store = open_store(config.url or str(run_dir.resolve() / "storage"))

        # Together, here and below: a rank that raises alone would leave the others in their next collective.
        kept = ranks.together(lambda: kept_run(run_dir) if owned else "")

        def look() -> tuple[Catalog, str, str]:
            if ranks.rank != 0:
                return self.catalog, "", ""
            owning = _Owning(store, run_dir, config.owner, kept) if owned else None
            try:
                catalog = read_catalog(store)
            except StorageError as error:
                return self.catalog, str(error), owning.id_for("") if owning is not None else ""
            return catalog, "", owning.take(catalog) if owning is not None else ""

        self.catalog, self.problem, self.run = ranks.together(look)[0]
        if owned and any(one != self.run and (config.owner or not one) for one in kept):
            self._keep(run_dir, kept[ranks.rank])
        if self.problem:
            _log.warning("memckpt: storage cannot be read and is left out: %s", self.problem)
        for problem in self.catalog.damaged.values():
            _log.warning("memckpt: passed over: %s", problem)
        self.points = stored_points(self.catalog, also=step)

    def _keep(self, run_dir: Path, kept: str) -> None:
        """Note in the run directories of all nodes which run this is."""
        if kept == self.run or self._ranks.rank != self._ranks.local_ranks[0]:
            return
        try:
            keep_run(run_dir, self.run)
        except StorageError as error:
            _log.warning(
                "memckpt: which run this is (%s) is not noted in its directory, and storage will refuse the next start "
                "unless it is given storage.owner: %s",
                self.run,
                error,
            )

    def open_newest(self, candidates: Sequence[StoredPoint], spec: StateSpec) -> StoredState:
        """The first of the candidates whose files are all good.

        Where training does not go on exactly, ranks that the user has seeded alike for this attempt get what was
        private to one and the same rank: those that share the work of a layer (tensor parallelism) must not differ.

        Raises:
            DamagedStateError: none is; the message says what is wrong with each.
            ForeignStateError: it belongs to another model or optimizer.
        """
        chosen, problems = self._first_good(candidates)
        for problem in problems:
            _log.warning("memckpt: passed over: %s", problem)
        if chosen < 0:
            raise DamagedStateError(
                f"no checkpoint in storage is whole: {'; '.join(problems)}. Restore the files, or use resume='never' "
                "to start over"
            )
        opened = self.open(candidates[chosen], spec, self._ranks.rank)
        if all(self._ranks.gather(opened.exact)):
            return opened
        first = self._ranks.first_alike(rng.capture())
        return self.open(candidates[chosen], spec, first)

    def before(self, point: StoredPoint) -> tuple[StoredPoint | None, str]:
        """The state from which the step of a point was taken, if its files are all good; or why there is none."""
        before = point_before(self.points, point)
        if before is None:
            return None, f"storage does not have the state from which step {point.step} was taken"
        good = {file.path for file in point.files}
        chosen, problems = self._first_good([before], good)
        return (before, "") if chosen == 0 else (None, problems[0])

    def open(self, point: StoredPoint, spec: StateSpec, rank: int) -> StoredState:
        """A state as a rank sees it, with what was private to that one; all ranks call this together."""
        opened: list[StoredState] = []  # it stays with its rank: what is gathered travels
        self._ranks.together(lambda: opened.append(self._open(point, spec, rank)))
        return opened[0]

    def _open(self, point: StoredPoint, spec: StateSpec, rank: int) -> StoredState:
        assert self._store is not None
        opened = StoredState(self._store, point, rank, spec)
        difference = first_difference(opened.state.spec.fingerprint(), spec.fingerprint())
        if difference is not None:
            raise ForeignStateError(
                f"step {point.step} in {self._store.url} belongs to another model or "
                f"optimizer. First difference: {difference}. Use another run directory, or resume='never' to start over"
            )
        return opened

    def _first_good(self, candidates: Sequence[StoredPoint], good: Collection[str] = ()) -> tuple[int, list[str]]:
        """The first candidate whose files are good, and what is wrong with those before it; the same on every rank.

        Args:
            good: paths of files that have been looked at.
        """
        ranks = self._ranks
        files = (file for candidate in candidates for file in candidate.files)
        sizes = {file.path: file.nbytes for file in files if file.path not in good}
        largest_first = sorted(sizes, key=lambda path: (-sizes[path], path))
        share = set(largest_first[ranks.rank :: ranks.world_size])
        seen: dict[str, str | None] = {}
        problems: dict[str, None] = {}
        for index, candidate in enumerate(candidates):
            wrong = next(filter(None, ranks.together(partial(self._first_wrong, candidate, share, seen))), None)
            if wrong is None:
                return index, list(problems)
            # Many states need the same file: it is named once, with the newest of them.
            if wrong not in "".join(problems):
                problems[f"step {candidate.step}: {wrong}"] = None
        return -1, list(problems)

    def _first_wrong(self, candidate: StoredPoint, share: set[str], seen: dict[str, str | None]) -> str | None:
        """What is wrong with the candidate's files, as far as they are this rank's to check."""
        assert self._store is not None
        for file in candidate.files:
            if file.path in share:
                if file.path not in seen:
                    seen[file.path] = matches(self._store, file)
                if seen[file.path] is not None:
                    return seen[file.path]
        return None


class _Owning:
    """Who a store belongs to, seen by rank 0 of a job that is about to use it.

    Args:
        store: to be used.
        run_dir: of the job.
        given: the configured id of the run, or None.
        kept: what the nodes' run directories keep, by rank; empty for those that keep none.
    """

    def __init__(self, store: Store, run_dir: Path, given: str | None, kept: Sequence[str]) -> None:
        self._store = store
        self._run_dir = run_dir
        self._given = given
        self._kept = kept
        self._inside = isinstance(store, LocalStore) and run_dir.resolve() in store.root.parents

    def id_for(self, owner: str) -> str:
        """The id of this run, which is made if there is none yet.

        Raises:
            ForeignStateError: `owner`, to whom the store belongs, is another one.
        """
        run = choose_run(owner, self._given, self._kept, self._inside)
        refuse_other(self._store.url, owner, run, self._run_dir)
        return run or new_run(self._run_dir)

    def take(self, catalog: Catalog) -> str:
        """The id of this run, for which the store is claimed if nobody has claimed it.

        Raises:
            ForeignStateError: it belongs to another run.
        """
        run = self.id_for(catalog.owner)
        if catalog.owner and not any(self._kept) and self._given is None:
            _log.warning("memckpt: %s belongs to the run %s, as which this one goes on", self._store.url, run)
        elif not catalog.owner and (catalog.checkpoints or catalog.batches):
            _log.warning("memckpt: %s belonged to no run, and now does to %s", self._store.url, run)
        if catalog.others:
            others = ", ".join(catalog.others)
            _log.warning("memckpt: %s also has files of other runs, which are left alone: %s", self._store.url, others)
        if not catalog.claimed:
            self._claim(run, replace=CLAIM in catalog.damaged)
        return run

    def _claim(self, run: str, replace: bool) -> None:
        try:
            claimed = claim(self._store, run, replace)
        except StorageError as error:  # training goes on without storage; the ids on commit files still tell
            _log.warning("memckpt: storage cannot be claimed for this run: %s", error)
            return
        found = read_claim(self._store) if not claimed else None
        if found is not None:
            refuse_other(self._store.url, found.run, run, self._run_dir)
