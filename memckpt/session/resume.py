"""What an attempt goes on from: chosen with the other ranks at the start, put back before training goes on."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from memckpt.capture.live_state import LiveState
from memckpt.capture.pending import PendingGradients
from memckpt.capture.presence import restore_gradients
from memckpt.capture.slot_writer import SlotWriter
from memckpt.capture.taps import CommHookTap, Tap
from memckpt.config import RedoMode, ResumeCheckChoice, ResumeChoice, StorageConfig
from memckpt.errors import ForeignStateError
from memckpt.memory.budget import available_bytes
from memckpt.recovery.from_storage import StoredState
from memckpt.recovery.live_copies import copied_bytes
from memckpt.recovery.peers import BadSource
from memckpt.recovery.plan import (
    Plan,
    RestoreRecord,
    RestoreStored,
    StartOver,
    make_plan,
    must_reshard,
    plan_to_reshard,
    record_to_reshard,
)
from memckpt.recovery.restore import Restorer, replica_digest
from memckpt.session.agent_client import PreparedRegions
from memckpt.session.held_record import InMemory, InStorage
from memckpt.session.link import AgentLink
from memckpt.session.peers import Peers
from memckpt.session.ranks import Ranks
from memckpt.session.repetition import Repetition
from memckpt.session.report import HeldState, RestoreReport
from memckpt.session.resume_check import ResumeCheck
from memckpt.session.staging import RestorePoint, Staging
from memckpt.session.storage_tier import RESHARDING, StorageTier, plan_patiently
from memckpt.session.witness import Witness
from memckpt.state import codec, rng
from memckpt.state.layout import Layout, StateSpec
from memckpt.state.records import HeldPieces, HeldRecords, Timeline
from memckpt.state.tensors import local
from memckpt.storage.chain import StoredPoint

_log = logging.getLogger("memckpt")
#: Directory, in the run directory, of the survivors' checkpoint where the run has no storage.
_DIRECTORY = "resharding"


@dataclass(frozen=True)
class Start:
    """Where an attempt begins.

    Attributes:
        timeline: that it trains on.
        record: the first that it collects.
        anew: whether a new generation begins with that record; otherwise the restore says how it goes on.
    """

    timeline: Timeline
    record: int
    anew: bool


class Resumption:
    """Asks agent and storage what they hold, agrees with the other ranks on what to resume, and puts it back.

    Owns what is opened for that; the regions that are left are closed in :meth:`close`.

    Attributes:
        held: what the plan decided to restore; None where training starts over.
    """

    def __init__(
        self,
        live: LiveState,
        ranks: Ranks,
        link: AgentLink,
        staging: Staging,
        storage: StorageConfig | None,
        run_dir: Path,
        peers: Peers,
        check: ResumeCheckChoice,
    ) -> None:
        self._peers = peers
        self._live = live
        self._ranks = ranks
        self._link = link
        self._staging = staging
        self._storage = storage
        self._run_dir = run_dir
        self._fresh: PreparedRegions | None = None
        self._resumable: PreparedRegions | None = None
        #: What memory holds of the record that is put back; None where it comes from storage, or nothing is.
        self.point: RestorePoint | None = None
        self._resume_from: RestoreRecord | None = None
        self._stored: StoredState | None = None
        #: The state behind `_stored`, whose step is repeated.
        self._repeated: StoredState | None = None
        self._state: dict[str, Any] = {}
        self._diverges: int | None = None
        self.held: HeldState | None = None
        #: The mode in which what is resumed was protected, None where nothing is; and why it could not be redone.
        self.held_mode: RedoMode | None = None
        self.not_redoable = ""
        self._reason = ""
        #: Why training starts as it does, in words, as far as that has to be said; whether that drops what is held.
        self.start_reason = ""
        self.drops_held = False
        self._check_choice = check
        self.check = ResumeCheck(check, "off" if check == "off" else "pending")
        #: The newest record that memory knows of, where storage is resumed from; None: it knows of none.
        self._newest_known: int | None = None
        #: The step that is being repeated; None while none is.
        self.repetition: Repetition | None = None
        #: Whether gradients come in buckets that all ranks reduce.
        self._reduces = False
        #: Gradients of the record behind the one that is resumed, to be compared with those to come.
        self.witness: Witness | None = None
        #: Rank states of records that follow the one that is resumed, still to be compared.
        self.following: dict[int, bytes] = {}

    @property
    def due(self) -> bool:
        """Whether something is held that has not been put back yet."""
        return self._resumable is not None or self._stored is not None

    @property
    def repeated(self) -> int | None:
        """The step that is taken once more, from the state before it, which is `held`; None where none is."""
        check = self.check
        return check.step if check.kind in ("replay", "require") and check.verdict == "pending" else None

    # The choice

    def choose(self, resume: ResumeChoice | int, spec: StateSpec, reason: str) -> Start:
        """Connect to the agent, choose, and open what was chosen; the same on every rank.

        Args:
            resume: what the user asked for.
            spec: the live state's.
            reason: why it has its mode, for the agent.
        """
        self._reason = reason
        ranks = self._ranks
        answers = ranks.together(lambda: (self._link.connect(spec, next_record=0, rejoining=False), spec.sharding()))
        own = answers[ranks.rank][0]
        held = [each for inventories, _ in answers for each in inventories]
        shardings = [sharding for _, sharding in answers]
        pieces = self._peers.listen()
        resharding = must_reshard(held, ranks.world_size, shardings, pieces, self._peers.units)
        storage = self._storage_for(resharding)
        if resharding and storage is not None:
            record, where = self._bring_together(held, pieces, resume, spec), storage
            ranks.together(lambda: self._save_for_resharding(own, record, where))
        step = resume if isinstance(resume, int) else None
        tier = StorageTier(storage, self._run_dir, ranks, step, owned=self._storage is not None)
        self._link.owner = tier.run

        def plan_without(bad: Collection[BadSource], before: bool) -> Plan:
            return make_plan(
                held,
                resume,
                ranks.world_size,
                ranks.nonce,
                tier.points,
                latest_attempt=tier.catalog.latest_attempt,
                shardings=shardings,
                pieces=pieces,
                units=self._peers.units,
                without=bad,
                before=before,
                store=tier.name,
            )

        repeat = self._wants_to_repeat and not isinstance(resume, int)
        plan = plan_patiently(tier, resume, lambda: self._peers.carry_out(plan_without, spec, before=repeat))
        self._link.claimed = tier.claimed
        self._link.configure(plan.timeline, torch.get_num_threads())
        if isinstance(plan, RestoreRecord):
            ranks.together(lambda: self._open_held(plan, own, repeat))
            self._decide_on_repeating(plan, f"resume={resume!r}" if isinstance(resume, int) else "")
            return Start(plan.timeline, plan.record + 1, anew=False)
        if isinstance(plan, RestoreStored):
            self.start_reason = plan.reason
            self._newest_known = plan.newest
            stored = tier.open_newest(plan.candidates, spec, by_hand=isinstance(resume, int))
            record = self._open_stored(stored, plan.tier)
            asked = f"resume={resume!r}" if isinstance(resume, int) else ""
            self._decide_on_repeating_stored(tier, stored, spec, asked)
            ranks.together(lambda: self._prepare(spec, plan.timeline, record + 1, discard=True))
            return Start(plan.timeline, record + 1, anew=True)
        ranks.together(lambda: self._start_over(spec, plan))
        self._do_without_check("nothing was resumed")
        return Start(plan.timeline, 1, anew=True)

    def _storage_for(self, resharding: bool) -> StorageConfig | None:
        """The run's storage. Without one, what other ranks are to hold goes through the run directory."""
        if self._storage is not None:
            return self._storage
        # What has been put there stays until training ends: memory has given it up before it holds it anew.
        between = self._run_dir.resolve() / _DIRECTORY
        # Nodes need not share the run directory, and all ranks have to look, or none.
        there = any(self._ranks.gather(between.is_dir()))
        return StorageConfig(url=str(between)) if resharding or there else None

    def _bring_together(
        self, held: Sequence[HeldRecords], pieces: Sequence[HeldPieces], resume: ResumeChoice | int, spec: StateSpec
    ) -> int | None:
        """The record of which all states are on some node of this attempt, those of lost nodes, too; None: of none."""
        if not self._peers.active:
            return record_to_reshard(held, resume)
        nodes = self._peers.node_names

        def plan_without(bad: Collection[BadSource], before: bool) -> Plan:
            return plan_to_reshard(held, pieces, resume, nodes, self._ranks.nonce, bad)

        plan = self._peers.carry_out(plan_without, spec, adopt=True)
        if isinstance(plan, RestoreRecord):
            return plan.record
        if isinstance(plan, RestoreStored) and resume != "never" and self._ranks.rank == 0:
            _log.warning("memckpt: what memory holds cannot go to other ranks: %s", plan.reason)
        return None

    def _save_for_resharding(self, own: Sequence[HeldRecords], record: int | None, storage: StorageConfig) -> None:
        """Other ranks, or other shards, resume from storage: see what memory holds get there."""
        held = any(each.records for each in own if not each.standby)
        if held and record is not None and self._ranks.rank == self._ranks.local_ranks[0]:
            name = "storage" if self._storage is not None else RESHARDING
            _log.info("memckpt: record %d goes to %s first: the ranks, or their shards, have changed", record, name)
            url = storage.url or str(self._run_dir.resolve() / "storage")
            self._link.save_record(record, url, storage.timeout_seconds, name)

    def _start_over(self, spec: StateSpec, plan: StartOver) -> None:
        self.start_reason = plan.reason
        self.drops_held = plan.discard and plan.reason != "resume='never'"
        self._prepare(spec, plan.timeline, 1, discard=plan.discard)

    def _prepare(self, spec: StateSpec, timeline: Timeline, record: int, discard: bool) -> None:
        self._fresh = self._link.prepare(spec, timeline, record, discard=discard, reason=self._reason, whole=True)

    @property
    def _wants_to_repeat(self) -> bool:
        return self._check_choice in ("replay", "require")

    def _do_without_check(self, reason: str) -> None:
        """Nothing is compared in this attempt."""
        if self.check.verdict == "pending":
            self.check.settle("none", f"nothing was compared: {reason}")

    def _decide_on_repeating(self, plan: RestoreRecord, asked: str) -> None:
        """Whether the last step is taken once more: only where every rank can, so that all do or none does.

        Args:
            asked: what the user asked for in place of the newest record; empty: nothing.
        """
        if self._check_choice == "off":
            return
        assert self._resumable is not None
        message = self._resumable.message
        self._keep_following(message.following)
        if not self._wants_to_repeat:
            return
        own = asked or message.not_repeated or self._state.get("unrepeatable", "")
        if not own and message.before is not None:
            own = self._why_not_reduced_alike(codec.decode(message.before.rank_states[self._ranks.rank]))
        reason = next(filter(None, self._ranks.gather(own)), "")
        if reason:
            # On some nodes only: one that has fetched its state has nothing to go on to.
            self._ranks.together(lambda: self._advance(plan.record) if message.before is not None else None)
        if reason and not self.following:
            self._do_without_check(reason)
        elif not reason:
            before = message.before
            assert before is not None
            self.check.step = plan.step
            self._state = codec.decode(before.rank_states[self._ranks.rank])
            self.held = HeldState(
                before.step, plan.record - 1, plan.tier, self._state["provided"], self._ranks.world_size
            )

    def _why_not_reduced_alike(self, before: Mapping[str, Any]) -> str:
        """Why a step from the state before would add gradients in another order, in words; empty if it would not.

        The second step of a process is reduced in the buckets that DDP lays out behind the first one, and the state
        behind the first one cannot say how.
        """
        if self._ranks.world_size > 2 and self._state["reduction"] is not None and before["reduction"] is None:
            return "DDP of three or more ranks had not laid out its buckets for good before that step"
        return ""

    def _keep_following(self, states: Mapping[int, Mapping[int, bytes]]) -> None:
        """Keep the first rank state behind a captured record that every rank has."""
        own = {record: ranks[self._ranks.rank] for record, ranks in states.items() if self._ranks.rank in ranks}
        common = set.intersection(*(set(each) for each in self._ranks.gather(list(own))))
        self.following = {record: own[record] for record in sorted(common)[:1]}

    def _decide_on_repeating_stored(self, tier: StorageTier, stored: StoredState, spec: StateSpec, asked: str) -> None:
        """As for memory: where storage has the state from which the last step was taken, too."""
        if not self._wants_to_repeat:
            self._do_without_check(f"what {tier.name} has is one state, without gradients of the step behind it")
            return
        changed = "" if stored.exact else f"the ranks, or their shards, are not those of the run that is in {tier.name}"
        reason = next(filter(None, self._ranks.gather(asked or changed or self._state.get("unrepeatable", ""))), "")
        before: StoredPoint | None = None
        if not reason:
            before, reason = tier.before(stored.point)
        if before is not None:
            opened = tier.open(before, spec, self._ranks.rank)
            known = codec.decode(opened.rank_state)
            reason = next(filter(None, self._ranks.gather(self._why_not_reduced_alike(known))), "")
            reason = reason or self._why_not_compared(stored, opened, spec)
            if not reason:
                self._repeated, self._stored = stored, opened
                self.check.step = stored.point.step
                self._state = known
                provided = self._state["provided"]
                self.held = HeldState(before.step, before.record, tier.name, provided, before.world_size)
                return
        self._do_without_check(reason)

    def _why_not_compared(self, stored: StoredState, before: StoredState, spec: StateSpec) -> str:
        """Why what is in storage is not restored twice, in words; the same on every rank."""
        layouts = ((stored.state.spec, before.state.spec), (stored.own.spec, before.own.spec))
        changed = any(held.structure() != former.structure() for held, former in layouts)
        copies = copied_bytes(stored.state.spec, stored.own.spec)
        known = self._ranks.gather((changed, copies, Layout(spec).total_bytes // len(self._ranks.unit)))
        here = [known[rank] for rank in self._ranks.local_ranks]
        copies, protection = (sum(each[index] for each in here) for index in (1, 2))
        tight = copies + protection > available_bytes()
        if any(each[0] for each in known):
            return f"the layout of the state has changed with step {stored.point.step}"
        if any(self._ranks.gather(tight)):
            return (
                f"there is no room in host memory for the {copies / 2**20:.0f} MiB that the state would be compared by"
            )
        return ""

    def _advance(self, record: int) -> None:
        """Have the replica go on to the record: the one before it is not needed."""
        assert self._resumable is not None
        regions = self._resumable
        advanced = self._link.client.advance(record)
        if regions.replica is not None:
            regions.message = msgspec.structs.replace(
                regions.message, before=None, missing=advanced.missing, plain=advanced.plain
            )
        else:
            regions.message = msgspec.structs.replace(regions.message, before=None)

    def _open_held(self, plan: RestoreRecord, own: Sequence[HeldRecords], repeat: bool) -> None:
        held = [each.ranks for each in own if each.records]
        if self._ranks.unit not in held and not self._peers.active:
            # Without peers rank states do not travel between nodes.
            there = sorted(rank for one in held for rank in one)
            raise ForeignStateError(
                f"node {self._ranks.node} holds the states of ranks {there}, but "
                f"in this attempt ranks {list(self._ranks.local_ranks)} run there; expected every rank on the node "
                "where it was. Restart with the same placement of ranks, or use resume='never' to drop what is held"
            )
        self._resumable = self._link.resume(plan.record, plan.timeline, repeat)
        self._resume_from = plan
        self._state = codec.decode(self._resumable.message.rank_states[self._ranks.rank])
        self.held = HeldState(plan.step, plan.record, plan.tier, self._state["provided"], self._ranks.world_size)
        self.point = RestorePoint(
            plan.record, plan.step, codec.Packed(self._state, fetch=lambda tensor: tensor, token=lambda: lambda: None)
        )
        self._take_over(self._resumable.message.spec)

    def _open_stored(self, stored: StoredState, tier: str) -> int:
        point = stored.point
        if not stored.exact:
            what = "is cut into other shards now"
            if point.world_size != self._ranks.world_size:
                what = f"had {point.world_size} ranks and has {self._ranks.world_size} now"
            _log.warning(
                "memckpt: the run %s: parameters and optimizer state are those of step %d; what was private to a rank "
                "is taken from one that there was, and training does not go on bit for bit",
                what,
                point.step,
            )
        self._stored = stored
        self._state = codec.decode(stored.rank_state)
        if not all(self._ranks.gather(stored.exact)):
            self._diverges = self._draws_as_another()
        self.held = HeldState(point.step, point.record, tier, self._state["provided"], point.world_size)
        self._take_over(stored.own.spec)
        return point.record

    def _draws_as_another(self) -> int | None:
        """Make generators differ again on ranks that the user has seeded differently and that got the same ones.

        Returns:
            The first rank that was seeded as this one, if it is such a one: those that are alike stay so.
        """
        first = self._ranks.first_alike(rng.capture())
        states = self._ranks.gather((first, self._ranks.first_alike(self._state["rng"])))
        before = {one for one, same in states if same == states[self._ranks.rank][1]}
        return None if first == min(before) else first

    def _take_over(self, spec: StateSpec) -> None:
        """What the run that is resumed had found out."""
        self.held_mode = spec.mode
        self.not_redoable = self._state.get("not_redoable", "")
        self._live.growth.take_over(spec)

    def take_regions(self) -> PreparedRegions | None:
        """The regions that were prepared for a new generation, once; the caller closes them."""
        regions, self._fresh = self._fresh, None
        return regions

    # The restore

    def restore_tensors(self, tap: Tap, go_on: Callable[[SlotWriter, int], None]) -> RestoreReport | None:
        """Put parameters, buffers, optimizer state and groups back, in place; None where there is nothing to restore.

        Args:
            tap: gets the layout back in which gradients were reduced.
            go_on: called with the writer of the generation that was resumed and the record that is back. From
                storage no generation is resumed, and the next commit writes one.
        """
        if self.due:
            self._live.put_shards_in_place()
        if self._stored is not None:
            return self._restore_stored(self._stored, tap)
        plan, regions = self._resume_from, self._resumable
        if plan is None or regions is None:
            return None
        started = time.perf_counter()
        self._restore_groups()
        self._resumable = None  # the writer owns the regions from here on
        writer = self._staging.open(regions)
        try:
            self._restore_held(plan.record, regions, writer)
            self._restore_optimizers()
            self._agree_on_replicas(writer)
            if regions.message.before is not None:
                held = InMemory(plan.record, self._ranks.rank, regions, writer, self._live, self._link)
                state = codec.decode(regions.message.rank_states[self._ranks.rank])
                self.repetition = Repetition(plan.record, plan.step, held, state, self._live, self._ranks)
        except BaseException:  # raised again: until it is adopted the writer has no other owner
            writer.close()
            raise
        self._restore_reduction(tap)
        if self.repetition is None:
            self._set_gradients_aside(writer, plan.record + 1, tap)
            self._staging.adopt(writer)
            go_on(writer, plan.record)
        seconds = time.perf_counter() - started
        assert self.held is not None
        return RestoreReport(
            self.held.step, self.held.record, plan.tier, seconds, plan.lost, check=self.check, repeated=self.repeated
        )

    def _set_gradients_aside(self, writer: SlotWriter, record: int, tap: Tap) -> None:
        """Keep what the dead attempt had staged of `record`, as long as its slot has not been opened anew."""
        if self._check_choice == "off" or self.following:
            return
        self.witness = Witness(self._staging.copier)
        if writer.captures:
            self.witness.decline("state is captured, gradients are not, and no step behind the captured one is known")
        elif isinstance(tap, CommHookTap) and self._ranks.world_size > 2 and self._state["reduction"] is None:
            self.witness.decline("DDP of three or more ranks had not laid out its buckets for good by then")
        else:
            self._reduces = isinstance(tap, CommHookTap)
            self.witness.set_aside(writer, record, tap.name)

    def _restore_held(self, record: int, regions: PreparedRegions, writer: SlotWriter) -> None:
        message = regions.message
        metas = message.metas
        if message.before is not None:
            record, metas = record - 1, message.before.metas
        restorer = Restorer(
            writer.layout,
            regions.slots,
            regions.static,
            regions.replica,
            writer.ring,
            self._live.tensors(),
            self._live.optimizers,
        )
        with rng.preserved():
            restorer.restore(record, self._ranks.rank, metas, message.missing, message.plain)

    def _restore_stored(self, stored: StoredState, tap: Tap) -> RestoreReport:
        started = time.perf_counter()
        self._stored = None
        self._restore_groups()
        with rng.preserved():
            stored.restore(self._live.tensors(), self._live.optimizers)
        pieces = sorted(self._live.pieces())
        held = sorted((one.name, one.shape, one.shard) for one in stored.own.spec.tensors() if one.shard is not None)
        self._restore_optimizers(resharded=pieces != held)
        point = stored.point
        if stored.exact:
            self._restore_reduction(tap)
        repeated, self._repeated = self._repeated, None
        if repeated is not None:
            last, state = repeated.point, codec.decode(repeated.rank_state)
            in_storage = InStorage(repeated, self._live)
            self.repetition = Repetition(last.record, last.step, in_storage, state, self._live, self._ranks)
        seconds = time.perf_counter() - started
        reached = repeated.point.record if repeated is not None else point.record
        assert self.held is not None
        lost = max(0, self._newest_known - reached) if self._newest_known is not None else None
        return RestoreReport(
            point.step, point.record, self.held.tier, seconds, lost, stored.exact, self.check, repeated=self.repeated
        )

    def _restore_optimizers(self, resharded: bool = False) -> None:
        """What of the optimizers' state is in no slot."""
        if "optimizers" in self._state:
            self._live.restore_optimizers(self._state["optimizers"], resharded)
        self._live.restore_state_order(self._state["state_order"])

    def _restore_groups(self) -> None:
        self._live.restore_trainable(self._state["trainable"])
        self._live.restore_groups(self._state["groups"])

    def restore_gradients(self, pending: PendingGradients) -> None:
        """Have gradients where there were some, and what is known of those that wait; behind the restore of tensors."""
        pending.regroup()
        if "gradients" in self._state:
            restore_gradients(self._live, self._state["gradients"])
            pending.resume(self._state["pending"])
        if self.witness is not None:
            self.witness.note_left(self._reduces)

    def _restore_reduction(self, tap: Tap) -> None:
        if isinstance(tap, CommHookTap):
            tap.resume_layout(self._state["reduction"])

    def adopt(self, writer: SlotWriter) -> None:
        """Go on with the writer of a held generation, behind a step that was repeated."""
        try:
            self._agree_on_replicas(writer)
        except BaseException:  # raised again: until it is adopted the writer has no other owner
            writer.close()
            raise
        self._staging.adopt(writer)

    def _agree_on_replicas(self, writer: SlotWriter) -> None:
        """Holders may differ (other kernels, other thread counts): then the first rank's replica is everybody's."""
        ranks = self._ranks
        if all(len(group) == 1 for group in ranks.groups):
            return
        digests = ranks.gather(replica_digest(writer.params, self._live.optimizers))
        if all(len({digests[rank] for rank in group}) == 1 for group in ranks.groups):
            return
        _log.warning("memckpt: replicas differ in bits; every rank takes that of the first rank that holds the same")
        group = ranks.open_replica_group()
        for param in writer.params:
            ranks.broadcast_tensor(local(param), group)
            for optimizer in self._live.optimizers:
                state = optimizer.state.get(param, {})
                for key in sorted(state):
                    if isinstance(state[key], torch.Tensor):
                        ranks.broadcast_tensor(local(state[key]), group)

    def restore_rng(self) -> None:
        """Put the RNG states of torch, numpy and python back; the last thing before training goes on."""
        if self.held is not None:
            rng.restore(self._state["rng"])
            if self._diverges is not None:
                rng.diverge(self._diverges)

    # End

    def forget_resharding(self) -> None:
        """Training has finished: what passed through the run directory is not needed any more."""
        between = self._run_dir / _DIRECTORY
        if self._storage is None and self._ranks.rank == self._ranks.local_ranks[0] and between.is_dir():
            with contextlib.suppress(FileNotFoundError):  # a rank of another node may share the directory
                shutil.rmtree(between)

    def close(self) -> None:
        """Close the regions that nobody has taken, and let go of gradients that were never compared."""
        self.witness = None
        for regions in (self._fresh, self._resumable):
            if regions is not None:
                regions.close()
        self._fresh = self._resumable = None
        repetition, self.repetition = self.repetition, None
        if repetition is not None:
            repetition.close()
