"""Decision whether a resume repeats the last step: all ranks do, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memckpt.memory.budget import available_bytes
from memckpt.recovery.from_storage import StoredState
from memckpt.recovery.live_copies import copied_bytes
from memckpt.session.chosen import ChosenInMemory, ChosenInStorage
from memckpt.session.link import AgentLink
from memckpt.session.ranks import LocalTraining
from memckpt.session.resume_check import ResumeCheck
from memckpt.session.storage_tier import StorageTier
from memckpt.state import codec
from memckpt.state.layout import Layout
from memckpt.state.spec import StateSpec


class RepeatChoice:
    """Decides with all ranks whether the step is repeated; if so, the state before it is restored.

    Args:
        training: training that is resumed.
        link: connection to the agent, whose replica advances where no step is repeated.
        check: gets the step, or the reason why nothing is compared.
    """

    def __init__(self, training: LocalTraining, link: AgentLink, check: ResumeCheck) -> None:
        self._ranks = training.ranks
        self._link = link
        self._check = check

    @property
    def wanted(self) -> bool:
        """Whether the step is repeated where that is possible."""
        return self._check.kind in ("replay", "require")

    def do_without(self, reason: str) -> None:
        """Settle the check: nothing is compared, for this reason."""
        if self._check.verdict == "pending":
            self._check.step = None
            self._check.settle("none", f"no step was compared: {reason}")

    def give_up(self, reason: str) -> None:
        """Repeat no step, although that was decided; for this reason."""
        self._check.step = None
        self.do_without(reason)

    def decide_in_memory(self, chosen: ChosenInMemory, asked: str) -> None:
        """Decide on a record in memory; collective.

        Args:
            chosen: the record.
            asked: the user's choice of an older record, in words; empty without one.
        """
        if self._check.kind == "off":
            return
        message = chosen.message
        chosen.following = self._following(message.following)
        if not self.wanted:
            return
        before, rank = message.before, self._ranks.rank
        own = asked or message.not_repeated or chosen.state.get("unrepeatable", "")
        if not own and before is not None:
            own = self._why_not_reduced_alike(chosen.state, codec.decode(before.rank_states[rank]))
        reason = next(filter(None, self._ranks.gather(own)), "")
        if reason:
            # A node that has fetched its state has no replica to advance.
            self._ranks.together(lambda: chosen.advance_replica(self._link) if before is not None else None)
        if reason and not chosen.following:
            self.do_without(reason)
        elif not reason:
            assert before is not None
            self._check.step = chosen.plan.step
            chosen.repeat_from(before, rank)

    def _why_not_reduced_alike(self, state: Mapping[str, Any], before: Mapping[str, Any]) -> str:
        """Why a repeated step would add gradients in another order, in words; empty if it would not.

        The second step of a process is reduced in the buckets that DDP lays out after the first one. The state after
        the first one does not have that layout.
        """
        if self._ranks.world_size > 2 and state["reduction"] is not None and before["reduction"] is None:
            return "DDP of three or more ranks had not laid out its buckets for good before that step"
        return ""

    def _following(self, states: Mapping[int, Mapping[int, bytes]]) -> dict[int, bytes]:
        """This rank's first state behind a captured record that every rank has."""
        own = {record: ranks[self._ranks.rank] for record, ranks in states.items() if self._ranks.rank in ranks}
        common = set.intersection(*(set(each) for each in self._ranks.gather(list(own))))
        return {record: own[record] for record in sorted(common)[:1]}

    def decide_in_storage(self, chosen: ChosenInStorage, tier: StorageTier, spec: StateSpec, asked: str) -> None:
        """Decide on a state in a store, which also has to have the state before the step; collective.

        Args:
            chosen: the state.
            tier: the store.
            spec: layout of the live state.
            asked: the user's choice of an older record, in words; empty without one.
        """
        if not self.wanted:
            self.do_without(f"what {tier.name} has is one state, without gradients of the step behind it")
            return
        stored = chosen.stored
        changed = f"the ranks, or their shards, are not those of the run that is in {tier.name}"
        own = asked or ("" if stored.exact else changed) or chosen.state.get("unrepeatable", "")
        reason = next(filter(None, self._ranks.gather(own)), "")
        before = None
        if not reason:
            before, reason = tier.before(stored.point)
        if before is not None:
            opened = tier.open(before, spec, self._ranks.rank)
            known = codec.decode(opened.rank_state)
            reason = next(filter(None, self._ranks.gather(self._why_not_reduced_alike(chosen.state, known))), "")
            reason = reason or self._why_not_compared(stored, opened, spec)
            if not reason:
                self._check.step = stored.point.step
                chosen.repeat_from(opened, known)
                return
        self.do_without(reason)

    def _why_not_compared(self, stored: StoredState, before: StoredState, spec: StateSpec) -> str:
        """Why two states of a store cannot be compared, in words; empty if they can. The same on every rank."""
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
