"""The storage tier as a resume sees it: what is there, and the newest checkpoint that is whole."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from memckpt.config import StorageConfig
from memckpt.errors import DamagedStateError, ForeignStateError, StorageError
from memckpt.recovery.from_storage import StoredState
from memckpt.session.patience import Patience
from memckpt.session.ranks import Ranks
from memckpt.session.store_ownership import StoreOwnership
from memckpt.state import rng
from memckpt.state.layout import StateSpec, first_difference
from memckpt.storage.catalog import PASSED, Catalog, Key, note_passed, read_catalog
from memckpt.storage.chain import StoredPoint, point_before, stored_points
from memckpt.storage.format import directory_key, place_of
from memckpt.storage.owner import Kept, is_current, keep_run, original_of, read_kept
from memckpt.storage.store import Store, StoredFile, matches, open_store

_log = logging.getLogger("memckpt")
#: Name of the store of a run without storage: the survivors' checkpoint, from which other ranks take their shards.
RESHARDING = "resharding/ in the run directory"


class StorageTier:
    """Listed by rank 0, which tells the others; each rank checks a share of the files, then reads what it needs.

    Args:
        config: None: there is no store.
        run_dir: the run's.
        ranks: of the job.
        step: one that is asked for, or None.
        owned: whether the store belongs to a run, and not to one attempt alone.

    Attributes:
        name: of the store, in words.
        run: id of the run that the store belongs to, which is this one; empty: it belongs to none.
        catalog: what the store holds; empty without a store.
        points: the states that it can produce, newest first.
        problem: why it could not be listed; empty if it could.
        claimed: whether the store says that it is this run's; one that does not say so later is not it.
        absent: in words, where the run has stored before and its store is not there; empty: it is.

    Raises:
        ForeignStateError: it belongs to another run.
    """

    def __init__(
        self, config: StorageConfig | None, run_dir: Path, ranks: Ranks, step: int | None, owned: bool = True
    ) -> None:
        self._ranks = ranks
        self._patience = Patience()
        self.name = "storage" if owned else RESHARDING
        self.run = ""
        self._store: Store | None = None
        self.catalog = Catalog((), {})
        self.points: tuple[StoredPoint, ...] = ()
        self.problem = self.absent = ""
        self.claimed = False
        self._owning: StoreOwnership | None = None
        self._step = step
        if config is None:
            return
        self._store = store = open_store(config.url or str(run_dir.resolve() / "storage"))

        # Together, here and below: a rank that raises alone would leave the others in their next collective.
        kept = ranks.together(lambda: read_kept(run_dir) if owned else Kept(""))
        originals = ranks.together(lambda: original_of(run_dir, kept[ranks.rank]))

        if owned:
            self._owning = StoreOwnership(store, run_dir, config.owner, kept, originals)
        self._look()

    @property
    def unread(self) -> str:
        """Why something in storage could not be read, in words; empty if all could."""
        return self.problem or next(iter(self.catalog.unreadable.values()), "")

    def look_again(self) -> None:
        """Wait until all can be read that there is, as long as there is patience for that."""
        self._look(patient=True)

    def _look(self, patient: bool = False) -> None:
        found = self._ranks.together(lambda: self._look_alone(patient))[0]
        self.catalog, self.problem, self.run, self.claimed, self.absent = found
        for problem in self.catalog.damaged.values():
            _log.warning("memckpt: passed over: %s", problem)
        self.points = stored_points(self.catalog, also=self._step)
        if self._owning is not None and not self.absent:
            self._keep(self._owning)

    def say_unread(self) -> None:
        """Name what could not be read, where the start does without it."""
        if self.problem:
            _log.warning("memckpt: %s cannot be read and is left out: %s", self.name, self.problem)
        for problem in self.catalog.unreadable.values():
            _log.warning("memckpt: passed over: %s", problem)

    def go_on_without(self) -> None:
        """Memory serves, and the store is away: it is used when it is back. In another place a new one is begun."""
        if self._owning is None or not self.absent:
            return
        if self._owning.claimed_before == self._owning.here:
            self.claimed = True  # nothing is made in its place
            _log.warning("memckpt: %s Until it is back, checkpoints fail", self.absent)
        else:
            self.begin_anew()

    def begin_anew(self) -> None:
        """What the run has stored before is not wanted, or elsewhere: a store is begun where there is none."""
        owning = self._owning
        if owning is None or not self.absent:
            return
        _log.warning("memckpt: %s A new one is begun there", self.absent)
        ranks = self._ranks
        self.claimed = ranks.together(lambda: ranks.rank == 0 and owning.claim(self.run, replace=False))[0]
        self.absent = ""
        self._keep(owning)

    def _look_alone(self, patient: bool) -> tuple[Catalog, str, str, bool, str]:
        """What rank 0 finds: all that there is, why it could not be listed, the id of the run; `claimed`, `absent`."""
        if self._ranks.rank != 0:
            return self.catalog, "", "", False, ""
        assert self._store is not None
        while True:
            catalog, problem = Catalog((), {}), ""
            try:
                catalog = read_catalog(self._store)
            except StorageError as error:
                problem = str(error)
            unread = problem or next(iter(catalog.unreadable.values()), "")
            if not (patient and unread and self._patience.again(unread)):
                break
        owning = self._owning
        if owning is None:
            return catalog, problem, "", False, ""
        if problem:
            return catalog, problem, owning.id_for(""), False, ""
        run, claimed = owning.take(catalog)
        return catalog, "", run, claimed, owning.absent

    def _keep(self, owning: StoreOwnership) -> None:
        """Note in the run directories of all nodes which run this is, and where its store is."""
        own = owning.kept[self._ranks.rank]
        run, kept = self.run if owning.is_news(self.run) else own.run, own.run
        if self._ranks.rank != self._ranks.local_ranks[0] or not run:
            return
        claimed = owning.here if self.claimed else own.claimed
        try:
            if not is_current(own, owning.run_dir, run, owning.url, claimed):
                keep_run(owning.run_dir, run, owning.url, claimed)
        except StorageError as error:
            if run == kept:
                _log.warning("memckpt: where storage is (%s) is not noted in the run directory: %s", owning.url, error)
                return
            _log.warning(
                "memckpt: which run this is (%s) is not noted in its directory, and storage will refuse the next start "
                "unless it is given storage.owner: %s",
                self.run,
                error,
            )

    def open_newest(self, candidates: Sequence[StoredPoint], spec: StateSpec, by_hand: bool = False) -> StoredState:
        """The first of the candidates whose files are all good.

        What is damaged is passed over. What cannot be read may be good: it is tried again, and then it is an error, for
        a person to choose.

        Where training does not go on exactly, ranks that the user has seeded alike for this attempt get what was
        private to one and the same rank: those that share the work of a layer (tensor parallelism) must not differ.

        Args:
            candidates: newest first.
            spec: of what the ranks hold.
            by_hand: whether a person has asked for this very step.

        Raises:
            StorageError: the newest that may be good cannot be read.
            DamagedStateError: none is; the message says what is wrong with each.
            ForeignStateError: it belongs to another model or optimizer.
        """
        chosen, problems, unread = self._first_good(candidates)
        for problem in problems:
            _log.warning("memckpt: passed over: %s", problem)
        if unread:
            self._note(add=[candidates[chosen].checkpoint.key])
            raise self._not_read(
                unread, [one for one in candidates[chosen + 1 :] if one.step != candidates[chosen].step]
            )
        newer = [path for path in self.catalog.unreadable if chosen < 0 or _may_be_newer(path, candidates[chosen])]
        if newer:
            passed = [place.key for path in newer if (place := place_of(path)) is not None]
            # A batch is kept with the checkpoint that its records are redone on.
            self._note(add=[*passed, *(one.checkpoint.key for one in candidates[:1])])
        if newer and not by_hand:
            raise self._not_read(self.catalog.unreadable[newer[0]], candidates[chosen:] if chosen >= 0 else ())
        self.say_unread()
        if chosen < 0:
            raise DamagedStateError(
                f"no checkpoint in {self.name} is whole: {'; '.join(problems)}. Restore the files, or use "
                "resume='never' to start over"
            )
        if not newer:  # what is resumed from is not passed over any more, nor is what has proved to be bad
            self._note(drop=[one.checkpoint.key for one in candidates[: chosen + 1]])
        opened = self.open(candidates[chosen], spec, self._ranks.rank)
        if all(self._ranks.gather(opened.exact)):
            return opened
        first = self._ranks.first_alike(rng.capture())
        return self.open(candidates[chosen], spec, first)

    def _not_read(self, why: str, older: Sequence[StoredPoint]) -> StorageError:
        steps = sorted({one.step for one in older})
        instead = f"resume=STEP, of {steps}" if steps else "resume='never', which starts over"
        return StorageError(
            f"what is newest in {self.name} cannot be read, and may be whole: {why}. It was tried again for "
            f"{self._patience.seconds:.0f} s. Start again when it can be read; to go on without it: {instead}. "
            "Retention keeps it"
        )

    def _note(self, add: Collection[Key] = (), drop: Collection[Key] = ()) -> None:
        """Have retention keep what could not be read, or not any more; rank 0 writes it down."""

        def note() -> None:
            if self._ranks.rank != 0 or PASSED in self.catalog.unreadable or PASSED in self.catalog.damaged:
                return
            assert self._store is not None
            try:
                note_passed(self._store, self.catalog, add, drop)
            except StorageError as error:
                _log.warning("memckpt: what retention has to keep is not noted: %s", error)

        self._ranks.together(note)

    def before(self, point: StoredPoint) -> tuple[StoredPoint | None, str]:
        """The state from which the step of a point was taken, if its files are all good; or why there is none."""
        before = point_before(self.points, point)
        if before is None:
            return None, f"{self.name} does not have the state from which step {point.step} was taken"
        good = {file.path for file in point.files}
        chosen, problems, unread = self._first_good([before], good)
        return (before, "") if chosen == 0 and not unread else (None, unread or problems[0])

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

    def _first_good(self, candidates: Sequence[StoredPoint], good: Collection[str] = ()) -> tuple[int, list[str], str]:
        """The first candidate that is not damaged, and what is wrong with those before it; the same on every rank.

        Args:
            candidates: newest first.
            good: paths of files that have been looked at.

        Returns:
            The index of that candidate, or -1 if there is none; what is wrong with the others, in words; and why that
            candidate could not be read, empty if it is good.
        """
        ranks = self._ranks
        files = (file for candidate in candidates for file in candidate.files)
        sizes = {file.path: file.nbytes for file in files if file.path not in good}
        largest_first = sorted(sizes, key=lambda path: (-sizes[path], path))
        share = set(largest_first[ranks.rank :: ranks.world_size])
        seen: dict[str, str | None] = {}
        problems: dict[str, None] = {}
        for index, candidate in enumerate(candidates):
            found = ranks.together(partial(self._first_wrong, candidate, share, seen))
            wrong = next((damaged for damaged, _ in found if damaged), "")
            if not wrong:
                return index, list(problems), next((unread for _, unread in found if unread), "")
            # Many states need the same file: it is named once, with the newest of them.
            if wrong not in "".join(problems):
                problems[f"step {candidate.step}: {wrong}"] = None
        return -1, list(problems), ""

    def _first_wrong(self, candidate: StoredPoint, share: set[str], seen: dict[str, str | None]) -> tuple[str, str]:
        """What is damaged of the candidate's files, as far as they are this rank's to check, or else not readable."""
        for file in candidate.files:
            if file.path in share:
                if file.path not in seen:
                    try:
                        seen[file.path] = self._matches(file)
                    except StorageError as error:
                        return "", str(error)
                if problem := seen[file.path]:
                    return problem, ""
        return "", ""

    def _matches(self, file: StoredFile) -> str | None:
        """What is wrong with a file; one that cannot be read is tried again. Raises StorageError."""
        assert self._store is not None
        while True:
            try:
                return matches(self._store, file)
            except StorageError as error:
                if not self._patience.again(str(error)):
                    raise


def _may_be_newer(path: str, point: StoredPoint) -> bool:
    """Whether what a commit file names could lead to a newer state than a point."""
    place = place_of(path)
    key = place.key if place is not None else directory_key(path)
    return key is not None and key > point.key
