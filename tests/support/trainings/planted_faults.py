"""Faults to be planted in memckpt's own code, and a training that each of them leads astray.

A fault is planted in a forked process, by replacing a method with one that calls it and does something wrong as well.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from memckpt.capture.beside.modules import ModuleTree
from memckpt.capture.beside.watch import StaticWatch
from memckpt.capture.by_value import ByValueTensors
from memckpt.capture.gradient_staging import NotedSubStep
from memckpt.capture.recorder import Recorder
from memckpt.capture.slot_writer import SlotWriter
from memckpt.memory.region import Region
from memckpt.recovery.restore import Restorer, RestoreTarget
from memckpt.session.rank_state import RankState
from memckpt.session.resume import resume
from memckpt.session.staging import Changes, Staging
from memckpt.state import codec, redo, rng
from memckpt.state.redo import RedoGroup, tensor_at
from tests.support.trainings.engine_child import Control, kill_self
from tests.support.trainings.engine_training import CLASSES, INPUTS, Case, Training

#: Step from which on what is captured is wrong, period of anchors, and steps of the training.
SINCE, PERIOD, STEPS = 9, 4, 16
WIDTH = 24

Fault = Callable[[Control], None]


class Data:
    """Batches in an order; which is next belongs to the state."""

    def __init__(self) -> None:
        self.next = self.epoch = 0

    def batch(self) -> tuple[Tensor, Tensor]:
        chance = torch.Generator().manual_seed(100 * self.epoch + self.next)
        self.next += 1
        if self.next == 6:
            self.next, self.epoch = 0, self.epoch + 1
        return torch.randn(16, INPUTS, generator=chance), torch.randint(0, CLASSES, (16,), generator=chance)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next, self.epoch = state["next"], state["epoch"]


class Net(nn.Module):
    """Layers of the same shape, buffers that move, a frozen layer, one that trains later, and one that is switched."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, 256)  # large enough to be anchored in pieces
        self.shrink = nn.Linear(256, WIDTH)
        self.twins = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(2))
        self.noise = nn.Dropout(0.1)
        self.switched = nn.Dropout(0.3)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.later = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.counted = nn.Parameter(torch.ones(()))  # in no optimizer; its gradient is never zeroed

    def forward(self, x: Tensor) -> Tensor:
        x = self.shrink(functional.relu(self.first(x)))
        for twin, norm in zip(self.twins, self.norms, strict=True):
            x = x + norm(twin(self.noise(x)))
        x = self.head(self.switched(self.frozen(x) + self.later(x)))
        so_far = 0.0 if self.counted.grad is None else math.tanh(self.counted.grad.item())
        return x * self.counted * (1.0 + 0.01 * so_far)


class Astray(Training):
    """Two optimizers, one of which steps twice; groups that change, factors, gradients that are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.data = self.registered["data"] = Data()
        self.scaler = self.registered["scaler"] = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5)

    def make_model(self) -> nn.Module:
        return Net()

    def make_optimizers(self) -> list[Optimizer]:
        model = self.model
        others = [each for part in (model.later, model.first, model.shrink, model.norms) for each in part.parameters()]
        groups = [
            {"params": [*model.twins.parameters()], "weight_decay": 0.3},
            {"params": others, "weight_decay": 0.1, "lr": 3e-3},
        ]
        return [
            torch.optim.AdamW(groups, lr=1e-2),
            torch.optim.SGD(model.head.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
        ]

    def watch_points(self) -> None:
        """No points within a batch."""

    def batch(self, step: int) -> float:
        adam, sgd = self.optimizers
        if step == 3:
            self.model.later.requires_grad_(True)
            self.model.switched.eval()
            self.model.noise.p = 0.2
        adam.zero_grad()
        sgd.zero_grad()
        x, y = self.data.batch()
        x = x + random.random() + float(np.random.rand())
        loss = functional.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(adam)
        nn.utils.clip_grad_norm_([p for group in adam.param_groups for p in group["params"]], 0.1)
        self.scaler.step(adam)
        sgd.step()
        sgd.zero_grad()
        functional.cross_entropy(self.model(x), y).backward(inputs=list(self.model.head.parameters()))
        sgd.step()
        self.scaler.update()
        self.schedulers[0].step()
        sgd.param_groups[0]["weight_decay"] *= 0.9
        return float(loss)


CASE, LONG = Case("astray", Astray, steps=STEPS), Case("astray-long", Astray, steps=SINCE + 7 * PERIOD)


def wrapped(owner: Any, name: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
    original = getattr(owner, name)

    def replaced(*arguments: Any, **named: Any) -> Any:
        return replacement(original, *arguments, **named)

    return replaced


def around(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a function of a class or module by one that gets it as its first argument."""
    setattr(owner, name, wrapped(owner, name, replacement))


