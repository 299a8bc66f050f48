"""The watermark, the newest record that is acknowledged for every node of the job; and N, the same on all nodes.

N is 1 where links carry every record. Above that the state after about every N-th record is sent instead, and training
does not wait for it. N is configured, or the leader chooses it from measured links, with each generation.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Hashable, Mapping

import msgspec

from memckpt.replication.transport.messages import Acknowledged, Watermark
from memckpt.state.records import RankGroup

_FIRST_LEAD, _LONGEST_LEAD = 2, 64
#: Number of orders in a row that some node could not meet: then memory is short, and no state can be had.
_MOST_MISSED = 10
#: Records over which links are measured.
_MEASURED_RECORDS = 32


class Cadence:
    """N, and the state that is protected next: the leader's, which tells all nodes :attr:`every` and :attr:`due`.

    The next state is named when all nodes have the last one, N records later or more. `needed`: the smallest N that all
    links would carry. `reached`: the last state that all have. 0: none, or not known.
    """

    def __init__(self, every: int | None) -> None:
        self._configured = every
        self.every = every or 1
        self.needed = self.due = self.reached = 0
        self._decides = every is None
        #: Whether N has been chosen here, or taken over from a former leader; and whether states can be copied.
        self._chosen = every is not None
        self._copies = False
        #: How many records ahead an order must be for every trainer to get it in time.
        self._lead = _FIRST_LEAD
        self._missed = 0

    def begin_generation(self, snapshots: bool) -> None:
        """Choose N anew; each record of a generation of snapshots is a state by itself."""
        self._copies = not snapshots
        self._decides = self._configured is None and not snapshots
        if snapshots:
            self.every, self.due = 1, 0
        elif self._configured is not None:
            self.every = self._configured

    def advance(self, said: Collection[Acknowledged], newest: int, watermark: int) -> int:
        """Follow what all nodes have said; returns the watermark, at a state that has got to its holders everywhere."""
        known = [one.needed for one in said]
        self.needed = max(known) if all(known) else 0
        if self._decides:
            # A leader that has taken the place of another goes on with what that one chose.
            former = 1 if self._chosen else max(one.every for one in said)
            if former > 1 or self.needed:
                self.every = former if former > 1 else self.needed
                self._chosen, self._decides = True, False
        if self.every == 1 or not self._copies:
            self.due = 0
            return watermark
        if self.due and all(one.state == self.due for one in said):
            self._missed = 0
            watermark = self.reached = max(watermark, self.due)
            self.due = 0
        elif self.due and any(one.missed >= self.due for one in said):
            self._missed += 1
            if self._missed >= _MOST_MISSED and self._configured is None:
                self.every, self.due, self._missed = 1, 0, 0  # records are all that can be had
                return watermark
            self._lead = min(2 * self._lead, _LONGEST_LEAD)
            self.due = max(newest + self._lead, self.due + 1)
        if not self.due and (not self.reached or newest + self._lead >= self.reached + self.every):
            # Other nodes may work for a state that a former leader has named; and before the first record of an attempt
            # that resumes all lies behind the watermark.
            self.due = max(max(newest, watermark) + self._lead, max(one.ordered for one in said))
        return watermark


class LinkMeter:
    """Measures the smallest N that a node's links would carry (`needed`; 0: unknown). `ratio`: records in a state."""

    def __init__(self, overhead: float) -> None:
        self.needed = 0
        self.ratio = 1.0
        self._overhead = overhead
        self._began: float | None = None
        self._seconds = 0.0
        self._records = self._waited_for = 0
        self._waited = False
        #: Records that were carried and left out before.
        self._carried = self._left_out = 0

    def count_record(self) -> None:
        self._records += 1
        self._waited_for += self._waited
        self._waited = False

    def count_wait(self, seconds: float) -> None:
        """Add seconds that training has waited for the next record."""
        self._seconds += seconds
        self._waited = True

    def stop(self) -> None:
        """Stop measuring records: none are sent."""
        self._began = None

    def measure(self, now: float, started: bool, carried: int, left_out: int) -> None:
        """Judge the last records, if there were enough, once holders have what came before records (`started`).

        Links carry every record if none was left out and training waited for few. It has to wait for half of them, and
        longer than allowed: one long wait, for a peer that is away, says nothing.
        """
        if self._began is None:
            if started or self._records >= _MEASURED_RECORDS:
                self._begin_window(now, carried, left_out)
            return
        if self._records < _MEASURED_RECORDS:
            return
        elapsed = max(now - self._began, 1e-9)
        trained = max(elapsed - self._seconds, 1e-9)
        waits = 2 * self._waited_for >= self._records and self._seconds > self._overhead * trained
        arrived = carried - self._carried
        if left_out == self._left_out and not waits:
            self.needed = 1
        elif arrived:
            slower = elapsed / trained if waits else 1.0
            self.needed = max(2, math.ceil(self.ratio * slower * self._records / min(arrived, self._records)))
        else:
            return  # nothing has got through yet
        self._begin_window(now, carried, left_out)

    def _begin_window(self, now: float, carried: int, left_out: int) -> None:
        self._began, self._seconds = now, 0.0
        self._records = self._waited_for = 0
        self._waited = False
        self._carried, self._left_out = carried, left_out

    def count_state(self, records: int) -> None:
        """Note that so many records were committed while a state was on its way."""
        self.needed = 1 if records <= self.ratio else records


