"""A session's part in the peers tier: the nodes of an attempt, their keys and placement, and recovery from them."""

from __future__ import annotations

import ipaddress
import logging
import os
import platform
import socket
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from memckpt.capture.phases import PhaseMarks
from memckpt.capture.recorder import Recorder
from memckpt.config import AgentConfig, ErasureConfig
from memckpt.errors import AgentError, ConfigurationError, NothingHeldError, PeerError
from memckpt.memory.pages import PhasesPage, PhaseWriter
from memckpt.protocol.replication import (
    FromNode,
    Join,
    Listen,
    Listening,
    PeerJob,
    PeerKeys,
    PeerNode,
    PeerUnit,
    Recover,
    Recovered,
    WantedState,
)
from memckpt.recovery.plan import Plan, RestoreRecord, RestoreStored, StartOver
from memckpt.recovery.restore import progress
from memckpt.recovery.sources import BadSource, Fetch, serves
from memckpt.session.link import AgentLink
from memckpt.session.ranks import Ranks
from memckpt.state.layout import Layout
from memckpt.state.records import HeldFragments, RankGroup
from memckpt.state.spec import StateSpec

_log = logging.getLogger("memckpt")
#: Address without a host (RFC 5737); the route to it is the default route.
_ELSEWHERE = "192.0.2.1"


