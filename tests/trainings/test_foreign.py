"""What nobody has thought of: it is no error in the user's step, and it is told."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memckpt
from memckpt.capture.beside.pending import PendingGradients
from memckpt.capture.beside.watch import ParameterWatch, StaticWatch
from memckpt.capture.copier import HostCopier
from memckpt.capture.recorder import Recorder
from memckpt.capture.slot_writer import SlotWriter
from memckpt.capture.staging_check import StagingCheck
from memckpt.errors import UsageError
from memckpt.session.resume.first_steps import Repetition
from memckpt.session.staging import Staging
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import Control, config, kill_self
from tests.support.trainings.engine_harness import Lab, collect
from tests.support.trainings.engine_state import DOUBLE_COMPLEX, INFERENCE_TENSORS
from tests.support.trainings.engine_training import Case
from tests.support.trainings.hand_loops import in_child


class Mishap(Exception):
    """An exception of a kind that no code catches by name."""


def failing(owner: type, name: str, *steps: int) -> Callable[[Control], None]:
    """Make a method raise when it is first called in each of these steps."""

    def prepare(control: Control) -> None:
        original, left = getattr(owner, name), set(steps)

        def method(*args: Any, **kwargs: Any) -> Any:
            if control.step in left:
                left.remove(control.step)
                control.journal.note("mishap", step=control.step)
                raise Mishap(f"in {name}")
            return original(*args, **kwargs)

        setattr(owner, name, method)  # in a child, until its end

    return prepare


KILLS = [("after commit", 3), ("backward", 6), ("after commit", 7), ("before step", 12)]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("redo", ["lazy", "eager", "snapshot"])
@pytest.mark.parametrize("case", [INFERENCE_TENSORS, DOUBLE_COMPLEX], ids=lambda case: case.name)
def test_tensors_of_other_kinds(lab: Lab, case: Case, redo: str) -> None:
    attempts = lab.survives(case, config(redo), KILLS)
    assert not any("failed" in attempt.log for attempt in attempts)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (HostCopier, "copy"),
        (PendingGradients, "seen"),
        (PendingGradients, "stepped"),
        (Recorder, "_note_step"),
        (Recorder, "backward_runs"),
        (StagingCheck, "compare"),
        (ParameterWatch, "accept_changes"),
        (ParameterWatch, "changed"),
    ],
)
def test_a_failure_in_a_hook_costs_a_copy_of_the_state(lab: Lab, owner: type, name: str) -> None:
    prepare = failing(owner, name, 7)
    died = lab.train(PLAIN, config("lazy"), prepare=prepare, actions={("after commit", 7): kill_self})
    assert died.of("mishap")
    assert f"Mishap: in {name}" in died.log
    assert "training goes on" in died.log
    # The record was written by value, as the start of a generation: not even that step is lost. But gradients that have
    # not been seen to be used go on waiting.
    final = lab.train(PLAIN, config("lazy"), seed=2)
    assert final.restored_step == (6 if name == "stepped" else 7)
    lab.check_same(PLAIN, died, final)


@pytest.mark.parametrize(
    ("owner", "name", "redo"),
    [
        (StaticWatch, "changed", "lazy"),
        (SlotWriter, "stage_anchors", "lazy"),
        (SlotWriter, "stage_by_value", "eager"),
        (SlotWriter, "capture", "snapshot"),
        (Staging, "seal", "lazy"),
    ],
)
def test_a_failure_in_a_commit_is_a_gap_that_is_counted(lab: Lab, owner: type, name: str, redo: str) -> None:
    ended = lab.train(PLAIN, config(redo), prepare=failing(owner, name, 7))
    assert ended.of("mishap")
    assert (
        f"training goes on without protection since step 7: protecting a step failed (Mishap: in {name})" in ended.log
    )
    # Said when the agent has the first state, which may come behind the gap where steps are short.
    assert ended.log.count("memckpt: protected from step") == 1
    assert "protected again from step 8 on; 1 step was not" in ended.log
    lab.check_same(PLAIN, ended)


@pytest.mark.parametrize(("owner", "name"), [(Staging, "seal"), (Recorder, "stage")])
def test_what_a_signal_s_handler_raises_is_the_user_s(lab: Lab, owner: type, name: str) -> None:
    """As torch's handler does, where a worker of a loader has died: in a commit, and in backward."""

    def handler(number: int, frame: Any) -> None:
        raise Mishap("of a worker")

    def prepare(control: Control) -> None:
        original = getattr(owner, name)

        def replaced(*args: Any) -> Any:
            if control.step == 7:
                signal.signal(signal.SIGUSR1, handler)
                signal.raise_signal(signal.SIGUSR1)
            return original(*args)

        setattr(owner, name, replaced)  # in a child, until its end

    died = collect(*lab.begin(PLAIN, config("lazy"), prepare=prepare))
    assert died.log.rstrip().endswith("Mishap: of a worker")
    assert "please report it" not in died.log
    final = lab.train(PLAIN, config("lazy"), seed=2)
    assert final.restored_step == 6
    lab.check_same(PLAIN, died, final)


