"""Writer of one rank's part of records into the slots of a generation, and the places of its gradients there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from memckpt.capture.by_value import AnchorCopies, ByValueTensors, Digests, LayoutChangedError, LiveTensor, Places
from memckpt.capture.copier import Copier
from memckpt.capture.evidence import Evidence
from memckpt.capture.live_state import LiveState, state_of
from memckpt.memory.region import GenerationRegions, Region
from memckpt.memory.slots import Landings, SlotRing
from memckpt.state import codec, encodings
from memckpt.state.layout import Layout, Piece
from memckpt.state.optimizers import dtype_name, dtype_of, fits_room, fits_slots
from memckpt.state.records import RecordMeta, encode_meta
from memckpt.state.redo import tensor_at
from memckpt.state.spec import ITEM_BYTES, encoded_parts, is_ours
from memckpt.state.tensors import local

#: Bytes of slots that are page-locked at once: first a part of this size, then the others while training goes on.
LOCKED_BYTES = 1 << 30

Copy: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], None]"
#: Places by parameter in one sub-step; None where there is none for a dense gradient of this rank.
Row = list[torch.Tensor | None]


class GradientPlaces:
    """Views of the places that this rank fills.

    Args:
        layout: layout of the generation.
        slots: its slots.
        mine: for each parameter, whether this rank stages it.
    """

    def __init__(self, layout: Layout, slots: Region, mine: Sequence[bool]) -> None:
        self._layout = layout
        self._slots = slots
        # Made here, not at first use: that is during backward, between large gradients, where small long-lived objects
        # would fragment the heap.
        #: By slot, optimizer and sub-step.
        self._rows: list[list[list[Row]]] = [[] for _ in range(layout.ring)]
        # Views of parts of encoded gradients would be many, for all slots: they are cut from one of the bytes.
        self._bytes: torch.Tensor | None = None
        self._parts = [self._parts_of(param) for param in range(len(layout.spec.params))]
        for optimizer in range(len(layout.spec.optimizers)):
            self._add_rows(optimizer, mine)

    def _add_rows(self, optimizer: int, mine: Sequence[bool]) -> None:
        layout, specs = self._layout, self._layout.spec.params
        # Room for sparse gradients may be too small for dense ones.
        filled = [
            param for param in layout.optimizer_params(optimizer) if mine[param] and layout.spec.has_dense_room(param)
        ]
        shaped = [(param, specs[param].tensor.shape, specs[param].grad_dtype) for param in filled]
        by_sub_step = [
            Places([(layout.gradient_offset(optimizer, step, param), shape, dtype) for param, shape, dtype in shaped])
            for step in range(layout.sub_step_room[optimizer])
        ]
        for slot, in_slot in enumerate(self._rows):
            steps = []
            for places in by_sub_step:
                row: Row = [None] * len(specs)
                views = places.at(self._slots.map, slot * layout.slot_bytes)
                for param, view in zip(filled, views, strict=True):
                    row[param] = view
                steps.append(row)
            in_slot.append(steps)

    def _parts_of(self, param: int) -> list[tuple[int, int, torch.dtype]]:
        """First byte behind the beginning of the gradient, number of bytes and dtype of each part."""
        encoding, described = self._layout.spec.encoding(param), self._layout.spec.params[param]
        if encoding is None:
            return []
        parts = encoded_parts(encoding, described.tensor.numel, described.grad_dtype)
        return [(one.offset, one.length * dtype_of(one.dtype).itemsize, dtype_of(one.dtype)) for one in parts]

    def _encoded_places(self, record: int, optimizer: int, sub_step: int, param: int) -> list[torch.Tensor]:
        if self._bytes is None:
            self._bytes = torch.frombuffer(self._slots.map, dtype=torch.uint8)
        start = self._layout.slot_offset(record) + self._layout.gradient_offset(optimizer, sub_step, param)
        return [
            self._bytes[start + offset : start + offset + nbytes].view(dtype)
            for offset, nbytes, dtype in self._parts[param]
        ]

    def encoded(self, record: int, optimizer: int, sub_step: int, param: int) -> list[torch.Tensor] | None:
        """Places of the parts of an encoded gradient; None if there is no room for another step of the optimizer."""
        if sub_step >= self._layout.sub_step_room[optimizer]:
            return None
        return self._encoded_places(record, optimizer, sub_step, param)

    def staged(self, record: int, optimizer: int, sub_step: int, param: int) -> torch.Tensor:
        """The gradient of `param` as staged; a view, or decoded. Only for parameters that this rank stages."""
        spec = self._layout.spec
        encoding = spec.encoding(param)
        if encoding is None:
            return self.view(record, optimizer, sub_step, param)
        described = spec.params[param]
        parts = self._encoded_places(record, optimizer, sub_step, param)
        dense = encodings.decode(encoding, parts, described.tensor.numel, dtype_of(described.grad_dtype))
        return dense.view(described.tensor.shape)

    def sample(self, record: int, optimizer: int, sub_step: int, param: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A few elements of an encoded gradient as staged, others for each record: positions, and values."""
        encoding, described = self._layout.spec.encoding(param), self._layout.spec.params[param]
        assert encoding is not None
        parts = self._encoded_places(record, optimizer, sub_step, param)
        return encodings.sample(encoding, parts, described.tensor.numel, dtype_of(described.grad_dtype), record)

    def close(self) -> None:
        """Release the views, which keep the mapping; also those in rows that were handed out."""
        self._bytes = None
        for row in [row for slot in self._rows for steps in slot for row in steps]:
            row.clear()
        self._rows.clear()

    def view(self, record: int, optimizer: int, sub_step: int, param: int) -> torch.Tensor:
        """Place of the gradient of `param` in that sub-step; only for parameters that this rank stages."""
        view = self._rows[self._layout.slot_number(record)][optimizer][sub_step][param]
        assert view is not None
        return view

    def row(self, record: int, optimizer: int, sub_step: int) -> Row | None:
        """Places of all gradients in that sub-step; None if there is no room for another step of the optimizer."""
        if sub_step >= self._layout.sub_step_room[optimizer]:
            return None
        return self._rows[self._layout.slot_number(record)][optimizer][sub_step]

    def area(self, record: int, optimizer: int, sub_step: int, dtype: str) -> torch.Tensor:
        """All gradients of that sub-step as staged, as a one-dimensional tensor."""
        offset, nbytes = self._layout.gradient_area(optimizer, sub_step)
        offset += self._layout.slot_offset(record)
        return tensor_at(self._slots.map, offset, (nbytes // ITEM_BYTES[dtype],), dtype)

    def sparse(
        self, record: int, optimizer: int, sub_step: int, param: int, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Places of the indices and values of a sparse gradient, which have to fit."""
        indices, values = gradient._indices(), gradient._values()
        dtype = self._layout.spec.params[param].grad_dtype
        offset = self._layout.slot_offset(record) + self._layout.gradient_offset(optimizer, sub_step, param)
        place = tensor_at(self._slots.map, offset, tuple(indices.shape), "int64")
        return place, tensor_at(self._slots.map, offset + indices.nbytes, tuple(values.shape), dtype)


Missing = tuple[tuple[int, int, str], ...]


class SlotWriter:
    """One rank's view of a generation's regions, bound to the live tensors that it stages.

    Args:
        regions: the regions, mapped; :meth:`close` unmaps them. The memory itself is the agent's.
        generation: number of the generation.
        live: the live tensors.
        rank: this rank.
        copier: copies into the regions.
        whole: whether all slots are reserved. If not, only a start may be written until :meth:`use_all_slots`.

    Attributes:
        whole: whether all slots are reserved now.
        evidence: samples of the layout's tensors.
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
        tensors = self._tensors_of(live)
        #: The live parameters, including DTensors; the rank's local part of each is staged.
        self.params = [tensors[param.tensor.name] for param in spec.params]
        self.index = {id(param): index for index, param in enumerate(self.params)}
        self._bind(tensors)
        #: Digests of the tensors held once, as this rank staged them last.
        self._digests: Digests | None = None
        #: Type of the parameters' device.
        self.device = self.params[0].device.type if self.params else "cpu"
        elsewhere = [param.tensor.elsewhere for param in spec.params]
        self.mine = [at == rank and not far for at, far in zip(self.layout.stagers, elsewhere, strict=True)]
        self.leads = spec.local_ranks[0] == rank
        #: Whether state is captured: nothing is redone, and state without room in the layout is encoded.
        self.snapshots = spec.mode == "snapshot"
        #: Marks of gradients that are complete in their slots; None if none are staged.
        self.landings = None if self.snapshots else Landings(self._slots, self.layout, generation, rank)
        # Plain lists for look-ups at every gradient: backward evicts our data from the CPU's caches.
        owners = [tuple(owner.optimizer for owner in param.owners) for param in spec.params]
        one = {each: each for each in owners}
        self.owners = [one[each] for each in owners]
        self.members = [self.layout.optimizer_params(number) for number in range(len(spec.optimizers))]
        self.grad_dtypes = [dtype_of(param.grad_dtype) for param in spec.params]
        #: Parameters without dimensions.
        self.scalars = {index for index, param in enumerate(spec.params) if not param.tensor.shape}
        self._in_groups: dict[int, tuple[list[list[int]], list[torch.Tensor]]] = {}
        self._anchor_parts = [[self._parts_of(piece) for piece in group] for group in self.layout.anchor_groups]
        #: By step of the anchor period; made when its anchors are first due: optimizers have no state before a step.
        self._anchor_copies: dict[int, AnchorCopies] = {}
        self.gradient_places = GradientPlaces(self.layout, self._slots, self.mine)
        self.whole = False
        if whole:
            self.use_all_slots()

    def _tensors_of(self, live: LiveState) -> dict[str, torch.Tensor]:
        tensors = live.tensors()
        for one in filter(lambda one: is_ours(one.name) and one.name not in tensors, self.spec.by_value):
            # A held generation, which is only read: what compression had left out is not live.
            tensors[one.name] = torch.empty(one.shape, dtype=dtype_of(one.dtype))
        return tensors

    def _bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the live tensors that are copied by value, or once."""
        self._changes, holders = self._live.changes, self._live.holders()
        by_value, self._static_tensors = (
            [LiveTensor(tensors[one.name], holders.get(one.name)) for one in specs]
            for specs in (self.spec.by_value, self.spec.static)
        )
        self.evidence = Evidence(self.spec, self._live)
        self._by_value = ByValueTensors(self.layout, by_value, self.rank, self._copier)

    def _follow(self) -> None:
        """Find tensors again where the modules hold others than before.

        Raises:
            LayoutChangedError: they do not fit the layout.
        """
        if self._changes == self._live.changes:
            return
        tensors = self._tensors_of(self._live)
        held = {one.name: one for one in self.spec.tensors()}
        for name in [*held, *(one for one in tensors if one not in held)]:
            if name not in held or name not in tensors:
                raise LayoutChangedError(f"{name} has {'gone' if name in held else 'appeared'}")
            now, spec = local(tensors[name]), held[name]
            shape = spec.whole_shape if spec.elsewhere else spec.shape
            if (tuple(now.shape), dtype_name(now.dtype)) != (shape, spec.dtype):
                raise LayoutChangedError(f"{name} has another shape or dtype: {list(now.shape)} {now.dtype}")
        for name, param in zip((one.tensor.name for one in self.spec.params), self.params, strict=True):
            if tensors[name] is not param:
                raise LayoutChangedError(f"{name} has been replaced")
        self._bind(tensors)

    def use_all_slots(self, record: int = 0) -> None:
        """Allow records to be staged, of which `record` is the next: all slots are reserved now.

        Before that, nothing is page-locked or populated, which would allocate unreserved memory. So an accelerator's
        start is copied to pageable memory.
        """
        self._copier.adopt(self._slots, self.layout.slot_parts(record, LOCKED_BYTES), LOCKED_BYTES)
        self._slots.populate_in_background()
        self.whole = True

    def wait_for_page_locks(self) -> None:
        """Wait until all of the slots that are used are page-locked, or the rest is refused."""
        if self.whole:
            self._copier.adopt(self._slots)

    def close(self) -> None:
        """Release views and mappings."""
        self.gradient_places.close()
        self._anchor_copies.clear()
        if self.landings is not None:
            self.landings.close()
        self._copier.token()()  # copies to them may be on their way
        self._regions.close()

    def params_outside(self, number: int, optimizer: Optimizer) -> list[torch.Tensor] | None:
        """Parameters in an optimizer's groups that the layout lacks: they were frozen when it was made.

        None if the layout has other groups, or has its parameters in others of them.
        """
        found = [[id(param) for param in group["params"]] for group in optimizer.param_groups]
        known = self._in_groups.get(number)
        if known is None or known[0] != found:
            if tuple(map(len, found)) != self.spec.optimizers[number].group_sizes:
                return None
            members = [(self.index[one], group) for group, its in enumerate(found) for one in its if one in self.index]
            owners = [(index, owner) for index in self.members[number] for owner in self.spec.params[index].owners]
            if sorted(members) != sorted((index, one.group) for index, one in owners if one.optimizer == number):
                return None
            params = [param for group in optimizer.param_groups for param in group["params"]]
            self._in_groups[number] = known = found, [param for param in params if id(param) not in self.index]
        return known[1]

    def has_room(self, number: int, optimizer: Optimizer) -> bool:
        """Whether the layout has room for all tensors of an optimizer's state for its parameters."""
        for index in self.members[number]:
            owner = next(one for one in self.spec.params[index].owners if one.optimizer == number)
            known = {one.key for one in owner.state}
            state = state_of(optimizer, self.params[index])
            if any(key not in known for key, value in state.items() if isinstance(value, torch.Tensor)):
                return False
        return True

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
        number = record % self.spec.period
        copies = self._anchor_copies.pop(number, None)
        if copies is None:
            pieces = zip(self.layout.anchor_groups[number], self._anchor_parts[number], strict=True)
            live = self.params, self.spec.params, self.mine, self._live.optimizers
            copies = AnchorCopies(list(pieces), *live, self._copier)
        # Averages may take the weights' place for a validation or a forward, and nothing would show it.
        if not copies.copy(self._slots.map, self.layout.slot_offset(record)):
            return self._stage_pieces(record, as_they_are=True)
        self._anchor_copies[number] = copies
        return self._stage_pieces(record, copies.rest, as_they_are=True)

    def _stage_pieces(
        self, record: int, positions: Iterable[int] | None = None, as_they_are: bool = False
    ) -> tuple[Missing, bytes]:
        """Stage the pieces at `positions` of those due in `record` one by one; None: all of them.

        `as_they_are`: what follows on the current stream may change them at once.
        """
        missing: list[tuple[int, int, str]] = []
        plain: dict[int, dict[int, dict[str, Any]]] = {}

        def copy_as_it_is(destination: torch.Tensor, source: torch.Tensor) -> None:
            self._copier.copy_as_they_are([destination], [source])

        copy = copy_as_it_is if as_they_are else self._copier.copy
        base = self.layout.slot_offset(record)
        due, places = self.layout.due(record), self._anchor_parts[record % self.spec.period]
        for position in range(len(due)) if positions is None else positions:
            views = [
                tensor_at(self._slots.map, base + offset, shape, dtype) for offset, shape, dtype in places[position]
            ]
            self._stage_piece(due[position], views, missing, plain, copy)
        return tuple(missing), codec.encode(plain) if plain else b""

    def _stage_piece(
        self,
        piece: Piece,
        views: Sequence[torch.Tensor],
        missing: list[tuple[int, int, str]],
        plain: dict[int, Any],
        copy: Copy,
    ) -> None:
        param = self.params[piece.param]
        mine = self.mine[piece.param]
        if mine:
            copy(views[0], _cut(local(param), piece))
        position = 1
        for owner in self.spec.params[piece.param].owners:
            state = state_of(self._live.optimizers[owner.optimizer], param)
            for spec in owner.state:
                value = state.get(spec.key)
                view = views[position]
                position += 1
                if not isinstance(value, torch.Tensor) or (self.snapshots and not fits_room(value, param, spec)):
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
                    copy(view, source)
            in_slots = sum(isinstance(state.get(spec.key), torch.Tensor) for spec in owner.state)
            if len(state) != in_slots:
                self._note_plain(piece.param, owner.optimizer, state, plain)

    def _note_plain(self, param: int, optimizer: int, state: dict[str, Any], plain: dict[int, Any]) -> None:
        known = {spec.key for owner in self.spec.params[param].owners for spec in owner.state}
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                if key not in known and (not self.snapshots or _is_large(value, self.params[param])):
                    raise LayoutChangedError(f"new optimizer state {key!r} of {self.spec.params[param].tensor.name}")
            elif not self.snapshots or not codec.unencodable_paths(value):
                # Captured values that cannot be encoded here go into the rank state, or are reported.
                plain.setdefault(param, {}).setdefault(optimizer, {})[key] = value

    # By-value and static tensors, and the start of a generation

    def stage_by_value(self, record: int) -> None:
        """Copy the by-value tensors to the record's by-value slot.

        Raises:
            LayoutChangedError: a buffer has changed its shape or dtype, or was removed.
        """
        self._follow()
        self.ring.open_by_value(record, self.rank)
        self._digests = None
        self._by_value.copy(self._slots, self.layout.by_value_base(record))
        self._digests = self._by_value.digests()

    def take_digests(self) -> Digests | None:
        """Digests of the tensors held once, as staged last; None if there are none."""
        digests, self._digests = self._digests, None
        return digests

    def seal(self, record: int, digests: Digests | None) -> None:
        """Mark this rank's part of a record as complete; call after the copies are done."""
        if digests is not None:
            self.ring.note_digests(record, self.rank, digests.encode())
        self.ring.seal(record, self.rank)

    def by_value_differs(self, record: int) -> bool:
        """Whether a by-value tensor differs, in any bit, from what this rank held at the end of `record`."""
        digests = self.ring.digests(record, self.rank) if self.layout.shared else b""
        return self._by_value.differ(self._slots, self.layout.by_value_base(record), digests)

    def static_tensor(self, position: int) -> torch.Tensor | None:
        """The live static tensor that its module holds now."""
        return self._static_tensors[position].now()

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
                if tensor is not None and not self.spec.static[position].elsewhere:
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

    def is_snapshot(self, record: int) -> bool:
        """Whether the state after `record` is due to be captured; the start of a generation always is captured."""
        return self.snapshots and record % self.spec.every == 0

    def capture(self, record: int) -> bytes:
        """Write this rank's part of the state after `record` over the older of the two captures.

        Returns the record's encoding.

        Raises:
            LayoutChangedError: the state no longer fits the layout.
        """
        self._follow()
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

    def copy_rank_part(self, region: Region) -> tuple[Missing, bytes]:
        """Copy this rank's part of the current state; returns its missing and its non-tensor state.

        Raises:
            LayoutChangedError: the state no longer fits the layout.
        """
        self._follow()
        missing, plain = self._fill(region)
        self._by_value.copy(region, self.layout.state_bytes)
        self._copier.wait_before_changes()  # user code may change anything from here on, and put it back unseen
        return missing, plain

    def _fill(self, region: Region) -> tuple[Missing, bytes]:
        missing: list[tuple[int, int, str]] = []
        plain: dict[int, Any] = {}
        for index, (spec, (value_offset, state_offsets)) in enumerate(
            zip(self.spec.params, self.layout.replica_offsets, strict=True)
        ):
            if spec.tensor.elsewhere:
                continue
            whole = Piece(index, 0, spec.tensor.numel, 0, 0)
            views = [tensor_at(region.map, value_offset, spec.tensor.shape, spec.tensor.dtype).view(-1)]
            for owner in spec.owners:
                for state in owner.state:
                    offset = state_offsets[owner.optimizer, state.key]
                    view = tensor_at(region.map, offset, state.shape, state.dtype)
                    views.append(view.view(-1) if state.elementwise else view)
            self._stage_piece(whole, views, missing, plain, self._copier.copy)
        return tuple(missing), codec.encode(plain) if plain else b""


def _is_large(value: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether new state is as large as its parameter: then it should have a slot, not be encoded with each record."""
    return fits_slots(value, param) and local(value).shape == local(param).shape and local(param).numel() > 1


def _cut(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A piece's elements in row-major order; a view if the memory format permits."""
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
    return flat if piece.stop - piece.start == tensor.numel() else flat[piece.start : piece.stop]
