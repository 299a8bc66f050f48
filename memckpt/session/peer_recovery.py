"""Recovery from other nodes: states are fetched, and the plan is made again without bad sources."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from memckpt.errors import AgentError, NothingHeldError, PeerError
from memckpt.protocol.recovery import FromNode, Recover, Recovered, WantedState
from memckpt.recovery.plan import Plan, RestoreRecord, RestoreStored
from memckpt.recovery.sources import BadSource, Fetch, serves
from memckpt.recovery.target import progress
from memckpt.session.link import AgentLink
from memckpt.session.ranks import Ranks
from memckpt.state.layout import Layout
from memckpt.state.spec import StateSpec

_log = logging.getLogger("memckpt")


@dataclass
class Avoided:
    """Sources that plans do without.

    Attributes:
        bad: those that are damaged, or could not be read.
        silent: those whose nodes only did not answer.
    """

    bad: set[BadSource] = field(default_factory=set)
    silent: set[BadSource] = field(default_factory=set)

    @property
    def all(self) -> set[BadSource]:
        return self.bad | self.silent


class PeerRecovery:
    """Carries out plans together with the other ranks.

    Args:
        ranks: ranks of the job.
        link: connection to this node's agent, which fetches.
        patience_seconds: how long nodes that do not answer are asked again.
        budget_bytes: memory budget of the agent; None without one.
        clock: returns the current time, in seconds.
    """

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

    def carry_out(
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
            spec: layout of the live state.
            join: has this node take its part in a plan.
            before: whether the state before the newest is wanted, if it can be had.
            adopt: whether nodes fetch states of ranks that they do not have, to write them to a store.

        Raises:
            AgentError: a node cannot fetch or serve, twice in a row, for a reason of its own. Its sources are left as
                they are.
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
        """The plan without the sources that are avoided; silent ones are asked again where it falls behind for them.

        Raises:
            PeerError: they did not answer in time, and nothing can be resumed without them. Nothing is dropped.
        """
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
        """Whether nodes that did not answer are asked once more; the same on every rank.

        Args:
            silent: their sources.
            plan: the plan that uses them.
            without: the plan that does not, or why there is none.

        Raises:
            PeerError: they did not answer in time, and nothing can be resumed without them.
        """
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
        leads = ranks.rank == ranks.local_ranks[0]
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
            answers = ranks.together(partial(self._ask, phase) if leads else Recovered)
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
