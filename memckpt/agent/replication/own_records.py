"""What of a node's own records the replicator has been given."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator

from memckpt.agent.group import Group
from memckpt.agent.replication.handing_out import announce
from memckpt.protocol.peers import PeerJob
from memckpt.protocol.replication import SendGeneration, SendRecord
from memckpt.state.records import RankGroup

_log = logging.getLogger("memckpt.agent")


class OwnRecords:
    """What of a node's own records the replicator has been given, and under which names."""

    def __init__(self) -> None:
        # An agent that replaces another one in its attempt counts from 1 again, so numbers are not unique.
        self._token = secrets.token_hex(4)
        #: By unit: the name of the generation that is sent, and the newest record of it that the replicator has.
        self._sent: dict[RankGroup, tuple[str, int]] = {}

    def forget(self) -> None:
        """Note that the replicator has nothing."""
        self._sent.clear()

    def name(self, job: PeerJob, ranks: RankGroup, what: object) -> str:
        """A name that no other generation or state has."""
        return f"{job.attempt}/{self._token}/{'-'.join(map(str, ranks))}/{what}"

    def sent_name(self, ranks: RankGroup) -> str:
        """Name of the generation that is sent of a unit; empty if none is."""
        return self._sent.get(ranks, ("", 0))[0]

    def due(
        self, group: Group, job: PeerJob, watermark: int
    ) -> Iterator[tuple[SendGeneration | SendRecord, list[int]]]:
        """Messages with what is whole of a group and was not given to the replicator, each with descriptors.

        They count as given once all were taken.
        """
        held = group.held
        if held is None or not held.complete:
            return
        if held.base is None or held.base <= (job.record or 0):
            return  # of an earlier attempt: a new one follows
        name = self.name(job, group.ranks, held.number)
        sent_name, sent = self._sent.get(group.ranks, ("", 0))
        whole = held.common
        if sent_name != name:
            yield announce(group, held, name, watermark), [region.fd for region in held.regions]
            sent = whole
        while sent < whole:
            sent += 1
            if held.spec.mode == "snapshot" and sent % held.spec.every:
                continue  # it is not captured
            record = held.log_record(sent)
            if record is None:
                _log.warning("record %d of ranks %s is not sent: not all of it is known", sent, group.ranks)
                continue
            message = SendRecord(group.ranks, name, record.record, record.step, record.meta, record.rank_states)
            yield message, []
        self._sent[group.ranks] = name, sent
