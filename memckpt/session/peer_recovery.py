"""What a plan needs of other nodes: fetched, and planned anew without the sources that prove to be bad."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial

import msgspec

from memckpt.errors import AgentError
from memckpt.protocol.replication import Recover, Recovered, UnitSource
from memckpt.recovery.peers import BadSource, Fetch, serves
from memckpt.recovery.plan import Plan, RestoreRecord, RestoreStored
from memckpt.recovery.target import progress
from memckpt.session.link import AgentLink
from memckpt.session.ranks import Ranks
from memckpt.state.layout import Layout, StateSpec

_log = logging.getLogger("memckpt")


class PeerRecovery:
    """Carries out plans together with the other ranks.

    Args:
        ranks: of the job.
        link: to this node's agent, which fetches.
        patience_seconds: how long nodes are asked again that do not answer.
        budget_bytes: memory that the agent may take; None: no limit of its own.
    """

    def __init__(self, ranks: Ranks, link: AgentLink, patience_seconds: float, budget_bytes: int | None) -> None:
        self._ranks = ranks
        self._link = link
        self._patience_seconds = patience_seconds
        self._budget_bytes = budget_bytes
        #: About what a state that is fetched has, in bytes.
        self._window_bytes = 0
        #: When a node that did not answer was first waited for (monotonic clock).
        self._waiting_since: float | None = None

    def carry_out(
        self,
        plan_without: Callable[[Collection[BadSource], bool], Plan],
        spec: StateSpec,
        join: Callable[[Plan], None],
        before: bool,
        adopt: bool,
    ) -> Plan:
        """Make the plan, and bring what it needs of other nodes to this one; again, without what proves to be bad.

        Args:
            plan_without: makes the plan, the same on every rank, without some sources; told whether the state before
                the newest is wanted, too.
            spec: of the live state.
            join: has this node take its part in a plan.
            before: whether the state before the newest is wanted, if it can be had.
            adopt: whether nodes fetch states of ranks that they do not have, to write them to a store.

        Raises:
            AgentError: a node cannot fetch or hand out, for a reason of its own, and could not the time before. What
                its sources hold is left as it is.
        """
        layout = Layout(spec)
        self._window_bytes = (layout.slot_bytes + layout.by_value_slot_bytes) * spec.period
        bad: set[BadSource] = set()
        tried_again = False
        while True:
            plan = plan_without(bad, before)
            join(plan)
            if not isinstance(plan, RestoreRecord) or not plan.fetches:
                return plan
            problems = self._fetch(plan, adopt)
            if not problems:
                return plan
            if any(fetch.before for fetch in plan.fetches):
                before = False  # a check costs nobody a source that would do without it
                continue
            found, silent = _blamed(problems)
            answered = found - silent
            if silent and self._waits_for(
                silent, plan_without(bad | answered, before), plan_without(bad | found, before)
            ):
                bad |= answered
                continue
            if not found and tried_again:
                words = "; ".join(answer.problem for answer in problems)
                raise AgentError(f"expected to fetch from peers what nodes lack, found twice that they cannot: {words}")
            if not found:
                tried_again = True  # no source is to blame: a replicator that died has been replaced by now
                continue
            # Nothing to do without: whatever the fetches of this plan use is left alone.
            bad |= (found - bad) or {one for fetch in plan.fetches for one in _sources_of(fetch)}

    def _waits_for(self, silent: Collection[BadSource], plan: Plan, without: Plan) -> bool:
        """Whether nodes that did not answer are asked once more. The same on every rank.

        Args:
            silent: what they hold.
            plan: may use it.
            without: does without it.
        """
        now = time.monotonic()
        if not isinstance(plan, RestoreRecord):
            return False
        if isinstance(without, RestoreRecord) and without.record == plan.record:
            return False
        if self._waiting_since is None:
            self._waiting_since = now
        waited, patience = now - self._waiting_since, self._patience_seconds
        waits = self._ranks.together(lambda: waited < patience)[0]
        if self._ranks.rank == 0:
            names = ", ".join(sorted({one.node for one in silent}))
            instead = _instead(without)
            if waits:
                _log.warning(
                    "memckpt: %s did not answer, and step %d cannot be had without: asked again, for up to %.0f s "
                    "more; to go on without, %s, start again with peers.recovery_patience_seconds=0",
                    names,
                    plan.step,
                    patience - waited,
                    instead,
                )
            else:
                _log.warning("memckpt: %s did not answer for %.0f s: training goes on %s", names, waited, instead)
        return waits

    def _fetch(self, plan: RestoreRecord, adopt: bool) -> list[Recovered]:
        """Have all nodes fetch what they lack; the answers of those that could not. The same on every rank."""
        ranks = self._ranks
        leads = ranks.rank == ranks.local_ranks[0]
        own = [fetch for fetch in plan.fetches if fetch.node == ranks.node]
        message = Recover(
            record=plan.record,
            serve=serves(plan.fetches, self._ranks.node),
            fetch=tuple(_source(fetch) for fetch in own),
            memory_budget_bytes=self._budget_bytes,
            history=plan.history,
            before=any(fetch.before for fetch in plan.fetches),
            adopt=adopt,
        )
        if self._ranks.rank == 0:
            lost = sorted(rank for fetch in plan.fetches for rank in fetch.ranks)
            _log.info("memckpt: the state of ranks %s after step %d comes from peers", lost, plan.step)
        # Nobody is asked for a state before it is handed out.
        phases = [msgspec.structs.replace(message, fetch=()), msgspec.structs.replace(message, serve=())]
        for phase in phases if any(fetch.live or fetch.replica for fetch in plan.fetches) else phases[1:]:
            answers = ranks.together(partial(self._ask, phase) if leads else Recovered)
            problems = [answer for answer in answers if answer.problem]
            for answer in problems:
                _log.warning("memckpt: %s", answer.problem)
            if problems:
                return problems
        return []

    def _ask(self, message: Recover) -> Recovered:
        with progress("fetching from peers", self._window_bytes * len(message.fetch)) as advance:
            return self._link.client.recover(message, lambda news: advance(news.nbytes))


def _source(fetch: Fetch) -> UnitSource:
    return UnitSource(
        ranks=fetch.ranks,
        record=fetch.record,
        generation=fetch.generation,
        live=fetch.live,
        pieces=fetch.pieces,
        private=fetch.private,
        replica=fetch.replica,
        period=fetch.period,
        data=fetch.data,
        before=fetch.before,
    )


def _blamed(problems: Iterable[Recovered]) -> tuple[set[BadSource], set[BadSource]]:
    """The sources from which nothing, or nothing right, could be read; those among them that only did not answer."""
    found: set[BadSource] = set()
    answered: set[BadSource] = set()
    for one in (one for answer in problems for one in answer.bad):
        source = BadSource(one.node, one.ranks, one.generation, bool(one.generation))
        found.add(source)
        if not one.silent:
            answered.add(source)
    return found, found - answered


def _instead(plan: Plan) -> str:
    """From where a plan goes on, in words."""
    match plan:
        case RestoreRecord():
            return f"from step {plan.step}"
        case RestoreStored():
            return f"from {plan.tier}"
        case _:
            return "from the beginning"


def _sources_of(fetch: Fetch) -> set[BadSource]:
    if fetch.live is not None:
        return {BadSource(fetch.live, fetch.ranks, damaged=False)}
    return {BadSource(node, fetch.ranks, fetch.generation) for node, _ in fetch.pieces}
