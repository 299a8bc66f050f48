"""Exact resume with Lightning's strategies that cut the model: killed anywhere, a run ends as if it never had been."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lightning_cases import Kill
from tests.lightning_data import Case
from tests.lightning_runs import Run, Server, differences
from tests.test_lightning_exact import finish, interrupted

FSDP2 = Case("fsdp2", strategy="fsdp2")
CASES = [
    Case("tensor_parallel", strategy="tp"),
    Case("fsdp1", strategy="fsdp1"),
    Case(
        "fsdp2_accumulation_clipped", strategy="fsdp2", trainer={"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
    ),
    Case("fsdp2_hooks", strategy="fsdp2", user_hooks=True),
    Case("fsdp2_bf16", strategy="fsdp2", trainer={"precision": "bf16-mixed"}),
    Case("fsdp2_manual", strategy="fsdp2", manual=True),
    Case("fsdp1_accumulation_clipped", strategy="fsdp1", trainer={"accumulate_grad_batches": 3}),
    Case("fsdp1_hooks", strategy="fsdp1", user_hooks=True),
]
#: The last rank dies in the middle of a step, in a validation, and in the first batch of the next epoch.
KILLS: list[Kill] = [("before_optimizer", 3), ("validation_step", 2), ("callback_batch_start", 3)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    clean = Server()
    yield clean
    clean.close()


def assert_exact(server: Server, case: Case, kills: list[Kill], directory: Path) -> None:
    expected: dict[str, Any] = finish(server, Run(case, directory / "plain", protected=False, ranks=2))
    found = interrupted(server, kills, case, directory / "killed", ranks=2)
    assert {rank: differences(expected[rank], found[rank]) for rank in expected} == {"rank 0": [], "rank 1": []}


def test_fsdp2(server: Server, tmp_path: Path) -> None:
    assert_exact(server, FSDP2, KILLS, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_case(case: Case, server: Server, tmp_path: Path) -> None:
    assert_exact(server, case, KILLS, tmp_path)
