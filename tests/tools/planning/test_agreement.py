"""Closed forms and simulation agree within the simulation's interval."""

from __future__ import annotations

import pytest

from memckpt_tools.planning.job import Job
from memckpt_tools.planning.schemes import make_plan
from memckpt_tools.simulation.failures import Cluster, FailureModel, Lifetime
from memckpt_tools.simulation.replay import Repair, Training
from memckpt_tools.simulation.run import Setup, simulate

LLAMA = Job(
    parameters=405e9, nodes=2048, step_seconds=6.0, mtbf_seconds=11135.0, software_share=0.22,
    disk_bytes_per_second=2e12,
)  # fmt: skip
SMALL = Job(parameters=1e8, nodes=8, step_seconds=1.0, mtbf_seconds=7200.0, software_share=0.6)


@pytest.mark.parametrize("job", [LLAMA, SMALL], ids=["Llama 3", "small"])
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
    rows = [row for row in make_plan(job).rows if row.scheme.tiers]  # without tiers its end counts, not its progress
    drawn = simulate(setup, [row.scheme for row in rows], repetitions=40, seed=1, confidence=0.99)
    for row, found in zip(rows, drawn, strict=True):
        assert row.expectation.ettr == pytest.approx(found.ettr.mean, abs=found.ettr.half_width), row.scheme.name
