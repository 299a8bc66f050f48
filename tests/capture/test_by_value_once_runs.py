"""An average that the ranks of a node hold once: killed, resumed, and no longer alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memckpt.capture import spec_request
from memckpt.config import StorageConfig
from memckpt.processes.address import AgentAddress
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import (
    Death,
    check_same,
    fresh_directory,
    next_attempt,
    noted,
    reference,
    results,
    run,
    survives,
)
from tests.support.trainings.rank_trainings import STEPS, DdpJob

#: Bytes of the weights in the average of a test's model; biases are small ones.
AVERAGE = 4 * (16 * 96 + 96 * 96 + 96 * 4)


@pytest.fixture(autouse=True)
def share_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Averages of the size of a test's model are treated as large ones are."""
    monkeypatch.setattr(spec_request, "SHARED_ABOVE_BYTES", 1000)
    monkeypatch.setattr(spec_request, "SMALL_BY_VALUE_BYTES", 0)


def job_of(lab: Lab, flip: tuple[int, int] | None = None, **settings: Any) -> DdpJob:
    return DdpJob(fresh_directory(lab), lab.run_dir, config("lazy"), averages=True, flip=flip, **settings)


@pytest.mark.promise(
    "averages that a node holds once are equal on all its ranks in every promised record; a rank that differs costs"
    " no restorable record, and gets its own values back"
)
def test_each_rank_gets_it_back_and_the_repeated_step_is_equal(lab: Lab) -> None:
    job = job_of(lab)
    last = survives(lab, job, [Death("all", 5, "committed"), Death(1, 8, "stepped"), Death(0, 10, "backward")])
    assert all({each["verdict"] for each in rank} == {"equal"} for rank in noted(last, "checked"))
    for rank in noted(last, "shared"):
        assert {"average.middle.weight", "average.first.weight"} <= set(rank[-1]["names"])
        assert all(not each["apart"] for each in rank)
        assert rank[-1]["ring"] == 3 + 1


def test_memory_has_it_once(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots of a node, as they were mapped: with the average once, and with each rank's own."""
    held = []
    for above in (1000, 1 << 30):
        monkeypatch.setattr(spec_request, "SHARED_ABOVE_BYTES", above)
        last = survives(lab, job_of(lab), [Death("all", 8, "committed")], [9])
        held.append(noted(last, "shared")[0][-1]["nbytes"])
    # Each of the four slots has the average once less, but for the digests and what is lost to pages.
    assert abs(held[1] - held[0] - 4 * AVERAGE) <= 4 * 4096


@pytest.mark.promise(
    "averages that a node holds once are equal on all its ranks in every promised record; a rank that differs costs"
    " no restorable record, and gets its own values back"
)
@pytest.mark.promise(
    "all ranks of a node, just after ranks that share an average or a large buffer began to differ in it"
)
@pytest.mark.parametrize(
    ("death", "resumed"),
    [
        (Death("all", 6, "committed"), 6),  # the record of the flip is refused
        (Death("all", 7, "stepped"), 6),
        (Death("all", 7, "committed"), 8),  # a generation begins with the record behind it
        (Death("all", 10, "committed"), 11),
    ],
    ids=["at-the-flip", "before-it-shows", "as-it-shows", "later"],
)
def test_a_bit_that_flips_on_one_rank_is_that_rank_s_own(lab: Lab, death: Death, resumed: int) -> None:
    last = survives(lab, job_of(lab, flip=(1, 6)), [death], [resumed])
    for rank in noted(last, "shared"):
        assert rank[-1]["apart"] == ["average.middle.weight"]
        assert "average.first.weight" in rank[-1]["names"]
        assert "average.middle.weight" not in rank[-1]["names"]


@pytest.mark.parametrize("flips", [False, True], ids=["agree", "disagree"])
def test_the_final_state_goes_to_storage_if_ranks_agree_on_it(lab: Lab, flips: bool) -> None:
    """What is held once belongs to all of them."""
    storage = StorageConfig(every_steps=1000, min_seconds=3600)
    job = job_of(lab, flip=(1, STEPS - 1) if flips else None)
    job = replace(job, config=config("lazy", storage=storage))
    assert run(lab, job) == [0, 0]
    log = AgentAddress.of(lab.run_dir).log_path.read_text()
    stored = STEPS - flips
    assert f"step {stored} is in storage" in log
    assert (f"record {STEPS} does not go to storage: its ranks do not agree" in log) is flips
    if not flips:
        again = next_attempt(lab, job, last_step=STEPS + 2)
        assert run(lab, again) == [0, 0]
        check_same(results(again), reference(lab, again), STEPS)
