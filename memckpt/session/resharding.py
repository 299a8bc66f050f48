"""What memory holds on its way to other ranks, or into other shards: it goes through a store."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from memckpt.config import ResumeChoice, StorageConfig
from memckpt.recovery.peers import BadSource
from memckpt.recovery.plan import Plan, RestoreRecord, RestoreStored, plan_to_reshard, record_to_reshard
from memckpt.session.link import AgentLink
from memckpt.session.local_training import LocalTraining
from memckpt.session.peers import Peers
from memckpt.session.storage_tier import RESHARDING
from memckpt.state.layout import StateSpec
from memckpt.state.records import HeldPieces, HeldRecords

_log = logging.getLogger("memckpt")
#: Directory, in the run directory, of the survivors' checkpoint where the run has no storage.
_DIRECTORY = "resharding"


class Resharding:
    """Has the agents write what they hold as one checkpoint, from which each rank reads its new shards.

    Args:
        training: whose shards have changed.
        link: connection to the agent that writes.
        peers: what other nodes hold of lost ones.
        run_dir: of the run.
    """

    def __init__(self, training: LocalTraining, link: AgentLink, peers: Peers, run_dir: Path) -> None:
        self._config = training.config.storage
        self._ranks = training.ranks
        self._link = link
        self._peers = peers
        self._run_dir = run_dir

    def storage_for(self, resharding: bool) -> StorageConfig | None:
        """The run's storage. Without one, what other ranks are to hold goes through the run directory.

        Args:
            resharding: whether it is needed now.
        """
        if self._config is not None:
            return self._config
        # What has been put there stays until training ends: memory has given it up before it holds it anew.
        between = self._run_dir.resolve() / _DIRECTORY
        # Nodes need not share the run directory, and all ranks have to look, or none.
        there = any(self._ranks.gather(between.is_dir()))
        return StorageConfig(url=str(between)) if resharding or there else None

    def save(
        self,
        own: Sequence[HeldRecords],
        held: Sequence[HeldRecords],
        pieces: Sequence[HeldPieces],
        resume: ResumeChoice | int,
        spec: StateSpec,
    ) -> None:
        """Have the newest record that memory can produce of all ranks written.

        Args:
            own: what this node holds.
            held: what all nodes hold.
            pieces: what they keep of other nodes' records.
            resume: what the user asked for.
            spec: of the live state.

        Raises:
            StorageError: it could not be written; the same on every rank.
        """
        record = self._bring_together(held, pieces, resume, spec)
        storage = self.storage_for(True)
        assert storage is not None
        self._ranks.together(lambda: self._save(own, record, storage))

    def _bring_together(
        self, held: Sequence[HeldRecords], pieces: Sequence[HeldPieces], resume: ResumeChoice | int, spec: StateSpec
    ) -> int | None:
        """The record of which all states are on some node of this attempt, those of lost nodes, too; None: of none."""
        if not self._peers.active:
            return record_to_reshard(held, resume)
        nodes = self._peers.node_names

        def plan_without(bad: Collection[BadSource], before: bool) -> Plan:
            return plan_to_reshard(held, pieces, resume, nodes, self._ranks.nonce, bad)

        plan = self._peers.carry_out(plan_without, spec, adopt=True)
        if isinstance(plan, RestoreRecord):
            return plan.record
        if isinstance(plan, RestoreStored) and resume != "never" and self._ranks.rank == 0:
            _log.warning("memckpt: what memory holds cannot go to other ranks: %s", plan.reason)
        return None

    def _save(self, own: Sequence[HeldRecords], record: int | None, storage: StorageConfig) -> None:
        held = any(each.records for each in own if not each.standby)
        if held and record is not None and self._ranks.rank == self._ranks.local_ranks[0]:
            name = "storage" if self._config is not None else RESHARDING
            _log.info("memckpt: record %d goes to %s first: the ranks, or their shards, have changed", record, name)
            url = storage.url or str(self._run_dir.resolve() / "storage")
            self._link.save_record(record, url, storage.timeout_seconds, name)

    def forget(self) -> None:
        """Training has finished: what passed through the run directory is not needed any more."""
        between = self._run_dir / _DIRECTORY
        if self._config is None and self._ranks.rank == self._ranks.local_ranks[0] and between.is_dir():
            with contextlib.suppress(FileNotFoundError):  # a rank of another node may share the directory
                shutil.rmtree(between)
