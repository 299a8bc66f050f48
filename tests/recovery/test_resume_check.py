"""The check of a resume, broken on purpose: with a fault on one side it says *different*, and names it."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from memckpt.recovery.comparison import ComparedKind, Comparison, Findings
from memckpt.session.resume.report import ResumeCheck, judge
from tests.support.faults.frozen import differences
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import Action, Control, config, kill_agent, kill_self
from tests.support.trainings.engine_harness import Ended, Lab, collect
from tests.support.trainings.engine_training import CLASSES, INPUTS, Case, Training


class Data:
    """Batches in an order; which is next belongs to the state."""

    def __init__(self) -> None:
        self.next = 0

    def batch(self) -> tuple[Tensor, Tensor]:
        chance = torch.Generator().manual_seed(self.next)
        self.next += 1
        return torch.randn(16, INPUTS, generator=chance), torch.randint(0, CLASSES, (16,), generator=chance)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]

    @staticmethod
    def parts(state: dict[str, int]) -> dict[Any, Any]:
        return {("data position", "data"): state["next"]}


class Net(nn.Module):
    """Something of all that is compared: buffers, a frozen tensor, a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(INPUTS, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(64, CLASSES)
        self.unused = nn.Linear(8, 8)
        self.frozen = nn.Parameter(torch.randn(CLASSES), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)) + self.frozen


