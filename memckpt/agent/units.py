"""All that a node holds: one unit for each set of shards, and what is done with all of them together."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from memckpt.agent.saving.saver import Saver
from memckpt.agent.saving.state_copies import Done
from memckpt.agent.unit import Unit
from memckpt.agent.unit_host import Host
from memckpt.errors import AgentError
from memckpt.memory.generation import Generation
from memckpt.processes.attempt import Attempt
from memckpt.protocol.storing import Saved, SaveFailed
from memckpt.protocol.trainer import Configure, Hello
from memckpt.state.records import HeldRecords, RankGroup

_log = logging.getLogger("memckpt.agent")


class _Answers:
    """Puts together what has become of the parts of one checkpoint."""

    def __init__(self, count: int, done: Done) -> None:
        self._count, self._done = count, done
        self._said: list[Saved | SaveFailed] = []

    def __call__(self, message: Saved | SaveFailed) -> None:
        self._said.append(message)
        if len(self._said) < self._count:
            return
        saved = [one for one in self._said if isinstance(one, Saved)]
        failed = next((one for one in self._said if isinstance(one, SaveFailed)), None)
        if failed is not None:
            self._done(failed)
        elif len({one.record for one in saved}) > 1:
            self._done(SaveFailed(saved[0].step, "its ranks could not be saved after the same step; try again"))
        else:
            whole = msgspec.structs.replace(
                saved[0],
                nbytes=sum(one.nbytes for one in saved),
                seconds=max(one.seconds for one in saved),
                cpu_seconds=sum(one.cpu_seconds for one in saved),
            )
            self._done(whole)


class Units:
    """The units of this node by their ranks, and what concerns several: slots, checkpoints, memory.

    Belongs to the agent's event loop.
    """

    def __init__(self, node: str, host: Host) -> None:
        self._node, self._host = node, host
        self._all: dict[RankGroup, Unit] = {}
        #: Names in storage of the parts that this attempt's units write.
        self._names: dict[RankGroup, str] = {}

    def __iter__(self) -> Iterator[Unit]:
        return iter(list(self._all.values()))

    def __getitem__(self, ranks: RankGroup) -> Unit:
        return self._all[ranks]

    def get(self, ranks: RankGroup) -> Unit | None:
        return self._all.get(ranks)

    def introduce(self, hello: Hello) -> None:
        """Have a unit for ranks that have come."""
        alone = hello.unit == hello.local_ranks
        self._names[hello.unit] = self._node if alone else self._name_beside_others(hello.unit)
        if hello.unit not in self._all:
            self._add(hello.unit, self._names[hello.unit])

    def adopt(self, ranks: RankGroup) -> Unit:
        """Have a unit for ranks of the last attempt that were elsewhere; what is fetched of them is written from here.

        Trainers of the same ranks name it anew in :meth:`configure`. Raises AgentError: no trainer of that attempt was
        here.
        """
        last = max((one.saver for one in self), key=lambda saver: saver.attempt_number, default=None)
        if last is None or not last.attempt_number:
            raise AgentError(f"expected trainers of the last attempt to have been on node {self._node}, found none")
        if ranks not in self._all:
            self._add(ranks, self._name_beside_others(ranks))
        adopted = self._all[ranks]
        if adopted.saver.attempt_number != last.attempt_number:
            adopted.saver.configure_like(last, self._name_beside_others(ranks))
        return adopted

    def _name_beside_others(self, ranks: RankGroup) -> str:
        """A name that no other unit of an attempt has: units have no rank in common."""
        return f"{self._node}.rank{ranks[0]}"

    def _add(self, ranks: RankGroup, name: str) -> None:
        self._all[ranks] = Unit(self._node, ranks, name, self._host, self)

    def make_slots(self, attempt: Attempt, now: RankGroup = ()) -> None:
        """Let ranks go on that wait for slots, after a commit or a death; `now`: the unit that waits no longer."""
        for unit in self:
            unit.make_slots(attempt, partial(self._others_reach, unit, attempt), now=unit.ranks == now)

    def _others_reach(self, unit: Unit, attempt: Attempt, record: int) -> bool | None:
        """Whether all ranks that do not share a unit can go back to a record; None while some are not through it."""
        others = [one for one in self if one is not unit and one.ranks in attempt.units]
        ranks = [rank for one in others for rank in one.ranks]
        if len(ranks) + len(unit.ranks) < attempt.world_size:
            return False  # other nodes have some of them
        if any(attempt.is_here(rank) and not attempt.is_through(rank, record) for rank in ranks):
            return None
        return all(one.generations.can_produce(record) for one in others)

    # What units tell each other

    def announce(self, ranks: RankGroup, record: int) -> None:
        for unit in self:
            if unit.ranks != ranks:
                unit.saver.schedule.announced(record)

    def hurry(self, lead: int) -> None:
        for unit in self:
            unit.saver.hurry(lead)

    def bytes_beside(self, ranks: RankGroup) -> int:
        return self._host.bytes_for_peers() + sum(one.nbytes for one in self if one.ranks != ranks)

    def configure(self, ranks: RankGroup, message: Configure, run_dir: Path) -> None:
        """Take the attempt's configuration for these ranks."""
        if message.timeline is not None:
            self._all[ranks].saver.configure(message, run_dir, self._names[ranks])

    def discard(self, attempt: Attempt) -> None:
        units = attempt.units
        for unit in self:
            unit.discard()
            if unit.ranks not in units:
                self._all.pop(unit.ranks).close()

    def begin_attempt(self) -> None:
        """Prepare for new trainers: those of the last attempt are dead, and all that they had sent is read."""
        self._names.clear()
        for unit in self:
            unit.begin_attempt()
            if unit.held is None:  # of ranks that have got nowhere, and may never come again
                self._all.pop(unit.ranks).close()

    def close(self) -> None:
        for unit in self:
            unit.close()
        self._all.clear()

    # What is held

    @property
    def complete_generations(self) -> list[Generation]:
        """What is held, by the first rank of each."""
        return [one.held for _, one in sorted(self._all.items()) if one.held is not None]

    def inventory(self, hello: Hello) -> tuple[HeldRecords, ...]:
        """What the node can produce. A rank's own model is compared with what is held of such a rank."""
        found = []
        for unit in self:
            other = unit.held is not None and unit.held.spec.world_size != hello.world_size
            comparable = other or hello.rank in unit.ranks
            found.append(unit.inventory(hello.fingerprint if comparable else None))
        return tuple(found)

    def common(self) -> int | None:
        """The newest record that can be produced of all ranks; None if there is none, or if some run elsewhere."""
        held = self.complete_generations
        ranks = {rank for one in held for rank in one.spec.local_ranks}
        if not held or ranks < set(range(held[0].spec.world_size)):
            return None
        each = [set(one.generations.producible_at_rest()) for one in self if one.held is not None]
        return max(set.intersection(*each), default=None)

    # On the way to storage

    @property
    def enabled(self) -> bool:
        return any(one.saver.enabled for one in self)

    @property
    def saving(self) -> bool:
        return any(one.saver.saving for one in self)

    def deadline(self) -> float | None:
        """Until when what is being written may take (monotonic clock); None while nothing is."""
        limits = [limit for one in self if (limit := one.saver.deadline()) is not None]
        return min(limits, default=None)

    def may_save_from(self, idle_since: float) -> float:
        """Until when trainers may come back before their state goes to storage (monotonic clock)."""
        return max((one.saver.may_save_from(idle_since) for one in self), default=idle_since)

    def look_at_clock(self) -> None:
        for one in self:
            one.saver.look_at_clock()

    def preempt(self, ending: bool = False) -> bool:
        """Save at once: a trainer got SIGTERM, or with `ending` the agent. False where there is no storage."""
        told = [one.saver.preempt(ending) for one in self]
        return any(told)

    @property
    def preempted_until(self) -> float | None:
        """End of the grace period that runs (monotonic clock); None: none does."""
        return max((until for one in self if (until := one.saver.preempted_until) is not None), default=None)

    def retry_later(self) -> None:
        for one in self:
            one.saver.retry_later()

    @property
    def alarm(self) -> str:
        """Why the last checkpoint failed; empty if it did not."""
        return next((one.saver.alarm for one in self if one.saver.alarm), "")

    def save_held(self, as_checkpoint: bool) -> None:
        """Save what is held, as no trainer runs. Of all ranks the same record, where all are here."""
        for saver, generation, record in self._standing():
            saver.save_held(generation, as_checkpoint, record)

    def save_asked(self) -> None:
        """Write exports of what stands still, as no trainer runs."""
        for saver, generation, record in self._standing():
            saver.save_asked(generation, record)

    def _standing(self) -> Iterator[tuple[Saver, Generation, int | None]]:
        record = self.common() if len(self.complete_generations) > 1 else None
        for one in self:
            if one.held is not None:
                yield one.saver, one.held if record is None else one.generations.producible_at_rest()[record], record

    def save_to(self, url: str, done: Done, training: bool, ahead: int) -> None:
        """Export the newest record to an empty store; `done` gets the result. `ahead`: one that `training` can copy."""
        held = [(one, one.held) for one in self if one.held is not None and one.held.complete]
        if not held:
            done(SaveFailed(0, "nothing is held in memory"))
            return
        missing = _missing_tensors([generation for _, generation in held])
        if missing:
            done(SaveFailed(0, missing))
            return
        if len(held) == 1:
            one, generation = held[0]
            one.saver.save_to(url, done, generation, training)
            return
        answers = _Answers(len(held), done)
        if training:
            for one, generation in held:
                one.saver.save_to(url, answers, generation, training, ahead)
        elif (record := self.common()) is None:
            done(SaveFailed(0, "no step can be produced of all ranks from this node's memory"))
        else:
            self._save_record(record, url, answers)

    def save_record(self, record: int, url: str, done: Done) -> None:
        """Write all that is held of one record; `done` is told once it is there."""
        if any(record not in one.generations.producible_at_rest() for one in self if one.held is not None):
            problem = (
                f"record {record} cannot be produced on node {self._node}, which holds an older one if it sat out the "
                f"last attempt: `memckpt stop RUN --node {self._node}` lets go of it"
            )
            done(SaveFailed(record, problem))
        else:
            self._save_record(record, url, _Answers(len(self.complete_generations), done))

    def _save_record(self, record: int, url: str, answers: _Answers) -> None:
        for one in self:
            if one.held is not None:
                one.saver.save_record(one.generations.producible_at_rest()[record], record, url, answers)


def _missing_tensors(held: list[Generation]) -> str:
    """Why these do not have all parameters, in words; empty if they do."""
    spec = held[0].spec
    served = {rank for one in held if one.spec.full for rank in one.spec.serves}
    if served >= set(range(spec.world_size)):
        return ""
    if len(spec.serves) == spec.world_size:
        return "this node does not hold the parameters; ask the node of rank 0"
    return "the parameters are sharded over several nodes, and no single one has them; look into the run's storage"
