"""Copies that are made as late as the copier's contract allows change no bit: every tap, every mode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from memckpt.capture.gradient_staging import GradientStaging
from memckpt.capture.param_groups import scaler_state
from memckpt.capture.slot_writer import SlotWriter
from memckpt.config import MemckptConfig
from memckpt.session.session import Session
from memckpt.state import codec
from tests.support.cluster.sharded_cases import Setup, job_of
from tests.support.faults.deferred_copier import DeferredCopier, defer, on_device
from tests.support.trainings import rank_trainings
from tests.support.trainings.engine_cases import SHAPE_CASES
from tests.support.trainings.engine_child import Control, config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.engine_optimizers import OPTIMIZER_CASES
from tests.support.trainings.engine_steps import ACCUMULATION
from tests.support.trainings.engine_training import Case
from tests.support.trainings.killed_ranks import Death, survives

CASES = {case.name: case for case in [*SHAPE_CASES, *OPTIMIZER_CASES, ACCUMULATION]}
#: Something else changes what is being copied in each of these: buffers, gradients within the step and behind it,
#: the next backward, a backward that raises.
HARD = ("adversarial", "interrupted", "zeroed-in-place", "closure", "clip-norm", "scaler-fused", "sgd-nesterov")
#: The last commit before a death is not sent: its copies are not made before somebody waits for them.
KILLS = [("after commit", 7), ("backward", 12)]
RESUMED: list[int | None] = [6, 10]


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    defer(monkeypatch)


def unchecked(redo: str = "lazy") -> MemckptConfig:
    """Where a resume repeats no step, so that what is expected of it is plain."""
    return config(redo, resume_check="off")


def kills_of(name: str) -> list[tuple[str, int]]:
    return [("before step" if name == "adversarial" and point == "backward" else point, s) for point, s in KILLS]


@pytest.mark.promise("CUDA")
@pytest.mark.thinned(3)
@pytest.mark.parametrize("tap", ["auto", "step"])
@pytest.mark.parametrize("name", HARD)
def test_lazy(lab: Lab, name: str, tap: str) -> None:
    lab.survives(CASES[name], config("lazy", tap=tap), kills_of(name), expected=RESUMED)


@pytest.mark.parametrize("redo", ["eager", "snapshot"])
@pytest.mark.parametrize("name", ["interrupted", "zeroed-in-place"])
def test_other_modes(lab: Lab, name: str, redo: str) -> None:
    # A capture that was not committed any more has taken the place of the one before the last.
    none = ["is not held any more"] if redo == "snapshot" else []
    lab.survives(CASES[name], config(redo), kills_of(name), expected=RESUMED, unchecked=none)


@pytest.mark.parametrize("name", ["scaler", "scaler-fused-clip", "tensor-rate"])
def test_numbers_on_a_device(lab: Lab, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Scales, factors, learning rates, and whether a fused step had an effect: nobody waits for them."""
    on_device(monkeypatch)
    lab.survives(
        CASES[name],
        config("lazy"),
        [("after commit", 5), ("after commit", 7), ("before step", 14)],
        expected=[4, 6, 12],
    )


@pytest.mark.slow
@pytest.mark.parametrize("redo", ["lazy", "eager"])
@pytest.mark.parametrize("case", [*SHAPE_CASES, *OPTIMIZER_CASES], ids=lambda case: case.name)
def test_every_training(lab: Lab, case: Case, redo: str) -> None:
    kills = [("after commit", 7), ("after commit", 16)]
    # What is changed by hand at every step is written anew at every step, which is waited for.
    lab.survives(case, config(redo), kills, expected=[7, 16] if case.name == "projection" else [6, 15])


def test_accumulation(lab: Lab) -> None:
    kills = [("after commit", 4), ("after commit", 9), ("before step", 15)]
    lab.survives(ACCUMULATION, config("lazy"), kills, expected=[3, 6, 9])