class Leader:
    """The watermark, made of the nodes' acknowledgements on the first rank's node. `cadence`: unless N is 1."""

    def __init__(self, nodes: Collection[str], record: int, cadence: Cadence | None = None) -> None:
        self._cadence = cadence
        self._newest = record
        self._said: dict[str, Acknowledged] = {}
        self._nodes = set(nodes)
        self._unheard: frozenset[str] = frozenset()
        self._given_up: frozenset[str] = frozenset()
        self._told = Watermark(record, False, every=1 if cadence is None else cadence.every)

    @property
    def watermark(self) -> Watermark:
        return self._told

    def acknowledged(self, message: Acknowledged) -> Watermark | None:
        """Take a node's acknowledgement. Returns the new watermark if it changed; it never goes back."""
        if message.node not in self._nodes:
            return None
        self._said[message.node] = message
        return self._change()

    def look(
        self, newest: int, unheard: frozenset[str] = frozenset(), given_up: frozenset[str] = frozenset()
    ) -> Watermark | None:
        """Note what the leader's node sees; returns the new watermark if it changed.

        While nodes are `unheard`, not all is whole; those `given_up` are silent too long to be waited for.
        """
        if (newest, unheard, given_up) == (self._newest, self._unheard, self._given_up):
            return None
        self._newest, self._unheard, self._given_up = newest, unheard, given_up
        return self._change()

    def begin_generation(self, snapshots: bool) -> Watermark | None:
        """Choose N anew. Returns the new watermark if it changed."""
        if self._cadence is None:
            return None
        self._cadence.begin_generation(snapshots)
        return self._change()

    def _change(self) -> Watermark | None:
        waits_suspended = bool(self._given_up) or any(one.lost for one in self._said.values())
        if set(self._said) != self._nodes:
            return self._tell_change(msgspec.structs.replace(self._told, whole=False, waits_suspended=waits_suspended))
        record = min(one.record for one in self._said.values())
        if any(one.since > record for one in self._said.values()):
            record = self._told.record  # some node has no such record: wait until all have got past its gap
        record = max(record, self._told.record)
        every, due, needed, reached = 1, 0, 0, 0
        if (cadence := self._cadence) is not None:
            record = cadence.advance(self._said.values(), self._newest, record)
            every, due, needed, reached = cadence.every, cadence.due, cadence.needed, cadence.reached
        # Records that begin beyond a state that holders have: until all have got further than that, it counts.
        there = all(one.whole and (one.since <= record or record == reached) for one in self._said.values())
        whole = not self._unheard and there and not waits_suspended
        return self._tell_change(Watermark(record, whole, waits_suspended, every, due, needed))

    def _tell_change(self, now: Watermark) -> Watermark | None:
        before, self._told = self._told, msgspec.structs.replace(now, unheard=tuple(sorted(self._unheard)))
        return None if self._told == before else self._told

    def missing(self) -> tuple[str, ...]:
        """Nodes that hold the watermark back, in order of their names."""
        behind = {node for node in self._nodes if node not in self._said}
        behind |= {one.node for one in self._said.values() if not one.whole or one.record <= self._told.record}
        return tuple(sorted(behind))


#: The longest time between two looks that counts: whoever was busy or stopped itself has not waited for others.
_LONGEST_LOOK_SECONDS = 2.0
LOST_LIMITS = 20
"""Number of time limits for which training waits for a node that may be lost."""
NOTICED_SECONDS = 10.0
"""Seconds of a node's silence after which the leader has said so, too, if it does not hear it: twice what it takes."""


