"""``override``: a resume takes hyperparameters from the script, and schedules go on from its rates."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedules

import memckpt
from memckpt.capture.beside.param_groups import MadeSettings
from memckpt.capture.live_state import LiveState
from memckpt.config import RedoChoice
from memckpt.errors import ConfigurationError, ResumeMismatchError
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import stop_agent
from tests.support.trainings.engine_harness import Lab

STEPS = 14
AGENT = memckpt.AgentConfig(linger_seconds=60)
MakeSchedule = Callable[[torch.optim.Optimizer, float], Any]


def anneal(optimizer: torch.optim.Optimizer, lr: float) -> Any:
    return schedules.CosineAnnealingLR(optimizer, T_max=STEPS, eta_min=0.01)


def warm_up_and_anneal(optimizer: torch.optim.Optimizer, lr: float) -> Any:
    parts = [
        schedules.LinearLR(optimizer, 0.25, total_iters=4),
        schedules.CosineAnnealingLR(optimizer, 9, eta_min=0.01),
    ]
    return schedules.SequentialLR(optimizer, parts, milestones=[4])


def warm_up(optimizer: torch.optim.Optimizer, lr: float) -> Any:
    return schedules.LambdaLR(optimizer, lambda step: min(1.0, step / 10))


def cycle(optimizer: torch.optim.Optimizer, lr: float) -> Any:
    # A cycle twice as high begins four times as low.
    return schedules.OneCycleLR(optimizer, max_lr=lr, total_steps=STEPS + 1, div_factor=(lr / 0.1) * 10)


SCHEDULES: dict[str, MakeSchedule | None] = {
    "none": None,
    "LambdaLR": warm_up,
    "StepLR": lambda optimizer, lr: schedules.StepLR(optimizer, 3, 0.5),
    "CosineAnnealingLR": anneal,
    "CosineAnnealingWarmRestarts": lambda optimizer, lr: schedules.CosineAnnealingWarmRestarts(optimizer, 5, 1, 0.01),
    "SequentialLR": warm_up_and_anneal,
    "OneCycleLR": cycle,
    "ReduceLROnPlateau": lambda optimizer, lr: schedules.ReduceLROnPlateau(optimizer, patience=50),
}


@dataclass(frozen=True)
class Script:
    """A training of a linear layer; `kills` ends it behind that step."""

    lr: float = 0.1
    decay: float = 0.0
    schedule: MakeSchedule | None = None
    override: tuple[str, ...] = ()
    resume: Any = "auto"
    redo: RedoChoice = "lazy"
    check: Any = "auto"
    kills: int = STEPS
    registers: bool = True

    def train(self, run_dir: Path) -> Attempt:
        """Train to the kill; what the attempt saw, written down at each step."""
        out = Attempt()
        torch.manual_seed(1)
        net = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), self.lr, momentum=0.9, weight_decay=self.decay)
        schedule = None if self.schedule is None else self.schedule(optimizer, self.lr)
        config = memckpt.MemckptConfig(
            redo=self.redo,
            storage=None,
            agent=AGENT,
            override=self.override,
            resume_check=self.check,
            snapshot_every_steps=2,
        )
        session = memckpt.attach(net, optimizer, run_dir=run_dir, config=config, resume=self.resume)
        if schedule is not None and self.registers:
            session.register("schedule", schedule)
        report = session.restore()
        first = 0 if report is None else report.step
        for step in range(first + 1, self.kills + 1):
            group = optimizer.param_groups[0]
            out.rates[step], out.decays[step] = group["lr"], group["weight_decay"]
            net(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if isinstance(schedule, schedules.ReduceLROnPlateau):
                schedule.step(1.0)
            elif schedule is not None:
                schedule.step()
            session.commit()
        if report is not None:
            out.exact, out.reasons, out.verdict = report.exact, list(report.reasons), session.check.verdict
        return out


@dataclass
class Attempt:
    """Rates and decays by step, and the report of its restore."""

    rates: dict[int, float] = field(default_factory=dict)
    decays: dict[int, float] = field(default_factory=dict)
    exact: bool = True
    reasons: list[str] = field(default_factory=list)
    verdict: str = ""
    log: str = ""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    own = Lab(tmp_path)
    yield own
    stop_agent(AgentAddress.of(own.run_dir))
    own.close()


def run(lab: Lab, script: Script) -> Attempt:
    """Run a script in a process of its own, which is killed."""
    path = lab.directory / "attempt.json"

    def body() -> None:
        path.write_text(json.dumps(vars(script.train(lab.run_dir))))
        os.kill(os.getpid(), signal.SIGKILL)

    child = lab.fork(body, "train")
    assert child.wait() == -signal.SIGKILL, child.log.read_text()
    found = json.loads(path.read_text())
    by_step = {name: {int(step): one for step, one in found[name].items()} for name in ("rates", "decays")}
    return Attempt(**{**found, **by_step, "log": child.log.read_text()})


def rates_of(script: Script) -> dict[int, float]:
    """The rate of each step of a training that has never been killed."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], script.lr)
    schedule = None if script.schedule is None else script.schedule(optimizer, script.lr)
    found = {}
    for step in range(1, STEPS + 1):
        found[step] = optimizer.param_groups[0]["lr"]
        optimizer.step()
        if schedule is not None and not isinstance(schedule, schedules.ReduceLROnPlateau):
            schedule.step()
    return found


