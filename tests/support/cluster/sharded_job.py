"""Sharded training in one process: units that each train their own shards, with a store of their states.

The expected state is assembled from the units. Shards are trained as they are cut, so every bit is known whatever their
shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.optim import Optimizer

from memckpt.agent.saving.writer.checkpoint_writer import save
from memckpt.memory.region import Region
from memckpt.protocol.storing import Save
from memckpt.recovery.from_storage import StoredState
from memckpt.state import codec, rng
from memckpt.state.layout import Layout
from memckpt.state.optimizers import attributes, dtype_name, hyperparameters
from memckpt.state.records import RecordMeta, SubStep, Timeline, encode_meta
from memckpt.state.spec import OptimizerSpec, OwnerSpec, ParamSpec, Shard, StateSpec, StateTensorSpec, TensorSpec
from memckpt.state.tensors import local, shard_of
from memckpt.storage.batch import FileTensor, by_value_name, gradient_name, meta_name, rank_state_name, write_batch
from memckpt.storage.catalog import read_catalog
from memckpt.storage.chain import StoredPoint, stored_points
from memckpt.storage.format import Batch, Part
from memckpt.storage.node_files import StoredNames, by_value_tensors, state_tensors
from memckpt.storage.store import Store

TIMELINE = Timeline(1, "a")
#: Parameters, a frozen tensor and an averaged one that are sharded; one parameter and a buffer that are not.
WHOLE = {"w": (7, 5), "v": (4, 3, 2), "b": (6,), "s": (), "frozen": (5, 4), "average": (6, 3)}
PARAMS = ("w", "v", "b", "s", "scale")
PLAIN = {"scale": (3,), "count": ()}


@dataclass(frozen=True)
class Box:
    """A shard of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))]


