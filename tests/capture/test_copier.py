"""Copies of shards that are made as late as the copier's contract allows; all else is tested so on the late device."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from memckpt.session import link, session
from tests.support.cluster import sharded_cases
from tests.support.cluster.sharded_cases import Setup
from tests.support.faults.deferred_copier import DeferredCopier
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import Death, Job, survives
from tests.support.trainings.rank_trainings import flat_job_of, job_of


class LateThread:
    """A thread that runs only when it is waited for."""

    def __init__(self, target: Callable[[], None], name: str, daemon: bool) -> None:
        self._target: Callable[[], None] | None = target

    def start(self) -> None:
        return

    def join(self) -> None:
        target, self._target = self._target, None
        if target is not None:
            target()


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions copy and send as late as they may: a commit waits for no copies, the next reduction does."""
    monkeypatch.setattr(session, "copier_for", lambda device: DeferredCopier())
    monkeypatch.setattr(link, "threading", types.SimpleNamespace(Thread=LateThread))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "setup",
    [Setup(), pytest.param(Setup(accumulate=2), marks=pytest.mark.slow), Setup(offload=True), Setup(compiled=True)],
    ids=lambda setup: setup.name,
)
def test_reduced_shards(lab: Lab, setup: Setup) -> None:
    job = sharded_cases.job_of(lab, setup, config(resume_check="off"))
    survives(lab, job, [Death(1, 3, "backward"), Death("all", 7, "stepped")])


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original", "flat"])
def test_flat_parameters(lab: Lab, use_orig_params: bool) -> None:
    job = flat_job_of(lab, use_orig_params=use_orig_params)
    job = replace(job, config=config(resume_check="off"))
    survives(lab, job, [Death(1, 4, "backward"), Death("all", 8, "backward")])


STEP = config(tap="step", resume_check="off")
#: Jobs whose commits are sent before they return, as nothing holds their reductions back until then; and others.
JOBS: dict[str, tuple[bool, Callable[[Lab], Job]]] = {
    "ddp-unused": (True, lambda lab: replace(job_of(lab), config=STEP, ddp={"find_unused_parameters": True})),
    "ddp": (False, lambda lab: replace(job_of(lab), config=STEP)),
    "fsdp2": (True, lambda lab: sharded_cases.job_of(lab, Setup(), STEP)),
    "fsdp1": (False, lambda lab: replace(flat_job_of(lab), config=STEP)),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_commit_waits_for_its_copies_only_where_reductions_are_not_held_back(lab: Lab, name: str) -> None:
    """One that did not would let a rank see gradients of the next step while this rank's commit is not sent."""
    at_once, make = JOBS[name]
    steps: list[int] = []

    def look(training: Any, step: int) -> None:
        steps.append(step)
        if training.session is not None and len(steps) > 3:  # the state that is copied first is waited for
            assert (training.session._link._sender is None) == at_once

    survives(lab, replace(make(lab), each_step=look), [Death(1, 4, "backward"), Death("all", 8, "stepped")])
