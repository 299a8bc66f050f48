"""A recovery on one node: the states that it lacks are fetched from its peers, all at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from memckpt.agent.group import Group
from memckpt.errors import AgentError, MemckptError
from memckpt.memory.generation import Generation
from memckpt.protocol.messages import AgentToReplicator
from memckpt.protocol.recovery import (
    BadSourceSeen,
    Describe,
    Described,
    Fill,
    Filled,
    Recover,
    Recovered,
    RecoveryProgress,
    WantedState,
)
from memckpt.state.records import RankGroup
from memckpt.state.spec import StateSpec

_log = logging.getLogger("memckpt.agent")


class Recovery:
    """Fetches the states that this node lacks, all at once.

    Args:
        number: no other recovery of this agent has it. What the replicator answers to another one is ignored.
        message: what is asked for.
        group: finds the group of ranks that share shards. May raise MemckptError.
        send: gives the replicator a message.
        done: gets Recovered once all are here, or the first cannot be.
    """

    def __init__(
        self,
        number: int,
        message: Recover,
        group: Callable[[RankGroup], Group | None],
        send: Callable[[AgentToReplicator, list[int]], None],
        done: Callable[[Recovered | RecoveryProgress], None],
    ) -> None:
        self._number = number
        self._message = message
        self._group = group
        self._send = send
        self._done = done
        self._started = time.monotonic()
        self._wanted: dict[RankGroup, WantedState] = {wanted.ranks: wanted for wanted in message.fetch}
        self._generations: dict[RankGroup, Generation] = {}
        self._nbytes = 0
        self._bad: list[BadSourceSeen] = []
        self.over = False

    def start(self) -> None:
        """Ask for all of them. The replicator may turn out to be dead at that, which fails the recovery."""
        if not self._wanted:
            self._finish()
        for wanted in list(self._wanted.values()):
            if not self.over:
                self._send(Describe(wanted, self._number), [])

    def answered(self, message: Described | Filled | RecoveryProgress) -> None:
        """Handle the replicator's news of one recovery."""
        if isinstance(message, RecoveryProgress):
            self._done(message)
            return
        known = message.ranks in self._wanted
        expected = known and (message.ranks in self._generations) == isinstance(message, Filled)
        if message.recovery != self._number or not expected:
            _log.info(
                "ignoring %s of ranks %s: it belongs to an earlier recovery",
                type(message).__name__,
                list(message.ranks),
            )
            return
        self._bad += message.bad
        if message.problem:
            self.fail(message.problem, tuple(self._bad) if message.bad else ())
        elif isinstance(message, Described):
            self._allocate(message)
        else:
            self._take_filled(message)

    def _allocate(self, message: Described) -> None:
        assert message.spec is not None
        try:
            group = self._group(message.ranks)
            if group is None:
                raise AgentError(f"ranks {list(message.ranks)} are not on this node")
            spec = _to_be_filled(message.spec, message.ranks)
            generation = group.make_room_for(spec, self._message.memory_budget_bytes)
        except MemckptError as error:
            self.fail(str(error))
            return
        self._generations[message.ranks] = generation
        fds = [region.fd for region in generation.regions]
        self._send(Fill(self._wanted[message.ranks], spec, self._number), fds)

    def _take_filled(self, message: Filled) -> None:
        generation = self._generations.pop(message.ranks)
        group = self._group(message.ranks)
        try:
            assert group is not None
            generation.refill(self._message.record, message.step, message.metas, message.rank_states, message.before)
        except MemckptError as error:
            generation.close()
            self.fail(str(error))
            return
        group.take_over(generation, self._message.history)
        self._nbytes += message.nbytes
        del self._wanted[message.ranks]
        if not self._wanted:
            self._finish()

    def _finish(self) -> None:
        self.over = True
        seconds = time.monotonic() - self._started
        self._done(Recovered("", tuple(self._bad), self._nbytes, seconds))

    def fail(self, problem: str, bad: tuple[BadSourceSeen, ...] = ()) -> None:
        """It cannot be done; `bad`: sources to be left out next time, none where the reason lies in this node."""
        if self.over:
            return
        self.over = True
        for generation in self._generations.values():
            generation.close()
        self._generations.clear()
        self._done(Recovered(problem, bad, self._nbytes, time.monotonic() - self._started))


def _to_be_filled(spec: StateSpec, ranks: RankGroup) -> StateSpec:
    """What is fetched is the window of records of a state, to be redone when it is restored; or one captured."""
    mode = "lazy" if spec.mode == "eager" else spec.mode
    return msgspec.structs.replace(spec, mode=mode, local_ranks=ranks, by_value_slots=0)
