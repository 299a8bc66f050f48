"""The storage tier as a resume sees it: whose the store is, its states, and the newest one whose files are good.

At the end: held states of memory that go to other ranks, or into other shards, through a store.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from memckpt.config import ResumeChoice, StorageConfig
from memckpt.errors import (
    DamagedStateError,
    ForeignStateError,
    NothingHeldError,
    PeerError,
    StorageAwayError,
    StorageError,
)
from memckpt.processes.backoff import Backoff
from memckpt.recovery.from_storage import StoredState
from memckpt.recovery.plan import Plan, RestoreRecord, RestoreStored, StartOver, plan_to_reshard, record_to_reshard
from memckpt.recovery.sources import BadSource
from memckpt.session.link import AgentLink
from memckpt.session.peers import Peers
from memckpt.session.ranks import LocalTraining, Ranks
from memckpt.state import rng
from memckpt.state.records import HeldFragments, HeldRecords
from memckpt.state.spec import StateSpec
from memckpt.storage import owner
from memckpt.storage.catalog import PASSED, Catalog, Key, note_passed, read_catalog
from memckpt.storage.chain import StoredPoint, point_before, stored_points
from memckpt.storage.format import directory_key, place_of
from memckpt.storage.store import Store, StoredFile, matches
from memckpt.storage.urls import open_store

_log = logging.getLogger("memckpt")
#: Name of the store of a run without storage: the survivors' checkpoint, from which other ranks take their shards.
RESHARDING = "resharding/ in the run directory"
#: Seconds, from the first failure on, for which a start reads storage again that cannot be read.
_PATIENCE_SECONDS = 60.0


class StorageTier:
    """A store, listed by rank 0 for all. Each rank verifies a share of the files, then reads its own state.

    Args:
        config: None: there is no store, and no state in it.
        owned: whether the store belongs to a run. False: it is the survivors' checkpoint in the run directory.

    Attributes:
        run: id of this run, which the store belongs to; empty if it belongs to none.
        points: states that it can produce, newest first.
        problem: why it could not be listed, in words; empty if it could.
        unread: the same, or why a file in it could not be read.
        claimed: whether the store says that it is this run's. If it does not say so later, another one is mounted.
        absent: why the run's store is not there, in words; empty if it is.

    Raises:
        ForeignStateError: the store belongs to another run.
    """

    def __init__(
        self, config: StorageConfig | None, run_dir: Path, ranks: Ranks, step: int | None, owned: bool = True
    ) -> None:
        self._ranks = ranks
        self._run_dir, self._owned = run_dir, owned
        self._pauses = Backoff(at_once=0)
        self._patient_until: float | None = None
        self.name = "storage" if owned else RESHARDING
        self.run = ""
        self._store: Store | None = None
        self.catalog = Catalog((), {})
        self.points: tuple[StoredPoint, ...] = ()
        self.problem = self.unread = self.absent = ""
        self.claimed = False
        self._step = step
        if config is None:
            return
        self._store = store = open_store(config.url or str(run_dir.resolve() / "storage"))
        self._given = config.owner
        self._here = owner.place_of_store(store, run_dir)
        #: The id of a run that has none yet.
        self._new = owner.new_run(run_dir)

        def look_into_run() -> tuple[owner.Kept, str]:
            kept = owner.read_kept(run_dir) if owned else owner.Kept()
            return kept, owner.original_of(run_dir, kept)

        # Together, here and below: a rank that raises alone would leave the others in their next collective.
        everybody = ranks.together(look_into_run)
        self._kept = [kept for kept, _ in everybody]
        self._original = next((original for _, original in everybody if original), "")
        #: The store that the run has claimed before; empty if none is known.
        self._claimed_before = next((one.store for one in self._kept if one.store), "")
        self._list()

    # Listing

    def list_again(self) -> None:
        """List the store again, with retries until everything can be read or the patience is over."""
        self._list(patient=True)

    def _list(self, patient: bool = False) -> None:
        found = self._ranks.together(lambda: self._list_alone(patient))[0]
        self.catalog, self.problem, self.run, self.claimed, self.absent = found
        self.unread = self.problem or next(iter(self.catalog.unreadable.values()), "")
        for problem in self.catalog.damaged.values():
            _log.warning("memckpt: passed over: %s", problem)
        self.points = stored_points(self.catalog, also=self._step)
        if not self.absent:
            self._keep_run()

    def _list_alone(self, patient: bool) -> tuple[Catalog, str, str, bool, str]:
        """List the store on rank 0: catalog, problem, id of the run, `claimed`, `absent`."""
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
            if not (patient and unread and self._wait_to_read_again(unread)):
                break
        if not self._owned:
            return catalog, problem, "", False, ""
        if problem:
            return catalog, problem, self._identify_run(""), False, ""
        return catalog, "", *self._take_store(catalog)

    def _wait_to_read_again(self, problem: str) -> bool:
        """Log the problem and wait. Returns False, without waiting, once the patience is over."""
        now = time.monotonic()
        if self._patient_until is None:
            self._patient_until = now + _PATIENCE_SECONDS
        left = self._patient_until - now
        if left <= 0:
            return False
        seconds = min(self._pauses.died(), left)
        _log.warning("memckpt: %s; tried again in %.0f s, for %.0f s at most", problem, seconds, left)
        time.sleep(seconds)  # a store tells nobody that it can be read again; only a start waits here
        return True

    def log_unread(self) -> None:
        """Log files that could not be read, where the start does without them."""
        if self.problem:
            _log.warning("memckpt: %s cannot be read and is left out: %s", self.name, self.problem)
        for problem in self.catalog.unreadable.values():
            _log.warning("memckpt: passed over: %s", problem)

    # Ownership

    def _identify_run(self, claimed_by: str) -> str:
        """The id of this run; a new one if it has none yet.

        Raises ForeignStateError where the store is another run's, or that of the original of a copied run directory.
        """
        assert self._store is not None
        known = [one.run for one in self._kept if one.run]
        # In the run directory no other run writes. A store with the new id was claimed when it was listed before.
        ours = claimed_by in known or claimed_by == self._new or (not known and self._here == owner.INSIDE)
        run = self._given or (claimed_by if claimed_by and ours else next(iter(known), None))
        copied = self._original if self._given is None and self._here != owner.INSIDE else ""
        owner.refuse_other(self._store.url, claimed_by, run, self._run_dir, copied)
        return run or self._new

    def _take_store(self, catalog: Catalog) -> tuple[str, bool, str]:
        """Claim the store for this run, if no run has; an empty one not if the run has stored before.

        Returns the id of the run; whether the store is claimed; and why the run's store is not there, empty if it is.
        """
        assert self._store is not None
        url, run, damaged = self._store.url, self._identify_run(catalog.owner), owner.CLAIM in catalog.damaged
        empty = not (catalog.claimed or damaged or catalog.checkpoints or catalog.batches or catalog.unreadable)
        if empty and self._claimed_before:
            place = self._run_dir / "storage" if self._claimed_before == owner.INSIDE else self._claimed_before
            before = "before" if self._claimed_before == self._here else f"in {place}"
            return run, False, f"{url} has nothing of the run {run}, which has stored {before}: is its disk mounted?"
        if catalog.owner and self._given is None and not any(one.run for one in self._kept):
            _log.warning("memckpt: %s belongs to the run %s, as which this one goes on", url, run)
        elif not catalog.owner and (catalog.checkpoints or catalog.batches):
            _log.warning("memckpt: %s belonged to no run, and now does to %s", url, run)
        if catalog.others:
            others = ", ".join(catalog.others)
            _log.warning("memckpt: %s also has files of other runs, which are left alone: %s", url, others)
        return run, catalog.claimed or self._claim_store(run, replace=damaged), ""

    def _claim_store(self, run: str, replace: bool) -> bool:
        """Claim the store; False if it cannot be written. Raises ForeignStateError if another run was faster."""
        assert self._store is not None
        try:
            claimed = owner.claim(self._store, run, replace)
        except StorageError as error:  # training goes on without storage; the ids on commit files still tell
            _log.warning("memckpt: storage cannot be claimed for this run: %s", error)
            return False
        if not claimed:
            owner.refuse_other(self._store.url, owner.read_claim(self._store), run, self._run_dir)
        return True

    def _keep_run(self) -> None:
        """Write the id of the run and the place of its store into the run directories of all nodes."""
        ranks = self._ranks
        if not self.run or not ranks.leads:
            return
        own = self._kept[ranks.rank]
        run = own.run if own.run and self._given is None else self.run
        try:
            owner.keep_run(self._run_dir, run, self._here if self.claimed else own.store)
        except StorageError as error:
            remedy = "" if run == own.run else ", and storage will refuse the next start unless it has storage.owner"
            _log.warning(
                "memckpt: which run this is (%s) and where its store is (%s) is not noted in the run directory%s: %s",
                self.run,
                self._here,
                remedy,
                error,
            )

    def go_on_without(self) -> None:
        """Go on from memory while the store is absent, until it is back; in another place a new one begins."""
        if self._claimed_before == self._here:
            self.claimed = True  # nothing is made in its place
            _log.warning("memckpt: %s Until it is back, checkpoints fail", self.absent)
        else:
            self.begin_store()

    def begin_store(self) -> None:
        """Begin a new store where the run's former one is absent, and not wanted or elsewhere."""
        _log.warning("memckpt: %s A new one is begun there", self.absent)
        ranks = self._ranks
        self.claimed = ranks.together(lambda: ranks.rank == 0 and self._claim_store(self.run, replace=False))[0]
        self.absent = ""
        self._keep_run()

    # Reading

    def open_newest(self, candidates: Sequence[StoredPoint], spec: StateSpec, by_hand: bool = False) -> StoredState:
        """Open the first of the candidates, newest first, whose files are all good; collective.

        Damaged candidates are skipped. One that cannot be read may be good: it is tried again, then it is an error,
        unless the user has asked for an older step (`by_hand`).

        Where training does not go on exactly, ranks that were seeded alike get the rank state of one and the same
        rank. Ranks that share the work of a layer (tensor parallelism) must draw alike.

        Raises:
            StorageError: the newest candidate that may be good cannot be read.
            DamagedStateError: no candidate is good; the message names what is wrong with each.
            ForeignStateError: the state belongs to another model or optimizer.
        """
        chosen, problems, unread = self._first_good(candidates)
        for problem in problems:
            _log.warning("memckpt: passed over: %s", problem)
        if unread:
            self._note_passed(add=[candidates[chosen].checkpoint.key])
            raise self._not_read(
                unread, [one for one in candidates[chosen + 1 :] if one.step != candidates[chosen].step]
            )
        newer = [path for path in self.catalog.unreadable if chosen < 0 or _may_be_newer(path, candidates[chosen])]
        if newer:
            passed = [place.key for path in newer if (place := place_of(path)) is not None]
            # A batch is kept with the checkpoint that its records are redone on.
            self._note_passed(add=[*passed, *(one.checkpoint.key for one in candidates[:1])])
        if newer and not by_hand:
            raise self._not_read(self.catalog.unreadable[newer[0]], candidates[chosen:] if chosen >= 0 else ())
        self.log_unread()
        if chosen < 0:
            raise DamagedStateError(
                f"no checkpoint in {self.name} is whole: {'; '.join(problems)}. Restore the files, or use "
                "resume='never' to start over"
            )
        if not newer:  # neither the chosen candidate nor damaged ones have to be kept any more
            self._note_passed(drop=[one.checkpoint.key for one in candidates[: chosen + 1]])
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
            f"{_PATIENCE_SECONDS:.0f} s. Start again when it can be read; to go on without it: {instead}. "
            "Retention keeps it"
        )

    def _note_passed(self, add: Collection[Key] = (), drop: Collection[Key] = ()) -> None:
        """Add checkpoints to those that retention keeps as they could not be read, or drop them; written by rank 0."""

        def write_note() -> None:
            if self._ranks.rank != 0 or PASSED in self.catalog.unreadable or PASSED in self.catalog.damaged:
                return
            assert self._store is not None
            try:
                note_passed(self._store, self.catalog, add, drop)
            except StorageError as error:
                _log.warning("memckpt: what retention has to keep is not noted: %s", error)

        self._ranks.together(write_note)

    def before(self, point: StoredPoint) -> tuple[StoredPoint | None, str]:
        """The state before a point, if its files are all good; otherwise None, and the reason in words."""
        before = point_before(self.points, point)
        if before is None:
            return None, f"{self.name} does not have the state from which step {point.step} was taken"
        good = {file.path for file in point.files}
        chosen, problems, unread = self._first_good([before], good)
        return (before, "") if chosen == 0 and not unread else (None, unread or problems[0])

    def open(self, point: StoredPoint, spec: StateSpec, rank: int) -> StoredState:
        """Open a state with the rank state of `rank`; collective."""
        opened: list[StoredState] = []  # kept local: gathered values are sent to all ranks
        self._ranks.together(lambda: opened.append(self._open(point, spec, rank)))
        return opened[0]

    def _open(self, point: StoredPoint, spec: StateSpec, rank: int) -> StoredState:
        assert self._store is not None
        opened = StoredState(self._store, point, rank, spec)
        difference = opened.state.spec.difference(spec.fingerprint())
        if difference is not None:
            raise ForeignStateError(
                f"step {point.step} in {self._store.url} belongs to another model or "
                f"optimizer. First difference: {difference}. Use another run directory, or resume='never' to start over"
            )
        return opened

    def _first_good(self, candidates: Sequence[StoredPoint], good: Collection[str] = ()) -> tuple[int, list[str], str]:
        """Find the first candidate that is not damaged, `good` files aside; collective.

        Returns its index, or -1; problems of those before it; and why it could not be read, empty if it is good.
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
            # A file that several states need is named once, with the newest of them.
            if wrong not in "".join(problems):
                problems[f"step {candidate.step}: {wrong}"] = None
        return -1, list(problems), ""

    def _first_wrong(self, candidate: StoredPoint, share: set[str], seen: dict[str, str | None]) -> tuple[str, str]:
        """Verify this rank's share of a candidate's files. Returns the first damage and read error, in words."""
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
        """Damage of a file, in words; None if it is good. A read error is retried, then raised as StorageError."""
        assert self._store is not None
        while True:
            try:
                return matches(self._store, file)
            except StorageError as error:
                if not self._wait_to_read_again(str(error)):
                    raise


def _may_be_newer(path: str, point: StoredPoint) -> bool:
    """Whether the commit file at `path` may lead to a newer state than `point`."""
    place = place_of(path)
    key = place.key if place is not None else directory_key(path)
    return key is not None and key > point.key


def plan_with_storage(tier: StorageTier, resume: ResumeChoice | int, make: Callable[[], Plan]) -> Plan:
    """Make the plan; where memory does not suffice, unreadable storage is retried before it is given up.

    Raises StorageError where neither suffices, and StorageAwayError where the store is absent.
    """
    if resume == "never" and tier.absent:
        tier.begin_store()
    if resume == "never" or not (tier.unread or tier.absent):
        tier.log_unread()
        return make()
    plan, reason = _try_plan(make)
    if tier.absent:
        if isinstance(plan, RestoreRecord):
            tier.go_on_without()
            return plan
        raise StorageAwayError(
            f"memory cannot resume this run ({reason}), and {tier.absent} Bring it back, or set storage.url as it was, "
            "and start again. resume='never' starts over"
        )
    if isinstance(plan, RestoreRecord) or (isinstance(plan, RestoreStored) and isinstance(resume, int)):
        tier.log_unread()
        return plan
    tier.list_again()
    if not tier.unread:
        return make()
    plan, reason = _try_plan(make)
    if plan is None or isinstance(plan, StartOver):
        raise StorageError(
            f"memory cannot resume this run ({reason}), and {tier.name} cannot be looked into: {tier.unread}. "
            "Try again when it can; resume='never' starts over"
        )
    return plan


def _try_plan(make: Callable[[], Plan]) -> tuple[Plan | None, str]:
    """The plan, None if there is none; and why memory does not suffice, in words."""
    try:
        plan = make()
    except (NothingHeldError, PeerError) as error:
        return None, str(error)
    return plan, "" if isinstance(plan, RestoreRecord) else plan.reason


#: Directory, in the run directory, of the survivors' checkpoint where the run has no storage.
_DIRECTORY = "resharding"


class Resharding:
    """Has the agents write what they hold as one checkpoint, from which each rank reads its new shards."""

    def __init__(self, training: LocalTraining, link: AgentLink, peers: Peers, run_dir: Path) -> None:
        self._config = training.config.storage
        self._ranks = training.ranks
        self._link = link
        self._peers = peers
        self._run_dir = run_dir

    def storage_for(self, resharding: bool) -> StorageConfig | None:
        """The run's storage, or a store in the run directory if it has none; None if no store is needed. Collective."""
        if self._config is not None:
            return self._config
        # The checkpoint stays until training ends: memory drops the state before it is protected again.
        between = self._run_dir.resolve() / _DIRECTORY
        # Nodes need not share the run directory, but all ranks use the store, or none.
        there = any(self._ranks.gather(between.is_dir()))
        return StorageConfig(url=str(between)) if resharding or there else None

    def save(
        self,
        own: Sequence[HeldRecords],
        held: Sequence[HeldRecords],
        fragments: Sequence[HeldFragments],
        resume: ResumeChoice | int,
        spec: StateSpec,
        storage: StorageConfig,
    ) -> None:
        """Write the newest record that memory can produce of all ranks. Collective; raises StorageError."""
        record = self._bring_together(held, fragments, resume, spec)
        self._ranks.together(lambda: self._save(own, record, storage))

    def _bring_together(
        self,
        held: Sequence[HeldRecords],
        fragments: Sequence[HeldFragments],
        resume: ResumeChoice | int,
        spec: StateSpec,
    ) -> int | None:
        """Fetch states of lost nodes. Returns the record that nodes then have of all ranks; None if there is none."""
        if not self._peers.active:
            return record_to_reshard(held, resume)
        nodes = self._peers.node_names

        def plan_without(bad: Collection[BadSource], before: bool) -> Plan:
            plan = plan_to_reshard(held, fragments, resume, nodes, self._ranks.nonce, bad)
            if isinstance(plan, RestoreStored) and self._config is None:
                return StartOver(plan.timeline, plan.reason, discard=False)  # no storage has an older state
            return plan

        plan = self._peers.plan_with_peers(plan_without, spec, adopt=True)
        if isinstance(plan, RestoreRecord):
            return plan.record
        if resume != "never" and self._ranks.rank == 0:
            _log.warning("memckpt: what memory holds cannot go to other ranks: %s", plan.reason)
        return None

    def _save(self, own: Sequence[HeldRecords], record: int | None, storage: StorageConfig) -> None:
        held = any(each.records for each in own)
        if held and record is not None and self._ranks.leads:
            name = "storage" if self._config is not None else RESHARDING
            _log.info("memckpt: record %d goes to %s first: the ranks, or their shards, have changed", record, name)
            url = storage.url or str(self._run_dir.resolve() / "storage")
            self._link.save_record(record, url, storage.timeout_seconds, name)

    def delete_store(self) -> None:
        """Delete the store in the run directory, as training has finished."""
        between = self._run_dir / _DIRECTORY
        if self._config is None and self._ranks.leads and between.is_dir():
            with contextlib.suppress(FileNotFoundError):  # a rank of another node may share the directory
                shutil.rmtree(between)
