"""Layout of a generation: the staged data, and the place of each byte in a slot.

Torch-free: the agent computes the same offsets from the same :class:`StateSpec` as the trainers do, and a lazy agent
never imports torch. All offsets and sizes are in bytes.

A slot holds one record::

    header | gradient arena | anchors due | landings of each local rank

By-value tensors lie behind all slots, in another ring, since a restore needs those of the newest few records
only. One slot of that ring belongs to one record::

    header | digests of each local rank | shared by-value tensors | other by-value tensors of each local rank

Shared tensors are held once for all local ranks, whose digests prove that they are equal.

Where a record is addressed as one range (pieces for peers), its by-value tensors count as following the anchors in
its slot.

The gradient arena has one area for each optimizer sub-step that a record may contain; landings mark the complete
gradients of each optimizer's first one. In mode ``"snapshot"`` there is neither: only every N-th record has a slot,
with the anchors of everything, and two slots are filled alternately.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from memckpt.state.spec import ITEM_BYTES, OwnerSpec, ParamSpec, StateSpec, StateTensorSpec

PAGE = 4096
ALIGN = 64
HEADER_BYTES = PAGE
#: Digest of one shared tensor on one rank.
DIGEST_BYTES = 16
#: Head of a rank's landings: record, generation, name of the tap.
LANDING_HEAD_BYTES = 64
#: Pieces of parameters cut at multiples of this many elements give the same bits in fp32 as whole ones (vector tails).
CUT_ELEMENTS = 32

#: Gradients up to this size lie side by side: copies from a device take several of them at once.
SMALL_GRADIENT_BYTES = 1 << 20

#: Snapshots of the whole state in memory: the newest, and the previous one while that is being written.
SNAPSHOTS = 2


def aligned(size: int, unit: int = ALIGN) -> int:
    """`size` rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


@dataclass(frozen=True)
class Piece:
    """A range of elements of one parameter that is anchored as a unit, with its place in the anchor area (bytes)."""

    param: int
    start: int
    stop: int
    offset: int
    nbytes: int