@pytest.mark.promise("a hyperparameter that `override` names is the script's from the resumed step on, and stays so")
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rate_is_the_scripts_from_the_resumed_step_on(lab: Lab, name: str) -> None:
    """Where a schedule computes it, the rate is what the schedule would have made of the script's from the start."""
    make = SCHEDULES[name]
    first = run(lab, Script(schedule=make, kills=6))
    assert first.rates == pytest.approx(
        {step: one for step, one in rates_of(Script(schedule=make)).items() if step < 7}
    )

    second = run(lab, Script(lr=0.2, schedule=make, override=("lr",), kills=9))
    assert second.verdict == "equal"
    wanted = rates_of(Script(lr=0.2, schedule=make))
    # Step 6 is repeated, as a proof, with what it was taken.
    assert second.rates == pytest.approx({6: first.rates[6], **{step: wanted[step] for step in (7, 8, 9)}})
    assert (second.exact, len(second.reasons)) == (False, 1)
    assert f"override takes the script's {'max_lr' if name == 'OneCycleLR' else 'lr'}=" in second.reasons[0]
    assert "without protection" not in second.log
    assert "of SGD (the run: " in second.reasons[0]
    assert "go on:" not in second.log

    third = run(lab, Script(lr=0.2, schedule=make, override=("lr",)))
    assert third.rates == pytest.approx({step: wanted[step] for step in third.rates})
    assert set(range(10, STEPS + 1)) <= third.rates.keys()
    assert (third.exact, third.reasons) == (True, [])


@pytest.mark.parametrize("redo", ["eager", "snapshot"])
def test_other_hyperparameters_in_every_mode(lab: Lab, redo: RedoChoice) -> None:
    run(lab, Script(redo=redo, kills=6))
    changed = Script(redo=redo, lr=0.2, decay=0.5, override=("weight_decay",), kills=9)
    second = run(lab, changed)
    assert set(second.rates.values()) == {0.1}
    assert {step: one for step, one in second.decays.items() if step > 6} == dict.fromkeys((7, 8, 9), 0.5)
    assert not second.exact
    assert second.verdict in ("equal", "none")
    assert "the run's own go on: lr=0.2 of SGD (the run: 0.1)." in second.log
    third = run(lab, Script(redo=redo, lr=0.2, decay=0.5))
    assert set(third.decays.values()) == {0.5}
    assert third.exact, third.reasons


def test_a_schedule_that_is_not_registered_begins_with_the_scripts_rate(lab: Lab) -> None:
    run(lab, Script(schedule=warm_up, registers=False, kills=6))
    second = run(lab, Script(lr=0.2, schedule=warm_up, registers=False, override=("lr",), kills=8))
    assert second.rates[7] == pytest.approx(2 * 0.1 * 0.6)


def test_a_kill_before_the_first_commit_takes_it_again(lab: Lab) -> None:
    run(lab, Script(kills=6, check="witness"))
    changed = Script(lr=0.2, override=("lr",), check="witness", kills=6)
    assert run(lab, changed).rates == {}
    again = run(lab, Script(lr=0.2, override=("lr",), check="witness", kills=7))
    assert (again.rates, again.exact) == ({7: 0.2}, False)


def test_an_exact_resume_takes_none(lab: Lab) -> None:
    run(lab, Script(kills=6))

    def body() -> None:
        with pytest.raises(ResumeMismatchError, match=r"override takes the script's lr=0\.2 of SGD \(the run: 0\.1\)"):
            Script(lr=0.2, override=("lr",), resume="exact").train(lab.run_dir)

    child = lab.fork(body, "train")
    assert child.wait() == 0, child.log.read_text()


@pytest.mark.parametrize("trained", [False, True])
def test_an_unknown_name_is_an_error_that_names_those_that_exist(tmp_path: Path, trained: bool) -> None:
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    if trained:
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    names = r"none, as the optimizers have trained before attach\(\)" if trained else r"dampening,.* lr, .*weight_decay"
    config = memckpt.MemckptConfig(storage=None, agent=AGENT, override=("lr", "rate"))
    with pytest.raises(ConfigurationError, match=rf"override: expected names of hyperparameters \({names}\), found "):
        memckpt.attach(net, optimizer, run_dir=tmp_path / "run", config=config)


def test_what_the_run_began_with_stays_where_a_schedule_is_registered_behind_the_restore() -> None:
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    made = MadeSettings(LiveState(net, [optimizer], {}))
    made.load_state_dict({"SGD": {"lr": 0.5}})
    made.note_schedule("late", schedules.StepLR(optimizer, 3))
    assert made.state_dict()["SGD"] == {"lr": 0.5}
