"""Exact resume with Lightning's strategies that cut the model: killed anywhere, a run ends as if it never had been."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainings.lightning_cases import Kill
from tests.support.trainings.lightning_data import Case
from tests.support.trainings.lightning_runs import Run, Server, differences, finish, interrupted

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


@pytest.mark.slow
def test_fsdp2(server: Server, tmp_path: Path) -> None:
    assert_exact(server, FSDP2, KILLS[:2], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [FSDP2, *CASES], ids=lambda case: case.name)
def test_each_case(case: Case, server: Server, tmp_path: Path) -> None:
    assert_exact(server, case, KILLS, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_behind_the_same_samples(
    before: int, after: int, server: Server, tmp_path: Path
) -> None:
    """Its shards are cut anew; not bit for bit, and said so."""
    assert server.run(Run(FSDP2, tmp_path, kill=("before_optimizer", 5), ranks=before, storage=True))[-1] == -9
    (tmp_path / "losses.txt").unlink()
    found = finish(server, Run(FSDP2, tmp_path, ranks=after, storage=True))
    batches = 4 * before // after
    log = (tmp_path / "log.txt").read_text()
    assert f"{before} ranks had trained 4 batches of this epoch each; {after} ranks resume after {batches}" in log
    per_epoch = {1: 11, 2: 6}[after]
    for outcome in [found] if after == 1 else list(found.values()):
        assert outcome["global_step"] == 4 + (per_epoch - batches) + 2 * per_epoch


@pytest.mark.slow
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_file_that_the_user_passes_and_what_is_held(resume: str, server: Server, tmp_path: Path) -> None:
    """Lightning loads such a file behind the strategy's setup, when memckpt has decided already."""
    plain = finish(server, Run(FSDP2, tmp_path / "plain", protected=False, ranks=2))["rank 0"]
    killed = Run(FSDP2, tmp_path / "killed", kill=("callback_batch_start", 9), ranks=2)
    assert server.run(killed)[-1] == -9
    file = tmp_path / "killed" / "files" / "last.ckpt"
    assert (file / "meta.pt").is_file()
    (tmp_path / "killed" / "losses.txt").unlink()
    last = Run(FSDP2, tmp_path / "killed", ranks=2, resume=resume, checkpoint=str(file))
    found = finish(server, last)["rank 0"]
    text = last.log.read_text()
    if resume == "auto":
        assert f"training continues from held step 8, and not from {file} at step 6" in text
        assert differences(plain, found) == []
    else:
        assert "Restored all states from the checkpoint" in text
        assert found["global_step"] == plain["global_step"]
    # What was trained on, and not again but for the step that is repeated as a proof.
    assert min(batch for epoch, batch in found["losses"] if epoch == 1) == (1 if resume == "auto" else 0)
    assert not any(epoch == 0 for epoch, _ in found["losses"])
