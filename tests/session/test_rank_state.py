"""The rank state: names that are held and names that are registered."""

from __future__ import annotations

import copy
import enum
import logging
import re
import weakref
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memckpt.capture import gradient_ops
from memckpt.capture.beside.attributes import FoundObjects, modules_beside
from memckpt.capture.beside.modules import ModuleTree
from memckpt.capture.beside.strangers import Helpers
from memckpt.capture.copier import HostCopier
from memckpt.capture.live_state import LiveState
from memckpt.errors import ConfigurationError
from memckpt.recovery.comparison import Comparison
from memckpt.session.rank_state import ACCEPTED, EARLIER, MADE, RankState
from memckpt.session.resume.report import RestoreReport, ResumeCheck, judge
from tests.support import odd_tensors


class Counter:
    """An object with a state."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.fixture
def rank_state() -> RankState:
    # Of no use to what is tested here, but other sessions of this process ask it what it carries.
    live: Any = SimpleNamespace(model=torch.nn.Identity(), extra_modules={}, optimizers=[])
    return RankState(live, HostCopier())


def test_attributes_of_a_protected_optimizer_are_refused_with_what_carries_them() -> None:
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1) for _ in range(2)]
    live: Any = SimpleNamespace(model=torch.nn.Identity(), extra_modules={}, optimizers=optimizers[:1])
    rank_state = RankState(live, HostCopier())
    for each in optimizers:
        vars(each)["boost"] = 1.0
    with pytest.raises(ConfigurationError, match=r"the optimizer SGD, .* redo='snapshot'"):
        rank_state.register("opt", optimizers[0], ["boost"])
    rank_state.register("opt", optimizers[1], ["boost"])  # which steps nothing that is protected


def test_other_names_than_the_held_ones_are_named(rank_state: RankState) -> None:
    counter = Counter()
    rank_state.register("lr_sched", counter)
    said = rank_state.load_registered({"sched": {"at": 7}})
    assert counter.at == 0
    assert "['sched'], found ['lr_sched']: 'sched' is not restored and 'lr_sched' starts as it is" in said


class Started:
    """A start of a script: its rank state, with an optimizer and a schedule."""

    def __init__(self, lr: float, steps: int, *, two_groups: bool = False, trained: bool = False) -> None:
        weight = torch.nn.Parameter(torch.ones(1))
        groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.5}] if two_groups else []
        optimizer = torch.optim.AdamW([{"params": [weight]}, *groups], lr)
        if trained:
            weight.square().backward()
            optimizer.step()
        live: Any = SimpleNamespace(model=torch.nn.Identity(), extra_modules={}, optimizers=[optimizer])
        schedule = lr_scheduler.CosineAnnealingLR(optimizer, steps)
        self.rank_state = RankState(live, HostCopier())
        self.rank_state.register("schedule", schedule)

    def held(self, before: Started | None = None) -> Started:
        """Resume from another start of the script."""
        if before is not None:
            self.rank_state.load([MADE], {MADE: before.rank_state._captures[MADE]()})
        return self


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({}, ""),
        ({"lr": 0.01}, "lr=0.01 of AdamW (the run: 0.1). To"),
        ({"steps": 200}, "T_max=200 of the CosineAnnealingLR 'schedule' (the run: 100)"),
        ({"lr": 0.01, "trained": True}, ""),
    ],
)
def test_settings_that_a_restarted_script_makes_otherwise_are_named(
    now: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = Started(0.1, 100)
    with caplog.at_level(logging.WARNING):
        again = Started(**{"lr": 0.1, "steps": 100, **now}).held(first)
    (found,) = [each.getMessage() for each in caplog.records] or [""]
    assert said in found
    assert bool(said) == bool(found)
    caplog.clear()
    Started(0.1, 100).held(again)
    assert not caplog.records, "what the run began with stays"


def test_settings_of_groups_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Started(0.2, 100, two_groups=True).held(Started(0.1, 100, two_groups=True))
    (found,) = [each.getMessage() for each in caplog.records]
    assert "lr=0.2 of AdamW, group 0 (the run: 0.1). To" in found


@pytest.mark.promise("an optimizer that `attach()` was not given")
def test_a_run_that_is_not_exact_says_so_once_and_hands_it_on(
    rank_state: RankState, caplog: pytest.LogCaptureFixture
) -> None:
    rank_state.inexact("the scheduler is not registered")
    rank_state.inexact("the scheduler is not registered")
    assert caplog.messages == ["memckpt: a resume of this run will not be exact: the scheduler is not registered"]
    assert rank_state.take_over({"inexact": ["a stream"]}) == ("a stream",)
    assert RestoreReport(1, 1, "storage", 0.1, 0).exact
    assert not RestoreReport(1, 1, "storage", 0.1, 0).because("", "a stream").exact
    report = RestoreReport(1, 1, "storage", 0.1, 0, check=ResumeCheck("witness"))
    report.check.settle("different", "step 2 differs")
    assert (report.exact, report.reasons) == (False, ("step 2 differs",))


def test_a_printed_report_reads_as_a_person_would_write_it() -> None:
    report = RestoreReport(6, 6, "local memory", 0.3828, 0, check=ResumeCheck("replay"), repeated=7)
    begun = "resumed at step 7 from local memory in 0.38 s, 0 steps lost; step 7 is repeated first, as a proof"
    assert str(report) == f"{begun}; exact so far"
    report.check.settle("equal", "step 7 was repeated: all are equal, bit for bit")
    assert str(report) == f"{begun}; exact by what was compared"
    report = RestoreReport(6, 6, "peers", 2.5, 1, check=ResumeCheck("off", "off"))
    begun = "resumed at step 6 from peers in 2.50 s, 1 step lost"
    assert str(report) == f"{begun}; exact as far as is known: no step was compared"
    assert str(report.because("a stream", "a clock")) == f"{begun}; not exact: a stream (and 1 more in report.reasons)"


def test_a_printed_report_leaves_the_usual_causes_of_a_difference_to_the_log() -> None:
    comparison = Comparison()
    comparison.tensor("parameter", "weight", torch.ones(3), torch.zeros(3))
    report = RestoreReport(6, 6, "storage", 0.5, None, check=ResumeCheck("replay"))
    judge(report.check, [comparison.findings()], False, "step 7 was repeated")
    assert "the usual causes" in report.reasons[0]
    assert "gradients kept from the step before" in report.reasons[0]
    assert re.fullmatch(
        r"resumed at step 6 from storage in 0\.50 s, later steps, if there were any, are repeated; not exact: step 7 "
        r"was repeated: DIFFERENT: parameter weight: 3 of 3 elements differ, [^;]*",
        str(report),
    )


class Refusing(Counter):
    """An object whose methods are there and raise."""

    def __init__(self, kept: bool = False) -> None:
        super().__init__()
        self.kept = kept

    def state_dict(self) -> dict[str, int]:
        if not self.kept:
            raise NotImplementedError("no state")
        return super().state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise ValueError("not that one")


def found_in(model: nn.Module, carried: Sequence[Any] = ()) -> tuple[FoundObjects, list[str]]:
    """What is found on a model, and what is said of it."""
    said: list[str] = []
    return FoundObjects(lambda: {"model": model}, lambda: carried, said.append, "name {!r}"), said


def test_objects_that_nobody_has_named_keep_no_training_from_its_steps() -> None:
    """Their state_dict() may raise, from the start or later; so may their load_state_dict()."""
    model = torch.nn.Module()
    held = Refusing(kept=True)
    vars(model).update(never=Refusing(), held=held)
    objects, said = found_in(model)
    state = objects.state_dict()
    assert list(state) == ["model.held"]
    assert not said
    objects.load_state_dict(state)
    held.kept = False
    assert objects.state_dict() == {}
    assert [one.partition("raises ")[2] for one in said] == ["ValueError: not that one", "no state"]


def test_what_a_loader_has_departed_from_is_said_once(rank_state: RankState, caplog: pytest.LogCaptureFixture) -> None:
    rank_state.carry([EARLIER + "the sampler has no state"])
    rank_state.inexact("loader 0: the sampler has no state")
    assert rank_state.reasons == (EARLIER + "the sampler has no state",)
    assert not caplog.messages


def test_what_a_user_goes_on_with_is_accepted(rank_state: RankState) -> None:
    rank_state.carry([EARLIER + "a check", "a loader"])
    rank_state.accept([EARLIER + "a check", "a loader", "a sample"])
    assert rank_state.reasons == ("a loader", ACCEPTED + "a check", ACCEPTED + "a sample")


class Timed:
    """A scheduler as other libraries have them: torch's mark is not on the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        """Change nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {"timed": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Change nothing."""