def into(owner: Any, name: str, replacement: Callable[..., Any]) -> Fault:
    return lambda control: around(owner, name, replacement)


def die_after(owner: type, name: str, count: int = 1, step: int | None = None) -> Fault:
    """Patch a method in the child: the trainer dies behind this call of it, of all or of those in a step."""

    def prepare(control: Control) -> None:
        calls = 0

        def dying(original: Any, *arguments: Any, **settings: Any) -> Any:
            nonlocal calls
            result = original(*arguments, **settings)
            calls += step in (None, control.step)
            if calls == count:
                kill_self(control)
            return result

        around(owner, name, dying)

    return prepare


def left_out(owner: Any, name: str) -> Fault:
    """A function that does nothing."""
    return into(owner, name, lambda original, *arguments, **named: None)


def index_of(writer: SlotWriter, name: str) -> int:
    return next(index for index, one in enumerate(writer.spec.params) if one.tensor.name == name)


# Capture: gradients


def gradients(edit: Callable[[SlotWriter, int], Any]) -> Fault:
    """Change what is in a slot when its record ends."""

    def seal(original: Any, staging: Staging, point: Any) -> Any:
        if point.record >= SINCE and staging.writer is not None:
            with torch.no_grad():
                edit(staging.writer, point.record)
        return original(staging, point)

    return into(Staging, "seal", seal)


def gradient(writer: SlotWriter, record: int, name: str) -> Tensor:
    return writer.gradient_places.view(record, 0, 0, index_of(writer, name))


def all_gradients(writer: SlotWriter, record: int) -> list[Tensor]:
    places = writer.gradient_places
    return [places.view(record, number, 0, index) for number in (0, 1) for index in writer.members[number]]


def each_gradient(change: Callable[[Tensor], Any]) -> Fault:
    return gradients(lambda writer, record: [change(one) for one in all_gradients(writer, record)])


def of_the_step_before(writer: SlotWriter, record: int) -> None:
    torch._foreach_copy_(all_gradients(writer, record), all_gradients(writer, record - 1))


def of_another(writer: SlotWriter, record: int) -> None:
    gradient(writer, record, "twins.0.weight").copy_(gradient(writer, record, "twins.1.weight"))


def of_the_first_step(writer: SlotWriter, record: int) -> None:
    head, places = index_of(writer, "head.weight"), writer.gradient_places
    places.view(record, 1, 1, head).copy_(places.view(record, 1, 0, head))


# Capture: steps


def steps(edit: Callable[[list[NotedSubStep], Recorder], Any]) -> Fault:
    """Change the noted steps of a record."""

    def take(original: Any, recorder: Recorder) -> Any:
        if recorder.record >= SINCE:
            edit(recorder._sub_steps, recorder)
        return original(recorder)

    return into(Recorder, "take_sub_steps", take)


def groups(edit: Callable[[list[dict[str, Any]]], Any]) -> Fault:
    def change(noted: list[NotedSubStep], recorder: Recorder) -> None:
        for step in noted:
            found = codec.decode(step.groups.encode())
            edit(found)
            step.groups = codec.Packed(found, fetch=lambda tensor: tensor, token=lambda: lambda: None)

    return steps(change)


def in_groups(name: str, change: Callable[[Any], Any]) -> Fault:
    """Change a value of all groups."""
    return groups(lambda found: [group.update({name: change(group[name])}) for group in found])


def ops(change: Callable[[list[Any]], list[Any]]) -> Fault:
    """Change what has been done to the gradients before each step."""
    return steps(lambda noted, recorder: [setattr(step, "ops", change(step.ops)) for step in noted])


def of_fewer(found: list[Any]) -> list[Any]:
    for op in found:
        op.params = op.params[:-1]
    return found


def exchange(noted: list[NotedSubStep], recorder: Recorder) -> None:
    noted[-2:] = noted[:-3:-1]


def say_absent(noted: list[NotedSubStep], recorder: Recorder) -> None:
    assert recorder.writer is not None
    noted[0].absent.append(index_of(recorder.writer, "twins.0.weight"))