def test_a_failure_in_every_step_ends_protection_for_a_while(lab: Lab) -> None:
    ended = lab.train(PLAIN, config("lazy"), prepare=failing(Recorder, "_note_step", *range(3, 25)))
    assert "training goes on without protection since step" in ended.log
    assert "that happens again and again; trying again in" in ended.log
    assert ended.log.count("Traceback") == 1
    lab.check_same(PLAIN, ended)
    lab.stop()


@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_training_that_goes_on_behind_an_interrupt_in_a_commit_is_resumed_whole(lab: Lab, redo: str) -> None:
    """As in a notebook: the next record's anchors are not staged."""

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, memckpt.Session, memckpt.RestoreReport | None]:
        model = nn.Linear(8, 4)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        session = memckpt.attach(model, optimizer, run_dir=lab.run_dir, config=config(redo, resume_check="off"))
        return model, optimizer, session, session.restore()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def train() -> None:
        model, optimizer, session, _ = begin()
        for step in range(1, 8):
            model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with contextlib.ExitStack() as stack:
                if step == 4:
                    stack.enter_context(pytest.MonkeyPatch.context()).setattr(SlotWriter, "stage_anchors", interrupt)
                    stack.enter_context(pytest.raises(KeyboardInterrupt))
                session.commit(np.int64(step))
        torch.save(model.state_dict(), lab.directory / "trained")
        os.kill(os.getpid(), signal.SIGKILL)

    def resume() -> None:
        model, _, session, report = begin()
        assert report is not None
        assert (report.step, report.exact) == (7, True), report.reasons
        trained = torch.load(lab.directory / "trained")
        assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())
        with pytest.raises(UsageError, match=r"expected a whole number, found 8\.5"):
            session.commit(8.5)  # type: ignore[arg-type]
        session.close()

    in_child(lab, train, status=-signal.SIGKILL)
    in_child(lab, resume)


@pytest.mark.parametrize(("owner", "name"), [(SlotWriter, "stage_anchors"), (Repetition, "put_back")])
def test_an_interrupt_at_the_end_of_a_repeated_step_leaves_nothing_half_done(lab: Lab, owner: type, name: str) -> None:
    """A notebook goes on behind it: with the held state, or, where that may be half in place, not at all."""

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, memckpt.Session]:
        model = nn.Linear(8, 4)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        session = memckpt.attach(model, optimizer, run_dir=lab.run_dir, config=config("lazy", period=1))
        session.restore()
        return model, optimizer, session

    def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, session: memckpt.Session) -> None:
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.commit()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def train() -> None:
        parts = begin()
        for _ in range(3):
            take_step(*parts)
        # Step 4 is committed, and nothing is staged of the next record.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SlotWriter, "stage_anchors", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            take_step(*parts)

    def interrupted() -> None:
        parts = begin()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                take_step(*parts)
        if owner is Repetition:
            with pytest.raises(UsageError, match="behind a restore that was cut off: make the model anew"):
                take_step(*parts)
            parts = begin()
            take_step(*parts)
            assert parts[2].check.verdict == "equal"
        take_step(*parts)
        torch.save(parts[0].state_dict(), lab.directory / "trained")
        os.kill(os.getpid(), signal.SIGKILL)

    def resume() -> None:
        model, optimizer, session = begin()
        assert session.held is not None
        assert session.held.newest_step == 5
        assert session.report is not None
        if session.report.repeated is not None:
            take_step(model, optimizer, session)  # once more: the held state is in place then
        assert session.report.exact, session.report.reasons
        trained = torch.load(lab.directory / "trained")
        assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())
        session.close()

    in_child(lab, train, status=-signal.SIGKILL)
    in_child(lab, interrupted, status=-signal.SIGKILL)
    in_child(lab, resume)


def test_a_row_of_a_large_frozen_tensor_that_torch_counts_no_write_of_is_found_in_turn(lab: Lab) -> None:
    def train() -> None:
        model = nn.Sequential(nn.Embedding(2000, 64).requires_grad_(False), nn.Linear(64, 1))
        optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
        session = memckpt.attach(model, optimizer, run_dir=lab.run_dir, config=config("lazy"))
        session.restore()
        for step in range(1, 20):
            model(torch.randint(0, 2000, (4,))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 10:
                model[0].weight.data[1997] = 7.0
            session.commit()
        os.kill(os.getpid(), signal.SIGKILL)

    def resume() -> None:
        model = nn.Sequential(nn.Embedding(2000, 64).requires_grad_(False), nn.Linear(64, 1))
        optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
        session = memckpt.attach(model, optimizer, run_dir=lab.run_dir, config=config("lazy", resume_check="off"))
        session.restore()
        assert model[0].weight[1997].eq(7.0).all()
        session.close()

    in_child(lab, train, status=-signal.SIGKILL)
    in_child(lab, resume)
