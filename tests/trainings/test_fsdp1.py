"""FSDP1 (FullyShardedDataParallel): neutral, and exact after deaths, whatever it cuts and however."""

from __future__ import annotations

import select
import time
from dataclasses import replace
from typing import Any

import pytest

from memckpt.config import StorageConfig
from memckpt.errors import UnsupportedError
from memckpt.storage.catalog import read_catalog
from memckpt.storage.export import export
from memckpt.storage.local_store import LocalStore
from tests.support.trainings.ddp_cases import check_verdicts
from tests.support.trainings.ddp_runs import check_results, die_in_turn
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.fsdp1_cases import FlatJob, run
from tests.support.trainings.rank_group import Death, fresh_directory, results

_references: dict[Any, list[Any]] = {}


def reference(lab: Lab, job: FlatJob) -> list[Any]:
    """The same training undisturbed, without memckpt."""
    key = (job.world_size, job.strategy, job.use_orig_params, job.half, job.accumulate, job.evaluate, job.by_hand_at)
    if key not in _references:
        undisturbed = replace(job, directory=fresh_directory(lab), run_dir=None, deaths=())
        assert run(lab, undisturbed) == [0] * job.world_size
        _references[key] = results(undisturbed)
    return _references[key]


def job_of(lab: Lab, redo: str = "lazy", **settings: Any) -> FlatJob:
    return FlatJob(fresh_directory(lab), lab.run_dir, config(redo), **settings)


def survives(lab: Lab, job: FlatJob, deaths: list[Death], resumed: int) -> None:
    """Each attempt dies as planned, the last one goes on at the expected step, its result is the reference's."""
    expected = reference(lab, job)
    if job.config.redo == "eager" and not job.nodes:
        lab.start_agent()
    check_results(results(die_in_turn(lab, job, deaths, run)), expected, resumed)


def logs(lab: Lab) -> str:
    return "".join(path.read_text() for path in sorted(lab.directory.glob("*.log")))


@pytest.mark.promise("exact with FSDP1")
def test_protection_changes_no_bit(lab: Lab) -> None:
    job = job_of(lab)
    assert run(lab, job) == [0, 0]
    assert results(job) == reference(lab, job)
    assert "tap: step (flat parameters)" in logs(lab)
    assert "outside the optimizer" not in logs(lab)


@pytest.mark.promise("exact with FSDP1")
@pytest.mark.thinned(2)
@pytest.mark.parametrize("redo", ["lazy", "eager"])
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original", "flat"])
def test_resumes_exactly(lab: Lab, redo: str, use_orig_params: bool) -> None:
    job = job_of(lab, redo, use_orig_params=use_orig_params)
    survives(lab, job, [Death(1, 4, "backward"), Death("all", 8, "committed")], 9)


SETTINGS: list[dict[str, Any]] = [
    {"strategy": "SHARD_GRAD_OP"},
    {"strategy": "SHARD_GRAD_OP", "evaluate": "with"},
    {"strategy": "SHARD_GRAD_OP", "evaluate": "without", "use_orig_params": False},
    {"evaluate": "without"},
    {"strategy": "NO_SHARD"},
    {"strategy": "HYBRID_SHARD", "world_size": 4},
    {"accumulate": 3},
    {"accumulate": 2, "use_orig_params": False},
    {"half": True},
    {"half": True, "use_orig_params": False},
    {"nodes": True},
    {"world_size": 3},
    {"world_size": 1},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(f"{k}={v}" for k, v in settings.items()))
def test_each_setting(lab: Lab, settings: dict[str, Any]) -> None:
    job = job_of(lab, **settings)
    survives(lab, job, [Death(0, 3, "forward"), Death(job.world_size - 1, 6, "stepped")], 6)


@pytest.mark.parametrize("use_orig_params", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_change_by_hand_is_noticed(lab: Lab, use_orig_params: bool) -> None:
    job = job_of(lab, use_orig_params=use_orig_params, by_hand_at=5)
    survives(lab, job, [Death("all", 7, "forward")], 7)
    assert "was changed outside the optimizer" in logs(lab)


@pytest.mark.slow
def test_resumes_from_storage(lab: Lab) -> None:
    job = replace(job_of(lab), config=config("lazy", storage=StorageConfig(every_steps=5)))
    expected = reference(lab, job)
    died = replace(job, directory=fresh_directory(lab), deaths=[Death("all", 8, "backward")])
    assert run(lab, died) == [-9, -9]
    store = LocalStore(lab.run_dir / "storage")
    deadline = time.monotonic() + 60
    while not any(one.step == 8 for one in read_catalog(store).complete):
        assert time.monotonic() < deadline
        select.select([], [], [], 0.05)
    lab.stop()
    last = replace(job, directory=fresh_directory(lab), number=1)
    assert run(lab, last) == [0, 0]
    check_verdicts([died, last], died=False)
    check_results(results(last), expected, 8)
    with pytest.raises(UnsupportedError, match="which only its ranks can put together"):
        export(store, read_catalog(store).complete[0], lab.directory / "exported", "torch")


@pytest.mark.promise("FSDP1 with another number of ranks, or another wrapping")
def test_another_number_of_ranks_is_refused_with_the_remedy(lab: Lab) -> None:
    died = replace(job_of(lab), deaths=[Death("all", 3, "committed")])
    assert run(lab, died) == [-9, -9]
    other = replace(died, directory=fresh_directory(lab), deaths=(), number=1, world_size=3)
    assert 0 not in run(lab, other)
    lab.stop()
    assert "fsdp_version: 2 in Accelerate) can be resumed by any number of ranks" in logs(lab)


@pytest.mark.promise("FSDP1 over a part of the ranks, beside DTensors, or without its outermost wrapper")
def test_a_module_without_its_wrapper_is_refused(lab: Lab) -> None:
    assert run(lab, job_of(lab, bare=True)) == [3, 3]
    assert "expected the outermost wrapper as the model" in logs(lab)