class Peers:
    """Prepares nodes to keep each other's records. All methods are no-ops without a configuration of peers.

    Attributes:
        active: whether peers are configured.
        units: for each rank, its node and the ranks there that hold the same shards; set by :meth:`find_fragments`.
    """

    def __init__(self, config: ErasureConfig | None, ranks: Ranks, link: AgentLink, agent: AgentConfig) -> None:
        self._config = config
        self.active = config is not None
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

    # Start

    def find_fragments(self) -> list[HeldFragments]:
        """Find the records of others that each node keeps; none without peers. Collective.

        All nodes listen with new keys then, and know each other.
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
        from memckpt.replication.coding.code import Code
        from memckpt.replication.coding.placement import choose_level, find_domain
        from memckpt.replication.transport.directory import make_keys, make_password

        ranks.together(lambda: Code(config.data, config.tolerate, config.backend).close())  # this node can encode
        made: tuple[str, ...] | None = None
        if ranks.rank == 0:
            made = msgspec.structs.astuple(make_keys()) if config.security == "curve" else (make_password(),)
        first = ranks.gather(made)[0]
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
        self._listen = Listen(
            attempt=self._ranks.nonce,
            node=self._ranks.node,
            host=address,
            port=config.port,
            keys=keys,
            memory_budget_bytes=self._agent.memory_budget_bytes,
            liveness_seconds=self._agent.liveness_seconds,
        )
        return self._link.listen(self._listen) if self._ranks.leads else None

    def _refuse_differing(self) -> None:
        from memckpt.replication.transport.links import WIRE_VERSION

        own = None
        if self._config is not None:
            common = replace(self._config, host=None, port=0, rack=None, zone=None)
            own = f"{common!r}, protocol {WIRE_VERSION}"
        everybody = self._ranks.gather(own)
        differing = next((rank for rank, one in enumerate(everybody) if one != everybody[0]), None)
        if differing is not None:
            raise ConfigurationError(
                f"peers: expected the same settings on all ranks, found {everybody[0]} on rank 0 and "
                f"{everybody[differing]} on rank {differing}"
            )

    def plan_with_peers(
        self,
        plan_without: Callable[[Collection[BadSource], bool], Plan],
        spec: StateSpec,
        before: bool = False,
        adopt: bool = False,
    ) -> Plan:
        """Make the plan as :meth:`PeerRecovery.plan_with_peers` does; there must be peers."""
        assert self._recovery is not None
        return self._recovery.plan_with_peers(plan_without, spec, self._join, before, adopt)

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
        self._ranks.together(lambda: self._link.send(Join(job)) if self._ranks.leads else None)
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
            private = any(len(at & set(group)) > config.tolerate for group in placement.groups)
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


def own_address(host: str | None, alone: bool) -> str:
    """The address of this node on the route to the job's master, or on the default route; `host` takes precedence.

    Where not all nodes are on this machine a loopback address is no use: the master's own name may resolve to one.
    """
    if host is not None:
        return host
    for there in (os.environ.get("MASTER_ADDR", _ELSEWHERE), _ELSEWHERE):
        found = _route_to(there)
        if found is not None and (alone or not ipaddress.ip_address(found.partition("%")[0]).is_loopback):
            return found
    if alone:
        return "127.0.0.1"  # no route leads anywhere
    raise ConfigurationError(
        "peers.host: expected an address of this node that its peers can reach, found none: no route leads to the "
        "job's master or elsewhere; set it, or MEMCKPT_PEERS_HOST"
    )


def _route_to(there: str) -> str | None:
    """Local address of the route to another address; None without a route. Sends nothing."""
    try:
        family, _, _, _, address = socket.getaddrinfo(there, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


@dataclass
class Avoided:
    """Sources that plans do without: bad ones, and silent ones, whose nodes only did not answer."""

    bad: set[BadSource] = field(default_factory=set)
    silent: set[BadSource] = field(default_factory=set)

    @property
    def all(self) -> set[BadSource]:
        return self.bad | self.silent


class PeerRecovery:
    """Carries out plans together with the other ranks; asks nodes that do not answer again, for so many seconds."""

    def __init__(
        self,
        ranks: Ranks,
        link: AgentLink,
        patience_seconds: float,
        budget_bytes: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks = ranks
        self._link = link
        self._patience_seconds = patience_seconds
        self._budget_bytes = budget_bytes
        self._clock = clock
        #: Approximate size of a fetched state, in bytes.
        self._window_bytes = 0
        #: When a node that did not answer was first waited for, on the clock.
        self._waiting_since: float | None = None

    def plan_with_peers(
        self,
        plan_without: Callable[[Collection[BadSource], bool], Plan],
        spec: StateSpec,
        join: Callable[[Plan], None],
        before: bool,
        adopt: bool,
    ) -> Plan:
        """Make the plan and fetch the states that it needs; repeat without sources that prove to be bad. Collective.

        Args:
            plan_without: makes the plan, the same on every rank, without some sources; told whether the state before
                the newest is wanted, too.
            adopt: whether nodes fetch states of ranks that they do not have, to write them to a store.

        Raises:
            AgentError: a node cannot fetch or serve, twice in a row, for its own reason; its sources stay.
            PeerError: nodes did not answer in time, and nothing can be resumed without them. Nothing is dropped.
        """
        layout = Layout(spec)
        self._window_bytes = (layout.slot_bytes + layout.by_value_slot_bytes) * spec.period
        avoided = Avoided()
        tried_again = False
        while True:
            plan = self._choose(plan_without, before, avoided)
            join(plan)
            if not isinstance(plan, RestoreRecord) or not plan.fetches:
                return plan
            problems = self._fetch(plan, adopt)
            if not problems:
                return plan
            if any(fetch.before for fetch in plan.fetches):
                before = False  # the state before serves a check only: no source is given up for it
                continue
            found, silent = _blamed(problems)
            if not found and tried_again:
                words = "; ".join(answer.problem for answer in problems)
                raise AgentError(f"expected to fetch from peers what nodes lack, found twice that they cannot: {words}")
            if not found:
                tried_again = True  # no source is to blame: a replicator that died has been replaced by now
                continue
            if found <= avoided.all:  # no news: all sources of this plan are avoided
                more = {one for fetch in plan.fetches for one in _sources_of(fetch)}
                found, silent = more, more if found == silent else set()
            avoided.bad |= found - silent
            avoided.silent |= silent

    def _choose(
        self, plan_without: Callable[[Collection[BadSource], bool], Plan], before: bool, avoided: Avoided
    ) -> Plan:
        """The plan without the sources that are avoided; silent ones are asked again where it falls behind for them."""
        plan = _made(lambda: plan_without(avoided.all, before))
        if avoided.silent:
            wanted = _made(lambda: plan_without(avoided.bad, before))
            same = (
                isinstance(plan, RestoreRecord) and isinstance(wanted, RestoreRecord) and plan.record == wanted.record
            )
            if isinstance(wanted, RestoreRecord) and not same and self._waits_for(avoided.silent, wanted, plan):
                avoided.silent.clear()
                return wanted
        if isinstance(plan, NothingHeldError):
            raise plan
        return plan

    def _waits_for(self, silent: Collection[BadSource], plan: RestoreRecord, without: Plan | NothingHeldError) -> bool:
        """Whether nodes that did not answer are asked once more, the same on every rank. Raises PeerError."""
        now = self._clock()
        if self._waiting_since is None:
            self._waiting_since = now
        waited, patience = now - self._waiting_since, self._patience_seconds
        waits = self._ranks.together(lambda: waited < patience)[0]
        names = ", ".join(sorted({one.node for one in silent}))
        nothing = not isinstance(without, RestoreRecord | RestoreStored)
        if not waits and nothing:
            # Silence is no loss: the state may still be there, and starting over would drop it.
            raise PeerError(
                f"expected an answer of {names}, found none for {patience:.0f} s; step {plan.step} cannot be had "
                "without, nor any other state, and nothing is dropped. Repair the node or the network, and start "
                "again; resume='never' starts over"
            )
        if self._ranks.rank == 0:
            remedy = "to start over without, start again with resume='never'"
            if not nothing:
                remedy = f"to go on without, {_instead(without)}, start again with peers.recovery_patience_seconds=0"
            if waits:
                _log.warning(
                    "memckpt: %s did not answer, and step %d cannot be had without: asked again, for up to %.0f s "
                    "more; %s",
                    names,
                    plan.step,
                    patience - waited,
                    remedy,
                )
            else:
                _log.warning(
                    "memckpt: %s did not answer for %.0f s: training goes on %s", names, waited, _instead(without)
                )
        return waits

    def _fetch(self, plan: RestoreRecord, adopt: bool) -> list[Recovered]:
        """Have all nodes fetch the states that they lack. Returns the answers with problems, the same on every rank."""
        ranks = self._ranks
        own = [fetch for fetch in plan.fetches if fetch.node == ranks.node]
        message = Recover(
            record=plan.record,
            serve=serves(plan.fetches, self._ranks.node),
            fetch=tuple(WantedState(one.ranks, one.record, one.source, one.before) for one in own),
            memory_budget_bytes=self._budget_bytes,
            history=plan.history,
            before=any(fetch.before for fetch in plan.fetches),
            adopt=adopt,
        )
        if self._ranks.rank == 0:
            lost = sorted(rank for fetch in plan.fetches for rank in fetch.ranks)
            _log.info("memckpt: the state of ranks %s after step %d comes from peers", lost, plan.step)
        # All nodes serve before any fetches.
        phases = [msgspec.structs.replace(message, fetch=()), msgspec.structs.replace(message, serve=())]
        for phase in phases if any(fetch.server for fetch in plan.fetches) else phases[1:]:
            answers = ranks.together(partial(self._ask, phase) if ranks.leads else Recovered)
            problems = [answer for answer in answers if answer.problem]
            for answer in problems:
                _log.warning("memckpt: %s", answer.problem)
            if problems:
                return problems
        return []

    def _ask(self, message: Recover) -> Recovered:
        with progress("fetching from peers", self._window_bytes * len(message.fetch)) as advance:
            return self._link.recover(message, lambda news: advance(news.nbytes))


def _blamed(problems: Iterable[Recovered]) -> tuple[set[BadSource], set[BadSource]]:
    """Sources that could not be read or were damaged, and those among them that only did not answer."""
    found: set[BadSource] = set()
    answered: set[BadSource] = set()
    for one in (one for answer in problems for one in answer.bad):
        source = BadSource(one.node, one.ranks, one.generation, bool(one.generation))
        found.add(source)
        if not one.silent:
            answered.add(source)
    return found, found - answered


def _made(make: Callable[[], Plan]) -> Plan | NothingHeldError:
    """The plan, or why there is none."""
    try:
        return make()
    except NothingHeldError as error:
        return error


def _instead(plan: Plan | NothingHeldError) -> str:
    """The place from which a plan goes on, in words."""
    match plan:
        case RestoreRecord():
            return f"from step {plan.step}"
        case RestoreStored():
            return f"from {plan.tier}"
        case _:
            return "from the beginning"


def _sources_of(fetch: Fetch) -> set[BadSource]:
    source = fetch.source
    if isinstance(source, FromNode):
        return {BadSource(source.node, fetch.ranks, damaged=False)}
    return {BadSource(node, fetch.ranks, source.generation) for node, _ in source.fragments}