def grid(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[Box]:
    """Cells of a tensor cut at some places of each dimension."""
    boxes = [Box((), ())]
    for size, places in zip(shape, cuts, strict=True):
        edges = [0, *sorted({place for place in places if 0 < place < size}), size]
        boxes = [Box((*box.offsets, low), (*box.sizes, high - low)) for box in boxes for low, high in pairwise(edges)]
    return boxes


def rows(count: int) -> dict[str, list[Box]]:
    """Each tensor cut along its first dimension as FSDP2 does it; the last units may get empty shards."""
    found = {name: [Box((), ())] * count for name in WHOLE}
    for name, (length, *rest) in ((name, shape) for name, shape in WHOLE.items() if shape):
        size = -(-length // count)
        starts = [min(index * size, length) for index in range(count)]
        found[name] = [Box((start, *[0] * len(rest)), (min(size, length - start), *rest)) for start in starts]
    return found


class Unit:
    """The ranks that hold the same shards and train them alike."""

    def __init__(self, index: int, boxes: Mapping[str, Box] | None, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.index, self.boxes = index, boxes
        wholes = {name: torch.randn(shape, generator=generator) for name, shape in WHOLE.items()}
        self.tensors = {name: self.piece(name, whole) for name, whole in wholes.items()}
        self.tensors["scale"] = torch.full(PLAIN["scale"], float(index + 1))
        self.params = {name: torch.nn.Parameter(self.tensors[name]) for name in PARAMS}
        self.tensors |= {name: param.detach() for name, param in self.params.items()}
        self.optimizer = torch.optim.Adam(self.params.values(), lr=0.1)

    def piece(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        return whole if self.boxes is None or name in PLAIN else self.boxes[name].of(whole).clone()

    def step(self, record: int) -> dict[str, torch.Tensor]:
        """Train one record; returns the gradients."""
        generator = torch.Generator().manual_seed(record)
        gradients = {}
        for name, param in self.params.items():
            whole = torch.randn({**WHOLE, **PLAIN}[name], generator=generator)
            gradients[name] = param.grad = self.piece(name, whole)
        self.optimizer.step()
        with torch.no_grad():
            self.tensors["average"] += record
        return gradients

    def values(self) -> dict[str, tuple[str, torch.Tensor]]:
        """Tensors and state tensors by name, with the name of the tensor that each belongs to."""
        values = {name: (name, value) for name, value in self.tensors.items()}
        for name, param in self.params.items():
            values |= {f"{name}.{key}": (name, value) for key, value in self.optimizer.state[param].items()}
        return values

    def spec(self, ranks: tuple[int, ...], serves: tuple[int, ...], world_size: int) -> StateSpec:
        return spec_of(self.tensors, self.boxes, self.optimizer, ranks, serves, world_size)


def spec_of(
    tensors: Mapping[str, torch.Tensor],
    boxes: Mapping[str, Box] | None,
    optimizer: Optimizer,
    ranks: tuple[int, ...],
    serves: tuple[int, ...],
    world_size: int,
) -> StateSpec:
    """The layout of local tensors; those without a box are plain, or DTensors."""

    def described(name: str) -> TensorSpec:
        tensor = tensors[name] if name in tensors else torch.zeros(PLAIN[name])
        shard = shard_of(tensor)
        if boxes is not None and name in boxes:
            shard = Shard(boxes[name].offsets, WHOLE[name])
        return TensorSpec(name, tuple(local(tensor).shape), dtype_name(tensor.dtype), shard)

    def stepped(name: str) -> ParamSpec:
        tensor = described(name)
        state = tuple(StateTensorSpec(key, tensor.shape, "float32", True, False) for key in ("exp_avg", "exp_avg_sq"))
        state = (StateTensorSpec("step", (), "float32", False, False), *state)
        return ParamSpec(tensor, (OwnerSpec(0, 0, state, ("step", "exp_avg", "exp_avg_sq")),), False, 0)

    kept = codec.encode(attributes(optimizer)[0])
    return StateSpec(
        params=tuple(stepped(name) for name in PARAMS),
        optimizers=(OptimizerSpec("torch.optim.adam", "Adam", kept, (len(PARAMS),), 1),),
        static=(described("frozen"),),
        by_value=(described("average"), described("count")),
        mode="lazy",
        period=2,
        slots=3,
        local_ranks=ranks,
        world_size=world_size,
        replicas=serves,
    )


@dataclass
class Stored:
    """The training's states."""

    store: Store
    world_size: int
    #: By record, every tensor and every state tensor, whole; plain ones are those of the first unit.
    wholes: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    #: Plain tensors by record and unit.
    plains: dict[tuple[int, int], dict[str, torch.Tensor]] = field(default_factory=dict)
    units: list[Unit] = field(default_factory=list)  # the units at the end

    def point(self, record: int) -> StoredPoint:
        return next(one for one in stored_points(read_catalog(self.store), also=record) if one.record == record)


def rank_state(unit: Unit, rank: int, record: int) -> bytes:
    groups = [[{**hyperparameters(unit.optimizer)[0], "params": list(PARAMS)}]]
    return codec.encode({"groups": groups, "provided": {"rank": rank, "at": record}, "rng": rng.capture()})


def train(
    store: Store,
    boxes: Mapping[str, Sequence[Box]] | None,
    units: int,
    copies: int = 1,
    base_at: int = 2,
    last: int = 2,
    timeline: Timeline = TIMELINE,
    keep_last: int = 99,
) -> Stored:
    """Train, write a checkpoint after `base_at`, and log the records up to `last`.

    Each rank is its own node, and holds the shards (by tensor, of each unit) of unit `rank % units`.
    """
    job = Stored(store, units * copies)
    for index in range(units):
        job.units.append(Unit(index, None if boxes is None else {name: each[index] for name, each in boxes.items()}, 7))
    holders = [(rank, job.units[rank % units]) for rank in range(job.world_size)]
    logged: dict[int, list[FileTensor]] = {rank: [] for rank, _ in holders}
    for record in range(1, last + 1):
        gradients = {unit.index: unit.step(record) for unit in job.units}
        if record < base_at:
            continue
        job.wholes[record] = _whole(job)
        for unit in job.units:
            plain = {name: value.clone() for name, (whole, value) in unit.values().items() if whole in PLAIN}
            job.plains[record, unit.index] = plain
        for rank, unit in holders:
            if record == base_at:
                write_part(job, unit, rank, record, timeline, keep_last)
            else:
                logged[rank] += _logged(job, unit, rank, record, gradients[unit.index])
    steps = tuple(range(base_at + 1, last + 1))
    for rank, unit in holders if steps else ():
        settings: dict[str, Any] = {"first": steps[0], "last": last, "steps": steps, "follows": timeline}
        write_batch(store, Batch(**settings, **_place(job, unit, rank, timeline)), logged[rank])
    return job


def _place(job: Stored, unit: Unit, rank: int, timeline: Timeline) -> dict[str, Any]:
    """What a rank's parts and batches say of it."""
    spec = _spec(job, unit, rank)
    found = {"timeline": timeline, "world_size": job.world_size, "ranks": (rank,), "node": f"n{rank}", "created": 0.0}
    return {**found, "full": spec.full, "content": spec.content(), "serves": spec.serves}


def _ranks(job: Stored, unit: Unit) -> tuple[int, ...]:
    return tuple(range(unit.index, job.world_size, len(job.units)))


def _spec(job: Stored, unit: Unit, rank: int) -> StateSpec:
    return unit.spec((rank,), _ranks(job, unit), job.world_size)


def _count(rank: int, record: int) -> torch.Tensor:
    return torch.tensor(100.0 * record + rank)


def write_part(job: Stored, unit: Unit, rank: int, record: int, timeline: Timeline, keep_last: int = 99) -> Part:
    """Run the writer process's code on the regions of a rank's node."""
    spec = _spec(job, unit, rank)
    layout = Layout(spec)
    state = Region.create("test-state", layout.copy_bytes)
    static = Region.create("test-static", layout.static_bytes)
    part = Part(record=record, step=record, **_place(job, unit, rank, timeline))
    try:
        for views, tensors in (
            (state_tensors(layout, state.map, static.map, ()), _named(spec, unit)),
            (by_value_tensors(layout, state.map, layout.state_bytes), _named_by_value(spec, unit, rank, record)),
        ):
            assert set(views) == set(tensors)
            for name, view in views.items():
                view.copy_(tensors[name])
        described = Save(
            url=job.store.url, part=part, spec=spec, source="copy", generation=1,
            rank_states={rank: rank_state(unit, rank, record)}, keep_last=keep_last, keep_every_steps=None,
            by_value_base=layout.state_bytes,
        )  # fmt: skip
        del views, view
        save(described, [state, state, static])
    finally:
        state.close()
        static.close()
    return part


def _named(spec: StateSpec, unit: Unit) -> dict[str, torch.Tensor]:
    names, values = StoredNames(spec), unit.values()
    described = [*spec.static, *(param.tensor for param in spec.params)]
    tensors = {names.tensor(one): unit.tensors[one.name] for one in described}
    for param in spec.params:
        for state in param.owners[0].state:
            tensors[names.state(param, 0, state)] = values[f"{param.tensor.name}.{state.key}"][1]
    return tensors


def _named_by_value(spec: StateSpec, unit: Unit, rank: int, record: int) -> dict[str, torch.Tensor]:
    names = StoredNames(spec)
    average, count = spec.by_value
    return {names.by_value(average, rank): unit.tensors["average"], names.by_value(count, rank): _count(rank, record)}


def _logged(job: Stored, unit: Unit, rank: int, record: int, gradients: Mapping[str, torch.Tensor]) -> list[FileTensor]:
    sub_step = SubStep(0, 0, codec.encode(hyperparameters(unit.optimizer)))
    found = {rank_state_name(record, rank): _bytes(rank_state(unit, rank, record))}
    found[by_value_name(record, rank, "average")] = unit.tensors["average"].clone()
    found[by_value_name(record, rank, "count")] = _count(rank, record)
    if _spec(job, unit, rank).full:
        found[meta_name(record)] = _bytes(encode_meta(RecordMeta(record, record - 1, False, (sub_step,))))
        found |= {gradient_name(record, sub_step, name): value for name, value in gradients.items()}
    return [
        FileTensor(name, dtype_name(value.dtype), tuple(value.shape), memoryview(value.numpy().tobytes()))
        for name, value in found.items()
    ]


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _whole(job: Stored) -> dict[str, torch.Tensor]:
    """All tensors, assembled; shards held several times must be equal."""
    found: dict[str, torch.Tensor] = {}
    for unit in reversed(job.units):  # plain tensors are those of the first
        for key, (name, value) in unit.values().items():
            if name in PLAIN or unit.boxes is None or key.endswith(".step"):
                found[key] = value.clone()
                continue
            whole = found.setdefault(key, torch.full(WHOLE[name], torch.nan))
            unit.boxes[name].of(whole).copy_(value)
    return found


# Restoring


@dataclass
class Live:
    """A rank that restores."""

    tensors: dict[str, torch.Tensor]  # tensors by name; DTensors or plain ones
    optimizers: list[Optimizer]  # optimizers of the parameters among them

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor]) -> Live:
        tensors = {**{name: torch.full(shape, torch.nan) for name, shape in PLAIN.items()}, **tensors}
        for name in PARAMS:
            tensors[name] = torch.nn.Parameter(tensors[name].detach())
        return cls(tensors, [torch.optim.Adam([tensors[name] for name in PARAMS], lr=0.1)])

    def spec(self, rank: int, world_size: int) -> StateSpec:
        serves = (rank,) if any(shard_of(tensor) is not None for tensor in self.tensors.values()) else ()
        return spec_of(self.tensors, None, self.optimizers[0], (rank,), serves, world_size)

    def restore(self, job: Stored, record: int, rank: int = 0, world_size: int = 1) -> StoredState:
        stored = StoredState(job.store, job.point(record), rank, self.spec(rank, world_size))
        stored.restore(self.tensors, self.optimizers)
        return stored

    def values(self) -> dict[str, torch.Tensor]:
        """Tensors and state tensors by name; DTensors stay DTensors."""
        found = {name: tensor.detach() for name, tensor in self.tensors.items()}
        for name in PARAMS:
            state: dict[str, Any] = self.optimizers[0].state[self.tensors[name]]
            found |= {f"{name}.{key}": value for key, value in state.items()}
        return found


def plain() -> Live:
    """A rank that holds whole tensors."""
    return Live.of({name: torch.full(shape, torch.nan) for name, shape in WHOLE.items()})


def check(live: Live, job: Stored, record: int, own: int = 0) -> None:
    """Check every element against the whole tensor; plain tensors against those of the unit `own`."""
    whole = job.wholes[record] | job.plains[record, own]
    found = live.values()
    assert set(found) == {*whole, "count"}
    for name, value in found.items():
        if name == "count":
            continue
        expected, shard = whole[name], shard_of(value)
        if shard is not None:
            expected = Box(shard.offsets, tuple(local(value).shape)).of(expected)
        assert torch.equal(local(value), expected), name
