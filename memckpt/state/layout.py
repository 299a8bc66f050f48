"""Layout of a generation: the staged data, and the place of each byte in a slot.

Torch-free: the agent computes the same offsets from the same :class:`StateSpec` as the trainers do, and a lazy agent
never imports torch. All offsets and sizes are in bytes.

A slot holds one record::

    header | gradient arena | anchors due | landings of each local rank

By-value tensors lie behind all slots, in a ring of their own, since a restore needs those of the newest few records
only. One slot of that ring belongs to one record::

    header | digests of each local rank | shared by-value tensors | other by-value tensors of each local rank

Shared tensors are held once for all local ranks, whose digests prove that they are equal.

Where a record is addressed as one range (pieces for peers), its by-value tensors count as following the anchors in
its slot.

The gradient arena has one area for each optimizer sub-step that a record may contain; landings mark the complete
gradients of each optimizer's first one. In mode ``"capture"`` there is neither: only every N-th record has a slot, with
the anchors of everything, and two slots are filled alternately.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import msgspec

from memckpt.config import RedoMode

PAGE = 4096
ALIGN = 64
HEADER_BYTES = PAGE
#: Digest of one shared tensor on one rank.
DIGEST_BYTES = 16
#: Head of a rank's landings: record, generation, name of the tap.
LANDING_HEAD_BYTES = 64
#: Pieces of parameters cut at multiples of this many elements give the same bits in fp32 as whole ones (vector tails).
CUT_ELEMENTS = 32

#: Captures of the whole state in memory: the newest, and the previous one while that is being written.
CAPTURES = 2

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


def aligned(size: int, unit: int = ALIGN) -> int:
    """`size` rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """Position of a shard in its whole tensor, as in DCP: offsets of its first element, and the whole shape."""

    offsets: tuple[int, ...]
    whole: tuple[int, ...]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Name, shape and dtype of the part of one tensor that a rank holds.

    Attributes:
        shape: shape of that part: all of a plain tensor, the local shard of a DTensor.
        shard: position of the shard; None for a plain tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    shard: Shard | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor; its own if it is not sharded."""
        return self.shape if self.shard is None else self.shard.whole


class StateTensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of an optimizer's state for one parameter.

    `elementwise`: it has the parameter's shape, and is sharded and cut as the parameter is. `on_cpu`: it stays in host
    memory whatever the parameter's device (Adam's ``step``).
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    elementwise: bool
    on_cpu: bool

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class OwnerSpec(msgspec.Struct, frozen=True, array_like=True):
    """One optimizer that steps a parameter, its state for it, and all keys of that state in order."""

    optimizer: int
    group: int
    state: tuple[StateTensorSpec, ...]
    keys: tuple[str, ...] = ()


class ParamSpec(msgspec.Struct, frozen=True, array_like=True):
    """A parameter that some optimizer steps.

    `whole` forbids cutting it (shape-aware optimizers, sparse gradients, bf16 tails). `sparse_bytes` is the room for
    one sparse gradient, 0 for a dense one. `other_grad_dtype` is the dtype of its gradients if it differs from its own.
    """

    tensor: TensorSpec
    owners: tuple[OwnerSpec, ...]
    whole: bool
    sparse_bytes: int
    other_grad_dtype: str = ""

    @property
    def grad_dtype(self) -> str:
        return self.other_grad_dtype or self.tensor.dtype

    @property
    def dense_grad_bytes(self) -> int:
        return self.tensor.numel * ITEM_BYTES[self.grad_dtype]

    @property
    def grad_bytes(self) -> int:
        return self.sparse_bytes or self.dense_grad_bytes


class OptimizerSpec(msgspec.Struct, frozen=True, array_like=True):
    """An optimizer class by name, with the data needed to build it elsewhere.

    `attributes` is a codec encoding of the instance attributes (including ``defaults``), `group_sizes` the number of
    parameters in each group, `sub_steps` the number of its steps that one record has room for. `changes_gradients`: a
    step changes the gradients it is given.
    """

    module: str
    qualname: str
    attributes: bytes
    group_sizes: tuple[int, ...]
    sub_steps: int
    changes_gradients: bool


class StateSpec(msgspec.Struct, frozen=True, array_like=True):
    """Everything that determines a :class:`Layout`.

    `static`: tensors that no optimizer steps (frozen parameters), staged once per generation. `by_value`: tensors
    (buffers, averaged models) staged with every record by every local rank.

    `every`: N in mode ``"capture"``: records whose number is a multiple of N are captured.

    `local_ranks`: the ranks of this node that hold the same shards and share each record's slot.
    `replicas`: all ranks of the job that hold these shards, the local ones included; empty: all ranks of the job.

    `aliases` and `outside` relate these names to the model's ``state_dict()``. `aliases`: further keys of a tensor,
    with its name here (tied weights). `outside`: names that the ``state_dict()`` lacks (non-persistent buffers, modules
    beside the model).

    `flattened`: parameters are shards of flat parameters (FSDP1), which only the rank itself can interpret.

    `trails`: eager redo, here or on a standby replica, stays one record behind what it could apply, so that the newest
    record can be repeated.

    `by_value_slots`: number of records whose by-value tensors are held at once; 0: as many as there are slots.

    `shared`: names of by-value tensors that are held once for all local ranks, as long as these agree. `apart`: names
    of those known to differ between ranks.
    """

    params: tuple[ParamSpec, ...]
    optimizers: tuple[OptimizerSpec, ...]
    static: tuple[TensorSpec, ...]
    by_value: tuple[TensorSpec, ...]
    mode: RedoMode
    period: int
    slots: int
    local_ranks: tuple[int, ...]
    world_size: int
    aliases: tuple[tuple[str, str], ...] = ()
    outside: tuple[str, ...] = ()
    replicas: tuple[int, ...] = ()
    every: int = 1
    flattened: bool = False
    trails: bool = False
    by_value_slots: int = 0
    shared: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()

    @property
    def serves(self) -> tuple[int, ...]:
        """The ranks that hold these parameters and this optimizer state, ascending."""
        return self.replicas or tuple(range(self.world_size))

    @property
    def full(self) -> bool:
        """Whether this node's part of a checkpoint contains the tensors: among parts that hold the same, one does."""
        return self.serves[0] in self.local_ranks

    def digest(self) -> str:
        """A digest of the whole spec; equal if and only if the layouts are."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).hexdigest()

    def content(self) -> str:
        """A digest of the state's parts, regardless of how they are protected; equal if and only if these are."""
        how = {"mode": "eager", "period": 1, "slots": 3, "every": 1, "trails": False, "by_value_slots": 0}
        how |= {"shared": (), "apart": ()}
        return msgspec.structs.replace(self, **how).digest()

    def structure(self) -> tuple[Any, ...]:
        """The tensors, and the optimizers that step each parameter."""
        stepped = tuple((param.tensor, tuple(one.optimizer for one in param.owners)) for param in self.params)
        return stepped, self.static, self.by_value

    def tensors(self) -> list[TensorSpec]:
        return [*(param.tensor for param in self.params), *self.static, *self.by_value]

    def fingerprint(self) -> list[str]:
        """One line per property that must match for a held state to be restored into a model.

        Names, shapes of whole tensors, dtypes and optimizer classes. Not the groups, which change with freezing, nor
        the sharding.
        """
        tensors = sorted(self.tensors(), key=lambda one: one.name)
        lines = [f"{spec.name} {list(spec.whole_shape)} {spec.dtype}" for spec in tensors]
        lines += [f"{_OPTIMIZER} {index} {spec.module}.{spec.qualname}" for index, spec in enumerate(self.optimizers)]
        lines += ["pieces of flat parameters (FSDP1)"] * self.flattened
        return lines

    def sharding(self) -> str:
        """A digest of the shards; empty if no tensor is sharded.

        A held state can be restored into a rank with the same sharding directly; for another one it has to be
        resharded.
        """
        pieces = sorted((spec.name, spec.shape, spec.shard) for spec in self.tensors() if spec.shard is not None)
        if not pieces:
            return ""
        return hashlib.blake2b(msgspec.msgpack.encode(pieces), digest_size=16).hexdigest()


