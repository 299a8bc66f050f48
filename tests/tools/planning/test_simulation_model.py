"""Any trace on any tiers, beside a model that takes step by step and holds every state by its number."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memckpt_tools.planning.scheme import Scheme, Tier
from memckpt_tools.simulation.failures import KINDS, Cluster, FailureModel, Failures, Lifetime
from memckpt_tools.simulation.replay import Repair, Training, replay
from memckpt_tools.simulation.run import Setup, simulate
from tests.support.planning.tiers import disk


@dataclass
class _Model:
    """One tier, with all states that it holds or that are on their way, by number."""

    tier: Tier
    nodes: int
    held: set[int] = field(default_factory=set)
    coming: set[int] = field(default_factory=set)
    empty: set[int] = field(default_factory=set)
    whole: float = 0.0
    lost: bool = False

    def step(self, step: int) -> None:
        """A step is complete."""
        if step % self.tier.every_steps == 0:
            self.coming.add(step)
        there = {state for state in self.coming if state + self.tier.lag_steps <= step}
        self.coming -= there
        self.held |= there

    def strike(self, when: float, nodes: range) -> int:
        """The newest state that survives; -1: none."""
        if not self.tier.survives_cluster:
            if when >= self.whole:
                self.lost, self.empty = False, set()
            self.empty |= set(nodes)
            size = self.tier.group_nodes or self.nodes
            count = self.nodes // size
            members = [[n for n in self.empty if (n - self.nodes) % count == group] for group in range(count)]
            self.lost = self.lost or max(map(len, members)) > self.tier.tolerates
            if self.lost:
                return -1
        return max(self.held, default=-1)


def step_by_step(
    scheme: Scheme, failures: Failures, cluster: Cluster, training: Training, repair: Repair
) -> tuple[int, int, list[int]]:
    """Steps at the end, steps lost, and recoveries; all times are whole steps, which take one second."""
    models = [_Model(tier, cluster.nodes) for tier in scheme.tiers]
    steps = lost_steps = 0
    recoveries = [0] * (len(models) + 1)
    resumed = complete = 0.0
    pending = list(zip(failures.seconds.tolist(), failures.kinds.tolist(), failures.units.tolist(), strict=True))
    for second in range(int(training.duration_seconds) + 1):
        if second > resumed:
            steps += 1
            for model in models:
                model.step(steps)
        while pending and pending[0][0] == second < training.duration_seconds:
            when, kind, unit = pending.pop(0)
            nodes = cluster.nodes_of(kind, unit)
            found = [model.strike(when, nodes) for model in models]
            best = max([*found, -1])
            chosen = found.index(best) if best > -1 else len(models)
            best = max(best, 0)
            recoveries[chosen] += 1
            lost_steps += steps - best
            steps = best
            noticed = when + repair.detection_seconds
            if nodes:
                complete = noticed + repair.replacement_seconds
            restore = models[chosen].tier.restore_seconds if chosen < len(models) else repair.start_seconds
            resumed = max(noticed, complete) + restore
            source = False
            for model in models:
                model.whole = resumed + model.tier.rebuild_seconds
                if model.lost:
                    model.held = set()
                if model.lost or not source:
                    model.coming = set()
                else:  # what was on its way and is newer than what training goes on from is made again
                    model.coming = {state for state in model.coming if state <= best}
                source = not model.lost
    return steps, lost_steps, recoveries


whole = st.integers(0, 30).map(float)
tiers = st.builds(
    lambda every, lag, restore, rebuild, group, durable: Tier(
        name="", every_steps=every, lag_steps=lag, restore_seconds=restore, rebuild_seconds=rebuild,
        group_nodes=0 if durable else group[0], tolerates=0 if durable else group[1], survives_cluster=durable,
    ),
    st.integers(1, 12), st.integers(0, 15), whole, whole,
    st.sampled_from([(0, 0), (1, 0), (2, 0), (2, 1), (3, 1), (3, 2), (4, 2), (6, 3), (7, 6)]), st.booleans(),
)  # fmt: skip
events = st.lists(
    st.tuples(st.integers(0, 160), st.sampled_from(KINDS), st.integers(0, 6)), max_size=14
).map(sorted)  # fmt: skip


def named(listed: list[Tier]) -> tuple[Tier, ...]:
    return tuple(msgspec.structs.replace(tier, name=f"tier {number}") for number, tier in enumerate(listed))


SEVEN = Cluster(nodes=7, nodes_per_rack=2, racks_per_zone=2)
repairs = st.builds(Repair, detection_seconds=whole, replacement_seconds=whole, start_seconds=whole)


def a_trace(rows: list[tuple[int, str, int]]) -> Failures:
    sizes = [SEVEN.size(kind) or 0 for kind in range(len(KINDS))]
    return Failures(
        np.array([float(row[0]) for row in rows]),
        np.array([KINDS.index(row[1]) for row in rows], dtype=np.int64),
        np.array([row[2] // sizes[KINDS.index(row[1])] for row in rows], dtype=np.int64),
    )


def own(every: int, lag: int = 0) -> Tier:
    return Tier(name="", every_steps=every, lag_steps=lag, restore_seconds=0)


def shared(group: int, tolerates: int, *, every: int = 1, rebuild: float = 0) -> Tier:
    return Tier(
        name="", every_steps=every, lag_steps=0, restore_seconds=0, group_nodes=group, tolerates=tolerates,
        rebuild_seconds=rebuild,
    )  # fmt: skip


# Twice at one moment, where a tier held more than it would hold by now.
@example(listed=[own(1, 2), own(1, 1)], rows=[(3, "process", 0), (3, "process", 0)], repair=Repair())
# State 20 was on its way to disk from the memory that is lost; step 22 comes from peers; disk has state 10, and no 20.
@example(listed=[shared(7, 1), own(1), disk(10, 0, 5)], rows=[(22, "node", 0), (26, "cluster", 0)], repair=Repair())
# Zone 0 takes what states come to disk from, node 4 the peers; training goes on from state 10, and disk gets state 20.
@example(
    listed=[shared(7, 4, rebuild=30), shared(2, 1, every=50), disk(10, 0, 5)],
    rows=[(22, "zone", 0), (24, "node", 4), (40, "cluster", 0)],
    repair=Repair(),
)
@settings(deadline=None)
@given(listed=st.lists(tiers, max_size=4), rows=events, repair=repairs)
def test_a_replay_is_what_goes_on_step_by_step(
    listed: list[Tier], rows: list[tuple[int, str, int]], repair: Repair
) -> None:
    scheme, training = (
        Scheme(name="any", overhead=0, tiers=named(listed)),
        Training(step_seconds=1, duration_seconds=150),
    )
    outcome = replay(scheme, a_trace(rows), SEVEN, training, repair)
    expected = step_by_step(scheme, a_trace(rows), SEVEN, training, repair)
    assert (outcome.steps, outcome.lost_steps, list(outcome.recoveries)) == expected


@settings(deadline=None)
@given(
    listed=st.lists(tiers, max_size=4),
    repair=st.builds(
        Repair, detection_seconds=st.floats(0, 900), replacement_seconds=st.floats(0, 900),
        repair_seconds=st.floats(0, 1e5), spares=st.none() | st.integers(0, 3), start_seconds=st.floats(0, 900),
    ),
    overhead=st.floats(0, 3), step_seconds=st.floats(0.01, 60), mean=st.floats(200, 1e6), seed=st.integers(0, 99),
)  # fmt: skip
def test_times_add_up(
    listed: list[Tier], repair: Repair, overhead: float, step_seconds: float, mean: float, seed: int
) -> None:
    model = FailureModel(
        nodes=Lifetime(7 * mean), processes=Lifetime(7 * mean), racks=Lifetime(20 * mean), zones=Lifetime(1e6)
    )
    training = Training(step_seconds=step_seconds, duration_seconds=1e5)
    setup = Setup(cluster=SEVEN, failures=model, training=training, repair=repair)
    scheme = Scheme(name="any", overhead=overhead, tiers=named(listed))
    (summary,) = simulate(setup, [scheme], repetitions=2, seed=seed)
    for outcome in summary.outcomes:
        assert outcome.duration_seconds == pytest.approx(1e5)
        times = (outcome.useful_seconds, outcome.overhead_seconds, outcome.lost_seconds, outcome.down_seconds)
        assert min(times) >= -1e-6
        assert 0 <= outcome.ettr <= 1
        assert outcome.steps >= 0
        assert outcome.lost_steps >= 0
        assert sum(outcome.recoveries) == sum(outcome.failures)
        assert outcome.lost_seconds == pytest.approx(outcome.lost_steps * step_seconds * (1 + overhead))
