"""A session's part in the peers tier: the nodes of an attempt, their keys and placement."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Collection

import msgspec

from memckpt.capture.phases import PhaseMarks
from memckpt.capture.recorder import Recorder
from memckpt.config import AgentConfig, ErasureConfig
from memckpt.errors import ConfigurationError
from memckpt.memory.phases import PhasesPage, PhaseWriter
from memckpt.protocol.peer_job import Join, Listen, Listening, PeerJob, PeerKeys, PeerNode, PeerUnit
from memckpt.recovery.plan import Plan, RestoreRecord, StartOver
from memckpt.recovery.sources import BadSource
from memckpt.session.link import AgentLink
from memckpt.session.own_address import own_address
from memckpt.session.peer_recovery import PeerRecovery
from memckpt.session.ranks import Ranks
from memckpt.state.records import HeldFragments, RankGroup
from memckpt.state.spec import StateSpec

_log = logging.getLogger("memckpt")


class Peers:
    """Prepares nodes to keep each other's records. All methods are no-ops without a configuration of peers.

    Args:
        config: redundancy in other nodes' memory; None without peers.
        ranks: ranks of the job.
        link: connection to this node's agent.
        agent: settings of the agent.

    Attributes:
        units: for each rank, its node and the ranks there that hold the same shards; set by :meth:`listen`.
    """

    def __init__(self, config: ErasureConfig | None, ranks: Ranks, link: AgentLink, agent: AgentConfig) -> None:
        self._config = config
        self._ranks = ranks
        self._link = link
        self._agent = agent
        self._listen: Listen | None = None
        self._nodes: tuple[PeerNode, ...] = ()
        self._job: PeerJob | None = None
        self._page: PhasesPage | None = None
        self._marks: PhaseMarks | None = None
        self.units: list[tuple[str, RankGroup]] = []
        self._recovery: PeerRecovery | None = None
        if config is not None:
            patience = config.recovery_patience_seconds
            self._recovery = PeerRecovery(ranks, link, patience, agent.memory_budget_bytes)

    @property
    def active(self) -> bool:
        """Whether peers are configured."""
        return self._config is not None

    @property
    def _leads(self) -> bool:
        return self._ranks.rank == self._ranks.local_ranks[0]

    # Start

    def listen(self) -> list[HeldFragments]:
        """Have all nodes listen with new keys; collective.

        Returns:
            The records of other nodes that each node keeps.

        Raises:
            ConfigurationError: there are too few nodes, or their settings differ.
        """
        config, ranks = self._config, self._ranks
        self._refuse_differing()
        if config is None:
            return []
        self.units = ranks.gather((ranks.node, ranks.unit))
        names = list(dict.fromkeys(node for node, _ in self.units))
        if len(names) < config.group_nodes:
            raise ConfigurationError(
                f"peers: expected {config.group_nodes} nodes or more to tolerate the loss of {config.tolerate}, found "
                f"{len(names)} ({', '.join(names)}); use more nodes, a smaller code, or peers=None"
            )
        ranks.together(lambda: _try_code(config))
        from memckpt.replication.coding.topology import choose_level, find_domain
        from memckpt.replication.transport.keys import Keys, Password

        made: Keys | Password | None = None
        if ranks.rank == 0:
            made = Keys.make() if config.security == "curve" else Password.make()
        first = ranks.gather(None if made is None else msgspec.structs.astuple(made))[0]
        assert first is not None
        keys = PeerKeys(*first) if config.security == "curve" else str(first[0])
        if ranks.rank == 0 and config.security == "plain":
            _log.warning("memckpt: peers speak in plain: whoever listens on their network can read and change records")
        alone = len(set(ranks.gather(platform.node()))) == 1
        domain = find_domain(config, ranks.node, os.environ)
        answers = ranks.together(lambda: (self._open(config, keys, alone), domain))
        found = {self.units[rank][0]: one for rank, one in enumerate(answers) if one[0] is not None}
        level = choose_level([found[name][1] for name in names], config.domain_level, config.group_nodes)
        self._nodes = tuple(
            PeerNode(name, answer.address, path)
            for name, path in zip(names, level.paths, strict=True)
            if (answer := found[name][0]) is not None
        )
        if ranks.rank == 0:
            _log.info("memckpt: peers are placed by %s: %s", level.name, level.reason)
        return [held for answer, _ in found.values() if answer is not None for held in answer.fragments]

    def _open(self, config: ErasureConfig, keys: PeerKeys | str, alone: bool) -> Listening | None:
        address = own_address(config.host, alone)
        budget, threads = self._agent.memory_budget_bytes, self._agent.threads
        self._listen = Listen(
            attempt=self._ranks.nonce,
            node=self._ranks.node,
            host=address,
            port=config.port,
            keys=keys,
            memory_budget_bytes=budget,
            threads=threads,
            liveness_seconds=self._agent.liveness_seconds,
        )
        return self._link.listen(self._listen) if self._leads else None

    def _refuse_differing(self) -> None:
        from memckpt.replication.transport.envelope import WIRE_VERSION

        own = None if self._config is None else f"{_common(self._config)!r}, protocol {WIRE_VERSION}"
        everybody = self._ranks.gather(own)
        differing = next((rank for rank, one in enumerate(everybody) if one != everybody[0]), None)
        if differing is not None:
            raise ConfigurationError(
                f"peers: expected the same settings on all ranks, found {everybody[0]} on rank 0 and "
                f"{everybody[differing]} on rank {differing}"
            )

    def carry_out(
        self,
        plan_without: Callable[[Collection[BadSource], bool], Plan],
        spec: StateSpec,
        before: bool = False,
        adopt: bool = False,
    ) -> Plan:
        """Make the plan, and bring what it needs of other nodes to this one: see :meth:`PeerRecovery.carry_out`."""
        if self._recovery is None:
            return plan_without((), before)
        return self._recovery.carry_out(plan_without, spec, self._join, before, adopt)

    def _join(self, plan: Plan) -> None:
        config = self._config
        assert config is not None
        names = [one.name for one in self._nodes]
        units = self._sent_units(config)
        self._job = job = PeerJob(
            attempt=self._ranks.nonce,
            nodes=self._nodes,
            units=units,
            data=config.data,
            tolerate=config.tolerate,
            backend=config.backend,
            wait=config.ack == "wait",
            rate_bytes_per_second=config.rate_bytes_per_second,
            overhead=config.overhead,
            record=plan.record if isinstance(plan, RestoreRecord) else None,
            forget=isinstance(plan, StartOver) and plan.asked,
            ack_timeout_seconds=config.ack_timeout_seconds,
            # Shared tensors of replicas are not sent, and replicas hold no version as old as a state by value.
            every_steps=1 if any(unit.private for unit in units) else config.every_steps,
        )
        if self._ranks.rank == 0 and job.every_steps != config.every_steps and config.every_steps is not None:
            _log.info("memckpt: peers.every_steps: each step is sent, as only what is private to ranks is")
        assert self._ranks.node in names
        self._ranks.together(lambda: self._link.send(Join(job)) if self._leads else None)
        self._link.connection.watermark = job.record or 0

    def _sent_units(self, config: ErasureConfig) -> tuple[PeerUnit, ...]:
        """Units that are sent: only their private parts, where more nodes of a group hold them than can be lost."""
        from memckpt.replication.coding.placement import place

        names = [one.name for one in self._nodes]
        placement = place([one.domain for one in self._nodes], config.data, config.tolerate)
        if self._ranks.rank == 0:
            for warning in placement.warnings:
                _log.warning("memckpt: %s", warning)
        units: dict[RankGroup, PeerUnit] = {}
        for node, unit in self.units:
            replicas = next(group for group in self._ranks.groups if unit[0] in group)
            at = {names.index(self.units[rank][0]) for rank in replicas}
            private = any(len(at & set(group.nodes)) > config.tolerate for group in placement.groups)
            units[unit] = PeerUnit(names.index(node), unit, private)
        return tuple(units.values())

    @property
    def node_names(self) -> list[str]:
        """Names of the nodes of this attempt; empty without peers."""
        return [one.name for one in self._nodes]

    def describe(self) -> str:
        """Redundancy in other nodes' memory, in words; empty without peers."""
        config, count = self._config, len(self._nodes)
        if config is not None and config.data == 1:
            return f"; {config.group_nodes} nodes of {count} hold each state"
        if config is not None:
            of = f"the {count}" if config.group_nodes == count else f"each {config.group_nodes} of {count}"
            return f"; any {config.tolerate} of {of} nodes may be lost (k={config.data})"
        return ""

    # During training

    def mark_phases(self, recorder: Recorder) -> None:
        """Mark the phases of steps for the replicator, which holds traffic back during reductions."""
        self.stop_marking(recorder)
        if self._config is not None:
            self._page, position = self._link.open_phases()
            self._marks = PhaseMarks(PhaseWriter(self._page, position), recorder.record)
            recorder.mark_phases(self._marks)

    def stop_marking(self, recorder: Recorder) -> None:
        """Stop marking, and close the page of phases."""
        recorder.mark_phases(None)
        marks, self._marks = self._marks, None
        if marks is not None:
            marks.remove()
        page, self._page = self._page, None
        if page is not None:
            page.close()

    def rejoin(self) -> None:
        """Tell a new agent of this attempt's peers."""
        if self._listen is not None and self._job is not None:
            self._link.listen(self._listen)
            # The watermark is known to the other nodes: this one starts from nothing.
            self._link.send(Join(msgspec.structs.replace(self._job, record=None), rejoin=True))


def _try_code(config: ErasureConfig) -> None:
    """Check that this node can encode.

    Raises:
        ConfigurationError: the backend is not installed, or does not support so many fragments.
    """
    from memckpt.replication.coding.code import Code

    Code(config.data, config.tolerate, config.backend).close()


def _common(config: ErasureConfig) -> ErasureConfig:
    """The settings that have to be equal on all nodes."""
    from dataclasses import replace

    return replace(config, host=None, port=0, rack=None, zone=None)
