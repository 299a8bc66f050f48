"""Descriptions of states in this agent's memory for the replicator: those that it sends, and that others read."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator

from memckpt.agent.saving.state_copies import StateCopy
from memckpt.agent.unit import Unit
from memckpt.memory.generation import Generation
from memckpt.protocol.replication import PeerJob, SendGeneration, SendRecord, StateCopied
from memckpt.state.records import RankGroup

_log = logging.getLogger("memckpt.agent")


def announce(unit: Unit, held: Generation, name: str, watermark: int) -> SendGeneration:
    """Description of a complete generation, for peers. An acknowledged base is not read from the replica any more."""
    assert held.base is not None
    missing: tuple[tuple[int, int, str], ...] = ()
    plain = b""
    stays = watermark < held.base
    if stays and held.replica is not None and held.replica.stands_at(held.base):
        missing, plain = held.replica.describe_state()
    return SendGeneration(
        ranks=unit.ranks,
        generation=name,
        number=held.number,
        spec=held.spec,
        base=held.base,
        records=held.sendable(with_base=stays),
        missing=missing,
        plain=plain,
        history=unit.history,
    )


def by_value(unit: Unit, copy: StateCopy, name: str) -> StateCopied:
    """Description of a state that was copied for peers."""
    held, record = copy.generation, copy.record
    return StateCopied(
        ranks=unit.ranks,
        record=record,
        generation=name,
        spec=held.spec,
        step=held.ledger.steps.get(record, 0),
        rank_states=held.ledger.rank_states(record),
        missing=copy.missing,
        plain=copy.plain,
        history=unit.history,
    )


def hand_out(unit: Unit, held: Generation, record: int, behind: int) -> SendGeneration:
    """Description of a state that stands still, for readers; an eager replica stands `behind` it by some records."""
    base = record - behind
    missing: tuple[tuple[int, int, str], ...] = ()
    metas, plain = (b"",) * held.spec.period, b""
    if held.replica is not None:
        missing, plain = held.replica.describe_state()
    else:
        metas = held.metas_for(base)
    metas += tuple(held.ledger.metas.get(number, b"") for number in range(base + 1, record + 1))
    records = {
        number: (held.ledger.steps.get(number, 0), meta, held.ledger.rank_states(number) if number >= base else {})
        for number, meta in zip(range(base - held.spec.period + 1, record + 1), metas, strict=True)
    }
    return SendGeneration(
        ranks=unit.ranks,
        generation="",
        number=held.number,
        spec=held.spec,
        base=base,
        records=records,
        missing=missing,
        plain=plain,
        history=unit.history,
        serve=True,
    )


def can_send(unit: Unit, job: PeerJob) -> bool:
    """Whether a unit holds a whole generation of this attempt; after an earlier one's a new one follows."""
    held = unit.held
    return held is not None and held.complete and held.base is not None and held.base > (job.record or 0)


class OwnRecords:
    """What of a node's own records the replicator has been given, and under which names."""

    def __init__(self) -> None:
        # Numbers are not unique: an agent that replaces another one in its attempt counts from 1 again.
        self._token = secrets.token_hex(4)
        #: By unit: the name of the generation that is sent, and the newest record of it that the replicator has.
        self._sent: dict[RankGroup, tuple[str, int]] = {}

    def clear(self) -> None:
        self._sent.clear()

    def name(self, job: PeerJob, ranks: RankGroup, what: object) -> str:
        """A name that no other generation or state has."""
        return f"{job.attempt}/{self._token}/{'-'.join(map(str, ranks))}/{what}"

    def sent_name(self, ranks: RankGroup) -> str:
        """Name of the generation that is sent of a unit; empty if none is."""
        return self._sent.get(ranks, ("", 0))[0]

    def due(self, unit: Unit, job: PeerJob, watermark: int) -> Iterator[tuple[SendGeneration | SendRecord, list[int]]]:
        """Messages with what is whole of a unit and not given yet, with descriptors; given once all are taken."""
        held = unit.held
        if held is None or not can_send(unit, job):
            return
        name = self.name(job, unit.ranks, held.number)
        sent_name, sent = self._sent.get(unit.ranks, ("", 0))
        whole = held.common
        if sent_name != name:
            yield announce(unit, held, name, watermark), [region.fd for region in held.regions]
            sent = whole
        while sent < whole:
            sent += 1
            if held.spec.mode == "snapshot" and sent % held.spec.every:
                continue  # it is not captured
            record = held.log_record(sent)
            if record is None:
                _log.warning("record %d of ranks %s is not sent: not all of it is known", sent, unit.ranks)
                continue
            message = SendRecord(unit.ranks, name, record.record, record.step, record.meta, record.rank_states)
            yield message, []
        self._sent[unit.ranks] = name, sent
