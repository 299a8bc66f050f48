"""The rank state: names that are held and names that are registered."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memckpt.capture.attributes import FoundObjects
from memckpt.capture.copier import HostCopier
from memckpt.errors import ConfigurationError
from memckpt.session.rank_state import ACCEPTED, EARLIER, RankState
from memckpt.session.resume.report import RestoreReport, ResumeCheck


class Counter:
    """An object with a state."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.fixture
def rank_state() -> RankState:
    live: Any = None  # not used by what is tested here
    return RankState(live, HostCopier())


def test_the_held_names_are_loaded_and_nothing_is_said(rank_state: RankState, caplog: pytest.LogCaptureFixture) -> None:
    counter = Counter()
    rank_state.register("counter", counter)
    rank_state.provide("figure", lambda: 1)
    with caplog.at_level(logging.WARNING):
        assert rank_state.load_registered({"counter": {"at": 7}, "figure": 1}) == ""
    assert counter.at == 7
    assert not caplog.records


def test_attributes_of_a_protected_optimizer_are_refused_with_what_carries_them() -> None:
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1) for _ in range(2)]
    live: Any = SimpleNamespace(optimizers=optimizers[:1])
    rank_state = RankState(live, HostCopier())
    for each in optimizers:
        vars(each)["boost"] = 1.0
    with pytest.raises(ConfigurationError, match=r"the optimizer SGD, .* redo='snapshot'"):
        rank_state.register("opt", optimizers[0], ["boost"])
    rank_state.register("opt", optimizers[1], ["boost"])  # which steps nothing that is protected


def test_other_names_than_the_held_ones_are_named(rank_state: RankState) -> None:
    counter = Counter()
    rank_state.register("lr_sched", counter)
    said = rank_state.load_registered({"sched": {"at": 7}})
    assert counter.at == 0
    assert "['sched'], found ['lr_sched']: 'sched' is not restored, and 'lr_sched' starts as it is" in said


@pytest.mark.promise("an optimizer that `attach()` was not given; a scheduler of torch that was not registered")
def test_a_run_that_is_not_exact_says_so_once_and_hands_it_on(
    rank_state: RankState, caplog: pytest.LogCaptureFixture
) -> None:
    rank_state.inexact("the scheduler is not registered")
    rank_state.inexact("the scheduler is not registered")
    assert caplog.messages == ["memckpt: a resume of this run will not be exact: the scheduler is not registered"]
    assert rank_state.take_over({"inexact": ["a stream"]}) == ("a stream",)
    assert RestoreReport(1, 1, "storage", 0.1, 0).exact
    assert not RestoreReport(1, 1, "storage", 0.1, 0).because("", "a stream").exact
    report = RestoreReport(1, 1, "storage", 0.1, 0, check=ResumeCheck("witness"))
    report.check.settle("different", "step 2 differs")
    assert (report.exact, report.reasons) == (False, ("step 2 differs",))


class Refusing(Counter):
    """An object whose methods are there and raise."""

    def __init__(self, kept: bool = False) -> None:
        super().__init__()
        self.kept = kept

    def state_dict(self) -> dict[str, int]:
        if not self.kept:
            raise NotImplementedError("no state")
        return super().state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise ValueError("not that one")


def test_objects_that_nobody_has_named_keep_no_training_from_its_steps() -> None:
    """Their state_dict() may raise, from the start or later; so may their load_state_dict()."""
    model = torch.nn.Module()
    held = Refusing(kept=True)
    vars(model).update(never=Refusing(), held=held)
    said: list[str] = []
    objects = FoundObjects(lambda: {"model": model}, lambda: (), said.append, "name {}")
    state = objects.state_dict()
    assert list(state) == ["model.held"]
    assert not said
    objects.load_state_dict(state)
    held.kept = False
    assert objects.state_dict() == {}
    assert [one.partition("raises ")[2] for one in said] == ["ValueError: not that one", "no state"]


def test_a_reason_found_before_the_first_commit_corrects_the_report(rank_state: RankState) -> None:
    found: list[str] = []
    rank_state.correct = found.append
    rank_state.inexact("one")
    rank_state.correct = None
    rank_state.inexact("two")
    assert found == ["one"]
    assert rank_state.reasons == ("one", "two")


def test_what_a_user_goes_on_with_is_accepted(rank_state: RankState) -> None:
    rank_state.carry([EARLIER + "a check", "a loader"])
    rank_state.accept([EARLIER + "a check", "a loader", "a sample"])
    assert rank_state.reasons == ("a loader", ACCEPTED + "a check", ACCEPTED + "a sample")