def test_accumulation_that_nobody_announces_is_learned(lab: Lab) -> None:
    """From two steps alike: then only the gradients of a step's last batch are copied."""

    def prepare(control: Control) -> None:
        original = GradientStaging.stage

        def stage(staging: GradientStaging, writer: SlotWriter, param: torch.Tensor, gradient: torch.Tensor) -> None:
            original(staging, writer, param, gradient)
            copied = staging._staged_after[writer.index[id(param)]] > 0
            control.journal.note("made", batch=control.step, copied=copied)

        GradientStaging.stage = stage  # type: ignore[method-assign]

    ended = lab.train(ACCUMULATION, config("lazy"), prepare=prepare)
    lab.check_same(ACCUMULATION, ended)
    made = ended.of("made")
    early, late = range(4, 10), range(10, ACCUMULATION.steps + 1)  # nothing is staged before the first generation
    expected = {*early, *(batch for batch in late if batch % 3 == 0)}
    assert {one["batch"] for one in made if one["copied"]} == expected
    assert {one["batch"] for one in made if not one["copied"]} == {*early, *late} - expected


@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_ddp(lab: Lab, redo: str) -> None:
    deaths = [Death(1, 4, "backward"), Death("all", 8, "committed")]
    survives(lab, replace(rank_trainings.job_of(lab, redo), config=unchecked(redo)), deaths, [3, 8])


@pytest.fixture
def undrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """No commit waits for its copies: the next backward does, before it gets to a reduction."""
    original = Session._send_commit

    def send(session: Session, finish: Any) -> None:
        original(session, finish)
        assert session._link._sender is not None

    monkeypatch.setattr(Session, "_send_commit", send)


@pytest.mark.usefixtures("undrained")
def test_ddp_with_gradients_taken_at_the_step(lab: Lab) -> None:
    job = replace(rank_trainings.job_of(lab), config=config("lazy", tap="step", resume_check="off"))
    # The hooks of the last layer, before its bucket is full, have waited for the commit.
    survives(lab, job, [Death(1, 4, "forward"), Death(1, 6, "backward"), Death("all", 9, "committed")], [3, 6, 9])


def test_ddp_of_three_ranks(lab: Lab) -> None:
    """The first backward after a resume is reduced in the recorded layout."""
    job = replace(rank_trainings.job_of(lab, world_size=3), config=unchecked())
    survives(lab, job, [Death(1, 5, "backward")], [4])


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "setup",
    [Setup(), pytest.param(Setup(accumulate=2), marks=pytest.mark.slow), Setup(offload=True)],
    ids=lambda setup: setup.name,
)
def test_reduced_shards(lab: Lab, setup: Setup) -> None:
    survives(lab, job_of(lab, setup, unchecked()), [Death(1, 3, "backward"), Death("all", 7, "stepped")])


def test_compiled_blocks_stay_in_one_graph(lab: Lab) -> None:
    survives(lab, job_of(lab, Setup(compiled=True), unchecked()), [Death(1, 3, "backward")])


@pytest.mark.usefixtures("undrained")
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original", "flat"])
def test_flat_parameters(lab: Lab, use_orig_params: bool) -> None:
    job = replace(rank_trainings.flat_job_of(lab, use_orig_params=use_orig_params), config=unchecked())
    survives(lab, job, [Death(1, 4, "backward"), Death("all", 8, "backward")])


def test_numbers_on_a_device_are_encoded_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    plain = scaler.state_dict()
    rate = torch.tensor([0.5, 0.25])
    copier = DeferredCopier()
    state = {"scaler": scaler_state(scaler), "groups": [{"lr": rate}]}
    packed = codec.Packed(state, copier.fetch, copier.token)
    more = codec.Packed({"loss": torch.tensor(3.0)}, copier.fetch, copier.token)
    assert copier.made == [0, 0]
    copier.wait_before_changes()
    scaler.update(16.0)
    rate.zero_()
    found = codec.decode(packed.joined(more).encode())
    assert found["scaler"] == plain
    assert list(found["scaler"]) == list(plain)
    assert found["groups"][0]["lr"].tolist() == [0.5, 0.25]
    assert found["loss"].item() == 3.0
    assert float(state["scaler"]["scale"]) == 8.0
