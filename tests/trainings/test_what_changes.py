"""What comes, goes and changes beside the steps while a loop runs: killed, gone on with, and compared."""

from __future__ import annotations

import copy
import os
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import memckpt
from memckpt.capture.beside.attributes import modules_beside
from memckpt.capture.beside.presence import describe_gradients
from memckpt.capture.live_state import LiveState
from memckpt.errors import UnsupportedError
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.hand_loops import Process, in_child, process_of, survives
from tests.support.trainings.resume_history import journal_of

STEPS = 9
KILLS = [("backward", 6), ("committed", 3)]
#: Called before each step with the process and the number of the step.
Change = Callable[["Changing", int], None]


class Changing(Process):
    """A model with a layer that nobody trains, a generator of its own and extra state."""

    width = 4

    def objects(self) -> tuple[Any, Any]:
        model = Net(self.width)
        return model, torch.optim.Adam([*model.first.parameters(), *model.last.parameters()], 0.01)

    def train(self, change: Change, zero: bool = True) -> None:
        report = self.session.restore()
        assert report is None or report.exact
        for step in range(1 if report is None else report.step + 1, STEPS):
            change(self, step)
            if zero:
                self.optimizer.zero_grad()
            self.model(torch.full((3, 4), step / 8)).square().mean().backward()
            self.at("backward")
            self.optimizer.step()
            self.note(f"{step}", [list(map(float.hex, one.double().flatten().tolist())) for one in self.sums()])
            self.session.commit()
            self.at("committed")
        self.session.close()

    def sums(self) -> Iterator[torch.Tensor]:
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            yield tensor.detach().sum()
            if self.optimizer.state.get(tensor):
                yield self.optimizer.state[tensor]["exp_avg"].sum()


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(4, width), nn.Linear(width, 4), nn.Linear(4, 2)
        self.dropout, self.norm = nn.Dropout(0.1), nn.BatchNorm1d(4)
        self.generator = torch.Generator().manual_seed(3)
        self.level = 1.0
        self.register_buffer("late", None)
        self.register_buffer("cache", torch.ones(1), persistent=False)

    def get_extra_state(self) -> dict[str, float]:
        return {"level": self.level}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.level = state["level"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.level *= 0.99
        noise = torch.randn(x.shape, generator=self.generator)
        hidden = self.norm(self.frozen(self.dropout(self.first(x + noise)))) * self.level * self.cache.mean()
        return self.last(hidden if self.late is None else hidden * self.late)


def late_buffer(process: Changing, step: int) -> None:
    if step >= 4:
        process.model.late = torch.tensor(step / 5) if process.model.late is None else process.model.late * 0.9


def growing_cache(process: Changing, step: int) -> None:
    if step % 2:
        process.model.cache = torch.linspace(0.5, 1, step)


def resized_in_place(process: Changing, step: int) -> None:
    process.model.cache.resize_(1 + step // 3).copy_(torch.linspace(0.5, 1, 1 + step // 3))


def replaced(process: Changing, step: int) -> None:
    if step == 4:
        process.model.frozen.weight = nn.Parameter(process.model.frozen.weight * 1.5)
    if step == 5:
        process.model.frozen = copy.deepcopy(process.model.frozen)


def copied(process: Changing, step: int) -> None:
    """The step that a resume repeats replaces a module, too."""
    if step in (2, 3, 5):
        process.model.frozen = copy.deepcopy(process.model.frozen)
        with torch.no_grad():
            process.model.frozen.bias.mul_(0.5)


def new_head(process: Changing, step: int) -> None:
    """The optimizer goes on stepping the parameters of the old layer, which no module holds."""
    if step == 4:
        process.model.last = nn.Linear(4, 2)
        process.optimizer.add_param_group({"params": [*process.model.last.parameters()], "lr": 0.02})


def late_group(process: Changing, step: int) -> None:
    """A group takes its rate from `defaults`, which were changed long before."""
    if step == 2:
        process.optimizer.defaults["lr"] = 0.5
    if step == 7:
        process.optimizer.add_param_group({"params": [process.model.frozen.weight]})


def loaded(process: Changing, step: int) -> None:
    """Loading adds what an older torch did not write to groups and `defaults`, in the repeated step, too."""
    if step in (2, 3, 5):
        process.optimizer.defaults["lr"] = 1 / step
        process.optimizer.defaults[f"set in step {step}"] = True
        process.optimizer.load_state_dict(process.optimizer.state_dict())
    if step == 7:
        process.optimizer.add_param_group({"params": [process.model.frozen.weight]})


def tied(process: Changing, step: int) -> None:
    if step == 4:
        process.model.frozen.weight = process.model.first.weight


def flags(process: Changing, step: int) -> None:
    if step == 4:
        process.model.dropout.p = 0.5
        process.model.norm.eval()
        process.model.last.bias.requires_grad_(False)


def new_generator(process: Changing, step: int) -> None:
    if step % 3 == 1:
        process.model.generator = torch.Generator().manual_seed(step)


def late_generator(process: Any, step: int) -> None:
    if step == 3:
        process.model.late, process.model.other = torch.ones(4), torch.Generator().manual_seed(1)
    if step >= 3:
        process.model.late.mul_(1 + torch.rand(1, generator=process.model.other))


def nothing(process: Changing, step: int) -> None:
    """Gradients of the layer in no optimizer add up, as do those that nobody zeroes."""


def clipped(process: Changing, step: int) -> None:
    for param in process.model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.9)


def second_optimizer(process: Changing, step: int) -> None:
    if step == 3 or (step > 3 and not hasattr(process, "other")):
        process.other = torch.optim.Adam(process.model.frozen.parameters(), 0.01)  # type: ignore[attr-defined]
    if step > 3:
        process.other.step()  # type: ignore[attr-defined]


@pytest.mark.promise(
    "buffers and parameters, also replaced, resized, tied or late ones in modules that a new process has; "
    "averaged models outside the model"
)
@pytest.mark.promise(
    "modules' training flags, numbers of torch's own modules (`Dropout.p`), extra state, generators in "
    "attributes; `requires_grad` of every parameter"
)
@pytest.mark.promise("an optimizer that `attach()` was not given")
@pytest.mark.thinned(3)
@pytest.mark.parametrize("check", ["off", "replay"])
@pytest.mark.parametrize(
    "change",
    [
        late_buffer,
        growing_cache,
        resized_in_place,
        replaced,
        copied,
        new_head,
        late_group,
        loaded,
        tied,
        flags,
        new_generator,
        late_generator,
        second_optimizer,
    ],
    ids=lambda one: one.__name__,
)
def test_what_changes_while_training_runs(lab: Lab, change: Change, check: str) -> None:
    survives(lab, lambda process: process.train(change), KILLS, check, kind=Changing)


class Mapped(Changing):
    """A frozen table is a file that is mapped for reading: writing to it would end the process."""

    def objects(self) -> tuple[Any, Any]:
        model, optimizer = super().objects()
        file = Path(tempfile.gettempdir()) / f"table{os.getpid()}.npy"
        np.save(file, np.ones((4, 4), np.float32))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells that it is not writable
            table = torch.from_numpy(np.load(file, mmap_mode="r"))
        file.unlink()
        model.frozen.weight = nn.Parameter(table, requires_grad=False)
        return model, optimizer


class Tied(Changing):
    """Two layers have one weight."""

    def objects(self) -> tuple[Any, Any]:
        model, optimizer = super().objects()
        model.frozen.weight = model.first.weight
        return model, optimizer


@pytest.mark.parametrize("own", ["first", "frozen"])
def test_a_tied_weight_that_becomes_two(lab: Lab, own: str) -> None:
    def untied(process: Changing, step: int) -> None:
        if step == 4:
            layer = getattr(process.model, own)
            layer.weight = nn.Parameter(layer.weight.detach().clone())
            process.optimizer.add_param_group({"params": [layer.weight], "lr": 0.02})

    survives(lab, lambda process: process.train(untied), KILLS, kind=Tied)


class AllTrained(Changing):
    def objects(self) -> tuple[Any, Any]:
        model = Net(self.width)
        return model, torch.optim.Adam(model.parameters(), 0.01)


def test_a_weight_that_is_tied_and_leaves_its_optimizer(lab: Lab) -> None:
    def tie_for_good(process: Changing, step: int) -> None:
        if step == 4:
            was = process.model.norm.bias
            (group,) = process.optimizer.param_groups
            group["params"] = [param for param in group["params"] if param is not was]
            del process.optimizer.state[was]
            process.model.norm.bias = process.model.first.bias

    survives(lab, lambda process: process.train(tie_for_good), KILLS, kind=AllTrained)


@pytest.mark.parametrize("comes", [True, False])
def test_a_module_without_tensors_that_comes_or_goes_is_said(lab: Lab, comes: bool) -> None:
    def change(process: Changing, step: int) -> None:
        if step == 3 and comes:
            process.model.norm.added = nn.Sequential(nn.Sequential(nn.Dropout(0.2)))
        elif step == 3:
            del process.model.norm.unused

    class WithUnused(Changing):
        def objects(self) -> tuple[Any, Any]:
            model, optimizer = super().objects()
            model.norm.unused = nn.Dropout(0.3)
            return model, optimizer

    def die() -> None:
        process_of(lab, ("committed", 5), "off", kind=WithUnused).train(change)

    def go_on() -> None:
        process = process_of(lab, None, "off", kind=WithUnused)
        process.train(nothing)
        assert not process.session.report.exact

    in_child(lab, die, status=-signal.SIGKILL)
    words = "'norm.added', a Sequential, had come" if comes else "'norm.unused' had gone"
    told = in_child(lab, go_on)
    assert f"{words} while training ran" in told
    assert "norm.added.0" not in told, "what is below a module is not told of"


class Averages(nn.Module):
    """Three buffers, of which the first changes in place; all count."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.BatchNorm1d(1, affine=False) for _ in range(3))
        if tied:
            self.three.running_mean = self.one.running_mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        means = [self.one.running_mean, self.two.running_mean, self.three.running_mean]
        with torch.no_grad():
            means[0].mul_(0.9).add_(x.mean(), alpha=0.1)
            means[1].mul_(0.8).add_(x.mean(), alpha=0.2)
        return x + means[0] + 2 * means[1] + 3 * means[2]


class WithAverages(Changing):
    tied: ClassVar[bool]

    def objects(self) -> tuple[Any, Any]:
        model, optimizer = super().objects()
        model.frozen = Averages(self.tied)
        return model, optimizer


class TiedAverages(WithAverages):
    tied = True


class OwnAverages(WithAverages):
    tied = False


def tie_averages(process: Changing, step: int) -> None:
    if step == 4:
        process.model.frozen.three.running_mean = process.model.frozen.one.running_mean


def tie_other_averages(process: Changing, step: int) -> None:
    """The names that tensors have are as before."""
    if step == 4:
        process.model.frozen.three.running_mean = process.model.frozen.two.running_mean


def tie_resized_averages(process: Changing, step: int) -> None:
    if step == 2:
        process.model.frozen.three.running_mean = torch.ones(3, 4)
    if step == 4:
        process.model.frozen.three.running_mean = process.model.frozen.one.running_mean
    if step == 7:
        process.model.frozen.three.running_mean = process.model.frozen.three.running_mean * 0.5


def untie_averages(process: Changing, step: int) -> None:
    if step == 4:
        process.model.frozen.three.running_mean = process.model.frozen.one.running_mean.clone()
    if step == 7:
        process.model.late = torch.tensor(0.7)  # its layout has the buffer, too


@pytest.mark.promise(
    "buffers and parameters, also replaced, resized, tied or late ones in modules that a new process has; "
    "averaged models outside the model"
)
@pytest.mark.parametrize("check", ["off", "replay"])
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (OwnAverages, tie_averages),
        (OwnAverages, tie_other_averages),
        (OwnAverages, tie_resized_averages),
        (TiedAverages, tie_other_averages),
        (TiedAverages, untie_averages),
    ],
    ids=lambda one: one.__name__,
)
def test_buffers_that_are_tied_or_become_two(lab: Lab, kind: type[Changing], change: Change, check: str) -> None:
    survives(lab, lambda process: process.train(change), KILLS, check, kind=kind)


class Scaled(Net):
    """A number that no record carries changes what it computes."""

    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale)


class WithScale(Changing):
    def objects(self) -> tuple[Any, Any]:
        model = Scaled(self.width)
        return model, torch.optim.Adam([*model.first.parameters(), *model.last.parameters()], 0.01)


def test_a_step_that_was_repeated_otherwise_is_known_of_the_next_record(lab: Lab) -> None:
    """Also where that record's step is the one that is repeated: it is equal, since both lack the number."""

    def change(process: Changing, step: int) -> None:
        if step == 3:
            process.model.scale = 2.0

    def die(commit: int) -> None:
        process_of(lab, ("committed", commit), "replay", kind=WithScale).train(change)

    def go_on() -> None:
        session = process_of(lab, None, "replay", kind=WithScale).session
        report = session.restore()
        assert report.step == 5
        assert "an earlier resume was not exact: step 5 was repeated" in str(report.reasons)
        session.close()

    for commit in (5, 2):
        in_child(lab, lambda: die(commit), status=-signal.SIGKILL)  # noqa: B023
    in_child(lab, go_on)


class Holder:
    """An object of the script that has a module, and knows the model."""

    def __init__(self, model: nn.Module, target: nn.Module) -> None:
        self.model, self.target = model, target


class Taught(Net):
    """Modules that torch does not see: a target in a list, a teacher in an attribute, an average in an object."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.targets = [copy.deepcopy(self.last)]
        vars(self).update(teacher=copy.deepcopy(self.last), holder=Holder(self, nn.BatchNorm1d(2, affine=False)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            taught = self.targets[0](x) + 2 * self.teacher(x) + 3 * self.holder.target.eval()(x[:, :2])
        return super().forward(x) - taught


class WithTeachers(Changing):
    def objects(self) -> tuple[Any, Any]:
        model = Taught(self.width)
        return model, torch.optim.Adam([*model.first.parameters(), *model.last.parameters()], 0.01)


def new_list(process: Changing, step: int) -> None:
    if step in (2, 4, 5):
        process.model.targets = [copy.deepcopy(process.model.last)]


def new_teacher(process: Changing, step: int) -> None:
    if step in (3, 5):
        vars(process.model)["teacher"] = copy.deepcopy(process.model.last)


def new_holder(process: Changing, step: int) -> None:
    """A module of buffers only takes the place of another one, once within another object."""
    if step in (3, 5):
        average = nn.BatchNorm1d(2, affine=False)
        average.running_mean.fill_(step / 3)  # type: ignore[union-attr]
        if step == 3:
            process.model.holder.target = average
        else:
            process.model.holder = Holder(process.model, average)


def exchanged(process: Changing, step: int) -> None:
    if step == 4:
        model = process.model
        model.targets[0], vars(model)["teacher"] = model.teacher, model.targets[0]
        with torch.no_grad():
            model.teacher.bias.add_(1)


@pytest.mark.promise(
    "buffers and parameters, also replaced, resized, tied or late ones in modules that a new process has; "
    "averaged models outside the model"
)
@pytest.mark.parametrize("check", ["off", "replay"])
@pytest.mark.parametrize("change", [new_list, new_teacher, new_holder, exchanged], ids=lambda one: one.__name__)
def test_modules_that_take_the_places_of_others_beside_the_model(lab: Lab, change: Change, check: str) -> None:
    survives(lab, lambda process: process.train(change), KILLS, check, kind=WithTeachers)


class NamedTeachers(WithTeachers):
    """An adapter that has found modules beside the model by itself names them by their places."""

    def attach(self) -> None:
        if self.run.protected:
            config = {**self.settings, "storage": None, "redo": "lazy", "resume_check": self._check}
            run_dir = self.run.directory / "run"
            beside = modules_beside([self.model], {"model": self.model})
            self.session = memckpt.attach(
                self.model, self.optimizer, run_dir=run_dir, config=config, extra_modules=beside
            )


@pytest.mark.parametrize("change", [new_list, new_teacher], ids=lambda one: one.__name__)
def test_modules_that_an_adapter_has_named_by_their_places(lab: Lab, change: Change) -> None:
    survives(lab, lambda process: process.train(change), KILLS, "off", kind=NamedTeachers)


def test_a_module_beside_the_model_that_is_gone_is_said(lab: Lab) -> None:
    def change(process: Changing, step: int) -> None:
        if step == 3:
            del process.model.holder.target

    class Unused(Changing):
        def objects(self) -> tuple[Any, Any]:
            model, optimizer = super().objects()
            model.holder = Holder(model, nn.Linear(1, 1))
            return model, optimizer

    def die() -> None:
        process_of(lab, ("committed", 3), "off", kind=Unused).train(change)

    def go_on() -> None:
        session = process_of(lab, None, "off", kind=Unused).session
        report = session.restore()
        session.close()
        assert "model.holder.target.weight is gone with its module" in str(report.reasons)

    in_child(lab, die, status=-signal.SIGKILL)
    in_child(lab, go_on)


class Sharing(nn.Module):
    """Two buffers that count, and what is done with them in each forward."""

    def __init__(self, two: Callable[[torch.Tensor], torch.Tensor], change: Callable[[Any, int], None]) -> None:
        super().__init__()
        columns = torch.ones(4, 4)
        self.register_buffer("one", columns[:, :2])
        self.register_buffer("two", two(columns))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.change(self, int(self.count))
        return x + self.one.mean() + 2 * self.two.mean()


def its_own(columns: torch.Tensor) -> torch.Tensor:
    return torch.ones(4, 2)


def the_same(columns: torch.Tensor) -> torch.Tensor:
    return columns[:, :2]


def beside_it(columns: torch.Tensor) -> torch.Tensor:
    return columns[:, 2:]


def write_to_both(module: Any, count: int) -> None:
    module.one += count / 8
    module.two *= 0.9


def comes_to_share(module: Any, count: int) -> None:
    if count == 3:
        module.two.data = module.one.data[:]
    write_to_both(module, count)


def comes_to_share_a_part(module: Any, count: int) -> None:
    if count == 3:
        module.two = module.one.detach()[1:3]
    write_to_both(module, count)


def stays(module: Any, count: int) -> None:
    if count == 3:
        module.two = module.two.detach()
    write_to_both(module, count)


def parts(module: Any, count: int) -> None:
    if count == 3:
        module.two.data = module.two.data.clone()
    write_to_both(module, count)


def parts_as_another(module: Any, count: int) -> None:
    if count == 3:
        module.two = module.one.clone()
    write_to_both(module, count)


def slides(module: Any, count: int) -> None:
    module.two = module.one[count % 3 : count % 3 + 1]
    write_to_both(module, count)


def keeps_the_last(module: Any, count: int) -> None:
    module.two = module.one
    module.one = module.one + count / 8


def shows_the_newest(module: Any, count: int) -> None:
    module.one = module.one + count / 8
    module.two = module.one.detach()


@pytest.mark.parametrize("check", ["off", "replay"])
@pytest.mark.parametrize(
    ("two", "change"),
    [
        (its_own, comes_to_share),
        (its_own, comes_to_share_a_part),
        (the_same, stays),
        (the_same, parts),
        (the_same, parts_as_another),
        (the_same, slides),
        (the_same, keeps_the_last),
        (its_own, shows_the_newest),
        (beside_it, stays),
        (beside_it, comes_to_share),
    ],
    ids=lambda one: one.__name__,
)
def test_which_tensors_share_memory_is_state(
    lab: Lab, two: Callable[[torch.Tensor], torch.Tensor], change: Callable[[Any, int], None], check: str
) -> None:
    class WithSharing(Changing):
        def objects(self) -> tuple[Any, Any]:
            model, optimizer = super().objects()
            model.frozen = Sharing(two, change)
            return model, optimizer

    survives(lab, lambda process: process.train(nothing), [("committed", 3), ("backward", 3)], check, kind=WithSharing)


def test_memory_that_cannot_be_shared_again_is_said() -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2)
        model.register_buffer("one", torch.ones(4))
        model.register_buffer("two", torch.ones(4))
    live = LiveState(model, [torch.optim.SGD(model.parameters(), 0.1)], {})
    live.share_memory([[["one", 0, [1]], ["two", 4, [1]]]])
    (reason,) = live.not_carried
    assert "one and two are not in the same memory as in the run that is resumed" in reason


def test_a_report_says_at_once_what_cannot_share_memory_again(lab: Lab) -> None:
    class Constant(Net):
        """Two buffers of inference mode, of which a resume can exchange neither's memory."""

        def __init__(self, width: int) -> None:
            super().__init__(width)
            with torch.inference_mode():
                self.register_buffer("one", torch.ones(4))
                self.register_buffer("two", torch.ones(4))

    class Constants(Changing):
        def objects(self) -> tuple[Any, Any]:
            model = Constant(self.width)
            return model, torch.optim.Adam(model.first.parameters(), 0.01)

    def change(process: Changing, step: int) -> None:
        if step == 3:
            with torch.inference_mode():
                process.model.two = process.model.one[:]

    def die() -> None:
        process_of(lab, ("committed", 5), "off", kind=Constants).train(change)

    def go_on() -> None:
        session = process_of(lab, None, "off", kind=Constants).session
        assert "one and two are not in the same memory" in str(session.restore().reasons)
        session.close()

    in_child(lab, die, status=-signal.SIGKILL)
    in_child(lab, go_on)


def test_strides_that_look_usual_and_those_of_this_process_are_those_of_the_record() -> None:
    def live_of(model: nn.Module) -> LiveState:
        return LiveState(model, [torch.optim.SGD(model.parameters(), 0.1)], {})

    def strides_of(live: LiveState) -> list[tuple[int, ...]]:
        return [one.stride() for one in live.model.parameters()]

    recorded = live_of(nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.Conv2d(8, 8, 3, bias=False)))
    for late in (torch.channels_last, torch.contiguous_format):
        recorded.model.to(memory_format=late)
        recorded.look_at_memory()
        for born in (torch.channels_last, torch.contiguous_format):
            resumed = live_of(copy.deepcopy(recorded.model).to(memory_format=born))
            resumed.lay_out(recorded.strides)
            assert strides_of(resumed) == strides_of(recorded)


