"""The moment of a new generation: what it takes beside the ring, and deaths in each of its phases."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memckpt.capture.slot_writer import SlotWriter
from memckpt.config import AgentConfig
from memckpt.protocol.trainer import GenerationCommit, NeedSlots
from memckpt.session.connection import AgentConnection
from memckpt.session.link import AgentLink
from tests.support.faults.full_memory import refuse_slots
from tests.support.trainings.engine_child import Control, config, kill_agent, kill_self
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.engine_training import CLASSES, INPUTS, Case, Training

CHANGED_AT = 8
#: Headers, landings and rounding to pages, in bytes: nothing of it grows with the model.
SMALL = 400 << 10


class ChangedByHand(Training):
    """A model of 0.5M parameters; one is changed by hand at step 8, so that step 9 cannot be redone."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, 1000), nn.ReLU(), nn.Linear(1000, 500), nn.Linear(500, CLASSES))

    def batch(self, step: int) -> float:
        if step == CHANGED_AT:
            with torch.no_grad():
                self.model[0].weight.mul_(1.5)
        return super().batch(step)


CASE = Case("changed-by-hand-large", ChangedByHand, steps=14)
REDO = pytest.mark.parametrize("redo", ["lazy", "eager"])


def memory_of(pids: Iterable[int]) -> int:
    """Bytes of all anonymous memory files that these processes have open."""
    found: dict[int, int] = {}
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if os.readlink(entry).startswith("/memfd:memckpt"):
                    about = entry.stat()
                    found[about.st_ino] = about.st_blocks * 512
            except FileNotFoundError:
                continue
    return sum(found.values())


def wrap(owner: type, name: str, call: Callable[..., None], first: bool = False) -> None:
    """Have `call` get the arguments of a method behind (or in front of) each call of it."""
    original = getattr(owner, name)

    def method(*arguments: Any, **settings: Any) -> Any:
        if first:
            call(*arguments)
        result = original(*arguments, **settings)
        if not first:
            call(*arguments)
        return result

    setattr(owner, name, method)


def note_memory(control: Control) -> None:
    """Note what is held after each thing that may take memory or give it back."""

    def note(what: str) -> None:
        assert control.session.agent_pid is not None
        held = memory_of([os.getpid(), control.session.agent_pid])
        control.journal.note("memory", what=what, step=control.step, held=held)

    wrap(AgentLink, "prepare", lambda *_: note("prepared") if control.session is not None else None)
    wrap(SlotWriter, "seal_generation", lambda *_: note("written"))
    wrap(SlotWriter, "use_all_slots", lambda *_: note("whole") if control.step else None)
    control.at = lambda point: note(point)  # type: ignore[method-assign]


@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_a_new_generation_takes_one_state_beside_the_ring(lab: Lab, redo: str) -> None:
    """Two rings at the moment of a new base would be as much again as all that is held."""
    settings = config(redo, period=8)
    lab.start_agent()
    ended = lab.train(CASE, settings, prepare=note_memory)
    noted = ended.of("memory")
    (between,) = [each["held"] for each in noted if each["what"] == "after commit" and each["step"] == CHANGED_AT - 1]
    moment = [each for each in noted if each["step"] in (CHANGED_AT, CHANGED_AT + 1)]
    parameters = sum(param.numel() for param in CASE.build().model.parameters())
    peak = max(each["held"] for each in moment)
    print(f"{redo}: {between / parameters:.1f} bytes a parameter, {peak / parameters:.1f} with a new generation")
    assert "prepared" in [each["what"] for each in moment], "no new generation has begun"
    assert peak <= between + 12 * parameters + SMALL
    # A start has written to nothing that was not reserved for it.
    start = {each["what"]: each["held"] for each in moment if each["what"] in ("prepared", "written")}
    assert start["prepared"] == start["written"]
    assert noted[-1]["held"] <= between + SMALL


# Deaths


def die(owner: type, name: str, first: bool = False, kind: type = object) -> Callable[[Control], None]:
    """The trainer dies at a method's first call after the change by hand, whose first argument is of a kind."""

    def prepare(control: Control) -> None:
        def kill(owner: object, argument: object = None, *_: object) -> None:
            if isinstance(argument, kind) and control.step >= CHANGED_AT:
                kill_self(control)

        wrap(owner, name, kill, first)

    return prepare


PHASES = {
    "prepared": (die(AgentLink, "prepare"), False),
    "committed": (die(AgentConnection, "send", kind=GenerationCommit), True),
    "old-let-go": (die(AgentLink, "make_slots", first=True), True),
    "asked": (die(AgentConnection, "send", kind=NeedSlots), True),
    "whole": (die(AgentLink, "make_slots"), True),
}
ORDINARY = {("lazy", "committed"), ("lazy", "asked"), ("eager", "asked")}