#: First word of a fingerprint's line that names an optimizer.
_OPTIMIZER = "optimizer"


def optimizers_of(fingerprint: Sequence[str]) -> frozenset[str]:
    """The optimizer classes, with their modules, in a fingerprint."""
    lines = (line.split(" ") for line in fingerprint)
    return frozenset(words[2] for words in lines if len(words) == 3 and words[0] == _OPTIMIZER)


def first_difference(held: Sequence[str], live: Sequence[str]) -> str | None:
    """The first line in which two fingerprints differ, as text; None if they are equal."""
    for ours, theirs in zip(held, live, strict=False):
        if ours != theirs:
            return f"held: {ours}; this run: {theirs}"
    if len(held) > len(live):
        return f"held: {held[len(live)]}; this run: nothing in its place"
    if len(live) > len(held):
        return f"held: nothing; this run: {live[len(held)]}"
    return None


@dataclass(frozen=True)
class Piece:
    """A range of elements of one parameter that is anchored as a unit, with its place in the anchor area (bytes)."""

    param: int
    start: int
    stop: int
    offset: int
    nbytes: int


class Layout:
    """Offsets in slots, static region and replica, computed from a :class:`StateSpec`.

    A pure function of the spec: every rank and the agent compute the same one.
    """

    def __init__(self, spec: StateSpec) -> None:
        self.spec = spec
        self.ring = {"lazy": spec.period + spec.slots, "eager": spec.slots, "capture": CAPTURES}[spec.mode]
        #: By optimizer: number of its steps that a record has room for.
        self.sub_step_room = [0 if spec.mode == "capture" else one.sub_steps for one in spec.optimizers]
        self._optimizer_params: list[list[int]] = [[] for _ in spec.optimizers]
        for index, param in enumerate(spec.params):
            for owner in param.owners:
                self._optimizer_params[owner.optimizer].append(index)
        self._place_gradients()
        self._place_pieces()
        #: Bytes of a local rank's landings: a head, and a word per parameter.
        self.landing_bytes = 0 if spec.mode == "capture" else aligned(LANDING_HEAD_BYTES + 8 * len(spec.params))
        landings = self.landing_bytes * len(spec.local_ranks)
        self.slot_bytes = aligned(HEADER_BYTES + self.gradient_bytes + self.anchor_bytes + landings, PAGE)
        self._place_by_value()
        #: Bytes of all slots and of the by-value ring behind them.
        self.slots_bytes = self.slot_bytes * self.ring + self.by_value_slot_bytes * self.by_value_ring
        self._place_static_and_replica()

    # Gradients

    def _place_gradients(self) -> None:
        self._gradient_offsets: list[dict[int, int]] = []
        self._area_bytes: list[int] = []
        self._area_base: list[int] = []
        base = 0
        for room, params in zip(self.sub_step_room, self._optimizer_params, strict=True):
            offset = 0
            offsets = {}
            for index in params:
                offsets[index] = offset
                offset += aligned(self.spec.params[index].grad_bytes)
            self._gradient_offsets.append(offsets)
            self._area_bytes.append(offset)
            self._area_base.append(base)
            base += offset * room
        self.gradient_bytes = base

    def gradient_offset(self, optimizer: int, sub_step: int, param: int) -> int:
        """Offset in a slot of the gradient of `param` for the `sub_step`-th step of `optimizer` in a record."""
        area = self._area_base[optimizer] + sub_step * self._area_bytes[optimizer]
        return HEADER_BYTES + area + self._gradient_offsets[optimizer][param]

    def gradient_area(self, optimizer: int, sub_step: int) -> tuple[int, int]:
        """Offset in a slot, and bytes, of all gradients for the `sub_step`-th step of `optimizer` in a record."""
        area = self._area_base[optimizer] + sub_step * self._area_bytes[optimizer]
        return HEADER_BYTES + area, self._area_bytes[optimizer]

    def optimizer_params(self, optimizer: int) -> list[int]:
        """Indices of the parameters that `optimizer` steps, in the layout's order."""
        return self._optimizer_params[optimizer]

    # Anchors

    def _place_pieces(self) -> None:
        """Cut parameters into pieces of at most n/(4T) elements and balance them over the period."""
        spec = self.spec
        total = sum(param.tensor.numel for param in spec.params)
        limit = max(aligned(total // (4 * spec.period), CUT_ELEMENTS), CUT_ELEMENTS * 128)
        if spec.mode == "capture":
            limit = total  # a single record carries them all: nothing to balance
        pieces: list[tuple[int, int, int, int]] = []  # bytes, param, start, stop
        for index, param in enumerate(spec.params):
            for start, stop in _cuts(param, limit):
                pieces.append((self._piece_bytes(param, stop - start), index, start, stop))
        loads = [0] * spec.period
        groups: list[list[tuple[int, int, int, int]]] = [[] for _ in range(spec.period)]
        for piece in sorted(pieces, key=lambda item: (-item[0], item[1], item[2])):
            lightest = loads.index(min(loads))
            loads[lightest] += piece[0]
            groups[lightest].append(piece)
        base = HEADER_BYTES + self.gradient_bytes
        self.anchor_groups: list[list[Piece]] = []
        for group in groups:
            offset = base
            placed = []
            for nbytes, index, start, stop in group:
                placed.append(Piece(index, start, stop, offset, nbytes))
                offset += nbytes
            self.anchor_groups.append(placed)
        self.anchor_bytes = aligned(max(loads, default=0))

    def _piece_bytes(self, param: ParamSpec, elements: int) -> int:
        return sum(aligned(nbytes) for _, _, nbytes in self._piece_parts(param, elements))

    def _piece_parts(
        self, param: ParamSpec, elements: int
    ) -> Iterator[tuple[OwnerSpec | None, StateTensorSpec | None, int]]:
        yield None, None, elements * ITEM_BYTES[param.tensor.dtype]
        for owner in param.owners:
            for state in owner.state:
                nbytes = elements * ITEM_BYTES[state.dtype] if state.elementwise else state.nbytes
                yield owner, state, nbytes

    def piece_parts(self, piece: Piece) -> Iterator[tuple[OwnerSpec | None, StateTensorSpec | None, int]]:
        """The parts of an anchored piece with their offsets in the slot; the parameter first (owner None)."""
        offset = piece.offset
        for owner, state, nbytes in self._piece_parts(self.spec.params[piece.param], piece.stop - piece.start):
            yield owner, state, offset
            offset += aligned(nbytes)

    def due(self, record: int) -> list[Piece]:
        """The pieces whose anchors `record` carries."""
        return self.anchor_groups[record % self.spec.period]

    def anchor_area(self, record: int) -> tuple[int, int]:
        """Offset in a slot, and bytes, of the anchors that `record` carries."""
        return HEADER_BYTES + self.gradient_bytes, sum(piece.nbytes for piece in self.due(record))

    def by_value_area(self) -> tuple[int, int]:
        """Offset in a record, and bytes, of the by-value tensors of all local ranks.

        In memory they lie elsewhere: see :meth:`by_value_base`.
        """
        return HEADER_BYTES + self.gradient_bytes + self.anchor_bytes, self.by_value_bytes

    # By-value tensors, static tensors, replica

    def _place_by_value(self) -> None:
        spec, ranks = self.spec, len(self.spec.local_ranks)
        shared_names = set(spec.shared)
        #: Positions, among the by-value tensors, of those held once for all local ranks.
        self.shared = [at for at, tensor in enumerate(spec.by_value) if tensor.name in shared_names]
        held_once = set(self.shared)
        shared = own = 0
        self._by_value_places: list[int] = []
        for at, tensor in enumerate(spec.by_value):
            self._by_value_places.append(shared if at in held_once else own)
            if at in held_once:
                shared += aligned(tensor.nbytes)
            else:
                own += aligned(tensor.nbytes)
        self._shared_bytes, self._own_bytes = shared, own
        #: Bytes of the by-value tensors of all local ranks in one record.
        self.by_value_bytes = shared + own * ranks
        #: Number of records whose by-value tensors are held at once.
        self.by_value_ring = min(self.ring, spec.by_value_slots or self.ring) if spec.by_value else 0
        #: Bytes of one rank's digests of the shared tensors in one record.
        self.digest_bytes = DIGEST_BYTES * len(self.shared)
        self._by_value_start = aligned(HEADER_BYTES + self.digest_bytes * ranks)
        self.by_value_slot_bytes = 0
        if spec.by_value:
            self.by_value_slot_bytes = aligned(self._by_value_start + self.by_value_bytes, PAGE)

    def by_value_slot_offset(self, record: int) -> int:
        """Offset in the slots' region of the by-value slot of `record`, header first."""
        number = record // self.spec.every % self.by_value_ring
        return self.slot_bytes * self.ring + number * self.by_value_slot_bytes

    def by_value_base(self, record: int) -> int:
        """Offset in the slots' region of the by-value tensors of `record`, of all local ranks; 0 if there are none."""
        return self.by_value_slot_offset(record) + self._by_value_start if self.by_value_ring else 0

    def by_value_offsets(self, rank: int) -> list[int]:
        """For each by-value tensor, the offset behind :meth:`by_value_base` of `rank`'s copy."""
        own = self._shared_bytes + self.spec.local_ranks.index(rank) * self._own_bytes
        held_once = set(self.shared)
        return [place if at in held_once else own + place for at, place in enumerate(self._by_value_places)]

    def digests_base(self, record: int, rank: int) -> int:
        """Offset in the slots' region of a local rank's digests of the shared tensors of `record`."""
        position = self.spec.local_ranks.index(rank)
        return self.by_value_slot_offset(record) + HEADER_BYTES + position * self.digest_bytes

    def landing_base(self, rank: int) -> int:
        """Offset in a slot of a local rank's landings: behind all that peers and storage receive."""
        start = HEADER_BYTES + self.gradient_bytes + self.anchor_bytes
        return start + self.spec.local_ranks.index(rank) * self.landing_bytes

    def _place_static_and_replica(self) -> None:
        offset = 0
        self.static_offsets: list[int] = []
        for tensor in self.spec.static:
            self.static_offsets.append(offset)
            offset += aligned(tensor.nbytes)
        # A rank may hold empty shards only, and a region cannot have 0 bytes.
        self.static_bytes = aligned(max(offset, 1), PAGE) if self.spec.static else 0
        offset = 0
        #: For each parameter, offsets in the replica of its value, and of its states by (optimizer, key).
        self.replica_offsets: list[tuple[int, dict[tuple[int, str], int]]] = []
        for param in self.spec.params:
            value = offset
            offset += aligned(param.tensor.nbytes)
            states = {}
            for owner in param.owners:
                for state in owner.state:
                    states[owner.optimizer, state.key] = offset
                    offset += aligned(state.nbytes)
            self.replica_offsets.append((value, states))
        #: Bytes of parameters and optimizer state, each once.
        self.state_bytes = aligned(max(offset, 1), PAGE) if self.spec.params else 0
        self.replica_bytes = self.state_bytes if self.spec.mode == "eager" else 0
        #: Bytes of a snapshot: parameters and optimizer state, then the by-value tensors of all local ranks.
        self.snapshot_bytes = aligned(self.state_bytes + self.by_value_bytes, PAGE)

    @property
    def total_bytes(self) -> int:
        """Bytes of shared memory of one generation on this node."""
        return self.slots_bytes + self.static_bytes + self.replica_bytes

    def start_ranges(self, record: int) -> list[tuple[int, int]]:
        """(offset, length) of the ranges of the slots' region that a start after `record` writes (bytes, whole pages).

        They are all headers and landings, the anchors of the virtual records, and the record's by-value tensors. The
        ranges are ascending and disjoint.
        """
        virtual = range(0) if self.spec.mode == "eager" else range(record - self.spec.period + 1, record + 1)
        found = []
        landings = HEADER_BYTES + self.gradient_bytes + self.anchor_bytes
        for slot in range(0, self.slot_bytes * self.ring, self.slot_bytes):
            found.append((slot, slot + HEADER_BYTES))
            if self.landing_bytes:
                found.append((slot + landings, slot + self.slot_bytes))
        for number in virtual:
            offset, nbytes = self.anchor_area(number)
            start = self.slot_offset(number) + offset
            found.append((start, start + nbytes))
        for number in range(self.by_value_ring):
            slot = self.slot_bytes * self.ring + number * self.by_value_slot_bytes
            held = self.by_value_slot_offset(record) == slot
            found.append((slot, slot + (self.by_value_slot_bytes if held else HEADER_BYTES)))
        merged: list[tuple[int, int]] = []
        for start, stop in sorted((begin - begin % PAGE, aligned(end, PAGE)) for begin, end in found):
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(stop, merged[-1][1])
            else:
                merged.append((start, stop))
        return [(start, stop - start) for start, stop in merged]

    @property
    def numel(self) -> int:
        """Elements of all stepped parameters."""
        return sum(param.tensor.numel for param in self.spec.params)

    def slot_offset(self, record: int) -> int:
        """Offset in the slots' region of the slot of `record`."""
        return self.slot_number(record) * self.slot_bytes

    def slot_number(self, record: int) -> int:
        """Index in the ring of the slot of `record`; captures alternate between two slots."""
        return record // self.spec.every % self.ring

    @cached_property
    def stagers(self) -> list[int]:
        """For each parameter, the local rank that stages it; balanced by bytes, as each rank has its own link."""
        return self._balanced([param.tensor.nbytes for param in self.spec.params])

    @cached_property
    def shared_stagers(self) -> dict[int, int]:
        """The local rank that stages each shared tensor, by its position among the by-value tensors."""
        sizes = [self.spec.by_value[position].nbytes for position in self.shared]
        return dict(zip(self.shared, self._balanced(sizes), strict=True))

    def _balanced(self, sizes: Sequence[int]) -> list[int]:
        """A local rank for each size in bytes, with balanced loads."""
        ranks = self.spec.local_ranks
        loads = [0] * len(ranks)
        chosen = [ranks[0]] * len(sizes)
        for index in sorted(range(len(chosen)), key=lambda i: (-sizes[i], i)):
            lightest = loads.index(min(loads))
            loads[lightest] += sizes[index]
            chosen[index] = ranks[lightest]
        return chosen


def _cuts(param: ParamSpec, limit: int) -> Iterator[tuple[int, int]]:
    numel = param.tensor.numel
    if param.whole or numel <= limit:
        yield 0, numel
        return
    count = -(-numel // limit)
    size = aligned(-(-numel // count), CUT_ELEMENTS)
    for start in range(0, numel, size):
        yield start, min(numel, start + size)
