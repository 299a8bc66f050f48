"""Trivially correct model of what a resume owes: a few numbers, a set of weak nodes, and the undisturbed training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memckpt.config import DEFAULT_SLOTS

#: Steps after the end of a fault from which on what ranks say of their protection counts. They say it at each step, and
#: each has heard of the fault after one.
_HEARD_STEPS = 3


@dataclass
class Truth:
    """Losses and digests by rank and step, which all attempts share."""

    #: By rank, step and kind ("loss" or "digest") the value: that of the undisturbed training, or the one first seen,
    #: which :meth:`confirm` compares with it at the end.
    known: dict[tuple[int, int, str], str] = field(default_factory=dict)
    checked: int = 0  # number of comparisons

    def see(self, rank: int, step: int, **values: str) -> None:
        """Compare values of a step with what is known of it."""
        for kind, value in values.items():
            expected = self.known.setdefault((rank, step, kind), value)
            self.checked += 1
            assert value == expected, f"rank {rank}: the {kind} of step {step} is {value}, and was {expected}"

    def confirm(self, undisturbed: Truth) -> int:
        """Compare all that was seen with the undisturbed training; returns the number of values."""
        wrong = [place for place, seen in self.known.items() if undisturbed.known.get(place) != seen]
        assert not wrong, f"differ from the undisturbed training: {sorted(wrong)[:10]} of {len(wrong)}"
        return len(self.known)


@dataclass
class Model:
    """What is committed, acknowledged and stored, and whose memory may be incomplete."""

    ranks: int  # number of ranks, each on its own node
    tolerated: int  # number of nodes whose loss peers make up for; 0 without peers
    truth: Truth = field(default_factory=Truth)
    committed: dict[int, int] = field(default_factory=dict)  # newest committed step of each rank
    reached: int = 0  # newest step that all ranks have committed, in any attempt
    acknowledged: int = 0  # newest step that some rank knew to be with all peers
    #: By rank, the steps of which its own agent has said that it has written them.
    stored: dict[int, set[int]] = field(default_factory=dict)
    #: Nodes whose memory may lack something since all was protected; by node, the step from which on the ranks' word
    #: that all is protected counts; None while the fault lasts.
    weak: dict[int, int | None] = field(default_factory=dict)
    apart: set[int] = field(default_factory=set)  # nodes that others cannot reach
    #: Whether a rank has got so far, where nobody waits for peers, that memory cannot go back to what they have. Until
    #: all is protected again only memory itself and storage count (docs/guarantees.md, "With peers").
    strayed: bool = False
    in_flight: int = DEFAULT_SLOTS  # records by which training may be ahead of peers (D)
    #: Agents that were told to end, by node: they answer their ranks until they do.
    _ending: dict[int, int] = field(default_factory=dict)
    #: Nodes whose replicators have died, where the rank has not said yet that it knows.
    _unknowing: set[int] = field(default_factory=set)
    _damaged: set[int] = field(default_factory=set)
    _protected: dict[int, int] = field(default_factory=dict)
    _began: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    #: Number of the attempt that runs, and the step at which it began.
    attempt: int = -1
    begun_at: int = 0
    #: Number of the last attempt whose start ended because a node did not answer.
    refused: int = -1
    #: How often a rank has lost its agent without a fault: on a machine that is too busy.
    unprovoked: int = 0
    #: How many attempts have resumed from each tier.
    resumes: dict[str, int] = field(default_factory=dict)

    @property
    def newest(self) -> int:
        """The newest step that a rank has committed."""
        return max(self.committed.values(), default=0)

    @property
    def whole(self) -> bool:
        """Whether all is protected, as far as all ranks know, and no node is weak."""
        said = len(self._protected) == self.ranks and min(self._protected.values()) > 0
        return said and not self.weak and not self.apart

    def owed(self) -> tuple[int, int]:
        """The lowest and the highest step at which the next attempt may resume."""
        whole = min((self.committed.get(rank, 0) for rank in range(self.ranks)), default=0)
        highest = whole + 1  # a rank may die between a commit and its note
        if not self.weak:
            return whole, highest
        # A node that has lost its memory, and is cut off, cannot fetch what the others have of it.
        lost = self.weak.keys() | self.apart
        if len(lost) <= self.tolerated and not self.weak.keys() & self.apart and not self.strayed:
            return min(self.acknowledged, whole), highest
        # A checkpoint of an earlier attempt may have become complete after training had gone back behind it.
        return max((step for step in self.in_storage if step <= whole), default=0), max(highest, self.reached + 1)

    @property
    def in_storage(self) -> set[int]:
        """The steps that all nodes have written."""
        return set.intersection(*(self.stored.get(rank, set()) for rank in range(self.ranks)))

    def _keep_stored(self, upto: int) -> None:
        """Forget stored steps beyond this one."""
        self.stored = {rank: {step for step in steps if step <= upto} for rank, steps in self.stored.items()}

    # Faults

    def weaken(self, nodes: Iterable[int], lasting: bool = False) -> None:
        """Memory of these nodes is lost or out of reach from now on; if that lasts, until :meth:`strengthen`."""
        for node in nodes:
            lasts = lasting or self.weak.get(node, 0) is None
            self.weak[node] = None if lasts else self.newest + _HEARD_STEPS

    def end_agent(self, node: int, pid: int) -> None:
        """This node's agent ends sooner or later: until its rank has another one, what it says of protection is old."""
        self._ending[node] = pid
        self.weaken([node])

    def end_replicator(self, node: int) -> None:
        """This node's replicator has died: a gap opens, until all is sent anew."""
        self._unknowing.add(node)
        self.weaken([node])

    def strengthen(self, node: int) -> None:
        """A fault of this node is over: it counts again once all ranks say that all is protected."""
        if node in self.weak:
            self.weak[node] = self.newest + _HEARD_STEPS

    def damage_stored(self, step: int) -> None:
        """What is stored of this step cannot be read, whatever ranks still say of it; later ones are not counted on."""
        self._keep_stored(step - 1)
        self._damaged.add(step)

    # Notes of the ranks

    def hear(self, note: Mapping[str, Any]) -> None:
        """Take a rank's note, and check that it breaks no promise."""
        rank = note["rank"]
        if note["event"] == "began":
            self._begin(rank, note)
        elif note["event"] == "refused":
            assert self.apart, f"rank {rank}: all nodes can be reached, and its start ended: {note['reason']}"
            self.refused = note["number"]
        elif note["event"] == "step":
            self.truth.see(rank, note["step"], loss=note["loss"], digest=note["digest"])
            self.committed[rank] = note["step"]
            self.reached = max(self.reached, min(self.committed.get(each, 0) for each in range(self.ranks)))
        if "protected" in note:
            self._hear_protection(rank, note)

    def _begin(self, rank: int, note: Mapping[str, Any]) -> None:
        """A rank has resumed; once all have, they are where they are owed to be."""
        assert note["exact"], f"rank {rank} resumed at step {note['step']} from {note['tier']}, and not exactly"
        if note["step"]:
            self.truth.see(rank, note["step"], digest=note["digest"])
        lowest, highest = self.owed()
        self._began = {each: one for each, one in self._began.items() if one["number"] == note["number"]}
        self._began[rank] = note
        steps = {one["step"] for one in self._began.values()}
        assert len(steps) == 1, f"ranks resumed at different steps: {sorted(steps)}"
        (step,) = steps
        assert lowest <= step <= highest, (
            f"resumed at step {step} from {note['tier']}, owed {lowest} to {highest}: committed {self.committed}, "
            f"acknowledged {self.acknowledged}, stored {sorted(self.in_storage)[-3:]}, weak nodes {self.weak}"
        )
        if len(self._began) == self.ranks:
            self._go_on(step, str(note["tier"]))

    def _go_on(self, step: int, tier: str) -> None:
        if len(self.weak) > self.tolerated or self.strayed:
            self.acknowledged = 0
        self.strayed = False
        self.acknowledged = min(self.acknowledged, step)
        self._keep_stored(step)
        self._damaged = {each for each in self._damaged if each <= step}  # later ones will be written anew
        self.committed = dict.fromkeys(range(self.ranks), step)
        self.weak = {node: None if since is None else step + _HEARD_STEPS for node, since in self.weak.items()}
        self._protected = {}
        self._unknowing.clear()
        self.attempt, self.begun_at = next(iter(self._began.values()))["number"], step
        self._began = {}
        self.resumes[tier] = self.resumes.get(tier, 0) + 1

    def _hear_protection(self, rank: int, note: Mapping[str, Any]) -> None:
        if not note["connected"] and rank not in self.weak:
            self.weaken([rank])  # its agent was too slow, and nothing was injected: as if it had been stopped
            self.unprovoked += 1
        assert note["check"] != "different", f"rank {rank}: the resume check says that the state differs"
        self.acknowledged = max(self.acknowledged, note["acknowledged"])
        if note["stored"] and note["stored"] not in self._damaged:
            self.stored.setdefault(rank, set()).add(note["stored"])
        if rank in self._ending and note["agent"] != self._ending[rank]:
            del self._ending[rank]
            self.weaken([rank])
        if not note["protected"] and rank in self._unknowing:
            self._unknowing.remove(rank)
            self.weaken([rank])
        if note["event"] == "step":
            self.strayed |= not note["waits"] and note["step"] - self.acknowledged >= self.in_flight
            knows = rank not in self._ending and rank not in self._unknowing
            self._protected[rank] = note["step"] if note["protected"] and knows else -1
        if len(self._protected) == self.ranks:
            said = min(self._protected.values())
            self.weak = {node: since for node, since in self.weak.items() if since is None or said < since}
            self.strayed &= bool(self.weak) or said < 0
