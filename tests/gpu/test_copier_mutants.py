"""The late device finds what it is for: a copier that leaves out one of its waits does not pass its tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memckpt.capture.copier import AcceleratorCopier
from memckpt.session import session
from tests.gpu.cases import BORROWED
from tests.gpu.unsynchronized import Kind, train
from tests.support.late import device as late
from tests.support.late.device import RACE
from tests.support.trainings.engine_child import Control, config, kill_self
from tests.support.trainings.engine_harness import Lab

pytestmark = pytest.mark.usefixtures("only_late")  # a real device is late by luck only


class CopiesTooEarly(AcceleratorCopier):
    """Its stream waits for nothing that makes the sources."""

    def _launch(self, whole: bool = True) -> None:
        self._sources.clear()
        super()._launch(whole)


class LetsSourcesChange(AcceleratorCopier):
    """The training's stream does not wait for copies before it changes what they read."""

    def wait_before_changes(self) -> None:
        self._launch()


class SaysDoneTooEarly(AcceleratorCopier):
    """A commit is sent before its copies are done."""

    def token(self) -> Callable[[], None]:
        super().token()
        return lambda: None


def use(mutant: type[AcceleratorCopier]) -> None:
    session.copier_for = mutant


@pytest.mark.parametrize("mutant", [CopiesTooEarly, LetsSourcesChange])
def test_a_race_is_found(lab: Lab, mutant: type[AcceleratorCopier]) -> None:
    def body() -> None:
        use(mutant)
        train(Kind(), "late", 64, lab.run_dir, "lazy", False, lab.directory / "result")

    child = lab.fork(body, mutant.__name__)
    child.wait()
    races = [line for line in child.log.read_text().splitlines() if RACE in line]
    assert any("copy_" in race for race in races), child.log.read_text()[-3000:]


def test_a_commit_that_is_sent_early_is_found(lab: Lab) -> None:
    def stand_still(control: Control) -> None:
        late.be_slow(others=10**9)

    def die_when_sent(control: Control) -> None:
        assert control.session is not None
        control.session._link.finish_sending()
        kill_self(control)

    (case,) = [case for case in BORROWED if case.name == "adamw"]
    lab.device = "late"
    actions = {("in commit", 9): stand_still, ("after commit", 9): die_when_sent}
    lab.train(case, config(resume_check="off"), actions=actions, prepare=lambda control: use(SaysDoneTooEarly))
    resumed = lab.train(case, config(resume_check="off"), seed=2)
    # Which step is resumed instead depends on which earlier commits were early, too.
    assert "a sample of the state after step 9, from local memory is DIFFERENT" in resumed.log
