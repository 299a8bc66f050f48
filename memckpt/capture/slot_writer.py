"""Writer of one rank's part of records into the slots of a generation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memckpt.capture.anchor_copies import AnchorCopies
from memckpt.capture.copier import Copier
from memckpt.capture.digests import Digests
from memckpt.capture.live_state import LiveState, state_of
from memckpt.capture.views import Batch, Places
from memckpt.errors import UnsupportedError
from memckpt.memory.generation_regions import GenerationRegions
from memckpt.memory.landings import Landings
from memckpt.memory.region import Region
from memckpt.memory.slots import SlotRing
from memckpt.state import codec
from memckpt.state.layout import Piece
from memckpt.state.optimizers import dtype_name, dtype_of, fits_room, fits_slots
from memckpt.state.records import RecordMeta, SparseGradient, encode_meta
from memckpt.state.redo import tensor_at
from memckpt.state.spec import ITEM_BYTES, ParamSpec
from memckpt.state.tensors import local

Missing = tuple[tuple[int, int, str], ...]


class LayoutChangedError(UnsupportedError):
    """The live state no longer fits the layout; a new generation is needed."""


class SlotWriter:
    """One rank's view of a generation's regions, bound to the live tensors that it stages.

    Args:
        regions: the regions, mapped; :meth:`close` unmaps them. The memory itself is the agent's.
        generation: number of the generation.
        live: the live tensors.
        rank: this rank.
        copier: copies into the regions.
        whole: whether all slots are reserved. If not, only a start may be written.

    Attributes:
        whole: as the argument; True after :meth:`use_all_slots`.
    """

    def __init__(
        self,
        regions: GenerationRegions,
        generation: int,
        live: LiveState,
        rank: int,
        copier: Copier,
        whole: bool = True,
    ) -> None:
        self.layout = regions.layout
        self.spec = spec = self.layout.spec
        self.generation = generation
        self.rank = rank
        self._regions, self._slots = regions, regions.slots
        self._live = live
        self._copier = copier
        self.ring = SlotRing(self._slots, self.layout, generation)
        tensors = live.tensors()
        #: The live parameters, including DTensors; the rank's local part of each is staged.
        self.params = [tensors[param.tensor.name] for param in spec.params]
        self.index = {id(param): index for index, param in enumerate(self.params)}
        holders = live.buffer_holders()
        self._by_value = [(tensors[one.name], holders.get(one.name)) for one in spec.by_value]
        stagers = self.layout.shared_stagers
        #: Positions of those that this rank copies: its own, and its share of tensors held once.
        self._copied = [at for at in range(len(spec.by_value)) if stagers.get(at, rank) == rank]
        self._by_value_offsets = self.layout.by_value_offsets(rank)
        #: Digests of the tensors held once, as this rank staged them last.
        self._digests: Digests | None = None
        self._static_tensors = [(tensors[one.name], holders.get(one.name)) for one in spec.static]
        self.mine = [stager == rank for stager in self.layout.stagers]
        self.leads = spec.local_ranks[0] == rank
        #: Whether state is captured: nothing is redone, and state without room in the layout is encoded.
        self.captures = spec.mode == "capture"
        #: Marks of gradients that are complete in their slots; None if none are staged.
        self.landings = None if self.captures else Landings(self._slots, self.layout, generation, rank)
        # Plain lists for look-ups at every gradient: backward evicts our data from the CPU's caches.
        self.owners = [[owner.optimizer for owner in param.owners] for param in spec.params]
        self.members = [self.layout.optimizer_params(number) for number in range(len(spec.optimizers))]
        self.grad_dtypes = [dtype_of(param.grad_dtype) for param in spec.params]
        self.sub_step_room = self.layout.sub_step_room
        self._in_groups: dict[int, tuple[list[int], list[torch.Tensor]]] = {}
        self._anchor_parts = [[self._parts_of(piece) for piece in group] for group in self.layout.anchor_groups]
        #: By step of the anchor period; made when its anchors are first due: optimizers have no state before a step.
        self._anchor_copies: dict[int, AnchorCopies] = {}
        self._by_value_batch: Batch | None = None
        # Made here, not at first use: that is during backward, between large gradients, where small long-lived objects
        # would fragment the heap.
        self._gradient_rows = self._make_gradient_rows()
        self.whole = False
        if whole:
            self.use_all_slots()

    def use_all_slots(self) -> None:
        """Allow records to be staged: all slots are reserved now.

        Before that, nothing is page-locked or populated, which would allocate unreserved memory. So an accelerator's
        start is copied to pageable memory.
        """
        self._copier.adopt(self._slots)
        self._slots.populate_in_background()
        self.whole = True

    def close(self) -> None:
        """Release views and mappings."""
        for row in [row for slot in self._gradient_rows for steps in slot for row in steps]:
            row.clear()  # the recorder holds some rows, and views keep the mapping
        self._gradient_rows.clear()
        self._anchor_copies.clear()
        if self.landings is not None:
            self.landings.close()
        for region in self._regions:
            self._copier.release(region)
        self._regions.close()

    def not_stepped(self, number: int, optimizer: Optimizer) -> list[torch.Tensor]:
        """Parameters in an optimizer's groups that the layout lacks: they were frozen when it was made."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        identities = list(map(id, params))
        known = self._in_groups.get(number)
        if known is None or known[0] != identities:
            self._in_groups[number] = known = identities, [param for param in params if id(param) not in self.index]
        return known[1]

    # Gradients

    def gradient_view(self, record: int, optimizer: int, sub_step: int, param: int) -> torch.Tensor:
        """Destination of the gradient of `param` in that sub-step; only for parameters that this rank stages."""
        view = self._gradient_rows[self.layout.slot_number(record)][optimizer][sub_step][param]
        assert view is not None
        return view

    def gradient_row(self, record: int, optimizer: int, sub_step: int) -> list[torch.Tensor | None] | None:
        """Destinations of gradients in that sub-step, by parameter.

        An entry is None if this rank does not stage the parameter, or if its room fits sparse gradients only. The
        result is None if the record has no room for another step of the optimizer.
        """
        if sub_step >= self.sub_step_room[optimizer]:
            return None
        return self._gradient_rows[self.layout.slot_number(record)][optimizer][sub_step]

    def gradient_area(self, record: int, optimizer: int, sub_step: int, dtype: str) -> torch.Tensor:
        """All gradients of that sub-step as staged, as a one-dimensional tensor."""
        offset, nbytes = self.layout.gradient_area(optimizer, sub_step)
        offset += self.layout.slot_offset(record)
        return tensor_at(self._slots.map, offset, (nbytes // ITEM_BYTES[dtype],), dtype)

    def _make_gradient_rows(self) -> list[list[list[list[torch.Tensor | None]]]]:
        """Destinations by slot, optimizer, sub-step and parameter."""
        rows: list[list[list[list[torch.Tensor | None]]]] = [[] for _ in range(self.layout.ring)]
        for optimizer, room in enumerate(self.sub_step_room):
            specs, offset = self.spec.params, self.layout.gradient_offset
            mine = [one for one in self.members[optimizer] if self.mine[one] and _has_dense_room(specs[one])]
            by_sub_step = [
                Places(
                    [
                        (offset(optimizer, sub_step, param), specs[param].tensor.shape, specs[param].grad_dtype)
                        for param in mine
                    ]
                )
                for sub_step in range(room)
            ]
            for slot, in_slot in enumerate(rows):
                steps = []
                for places in by_sub_step:
                    row: list[torch.Tensor | None] = [None] * len(self.params)
                    views = places.at(self._slots.map, slot * self.layout.slot_bytes)
                    for param, view in zip(mine, views, strict=True):
                        row[param] = view
                    steps.append(row)
                in_slot.append(steps)
        return rows

    def stage_sparse(
        self, record: int, optimizer: int, sub_step: int, param: int, gradient: torch.Tensor
    ) -> SparseGradient | None:
        """Stage a sparse gradient, coalesced or not; None, and the need is noted, if its room is too small."""
        indices, values = gradient._indices(), gradient._values()
        spec = self.spec.params[param]
        needed = indices.numel() * ITEM_BYTES["int64"] + values.nbytes
        if needed > spec.sparse_bytes:
            # Twice the bytes seen: the number of rows differs from batch to batch.
            self._live.growth.sparse_bytes[spec.tensor.name] = 2 * needed
            return None
        if self.mine[param]:
            offset = self.layout.slot_offset(record) + self.layout.gradient_offset(optimizer, sub_step, param)
            room = tensor_at(self._slots.map, offset, tuple(indices.shape), "int64")
            self._copier.copy(room, indices)
            offset += indices.numel() * ITEM_BYTES["int64"]
            room = tensor_at(self._slots.map, offset, tuple(values.shape), spec.grad_dtype)
            self._copier.copy(room, values)
        return SparseGradient(param, gradient.sparse_dim(), indices.shape[1], gradient.is_coalesced())

    # Anchors

    def _parts_of(self, piece: Piece) -> list[tuple[int, tuple[int, ...], str]]:
        """Offset in its slot (bytes), shape and dtype of each part of an anchored piece."""
        length = (piece.stop - piece.start,)
        parts: list[tuple[int, tuple[int, ...], str]] = []
        for _, state, offset in self.layout.piece_parts(piece):
            if state is None:
                parts.append((offset, length, self.spec.params[piece.param].tensor.dtype))
            else:
                parts.append((offset, length if state.elementwise else state.shape, state.dtype))
        return parts

    def stage_anchors(self, record: int) -> tuple[Missing, bytes]:
        """Stage the anchors due in `record`.

        Returns the (parameter, optimizer, key) of missing state, and the encoding of state that is not in tensors.

        Raises:
            LayoutChangedError: an optimizer keeps other state than the layout has room for.
        """
        if self._copier.asynchronous:
            return self._stage_pieces(record)
        number = record % self.spec.period
        copies = self._anchor_copies.pop(number, None)
        if copies is None:
            pieces = zip(self.layout.anchor_groups[number], self._anchor_parts[number], strict=True)
            copies = AnchorCopies(list(pieces), self.params, self.spec.params, self.mine, self._live.optimizers)
        if not copies.copy(self._slots.map, self.layout.slot_offset(record)):
            return self._stage_pieces(record)
        self._anchor_copies[number] = copies
        return self._stage_pieces(record, copies.rest)

    def _stage_pieces(self, record: int, positions: Iterable[int] | None = None) -> tuple[Missing, bytes]:
        """Stage the pieces at `positions` of those due in `record` one by one; None: all of them."""
        missing: list[tuple[int, int, str]] = []
        plain: dict[int, dict[int, dict[str, Any]]] = {}
        base = self.layout.slot_offset(record)
        due, places = self.layout.due(record), self._anchor_parts[record % self.spec.period]
        for position in range(len(due)) if positions is None else positions:
            views = [
                tensor_at(self._slots.map, base + offset, shape, dtype) for offset, shape, dtype in places[position]
            ]
            self._stage_piece(due[position], views, missing, plain)
        return tuple(missing), codec.encode(plain) if plain else b""

    def _stage_piece(
        self, piece: Piece, views: Sequence[torch.Tensor], missing: list[tuple[int, int, str]], plain: dict[int, Any]
    ) -> None:
        param = self.params[piece.param]
        mine = self.mine[piece.param]
        if mine:
            self._copier.copy(views[0], _cut(local(param), piece))
        position = 1
        for owner in self.spec.params[piece.param].owners:
            state = state_of(self._live.optimizers[owner.optimizer], param)
            for spec in owner.state:
                value = state.get(spec.key)
                view = views[position]
                position += 1
                if not isinstance(value, torch.Tensor) or (self.captures and not fits_room(value, param, spec)):
                    missing.append((piece.param, owner.optimizer, spec.key))
                    continue
                if mine:
                    value = local(value)
                    source = _cut(value, piece) if spec.elementwise else value
                    if source.shape != view.shape or source.dtype != view.dtype:
                        raise LayoutChangedError(
                            f"state {spec.key!r} of {self.spec.params[piece.param].tensor.name}: expected "
                            f"{list(view.shape)} {view.dtype}, found {list(source.shape)} {source.dtype}"
                        )
                    self._copier.copy(view, source)
            in_slots = sum(isinstance(state.get(spec.key), torch.Tensor) for spec in owner.state)
            if len(state) != in_slots:
                self._note_plain(piece.param, owner.optimizer, state, plain)

    def _note_plain(self, param: int, optimizer: int, state: dict[str, Any], plain: dict[int, Any]) -> None:
        known = {spec.key for owner in self.spec.params[param].owners for spec in owner.state}
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                if key not in known and (not self.captures or _is_large(value, self.params[param])):
                    raise LayoutChangedError(f"new optimizer state {key!r} of {self.spec.params[param].tensor.name}")
            elif not self.captures or not codec.unencodable_paths(value):
                # Captured values that cannot be encoded here go into the rank state, or are reported.
                plain.setdefault(param, {}).setdefault(optimizer, {})[key] = value

    # By-value and static tensors, and the start of a generation

    def stage_by_value(self, record: int) -> None:
        """Copy the by-value tensors to the record's by-value slot.

        Raises:
            LayoutChangedError: a buffer has changed its shape or dtype, or was removed.
        """
        self.ring.open_by_value(record, self.rank)
        self._digests = None
        self._stage_by_value_at(self._slots, self.layout.by_value_base(record))
        if self.layout.shared:
            self._digests = Digests([self._by_value_now(position) for position in self.layout.shared], self._copier)

    def take_digests(self) -> Digests | None:
        """Digests of the tensors held once, as staged last; None if there are none."""
        digests, self._digests = self._digests, None
        return digests

    def seal(self, record: int, digests: Digests | None) -> None:
        """Mark this rank's part of a record as complete; call after the copies are done."""
        if digests is not None:
            self.ring.note_digests(record, self.rank, digests.encode())
        self.ring.seal(record, self.rank)

    def _by_value_now(self, position: int) -> torch.Tensor:
        """The live tensor; raises LayoutChangedError if it does not fit its place."""
        spec, held = self.spec.by_value[position], _now_at(self._by_value[position])
        tensor = None if held is None else local(held)
        if tensor is None or tuple(tensor.shape) != spec.shape or dtype_name(tensor.dtype) != spec.dtype:
            found = "nothing" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"
            raise LayoutChangedError(f"{spec.name}: expected {list(spec.shape)} {spec.dtype}, found {found}")
        return tensor

    def _stage_by_value_at(self, region: Region, base: int) -> None:
        now = [_now_at(self._by_value[position]) for position in self._copied]
        found_all = [tensor for tensor in now if tensor is not None]
        if len(found_all) == len(now) and not self._copier.asynchronous:
            if self._by_value_batch is None:
                places = [(self._by_value_offsets[at], self.spec.by_value[at]) for at in self._copied]
                self._by_value_batch = Batch([(offset, spec.shape, spec.dtype) for offset, spec in places])
            if self._by_value_batch.copy(region.map, base, found_all):
                return
        for position in self._copied:
            tensor, spec = self._by_value_now(position), self.spec.by_value[position]
            place = base + self._by_value_offsets[position]
            self._copier.copy(tensor_at(region.map, place, spec.shape, spec.dtype), tensor)

    def by_value_differs(self, record: int) -> bool:
        """Whether a by-value tensor differs, in any bit, from what this rank held at the end of `record`.

        Another rank may still be copying a shared tensor, and may hold other values: there this rank's own digests
        count.
        """
        base, shared = self.layout.by_value_base(record), self.layout.shared
        try:
            now = Digests([self._by_value_now(position) for position in shared], self._copier)
        except LayoutChangedError:
            return True
        self._copier.token()()
        if shared and now.encode() != self.ring.digests(record, self.rank):
            return True
        for position, (spec, place) in enumerate(zip(self.spec.by_value, self._by_value, strict=True)):
            if position in shared:
                continue
            offset, held = self._by_value_offsets[position], _now_at(place)
            staged = tensor_at(self._slots.map, base + offset, spec.shape, spec.dtype)
            if held is None or not _same_bits(local(held).detach().cpu(), staged):
                return True
        return False

    def static_tensor(self, position: int) -> torch.Tensor | None:
        """The live static tensor that its module holds now."""
        return _now_at(self._static_tensors[position])

    def static_copy(self, position: int) -> torch.Tensor:
        """The staged copy of a static tensor."""
        static, spec = self._regions.static, self.spec.static[position]
        assert static is not None
        return tensor_at(static.map, self.layout.static_offsets[position], spec.shape, spec.dtype)

    def start_generation(self, record: int) -> tuple[tuple[bytes, ...], Missing, bytes]:
        """Write the state after `record` by value: T virtual records (lazy) or straight into the replica (eager).

        Returns the encodings of the virtual records; and for the replica its missing and its non-tensor state.
        """
        if self.leads:
            for position in range(len(self.spec.static)):
                tensor = self.static_tensor(position)
                if tensor is not None:
                    self._copier.copy(self.static_copy(position), local(tensor))
        if self.spec.mode == "eager":
            assert self._regions.replica is not None
            missing, plain = self._fill(self._regions.replica)
            self.ring.open_for_writing(record, self.rank)
            self.stage_by_value(record)
            return (), missing, plain
        metas = []
        for virtual in range(record - self.spec.period + 1, record + 1):
            self.ring.open_for_writing(virtual, self.rank)
            missing, plain = self._stage_pieces(virtual)
            metas.append(encode_meta(RecordMeta(virtual, record, True, (), missing, plain)))
        self.stage_by_value(record)
        return tuple(metas), (), b""

    def is_captured(self, record: int) -> bool:
        """Whether the state after `record` is due to be captured; the start of a generation always is captured."""
        return self.captures and record % self.spec.every == 0

    def capture(self, record: int) -> bytes:
        """Write this rank's part of the state after `record` over the older of the two captures.

        Returns the record's encoding.

        Raises:
            LayoutChangedError: the state no longer fits the layout.
        """
        self.ring.open_for_writing(record, self.rank)
        missing, plain = self._stage_pieces(record)
        self.stage_by_value(record)
        return encode_meta(RecordMeta(record, record, True, (), missing, plain))

    def seal_generation(self, record: int) -> None:
        """Mark this rank's part of the start as complete; call after the copies are done."""
        first = record if self.spec.mode == "eager" else record - self.spec.period + 1
        digests = self.take_digests()
        if digests is not None:
            self.ring.note_digests(record, self.rank, digests.encode())
        for virtual in range(first, record + 1):
            self.ring.seal(virtual, self.rank, by_value=virtual == record)

    def take_snapshot(self, region: Region) -> tuple[Missing, bytes]:
        """Copy this rank's part of the current state; returns its missing and its non-tensor state.

        Raises:
            LayoutChangedError: the state no longer fits the layout.
        """
        missing, plain = self._fill(region)
        self._stage_by_value_at(region, self.layout.state_bytes)
        return missing, plain

    def _fill(self, region: Region) -> tuple[Missing, bytes]:
        missing: list[tuple[int, int, str]] = []
        plain: dict[int, Any] = {}
        for index, (spec, (value_offset, state_offsets)) in enumerate(
            zip(self.spec.params, self.layout.replica_offsets, strict=True)
        ):
            whole = Piece(index, 0, spec.tensor.numel, 0, 0)
            views = [tensor_at(region.map, value_offset, spec.tensor.shape, spec.tensor.dtype).view(-1)]
            for owner in spec.owners:
                for state in owner.state:
                    offset = state_offsets[owner.optimizer, state.key]
                    view = tensor_at(region.map, offset, state.shape, state.dtype)
                    views.append(view.view(-1) if state.elementwise else view)
            self._stage_piece(whole, views, missing, plain)
        return tuple(missing), codec.encode(plain) if plain else b""


def _has_dense_room(spec: ParamSpec) -> bool:
    """Whether a dense gradient fits into the room of one that was sparse."""
    return spec.dense_grad_bytes <= spec.grad_bytes


def _is_large(value: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether new state is as large as its parameter: then it should have a slot, not be encoded with each record."""
    return fits_slots(value, param) and local(value).shape == local(param).shape and local(param).numel() > 1


def _now_at(place: tuple[torch.Tensor, tuple[nn.Module, str] | None]) -> torch.Tensor | None:
    """A tensor, or the buffer that is registered in its place now."""
    tensor, holder = place
    return tensor if holder is None else holder[0]._buffers.get(holder[1])


def _cut(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A piece's elements in row-major order; a view if the memory format permits."""
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
    return flat if piece.stop - piece.start == tensor.numel() else flat[piece.start : piece.stop]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
