"""The self-test finds what cannot be redone, says why, and touches nothing of the user's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from memckpt.capture import self_test
from memckpt.capture.live_state import LiveState
from memckpt.capture.self_test import MOST_RECORDS, STEPS, SelfTest
from memckpt.state.optimizers import StateDescription, describe_state, try_steps
from tests.support.faults.frozen import freeze
from tests.support.trainings.engine_optimizers import Counting, GlobalNoise, Inner, Momentum, Norm, OwnNoise, Plain

Make = Callable[[Iterable[Any]], Optimizer]


class GroupCounter(Momentum):
    """Counts in its group, and steps with the count from before."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for param in group["params"]:
                param.sub_(param.grad, alpha=0.1 / group["count"])
            group["count"] += 1


class Rebinding(Momentum):
    """Gives its parameters other memory, in place of writing to theirs."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.data = param.data - 0.1 * param.grad


class Scribbling(Plain):
    """Writes to lists, tensors and dictionaries of its own, and does not read them, as far as three steps show."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.seen: list[int] = []
        self.sums = torch.zeros(2)
        self.table = {"steps": [0]}
        self.generator = torch.Generator().manual_seed(3)

    def factor(self) -> float:
        self.seen.append(len(self.seen))
        self.sums += 1
        self.table["steps"][0] += 1
        torch.rand(3, generator=self.generator)
        return 1.0


class Settled(Plain):
    """Sets up attributes in its first step, and lists the parameters that it steps."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.ready, self.listed = False, list(self.param_groups[0]["params"])
        self.generator = torch.Generator()

    def factor(self) -> float:
        self.ready = True
        return 1.0


class Turns(Inner):
    """Counts by what no other process can be given."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.turns = itertools.count(1)

    def factor(self) -> Any:
        if next(self.turns) % 3 == 0:
            self.inner.step()
        return 0.5


class Twice(Momentum):
    """A step around that of its parent: where torch has wrapped both, hooks see two."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Failing(Momentum):
    """Its step needs more than one parameter."""

    def step(self, closure: Any = None) -> Any:
        assert sum(len(group["params"]) for group in self.param_groups) > 1
        return super().step(closure)


class Python(Momentum):
    """Draws from the generators of python and numpy."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.01
            for param in group["params"]:
                param.sub_(param.grad, alpha=0.1 * (random.random() + float(np.random.rand())))


class Forking(Plain):
    """Draws, and puts the generator back to where it was."""

    def factor(self) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            return torch.rand(()) + 0.5


def model_of() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 3))


def train(model: nn.Module, optimizer: Optimizer, steps: int, after: Callable[[], Any] = lambda: None) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        after()


def verdicts_of(make: Make, steps: int = STEPS) -> list[str | None]:
    """What the test says after each record."""
    model = model_of()
    optimizer = make(model.parameters())
    test = SelfTest(LiveState(model, [optimizer], {}), [0])
    test.install()
    verdicts: list[str | None] = []
    train(model, optimizer, steps, lambda: verdicts.append(test.after_record()))
    test.remove()
    return verdicts


HONEST: dict[str, Make] = {
    "momentum": Momentum,
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "tensor-rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "settled": Settled,
    "group-counter": GroupCounter,
    "rebinding": Rebinding,
}


@pytest.mark.promise(
    "optimizers with hidden state, random numbers or norms over all tensors, and LBFGS, are detected, captured and "
    "resumed exactly"
)
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_optimizer_passes(name: str) -> None:
    assert verdicts_of(HONEST[name]) == [None] * (STEPS - 1) + [""]