class Fragile(Training):
    """Trains on data of its own, with an attribute in the loss that is in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.data = self.registered["data"] = Data()
        self.temperature = 1.0

    def make_model(self) -> nn.Module:
        return Net()

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW([each for each in self.model.parameters() if each.requires_grad], lr=1e-2)]

    def loss(self, step: int) -> Tensor:
        x, y = self.data.batch()
        return functional.cross_entropy(self.model(x + float(np.random.rand())) * self.temperature, y)


FRAGILE = Case("fragile", Fragile, steps=40)
Fault = Callable[[Fragile], None]


def _flip_bit(tensor: Tensor) -> None:
    """One bit, in the middle of the mantissa."""
    tensor.data.view(torch.int32).view(-1)[0] ^= 1 << 12


def _skip_a_batch(training: Fragile) -> None:
    training.data.next += 1


def _attribute(training: Fragile) -> None:
    training.temperature = 1.25


def _zeros_for_none(training: Fragile) -> None:
    training.model.unused.weight.grad = torch.zeros(8, 8)


def _frozen(training: Fragile) -> None:
    training.model.frozen.data += 1.0


#: A fault, the point of the repeated step at which it happens, and what is named; first, unless it begins with "; ".
FAULTS: list[tuple[Fault, str, str]] = [
    (_skip_a_batch, "before batch", "data position data: "),
    (lambda training: np.random.seed(5), "before batch", "generators numpy"),
    (
        lambda training: training.optimizers[0].param_groups[0].update(lr=0.5),
        "before step",
        "hyperparameters step 1 of AdamW (optimizer 0).0.lr: 0.5 in place of 0.0",
    ),
    (_zeros_for_none, "before step", "gradient of unused.weight: a tensor in place of None"),
    (_attribute, "before batch", "; gradients already differ, first that of "),
    (lambda training: _flip_bit(training.model.head.weight), "before batch", "parameter "),
    (
        lambda training: _flip_bit(training.model.body[1].running_mean),
        "before batch",
        "buffer body.1.running_mean: 1 of",
    ),
    (
        lambda training: _flip_bit(training.optimizers[0].state[training.model.head.bias]["exp_avg"]),
        "before step",
        "; state head.bias (exp_avg): 1 of",
    ),
    (_frozen, "before batch", "frozen frozen: 10 of 10 elements differ"),
]


def _inject(fault: Fault) -> Action:
    def action(control: Control) -> None:
        assert isinstance(control.training, Fragile)
        fault(control.training)

    return action


def _mend(control: Control) -> None:
    """Of what is in no state: the fault was in the repeated step alone."""
    assert isinstance(control.training, Fragile)
    control.training.temperature = 1.0


@pytest.mark.promise(
    "a difference in a repeated step is reported, whatever its cause, and training goes on from the held state"
)
@pytest.mark.promise("*different*")
@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_each_fault_is_named_and_training_goes_on_from_what_was_held(lab: Lab, redo: str) -> None:
    """Each process repeats a step with a fault in it, and dies two steps later."""
    settings = config(redo)
    step = 3
    lab.train(FRAGILE, settings, actions={("after commit", step): kill_self})
    for number, (fault, point, named) in enumerate(FAULTS):
        actions: dict[tuple[str, int], Action] = {(point, step): _inject(fault), ("after commit", step): _mend}
        last = fault is FAULTS[-1][0]
        if not last:
            actions["after commit", step + 2] = kill_self
        ended = lab.train(FRAGILE, settings, seed=100 + number, actions=actions, unchecked=None)
        verdict, line = ended.verdict
        assert ended.restored_step == step
        assert verdict == "different", line
        start = f"step {step} was repeated: DIFFERENT: "
        assert line.startswith(start if named.startswith("; ") else start + named), line
        assert named in line, line
        assert "the usual causes: plain attributes that are in no state_dict" in line
        assert "gradients kept from the step before" in line
        wrong = {each: value for each, value in ended.losses.items() if lab.reference(FRAGILE).losses[each] != value}
        assert set(wrong) <= {step}, f"losses differ at {sorted(wrong)}"
        step += 2
    assert differences(lab.reference(FRAGILE).outcome, ended.outcome) == []


def _refused(lab: Lab, **arguments: Any) -> str:
    """The log of a process that ends with an error."""
    child, report = lab.begin(FRAGILE, config(resume_check="require"), **arguments)
    ended = collect(child, report)
    assert ended.code not in (0, -signal.SIGKILL), ended.log[-3000:]
    return ended.log


@pytest.mark.promise('`resume_check="require"` ends training and keeps the held state')
def test_require_ends_training_and_leaves_what_is_held(lab: Lab) -> None:
    settings = config(resume_check="require")
    lab.train(FRAGILE, settings, actions={("after commit", 9): kill_self})
    fault = {("before batch", 9): _inject(_attribute), ("after commit", 9): _mend}
    for seed in (2, 3):
        log = _refused(lab, seed=seed, actions=fault)
        assert "ResumeMismatchError: resume_check='require': expected training to repeat what is held" in log
        assert lab.status().step == 9
    equal = lab.train(FRAGILE, settings, seed=4, actions={("after commit", 11): kill_self})
    assert (equal.restored_step, equal.verdict[0]) == (9, "equal")
    fault = {("before batch", 11): _inject(_attribute), ("after commit", 11): _mend}
    accepts = config(resume_check="require", accept_changes=True)
    accepted = lab.train(FRAGILE, accepts, seed=5, actions=fault, unchecked=None)
    assert (accepted.restored_step, accepted.verdict[0]) == (11, "different")
    assert "training goes on all the same, as accept_changes says" in accepted.log
    assert differences(lab.reference(FRAGILE).outcome, accepted.outcome) == []


def _unrepeatable(control: Control) -> None:
    assert control.session is not None
    control.session.unrepeatable("a file was written in it")


def _resumed(lab: Lab, step: int, settings: Any, again: Any = None, **arguments: Any) -> Ended:
    """Killed behind `step`, and resumed."""
    actions: dict[tuple[str, int], Action] = {("after commit", step): kill_self, **arguments.pop("actions", {})}
    lab.train(PLAIN, settings, actions=actions)
    ended = lab.train(PLAIN, again or settings, seed=2, unchecked=None, **arguments)
    assert differences(lab.reference(PLAIN).outcome, ended.outcome) == []
    return ended


@pytest.mark.promise(
    "a difference in a repeated step is reported, whatever its cause, and training goes on from the held state"
)
@pytest.mark.promise("*equal*, with `no step was compared`")
@pytest.mark.parametrize(
    ("step", "arguments", "reason"),
    [
        (1, {}, "a generation began at record 1"),
        (9, {"resume": 8}, "resume=8"),
        (9, {"actions": {("forward", 9): _unrepeatable}}, "a file was written in it"),
    ],
    ids=["generation", "resume", "unrepeatable"],
)
def test_where_no_step_can_be_repeated_the_line_says_why(
    lab: Lab, step: int, arguments: dict[str, Any], reason: str
) -> None:
    ended = _resumed(lab, step, config(), **arguments)
    verdict, line = ended.verdict
    assert verdict == "equal"
    unknown = "other elements were not compared, as no step was compared"
    assert re.fullmatch(rf"a sample of .*: [\d,]+ elements of .* are equal, bit for bit; {unknown}: {reason}", line)
    assert f"memckpt: resume check: {line}" in ended.log


def test_a_step_before_which_something_was_written_is_repeated(lab: Lab) -> None:
    ended = _resumed(lab, 9, config(), actions={("forward", 8): _unrepeatable})
    assert ended.verdict[0] == "equal", ended.verdict[1]
    assert "resuming from local memory at step 9, which is repeated first, as a proof" in ended.log


def _die_once_applied(control: Control) -> None:
    """The replica has gone on to the newest record."""
    assert control.session is not None
    control.session._link.wait_applied(control.step)
    kill_self(control)


def test_a_replica_that_nobody_asked_to_stay_behind_has_gone_past(lab: Lab) -> None:
    actions = {("after commit", 9): _die_once_applied}
    ended = _resumed(lab, 9, config("eager", resume_check="off"), config("eager"), actions=actions)
    assert (ended.restored_step, ended.verdict[0]) == (9, "equal")
    assert ended.verdict[1].endswith("record 8: the attempt before was not started with resume_check='replay'")


def test_a_captured_state_is_proved_by_the_rank_state_of_the_next_step(lab: Lab) -> None:
    settings = config("snapshot", snapshot_every_steps=4)
    ended = _resumed(lab, 11, settings)
    assert ended.verdict[0] == "equal"
    assert "was taken again, and compared by a sample" in ended.verdict[1]


def test_without_what_comes_behind_it_a_captured_state_is_proved_by_its_sample(lab: Lab) -> None:
    ended = _resumed(lab, 8, config("snapshot", snapshot_every_steps=4))
    assert ended.verdict[0] == "equal"
    assert ended.verdict[1].endswith("as no step was compared: state is copied every 4 steps, and no step is redone")


@pytest.mark.promise("a death in the repeated step, of trainer or agent, loses nothing")
@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_a_death_in_the_repeated_step_loses_nothing(lab: Lab, redo: str) -> None:
    kills = [("after commit", 9), ("backward", 9), ("in commit", 9), ("before batch", 9)]
    attempts = lab.survives(PLAIN, config(redo), kills, expected=[9, 9, 9, 9])
    assert attempts[-1].verdict[0] == "equal"


@pytest.mark.promise("a death in the repeated step, of trainer or agent, loses nothing")
@pytest.mark.parametrize("redo", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
def test_an_agent_that_dies_in_the_repeated_step(lab: Lab, redo: str) -> None:
    """What redo needs is mapped in this process, too."""
    lab.train(PLAIN, config(redo), actions={("after commit", 9): kill_self})
    ended = lab.train(PLAIN, config(redo), seed=2, actions={("backward", 9): kill_agent})
    assert ended.verdict[0] == "equal"
    assert ended.verdict[1].startswith("step 9 was repeated: ")
    assert "protected again from step" in ended.log
    assert differences(lab.reference(PLAIN).outcome, ended.outcome) == []


def _found(found: Tensor, held: Tensor) -> Findings:
    comparison = Comparison()
    comparison.tensor("parameter", "weight", found, held)
    return comparison.findings()


def test_what_differs_is_named_in_the_order_of_the_model() -> None:
    comparison = Comparison()
    for name in ("head.bias", "embed.weight (exp_avg)", "embed.weight", "not.of.the.model", "block.weight"):
        kind: ComparedKind = "state" if "(" in name else "parameter"
        comparison.tensor(kind, name, torch.ones(3), torch.zeros(3))
    found = comparison.findings(["embed.weight", "block.weight", "head.bias"])
    named = [one.name for one in found.differences if one.kind == "parameter"]
    assert named == ["embed.weight", "block.weight", "head.bias", "not.of.the.model"][: len(named)]
    assert len(named) > 1


@pytest.mark.promise("*rounding*")
def test_rounding_is_for_accelerators_and_for_tensors() -> None:
    held = torch.linspace(1.0, 2.0, 100)
    near, far = held * (1 + 1e-6), held * (1 + 1e-3)
    for found, accelerated, verdict in [
        (held, True, "equal"),
        (near, True, "rounding"),
        (far, True, "different"),
        (near, False, "different"),
        (far.bfloat16(), True, "rounding"),
    ]:
        check = ResumeCheck("replay")
        same = held.to(found.dtype)
        judge(check, [_found(found, same)], accelerated, "step 3 was repeated")
        assert check.verdict == verdict, check.line
    assert "they differ at most by" in check.line
    assert check.line.endswith("units in the last place, in weight")


def test_logged_values_may_be_rounded_and_nothing_else_that_is_no_tensor() -> None:
    for kind, verdict in (("logged values", "rounding"), ("registered", "different"), ("data position", "different")):
        comparison = Comparison()
        comparison.value(
            kind, "loss", {"loss": torch.tensor(0.5), "lr": 1.0}, {"loss": torch.tensor(0.5001), "lr": 1.0}
        )
        check = ResumeCheck("replay")
        judge(check, [comparison.findings()], True, "step 3 was repeated")
        assert check.verdict == verdict
    comparison = Comparison()
    comparison.value("logged values", "loss", {"loss": 0.5}, {"loss": 0.7})
    judge(check, [comparison.findings()], True, "step 3 was repeated")
    assert check.verdict == "different"


def test_a_registered_tensor_has_a_distance() -> None:
    comparison, held = Comparison(), {"mean": torch.ones(4), "count": 3}
    comparison.value("registered", "average", {**held, "mean": torch.tensor([1.0, 1.0, 1.5, 1.0])}, held)
    [difference] = comparison.findings().differences
    assert difference.name == "average.mean"
    assert difference.text.startswith("1 of 4 elements differ, by 0.5 of the largest value at most (4.19e+06 units in")
    assert (difference.relative, difference.dtype) == (0.5, "float32")
    comparison = Comparison()
    comparison.value("registered", "average", torch.ones(2), torch.ones(3))
    comparison.value("generators", "torch", b"ab", b"abc")
    assert [each.text for each in comparison.findings().differences] == [
        "a tensor of 2 elements in place of a tensor of 3 elements",
        "2 bytes (9e83486d) in place of 3 bytes (352441c2)",
    ]


def test_ranks_are_named_and_causes_come_first() -> None:
    first, second = Comparison(), Comparison()
    first.tensor("parameter", "weight", torch.ones(4), torch.zeros(4))
    second.value("data position", "loader 0", {"batches": 3}, {"batches": 4})
    check = ResumeCheck("replay")
    judge(check, [first.findings(), second.findings()], False, "step 3 was repeated")
    assert check.line.startswith(
        "step 3 was repeated: DIFFERENT: data position loader 0.batches on rank 1: 3 in place of 4; parameter weight"
    )
    assert dataclasses.asdict(check)["verdict"] == "different"
