"""The choice between held state and a checkpoint file of the framework's own."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest

from memckpt.config import ResumeChoice
from memckpt.user_file import UserFile, connect
from memckpt.user_messages import Messages


@dataclass(frozen=True)
class Held:
    newest_step: int
    step: int


class Sessions:
    """Opens sessions in which step 13 is held, and restored is the state before it: its step is repeated."""

    def __init__(self) -> None:
        self.asked: list[ResumeChoice | int] = []
        self.held: Held | None = Held(13, 12)

    def attach(self, resume: ResumeChoice | int) -> Sessions:
        self.asked.append(resume)
        if resume == "never":
            self.held = None
        return self

    def close(self, finished: bool) -> None:
        assert not finished


@pytest.mark.parametrize(("step", "asked"), [(12, ["auto"]), (13, ["auto"]), (14, ["auto", "never"])])
def test_a_file_counts_as_newer_than_the_held_step_and_not_than_the_one_before_it(
    step: int, asked: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    sessions = Sessions()
    connect(
        sessions.attach, "auto", UserFile("f.ckpt", step, "ckpt_path"), "runs/a", Messages(logging.getLogger(), True)
    )
    assert sessions.asked == asked
    newer = len(asked) > 1
    assert ("is older (step 13)" if newer else "continues from held step 13, and not from f.ckpt") in caplog.text
