"""What is found behind a resume on one rank: the reports of all ranks say so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from memckpt.config import MemckptConfig
from memckpt.session.resume.first_steps import FirstSteps
from memckpt.session.resume.report import RestoreReport
from tests.support.cluster.thread_ranks import on_ranks


@pytest.mark.parametrize("resumed", [True, False])
def test_what_one_rank_finds_until_the_first_commit_corrects_the_reports_of_all(resumed: bool) -> None:
    def begin(ranks: Any) -> tuple[str, ...]:
        unused = SimpleNamespace(compare_gradients=lambda compare: None, carry=lambda reasons: None)
        config = MemckptConfig(resume_check="off")
        training: Any = SimpleNamespace(ranks=ranks, recorder=unused, config=config)
        parts: tuple[Any, ...] = (training, unused, unused, unused)
        steps = FirstSteps(*parts)
        if resumed:
            steps.report = RestoreReport(3, 3, "local memory", 0.1, 0)
            chosen: Any = unused
            steps.begin_comparison(chosen)
            if ranks.rank == 1:
                steps.depart("other data")
        for step in (4, 5):
            steps.check_witness(step)  # asks the others once
        steps.close()
        return steps.report.reasons if steps.report is not None else ()

    assert on_ranks(2, begin) == [("other data",) if resumed else ()] * 2