class Offloading(Changing):
    """What nobody trains is given memory for a forward."""

    def objects(self) -> tuple[Any, Any]:
        model, optimizer = super().objects()
        model.frozen.register_buffer("table", torch.ones(30_000))
        model.frozen.register_buffer("part", torch.ones(30_000)[20_000:])
        self.away = {one: one.detach().clone() for one in (model.frozen.bias, model.frozen.table, model.frozen.part)}
        return model, optimizer

    def bring(self) -> None:
        for one, values in self.away.items():
            one.untyped_storage().resize_((one.storage_offset() + one.numel()) * one.element_size())
            one.data.copy_(values)

    def go_on(self, since: int, steps: int) -> None:
        report = self.session.restore()
        for step in range(1 if report is None else report.step + 1, steps):
            self.bring()
            self.model(torch.full((3, 4), step / 8)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            for one in self.away if step >= since else ():
                one.untyped_storage().resize_(0)
            self.session.commit()
            self.at("committed")
        self.session.close()


@pytest.mark.parametrize("since", [1, 2, 6])
def test_what_has_no_memory_at_a_commit_is_said(lab: Lab, since: int) -> None:
    def go_on() -> None:
        process = process_of(lab, None, "off", kind=Offloading)
        process.go_on(since, 9)
        reasons = process.session.report.reasons
        assert [one.partition(",")[0] for one in reasons] == [
            f"frozen.{one} is without memory" for one in ("bias", "table", "part")
        ]
        assert not process.session.report.exact

    for status, body in [
        (-signal.SIGKILL, lambda: process_of(lab, ("committed", 6), "off", kind=Offloading).go_on(since, 9)),
        (0, go_on),
    ]:
        in_child(lab, body, status=status)


def test_parameters_that_are_stepped_need_memory_at_a_commit(lab: Lab) -> None:
    def run() -> None:
        process = process_of(lab, None, "off", kind=Offloading)
        process.away = {process.model.last.weight: torch.ones(2, 4)}
        with pytest.raises(UnsupportedError, match=r"found last\.weight without memory"):
            process.go_on(2, 4)
        process.session.close()

    in_child(lab, run)


class Viewed(Changing):
    """A buffer is in the memory of a weight."""

    def objects(self) -> tuple[Any, Any]:
        model, optimizer = super().objects()
        model.late = model.last.weight.detach()[0]
        return model, optimizer


def weight_moved(process: Changing, step: int) -> None:
    if step == 4:
        process.model.last.weight.data = process.model.last.weight.data.clone()


def weight_replaced(process: Changing, step: int) -> None:
    if step == 4:
        last = process.model.last
        old, last.weight = last.weight, nn.Parameter(last.weight.detach() * 0.5)
        for group in process.optimizer.param_groups:
            group["params"] = [last.weight if one is old else one for one in group["params"]]
        process.optimizer.state.pop(old, None)


@pytest.mark.parametrize("change", [nothing, weight_moved, weight_replaced], ids=lambda one: one.__name__)
def test_a_buffer_in_the_memory_of_a_weight_that_moves(lab: Lab, change: Change) -> None:
    survives(lab, lambda process: process.train(change), [("backward", 5), ("committed", 3)], kind=Viewed)


class Replaced(Changing):
    """From the fourth step on another optimizer takes the place of the given one, or nothing that torch knows."""

    def go_on(self, steps: int, by_hand: bool) -> None:
        report = self.session.restore()
        self.note("report", None if report is None else (report.step, report.exact, report.reasons))
        for step in range(1 if report is None else report.step + 1, steps):
            if step >= 4 and isinstance(self.optimizer, torch.optim.Adam):
                self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
            if step < 4 or not by_hand:
                self.optimizer.zero_grad()
            self.model(torch.full((3, 4), step / 8)).square().mean().backward()
            if step < 4 or not by_hand:
                self.optimizer.step()
            else:
                for param in self.model.parameters():
                    if param.grad is not None:
                        param.data -= 0.01 * param.grad
            self.note(f"commit {step}", self.session.commit())
            self.at("committed")
        self.session.close()


def test_an_optimizer_that_takes_the_place_of_the_given_one(lab: Lab) -> None:
    """Its steps are restore points as before, and it is said at once that its state is not carried."""
    logs = []
    for kill, code in ((("committed", 7), -signal.SIGKILL), (None, 0)):
        child = lab.fork(lambda dies=kill: process_of(lab, dies, "off", kind=Replaced).go_on(9, False), "replaced")  # type: ignore[misc]
        assert child.wait() == code, child.log.read_text()
        logs.append(child.log.read_text())
    notes = journal_of(lab.directory / "journal-0")
    assert {each["value"] for each in notes if each["event"].startswith("commit")} == {"True"}
    fresh, report = (each["value"] for each in notes if each["event"] == "report")
    assert fresh == "None"
    assert report.startswith("(7, False, ('SGD, which steps first.weight")
    assert "SGD, which steps first.weight, is an optimizer that memckpt was not given" in logs[0]


def test_training_that_goes_on_without_the_given_optimizer_is_said(lab: Lab) -> None:
    log = in_child(lab, lambda: process_of(lab, None, "off", kind=Replaced).go_on(30, True))
    assert log.count("none of the last 20 batches ended at a restore point, and nothing of them can be resumed") == 1
    assert "gradients of Adam wait for its step, while something else trains its parameters" in log


class Lookahead(torch.optim.Optimizer):
    """Around another optimizer, whose groups and state are its own."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base, self.count = base, 0
        self.param_groups, self.state = base.param_groups, base.state
        self.slow = [p.detach().clone() for p in base.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.count += 1
        if self.count % 2:
            for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                p.copy_(slow.lerp_(p, 0.5))


class LookingAhead(Changing):
    def objects(self) -> tuple[Any, Any]:
        model, optimizer = super().objects()
        return model, Lookahead(optimizer)


class Adagrad(Changing):
    """Its optimizer makes all state as it is made."""

    settings: ClassVar[dict[str, Any]] = {"redo": "snapshot", "snapshot_every_steps": 1}

    def objects(self) -> tuple[Any, Any]:
        model = Net(self.width)
        return model, torch.optim.Adagrad([*model.first.parameters(), *model.last.parameters()], 0.01)

    def sums(self) -> Iterator[torch.Tensor]:
        yield from (one.detach() for one in self.model.parameters())
        yield torch.tensor([one in self.optimizer.state for one in self.model.parameters()])


class RateTensor(Changing):
    """Two groups share a rate that the loop lowers; they have another one once they have loaded their own state."""

    def objects(self) -> tuple[Any, Any]:
        model = Net(self.width)
        self.rate = torch.tensor(0.02)
        groups = [{"params": [*layer.parameters()]} for layer in (model.first, model.last)]
        return model, torch.optim.Adam(groups, self.rate, foreach=False)


def test_a_rate_of_the_loop_in_a_group_that_came_later(lab: Lab) -> None:
    def lower(process: Any, step: int) -> None:
        process.rate.mul_(0.8)
        if step == 4 and len(process.optimizer.param_groups) == 2:
            process.optimizer.add_param_group({"params": [*process.model.frozen.parameters()]})
        process.note(f"rates {step}", [float(group["lr"]).hex() for group in process.optimizer.param_groups])

    log = survives(lab, lambda process: process.train(lower), KILLS, kind=RateTensor)
    assert "Adam has the 3 groups of the run again, of which the script has made 2. Where it adds the others" in log


class LateRateTensor(Changing):
    """The loop makes its rate behind the restore, as schedules do that are made there."""

    def train(self, change: Change, zero: bool = True) -> None:
        def with_rate(process: Any, step: int) -> None:
            if not hasattr(process, "rate"):
                process.rate = torch.as_tensor(process.optimizer.param_groups[0]["lr"]).clone()
                process.optimizer.param_groups[0].update(lr=process.rate, foreach=False)
            change(process, step)

        super().train(with_rate, zero)


@pytest.mark.parametrize("loads_at", [None, 4])
def test_a_rate_that_the_loop_holds_too_until_state_is_loaded(lab: Lab, loads_at: int | None) -> None:
    def lower(process: Any, step: int) -> None:
        process.rate.mul_(0.8)
        if step == loads_at:
            process.optimizer.load_state_dict(process.optimizer.state_dict())
        elif loads_at is not None and step > loads_at:
            rates = [group["lr"] for group in process.optimizer.param_groups]
            rates[0].mul_(0.9)  # of both, as one tensor stands in both groups
            process.note(f"rates {step}", [float(rate).hex() for rate in rates])

    survives(lab, lambda process: process.train(lower), KILLS, kind=RateTensor)


class ScalarInTurns(Changing):
    """A parameter of one bfloat16: Adam counts its steps in another type, for which a snapshot has no room."""

    settings: ClassVar[dict[str, Any]] = {"redo": "snapshot", "snapshot_every_steps": 1}

    def objects(self) -> tuple[Any, Any]:
        model = Net(self.width)
        model.scale = nn.Parameter(torch.tensor(1.3, dtype=torch.bfloat16))
        params = [*model.first.parameters(), *model.last.parameters(), model.scale]
        self.others = torch.optim.Adam(params, 0.01), torch.optim.SGD(params, 0.05)
        return model, self.others

    def train(self, change: Change, zero: bool = True) -> None:
        report = self.session.restore()
        assert report is None or report.exact
        for step in range(1 if report is None else report.step + 1, STEPS):
            self.model.zero_grad()
            (self.model(torch.full((3, 4), step / 8)) * self.model.scale).square().mean().backward()
            self.others[step % 2].step()
            self.at("backward")
            self.note(f"{step}", [one.detach().double().sum().item().hex() for one in self.model.parameters()])
            self.session.commit()
            self.at("committed")
        self.session.close()


class OwnDropout(nn.Dropout):
    """A class of the script's, with the number of torch's."""


class Convolving(Changing):
    def objects(self) -> tuple[Any, Any]:
        model, optimizer = super().objects()
        convolution = nn.Conv1d(1, 1, 3, padding="same")
        model.dropout, model.norm = OwnDropout(0.1), nn.Sequential(nn.Unflatten(1, (1, 4)), convolution, nn.Flatten())
        return model, optimizer


def dilated(process: Changing, step: int) -> None:
    if step == 4:
        process.model.dropout.p, process.model.norm[1].dilation = 0.5, (2,)


class OneByOne(AllTrained):
    def sums(self) -> Iterator[torch.Tensor]:
        """Sums that do not depend on strides."""
        yield from (one.detach().contiguous().sum() for one in self.model.parameters())


def transposed(process: Changing, step: int) -> None:
    """Products with a weight round by its strides."""
    if step == 4:
        for param in (process.model.first.weight, process.model.frozen.weight):
            param.data = param.data.t().contiguous().t()
    process.note(f"strides {step}", [param.stride() for param in process.model.parameters()])


def state_cleared(process: Changing, step: int) -> None:
    if step == 2:
        process.model.first.requires_grad_(False)
    if step == 4:
        process.optimizer.state.clear()


def rate_lowered(process: Any, step: int) -> None:
    process.rate.mul_(0.8)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (Mapped, nothing),
        (LookingAhead, nothing),
        (Convolving, dilated),
        (OneByOne, transposed),
        (Adagrad, state_cleared),
        (LateRateTensor, rate_lowered),
        (ScalarInTurns, nothing),
    ],
    ids=lambda one: one.__name__,
)
def test_trainings_of_other_kinds(lab: Lab, kind: type[Changing], change: Change) -> None:
    survives(lab, lambda process: process.train(change), KILLS, kind=kind)


def test_steps_of_another_thread_are_not_inside_of_those_here(caplog: pytest.LogCaptureFixture) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    given, stranger = (torch.optim.SGD(one.parameters(), 0.1) for one in (model, other))
    strangers = LiveState(model, [given], {"other": other}).strangers
    strangers.install()
    met: list[int] = []
    strangers.stepped = lambda params: met.append(len(params))

    def step_there(*_: Any) -> None:
        thread = threading.Thread(target=stranger.step)
        thread.start()
        thread.join()

    given.register_step_pre_hook(step_there)
    try:
        given.step()
        assert met == [2]
        assert any("SGD, which steps" in one.getMessage() for one in caplog.records)
    finally:
        strangers.remove()


class Wide(Changing):
    """With more gradients than are carried with each record, whatever becomes of them."""

    width = 5000


@pytest.mark.promise(
    "which parameters have a gradient between two steps, and its values where up to 64 KiB of gradients are "
    "there, or where they are neither dropped nor zeroed before the next backward"
)
@pytest.mark.parametrize("kind", [Changing, Wide])
@pytest.mark.parametrize("change", [nothing, clipped], ids=lambda one: one.__name__)
def test_gradients_that_nobody_zeroes(lab: Lab, change: Change, kind: type[Changing]) -> None:
    survives(lab, lambda process: process.train(change, zero=False), KILLS, "off", kind=kind)


@pytest.mark.parametrize("zeroed", [6, 12])
def test_gradients_zeroed_before_the_commit_are_kept_once_they_are_not(zeroed: int) -> None:
    """In place, for so many records: what is read is not read again until a record changes them less often."""
    model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
    live = LiveState(model, [torch.optim.SGD(model.parameters(), 0.1)], {})
    params = list(model.parameters())
    for record in range(zeroed + 2):
        for param in reversed(params):
            param.grad = torch.ones_like(param) if param.grad is None else param.grad.add_(1.0)
            live.left.compare_gradients("all", params, params[-1])
        if record < zeroed:
            model.zero_grad(set_to_none=False)
        described = describe_gradients(live)
        assert ("values" in described) == (record == zeroed), "before they are kept by value their values are there"
        assert record > zeroed or not live.left.kept
    assert live.left.kept == dict(model.named_parameters()).keys()


def test_a_layer_that_is_pruned_is_said_to_end_resumes(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    live = LiveState(model, [torch.optim.SGD(model.parameters(), 0.1)], {})
    live.follow()
    assert not caplog.records
    prune.l1_unstructured(model, "weight", 0.5)
    live.follow()
    live.follow()
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().startswith("memckpt: weight is a parameter no longer")
    assert "weight" not in live.growth.late