def of_the_record_before(control: Control) -> None:
    """Steps with all that belongs to them."""
    before: list[list[NotedSubStep]] = []

    def change(noted: list[NotedSubStep], recorder: Recorder) -> None:
        before.append(list(noted))
        if len(before) > 1:
            noted[:] = before[-2]

    steps(change)(control)


def stale_groups(control: Control) -> None:
    before: list[list[Any]] = []

    def change(noted: list[NotedSubStep], recorder: Recorder) -> None:
        before.append([step.groups for step in noted])
        for step, old in zip(noted, before[-2] if len(before) > 1 else before[-1], strict=True):
            step.groups = old

    steps(change)(control)


# Capture: anchors


def anchors(edit: Callable[[SlotWriter, int, Any], Any]) -> Fault:
    """Change what a record's anchors are; `edit` gets what the writer says of them, and may return something else."""

    def stage(original: Any, writer: SlotWriter, record: int) -> Any:
        said = original(writer, record)
        return said if record < SINCE else edit(writer, record, said)

    return into(SlotWriter, "stage_anchors", stage)


def anchored(writer: SlotWriter, record: int) -> list[tuple[Any, list[Tensor]]]:
    """Pieces that are anchored in a record, with the views of each."""
    base, due = writer.layout.slot_offset(record), writer.layout.due(record)
    parts = writer._anchor_parts[record % writer.spec.period]
    return [
        (piece, [tensor_at(writer._slots.map, base + offset, shape, dtype) for offset, shape, dtype in each])
        for piece, each in zip(due, parts, strict=True)
    ]


def stale(control: Control) -> None:
    """Anchors of parameters are those of a step before."""
    values: list[list[Tensor]] = []

    def stage(original: Any, writer: SlotWriter, record: int) -> Any:
        said = original(writer, record)
        values.append([param.detach().clone() for param in writer.params])
        if record >= SINCE:
            for piece, views in anchored(writer, record):
                views[0].copy_(values[-2][piece.param].view(-1)[piece.start : piece.stop])
        return said

    around(SlotWriter, "stage_anchors", stage)


def of_another_tensor(writer: SlotWriter, record: int, said: Any) -> Any:
    for piece, views in anchored(writer, record):
        shape = writer.params[piece.param].shape
        other = next((one for at, one in enumerate(writer.params) if one.shape == shape and at != piece.param), None)
        if other is not None:
            views[0].copy_(other.detach().view(-1)[piece.start : piece.stop])
    return said


def exchanged_states(writer: SlotWriter, record: int, said: Any) -> Any:
    for _, views in anchored(writer, record):
        if len(views) == 4:  # parameter, step, and two averages
            one, other = (view for view in views[1:] if view.shape == views[0].shape)
            held = one.clone()
            one.copy_(other)
            other.copy_(held)
    return said


def missing_state(writer: SlotWriter, record: int, said: Any) -> Any:
    missing, plain = said
    found = [
        (piece.param, owner.optimizer, state.key)
        for piece in writer.layout.due(record)
        for owner in writer.spec.params[piece.param].owners
        for state in owner.state
        if state.key in ("exp_avg", "momentum_buffer")
    ]
    return (*missing, *found), plain


# Capture: by value, and what nobody sees


def by_value(edit: Callable[[list[Tensor], list[Tensor]], Any]) -> Fault:
    """Change the copies of by-value tensors; `edit` gets them, and those of the record before."""

    def plant(control: Control) -> None:
        def copy(original: Any, tensors: ByValueTensors, region: Region, base: int) -> None:
            original(tensors, region, base)
            places = [tensors._place(at, region, base) for at in range(len(tensors._specs))]
            if control.step >= SINCE:
                edit(places, before)
            before[:] = [tensors._now(at).clone() for at in range(len(places))]

        before: list[Tensor] = []
        around(ByValueTensors, "copy", copy)

    return plant


def exchange_alike(places: list[Tensor], before: list[Tensor]) -> None:
    alike = [one for one in places if one.shape == (WIDTH,)]
    held = [one.clone() for one in alike]
    torch._foreach_copy_(alike, held[::-1])


def unseen(weight: Callable[[Any], Tensor], *looks: Fault) -> Fault:
    """A weight is changed by hand, and nobody looks."""

    def plant(control: Control) -> None:
        for look in looks:
            look(control)
        around(Astray, "batch", batch)

    def batch(original: Any, training: Astray, step: int) -> float:
        loss = original(training, step)
        if step >= SINCE:
            weight(training.model).data.mul_(1.01)
        return float(loss)

    return plant