class Overdue:
    """Nodes that are overdue: `limit` seconds have passed since their last progress."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._watched = 0.0
        self._looked: float | None = None
        self._since: dict[str, tuple[Hashable, float]] = {}
        #: Nodes that were overdue at the last look.
        self.nodes: frozenset[str] = frozenset()

    def check_owing(self, owing: Mapping[str, Hashable], now: float) -> None:
        """Look at all that owe something, each with a value that changes whenever it makes progress."""
        passed = 0.0 if self._looked is None else min(max(0.0, now - self._looked), _LONGEST_LOOK_SECONDS)
        self._looked, self._watched = now, self._watched + passed
        for node in [node for node in self._since if node not in owing]:
            del self._since[node]
        for node, progress in owing.items():
            known = self._since.get(node)
            if known is None or known[0] != progress:
                self._since[node] = progress, self._watched
        self.nodes = frozenset(node for node, (_, since) in self._since.items() if self._watched - since >= self.limit)


class Absence:
    """Nodes that are not heard, and that training does not wait for.

    A silent node may be lost, and going on overwrites what a resume without it needs. Where two more records were made
    since, its trainers live. So it does where the leader hears it. Else it is waited for :data:`LOST_LIMITS` times as
    long.
    """

    def __init__(self, limit: float) -> None:
        self._still = Overdue(limit)
        self._noticed = Overdue(max(limit, NOTICED_SECONDS))
        self._lost = Overdue(LOST_LIMITS * limit)
        #: By node, when it was heard last and the newest record that this one had then.
        self._heard: dict[str, tuple[float | None, int]] = {}
        self.nodes: frozenset[str] = frozenset()
        #: Nodes that the leader hears, while it is heard itself.
        self.vouched: frozenset[str] = frozenset()

    def leader_met(self) -> None:
        """Have the leader look first who is silent: it may be another process than before."""
        self._noticed = Overdue(self._noticed.limit)

    def check_heard(self, heard: Mapping[str, float | None], newest: int, every: int, now: float) -> None:
        """Look at all peers: when each was heard last, and the newest record that is whole on this node."""
        for node, at in heard.items():
            known = self._heard.get(node)
            if known is None or known[0] != at:
                self._heard[node] = at, newest
        for overdue in (self._still, self._noticed, self._lost):
            overdue.check_owing(heard, now)
        lives = {node for node in heard if newest >= self._heard[node][1] + 2 * every}
        self.nodes = frozenset(self._still.nodes & lives) | (self._noticed.nodes & self.vouched) | self._lost.nodes


_log = logging.getLogger("memckpt.replicator")


class Laggards:
    """Holders that acknowledge nothing of what they are sent, and nodes that are not heard, for ack_timeout_seconds."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.overdue = Overdue(limit)
        self.away = Absence(limit)

    def check_peers(
        self, owing: Mapping[str, Hashable], heard: Mapping[str, float | None], newest: int, every: int, now: float
    ) -> None:
        """Look at the holders that are heard and owe something, and at all peers, as Overdue and Absence do."""
        before = self.overdue.nodes
        self.overdue.check_owing(owing, now)
        self._log_change(before, self.overdue.nodes, "acknowledges nothing")
        before = self.away.nodes
        self.away.check_heard(heard, newest, every, now)
        self._log_change(before, self.away.nodes, "is not heard")

    def _log_change(self, before: frozenset[str], after: frozenset[str], what: str) -> None:
        for node in sorted(after - before):
            _log.warning(
                "%s %s for too long (ack_timeout_seconds=%g): training does not wait for it, and what it lacks is a "
                "gap in protection",
                node,
                what,
                self._limit,
            )
        for node in sorted(before - after):
            _log.info("%s is waited for again; it is sent what it lacks", node)


class RunAhead:
    """How far each unit's training may be ahead of the watermark, if it waits; `beyond`: further, for a while."""

    def __init__(self, waits: bool, beyond: bool) -> None:
        self.beyond, self._waits = beyond, waits
        #: By unit: how many records training may be ahead, and how many steps these are.
        self._records: dict[RankGroup, int] = {}
        self._reach: dict[RankGroup, int] = {}
        self._waiting_since: float | None = None

    def begin_generation(self, ranks: RankGroup, records: int, every: int) -> None:
        """Note a unit's new generation, and how many records training may be ahead, which are `every` steps apart."""
        self._records[ranks] = records
        self._reach[ranks] = records * every

    @property
    def records(self) -> int:
        """Number of records that any unit may be ahead; 0 before the first generation."""
        return min(self._records.values(), default=0)

    def is_late(self, ranks: RankGroup, newest: int | None, acknowledged: int, watermark: int) -> bool:
        """Whether training is so far ahead that this node cannot go back to what peers have."""
        if newest is None or ranks not in self._reach or (self._waits and not self.beyond):
            return False
        return newest - (watermark if self._waits else acknowledged) >= self._reach[ranks]

    def check_waiting(
        self, newest: Mapping[RankGroup, int | None], watermark: int, suspended: bool, now: float
    ) -> float | None:
        """Seconds that training has waited for the watermark since the last look; None: it did not wait then."""
        waits = (
            self._waits
            and not suspended
            and any(
                record is not None and record - watermark >= self._reach[ranks]
                for ranks, record in newest.items()
                if ranks in self._reach
            )
        )
        waited = None if self._waiting_since is None else now - self._waiting_since
        self._waiting_since = now if waits else None
        return waited