class Wrapper(Timed):
    """An optimizer that is prepared by a framework."""

    def zero_grad(self) -> None:
        """Change nothing."""


def _chain(optimizer: torch.optim.Optimizer) -> lr_scheduler.SequentialLR:
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, 3)]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


@pytest.mark.promise("a scheduler, of any library, or a gradient scaler that nobody carries")
@pytest.mark.parametrize(
    "make", [lr_scheduler.ReduceLROnPlateau, lambda one: lr_scheduler.StepLR(one, 3), Timed, _chain]
)
def test_a_scheduler_that_nobody_carries_is_named(make: Any) -> None:
    """Also beside another one that is carried; not where it is a part of one, or a provided value has its state."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], torch.tensor(0.1), foreach=False)
    other = lr_scheduler.ExponentialLR(optimizer, 0.9)
    scheduler = make(optimizer)
    name = type(scheduler).__name__

    def found(*carried: object, **provided: Any) -> list[str]:
        return list(Helpers(lambda: [optimizer]).find_uncarried(carried, provided))

    assert [name in line for line in found(other)].count(True) == 1
    assert found(other, scheduler) == []
    assert name in str(found(other, SimpleNamespace(scheduler=scheduler))), "what is carried need not carry it"
    held = {"mine": {"rate": scheduler.state_dict()}}
    assert not any(name in line for line in found(other, **held))
    wrapped = Timed(Wrapper(optimizer))  # type: ignore[arg-type]
    assert "Timed" in str(found(other, scheduler)), "a scheduler of a prepared optimizer"
    assert found(other, scheduler, wrapped) == []


class Deaf:
    """A listener, since gradients are followed while there is one."""

    def gradients_change(self, kind: str, operand: Any, params: list[torch.Tensor]) -> None:
        """Do nothing."""

    def gradients_changed(self, params: list[torch.Tensor]) -> None:
        """Do nothing."""


@pytest.mark.promise("a scheduler, of any library, or a gradient scaler that nobody carries")
def test_a_gradient_scaler_that_nobody_carries_is_named() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], 0.1), torch.amp.GradScaler("cpu")
    helpers = Helpers(lambda: [optimizer])
    listener = Deaf()
    gradient_ops.listen(listener)
    assert not list(helpers.find_uncarried([], {}))
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    gradient_ops.unlisten(listener)
    assert ["scaler GradScaler" in line for line in helpers.find_uncarried([], {})] == [True]
    assert not list(Helpers(lambda: [optimizer]).find_uncarried([scaler], {}))


class Buffer(Counter):
    """What can be iterated, and is no loader."""

    def __iter__(self) -> Any:
        return iter([self.at])


class Phase(enum.Enum):
    TRAIN = 1


class Average:
    """An object whose state may get large."""

    def __init__(self, size: int) -> None:
        self.mean = torch.zeros(size)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


class Dots(dict[str, Any]):
    """A dict whose members are attributes, too."""

    __getattr__ = dict.__getitem__


def test_objects_with_a_state_are_found_wherever_they_come_to_be() -> None:
    """In containers, under each key, as soon as they are made; under the first of their names."""

    def made() -> tuple[dict[str, Any], FoundObjects, list[str]]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Module())
        vars(model[1]).update(now=None, late=None, kinds={1: Buffer()}, last=deque([Buffer()]), config=Dots(a=1))
        vars(model[1])["nested"] = {"train.loss": [Buffer()], Phase.TRAIN: Buffer(), ("a", 1): Buffer()}
        return vars(model[1]), *found_in(model)

    (ours, objects, said), (theirs, others, said_there) = made(), made()
    for _ in range(5):
        objects.state_dict()
    ours.update(now=ours["kinds"][1], late=Counter(), new=Counter())
    for place in ours["nested"].values():
        (place[0] if isinstance(place, list) else place).at = 5
    ours["kinds"][2] = Counter()
    ours["kinds"][1].at, ours["last"][0].at = 3, 4
    state = objects.state_dict()
    several = [name for name in state if ".nested." in name]
    found = ["model.1.kinds.1", "model.1.late", "model.1.kinds.2", "model.1.last.0", *several, "model.1.new"]
    assert list(state) == found
    assert len(several) == 3
    others.load_state_dict(state)
    assert (theirs["kinds"][1].at, theirs["last"][0].at) == (3, 4)
    assert [(place[0] if isinstance(place, list) else place).at for place in theirs["nested"].values()] == [5] * 3
    assert not said
    assert len(said_there) == 3, "the late ones are not there"


def test_an_object_is_carried_once_it_has_a_state_and_no_more_is_said_at_once() -> None:
    model = torch.nn.Module()
    fitted = Refusing()
    grows = Average(1)
    vars(model).update(fitted=fitted, grows=grows)
    objects, said = found_in(model)
    for _ in range(20):
        assert list(objects.state_dict()) == ["model.grows"]
    fitted.kept = True
    assert list(objects.state_dict()) == ["model.fitted", "model.grows"]
    assert not said
    grows.mean = torch.zeros(1 << 17)
    for _ in range(64):
        objects.state_dict()
    assert "model.grows, a Average, is not carried any more" in said[0]


@pytest.mark.parametrize("change", [lambda one: one.mean.add_(1), lambda one: setattr(one, "mean", one.mean + 1)])
def test_an_object_that_is_too_large_is_named_in_the_commit_behind_its_first_change(change: Any) -> None:
    model = torch.nn.Module()
    bank = Average(1 << 17)
    vars(model)["bank"] = bank
    objects, said = found_in(model)
    for _ in range(11):
        objects.state_dict()
    change(bank)
    objects.state_dict()
    (line,) = said
    assert "model.bank, a Average, changes and is not carried: each step would copy its 512.0 KiB" in line


@pytest.mark.promise(
    "an average, a teacher or another module that came while training ran, in an attribute or container of the model, "
    "a callback or the Trainer; averages that are plain tensors there, written in place or in a container, or in an "
    "object of a class of the script's"
)
def test_a_module_that_nobody_carries_is_named_once_it_changes() -> None:
    model = torch.nn.Module()
    vars(model)["average"] = None
    objects, said = found_in(model)
    for _ in range(20):
        objects.state_dict()
    model.late = average = [nn.Linear(1, 1)]  # type: ignore[assignment]
    objects.state_dict()
    objects.state_dict()
    assert not said
    average[0].bias.data.add_(1)
    objects.state_dict()
    assert "model.late.0, a Linear, changes and is not carried" in said[0]
    replaced = weakref.ref(average.pop())
    objects.state_dict()
    assert replaced() is None, "a copy of a model that a script drops is not held"


class SimpleEMA:
    """An average as tutorials write it, without a state."""

    def __init__(self, shadow: Any) -> None:
        self.shadow = shadow


def _lerp(averages: Any) -> None:
    for name in averages:
        averages[name] = averages[name] * 0.9


@pytest.mark.promise(
    "an average, a teacher or another module that came while training ran, in an attribute or container of the model, "
    "a callback or the Trainer; averages that are plain tensors there, written in place or in a container, or in an "
    "object of a class of the script's"
)
@pytest.mark.parametrize(
    ("kept", "change"),
    [
        (lambda weight: [weight, weight * 2], lambda kept: kept[1].mul_(0.9)),
        (lambda weight: {"average": weight, "of_bias": weight[0]}, _lerp),
        (lambda weight: SimpleEMA({"average": weight, "of_bias": weight[0]}), lambda kept: _lerp(kept.shadow)),
        (lambda weight: weight, lambda kept: kept.data.mul_(0.9)),
        (lambda weight: SimpleEMA([weight, weight[0]]), lambda kept: kept.shadow[0].mul_(0.9)),
    ],
)
def test_plain_tensors_that_nobody_carries_are_named_once_they_change(kept: Any, change: Any) -> None:
    model = torch.nn.Linear(2, 2)
    vars(model)["kept"] = kept(model.weight.detach().clone())
    carried: list[Any] = []
    objects, said = found_in(model, carried)
    for _ in range(3):
        objects.state_dict()
    assert not said
    change(model.kept)
    carried.append(getattr(model.kept, "shadow", model.kept))  # as if it were named
    for _ in range(64):
        objects.state_dict()
    assert not said
    carried.clear()
    carried += [model, model]  # as Lightning's module has the network that it trains
    objects, said = found_in(model, carried)
    objects.state_dict()
    change(model.kept)
    objects.state_dict()
    (line,) = said
    assert line.startswith("model.kept")
    assert "its tensors change and are not carried" in line


@pytest.mark.parametrize("name", [*odd_tensors.STORED, *odd_tensors.NOT_STORED])
def test_tensors_in_odd_states_are_looked_at_without_an_error(name: str) -> None:
    # FSDP's flat parameters keep views that a step leaves behind, for one.
    make = {**odd_tensors.STORED, **odd_tensors.NOT_STORED}[name]
    model, inside = torch.nn.Linear(2, 2), make()
    vars(model)["kept"] = [make(), make()]
    vars(model)["alone"] = make()
    model.wrap = wrap = Average(0)  # type: ignore[assignment]
    wrap.state_dict = lambda: {"kept": inside}  # type: ignore[method-assign]
    objects, said = found_in(model)
    for _ in range(3):
        objects.state_dict()
    assert not said


class Stub:
    """Stands for an object that is elsewhere: each attribute is a call."""

    __slots__ = ()
    __module__ = property(lambda self: "")  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} was asked for")


def test_what_else_an_object_of_the_script_has_is_its_own_business() -> None:
    model = torch.nn.Linear(2, 2)
    model.helper = helper = SimpleEMA(torch.zeros(3))  # type: ignore[assignment]
    helper.log = Counter()  # type: ignore[attr-defined]
    helper.stub = Stub()  # type: ignore[attr-defined]
    helper.gone = weakref.proxy(Average(0))  # type: ignore[attr-defined]
    vars(model).update(stub=Stub(), gone=weakref.proxy(Average(0)))
    objects, said = found_in(model)
    for _ in range(9):
        helper.shadow.normal_()  # scratch memory
        assert not objects.state_dict()
    assert not said
    assert modules_beside([model], {"model": model}) == {}


def test_an_object_with_the_model_s_tensors_is_named_once_what_else_it_has_changes() -> None:
    model = torch.nn.Linear(2, 2)
    count = 0
    model.wrap = wrap = Average(0)  # type: ignore[assignment]
    wrap.state_dict = lambda: {"model": model.state_dict(), "count": count}  # type: ignore[method-assign]
    objects, said = found_in(model)
    for _ in range(5):
        with torch.no_grad():
            model.weight.mul_(0.9)
        objects.state_dict()
    assert not said
    count = 1
    for _ in range(4):
        objects.state_dict()
    assert "model.wrap, a Average, changes and is not carried: its state has tensors of the model, too" in said[0]


def test_a_number_of_a_module_that_becomes_an_object_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.1))
    vars(model[0])["schedule"] = None
    tree = ModuleTree({"": model})
    vars(model[0]).update(schedule=abs, p=0.2)
    said: list[str] = []
    assert tree.describe(said.append)["numbers"] == {"0": {"p": 0.2, "inplace": False}}
    assert said == ["'schedule' of the module '0' is not carried: a builtin_function_or_method now"]


def test_numbers_that_had_not_changed_are_put_back_behind_a_later_state() -> None:
    """A resume restores the state behind a step, as a proof, and then the one before it."""
    model = torch.nn.Sequential(torch.nn.Dropout(0.1))
    tree = ModuleTree({"": model})
    before = tree.describe(pytest.fail)
    vars(model[0])["p"] = 0.3
    behind = tree.describe(pytest.fail)
    vars(model[0])["p"] = 0.1
    for described, expected in [(behind, 0.3), (before, 0.1)]:
        tree.restore_modes(described)
        assert model[0].p == expected


def test_results_and_views_are_no_state() -> None:
    model = torch.nn.Linear(2, 2)
    objects, said = found_in(model)
    model.view = model.weight.detach()[1:]  # type: ignore[assignment]
    for step in range(20):
        vars(model)["features"] = {"mean": torch.full((2,), float(step))}  # of the bias's shape
        output = model(torch.ones(2, 2))
        model.result, model.results = output.detach(), [output, output.detach()[:1]]  # type: ignore[assignment]
        with torch.no_grad():
            model.weight.mul_(0.9)
        objects.state_dict()
    assert not said


def test_modules_are_found_where_torch_does_not_look() -> None:
    """Also within each other; not wrappers of what is known, nor what cannot be held."""
    model = nn.Sequential(nn.Linear(2, 2))
    average, inner = copy.deepcopy(model[0]), copy.deepcopy(model[0])
    vars(average).update(inner=[inner])
    vars(model[0]).update(
        parent=model,
        proxy=weakref.proxy(model),
        wrapped=nn.Sequential(model[0]),
        counted=nn.Linear(2, 2, device="meta"),
        kept={"average": average},
    )
    found = modules_beside([model], {"model": model})
    assert found == {"model.0.kept.average": average, "model.0.kept.average.inner.0": inner}


class Doubling:
    """A hook."""

    def __call__(self, module: nn.Module, given: Any, found: torch.Tensor) -> torch.Tensor:
        return found * 2


def _halved(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / 2


def _with_halves(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    pass


@pytest.mark.promise(
    "a module replaced by one of another class, or hooks of modules, parameters and optimizers that came or went "
    "while training ran"
)
def test_changes_of_modules_that_a_resume_does_not_repeat_are_named() -> None:
    def changed(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        model[1] = nn.Identity()
        model[0].register_forward_hook(Doubling())
        model[0].weight.register_hook(_halved)
        optimizer.register_step_pre_hook(_with_halves)
        taken_down.remove()

    def tree_of(change: bool) -> ModuleTree:
        nonlocal taken_down
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        optimizer = torch.optim.SGD(model.parameters())
        taken_down = model[0].bias.register_hook(_halved)
        tree = ModuleTree({"": model}, [optimizer])
        if change:
            changed(model, optimizer)
            assert tree.moved()
        return tree

    taken_down: Any = None
    described = tree_of(True).describe_structure()
    assert list(tree_of(True).not_repeated(described)) == []
    dropout, of_bias, hook, of_weight, of_step = tree_of(False).not_repeated(described)
    assert "'1' had become a Identity" in dropout
    assert "'0.bias' had lost the hook _halved" in of_bias
    assert "the hook Doubling" in hook
    assert "'0.weight' had got the hook _halved" in of_weight
    assert "'optimizer0' had got the hook _with_halves" in of_step
    assert list(tree_of(True).not_repeated(tree_of(False).describe_structure())) == [], "it changes only now"


def test_hooks_of_all_modules_and_optimizers_that_a_resume_does_not_repeat_are_named() -> None:
    def tree() -> ModuleTree:
        return ModuleTree({"": nn.Linear(2, 2)})

    dead = tree()
    hooks = [
        nn.modules.module.register_module_forward_hook(Doubling()),  # type: ignore[arg-type]
        register_optimizer_step_pre_hook(_with_halves),
    ]
    described = dead.describe_structure()
    assert list(tree().not_repeated(described)) == []
    for each in hooks:
        each.remove()
    of_modules, of_optimizers = tree().not_repeated(described)
    assert "'torch.nn' had got the hook Doubling" in of_modules
    assert "'torch.optim' had got the hook _with_halves" in of_optimizers


def test_what_the_top_of_an_epoch_has_changed_in_a_group_is_put_back_by_its_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rank_state = RankState(LiveState(model, [optimizer], {}), HostCopier())
    rank_state.note_settings()
    optimizer.param_groups[0].update(lr=0.05, momentum=0.9)
    with caplog.at_level(logging.INFO, "memckpt"):
        rank_state.put_settings_back()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert (
        "put back: lr in group 0 of optimizer 0, from 0.05 to 0.1, momentum in group 0 of optimizer 0, from 0.9 to 0"
        in caplog.messages[-1]
    )


def test_a_cause_of_an_inexact_resume_is_logged_once_and_those_of_earlier_ones_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reasons = [EARLIER + "the schedule differs", ACCEPTED + "the schedule differs", EARLIER + "step 5 differs"]
    report = (
        RestoreReport(1, 1, "storage", 0.1, 0).because(*reasons, "").because("loader 0: step 5 differs", "a new one")
    )
    assert report.stated == (*reasons, "loader 0: step 5 differs", "a new one")
    said = "memckpt: training does not go on exactly: "
    assert caplog.messages == [f"{said}{EARLIER}the schedule differs; step 5 differs", f"{said}a new one"]