CAPTURE: dict[str, Fault] = {
    "gradients-scaled": each_gradient(lambda one: one.mul_(1.001)),
    "gradients-rounded": each_gradient(lambda one: one.copy_(one.bfloat16())),
    "gradients-one-bit": each_gradient(lambda one: one.view(torch.int32).bitwise_xor_(1 << 12)),
    "gradients-of-the-step-before": gradients(of_the_step_before),
    "gradient-of-another": gradients(of_another),
    "gradient-zero": gradients(lambda writer, record: gradient(writer, record, "twins.0.weight").zero_()),
    "gradient-of-the-first-step": gradients(of_the_first_step),
    "gradient-said-absent": steps(say_absent),
    "factors-missing": ops(lambda found: []),
    "unscaling-missing": ops(lambda found: found[1:]),
    "factors-twice": ops(lambda found: [*found, *found]),
    "factors-of-fewer": ops(of_fewer),
    "step-dropped": steps(lambda noted, recorder: noted.pop()),
    "steps-exchanged": steps(exchange),
    "steps-of-the-record-before": of_the_record_before,
    "groups-stale": stale_groups,
    "groups-no-decay": in_groups("weight_decay", lambda decay: 0.0),
    "groups-exchanged": groups(lambda found: found.reverse()),
    "groups-near-rate": in_groups("lr", lambda rate: rate * (1 + 1e-6)),
    "anchors-stale": stale,
    "anchors-too-late": gradients(lambda writer, record: writer.stage_anchors(record)),  # once more, behind the step
    "anchors-of-another": anchors(of_another_tensor),
    "anchors-states-exchanged": anchors(exchanged_states),
    "anchors-state-missing": anchors(missing_state),
    "by-value-stale": by_value(torch._foreach_copy_),
    "by-value-exchanged": by_value(exchange_alike),
    "by-hand-unseen": unseen(
        lambda model: model.twins[0].weight, left_out(Changes, "look_at_commit"), left_out(Changes, "look_before_step")
    ),
    "static-unseen": unseen(
        lambda model: model.frozen.weight, into(StaticWatch, "changed", lambda original, watch: [])
    ),
}

#: Of one layer: the auditor finds these when it is that layer's turn. It finds others in whatever it redoes.
LOCAL = {
    *("gradient-of-another", "gradient-zero", "gradient-of-the-first-step", "gradient-said-absent", "factors-of-fewer"),
    *("step-dropped", "steps-exchanged", "momentum-forgotten", "step-twice", "second-step-left-out", "by-hand-unseen"),
}
#: What no redo of steps shows.
NOT_REDONE = {"by-value-stale", "by-value-exchanged", "static-unseen"}


# Redo


def in_groups_of_redo(change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Callable[..., Any]:
    return lambda original, group, index, found: original(group, index, change(found))


def in_states(key: str, change: Callable[[Tensor], Any]) -> Callable[..., None]:
    """Change a state of all parameters behind each step."""

    def apply(original: Any, group: RedoGroup, *arguments: Any) -> None:
        original(group, *arguments)
        for target in group.redo_targets:
            for state in target.states.values():
                if key in state:
                    change(state[key])

    return apply


def twice(original: Any, group: RedoGroup, meta: Any, step: Any, gradients: Any) -> None:
    original(group, meta, step, gradients)
    if step.optimizer == 1 and step.index == 1:
        original(group, meta, step, gradients)


def first_step_alone(original: Any, group: RedoGroup, meta: Any, step: Any, gradients: Any) -> None:
    if step.index == 0:
        original(group, meta, step, gradients)


def in_bf16(original: Any, *arguments: Any) -> Tensor:
    used: Tensor = original(*arguments)
    return used.bfloat16().to(used.dtype)


#: Where each is planted; the auditor redoes steps by the same code.
REDO: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "rate": (
        RedoGroup, "_optimizer", in_groups_of_redo(lambda found: [{**each, "lr": each["lr"] * 1.001} for each in found])
    ),
    "first-group-for-all": (
        RedoGroup, "_optimizer", in_groups_of_redo(lambda found: [{**found[0], "params": []} for _ in found])
    ),
    "step-not-advanced": (RedoGroup, "_apply_sub_step", in_states("step", lambda step: step.sub_(1))),
    "momentum-forgotten": (RedoGroup, "_apply_sub_step", in_states("momentum_buffer", lambda one: one.zero_())),
    "step-twice": (RedoGroup, "_apply_sub_step", twice),
    "second-step-left-out": (RedoGroup, "_apply_sub_step", first_step_alone),
    "rounding": (redo, "apply_ops", in_bf16),
    "factors-ignored": (redo, "apply_ops", lambda original, found, ops, param: found.clone()),
    "last-factor-alone": (
        redo, "apply_ops", lambda original, found, ops, param: original(found, list(ops)[-1:], param)
    ),
}  # fmt: skip


