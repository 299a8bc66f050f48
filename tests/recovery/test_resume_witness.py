"""The first gradients of a resume beside those that the dead attempt had left: equal, different, or none and why."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from memckpt.capture.copier import HostCopier
from memckpt.session.resume import first_steps
from tests.support.cluster import sharded_cases
from tests.support.cluster.sharded_cases import Setup
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import Action, Control, config, kill_self
from tests.support.trainings.engine_harness import Ended, Lab
from tests.support.trainings.engine_state import Unfrozen
from tests.support.trainings.engine_steps import Accumulation
from tests.support.trainings.engine_training import Case, Training
from tests.support.trainings.killed_ranks import Death, fresh_directory, run
from tests.support.trainings.rank_trainings import job_of

REDO = pytest.mark.parametrize("redo", ["lazy", "eager"])
WITNESS = {"resume_check": "witness"}


def verdict_of(log: str) -> str:
    """The last line of a log that a check has left."""
    return re.findall(r"resume check: (.*)", log)[-1]


def kill_and_resume(lab: Lab, case: Case, redo: str, kill: tuple[str, int], **resumed: Any) -> Ended:
    """A training that dies, and the attempt after it until that has a verdict; the state it restored is right."""
    died = lab.train(case, config(redo, **WITNESS), actions={kill: kill_self})
    assert len(died.of("killed")) == 1
    settings = resumed.pop("settings", config(redo, **WITNESS))
    ended = lab.train(case, settings, seed=77, **{"last_step": kill[1] + 3, **resumed})
    assert ended.restored_step is not None
    lab.stop()
    return ended


@pytest.mark.promise(
    "the first gradients of a resume equal those that the dead attempt left, or a difference is reported"
)
@REDO
def test_gradients_are_compared_wherever_one_had_landed_and_the_sample_elsewhere(lab: Lab, redo: str) -> None:
    kills = [("backward", 4), ("before step", 6), ("after step", 8), ("in commit", 10), ("forward", 12)]
    kills += [("after commit", 13)]
    said = []
    for number, kill in enumerate([*kills, None]):
        actions: dict[tuple[str, int], Action] = {kill: kill_self} if kill is not None else {}
        ended = lab.train(PLAIN, config(redo, **WITNESS), seed=1 if number == 0 else 50 + number, actions=actions)
        said.append(ended.verdict)
    lab.check_same(PLAIN, ended)
    assert [verdict for verdict, _ in said] == ["pending", *["equal"] * 6]
    lines = [line for _, line in said]
    assert re.fullmatch(
        r"step 4's first 2 gradients \(10\.0 KiB\) are those that the dead attempt had left: equal, bit for bit",
        lines[1],
    )
    for step, line in zip((6, 8, 10), lines[2:5], strict=True):
        assert line.startswith(f"step {step}'s first 6 gradients (")
    assert all("the dead attempt had no gradients of the next step yet" in line for line in lines[5:])


class AddsToUsed(Training):
    """A first backward adds to the gradients that the last step has used; its sum is thrown away."""

    zeroes_first = False

    def batch(self, step: int) -> float:
        if self.zeroes_first:
            self.optimizers[0].zero_grad(set_to_none=False)
        self.loss(step).backward()
        self.at("before step")
        self.optimizers[0].zero_grad(set_to_none=False)
        loss = self.loss(step)
        loss.backward()
        self.optimizers[0].step()
        return float(loss)


class ZeroesFirst(AddsToUsed):
    zeroes_first = True


class ZeroesLast(Training):
    """Gradients are zeroed in place behind the step, before the commit."""

    def batch(self, step: int) -> float:
        loss = self.loss(step)
        loss.backward()
        self.at("before step")
        self.optimizers[0].step()
        self.optimizers[0].zero_grad(set_to_none=False)
        return float(loss)


class FrozenInTurns(Training):
    """The last layer's weight is frozen in every other step."""

    def batch(self, step: int) -> float:
        self.model[-1].weight.requires_grad_(step % 2 == 0)
        return super().batch(step)


