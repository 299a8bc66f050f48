"""Closed forms agree with simulation within its interval, and with what real runs through failures have measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memckpt_tools.planning.job import Failures, Job
from memckpt_tools.planning.papers import PAPERS
from memckpt_tools.planning.scheme import Scheme, Tier, expect
from memckpt_tools.planning.schemes import make_plan
from memckpt_tools.simulation.failures import Cluster, FailureModel, Lifetime
from memckpt_tools.simulation.replay import Repair, Training
from memckpt_tools.simulation.run import Setup, simulate

LLAMA = Job(
    parameters=405e9, nodes=2048, step_seconds=6.0, mtbf_seconds=11135.0, software_share=0.22,
    disk_bytes_per_second=2e12,
)  # fmt: skip
SMALL = Job(parameters=1e8, nodes=8, step_seconds=1.0, mtbf_seconds=7200.0, software_share=0.6)
REPLICAS = replace(SMALL, replicas=8, gpus_per_node=1, agent_redo_parameters_per_second=1e9)


@pytest.mark.parametrize("job", [LLAMA, SMALL, REPLICAS], ids=["Llama 3", "small", "replicas"])
def test_ettr_of_every_scheme_is_that_of_drawn_failures(job: Job) -> None:
    failures = job.failures
    setup = Setup(
        cluster=Cluster(nodes=job.nodes),
        failures=FailureModel(
            processes=Lifetime(mean_seconds=job.nodes / failures.process),
            nodes=Lifetime(mean_seconds=job.nodes / failures.node),
        ),
        training=Training(step_seconds=job.step_seconds, duration_seconds=job.run_seconds),
        repair=Repair(detection_seconds=job.restart_seconds, replacement_seconds=job.replacement_seconds),
    )
    # Without tiers a scheme's end counts, not its progress.
    rows = [row for row in make_plan(job, PAPERS).rows if row.scheme.tiers and not row.refused]
    drawn = simulate(setup, [row.scheme for row in rows], repetitions=40, seed=1, confidence=0.99)
    for row, found in zip(rows, drawn, strict=True):
        assert row.expectation.ettr == pytest.approx(found.ettr.mean, abs=found.ettr.half_width), row.scheme.name


@pytest.mark.parametrize(
    ("process", "lost", "cluster", "real"), [(3, 4, 2, 0.782), (3, 9, 0, 0.841)], ids=["trace 1", "trace 2"]
)
def test_ettr_is_that_of_real_runs_through_failures(process: int, lost: int, cluster: int, real: float) -> None:
    """benchmarks/results/simulated_run.md: failures in 180 s, and what detection, restores and lags took there."""
    scheme = Scheme(
        name="measured",
        overhead=0.099,
        tiers=(
            Tier(name="memory", every_steps=1, lag_steps=0, restore_seconds=0.70, rebuild_seconds=0.47),
            Tier(
                name="peers", every_steps=1, lag_steps=0.11, restore_seconds=1.53, rebuild_seconds=1.66, group_nodes=4,
                tolerates=2,
            ),
            Tier(name="storage", every_steps=50, lag_steps=0.87, restore_seconds=2.35, survives_cluster=True),
        ),
    )  # fmt: skip
    failures = Failures(process=process / 180, node=lost / 180, cluster=cluster / 180)
    found = expect(
        scheme, failures, step_seconds=0.1684, run_seconds=180, restart_seconds=0.05, replacement_seconds=0.34
    )
    assert found.ettr == pytest.approx(real, rel=0.05)