@pytest.mark.promise(
    "an optimizer whose step depends on more than gradients, groups and state; torch's Adafactor where a group has "
    "two dtypes"
)
@pytest.mark.parametrize(
    ("make", "step", "words"),
    [
        (Counting, 2, "differs after step 2"),
        (GlobalNoise, 1, "differs after step 1"),
        (Python, 1, "differs after step 1"),
        (Forking, 1, "differs after step 1"),
        (OwnNoise, 2, "differs after step 2"),
        (Norm, 1, "differs after step 1"),
        (Turns, 3, "differs after step 3"),
        (Inner, 2, "attribute 'taken' of Inner changes from step to step"),
        (Scribbling, 2, "attribute 'seen' of Scribbling changes from step to step"),
        (Failing, 1, "a redo of Failing on copies fails (AssertionError"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_cannot_be_redone_is_found(make: Make, step: int, words: str) -> None:
    verdicts = verdicts_of(make)
    assert verdicts[: step - 1] == [None] * (step - 1)
    assert words in str(verdicts[step - 1])


@pytest.mark.parametrize("make", [Momentum, Counting, GlobalNoise, OwnNoise, Norm, Inner, Scribbling, Python])
def test_nothing_of_the_users_is_touched(make: Make) -> None:
    """Not the tensors, not the generators, not the attributes; neither by the test nor by dry runs before it."""

    def run(protected: bool) -> Any:
        model = model_of()
        optimizer = make(model.parameters())
        if protected:
            live = LiveState(model, [optimizer], {})
            test = SelfTest(live, [0])
            test.install()
            for param in model.parameters():
                describe_state(optimizer, param, optimizer.param_groups[0], {}, captured=True)
            try_steps(optimizer)
        train(model, optimizer, STEPS + 1)
        hidden = ("inner", "register_step_pre_hook")  # the latter as long as hooks are installed
        own = {name: value for name, value in vars(optimizer).items() if name[0] != "_" and name not in hidden}
        generator = own.pop("generator", None)
        drawn = None if generator is None else torch.rand(3, generator=generator)
        found = [optimizer.state_dict(), [*model.parameters()], {**own, "state": None, "param_groups": None}, drawn]
        return [freeze(each) for each in (*found, torch.get_rng_state(), random.getstate(), np.random.get_state())]

    random.seed(1)
    np.random.seed(1)
    expected = run(False)
    random.seed(1)
    np.random.seed(1)
    assert run(True) == expected


def test_a_list_of_parameters_in_an_attribute_never_leads_to_the_live_ones() -> None:
    """An optimizer that steps what an attribute lists, and not its groups."""

    class Listed(Momentum):
        def __init__(self, params: Iterable[Any]) -> None:
            super().__init__(params)
            self.listed = list(self.param_groups[0]["params"])

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for param in self.listed:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=0.1)

    model = model_of()
    before = freeze([*model.parameters()])
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    try_steps(Listed(model.parameters()))
    assert freeze([*model.parameters()]) == before
    verdicts = verdicts_of(Listed)
    assert "differs after step 1" in str(verdicts[0])


def test_a_step_that_hooks_see_twice_counts_once() -> None:
    Momentum(model_of().parameters())
    assert verdicts_of(Twice) == [None] * (STEPS - 1) + [""]


def test_steps_that_never_come_are_an_answer() -> None:
    model = model_of()
    optimizer = Momentum(model.parameters())
    test = SelfTest(LiveState(model, [optimizer], {}), [0])
    test.install()
    train(model, optimizer, 2)
    verdicts = [test.after_record() for _ in range(MOST_RECORDS)]
    assert verdicts[:-1] == [None] * (MOST_RECORDS - 1)
    assert f"Momentum has taken 2 steps in {MOST_RECORDS} records" in str(verdicts[-1])


def test_of_a_large_model_a_part_of_every_kind_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 2))
    optimizer = Momentum(model.parameters())
    monkeypatch.setattr(self_test, "MOST_BYTES", 4 * 4 * (128 + 64 + 64 + 2))
    names = {id(param): name for name, param in model.named_parameters()}
    assert {names[id(param)] for param in self_test._chosen(optimizer)} == {"2.weight", "2.bias", "0.bias", "1.bias"}
    monkeypatch.setattr(self_test, "MOST_BYTES", 0)
    assert [names[id(param)] for param in self_test._chosen(optimizer)] == ["2.bias"]


def test_a_step_that_takes_its_settings_from_the_first_parameter_is_found() -> None:
    """Torch's Adafactor takes `eps` from the dtype of a group's first parameter, for all of them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16))
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.05)
    test = SelfTest(LiveState(model, [optimizer], {}), [0])
    test.install()
    for param in model.parameters():
        # Variances between the two values of `eps`, squared, show the difference.
        param.grad = torch.full_like(param, 1e-4)
    optimizer.step()
    assert "uses more than gradients, groups and state" in str(test.after_record())
    test.remove()


def test_a_parameter_without_elements_that_a_class_cannot_step_keeps_nothing() -> None:
    empty, other = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.zeros(3, 4))
    optimizer = torch.optim.Adafactor([empty, other])
    assert describe_state(optimizer, empty, optimizer.param_groups[0], {}) == StateDescription((), ())
    assert describe_state(optimizer, other, optimizer.param_groups[0], {}).tensors