@pytest.mark.parametrize(
    ("kind", "kill", "said"),
    [
        # Small gradients that are left are carried, and a resume has them in their place.
        (AddsToUsed, ("before step", 6), "step 6's first 6 gradients ("),
        (ZeroesFirst, ("before step", 6), ""),
        # In the second of three micro-batches: the last layer's gradients are of two, the others of one.
        (Accumulation, ("backward", 8), "step 9's first 6 gradients (53.0 KiB) are those"),
        # The new process makes parameters frozen; they are trained again when the state is back.
        (Unfrozen, ("after step", 9), "step 9's first 6 gradients ("),
        (FrozenInTurns, ("before step", 6), "step 6's first 5 gradients ("),
    ],
)
def test_gradients_of_loops_of_all_kinds_are_compared(
    lab: Lab, kind: type[Training], kill: tuple[str, int], said: str
) -> None:
    ended = kill_and_resume(lab, Case(kind.__name__, kind), "lazy", kill)
    assert ended.verdict[0] == "equal", ended.verdict
    assert ended.verdict[1].startswith(said)


@pytest.mark.parametrize("fault", [False, True])
def test_gradients_that_were_zeroed_before_the_commit_are_compared(lab: Lab, fault: bool) -> None:
    """Nobody zeroes them between the resume and its first backward."""
    actions: dict[tuple[str, int], Action] = {("before batch", 6): other_data} if fault else {}
    case = Case("zeroes-last", ZeroesLast)
    ended = kill_and_resume(lab, case, "lazy", ("before step", 6), actions=actions)
    assert ended.verdict[0] == ("different" if fault else "equal"), ended.verdict


# Faults of the resumed attempt


def other_data(control: Control) -> None:
    torch.manual_seed(5)


def other_parameter(control: Control) -> None:
    """One bit of one parameter."""
    assert control.training is not None
    weight = next(control.training.model.parameters()).detach().view(-1)
    weight[7:8].view(torch.int32).bitwise_xor_(1 << 20)


@pytest.mark.promise(
    "the first gradients of a resume equal those that the dead attempt left, or a difference is reported"
)
@pytest.mark.promise(
    "an attribute that a dataset reads and that changes within an epoch, named in `attributes` or not: loaders "
    "read ahead of training, and workers hold copies"
)
@pytest.mark.promise(
    "anything that was not restored and affects a gradient: other data, a lost generator, a plain attribute, a "
    "bit of a parameter"
)
@pytest.mark.parametrize("fault", [other_data, other_parameter])
@pytest.mark.parametrize("point", ["backward", "after step"])
def test_it_says_different_where_a_fault_reaches_a_gradient(lab: Lab, fault: Action, point: str) -> None:
    ended = kill_and_resume(lab, PLAIN, "lazy", (point, 5), actions={("before batch", 5): fault})
    verdict, line = ended.verdict
    assert verdict == "different"
    landed = {"backward": 2, "after step": 6}[point]
    assert f"step 5's first {landed} gradients" in line
    assert re.search(r"DIFFERENT: in backward's order first that of 4\.(bias|weight): \d+ of \d+ elements differ", line)
    assert "attributes that are in no state_dict" in line


def test_the_record_that_shows_a_difference_carries_it(lab: Lab) -> None:
    """A kill behind the very commit that compares leaves no later record to say so."""
    settings = config("lazy", **WITNESS)
    assert lab.train(PLAIN, settings, actions={("after step", 5): kill_self}).of("killed")
    actions: dict[tuple[str, int], Action] = {("before batch", 5): other_data, ("after commit", 5): kill_self}
    shows = lab.train(PLAIN, settings, seed=77, actions=actions)
    later = lab.train(PLAIN, settings, seed=78, last_step=6)
    lab.stop()
    assert shows.verdict[0] == "different", shows.verdict
    assert later.of("restored")[0]["step"] == 5
    assert not later.of("restored")[0]["exact"]


class Attribute(Training):
    """A plain attribute that grows from batch to batch and scales the loss: it is in no state_dict."""

    level = 1.0

    def loss(self, step: int) -> Tensor:
        self.level += 0.25
        return super().loss(step) * self.level


