"""Exact resume with Lightning's strategies that cut the model: killed anywhere, a run ends as if it never had been."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_programs import Kill, finish, reference
from tests.support.trainings.lightning_data import Case
from tests.support.trainings.lightning_runs import LightningRun, check_exact, differences, interrupted, train

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


def check(lab: Lab, case: Case, kills: list[Kill], directory: Path) -> None:
    expected = reference(lab, train, LightningRun(case, directory, ranks=2))
    check_exact(expected, interrupted(lab, kills, case, directory / "killed", ranks=2))


@pytest.mark.slow
def test_fsdp2(lab: Lab, tmp_path: Path) -> None:
    check(lab, FSDP2, KILLS[:2], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [FSDP2, *CASES], ids=lambda case: case.name)
def test_each_case(case: Case, lab: Lab, tmp_path: Path) -> None:
    check(lab, case, KILLS, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_file_that_the_user_passes_and_what_is_held(resume: str, lab: Lab, tmp_path: Path) -> None:
    """Lightning loads such a file behind the strategy's setup, when memckpt has decided already."""
    plain = reference(lab, train, LightningRun(FSDP2, tmp_path, ranks=2)).outcomes[0]
    finish(lab, train, LightningRun(FSDP2, tmp_path / "killed", kill=("callback_batch_start", 9), ranks=2))
    file = tmp_path / "killed" / "files" / "last.ckpt"
    assert (file / "meta.pt").is_file()
    last = LightningRun(FSDP2, tmp_path / "killed", ranks=2, resume=resume, checkpoint=str(file))
    ended = finish(lab, train, last)
    found, text = ended.outcomes[0], ended.logs[0]
    if resume == "auto":
        assert f"training continues from held step 8, and not from {file} at step 6" in text
        assert differences(plain, found) == []
    else:
        assert "Restored all states from the checkpoint" in text
        assert found["global_step"] == plain["global_step"]
    # What was trained on, and not again but for the step that is repeated as a proof.
    assert min(batch for epoch, batch in found["losses"] if epoch == 1) == (1 if resume == "auto" else 0)
    assert not any(epoch == 0 for epoch, _ in found["losses"])
