"""States that are protected where links cannot carry every record: one every N steps, the same on all nodes.

Nothing is planned ahead: a state begins when the one before it is with all its holders. So N follows from what the
slowest link carries, a link of any rate above zero gets each state there, and training is never further ahead of what
is protected than two of them take. Gemini chooses its checkpoint frequency likewise: one checkpoint in as many
iterations as its traffic takes. After some states records are tried again, ever later where that fails.
"""

from __future__ import annotations

from collections.abc import Collection

from memckpt.replication.transport.wire import Acknowledged

_FIRST_LEAD, _LONGEST_LEAD = 2, 64
#: Number of states after which records are tried again: at first, and at most.
_FIRST_REST, _LONGEST_REST = 2, 64
#: Number of orders in a row that some node could not meet: then memory is short, and no state can be had.
_MOST_MISSED = 10
#: Number of records after which states are tried again then.
_GIVEN_UP_RECORDS = 1000
#: Value of :attr:`Cadence.cut` meanwhile.
NONE_CAN_BE_HAD = -1
#: Number of records in a row after which the next trial comes as early as the first one.
_KEPT_UP_RECORDS = 200


class Cadence:
    """The leader's; it tells all nodes :attr:`every` and :attr:`cut`.

    Attributes:
        every: N, how many steps lie between two states, as the last ones took; 0: every record is sent.
        cut: the record whose state is to be protected next; 0: records are sent, and while :attr:`every` is above 0
            that is a trial, in which nobody waits for them; :data:`NONE_CAN_BE_HAD`: records are all that there is.
        reached: the last state that all nodes have protected; 0: none in this attempt.
    """

    def __init__(self) -> None:
        self.every = 0
        self.cut = 0
        self.reached = 0
        #: How many records ahead an order must be for every trainer to get it in time.
        self._lead = _FIRST_LEAD
        self._rest = _FIRST_REST
        self._made = 0
        self._kept_up_since = 0
        self._missed = 0
        self._not_before = 0

    def look(self, said: Collection[Acknowledged], newest: int, watermark: int) -> int:
        """Take note of what all nodes have said.

        Args:
            said: the newest message of each node.
            newest: record that the leader's node has committed.
            watermark: the newest record that all nodes have acknowledged, states left aside.

        Returns:
            The watermark: further ahead if a state has got to its holders everywhere.
        """
        if self.cut == NONE_CAN_BE_HAD:
            self.cut = NONE_CAN_BE_HAD if newest < self._not_before else 0
        elif self.cut:
            if any(one.missed >= self.cut for one in said):
                self._missed += 1
                if self._missed >= _MOST_MISSED:
                    self._missed, self._not_before = 0, newest + _GIVEN_UP_RECORDS
                    self.every, self.cut = 0, NONE_CAN_BE_HAD
                    return watermark
                self._lead = min(2 * self._lead, _LONGEST_LEAD)
                self.cut = max(newest + self._lead, self.cut + 1)
            elif all(one.cut >= self.cut for one in said):
                self._made += 1
                self._missed = 0
                if self.reached:
                    self.every = max(1, self.cut - self.reached)
                watermark = self.reached = max(watermark, self.cut)
                self.cut = 0 if self._made >= self._rest else self._next(newest)
        elif any(one.behind for one in said):
            if self.every:
                self._rest = min(2 * self._rest, _LONGEST_REST)
            elif watermark > self._kept_up_since + _KEPT_UP_RECORDS:
                self._rest = _FIRST_REST
            self._made = 0
            self.cut = self._next(newest)
            self.every = self.every or self._lead
        elif self.every and watermark > self.reached:
            self.every, self._kept_up_since = 0, watermark
        return watermark

    def _next(self, newest: int) -> int:
        return max(newest, self.reached) + self._lead