# Restore


def all_but_one(original: Any, restorer: Restorer, *arguments: Any, **named: Any) -> None:
    kept = restorer._tensors["twins.0.weight"].detach().clone()
    original(restorer, *arguments, **named)
    with torch.no_grad():
        restorer._tensors["twins.0.weight"].copy_(kept)


def of_the_slot_before(original: Any, restorer: Restorer, record: int, rank: int) -> None:
    original(restorer, record - 1, rank)


def trainable_as_is(original: Any, live: Any, described: Any) -> None:
    flags = {name: param.requires_grad for name, param in live.named_parameters()}
    original(live, {**described, "trainable": flags})


def values_as_they_are(original: Any, live: Any, described: Any) -> None:
    held = [[{**group} for group in optimizer.param_groups] for optimizer in live.optimizers]
    original(live, described)
    for optimizer, before in zip(live.optimizers, held, strict=True):
        for group, values in zip(optimizer.param_groups, before, strict=True):
            group.update({**values, "params": group["params"]})


def of_records(change: Callable[[list[Any]], list[Any]]) -> Fault:
    """Redo other records than are to be redone."""
    redone = lambda original, group, metas, *rest: original(group, change(metas), *rest)  # noqa: E731
    return into(RedoGroup, "apply_all", redone)


RESTORE: dict[str, Fault] = {
    **{name: into(*where) for name, where in REDO.items()},
    "last-record-left-out": of_records(lambda metas: metas[:-1]),
    "last-record-twice": of_records(lambda metas: [*metas, *metas[-1:]]),
    "state-not-brought-home": left_out(RestoreTarget, "bring_home"),
    "one-tensor-not-filled": into(Restorer, "restore", all_but_one),
    "static-not-restored": left_out(Restorer, "_restore_static"),
    "by-value-not-restored": left_out(Restorer, "_restore_by_value"),
    "by-value-of-the-record-before": into(Restorer, "_restore_by_value", of_the_slot_before),
    "groups-not-restored": into(resume, "restore_groups", values_as_they_are),
    "requires-grad-not-restored": into(resume, "restore_groups", trainable_as_is),
    "state-order-not-restored": left_out(resume, "restore_state_order"),
    "module-flags-not-restored": left_out(ModuleTree, "restore_modes"),
}


def captured_before(original: Any, writer: SlotWriter, record: int) -> Any:
    """One tensor's capture is as it was in the former one."""
    said = original(writer, record)
    index = index_of(writer, "twins.0.weight")
    views = next(views for piece, views in anchored(writer, record) if piece.param == index)
    if record >= SINCE:
        views[0].mul_(1.001)
    return said


#: Where state is captured by value, in the attempt that dies or in the one that resumes.
CAPTURED: dict[str, tuple[Fault | None, Fault | None]] = {
    "one-tensor-stale": (into(SlotWriter, "capture", captured_before), None),
    "buffers-stale": (by_value(torch._foreach_copy_), None),
    "one-tensor-not-filled": (None, into(Restorer, "restore", all_but_one)),
}


# What a sample does not see


def all_but(name: str) -> Fault:
    """One registered object is not loaded."""

    def load(original: Any, states: RankState, names: Any, provided: Any) -> None:
        original(states, [one for one in names if one != name], provided)

    return into(RankState, "load", load)


def loaded_with(**more: int) -> Fault:
    def load(original: Any, data: Data, state: Any) -> None:
        original(data, {name: value + more.get(name, 0) for name, value in state.items()})

    return into(Data, "load_state_dict", load)


HOST: dict[str, Fault] = {
    "scheduler-not-restored": all_but("scheduler 0"),
    "scaler-not-restored": all_but("scaler"),
    "data-not-restored": all_but("data"),
    "one-batch-off": loaded_with(next=1),
    "one-epoch-off": loaded_with(epoch=1),
    "generators-not-restored": into(rng, "restore", lambda original, state: None),
    "numpy-not-restored": into(
        rng, "restore", lambda original, state: original({**state, "numpy": rng.capture()["numpy"]})
    ),
    "gradients-not-restored": into(resume, "restore_gradients", lambda original, *arguments: []),
}
