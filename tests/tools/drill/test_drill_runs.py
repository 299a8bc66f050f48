"""Drills of small scripts: whole ones pass, and one with a hole does not."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from memckpt.config.arguments import DISABLE, RUN_DIR
from memckpt.errors import DrillError
from memckpt_tools.drill.job import Start
from memckpt_tools.drill.supervisor import Kind, Plan, Result, drill
from memckpt_tools.drill.text import data_line, holes_text, overhead_text
from tests.support.trainings.engine_harness import Child, Lab
from tests.tools.drill import trainings


class Forked:
    """A forked script, as the supervisor sees a command."""

    def __init__(self, child: Child) -> None:
        self.child, self.pid = child, child.pid

    def poll(self) -> int | None:
        return None if self.child.alive() else self.child.wait()


class Drills:
    """Drills functions in processes forked from this one."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.own = lab.directory / "own"
        self.starts = 0

    def start(self, script: Callable[[str], None]) -> Start:
        def start(variables: Mapping[str, str | None], log: Path) -> Forked:
            self.starts += 1
            run_dir = Path(variables[RUN_DIR] or "")
            if not variables[DISABLE] and not self.lab.agent_answers(run_dir):
                self.lab.start_agent(run_dir)  # forked: the script would start a new interpreter for it
            child = self.lab.fork(partial(_run, script, variables, str(self.own)), "script")
            log.unlink(missing_ok=True)
            log.symlink_to(child.log)
            return Forked(child)

        return start

    def drill(
        self,
        script: Callable[[str], None],
        kills: int = 2,
        seed: int = 3,
        kinds: tuple[Kind, ...] = ("trainer",),
        overhead: bool = False,
        steps: int = trainings.STEPS - 5,
    ) -> Result:
        directory = self.lab.directory / "drill"
        directory.mkdir()
        plan = Plan(kills, steps, seed, silence_seconds=60.0, kinds=kinds, overhead=overhead)
        return drill(directory, self.start(script), plan, lambda *_: None)


def _run(script: Callable[[str], None], variables: Mapping[str, str | None], own: str) -> None:
    os.setsid()
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    script(own)


@pytest.fixture
def drills(lab: Lab) -> Drills:
    return Drills(lab)


def test_a_whole_script_passes_and_its_own_run_directory_is_not_touched(drills: Drills) -> None:
    result = drills.drill(trainings.loop, overhead=True)
    verdict = result.verdict
    assert (verdict.outcome, verdict.repeats, verdict.differences) == ("equal", True, [])
    assert verdict.last_step == trainings.STEPS - 5
    assert verdict.compared["parameter"] == 6
    assert verdict.compared["buffer"] == 3
    assert len(result.blows) == 2
    assert drills.starts == 2 + 1 + 3
    overhead = result.overhead
    assert (overhead.problem, overhead.changed) == ("", None)
    assert overhead.unprotected > 0
    assert "bit for bit" in overhead_text(overhead, repeats=True).plain
    for blow, instant in zip(result.blows, result.instants, strict=True):
        assert blow.record >= instant.record
        assert (blow.check, blow.tier) == ("equal", "local memory"), blow
        assert blow.resumed == blow.step - blow.lost
    assert not drills.own.exists()


def test_a_plain_attribute_that_changes_is_found(drills: Drills) -> None:
    result = drills.drill(partial(trainings.loop, cools=True), kills=1)
    verdict, (blow,) = result.verdict, result.blows
    assert (verdict.outcome, verdict.repeats) == ("different", True)
    first = verdict.differences[0]
    assert first.kind == "loss"
    assert first.step == blow.resumed  # which is repeated
    assert first.relative is not None
    assert first.relative > 1e-3
    assert {each.kind for each in verdict.differences} >= {"loss", "parameter", "state", "buffer"}
    assert blow.check == "different"
    holes = {each.label: each for each in verdict.holes}
    assert set(holes) == {"attribute scale of Scaled", "variable seen of loop()"}
    assert holes["attribute scale of Scaled"].step == blow.resumed
    assert holes["attribute scale of Scaled"].text.startswith("0.99 in place of ")
    assert "Not restored: attribute scale of Scaled: 0.99 in place of" in holes_text(verdict).plain


@pytest.mark.slow
def test_each_third_resume_goes_on_at_once(drills: Drills) -> None:
    """Mistakes that a repeated step puts right show there."""
    blows = drills.drill(trainings.loop, kills=3, kinds=("trainer",)).blows
    assert ["was repeated" in blow.check_line for blow in blows] == [True, True, False]


@pytest.mark.parametrize("counts", [True, False])
def test_a_resume_that_makes_training_longer_is_found(drills: Drills, counts: bool) -> None:
    steps = trainings.STEPS
    verdict = drills.drill(partial(trainings.loop, counts=counts), kills=1, steps=2 * steps).verdict
    assert verdict.last_step == steps
    assert [each.label for each in verdict.differences] == ([] if counts else ["steps"])
    assert verdict.outcome == ("equal" if counts else "different")
    if not counts:
        (longer,) = verdict.differences
        assert (longer.step, longer.text) == (
            steps + 1,
            f"it trains on, where the undisturbed run had ended after {steps}",
        )


def test_data_that_are_not_seeded_are_named_by_their_loader(drills: Drills) -> None:
    verdict = drills.drill(trainings.unseeded_workers, kills=1).verdict
    assert (verdict.outcome, verdict.repeats) == ("within", False)
    line = data_line(verdict)
    assert "differs from step 1 on" in line.plain
    assert "They come from Noisy (1 worker); torch's generator, which shuffles, does repeat itself" in line.plain
    assert "it is the dataset, or a worker" in line.plain


def test_the_agent_and_both_are_killed_and_training_goes_on(drills: Drills) -> None:
    result = drills.drill(trainings.loop, kinds=("agent", "both"))
    assert (result.verdict.outcome, result.verdict.repeats) == ("equal", True)
    agent, both = sorted(result.blows, key=lambda blow: blow.kind)
    assert (agent.kind, agent.lost, agent.tier) == ("agent", 0, "")
    # A kill comes from outside, a step or two behind what it is to befall; after the last no commit finds it.
    assert agent.unprotected is not None or agent.step >= result.verdict.last_step - 2
    assert (both.kind, both.lost) == ("both", both.step - both.resumed)
    assert (both.tier, both.resumed > 0) in (("storage", True), ("nothing", False))  # it may be too short a run


def test_a_training_that_does_not_repeat_itself_is_compared_within_its_band(drills: Drills) -> None:
    verdict = drills.drill(partial(trainings.loop, seeded=False), kills=1).verdict
    assert (verdict.outcome, verdict.repeats) == ("within", False)
    assert verdict.band.outside is None
    assert verdict.band.loss > 0 < verdict.band.killed_parameters


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (trainings.fails, r"status 3 after step 0;(.|\n)*RuntimeError: no data in"),
        (trainings.unprotected, "ended without a single commit"),
    ],
)
def test_a_script_that_cannot_be_drilled_is_told(drills: Drills, script: Callable[[str], None], message: str) -> None:
    with pytest.raises(DrillError, match=message):
        drills.drill(script)
    assert drills.starts == 1
