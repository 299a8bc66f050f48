"""Writes one rank's part of records into the slots of a generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from memckpt.capture.copier import Copier
from memckpt.capture.live_state import LiveState, state_of
from memckpt.errors import UnsupportedError
from memckpt.memory.region import Region
from memckpt.memory.slots import SlotRing
from memckpt.state import codec
from memckpt.state.layout import ITEM_BYTES, Layout, Piece, StateSpec
from memckpt.state.optimizers import dtype_name, fits_room, fits_slots
from memckpt.state.records import RecordMeta, SparseGradient, encode_meta
from memckpt.state.redo import tensor_at
from memckpt.state.tensors import local

Missing = tuple[tuple[int, int, str], ...]


class LayoutChangedError(UnsupportedError):
    """The live state no longer fits the layout; a new generation is needed."""


class SlotWriter:
    """One rank's view of a generation's regions, bound to the live tensors that it stages.

    Owns the mappings it was given; :meth:`close` unmaps them. The memory itself is the agent's.
    """

    def __init__(
        self,
        spec: StateSpec,
        generation: int,
        slots: Region,
        static: Region | None,
        replica: Region | None,
        live: LiveState,
        rank: int,
        copier: Copier,
    ) -> None:
        self.spec = spec
        self.layout = Layout(spec)
        self.generation = generation
        self.rank = rank
        self._slots, self._static, self._replica = slots, static, replica
        self._live = live
        self._copier = copier
        self.ring = SlotRing(slots, self.layout, generation)
        tensors = live.tensors()
        #: The live parameters, DTensors among them; what is staged is what this rank holds of them.
        self.params = [tensors[param.tensor.name] for param in spec.params]
        self.index = {id(param): index for index, param in enumerate(self.params)}
        holders = live.buffer_holders()
        self._by_value = [(tensors[one.name], holders.get(one.name)) for one in spec.by_value]
        self._static_tensors = [(tensors[one.name], holders.get(one.name)) for one in spec.static]
        stagers = self.layout.stagers
        self.mine = [stager == rank for stager in stagers]
        self.leads = spec.local_ranks[0] == rank
        #: Nothing is redone: the whole state is written now and then, and what has no room here is encoded.
        self.captures = spec.mode == "capture"
        # What is asked for at every gradient, in plain lists: backward leaves nothing of ours in the CPU's caches.
        self.owners = [[owner.optimizer for owner in param.owners] for param in spec.params]
        self.sub_step_room = self.layout.sub_step_room
        self._anchor_parts = [[self._parts_of(piece) for piece in group] for group in self.layout.anchor_groups]
        # Made now and not when they are first used: that is during backward, between large gradients, where small
        # objects that stay would pin the heap.
        self._gradient_views = self._make_gradient_views()
        copier.adopt(slots)
        slots.populate_in_background()

    def close(self) -> None:
        """Let go of views and mappings."""
        self._gradient_views.clear()
        for region in (self._slots, self._static, self._replica):
            if region is not None:
                self._copier.release(region)
                region.close()

    # Gradients

    def gradient_view(self, record: int, optimizer: int, sub_step: int, param: int) -> torch.Tensor:
        """Where the gradient of `param` for that sub-step is staged; only for parameters that this rank stages."""
        return self._gradient_views[self.layout.slot_number(record), optimizer, sub_step, param]

    def _make_gradient_views(self) -> dict[tuple[int, int, int, int], torch.Tensor]:
        views = {}
        for slot in range(self.layout.ring if any(self.sub_step_room) else 0):
            for optimizer in range(len(self.spec.optimizers)):
                for sub_step in range(self.sub_step_room[optimizer]):
                    for param in self.layout.optimizer_params(optimizer):
                        tensor = self.spec.params[param].tensor
                        if not self.mine[param]:
                            continue
                        offset = self.layout.slot_offset(slot)
                        offset += self.layout.gradient_offset(optimizer, sub_step, param)
                        view = tensor_at(self._slots.map, offset, tensor.shape, tensor.dtype)
                        views[slot, optimizer, sub_step, param] = view
        return views

    def stage_sparse(
        self, record: int, optimizer: int, sub_step: int, param: int, gradient: torch.Tensor
    ) -> SparseGradient | None:
        """Stage a sparse gradient as it is, coalesced or not; None if its room is too small (it is then noted)."""
        indices, values = gradient._indices(), gradient._values()
        spec = self.spec.params[param]
        needed = indices.numel() * ITEM_BYTES["int64"] + values.nbytes
        if needed > spec.sparse_bytes:
            # Twice what was seen: the number of rows that occur differs from batch to batch.
            self._live.growth.sparse_bytes[spec.tensor.name] = 2 * needed
            return None
        if self.mine[param]:
            offset = self.layout.slot_offset(record) + self.layout.gradient_offset(optimizer, sub_step, param)
            room = tensor_at(self._slots.map, offset, tuple(indices.shape), "int64")
            self._copier.copy(room, indices)
            offset += indices.numel() * ITEM_BYTES["int64"]
            room = tensor_at(self._slots.map, offset, tuple(values.shape), spec.tensor.dtype)
            self._copier.copy(room, values)
        return SparseGradient(param, gradient.sparse_dim(), indices.shape[1], gradient.is_coalesced())

    # Anchors

    def _parts_of(self, piece: Piece) -> list[tuple[int, tuple[int, ...], str]]:
        """Offset in its slot, shape and dtype of each part of an anchored piece."""
        length = (piece.stop - piece.start,)
        parts: list[tuple[int, tuple[int, ...], str]] = []
        for _, state, offset in self.layout.piece_parts(piece):
            if state is None:
                parts.append((offset, length, self.spec.params[piece.param].tensor.dtype))
            else:
                parts.append((offset, length if state.elementwise else state.shape, state.dtype))
        return parts

    def stage_anchors(self, record: int) -> tuple[Missing, bytes]:
        """Stage the anchors due in `record`; returns what of the state is missing and what of it is not a tensor.

        Raises:
            LayoutChangedError: an optimizer keeps other state than the layout says.
        """
        missing: list[tuple[int, int, str]] = []
        plain: dict[int, dict[int, dict[str, Any]]] = {}
        base = self.layout.slot_offset(record)
        due = zip(self.layout.due(record), self._anchor_parts[record % self.spec.period], strict=True)
        for piece, parts in due:
            views = [tensor_at(self._slots.map, base + offset, shape, dtype) for offset, shape, dtype in parts]
            self._stage_piece(piece, views, missing, plain)
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
                # What is captured and cannot be encoded as it is belongs to the rank state, or is told.
                plain.setdefault(param, {}).setdefault(optimizer, {})[key] = value

    # By value, static, and the start of a generation

    def stage_by_value(self, record: int) -> None:
        """Copy buffers and the like into this rank's area of the slot.

        Raises:
            LayoutChangedError: a buffer has another shape or dtype than before, or is gone.
        """
        self._stage_by_value_at(self._slots, self.layout.slot_offset(record) + self.layout.by_value_base(self.rank))

    def _stage_by_value_at(self, region: Region, base: int) -> None:
        for offset, spec, place in zip(self.layout.by_value_offsets, self.spec.by_value, self._by_value, strict=True):
            held = _now_at(place)
            tensor = None if held is None else local(held)
            if tensor is None or tuple(tensor.shape) != spec.shape or dtype_name(tensor.dtype) != spec.dtype:
                found = "nothing" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"
                raise LayoutChangedError(f"{spec.name}: expected {list(spec.shape)} {spec.dtype}, found {found}")
            self._copier.copy(tensor_at(region.map, base + offset, spec.shape, spec.dtype), tensor)

    def static_tensor(self, position: int) -> torch.Tensor | None:
        """The live static tensor as it hangs in its module now."""
        return _now_at(self._static_tensors[position])

    def static_copy(self, position: int) -> torch.Tensor:
        """The staged copy of a static tensor."""
        assert self._static is not None
        spec = self.spec.static[position]
        return tensor_at(self._static.map, self.layout.static_offsets[position], spec.shape, spec.dtype)

    def start_generation(self, record: int) -> tuple[tuple[bytes, ...], Missing, bytes]:
        """Write the state after `record` by value: T virtual records (lazy) or straight into the replica (eager).

        Returns the virtual records' encodings, and for the replica what is missing and what is not a tensor.
        """
        if self.leads:
            for position in range(len(self.spec.static)):
                tensor = self.static_tensor(position)
                if tensor is not None:
                    self._copier.copy(self.static_copy(position), local(tensor))
        if self.spec.mode == "eager":
            assert self._replica is not None
            missing, plain = self._fill(self._replica)
            self.ring.open_for_writing(record, self.rank)
            self.stage_by_value(record)
            return (), missing, plain
        metas = []
        for virtual in range(record - self.spec.period + 1, record + 1):
            self.ring.open_for_writing(virtual, self.rank)
            missing, plain = self.stage_anchors(virtual)
            metas.append(encode_meta(RecordMeta(virtual, record, True, (), missing, plain)))
        self.stage_by_value(record)
        return tuple(metas), (), b""

    def is_captured(self, record: int) -> bool:
        """Whether the state after this record is to be written by value; the start of a generation always is."""
        return self.captures and record % self.spec.every == 0

    def capture(self, record: int) -> bytes:
        """Write this rank's part of the state after `record` over the one before the last.

        Returns the record's encoding.

        Raises:
            LayoutChangedError: the state does not fit the layout any more.
        """
        self.ring.open_for_writing(record, self.rank)
        missing, plain = self.stage_anchors(record)
        self.stage_by_value(record)
        return encode_meta(RecordMeta(record, record, True, (), missing, plain))

    def seal_generation(self, record: int) -> None:
        """State that this rank's part of the start is complete; after the copies are done."""
        first = record if self.spec.mode == "eager" else record - self.spec.period + 1
        for virtual in range(first, record + 1):
            self.ring.seal(virtual, self.rank)

    def take_snapshot(self, region: Region) -> tuple[Missing, bytes]:
        """Copy this rank's part of the state as it is now; what of it is missing, and what is not a tensor.

        Raises:
            LayoutChangedError: the state does not fit the layout any more.
        """
        missing, plain = self._fill(region)
        base = self.layout.state_bytes
        base += self.spec.local_ranks.index(self.rank) * self.layout.by_value_bytes
        self._stage_by_value_at(region, base)
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


def _is_large(value: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether new state is as large as its parameter: it had better have a slot than be encoded with each record."""
    return fits_slots(value, param) and local(value).shape == local(param).shape and local(param).numel() > 1


def _now_at(place: tuple[torch.Tensor, tuple[nn.Module, str] | None]) -> torch.Tensor | None:
    """A tensor, or the buffer that hangs in its place today."""
    tensor, holder = place
    return tensor if holder is None else holder[0]._buffers.get(holder[1])


def _cut(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A piece's elements in row-major order, as a view where the memory allows it."""
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
    return flat if piece.stop - piece.start == tensor.numel() else flat[piece.start : piece.stop]
