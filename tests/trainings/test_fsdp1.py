"""FSDP1 (FullyShardedDataParallel): neutral, and exact after deaths, whatever it cuts and however."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from memckpt.config import StorageConfig
from memckpt.errors import UnsupportedError
from memckpt.storage.catalog import read_catalog
from memckpt.storage.export import export
from memckpt.storage.local_store import LocalStore
from tests.support.cluster.waiting import until
from tests.support.trainings import killed_ranks
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.rank_trainings import flat_job_of as job_of


@pytest.mark.promise("exact with FSDP1")
def test_protection_changes_no_bit(lab: Lab) -> None:
    job = job_of(lab)
    assert killed_ranks.run(lab, job) == [0, 0]
    killed_ranks.check_same(killed_ranks.results(job), killed_ranks.reference(lab, job))
    assert "tap: step (flat parameters)" in killed_ranks.logs(lab)
    assert "outside the optimizer" not in killed_ranks.logs(lab)


@pytest.mark.promise("exact with FSDP1")
@pytest.mark.thinned(2)
@pytest.mark.parametrize("redo", ["lazy", "eager"])
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original", "flat"])
def test_resumes_exactly(lab: Lab, redo: str, use_orig_params: bool) -> None:
    job = job_of(lab, redo, use_orig_params=use_orig_params)
    killed_ranks.survives(lab, job, [killed_ranks.Death(1, 4, "backward"), killed_ranks.Death("all", 8, "committed")])


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
    killed_ranks.survives(
        lab, job, [killed_ranks.Death(0, 3, "forward"), killed_ranks.Death(job.world_size - 1, 6, "stepped")]
    )


def halve_at_5(training: Any, step: int) -> None:
    """Change a parameter by hand."""
    if step == 5:
        with torch.no_grad():
            next(param for param in training.whole.parameters() if param.numel()).mul_(0.5)


@pytest.mark.parametrize("use_orig_params", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_change_by_hand_is_noticed(lab: Lab, use_orig_params: bool) -> None:
    job = job_of(lab, use_orig_params=use_orig_params, each_step=halve_at_5)
    killed_ranks.survives(lab, job, [killed_ranks.Death("all", 7, "forward")])
    assert "was changed outside the optimizer" in killed_ranks.logs(lab)


@pytest.mark.slow
def test_resumes_from_storage(lab: Lab) -> None:
    job = replace(job_of(lab), config=config("lazy", storage=StorageConfig(every_steps=5)))
    expected = killed_ranks.reference(lab, job)
    died = replace(job, directory=killed_ranks.fresh_directory(lab), deaths=[killed_ranks.Death("all", 8, "backward")])
    assert killed_ranks.run(lab, died) == [-9, -9]
    store = LocalStore(lab.run_dir / "storage")
    until(lambda: any(one.step == 8 for one in read_catalog(store).complete))
    lab.stop()
    last = killed_ranks.next_attempt(lab, died)
    assert killed_ranks.run(lab, last) == [0, 0]
    killed_ranks.check_verdicts([died, last])
    killed_ranks.check_same(killed_ranks.results(last), expected, 8)
    with pytest.raises(UnsupportedError, match="which only its ranks can put together"):
        export(store, read_catalog(store).complete[0], lab.directory / "exported", "torch")


@pytest.mark.promise("FSDP1 with another number of ranks, or another wrapping")
def test_another_number_of_ranks_is_refused_with_the_remedy(lab: Lab) -> None:
    died = replace(job_of(lab), deaths=[killed_ranks.Death("all", 3, "committed")])
    assert killed_ranks.run(lab, died) == [-9, -9]
    assert 0 not in killed_ranks.run(lab, killed_ranks.next_attempt(lab, died, world_size=3))
    lab.stop()
    assert "fsdp_version: 2 in Accelerate) can be resumed by any number of ranks" in killed_ranks.logs(lab)


@pytest.mark.promise("FSDP1 over a part of the ranks, beside DTensors, or without its outermost wrapper")
def test_a_module_without_its_wrapper_is_refused(lab: Lab) -> None:
    assert killed_ranks.run(lab, job_of(lab, bare=True)) == [3, 3]
    assert "expected the outermost wrapper as the model" in killed_ranks.logs(lab)