def lose_generators(control: Control) -> None:
    """The data are those of the dead attempt; what is drawn behind them is not."""
    original = Training.inputs

    def inputs(self: Training) -> tuple[Tensor, Tensor]:
        drawn = original(self)
        if control.session is not None and control.step == 5:
            torch.manual_seed(11)
        return drawn

    Training.inputs = inputs  # type: ignore[method-assign]


@pytest.mark.promise("other plain attributes (numbers, lists of them) that hooks change and no `state_dict()` contains")
@pytest.mark.parametrize("case", [Case("attribute", Attribute), PLAIN], ids=["attribute", "generator"])
def test_it_finds_what_is_used_in_forward_and_not_restored(lab: Lab, case: Case) -> None:
    prepare = lose_generators if case is PLAIN else None
    ended = kill_and_resume(lab, case, "lazy", ("backward", 5), prepare=prepare)
    assert ended.verdict[0] == "different"


# What is compared


@pytest.mark.promise("a partly copied gradient is never taken for complete")
def test_a_gradient_that_was_being_copied_is_not_compared(lab: Lab) -> None:
    """The trainer dies in the middle of a copy: what is half written has no mark."""

    def prepare(control: Control) -> None:
        copies = 0

        def copy(self: HostCopier, destination: Tensor, source: Tensor) -> None:
            nonlocal copies
            if control.step == 5:
                copies += 1
                if copies == 4:
                    half = source.numel() // 2
                    destination.view(-1)[:half].copy_(source.reshape(-1)[:half])
                    destination.view(-1)[half:].fill_(float("nan"))
                    kill_self(control)
            destination.copy_(source)

        HostCopier.copy = copy  # type: ignore[method-assign]

    died = lab.train(PLAIN, config("lazy", **WITNESS), prepare=prepare)
    assert len(died.of("killed")) == 1
    ended = lab.train(PLAIN, config("lazy", **WITNESS), seed=3, last_step=7)
    lab.stop()
    assert ended.verdict[0] == "equal"
    assert ended.verdict[1].startswith("step 5's first 3 gradients")


@pytest.mark.parametrize(("limit", "shown"), [(100, "100 B"), (2048, "2.0 KiB")])
def test_no_more_is_set_aside_than_allowed(lab: Lab, monkeypatch: pytest.MonkeyPatch, limit: int, shown: str) -> None:
    monkeypatch.setattr(first_steps, "WITNESS_BYTES", limit)
    ended = kill_and_resume(lab, PLAIN, "lazy", ("after step", 5))
    assert ended.verdict[0] == "equal"
    assert f"({shown})" in ended.verdict[1]


def test_they_are_compared_where_no_record_is_being_written(lab: Lab) -> None:
    """Another period is another layout: the next commit begins a generation, and no slot is written before."""
    ended = kill_and_resume(lab, PLAIN, "lazy", ("after step", 5), settings=config("lazy", 3, **WITNESS))
    assert ended.verdict[0] == "equal"
    assert "step 5's first 6 gradients" in ended.verdict[1]


def test_gradients_of_another_tap_are_not_compared(lab: Lab) -> None:
    settings = config("lazy", tap="step", **WITNESS)
    ended = kill_and_resume(lab, PLAIN, "lazy", ("after step", 5), settings=settings)
    assert ended.verdict[0] == "equal"
    assert ended.verdict[1].endswith(
        "as no step was compared: the dead attempt took its gradients by another tap (streaming, now step)"
    )


def test_a_failure_to_compare_never_reaches_training(lab: Lab) -> None:
    def prepare(control: Control) -> None:
        def failing(kept: Any, found: Tensor) -> None:
            raise RuntimeError("out of memory")

        first_steps._compare = failing

    ended = kill_and_resume(lab, PLAIN, "lazy", ("after step", 5), prepare=prepare)
    assert ended.verdict[0] == "equal"
    assert "failed: RuntimeError: out of memory" in ended.verdict[1]


# Beside the other checks


