"""The audit: steps that redo gets wrong are found while training runs, and resumes are exact again."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.optim import Optimizer

from memckpt.config import DEFAULT_SLOTS, StorageConfig
from memckpt.session import mode
from memckpt.session.generation_switch import GenerationSwitch
from memckpt.state.ambient import ambient_of, as_recorded, decode
from tests.support.cluster.processes import kill_and_wait
from tests.support.cluster.waiting import until
from tests.support.storage.stored_runs import leave_only_storage
from tests.support.trainings import killed_ranks
from tests.support.trainings.engine_audits import (
    HiddenWrite,
    PhasedTraining,
    as_if_large,
    audit_of,
    phased_in_trainers,
    wait_for_audit,
)
from tests.support.trainings.engine_cases import SHAPE_CASES
from tests.support.trainings.engine_child import Action, Control, config, kill_self
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.engine_optimizers import OPTIMIZER_CASES, local_momentum
from tests.support.trainings.engine_steps import ACCUMULATION
from tests.support.trainings.engine_training import Case, Training
from tests.support.trainings.planted_faults import around
from tests.support.trainings.rank_trainings import DdpJob

PERIOD = 4
STEPS = 48
#: Records that a ring of slots holds.
RECORDS = PERIOD + DEFAULT_SLOTS


def late(step: int) -> Callable[[int], bool]:
    return lambda steps: steps >= step


FAULTS: list[tuple[str, int, Callable[[], Training]]] = [
    ("optimizer-changes-early", 5, lambda: PhasedTraining(late(5))),
    ("optimizer-changes-late", 17, lambda: PhasedTraining(late(17))),
    ("optimizer-counts", 6, lambda: PhasedTraining(lambda steps: steps % 5 == 4)),
    ("hidden-write", 9, lambda: HiddenWrite(9)),
]


@pytest.mark.promise("the same in too few elements for the sample; or whatever else redo does not know of")
@pytest.mark.parametrize(("name", "since", "build"), FAULTS, ids=[name for name, *_ in FAULTS])
def test_a_fault_is_found_within_two_periods_and_resumes_are_exact_again(
    lab: Lab, name: str, since: int, build: Callable[[], Training]
) -> None:
    case = Case(f"audit-{name}", build, STEPS)
    settings = config("lazy", PERIOD, audit_budget=1.0, resume_check="off")
    actions: dict[tuple[str, int], Action] = {("after commit", step): wait_for_audit for step in range(1, STEPS)}
    lab.start_agent()
    actions[("after commit", STEPS - 4)] = kill_self
    died = lab.train(case, settings, actions=actions, prepare=as_if_large)
    found = re.search(r"the audit found .* when steps \d+ to (\d+) were redone", died.log)
    assert found, died.log[-3000:]
    # What concerns all tensors is found by any audit, one element when its piece's turn comes.
    assert int(found[1]) <= since + (6 if name == "hidden-write" else 2) * PERIOD
    resumed = lab.train(case, settings, seed=1001)
    assert resumed.of("restored")[0]["exact"]
    assert resumed.end["mode"] == "snapshot" or name == "hidden-write"  # new generations look for that one in full
    lab.check_same(case, resumed)


CLEAN = ["adamw-foreach", "adafactor", "own", "muon", "sparse-adam", "scaler-fused-clip", "groups", "bf16-adamw"]
CASES = {case.name: case for case in [*OPTIMIZER_CASES, *SHAPE_CASES, ACCUMULATION]}


@pytest.mark.parametrize("name", [*CLEAN, "accumulation", "clip-norm", "unfrozen", "moving-average"])
def test_what_redo_gets_right_is_no_finding(lab: Lab, name: str) -> None:
    case = CASES[name]
    actions = {("after commit", step): wait_for_audit for step in range(1, case.steps)}
    lab.start_agent()
    ended = lab.train(case, config("lazy", PERIOD, audit_budget=1.0), actions=actions)
    audits = ended.of("audit")
    assert audits, ended.log[-2000:]
    assert audits[-1]["pieces"] > 0
    assert (audits[-1]["findings"], audits[-1]["problem"]) == (0, "")


def test_another_number_of_threads_is_no_finding() -> None:
    """What is recorded of a step has it, and its redo takes as many."""
    usual = torch.get_num_threads()
    recorded = ambient_of("cpu", usual + 1)
    assert (recorded.threads, ambient_of("cpu", usual).threads) == (usual, 0)
    torch.set_num_threads(usual + 2)
    try:
        for own_thread, expected in ((True, usual + 2), (False, usual)):
            with as_recorded(decode(recorded.encode()), "cpu", own_thread):
                assert torch.get_num_threads() == expected
            assert torch.get_num_threads() == usual + 2
    finally:
        torch.set_num_threads(usual)


@pytest.mark.parametrize("tier", ["memory", "storage"])
def test_a_resume_of_what_was_found_is_not_called_exact(lab: Lab, tier: str) -> None:
    """The trainer dies before it hears of the finding."""
    case = Case("audit-late-death", lambda: PhasedTraining(late(9)), STEPS)
    storage = StorageConfig(every_steps=1000) if tier == "storage" else None
    settings = config("lazy", PERIOD, audit_budget=1.0, resume_check="off", storage=storage)

    def die_of_it(control: Control) -> None:
        wait_for_audit(control)
        audit = audit_of(control)
        if audit is not None and audit.findings:
            kill_self(control)

    def die_when_told(control: Control) -> None:
        """The news may come between the commit and the look at the audit."""
        around(GenerationSwitch, "distrust", lambda *_: kill_self(control))

    lab.start_agent()
    actions = {("after commit", step): die_of_it for step in range(1, STEPS)}
    died = lab.train(case, settings, actions=actions, prepare=die_when_told)
    assert "the audit found" not in died.log
    if storage is not None:
        leave_only_storage(lab.run_dir)
    resumed = lab.train(
        case, settings, seed=1001, actions={("after commit", step): wait_for_audit for step in range(1, STEPS)}
    )
    assert not resumed.of("restored")[0]["exact"]
    assert "training does not go on exactly: the audit found" in resumed.log
    assert resumed.end["mode"] == "snapshot"


def change_unseen(training: Training, step: int) -> None:
    """Change one element of a gradient past all that could count it; a copy at the step has it."""
    if step >= 9:
        gradient = next(training.model.parameters()).grad
        assert gradient is not None
        gradient.numpy().reshape(-1)[1234] += 1.0


class PartlyLocal(Training):
    """One of its two optimizers is of a class that the auditor cannot import."""

    def make_optimizers(self) -> list[Optimizer]:
        first, *others = self.model.parameters()
        return [torch.optim.AdamW([first], lr=1e-2), local_momentum()(others)]


@pytest.mark.parametrize(
    ("training", "later", "exact"),
    [(Training, 0, True), (Training, 2, False), (Training, 3 * PERIOD, True), (PartlyLocal, 3 * PERIOD, True)],
)
def test_what_follows_a_finding_counts_as_exact_once_it_is_audited(
    lab: Lab, training: type[Training], later: int, exact: bool
) -> None:
    """Where the audit leaves something out, that never comes: the whole state is copied instead."""
    name = f"unseen-gradients-{training.__name__}"
    case = Case(name, lambda: training(change=change_unseen), STEPS)
    settings = config("lazy", PERIOD, audit_budget=1.0, resume_check="off")
    told: list[int] = []

    def die_later(control: Control) -> None:
        if not told or later > 2:
            wait_for_audit(control)
        if told and control.step == told[0] + later:
            kill_self(control)

    def note_when_told(control: Control) -> None:
        around(GenerationSwitch, "distrust", lambda original, *one: (told.append(control.step), original(*one)))

    lab.start_agent()
    died = lab.train(
        case, settings, actions={("after commit", step): die_later for step in range(1, STEPS)}, prepare=note_when_told
    )
    assert "the audit found" in died.log
    resumed = lab.train(case, settings, seed=1001)
    assert resumed.of("restored")[0]["exact"] == exact
    assert ("since then the audit has not redone all parameters" in resumed.log) != exact
    assert ("The audit cannot redo all parameters of this training" in died.log) == (training is PartlyLocal)
    lab.check_same(case, resumed)


def test_a_class_that_only_the_script_has_is_named(lab: Lab) -> None:
    lab.start_agent()
    case = CASES["local"]
    look = {("after commit", case.steps - 1): lambda control: control.journal.note("audit", of=str(audit_of(control)))}
    ended = lab.train(case, config("lazy", PERIOD, audit_budget=1.0), actions=look)
    assert "the audit leaves its steps out" in ended.of("attached")[0]["text"]
    assert "no other process can import" in ended.of("audit")[0]["of"]


def auditor_of(control: Control) -> int:
    assert control.session is not None
    agent = control.session.agent_pid
    (auditor,) = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return int(auditor)


def kill_it(control: Control) -> None:
    kill_and_wait(auditor_of(control))
    until(lambda: audit_of(control) is None, "the agent to know")  # with the next commit there is another one


def stop_it(control: Control) -> None:
    os.kill(auditor_of(control), signal.SIGSTOP)


def continue_it(control: Control) -> None:
    os.kill(auditor_of(control), signal.SIGCONT)
    wait_for_audit(control)


@pytest.mark.parametrize(
    "faults", [{8: kill_it}, {8: stop_it, 8 + 2 * RECORDS: continue_it}], ids=["dies", "stands-still"]
)
def test_the_audit_goes_on_behind_a_failure_of_its_process(lab: Lab, faults: dict[int, Action]) -> None:
    """One that stands still misses all records of the audits on their way, and knows it."""
    case = replace(CASES["adamw-foreach"], steps=STEPS)
    actions: dict[tuple[str, int], Action] = {("after commit", step): wait_for_audit for step in range(1, STEPS)}
    for step in range(min(faults), max(faults)):
        del actions["after commit", step]
    actions |= {("after commit", step): fault for step, fault in faults.items()}
    lab.start_agent()
    ended = lab.train(case, config("lazy", PERIOD, audit_budget=1.0), actions=actions)
    before, after = (next(one for one in ended.of("audit") if one["step"] == step) for step in (7, STEPS - 1))
    assert after["pieces"] > before["pieces"]
    assert (after["findings"], after["problem"]) == (0, "")


def test_ranks_replace_redo_after_the_same_record(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode, "_LOOK_RECORDS", 8)
    settings = config("lazy", PERIOD, audit_budget=1.0, resume_check="off")
    job = DdpJob(killed_ranks.fresh_directory(lab), lab.run_dir, settings, last_step=40)
    expected = killed_ranks.reference(lab, replace(job, optimizer=phased_in_trainers(None)))
    lab.start_agent()
    job = replace(job, optimizer=phased_in_trainers(lab.run_dir))
    assert killed_ranks.run(lab, replace(job, deaths=[killed_ranks.Death("all", 36, "committed")])) == [-9, -9]
    logs = [path.read_text() for path in sorted(lab.directory.glob("*-rank*.log"))[-2:]]
    assert all("steps cannot be redone here: the audit found" in log for log in logs), logs[0][-3000:]
    last = killed_ranks.next_attempt(lab, job)
    assert killed_ranks.run(lab, last) == [0, 0]
    killed_ranks.check_same(killed_ranks.results(last), expected, 37)
