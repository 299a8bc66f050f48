"""Resharding: held states of memory go to other ranks, or into other shards, through a store."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from memckpt.config import ResumeChoice, StorageConfig
from memckpt.recovery.plan import Plan, RestoreRecord, RestoreStored, plan_to_reshard, record_to_reshard
from memckpt.recovery.sources import BadSource
from memckpt.session.link import AgentLink
from memckpt.session.peers import Peers
from memckpt.session.ranks import LocalTraining
from memckpt.session.resume.storage_tier import RESHARDING
from memckpt.state.records import HeldFragments, HeldRecords
from memckpt.state.spec import StateSpec

_log = logging.getLogger("memckpt")
#: Directory, in the run directory, of the survivors' checkpoint where the run has no storage.
_DIRECTORY = "resharding"


class Resharding:
    """Has the agents write what they hold as one checkpoint, from which each rank reads its new shards."""

    def __init__(self, training: LocalTraining, link: AgentLink, peers: Peers, run_dir: Path) -> None:
        self._config = training.config.storage
        self._ranks = training.ranks
        self._link = link
        self._peers = peers
        self._run_dir = run_dir

    def storage_for(self, resharding: bool) -> StorageConfig | None:
        """The run's storage, or a store in the run directory if it has none; None if no store is needed. Collective."""
        if self._config is not None:
            return self._config
        # The checkpoint stays until training ends: memory drops the state before it is protected again.
        between = self._run_dir.resolve() / _DIRECTORY
        # Nodes need not share the run directory, but all ranks use the store, or none.
        there = any(self._ranks.gather(between.is_dir()))
        return StorageConfig(url=str(between)) if resharding or there else None

    def save(
        self,
        own: Sequence[HeldRecords],
        held: Sequence[HeldRecords],
        fragments: Sequence[HeldFragments],
        resume: ResumeChoice | int,
        spec: StateSpec,
    ) -> None:
        """Write the newest record that memory can produce of all ranks; collective.

        Raises:
            StorageError: it could not be written.
        """
        record = self._bring_together(held, fragments, resume, spec)
        storage = self.storage_for(True)
        assert storage is not None
        self._ranks.together(lambda: self._save(own, record, storage))

    def _bring_together(
        self,
        held: Sequence[HeldRecords],
        fragments: Sequence[HeldFragments],
        resume: ResumeChoice | int,
        spec: StateSpec,
    ) -> int | None:
        """Fetch states of lost nodes. Returns the record that nodes then have of all ranks; None if there is none."""
        if not self._peers.active:
            return record_to_reshard(held, resume)
        nodes = self._peers.node_names

        def plan_without(bad: Collection[BadSource], before: bool) -> Plan:
            return plan_to_reshard(held, fragments, resume, nodes, self._ranks.nonce, bad)

        plan = self._peers.carry_out(plan_without, spec, adopt=True)
        if isinstance(plan, RestoreRecord):
            return plan.record
        if isinstance(plan, RestoreStored) and resume != "never" and self._ranks.rank == 0:
            _log.warning("memckpt: what memory holds cannot go to other ranks: %s", plan.reason)
        return None

    def _save(self, own: Sequence[HeldRecords], record: int | None, storage: StorageConfig) -> None:
        held = any(each.records for each in own)
        if held and record is not None and self._ranks.rank == self._ranks.local_ranks[0]:
            name = "storage" if self._config is not None else RESHARDING
            _log.info("memckpt: record %d goes to %s first: the ranks, or their shards, have changed", record, name)
            url = storage.url or str(self._run_dir.resolve() / "storage")
            self._link.save_record(record, url, storage.timeout_seconds, name)

    def delete_store(self) -> None:
        """Delete the store in the run directory, as training has finished."""
        between = self._run_dir / _DIRECTORY
        if self._config is None and self._ranks.rank == self._ranks.local_ranks[0] and between.is_dir():
            with contextlib.suppress(FileNotFoundError):  # a rank of another node may share the directory
                shutil.rmtree(between)
