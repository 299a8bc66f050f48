"""Faults planted in capture, redo and restore are found: at the next resume, and by the auditor while training runs."""

from __future__ import annotations

import re
from unittest.mock import patch

import pytest

from tests.support.faults.frozen import differences
from tests.support.trainings import planted_faults
from tests.support.trainings.engine_audits import audit_of, wait_for_audit
from tests.support.trainings.engine_child import Control, config, kill_self
from tests.support.trainings.engine_harness import Ended, Lab, collect

#: All anchors and steps that a resume from here uses are captured by faulty code.
DEATH = planted_faults.SINCE + planted_faults.PERIOD
#: Why generations begin in this training without a fault.
GROWTH = "took more steps in one record|that was frozen has a gradient now"


def resume_with(
    lab: Lab,
    check: str,
    capture: planted_faults.Fault | None = None,
    restore: planted_faults.Fault | None = None,
    redo: str = "lazy",
) -> tuple[Ended, Ended]:
    """A training that is killed, and the one that goes on from there, with a fault in one of them."""
    settings = config(redo, planted_faults.PERIOD, resume_check=check)
    died = lab.train(planted_faults.CASE, settings, prepare=capture, actions={("after commit", DEATH): kill_self})
    return died, collect(*lab.begin(planted_faults.CASE, settings, seed=4, prepare=restore))


def found(lab: Lab, died: Ended, resumed: Ended) -> str:
    """How the fault was found; empty if it was not."""
    if resumed.code:
        lab.stop()
        # What is not even whole is refused, or said before the script's own step fails on it.
        return "refused" if re.search("DamagedStateError: restore: expected|DIFFERENT: the state", resumed.log) else ""
    if resumed.verdict[0] == "different" or not resumed.of("restored")[0]["exact"]:
        return "said"
    if differences(lab.reference(planted_faults.CASE).outcome, resumed.outcome):
        return ""
    if resumed.restored_step != DEATH:
        return "another state was resumed"
    begun = re.findall("the state is copied anew: (.*)", died.log)
    return "" if all(re.search(GROWTH, reason) for reason in begun) else "in training"


@pytest.mark.parametrize("check", ["witness", "replay"])
def test_without_a_fault_nothing_is_found(lab: Lab, check: str) -> None:
    died, resumed = resume_with(lab, check)
    assert resumed.restored_step == DEATH
    assert found(lab, died, resumed) == "", resumed.log
    assert resumed.verdict[0] == "equal"
    lab.check_same(planted_faults.CASE, resumed)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", planted_faults.CAPTURE)
def test_a_fault_in_capture_is_found_at_the_next_resume(lab: Lab, name: str) -> None:
    died, resumed = resume_with(lab, "witness", capture=planted_faults.CAPTURE[name])
    assert found(lab, died, resumed), resumed.log


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", planted_faults.RESTORE)
def test_a_fault_in_a_restore_is_found_by_its_sample(lab: Lab, name: str) -> None:
    died, resumed = resume_with(lab, "witness", restore=planted_faults.RESTORE[name])
    assert found(lab, died, resumed), resumed.log


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", planted_faults.HOST)
def test_what_a_sample_does_not_see_is_found_in_the_first_resume(lab: Lab, name: str) -> None:
    died, resumed = resume_with(lab, "replay", restore=planted_faults.HOST[name])
    assert found(lab, died, resumed), resumed.log


@pytest.mark.parametrize("name", ["none", *planted_faults.CAPTURED])
def test_a_fault_in_captured_state_is_found_by_its_sample(lab: Lab, name: str) -> None:
    _, resumed = resume_with(lab, "witness", *planted_faults.CAPTURED.get(name, (None, None)), redo="snapshot")
    assert resumed.verdict[0] == ("equal" if name == "none" else "different"), resumed.log
    if name == "none":
        lab.check_same(planted_faults.CASE, resumed)


def audited(lab: Lab, fault: planted_faults.Fault | None = None) -> int | None:
    """Step up to which steps had been redone when the auditor found something, or could not go on; None: it has not."""

    def die_of_it(control: Control) -> None:
        wait_for_audit(control)
        audit = audit_of(control)
        if audit is not None and (audit.findings or audit.problem):
            control.journal.note("found", record=control.step if audit.problem else audit.record)
            kill_self(control)

    settings = config("lazy", planted_faults.PERIOD, audit_budget=1.0, resume_check="off")
    actions = {("after commit", step): die_of_it for step in range(1, planted_faults.LONG.steps)}
    ended = lab.train(planted_faults.LONG, settings, prepare=fault, actions=actions)
    lab.stop()
    return next((each["record"] for each in ended.of("found")), None)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", [one for one in planted_faults.CAPTURE if one not in planted_faults.NOT_REDONE])
def test_a_fault_in_capture_is_found_while_training_runs(lab: Lab, name: str) -> None:
    lab.start_agent()
    step = audited(lab, planted_faults.CAPTURE[name])
    assert step is not None
    assert (
        planted_faults.SINCE - 1
        <= step
        <= planted_faults.SINCE + (6 if name in planted_faults.LOCAL else 2) * planted_faults.PERIOD
    )


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", planted_faults.REDO)
def test_a_fault_in_redo_is_found_while_training_runs(lab: Lab, name: str) -> None:
    owner, method, replacement = planted_faults.REDO[name]
    with patch.object(owner, method, planted_faults.wrapped(owner, method, replacement)):
        lab.start_agent()  # the auditor is forked from it
    step = audited(lab)
    assert step is not None
    assert step <= 6 * planted_faults.PERIOD


def test_the_auditor_finds_nothing_where_there_is_no_fault(lab: Lab) -> None:
    lab.start_agent()
    assert audited(lab) is None
