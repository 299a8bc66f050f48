"""The resume of an attempt, in five phases, each of all ranks together.

1. *Look*: what the agents, the peers and storage hold.
2. *Agree*: one plan for all ranks. It is a pure function of what was found, so that no rank has to announce it. States
   that a node lacks are fetched from peers, and the plan is made again without a source that proves to be bad.
3. *Open* the state of the plan, or begin without one. The user is told of it.
4. *Fill*: tensors, optimizer state and groups. The filled state is compared with the sample that its record carries. If
   it is another one, the next older state that proves itself is taken in its place.
5. *Go on* in the generation of the state, or in a new one.

Where the last step is repeated as a proof, the chosen state is the one before it.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memckpt.capture.beside.param_groups import (
    LINKS,
    describe_groups,
    restore_groups,
    restore_modes,
    restore_state_order,
    take_over_defaults,
)
from memckpt.capture.beside.presence import DroppedGradients, restore_gradients
from memckpt.capture.evidence import Evidence
from memckpt.capture.slot_writer import SlotWriter
from memckpt.capture.taps.tap import Tap
from memckpt.config import RedoMode, ResumeChoice
from memckpt.errors import AgentError, DamagedStateError, ForeignStateError, MemckptError, StorageError
from memckpt.journal.events import StartedOver
from memckpt.memory.budget import available_bytes
from memckpt.protocol.trainer import Inventory
from memckpt.recovery.comparison import Comparison, LiveCopies, copied_bytes
from memckpt.recovery.from_storage import StoredState
from memckpt.recovery.plan import (
    FIRST_START,
    NewAttempt,
    Plan,
    RestoreRecord,
    RestoreStored,
    StartOver,
    Stored,
    make_plan,
    must_reshard,
)
from memckpt.recovery.restore import replica_digest
from memckpt.recovery.sources import BadSource
from memckpt.session.link import AgentLink
from memckpt.session.peers import Peers
from memckpt.session.ranks import Launch, LocalTraining
from memckpt.session.resume.chosen import Chosen, ChosenInMemory, ChosenInStorage, exchange_slices
from memckpt.session.resume.first_steps import FirstSteps, Repetition
from memckpt.session.resume.report import HeldState, Proof, RestoreReport, prove
from memckpt.session.resume.storage_tier import Resharding, StorageTier, plan_with_storage
from memckpt.session.staging import RestorePoint, Staging
from memckpt.state import rng
from memckpt.state.layout import Layout
from memckpt.state.records import HeldFragments, HeldRecords
from memckpt.state.spec import StateSpec
from memckpt.state.tensors import local
from memckpt.user_messages import nbytes_text, show_by_default

_log = logging.getLogger("memckpt")
#: Logger of the start line, a child of the engine's: a handler or level of that one applies here as well.
_start_log = logging.getLogger("memckpt.start")
#: Agents of one node, one after the other, that may end while its ranks come to them.
_MOST_AGENTS = 3
#: Stored states that are tried, one after the other, where the chosen one does not prove itself.
_MOST_STORED = 3
#: Parts of a rank state that are put back elsewhere.
_NOT_WRITTEN = ("provided", "evidence", "gradients", "rng")
_OTHER_RANKS = "the number of ranks or their shards have changed, and what is private to a rank is another's"
_NO_SAMPLE = "the record carries no sample of the state, and what was restored is compared with nothing"


@dataclass(frozen=True)
class Found:
    """What the agents, the peers and storage hold. The same on every rank, but for `own`.

    `own`: records in this node's memory; `held`: of all nodes; `fragments`: of other nodes' records.
    """

    attempt: NewAttempt
    own: Sequence[HeldRecords]
    held: Sequence[HeldRecords]
    fragments: Sequence[HeldFragments]
    tier: StorageTier

    @property
    def newest_attempt(self) -> int:
        """The newest attempt of which some state is held; 0: nothing is held."""
        in_memory = [*(each.history for each in self.held), *(each.history for each in self.fragments)]
        held = [branch.timeline for history in in_memory for branch in history]
        return max((one.number for one in (*held, *(point.timeline for point in self.tier.points))), default=0)


@dataclass(frozen=True)
class Start:
    """Beginning of an attempt, by its first record.

    `anew`: the first generation begins after `record`. Otherwise none is due until restore() has run.
    """

    record: int
    anew: bool


@dataclass(frozen=True)
class Filled:
    """A state that the live tensors have, and its comparison with its record's sample; None where there is none.

    `start` is another beginning of the attempt than was chosen; None where that stays. `refuted` says what redo got
    wrong in the first state of memory that was refuted; empty if none was.
    """

    chosen: Chosen
    proof: Proof | None
    start: Start | None = None
    refuted: str = ""


class Resumption:
    """Owns the chosen state until it is restored; :meth:`close` closes it.

    Attributes:
        resharding: brings held states to other ranks, or into other shards.
        record_redo_seconds: duration of the redo of one record at the last restore; None where nothing was redone.
        chosen: state that is restored; None where training starts over.
        state_after_repetition: state that its next step led to, which is repeated as a proof; None if no step is.
    """

    def __init__(
        self,
        training: LocalTraining,
        link: AgentLink,
        staging: Staging,
        peers: Peers,
        run_dir: Path,
        first_steps: FirstSteps,
    ) -> None:
        self._training = training
        self._ranks = training.ranks
        self._live = training.live
        self._pending = training.recorder.pending
        self._link = link
        self._staging = staging
        self._peers = peers
        self._run_dir = run_dir
        self._first_steps, self._check = first_steps, first_steps.check
        #: Whether settings have the last step repeated; and whether the state before the chosen one is asked for, too.
        self._replays = self._before = training.config.replays
        self.resharding = Resharding(training, link, peers, run_dir)
        #: What `choose` is given: the layout of the state now, why its mode, in words, and what is asked for.
        self._spec: StateSpec
        self._reason = ""
        self._resume: ResumeChoice | int = "auto"
        self._found: Found | None = None
        #: Why not the newest state of memory is resumed, in words; empty if it is. And whether a held state is dropped.
        self._start_reason, self._drops_held = "", False
        #: Duration of all restores; what redo got wrong in the first state of memory that was refuted, or empty.
        self._seconds, self._refuted = 0.0, ""
        self.record_redo_seconds: float | None = None
        self.chosen: Chosen | None = None
        self.state_after_repetition: Chosen | None = None
        self._restored = False

    @property
    def held(self) -> HeldState | None:
        """Description of the chosen state for the user; None where training starts over."""
        return self.chosen.held if self.chosen is not None else None

    @property
    def newest(self) -> Chosen | None:
        """The state that training continues behind; None where training starts over."""
        return self.state_after_repetition or self.chosen

    @property
    def _lost(self) -> int | None:
        """Number of committed records beyond the newest state; None where no memory knows."""
        newest = self.newest
        if newest is None or newest.newest_known is None:
            return None
        return max(0, newest.newest_known - newest.held.record)

    @property
    def held_mode(self) -> tuple[RedoMode | None, str]:
        """Mode in which that was protected (None: nothing was), and why its steps could not be redone, or empty."""
        newest = self.newest
        return (None, "") if newest is None else (newest.spec.mode, newest.state.get("not_redoable", ""))

    @property
    def due(self) -> bool:
        """Whether the chosen state is yet to be restored."""
        return self.chosen is not None and not self._restored

    @property
    def point(self) -> RestorePoint | None:
        """The resumed record, if it comes from memory; None otherwise."""
        if not isinstance(self.newest, ChosenInMemory):
            return None
        return RestorePoint.known(self.newest.plan.record, self.newest.plan.step, self.newest.state)

    def choose(self, resume: ResumeChoice | int, spec: StateSpec, reason: str, launch: Launch) -> Start:
        """Look, agree and open: the first three phases, at attach; collective."""
        self._reason, self._spec, self._resume = reason, spec, resume
        self._found = found = self._look(launch.asked)
        self._resume = launch.settle(resume, found.newest_attempt)
        self._before = self._replays and not isinstance(self._resume, int)
        start: Start | None = None
        while start is None:  # stored states that prove to be damaged are not in the next plan
            start = self._open(self._agree(found), found)
        if self._ranks.rank == 0:
            self._tell_start()
        return start

    # 1. Look

    def _look(self, asked: ResumeChoice | int) -> Found:
        """Find what is held: of this node, of all others, in storage. What has to go to other ranks is stored first."""
        ranks, resume, spec = self._ranks, self._resume, self._spec
        inventories = self._say_hello(spec)
        own = inventories[ranks.rank].held
        held = [each for inventory in inventories for each in inventory.held]
        shardings = ranks.together(spec.sharding)
        fragments = self._peers.find_fragments()
        former = max(inventory.attempt for inventory in inventories)
        attempt = NewAttempt(ranks.world_size, ranks.nonce, shardings, self._peers.units, former)
        resharding = must_reshard(held, attempt, fragments)
        storage = self.resharding.storage_for(resharding)
        if resharding and storage is not None:
            # Memory holds the shards of other ranks: they go to a store, of which each rank reads its new ones.
            self.resharding.save(own, held, fragments, resume, spec, storage)
        step = asked if isinstance(asked, int) else None
        tier = StorageTier(storage, self._run_dir, ranks, step, owned=self._training.config.storage is not None)
        self._link.owner = tier.run  # this run's id, as its store has it; `configure` tells the agent
        return Found(attempt, own, held, fragments, tier)

    def _say_hello(self, spec: StateSpec) -> list[Inventory]:
        """Connect to the agents, ranks of one node to the same one; returns what it holds, by rank.

        An agent may be told to end between the hellos of two ranks; the later one then has another agent.
        """
        ranks = self._ranks
        found = ranks.together(lambda: self._link.connect(spec))
        for _ in range(_MOST_AGENTS):
            if all(len({one.agent_pid for one in each}) == 1 for each in ranks.by_node(found)):
                return found
            _log.warning("memckpt: the agent ended while ranks of its node came to it: they go to the next one")
            found = ranks.together(partial(self._link.connect_again, spec, found[ranks.rank]))
        raise AgentError(
            f"expected one agent for the ranks of a node, found that {_MOST_AGENTS} have ended one after the other as "
            "ranks came to them: see the agent's log in the run directory for who ends them"
        )

    # 2. Agree

    def _agree(self, found: Found) -> Plan:
        """Make the plan, with what peers can bring; the agent gets its timeline."""
        tier = found.tier

        def plan_without(bad: Collection[BadSource], before: bool) -> Plan:
            stored = Stored(tier.points, tier.catalog.latest_attempt, tier.name, tier.catalog.stranded)
            return make_plan(found.held, self._resume, found.attempt, stored, found.fragments, bad, before)

        make = partial(plan_without, (), self._before)
        if self._peers.active:
            make = partial(self._peers.plan_with_peers, plan_without, self._spec, self._before)
        plan = plan_with_storage(tier, self._resume, make)
        self._link.claimed = tier.claimed  # the planning may have claimed the store
        self._link.configure(plan.timeline)
        return plan

    # 3. Open

    def _open(self, plan: Plan, found: Found) -> Start | None:
        """Open the state of the plan, or begin without one; None: it is damaged, and memory has an older one."""
        ranks, asked = self._ranks, f"resume={self._resume!r}" if isinstance(self._resume, int) else ""
        match plan:
            case RestoreRecord():
                ranks.together(lambda: self._open_held(plan, found.own))
                assert isinstance(self.chosen, ChosenInMemory)
                if self._check.kind != "off":
                    self.chosen.following = self._find_following(self.chosen.generation.message.following)
                self._repeat_from(self._find_before_in_memory(self.chosen, asked))
                return Start(plan.record + 1, anew=False)
            case RestoreStored():
                try:
                    stored = found.tier.open_newest(plan.candidates, self._spec, by_hand=bool(asked))
                except (DamagedStateError, StorageError) as error:  # the same on every rank
                    if not plan.older_held:
                        raise
                    _log.warning("memckpt: an older state of memory serves: %s", error)
                    found.tier.points = tuple(one for one in found.tier.points if one not in plan.candidates)
                    return None
                self._start_reason = plan.reason
                self.chosen = self._open_stored(stored, plan.tier, plan.newest)
                self._live.growth.take_over(stored.own.spec)
                self._repeat_from(self._find_before_in_storage(self.chosen, found.tier, asked))
                record = stored.point.record
                ranks.together(lambda: self._prepare(record + 1, discard=True))
                return Start(record + 1, anew=True)
            case StartOver():
                self._start_reason = plan.reason
                self._drops_held = plan.discard and plan.reason != "resume='never'"
                ranks.together(lambda: self._prepare(1, discard=plan.discard))
                if ranks.rank == 0:
                    self._link.tell_journal(StartedOver(plan.reason))
                self._check.repeat_nothing("nothing was resumed")
                return Start(1, anew=True)

    def _repeat_from(self, before: Chosen | None) -> None:
        """Choose the state before the chosen one, from which its step is repeated; None: it is not."""
        if before is not None and self.chosen is not None:
            before.held = replace(before.held, newest_step=self.chosen.held.step)
            self.chosen, self.state_after_repetition = before, self.chosen

    def _prepare(self, record: int, discard: bool) -> None:
        # `whole`: no older generation is in use, for whose end its slots would have to wait.
        self._staging.prepared = self._link.prepare(
            self._spec, record, discard=discard, reason=self._reason, whole=True
        )

    def _tell_start(self) -> None:
        """Log the start line: the step at which training resumes, or the reason why it starts over.

        It is shown with Python's default logging, too: not only the loss curve must tell that a resume did not happen.
        """
        show_by_default(_start_log)
        held = self.held
        if held is None:
            level = logging.WARNING if self._drops_held else logging.INFO
            if self._start_reason == FIRST_START:
                # A relative directory begins a new run where the working directory is another one.
                _start_log.log(level, "memckpt: %s, in %s", FIRST_START, self._run_dir.resolve())
            else:
                _start_log.log(level, "memckpt: starting over: %s", self._start_reason)
            return
        why = f": {self._start_reason}" if self._start_reason else ""
        step, lost = held.newest_step, self._lost
        proof = "" if step == held.step else ", which is repeated first, as a proof"
        again = "step committed later is" if lost == 1 else "steps committed later are"
        gone = f"; {lost} {again} taken again" if lost else ""
        _start_log.info("memckpt: resuming from %s at step %d%s%s%s", held.tier, step, proof, gone, why)

    def _open_held(self, plan: RestoreRecord, own: Sequence[HeldRecords]) -> None:
        held = [each.ranks for each in own if each.records]
        if self._ranks.unit not in held and not self._peers.active:
            # Without peers rank states are not sent between nodes.
            there = sorted(rank for one in held for rank in one)
            raise ForeignStateError(
                f"node {self._ranks.node} holds the states of ranks {there}, but "
                f"in this attempt ranks {list(self._ranks.local_ranks)} run there; expected every rank on the node "
                "where it was. Restart with the same placement of ranks, or use resume='never' to drop what is held"
            )
        regions = self._link.resume(plan.record, plan.timeline, self._before)
        try:
            self.chosen = ChosenInMemory.of(plan, regions, self._ranks.rank, self._ranks.world_size)
        except BaseException:  # raised again: the regions have no other owner yet
            regions.close()
            raise
        self._live.growth.take_over(regions.message.spec)

    def _open_stored(self, stored: StoredState, tier: str, newest: int | None) -> ChosenInStorage:
        point = stored.point
        if not stored.exact:
            what = "is cut into other shards now"
            if point.world_size != self._ranks.world_size:
                plural = "" if point.world_size == 1 else "s"
                what = f"had {point.world_size} rank{plural} and has {self._ranks.world_size} now"
            _log.warning(
                "memckpt: the run %s: parameters and optimizer state are those of step %d; what was private to a rank "
                "is taken from one that there was, and training does not go on bit for bit",
                what,
                point.step,
            )
        chosen = ChosenInStorage.of(stored, tier, newest)
        if not all(self._ranks.gather(stored.exact)):
            chosen.diverges = self._draws_as_another(chosen.state["rng"])
        return chosen

    def _draws_as_another(self, state: rng.RngState) -> int | None:
        """Find ranks that the user has seeded differently and that restore the same generators; collective.

        Returns the first rank that was seeded as this one, if its generators have to differ again; otherwise None.
        """
        first = self._ranks.first_alike(rng.capture())
        states = self._ranks.gather((first, self._ranks.first_alike(state)))
        before = {one for one, same in states if same == states[self._ranks.rank][1]}
        return None if first == min(before) else first

    def _find_before_in_memory(self, chosen: ChosenInMemory, asked: str) -> ChosenInMemory | None:
        """The state before a record in memory, whose step is repeated; None if it is not. Collective.

        `asked` is the user's choice of an older record, in words; empty without one.
        """
        if not self._replays:
            return None
        message, rank = chosen.generation.message, self._ranks.rank
        before = None if message.before is None else chosen.at(message.before, rank)
        own = asked or message.not_repeated or chosen.state.get("unrepeatable", "")
        if not own and before is not None:
            own = self._why_not_reduced_alike(chosen.state, before.state)
        reason = self._ranks.first_reason(own) or self._why_no_room(copied_bytes(chosen.spec), 0)
        if not reason:
            self._check.step = chosen.plan.step
            return before
        if not chosen.following:
            self._check.repeat_nothing(reason)
        return None

    def _why_not_reduced_alike(self, state: Mapping[str, Any], before: Mapping[str, Any]) -> str:
        """Why a repeated step would add gradients in another order, in words; empty if it would not.

        The second step of a process is reduced in the buckets that DDP lays out after the first one.
        """
        if self._ranks.world_size > 2 and state["reduction"] is not None and before["reduction"] is None:
            return "DDP of three or more ranks had not laid out its buckets for good before that step"
        return ""

    def _find_following(self, states: Mapping[int, Mapping[int, bytes]]) -> dict[int, bytes]:
        """This rank's first state behind a captured record that every rank has."""
        own = {record: ranks[self._ranks.rank] for record, ranks in states.items() if self._ranks.rank in ranks}
        common = set.intersection(*(set(each) for each in self._ranks.gather(list(own))))
        return {record: own[record] for record in sorted(common)[:1]}

    def _find_before_in_storage(self, chosen: ChosenInStorage, tier: StorageTier, asked: str) -> ChosenInStorage | None:
        """The state before one in a store, as :meth:`_find_before_in_memory` finds it. Collective."""
        if not self._replays:
            self._check.repeat_nothing(f"what {tier.name} has is one state, without gradients of the step behind it")
            return None
        stored = chosen.stored
        changed = f"the ranks, or their shards, are not those of the run that is in {tier.name}"
        own = asked or ("" if stored.exact else changed) or chosen.state.get("unrepeatable", "")
        reason = self._ranks.first_reason(own)
        point = None
        if not reason:
            point, reason = tier.before(stored.point)
        if point is not None:
            opened = tier.open(point, self._spec, self._ranks.rank)
            before = ChosenInStorage.of(opened, tier.name, chosen.newest_known)
            reason = self._ranks.first_reason(self._why_not_reduced_alike(chosen.state, before.state))
            reason = reason or self._why_not_compared(stored, opened)
            if not reason:
                self._check.step = stored.point.step
                return before
        self._check.repeat_nothing(reason)
        return None

    def _why_not_compared(self, stored: StoredState, before: StoredState) -> str:
        """Why two states of a store cannot be compared, in words; empty if they can. The same on every rank."""
        layouts = ((stored.state.spec, before.state.spec), (stored.own.spec, before.own.spec))
        changed = any(held.structure() != former.structure() for held, former in layouts)
        if any(self._ranks.gather(changed)):
            return f"the layout of the state has changed with step {stored.point.step}"
        protection = Layout(self._spec).total_bytes // len(self._ranks.unit)
        return self._why_no_room(copied_bytes(stored.state.spec, stored.own.spec), protection)

    def _why_no_room(self, copies: int, protection: int) -> str:
        """Why a node cannot keep copies of the state to compare, beside its protection; the same on every rank."""
        known = self._ranks.gather((copies, protection))
        copies, protection = map(sum, zip(*(known[rank] for rank in self._ranks.local_ranks), strict=True))
        if any(self._ranks.gather(copies + protection > available_bytes())):
            return f"there is no room in host memory for the {nbytes_text(copies)} that the state would be compared by"
        return ""

    # 4. Fill

    def fill(self, told: bool) -> Filled:
        """Fill the live state with the chosen state, or with the next older one that proves itself; collective.

        It can be called at any time before training goes on. The chosen state stays if the user was `told` of it.

        Raises:
            DamagedStateError: no state proves itself, and the chosen one cannot be made; on every rank.
        """
        told, self._refuted = any(self._ranks.gather(told)), ""
        filled = self._fill_with_chosen(told)
        first, proof = filled.chosen, filled.proof
        if proof is None or not proof.differs:
            return filled
        for other in self._others() if not told else ():
            found = self._restore(other)
            if found is not None and not found.differs:
                _log.warning("memckpt: %s; step %d is resumed from %s", proof.line, other.held.step, other.held.tier)
                return Filled(other, found, self._change_to(other), self._refuted)
        if proof.broken:
            raise DamagedStateError(
                f"restore: expected to go on behind step {first.held.step} or an older one that proves itself, found: "
                f"{proof.line}. What was held is still held: resume=STEP goes on from an older step, resume='never' "
                "starts over"
            )
        self._restore(first)  # nothing proves itself: this one is the nearest, and its report says what differs
        return filled

    def _fill_with_chosen(self, told: bool) -> Filled:
        """Fill the live state with the chosen state, or with the newest where no step can be repeated."""
        # Two states must be good: the newest, put back behind the repeated step, and the one before, from which it is
        # repeated. The newest is proven first; the one before stays in place.
        newest, first, start = self.state_after_repetition, self.chosen, None
        assert first is not None
        proof = None if newest is None else self._restore(newest)
        if newest is not None and proof is not None and proof.differs:
            self._check.repeat_nothing("the state that the step led to is refuted")
            if told:
                _log.warning("memckpt: %s; step %d is resumed", proof.line, first.held.step)
                start = self._change_to(first)
            else:
                first = self.chosen = newest
            self.state_after_repetition = None
        proof = self._restore(first)
        if proof is not None and proof.differs and self.state_after_repetition is not None and not told:
            self._check.repeat_nothing("the state that the step would be repeated from is refuted")
            first, self.state_after_repetition = self.state_after_repetition, None
            self.chosen, proof = first, self._restore(first)
        return Filled(first, proof, start, self._refuted)

    def _others(self) -> Iterator[Chosen]:
        """Older states that can be restored in place of the chosen one, nearest first; collective.

        Peers have agreed on the chosen record, and a user may have asked for it: there is no other one then.
        """
        first, found = self.chosen, self._found
        if first is None or found is None or self._peers.active or isinstance(self._resume, int):
            return
        tier = found.tier
        record, known = first.held.record, first.newest_known
        if isinstance(first, ChosenInMemory):
            earlier = first.earlier(self._ranks.rank) if self.state_after_repetition is None else []
            yield from earlier[: min(self._ranks.gather(len(earlier)))]
        else:
            record -= 1
        points = [one for one in tier.points if one.record <= record]
        for _ in range(min(len(points), _MOST_STORED)):
            try:
                stored = tier.open_newest(points, self._spec)
            except MemckptError as error:  # the same on every rank; the chosen state is still there
                _log.warning("memckpt: no state of %s can be tried: %s", tier.name, error)
                return
            yield self._open_stored(stored, tier.name, known)
            points = [one for one in points if one.record < stored.point.record]

    def _change_to(self, chosen: Chosen) -> Start | None:
        """Resume from one of the others; the beginning of the attempt, where a generation begins anew. Collective."""
        former, self.chosen, self.state_after_repetition = self.chosen, chosen, None
        if isinstance(chosen, ChosenInMemory):
            plan = chosen.plan
            # The agent goes back further, too; its regions are those that `generation` has open.
            self._ranks.together(lambda: self._link.resume(plan.record, plan.timeline, before=False).close())
            return None
        assert former is not None
        if former.generation is not None:
            former.generation.close()
        self._check.repeat_nothing("newer states were not what their records say")
        self._live.growth.take_over(chosen.stored.own.spec)
        record = chosen.stored.point.record
        self._staging.close()  # what was prepared for another record
        self._ranks.together(lambda: self._prepare(record + 1, discard=True))
        return Start(record + 1, anew=True)

    def _restore(self, chosen: Chosen) -> Proof | None:
        """Restore tensors, optimizer state and groups, and compare them with the record's sample; collective.

        It may be called again, for the same state or another one. Returns None where other ranks or shards than the
        record's are restored, or there is no sample.
        """
        started = time.perf_counter()
        self._live.put_shards_in_place()
        evidence, problem = None, ""
        try:
            evidence = self._write_state(chosen)
        except Exception as error:  # becomes a finding: redo runs the user's classes with what was recorded
            problem = f"{type(error).__name__}: {error}"
            _log.info("memckpt: step %d cannot be restored from %s", chosen.held.step, chosen.held.tier, exc_info=error)
        found = self._ranks.first_reason(problem)
        if found or evidence is None:
            what = f"the state after step {chosen.held.step}, from {chosen.held.tier},"
            return Proof(f"{what} cannot be made: {found}", differs=True, broken=True)
        if lacking := exchange_slices(chosen, self._live, self._ranks):
            return Proof(
                f"the state after step {chosen.held.step} cannot be made: {lacking}", differs=True, broken=True
            )
        if chosen.generation is not None:
            self._agree_on_replicas(chosen.generation.open_writer(self._staging))
        self._seconds += time.perf_counter() - started
        if any(self._ranks.gather(chosen.resharded)):
            return None
        proof = self._prove(evidence, chosen)
        redone = isinstance(chosen, ChosenInMemory) and chosen.spec.mode != "snapshot"
        if redone and proof is not None and proof.differs:
            self._refuted = self._refuted or proof.line
        return proof

    def _write_state(self, chosen: Chosen, comparison: Comparison | None = None) -> Evidence:
        """Write a state to the live tensors, at any time; returns what samples it. Not collective.

        `comparison` compares with it what the live tensors had before.
        """
        # Live objects keep what they are given, and the state may be written once more.
        state = copy.deepcopy({key: one for key, one in chosen.state.items() if key not in _NOT_WRITTEN})
        restore_groups(self._live, state)
        self._live.growth.written.update(state["written"])
        if "memory" in state:  # else the record was not completed, and has no sample either
            self._live.lay_out(state["strides"])
            self._live.share_memory(state["memory"])
        copies = None
        spec = chosen.spec
        if comparison is not None:
            copies = LiveCopies(chosen.tensors_spec, spec, self._live.tensors(), self._live.optimizers)
        with rng.preserved():
            self.record_redo_seconds = chosen.restore(self._live, self._ranks.rank, self._staging)
        if "optimizers" in state:  # what is in no slot
            self._live.restore_optimizers(state["optimizers"], chosen.recut)
            take_over_defaults(self._live, state)
        restore_state_order(self._live, state)
        if copies is not None and comparison is not None:
            copies.compare(comparison)
        return Evidence(spec, self._live)  # not the writer's: a repeated step may have replaced modules

    def _agree_on_replicas(self, writer: SlotWriter) -> None:
        """Make replicas equal: other kernels or thread counts may give other bits. The first rank's replica wins."""
        ranks = self._ranks
        if all(len(group) == 1 for group in ranks.groups):
            return
        digests = ranks.gather(replica_digest(writer.params, self._live.optimizers))
        if all(len({digests[rank] for rank in group}) == 1 for group in ranks.groups):
            return
        _log.warning("memckpt: replicas differ in bits; every rank takes that of the first rank that holds the same")
        group, first = ranks.open_groups(ranks.groups), ranks.replicas[0]
        for param in writer.params:
            ranks.broadcast_tensor(local(param), first, group)
            for optimizer in self._live.optimizers:
                state = optimizer.state.get(param, {})
                for key in sorted(state):
                    if isinstance(state[key], torch.Tensor):
                        ranks.broadcast_tensor(local(state[key]), first, group)

    def _prove(self, evidence: Evidence, chosen: Chosen) -> Proof | None:
        """Compare the live state with the sample that its record carries; collective. None where some rank has none."""
        if not all(self._ranks.gather("evidence" in chosen.state)):
            return None
        held, now = _comparable(chosen.state), _comparable(describe_groups(self._live))
        comparison = Comparison()
        comparison.sample(evidence.pairs(chosen.state["evidence"]))
        for name, value in now.items():
            comparison.value("hyperparameters", name, value, held.get(name, value))
        findings = comparison.findings(self._live.tensors())
        # Something else may have written to them: they are compared whole from now on.
        self._live.growth.written.update(one.name for one in findings.differences if one.kind == "parameter")
        everybody = self._ranks.gather(findings)
        return prove(everybody, self._training.any_accelerator(), chosen.held.step, chosen.held.tier)

    # 5. Go on

    def go_on(self, filled: Filled, tap: Tap) -> SlotWriter | None:
        """Have training go on behind the state that :meth:`fill` has restored; `tap` reduces gradients as it was left.

        Returns the writer of the generation that goes on; None where its step is repeated first, or a new one begins.
        """
        self._restored = True
        chosen = filled.chosen
        if filled.proof is not None:
            self._check.prove(filled.proof)
        if not chosen.resharded and chosen.state["reduction"] is not None:
            tap.resume_layout(chosen.state["reduction"])
        if self.state_after_repetition is not None:
            self._first_steps.repetition = Repetition(self.state_after_repetition, self._write_state, self._live)
        elif isinstance(chosen, ChosenInMemory):
            writer = chosen.generation.take_writer()
            try:
                self._first_steps.set_gradients_aside(chosen, writer, tap)
            except BaseException:  # raised again: until it is adopted the writer has no other owner
                writer.close()
                raise
            self._staging.adopt_writer(writer)
            return writer
        return None

    def finish(self, filled: Filled) -> RestoreReport:
        """Put back the gradients that outlive their step, and report on the restore."""
        chosen, check, proof = filled.chosen, self._check, filled.proof
        # Logged before: by the choice of the state, and as the verdict of the check.
        stated: tuple[str, ...] = ()
        if proof is None:
            stated = (_OTHER_RANKS if chosen.resharded else _NO_SAMPLE,)
        elif proof.differs or proof.rounds:
            stated = (proof.line,)
        self._first_steps.report = report = RestoreReport(
            chosen.held.step,
            chosen.held.record,
            chosen.held.tier,
            self._seconds,
            self._lost,
            stated,
            check,
            repeated=check.step if self._replays and check.verdict == "pending" else None,
        )
        self._pending.regroup()
        if "gradients" in chosen.state:
            # Zeros stand for gradients that no record holds, those of a skipped step, too.
            dropped = restore_gradients(self._live, chosen.state["gradients"])
            DroppedGradients(self._live, dropped, self._first_steps.depart)
            self._pending.resume(chosen.state["pending"])
        return report

    def adopt_writer(self, writer: SlotWriter) -> None:
        """Have training go on in a held generation, after a repeated step."""
        try:
            self._agree_on_replicas(writer)
        except BaseException:  # raised again: until it is adopted the writer has no other owner
            writer.close()
            raise
        self._staging.adopt_writer(writer)

    def restore_rng(self) -> None:
        """Restore the RNG states of torch, numpy and python; the last call before training goes on."""
        chosen = self.chosen
        assert chosen is not None
        # Once more: what the loop set above its batches, it had set before the batches behind the held one.
        restore_modes(self._live, chosen.state)
        rng.restore(chosen.state["rng"])
        if chosen.diverges is not None:
            rng.diverge(chosen.diverges)

    # End

    def say_if_nothing_was_left(self, last: int) -> None:
        """Say, at the end of a run, that an earlier attempt has trained all of it; `last`: newest committed step."""
        if self._restored and self.held is not None and last <= self.held.newest_step and self._ranks.rank == 0:
            _start_log.info(
                "memckpt: nothing was left to train behind step %d; another run directory, or resume='never', starts "
                "over",
                self.held.newest_step,
            )

    def close(self) -> None:
        """Close the chosen state, unless training has taken it."""
        if self.chosen is not None and self.chosen.generation is not None:
            self.chosen.generation.close()


def _comparable(described: Mapping[str, Any]) -> dict[str, Any]:
    """Without what ``get_extra_state()`` returns, which may depend on the clock, and links to what the script makes."""
    modules = {key: value for key, value in described.get("modules", {}).items() if key != "extra"}
    return {**{key: value for key, value in described.items() if key != LINKS}, "modules": modules}