def test_it_can_be_turned_off(lab: Lab) -> None:
    ended = kill_and_resume(lab, PLAIN, "lazy", ("after step", 5), settings=config("lazy", resume_check="off"))
    assert "resume check" not in ended.log


def test_where_no_step_can_be_repeated_it_is_what_is_left(lab: Lab) -> None:
    """A generation began with the resumed record: nothing is before it."""
    ended = kill_and_resume(lab, PLAIN, "lazy", ("after step", 2), settings=config("lazy", resume_check="replay"))
    assert ended.verdict[0] == "equal"
    assert "a generation began at record 1" in ended.verdict[1]
    assert verdict_of(ended.log).startswith("step 2's first 6 gradients")


@pytest.mark.parametrize("fault", [None, other_data])
def test_of_captured_state_the_next_commit_is_compared(lab: Lab, fault: Callable[[Control], None] | None) -> None:
    settings = config("snapshot", snapshot_every_steps=4, **WITNESS)
    died = lab.train(PLAIN, settings, actions={("backward", 11): kill_self})
    assert len(died.of("killed")) == 1
    actions = {} if fault is None else {("after step", 9): fault}
    ended = lab.train(PLAIN, settings, seed=9, actions=actions, last_step=11)
    lab.stop()
    assert ended.restored_step == 8
    assert ended.verdict[0] == ("equal" if fault is None else "different"), ended.verdict
    assert "compared by a sample" in ended.verdict[1]


# Several ranks


@pytest.mark.parametrize("nodes", [False, True], ids=["one-agent", "two-agents"])
def test_ranks_put_together_what_each_has(lab: Lab, nodes: bool) -> None:
    job = replace(job_of(lab, nodes=nodes), config=config("lazy", **WITNESS))
    died = replace(job, directory=fresh_directory(lab), deaths=[Death("all", 6, "stepped")])
    assert run(lab, died) == [-signal.SIGKILL] * 2
    last = replace(job, directory=fresh_directory(lab), number=1, last_step=8)
    assert run(lab, last) == [0, 0]
    said = [verdict_of(log) for log in logs(lab) if "resume check" in log]
    assert len(said) == 1  # of all ranks together, by the first
    assert re.match(r"step \d+'s first \d+ gradients \(.*\) are those .*: equal, bit for bit", said[0])


def test_another_ranks_batch_is_found(lab: Lab) -> None:
    """One of two ranks draws other data; the average that both have differs."""
    job = replace(job_of(lab), config=config("lazy", **WITNESS))
    died = replace(job, directory=fresh_directory(lab), deaths=[Death("all", 6, "stepped")])
    assert run(lab, died) == [-signal.SIGKILL] * 2

    def draw_alike(training: Any, step: int) -> None:
        if training.rank == 1:
            torch.manual_seed(7)

    last = replace(job, directory=fresh_directory(lab), number=1, last_step=8, each_step=draw_alike)
    assert run(lab, last) == [0, 0]
    (said,) = [verdict_of(log) for log in logs(lab) if "resume check" in log]
    assert re.search(r"DIFFERENT: in backward's order first that of \S+ on rank [01]: .* \((\d+) of \1 differ\)", said)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "setup", [Setup(), Setup(offload=True), pytest.param(Setup("tp"), marks=pytest.mark.slow)], ids=str
)
def test_shards_are_compared_where_they_are(lab: Lab, setup: Setup) -> None:
    job = sharded_cases.job_of(lab, setup, config("lazy", **WITNESS))
    died = replace(job, deaths=[Death("all", 4, "stepped")])
    assert set(run(lab, died)) == {-signal.SIGKILL}
    last = replace(job, directory=fresh_directory(lab), number=1)
    assert set(run(lab, last)) == {0}
    (said,) = re.findall(r"resume check: (.*)", "".join(logs(lab)))
    assert re.match(r"step \d+'s first \d+ gradients \(.*\) are those .*: equal, bit for bit", said)


def logs(lab: Lab) -> list[str]:
    return [path.read_text() for path in sorted(lab.directory.glob("*-rank?.log"), key=os.path.getmtime)]