class Layout:
    """Offsets in slots, static region and replica: a pure function of the spec, the same on ranks and in the agent.

    Another order of places needs another version of the protocol, and of that between agents.
    """

    def __init__(self, spec: StateSpec) -> None:
        self.spec = spec
        self.ring = {"lazy": spec.period + spec.slots, "eager": spec.slots, "snapshot": SNAPSHOTS}[spec.mode]
        #: By optimizer: number of its steps that a record has room for.
        self.sub_step_room = [0 if spec.mode == "snapshot" else one.sub_steps for one in spec.optimizers]
        self._optimizer_params: list[list[int]] = [[] for _ in spec.optimizers]
        for index, param in enumerate(spec.params):
            for owner in param.owners:
                self._optimizer_params[owner.optimizer].append(index)
        self._place_gradients()
        self._place_pieces()
        #: Bytes of a local rank's landings: a head, and a word per parameter.
        self.landing_bytes = 0 if spec.mode == "snapshot" else aligned(LANDING_HEAD_BYTES + 8 * len(spec.params))
        landings = self.landing_bytes * len(spec.local_ranks)
        self.slot_bytes = aligned(HEADER_BYTES + self.gradient_bytes + self.anchor_bytes + landings, PAGE)
        self._place_by_value()
        #: Bytes of all slots and of the by-value ring behind them.
        self.slots_bytes = self.slot_bytes * self.ring + self.by_value_slot_bytes * self.by_value_ring
        self._place_static_and_replica()

    # Slots

    def slot_offset(self, record: int) -> int:
        """Offset in the slots' region of the slot of `record`."""
        return self.slot_number(record) * self.slot_bytes

    def slot_number(self, record: int) -> int:
        """Index in the ring of the slot of `record`; captures alternate between two slots."""
        return record // self.spec.every % self.ring

    # Gradients

    def _place_gradients(self) -> None:
        self._gradient_offsets: list[dict[int, int]] = []
        self._area_bytes: list[int] = []
        self._area_base: list[int] = []
        base = 0
        for room, params in zip(self.sub_step_room, self._optimizer_params, strict=True):
            offset = 0
            offsets = {}
            for index in sorted(params, key=self._gradient_order):
                offsets[index] = offset
                offset += aligned(self.spec.grad_bytes(index))
            self._gradient_offsets.append(offsets)
            self._area_bytes.append(offset)
            self._area_base.append(base)
            base += offset * room
        self.gradient_bytes = base

    def _gradient_order(self, param: int) -> tuple[bool, int]:
        """A gradient's place among others: small ones first, and of these each rank's own together."""
        is_large = self.spec.grad_bytes(param) > SMALL_GRADIENT_BYTES
        return is_large, 0 if is_large else self.stagers[param]

    @cached_property
    def stagers(self) -> list[int]:
        """The local rank that stages each parameter; balanced by bytes, as each rank has its own link."""
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
        if spec.mode == "snapshot":
            limit = total  # a single record carries them all: nothing to balance
        pieces: list[tuple[int, int, int, int]] = []  # bytes, param, start, stop
        for index, param in enumerate(spec.params):
            for start, stop in _cuts(param, limit) if not param.tensor.elsewhere else ():
                nbytes = sum(aligned(each) for _, _, each in self._piece_parts(param, stop - start))
                pieces.append((nbytes, index, start, stop))
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
        """Offset in a record, and bytes, of all ranks' by-value tensors; in memory they are at `by_value_base`."""
        return HEADER_BYTES + self.gradient_bytes + self.anchor_bytes, self.by_value_bytes

    # By-value tensors, static tensors, replica

    def _place_by_value(self) -> None:
        spec, ranks = self.spec, len(self.spec.local_ranks)
        shared_names = set(spec.shared)
        #: Positions, among the by-value tensors, of those held once for all local ranks.
        self.shared = [at for at, tensor in enumerate(spec.by_value) if tensor.name in shared_names]
        held_once = set(self.shared)
        shared = own = 0
        self._by_value_places = [0] * len(spec.by_value)
        # Those of one dtype lie side by side: copies from a device take several of them at once.
        for at, tensor in sorted(enumerate(spec.by_value), key=lambda each: each[1].dtype):
            self._by_value_places[at] = shared if at in held_once else own
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
        #: Bytes of a copy of the state: parameters and optimizer state, then the by-value tensors of all local ranks.
        self.copy_bytes = aligned(self.state_bytes + self.by_value_bytes, PAGE)

    @property
    def total_bytes(self) -> int:
        """Bytes of shared memory of one generation on this node."""
        return self.slots_bytes + self.static_bytes + self.replica_bytes

    @property
    def logged_bytes(self) -> int:
        """Bytes of a record in a log, about: gradients and by-value tensors."""
        return self.gradient_bytes + self.by_value_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint, about."""
        return self.copy_bytes + self.static_bytes

    def start_ranges(self, record: int) -> list[tuple[int, int]]:
        """(offset, length) of the ranges of the slots' region that a start after `record` writes: ascending pages.

        They are all headers and landings, the anchors of the virtual records, and the record's by-value tensors.
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

    def slot_parts(self, record: int, nbytes: int) -> list[tuple[int, int]]:
        """(offset, length) of parts of the slots' region, by when they are due from `record` on.

        Each part is whole slots of at least `nbytes`, but for the last ones of the ring and the by-value slots.
        """
        count = max(1, min(self.ring, -(-nbytes // self.slot_bytes)))
        due = self.slot_number(record) // count * count
        starts = range(0, self.ring, count)
        parts = [
            (start * self.slot_bytes, min(count, self.ring - start) * self.slot_bytes)
            for start in [*(one for one in starts if one >= due), *(one for one in starts if one < due)]
        ]
        by_value = self.slots_bytes - self.slot_bytes * self.ring
        return [parts[0], (self.slot_bytes * self.ring, by_value), *parts[1:]] if by_value else parts

    @property
    def numel(self) -> int:
        """Elements of all stepped parameters."""
        return sum(param.tensor.numel for param in self.spec.params)


def _cuts(param: ParamSpec, limit: int) -> Iterator[tuple[int, int]]:
    numel = param.tensor.numel
    if param.whole or numel <= limit:
        yield 0, numel
        return
    count = -(-numel // limit)
    size = aligned(-(-numel // count), CUT_ELEMENTS)
    for start in range(0, numel, size):
        yield start, min(numel, start + size)
