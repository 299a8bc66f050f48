"""The choice of the state that an attempt resumes from, with all ranks, at the start."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from memckpt.config import RedoMode, ResumeChoice
from memckpt.errors import AgentError, ForeignStateError, MemckptError
from memckpt.journal.events import StartedOver
from memckpt.protocol.trainer import Inventory
from memckpt.recovery.from_storage import StoredState
from memckpt.recovery.peers import BadSource
from memckpt.recovery.plan import (
    NewAttempt,
    Plan,
    RestoreRecord,
    RestoreStored,
    StartOver,
    Stored,
    make_plan,
    must_reshard,
)
from memckpt.session.chosen_state import Chosen, ChosenInMemory, ChosenInStorage
from memckpt.session.link import AgentLink
from memckpt.session.local_training import LocalTraining
from memckpt.session.patient_plan import plan_patiently
from memckpt.session.peers import Peers
from memckpt.session.ranks import Ranks
from memckpt.session.repeat_choice import RepeatChoice
from memckpt.session.report import HeldState
from memckpt.session.resharding import Resharding
from memckpt.session.resume_check import ResumeCheck
from memckpt.session.staging import RestorePoint, Staging
from memckpt.session.storage_tier import StorageTier
from memckpt.state import codec, rng
from memckpt.state.records import HeldRecords
from memckpt.state.spec import StateSpec

_log = logging.getLogger("memckpt")
#: Agents of one node, one after the other, that may end while its ranks come to them.
_MOST_AGENTS = 3
#: Stored states that are tried, one after the other, where the chosen one does not prove itself.
_MOST_STORED = 3


@dataclass(frozen=True)
class Start:
    """Beginning of an attempt.

    Attributes:
        record: number of its first record.
        anew: whether a new generation begins with that record; otherwise the restore decides.
    """

    record: int
    anew: bool


class Resumption:
    """Lists the states of memory, peers and storage, chooses one with all ranks, and opens it.

    Owns the chosen state until it is restored; :meth:`close` closes it.

    Args:
        training: training that is resumed.
        link: connection to the agent.
        staging: gets the regions of a new generation, where one begins.
        peers: the peers tier.
        run_dir: run directory.
        check: resume check of the attempt.

    Attributes:
        chosen: state that is resumed; None where training starts over.
        held_mode: mode in which it was protected; None where training starts over.
        not_redoable: why its steps could not be redone, in words; empty if they could.
        start_reason: why not the newest state of memory is resumed, in words; empty if it is.
        drops_held: whether a held state is dropped.
    """

    def __init__(
        self,
        training: LocalTraining,
        link: AgentLink,
        staging: Staging,
        peers: Peers,
        run_dir: Path,
        check: ResumeCheck,
    ) -> None:
        self._owns_storage = training.config.storage is not None
        self._ranks = training.ranks
        self._live = training.live
        self._link = link
        self._staging = staging
        self._peers = peers
        self._run_dir = run_dir
        self._resharding = Resharding(training, link, peers, run_dir)
        self._repeat = RepeatChoice(training, link, check)
        self._reason = ""
        self._tier: StorageTier | None = None
        self._asked = False
        self.chosen: Chosen | None = None
        self.held_mode: RedoMode | None = None
        self.not_redoable = ""
        self.start_reason = ""
        self.drops_held = False

    @property
    def held(self) -> HeldState | None:
        """Description of the chosen state for the user; None where training starts over."""
        return self.chosen.held if self.chosen is not None else None

    @property
    def lost(self) -> int | None:
        """Number of committed steps beyond the chosen state; None where that is not known, or training starts over."""
        return self.chosen.lost if self.chosen is not None else None

    @property
    def due(self) -> bool:
        """Whether the chosen state is yet to be restored."""
        return self.chosen is not None and not self.chosen.restored

    @property
    def point(self) -> RestorePoint | None:
        """The resumed record, if it comes from memory; None otherwise."""
        return self.chosen.point if isinstance(self.chosen, ChosenInMemory) else None

    # The choice

    def choose(self, resume: ResumeChoice | int, spec: StateSpec, reason: str) -> Start:
        """Connect to the agent, choose a state, and open it; collective.

        Args:
            resume: choice of the user.
            spec: layout of the live state.
            reason: why the redo mode was chosen, in words, for the agent.
        """
        self._reason = reason
        ranks = self._ranks
        inventories = self._say_hello(spec)
        own = inventories[ranks.rank].held
        held = [each for inventory in inventories for each in inventory.held]
        shardings = ranks.together(spec.sharding)
        fragments = self._peers.listen()
        former = max(inventory.attempt for inventory in inventories)
        attempt = NewAttempt(ranks.world_size, ranks.nonce, shardings, self._peers.units, former)
        resharding = must_reshard(held, attempt, fragments)
        if resharding:
            self._resharding.save(own, held, fragments, resume, spec)
        step = resume if isinstance(resume, int) else None
        self._asked = step is not None
        storage = self._resharding.storage_for(resharding)
        tier = StorageTier(storage, self._run_dir, ranks, step, owned=self._owns_storage)
        self._link.owner = tier.run
        self._tier, self._spec = tier, spec

        def plan_without(bad: Collection[BadSource], before: bool) -> Plan:
            stored = Stored(tier.points, tier.catalog.latest_attempt, tier.name, tier.catalog.stranded)
            return make_plan(held, resume, attempt, stored, fragments, bad, before)

        repeat = self._repeat.wanted and step is None
        plan = plan_patiently(tier, resume, lambda: self._peers.carry_out(plan_without, spec, before=repeat))
        self._link.claimed = tier.claimed
        self._timeline = plan.timeline
        self._link.configure(plan.timeline)
        asked = f"resume={resume!r}" if step is not None else ""
        if isinstance(plan, RestoreRecord):
            ranks.together(lambda: self._open_held(plan, own, repeat))
            assert isinstance(self.chosen, ChosenInMemory)
            self._repeat.decide_in_memory(self.chosen, asked)
            return Start(plan.record + 1, anew=False)
        if isinstance(plan, RestoreStored):
            self.start_reason = plan.reason
            stored = tier.open_newest(plan.candidates, spec, by_hand=step is not None)
            self.chosen = self._open_stored(stored, plan)
            self._take_over(stored.own.spec)
            self._repeat.decide_in_storage(self.chosen, tier, spec, asked)
            record = stored.point.record
            ranks.together(lambda: self._prepare(spec, record + 1, discard=True))
            return Start(record + 1, anew=True)
        ranks.together(lambda: self._start_over(spec, plan))
        if ranks.rank == 0:
            self._link.tell_journal(StartedOver(plan.reason))
        self._repeat.do_without("nothing was resumed")
        return Start(1, anew=True)

    def _say_hello(self, spec: StateSpec) -> list[Inventory]:
        """Connect to the agents, ranks of one node to the same one; returns what it holds, by rank.

        An agent may be told to end between the hellos of two ranks; the later one then has another agent.

        Raises:
            AgentError: agents end faster than ranks come.
        """
        ranks = self._ranks
        found = ranks.together(lambda: self._link.begin(spec))
        for _ in range(_MOST_AGENTS):
            if _one_for_each_node(ranks, found):
                return found
            _log.warning("memckpt: the agent ended while ranks of its node came to it: they go to the next one")
            found = ranks.together(partial(self._link.begin_again, spec, found[ranks.rank]))
        raise AgentError(
            f"expected one agent for the ranks of a node, found that {_MOST_AGENTS} have ended one after the other as "
            "ranks came to them: see the agent's log in the run directory for who ends them"
        )

    def _start_over(self, spec: StateSpec, plan: StartOver) -> None:
        self.start_reason = plan.reason
        self.drops_held = plan.discard and plan.reason != "resume='never'"
        self._prepare(spec, 1, discard=plan.discard)

    def _prepare(self, spec: StateSpec, record: int, discard: bool) -> None:
        self._staging.prepared = self._link.prepare(spec, record, discard=discard, reason=self._reason, whole=True)

    def _open_held(self, plan: RestoreRecord, own: Sequence[HeldRecords], repeat: bool) -> None:
        held = [each.ranks for each in own if each.records]
        if self._ranks.unit not in held and not self._peers.active:
            # Without peers rank states are not sent between nodes.
            there = sorted(rank for one in held for rank in one)
            raise ForeignStateError(
                f"node {self._ranks.node} holds the states of ranks {there}, but "
                f"in this attempt ranks {list(self._ranks.local_ranks)} run there; expected every rank on the node "
                "where it was. Restart with the same placement of ranks, or use resume='never' to drop what is held"
            )
        regions = self._link.resume(plan.record, plan.timeline, repeat)
        try:
            state = codec.decode(regions.message.rank_states[self._ranks.rank])
            self.chosen = ChosenInMemory(
                plan,
                HeldState(plan.step, plan.record, plan.tier, state["provided"], self._ranks.world_size, plan.step),
                state,
                RestorePoint.known(plan.record, plan.step, state),
                regions,
                regions.message.metas,
            )
        except BaseException:  # raised again: the regions have no other owner yet
            regions.close()
            raise
        self._take_over(regions.message.spec)

    def _open_stored(self, stored: StoredState, plan: RestoreStored) -> ChosenInStorage:
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
        state = codec.decode(stored.rank_state)
        held = HeldState(point.step, point.record, plan.tier, state["provided"], point.world_size, point.step)
        chosen = ChosenInStorage(held, state, stored, plan.newest)
        if not all(self._ranks.gather(stored.exact)):
            chosen.diverges = self._draws_as_another(state["rng"])
        return chosen

    def _draws_as_another(self, state: rng.RngState) -> int | None:
        """Find ranks that the user has seeded differently and that restore the same generators; collective.

        Returns:
            The first rank that was seeded as this one, if its generators have to differ again: ranks that were seeded
            alike stay alike. None if they need not.
        """
        first = self._ranks.first_alike(rng.capture())
        states = self._ranks.gather((first, self._ranks.first_alike(state)))
        before = {one for one, same in states if same == states[self._ranks.rank][1]}
        return None if first == min(before) else first

    def _take_over(self, spec: StateSpec) -> None:
        """Take over findings of the resumed run: mode, self-test, growth of the layout."""
        assert self.chosen is not None
        self.held_mode = spec.mode
        self.not_redoable = self.chosen.state.get("not_redoable", "")
        self._live.growth.take_over(spec)

    # Where the chosen state does not prove itself

    def newest(self) -> ChosenInMemory | None:
        """The chosen record itself, where its step is to be repeated from the one before; the same on every rank."""
        chosen = self.chosen
        found = chosen.unrepeated(self._ranks.rank) if isinstance(chosen, ChosenInMemory) else None
        return found if all(self._ranks.gather(found is not None)) else None

    def forgo_repetition(self, newest: ChosenInMemory) -> None:
        """Choose the record itself: it does not prove itself, and a repeated step would only show that again."""
        newest.forgo_repetition()
        self.chosen = newest
        self._repeat.give_up("the state that the step led to is refuted")

    def others(self) -> Iterator[Chosen]:
        """Older states that can be restored in place of the chosen one, nearest first; collective.

        Peers have agreed on the chosen record, and a user may have asked for it: there is no other one then.
        """
        first, tier = self.chosen, self._tier
        if first is None or tier is None or self._peers.active or self._asked:
            return
        record, known = first.held.record, first.newest_known
        if isinstance(first, ChosenInMemory):
            earlier = first.earlier(self._ranks.rank)
            yield from earlier[: min(self._ranks.gather(len(earlier)))]
        else:
            record -= 1
        points = [one for one in tier.points if one.record <= record]
        for _ in range(min(len(points), _MOST_STORED)):
            plan = RestoreStored(self._timeline, tuple(points), "", known, tier.name)
            try:
                stored = tier.open_newest(points, self._spec)
            except MemckptError as error:  # the same on every rank; the chosen state is still there
                _log.warning("memckpt: no state of %s can be tried: %s", tier.name, error)
                return
            yield self._open_stored(stored, plan)
            points = [one for one in points if one.record < stored.point.record]

    def change_to(self, chosen: Chosen) -> Start | None:
        """Resume from one of :meth:`others`; collective.

        Returns:
            The beginning of the attempt, where a generation begins anew.
        """
        former, self.chosen = self.chosen, chosen
        if isinstance(chosen, ChosenInMemory):
            plan = chosen.plan
            self._ranks.together(lambda: self._link.resume(plan.record, plan.timeline, False).close())
            return None
        assert former is not None
        former.close()
        self._repeat.do_without("newer states were not what their records say")
        self._take_over(chosen.stored.own.spec)
        record = chosen.stored.point.record
        self._staging.close()  # what was prepared for another record
        self._ranks.together(lambda: self._prepare(self._spec, record + 1, discard=True))
        return Start(record + 1, anew=True)

    # End

    def forget_resharding(self) -> None:
        """Delete the survivors' checkpoint in the run directory, as training has finished."""
        self._resharding.forget()

    def close(self) -> None:
        """Close the chosen state, unless it is restored."""
        if self.chosen is not None:
            self.chosen.close()


def _one_for_each_node(ranks: Ranks, inventories: Sequence[Inventory]) -> bool:
    """Whether the ranks of each node have reached one and the same agent."""
    return all(len({one.agent_pid for one in each}) == 1 for each in ranks.by_node(inventories))
