"""Exact resume with Accelerate: killed anywhere, any number of times, a run must end as if it never had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.accelerate_runs import Case, Kill, Run, survives
from tests.engine_harness import Lab

PLAIN = Case("plain")
PERSISTENT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}

CASES = [
    PLAIN,
    Case("seedable", loading={"use_seedable_sampler": True}),
    Case("not_seedable", loading={"use_seedable_sampler": False}),
    Case("uneven", samples=42),
    Case("dispatch", samples=42, loading={"dispatch_batches": True}),
    Case("split", loading={"split_batches": True}),
    Case("accumulate", accumulate=3),
    Case("accumulate_seedable", samples=42, accumulate=3, loading={"use_seedable_sampler": True}),
    Case("workers", loader={"num_workers": 2}),
    Case("persistent_workers", loader=PERSISTENT),
    Case("stateful", loading={"use_stateful_dataloader": True}),
    Case("stateful_seedable", loading={"use_stateful_dataloader": True, "use_seedable_sampler": True}),
    Case("stateful_own", loading={"use_stateful_dataloader": True}, own_loader=True),
    Case("stateful_workers", loading={"use_stateful_dataloader": True}, loader={"num_workers": 2}),
    Case("stateful_persistent", loading={"use_stateful_dataloader": True}, loader=PERSISTENT),
    Case("bf16", accelerator={"mixed_precision": "bf16"}),
    Case("scaler", scaler=True),
    Case("evaluated_inside", evaluate_every=4),
    Case("limited", limit=7),
    Case("limited_persistent", limit=7, loader=PERSISTENT),
    Case("stream", stream=True),
    Case("stream_workers", stream=True, loader={"num_workers": 2}),
    Case("two_loaders", two=True),
    Case("drop_last", samples=42, loader={"drop_last": True}),
    Case("no_shuffle_rng", accelerator={"rng_types": ["torch", "generator"]}),
]
POINTS: list[Kill] = [("backward", 5), ("committed", 7), ("epoch end", 1), ("batch", 2), ("stepped", 9), ("committed", 2), ("evaluated", 1), ("commit", 1), ("committed", 1)]


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Undisturbed trainings, one for each case and number of ranks."""
    return tmp_path_factory.mktemp("references")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(lab: Lab, references: Path, case: Case) -> None:
    survives(lab, Run(case, lab.directory / "job"), POINTS[:4], references)


RANKED = [
    PLAIN,
    Case("uneven", samples=42),
    Case("seedable", loading={"use_seedable_sampler": True}),
    Case("dispatch", samples=42, loading={"dispatch_batches": True}),
    Case("dispatch_odd", samples=43, loading={"dispatch_batches": True}),
    Case("dispatch_workers", samples=43, loading={"dispatch_batches": True}, loader=PERSISTENT),
    Case("dispatch_split", samples=43, loading={"dispatch_batches": True, "split_batches": True}),
    Case("split", loading={"split_batches": True}),
    Case("accumulate", samples=42, accumulate=2),
    Case("persistent_workers", loader=PERSISTENT),
    Case("stateful", loading={"use_stateful_dataloader": True}),
    Case("stream", stream=True),
    Case("rng_types", accelerator={"rng_types": ["torch", "generator"]}),
    Case("limited", samples=43, limit=4),
]
RANKED_POINTS: list[Kill] = [("backward", 3), ("committed", 3), ("epoch end", 1), ("batch", 2)]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("case", RANKED, ids=str)
def test_two_ranks(lab: Lab, references: Path, case: Case, victim: int) -> None:
    survives(lab, Run(case, lab.directory / "job", ranks=2, victim=victim), RANKED_POINTS, references)