@pytest.mark.promise(
    "a kill in any phase of a new base, from its reservation to the slots of its log, falls back to the newest "
    "usable one"
)
@pytest.mark.parametrize(
    ("redo", "phase"),
    [
        pytest.param(redo, phase, marks=() if (redo, phase) in ORDINARY else pytest.mark.slow)
        for redo in ("lazy", "eager")
        for phase in PHASES
    ],
)
def test_a_death_in_any_phase_loses_nothing(lab: Lab, redo: str, phase: str) -> None:
    """The attempt after it dies as soon as it has gone on, and the one after that ends training."""
    settings = config(redo)
    prepare, begun = PHASES[phase]
    lab.start_agent()
    died = lab.train(CASE, settings, prepare=prepare)
    assert len(died.of("killed")) == 1
    expected = died.of("killed")[0]["step"] - (not begun)
    assert expected >= CHANGED_AT - 1
    again = lab.train(CASE, settings, seed=2, actions={("backward", expected + 2): kill_self}, unchecked=None)
    assert again.restored_step == expected, again.log
    final = lab.train(CASE, settings, seed=3, unchecked=None)
    assert final.restored_step == expected + 1, final.log
    lab.check_same(CASE, died, again, final)


# No room


@pytest.mark.promise("a new base whose slots cannot be reserved is kept, and the gap is reported")
@REDO
def test_where_the_slots_cannot_be_had_that_is_said_and_the_start_is_kept(
    lab: Lab, redo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_slots(monkeypatch, 1)
    lab.start_agent()
    settings = config(redo)
    died = lab.train(CASE, settings, actions={("before step", 12): kill_self})
    assert "training goes on without protection since step" in died.log
    assert "found less (a test's)" in died.log
    assert "protected again from step" in died.log
    final = lab.train(CASE, settings, seed=2, unchecked=None)
    assert final.restored_step == 11
    lab.check_same(CASE, died, final)


@pytest.mark.promise("a new base whose slots cannot be reserved is kept, and the gap is reported")
@REDO
def test_a_start_without_slots_is_resumed_and_gets_them_then(
    lab: Lab, redo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or does not, once more: then the resumed training is not protected, and says so."""
    refuse_slots(monkeypatch, 2)
    lab.start_agent()
    settings = config(redo)
    died = lab.train(CASE, settings, prepare=die(AgentConnection, "ask_for_life"), actions={("forward", 9): kill_self})
    assert "found less (a test's)" in died.log
    again = lab.train(CASE, settings, seed=2, actions={("before step", 12): kill_self}, unchecked=None)
    assert again.restored_step == CHANGED_AT
    assert "training goes on without protection since step" in again.log
    assert "protected again from step" in again.log
    final = lab.train(CASE, settings, seed=3, unchecked=None)
    assert final.restored_step == 11
    lab.check_same(CASE, died, again, final)


def test_an_agent_that_dies_in_between_is_replaced(lab: Lab) -> None:
    def prepare(control: Control) -> None:
        left = [kill_agent]

        def kill(*_: object) -> None:
            if left and control.step == CHANGED_AT:
                left.pop()(control)

        wrap(AgentLink, "make_slots", kill, first=True)

    died = lab.train(CASE, config("lazy"), prepare=prepare, actions={("before step", 12): kill_self})
    assert f"training goes on without protection since step {CHANGED_AT}" in died.log
    final = lab.train(CASE, config("lazy"), seed=2, unchecked=None)
    assert final.restored_step == 11
    lab.check_same(CASE, died, final)


def train_with(lab: Lab, budget: int | None, ring: list[int]) -> str:
    """Train with that many bytes of memory for base and log; returns the log. `ring` gets what a generation takes."""

    def prepare(control: Control) -> None:
        def note(writer: SlotWriter, *_: object) -> None:
            control.journal.note("ring", total=writer.layout.total_bytes)

        wrap(SlotWriter, "seal_generation", note)

    run_dir = lab.run_dir.with_name(f"budget-{budget}")
    lab.start_agent(run_dir)
    settings = config("lazy", agent=AgentConfig(linger_seconds=60, memory_budget_bytes=budget))
    ended = lab.train(CASE, settings, run_dir=run_dir, prepare=prepare)
    ring += [each["total"] for each in ended.of("ring")]
    lab.check_same(CASE, ended)
    return ended.log


def test_a_budget_for_a_ring_and_a_state_leaves_no_gap(lab: Lab) -> None:
    """With less the old one goes first, and that is said."""
    parameters = sum(param.numel() for param in CASE.build().model.parameters())
    ring: list[int] = []
    train_with(lab, None, ring)
    said = "not protected until the state is written anew"
    assert said not in train_with(lab, max(ring) + 12 * parameters + SMALL, ring)
    assert said in train_with(lab, max(ring) + 11 * parameters, ring)
