"""Variables of a training loop: averages that nobody carries are named, and what each step makes anew is not."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from memckpt.capture.beside.variables import LoopVariables

STEPS = 6
NAMED = "not carried"


class Average:
    """As tutorials write it: it has no state to capture."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = weights(model)

    def update(self, model: nn.Module) -> None:
        for name, param in model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * param.detach()


class Trainer:
    """A script's own class with a loop."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.average = model, Average(model)

    def fit(self, look: Callable[[], None]) -> None:
        for _ in steps(self.model):
            self.average.update(self.model)
            look()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def steps(model: nn.Module) -> Iterator[int]:
    """Some steps, in which all weights change."""
    for step in range(STEPS):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.9)
        yield step


def nothing() -> None:
    """Stand for a restore where nothing is held."""


def averaged(model: nn.Module, look: Callable[[], None], restore: Callable[[], None] = nothing) -> None:
    average = copy.deepcopy(model)
    restore()
    for _ in steps(model):
        for ours, param in zip(average.parameters(), model.parameters(), strict=True):
            ours.data.lerp_(param.data, 0.1)
        look()


def averaged_in_a_dict(model: nn.Module, look: Callable[[], None], restore: Callable[[], None] = nothing) -> None:
    average = weights(model)
    restore()
    for _ in steps(model):
        for name, param in model.named_parameters():
            average[name].lerp_(param.detach(), 0.1)
        look()


def frozen_teacher(model: nn.Module, look: Callable[[], None], restore: Callable[[], None] = nothing) -> None:
    teacher = copy.deepcopy(model)
    restore()
    for _ in steps(model):
        teacher(torch.ones(3))
        look()


def evaluated(model: nn.Module, look: Callable[[], None]) -> None:
    """It calls a method with the name of a built-in function that fills the dict of variables."""
    average = copy.deepcopy(model)
    for _ in steps(model):
        model.eval()
        for ours, param in zip(average.parameters(), model.parameters(), strict=True):
            ours.data.lerp_(param.data, 0.1)
        look()


def with_an_empty_weight(model: nn.Module, look: Callable[[], None]) -> None:
    model.unused = nn.Linear(0, 2, bias=False)
    averaged_in_a_dict(model, look)


def late_and_nested(model: nn.Module, look: Callable[[], None]) -> None:
    held: dict[str, Any] = {"average": None}
    for step in steps(model):
        if step == 2:
            held["average"] = [*weights(model).values()]
        for average, param in zip(held["average"] or [], model.parameters(), strict=False):
            average.lerp_(param.detach(), 0.1)
        look()


def replaced_in_an_object(model: nn.Module, look: Callable[[], None]) -> None:
    average = Average(model)
    for _ in steps(model):
        average.update(model)
        look()


def of_a_trainer(model: nn.Module, look: Callable[[], None]) -> None:
    Trainer(model).fit(look)


def made_anew(model: nn.Module, look: Callable[[], None]) -> None:
    for _ in steps(model):
        before = weights(model)
        copies = [param.detach().clone() for param in model.parameters()]
        look()
        del before, copies  # what is made next may come to the same address


def of_the_model(model: nn.Module, look: Callable[[], None]) -> None:
    parameters, checkpoint = list(model.parameters()), model.state_dict()
    for _ in steps(model):
        look()
    del parameters, checkpoint


def of_the_optimizer(model: nn.Module, look: Callable[[], None]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), torch.tensor(0.1))
    for _ in steps(model):
        for group in optimizer.param_groups:
            group["lr"].mul_(0.9)
        look()


def of_another_shape(model: nn.Module, look: Callable[[], None]) -> None:
    history = [torch.zeros(2)]
    for step in steps(model):
        history[0][0] += step
        look()


def reloaded_each_step(model: nn.Module, look: Callable[[], None]) -> None:
    shown = copy.deepcopy(model)
    for _ in steps(model):
        shown.load_state_dict(model.state_dict())
        look()


def watched() -> tuple[nn.Module, LoopVariables, list[str]]:
    """A model, who looks for averages of it, and what is said of them."""
    model, said = nn.Linear(3, 2), list[str]()
    return model, LoopVariables(lambda: [model], lambda: [model], said.append), said


def said_of(loop: Callable[[nn.Module, Callable[[], None]], None], **provided: Any) -> list[str]:
    model, variables, said = watched()
    loop(model, lambda: variables.look(provided))
    return said


@pytest.mark.promise("an average or another module in a variable of the loop, or in an object there")
@pytest.mark.parametrize(
    ("loop", "name"),
    [
        (averaged, "the variable average of averaged(), a Linear,"),
        (evaluated, "the variable average of evaluated(), a Linear,"),
        (with_an_empty_weight, "the variable average of averaged_in_a_dict()"),
        (averaged_in_a_dict, "the variable average of averaged_in_a_dict()"),
        (late_and_nested, "the variable held of late_and_nested()"),
        (replaced_in_an_object, "the variable average.shadow of replaced_in_an_object()"),
        (of_a_trainer, "the variable self.average.shadow of fit()"),
    ],
)
def test_an_average_is_named_once(loop: Any, name: str) -> None:
    (reason,) = said_of(loop)
    assert reason.startswith(name)
    assert NAMED in reason


@pytest.mark.parametrize(
    "loop", [made_anew, of_the_model, of_the_optimizer, of_another_shape, reloaded_each_step, frozen_teacher]
)
def test_what_is_no_average_is_not_named(loop: Any) -> None:
    assert not said_of(loop)


# Resumes: what a new process has in its variables, and what the record's had


def begun_in_the_second_step(model: nn.Module, commit: Callable[[], None], restore: Callable[[], None]) -> None:
    average = None
    restore()
    for step in steps(model):
        if step == 1:
            average = copy.deepcopy(model)
        commit()
    del average


def made_in_each_step(model: nn.Module, commit: Callable[[], None], restore: Callable[[], None]) -> None:
    restore()
    for _ in steps(model):
        old = copy.deepcopy(model)
        with torch.no_grad():
            old.get_parameter("bias").add_(1)
        commit()


class Killed(Exception):
    """The process ends in a commit."""


def resumed(loop: Any, commits: int, **provided: Any) -> list[str]:
    """What is said where the loop is killed behind so many commits, and resumed."""
    left, reasons, held = [commits], list[str](), dict[str, tuple[str, torch.Tensor]]()

    def commit(variables: LoopVariables) -> None:
        variables.look(provided)
        left[0] -= 1
        if not left[0]:
            held.update(variables.samples)
            raise Killed

    for restores in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        variables = LoopVariables(lambda model=model: [model], lambda model=model: [model], lambda reason: None)

        def restore(model: nn.Module = model, variables: LoopVariables = variables, restores: bool = restores) -> None:
            if restores:
                for param in model.parameters():
                    param.data.mul_(0.9**commits)
                reasons.extend(variables.not_restored(held, provided))
                raise Killed

        with pytest.raises(Killed):
            loop(model, lambda variables=variables: commit(variables), restore)
    return reasons


@pytest.mark.promise("an average or another module in a variable of the loop, or in an object there")
@pytest.mark.parametrize("commits", [1, 2])  # from the third on the record itself names it
@pytest.mark.parametrize("loop", [averaged, averaged_in_a_dict])
def test_a_resume_says_which_variables_are_not_what_they_were(loop: Any, commits: int) -> None:
    """Also one at the first commit, of a process that died before it knew that the variable changes."""
    (reason,) = resumed(loop, commits)
    assert reason.startswith(f"the variable average of {loop.__name__}() is not carried, and is not what it was")


def test_a_resume_says_which_variable_was_made_before_it() -> None:
    assert not resumed(begun_in_the_second_step, 1)
    (reason,) = resumed(begun_in_the_second_step, 2)
    assert "the variable average of begun_in_the_second_step() is not carried" in reason


@pytest.mark.parametrize("loop", [frozen_teacher, made_in_each_step])
@pytest.mark.parametrize("commits", [1, 3])
def test_a_resume_says_nothing_of_what_is_as_it_was_or_made_anew(loop: Any, commits: int) -> None:
    assert not resumed(loop, commits)


def test_what_is_provided_is_carried() -> None:
    model, variables, said = watched()
    average = Average(model)
    provide = lambda: variables.look({"average": {name: one.clone() for name, one in average.shadow.items()}})  # noqa: E731
    updated_by(average, model, provide)
    assert not said


def updated_by(average: Average, model: nn.Module, look: Callable[[], None]) -> None:
    for _ in steps(model):
        average.update(model)
        look()


def average_of_a_generator(generator: nn.Module, critic: nn.Module, look: Callable[[], None]) -> None:
    average = weights(generator)
    for _ in zip(steps(generator), steps(critic), strict=True):
        for name, param in generator.named_parameters():
            average[name].lerp_(param.detach(), 0.1)
        look()


def test_an_average_of_one_of_two_modules_is_named() -> None:
    modules, said = [nn.Linear(3, 2), nn.Linear(4, 1)], list[str]()
    variables = LoopVariables(lambda: modules, lambda: modules, said.append)
    average_of_a_generator(modules[0], modules[1], lambda: variables.look({}))
    assert len(said) == 1


class Refusing(type):
    """Classes that raise where they are asked for more than their names."""

    __hash__ = None  # type: ignore[assignment]


class Odd(metaclass=Refusing):
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("nobody should ask")


class Key:
    def __repr__(self) -> str:
        raise RuntimeError("nobody should ask")


class Stateless(random.Random):
    def getstate(self) -> Any:
        raise NotImplementedError


def odd_values() -> list[Any]:
    freed = torch.zeros(3)
    freed.untyped_storage().resize_(0)
    endless: list[Any] = []
    endless.append(endless)
    uninitialized = nn.Module.__new__(nn.Module)
    lazy, meta = nn.LazyLinear(2), torch.zeros(2, 3, device="meta")
    tensors = [{freed: 1}, [meta, meta], torch.zeros(2).to_sparse()]
    return [*tensors, {Key(): 1}, Odd(), lazy, uninitialized, endless, Odd, Stateless(), random.SystemRandom()]


def beside(odd: Any, model: nn.Module, look: Callable[[], None]) -> None:
    average = weights(model)
    for _ in steps(model):
        for one in average.values():
            one.mul_(0.9).add_(0.1)
        look()
    del odd


@pytest.mark.parametrize("number", range(len(odd_values())))
def test_whatever_is_in_a_variable_training_goes_on(number: int) -> None:
    (reason,) = said_of(lambda model, look: beside(odd_values()[number], model, look))
    assert reason.startswith("the variable average of beside()")


def test_what_another_session_carries_is_carried() -> None:
    (model, variables, said), (other, beside, said_beside) = watched(), watched()
    for _ in zip(steps(model), steps(other), strict=True):
        variables.look({})
        beside.look({})
    assert not said
    assert not said_beside


def keeps_a_batch(look: Callable[[], None]) -> bool:
    batch = torch.zeros(5)
    reference = weakref.ref(batch)
    look()
    del batch
    gc.collect()
    return reference() is not None


def test_a_look_keeps_nothing_alive() -> None:
    _, variables, _ = watched()
    assert not keeps_a_batch(lambda: variables.look({}))


def test_a_dict_of_variables_that_the_script_has_stays_whole() -> None:
    model, variables, said = watched()
    settings = locals()
    variables.look({})
    assert sorted(settings) == ["model", "said", "variables"]


def test_names_that_were_made_by_exec_stay() -> None:
    _, variables, _ = watched()
    exec("made = 3")
    variables.look({})
    assert eval("made") == 3
