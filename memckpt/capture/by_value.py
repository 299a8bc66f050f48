"""Copies of one rank's by-value tensors: those of its own, and its share of those that are held once.

Many small tensors are copied together, as a view of a place takes several times as long as its copy.

What is held once has digests. In host memory a digest is xxh3 of the bytes. On a device it is two sums, modulo 2^64, of
32-bit words times 64-bit keys by position. Integer sums do not depend on the order of additions; two tensors that
differ collide with a probability of about 2^-64. The host does not wait: the sums are fetched like tensors in slots.

Ranks compare digests without a message. Those of record n lie in memory that all ranks of a slot map. At the end of
n + 1 a rank is through a reduction that every rank entered after its commit of n; with an accelerator, whose host runs
ahead, at the end of n + 2. So all ranks find a difference at the end of the same record, and begin a generation there.
Other units may be two records ahead by then, with an accelerator three; hence D is at least 3, or 5.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import Protocol

import torch
import xxhash
from torch.optim import Optimizer

from memckpt.capture.copier import Copier
from memckpt.errors import UnsupportedError
from memckpt.memory.region import Region
from memckpt.state.layout import DIGEST_BYTES, Layout, Piece, aligned
from memckpt.state.optimizers import dtype_name, dtype_of
from memckpt.state.redo import tensor_at
from memckpt.state.spec import ITEM_BYTES, ParamSpec
from memckpt.state.tensors import is_dtensor, local, same_bits

#: Offset (bytes), shape and dtype.
Place = tuple[int, tuple[int, ...], str]
#: Tensors up to this size are copied twice, which is cheaper than a view.
SMALL_BYTES = 4 << 10

_dtype, _shape, _on_host = attrgetter("dtype"), attrgetter("shape"), attrgetter("is_cpu")
_PLAIN = {torch.Tensor, torch.nn.Parameter}


class Places:
    """Places laid out alike in several parts of a region, one part per record.

    One operation makes the views of all places of one dtype.

    Args:
        places: the places, which do not overlap; offsets are multiples of the dtypes' sizes.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._count = len(places)
        self._rows = [_Rows(dtype, places) for dtype in dict.fromkeys(dtype for _, _, dtype in places)]

    def at(self, buffer: mmap.mmap, base: int) -> list[torch.Tensor]:
        """Views of all places, offset by `base` bytes. Each view keeps the mapping alive."""
        views: list[torch.Tensor | None] = [None] * self._count
        with torch.no_grad():
            for rows in self._rows:
                rows.fill(views, buffer, base)
        return [view for view in views if view is not None]


class _Rows:
    """The places of one dtype: runs of elements with gaps before them."""

    def __init__(self, dtype: str, places: Sequence[Place]) -> None:
        item = ITEM_BYTES[dtype]
        # Empty places first: they may share an offset with another place.
        found = sorted(
            (offset, prod(shape), index) for index, (offset, shape, one) in enumerate(places) if one == dtype
        )
        self._dtype = dtype
        self._first = found[0][0]
        self._order = [index for _, _, index in found]
        self._shapes = [(position, places[index][1]) for position, index in enumerate(self._order)]
        self._shapes = [(position, shape) for position, shape in self._shapes if len(shape) != 1]
        self._sizes: list[int] = []
        end = self._first
        for offset, numel, _ in found:
            self._sizes += [(offset - end) // item, numel]
            end = offset + numel * item
        self._total = (end - self._first) // item

    def fill(self, views: list[torch.Tensor | None], buffer: mmap.mmap, base: int) -> None:
        flat = tensor_at(buffer, base + self._first, (self._total,), self._dtype)
        rows = list(flat.split_with_sizes(self._sizes)[1::2])
        for position, shape in self._shapes:
            rows[position] = rows[position].view(shape)
        for index, row in zip(self._order, rows, strict=True):
            views[index] = row


class Batch:
    """Copies tensors to their places; in the calling thread, where they are in host memory.

    Small ones are gathered in memory laid out like their places, and copied from there by one operation per contiguous
    run. A copier from a device does that by itself.

    Args:
        places: the places, aligned as a layout aligns them; each includes the padding behind it.
        copier: copies from a device.
    """

    def __init__(self, places: Sequence[Place], copier: Copier) -> None:
        self._copier = copier
        self._shapes = [shape for _, shape, _ in places]
        self._dtypes = [dtype_of(dtype) for *_, dtype in places]
        if copier.asynchronous:
            self._places = Places([(offset, (prod(shape),), dtype) for offset, shape, dtype in places])
            return
        sizes = [prod(shape) * ITEM_BYTES[dtype] for _, shape, dtype in places]
        small = [index for index, size in enumerate(sizes) if size <= SMALL_BYTES]
        large = [index for index, size in enumerate(sizes) if size > SMALL_BYTES]
        self._order = small + large
        self._has_large, self._large = bool(large), Places([places[index] for index in large])
        #: Byte ranges that places of small tensors fill without a gap.
        self._stretches: list[tuple[int, int]] = []
        for start, stop in sorted((places[index][0], places[index][0] + aligned(sizes[index])) for index in small):
            if self._stretches and self._stretches[-1][1] == start:
                start, _ = self._stretches.pop()
            self._stretches.append((start, stop))
        self._first = self._stretches[0][0] if small else 0
        self._memory = mmap.mmap(-1, max(self._stretches[-1][1] - self._first, 1) if small else 1)
        near = [(places[index][0] - self._first, places[index][1], places[index][2]) for index in small]
        self._gathered = Places(near).at(self._memory, 0)

    @torch.no_grad()
    def copy(self, buffer: mmap.mmap, base: int, sources: Sequence[torch.Tensor], as_they_are: bool = False) -> bool:
        """Copy each of `sources` to its place, offset by `base` bytes; without autograd.

        Returns False, and copies nothing, unless all are plain tensors with the shapes and dtypes of their places, and
        where the copier says: a copy would silently cast and broadcast. `as_they_are`: they may change at once.
        """
        if not sources:
            return True
        if not set(map(type, sources)) <= _PLAIN:
            return False
        if list(map(_dtype, sources)) != self._dtypes or list(map(_shape, sources)) != self._shapes:
            return False
        if self._copier.asynchronous:
            places = self._places.at(buffer, base)
            if as_they_are:
                self._copier.copy_as_they_are(places, sources)
            else:
                for place, source in zip(places, sources, strict=True):
                    self._copier.copy(place.view(source.shape), source)
            return True
        if not all(map(_on_host, sources)):
            return False
        ordered = [sources[index] for index in self._order]
        torch._foreach_copy_(self._gathered + (self._large.at(buffer, base) if self._has_large else []), ordered)
        for start, stop in self._stretches:
            gathered = tensor_at(self._memory, start - self._first, (stop - start,), "uint8")
            tensor_at(buffer, base + start, (stop - start,), "uint8").copy_(gathered)
        return True


#: Keys of a parameter's state, by optimizer.
Keys = list[tuple[int, tuple[str, ...]]]
#: First element of a piece, and the one behind its last; None: it is the whole tensor.
Cut = tuple[int, int] | None


@dataclass(frozen=True)
class _LivePiece:
    """A parameter, the keys of its state, and of each of these tensors the part that the piece has."""

    param: torch.Tensor
    keys: Keys
    cuts: list[Cut]


class AnchorCopies:
    """The pieces due at one step of the anchor period that can be copied together.

    Args:
        pieces: the pieces due, each with the places of its parts: the parameter, and its state by owner.
        params: the live parameters.
        specs: the layout's specs of `params`.
        mine: for each parameter, whether this rank copies it.
        optimizers: the live optimizers.
        copier: copies from a device.

    Attributes:
        rest: positions of the pieces that the caller has to copy itself.
    """

    def __init__(
        self,
        pieces: Sequence[tuple[Piece, list[Place]]],
        params: Sequence[torch.Tensor],
        specs: Sequence[ParamSpec],
        mine: Sequence[bool],
        optimizers: Sequence[Optimizer],
        copier: Copier,
    ) -> None:
        self._optimizers = optimizers
        self.rest: list[int] = []
        #: Each piece, and whether this rank copies it.
        self._live: list[tuple[_LivePiece, bool]] = []
        places: list[Place] = []
        for position, (piece, parts) in enumerate(pieces):
            param, spec = params[piece.param], specs[piece.param]
            cut = None if piece.stop - piece.start == spec.tensor.numel else (piece.start, piece.stop)
            keys = [(owner.optimizer, tuple(state.key for state in owner.state)) for owner in spec.owners]
            state = [state for owner in spec.owners for state in owner.state]
            live = _LivePiece(param, keys, [cut, *(cut if each.elementwise else None for each in state)])
            shapes = [spec.tensor.shape, *(each.shape for each in state)]
            shaped = [
                (offset, shape if one is None else (one[1] - one[0],), dtype)
                for (offset, _, dtype), shape, one in zip(parts, shapes, live.cuts, strict=True)
            ]
            # In host memory one by one: what a cut or a DTensor saves there is little.
            is_apart = not copier.asynchronous and (cut is not None or is_dtensor(param))
            sources = None if is_apart else self._sources_of(live)
            if sources is not None and _fit(sources, shaped, copier):
                self._live.append((live, mine[piece.param]))
                places += shaped if mine[piece.param] else ()
            else:
                self.rest.append(position)
        self._batch = Batch(places, copier)

    def _sources_of(self, piece: _LivePiece) -> list[torch.Tensor] | None:
        """A piece of a parameter and of its state; None if they differ from the layout.

        None, too, for a part of a tensor that is not in row-major order: of such tensors a copy is made, one by one.
        """
        found = [piece.param if type(piece.param) in _PLAIN else local(piece.param)]
        for optimizer, names in piece.keys:
            state = self._optimizers[optimizer].state.get(piece.param)
            if state is None or len(state) != len(names):
                return None
            for name in names:
                value = state.get(name)
                if type(value) is torch.Tensor:
                    found.append(value)
                elif isinstance(value, torch.Tensor) and is_dtensor(value):
                    found.append(local(value))
                else:
                    return None
        if piece.cuts[0] is None:
            return found
        for index, cut in enumerate(piece.cuts):
            if cut is not None:
                if not found[index].is_contiguous():
                    return None
                found[index] = found[index].view(-1)[cut[0] : cut[1]]
        return found

    def copy(self, buffer: mmap.mmap, base: int) -> bool:
        """Copy all pieces into the slot that begins at byte `base`, before what follows on the current stream.

        Returns False, and copies nothing, if a tensor no longer matches the layout.
        """
        sources: list[torch.Tensor] = []
        for piece, mine in self._live:
            found = self._sources_of(piece)
            if found is None:
                return False
            if mine:
                sources += found
        return self._batch.copy(buffer, base, sources, as_they_are=True)


def _fit(sources: Sequence[torch.Tensor], places: Sequence[Place], copier: Copier) -> bool:
    """Whether the tensors have the shapes and dtypes of their places, and lie where they can be copied together."""
    return all(
        (source.is_cpu or copier.asynchronous) and tuple(source.shape) == shape and source.dtype == dtype_of(dtype)
        for source, (_, shape, dtype) in zip(sources, places, strict=True)
    )


#: Words multiplied at once; bounds the temporary, which takes 16 bytes per word.
_CHUNK = 1 << 20
_SUMS = 2
_SEED = 0x6D656D636B7074
_keys: dict[torch.device, torch.Tensor] = {}


def on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes are readable by the host."""
    return tensor.device.type == "cpu"


def digest(tensor: torch.Tensor) -> bytes:
    """xxh3_128 of the bytes, in row-major order, of a tensor in host memory: 16 bytes."""
    return xxhash.xxh3_128_digest(_as_bytes(tensor).numpy().data)


@torch.no_grad()
def sums(tensor: torch.Tensor) -> torch.Tensor:
    """The digest of a tensor on a device: int64 of shape ``(2,)``, on that device and on the current stream."""
    words = _as_bytes(tensor)
    rest = words.numel() % 4
    if rest or words.storage_offset() % 4:
        words = torch.cat([words, words.new_zeros((4 - rest) % 4)])
    return _sums(words.view(torch.int32))


def _sums(words: torch.Tensor) -> torch.Tensor:
    keys = _keys_on(words.device)
    parts = [(chunk * keys[:, : chunk.numel()]).sum(1) for chunk in words.split(_CHUNK)]
    return parts[0] if len(parts) == 1 else _sums(torch.stack(parts).view(torch.int32).view(-1))


def _keys_on(device: torch.device) -> torch.Tensor:
    """The keys: int64 of shape ``(2, _CHUNK)``, equal in every process."""
    if device not in _keys:
        generator = torch.Generator("cpu").manual_seed(_SEED)
        made = torch.randint(-(2**63), 2**63 - 1, (_SUMS, _CHUNK), generator=generator, device="cpu")
        _keys[device] = made.to(device)
    return _keys[device]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().view(-1)
    return (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)


class Digests:
    """Digests of some tensors at this point; call :meth:`encode` once the copier's copies are done."""

    def __init__(self, tensors: Sequence[torch.Tensor], copier: Copier) -> None:
        here = [local(tensor) for tensor in tensors]
        self._of_host = [digest(tensor) if on_host(tensor) else None for tensor in here]
        away = [sums(tensor) for tensor in here if not on_host(tensor)]
        self._fetched = copier.fetch(torch.stack(away)) if away else None

    def encode(self) -> bytes:
        """All digests, in order, 16 bytes each."""
        fetched = b"" if self._fetched is None else self._fetched.numpy().tobytes()
        found: list[bytes] = []
        for one in self._of_host:
            if one is None:
                one, fetched = fetched[:DIGEST_BYTES], fetched[DIGEST_BYTES:]
            found.append(one)
        return b"".join(found)


class LayoutChangedError(UnsupportedError):
    """The live state no longer fits the layout; a new generation is needed."""


class Holder(Protocol):
    """What a tensor is looked up in: a dict of its module."""

    def get(self, key: str, /) -> torch.Tensor | None: ...


@dataclass(frozen=True)
class LiveTensor:
    """A tensor; with what holds it, and its key there, where user code may replace it at any time."""

    tensor: torch.Tensor
    holder: tuple[Holder, str] | None

    def now(self) -> torch.Tensor | None:
        """The tensor, or the one that is in its place now."""
        return self.tensor if self.holder is None else self.holder[0].get(self.holder[1])


class ByValueTensors:
    """The by-value tensors of a generation, as one rank copies them.

    Args:
        layout: layout of the generation.
        live: the live tensors, in the layout's order.
        rank: this rank.
        copier: copies into slots, and into copies of the state.
    """

    def __init__(self, layout: Layout, live: Sequence[LiveTensor], rank: int, copier: Copier) -> None:
        self._specs = layout.spec.by_value
        self._shared = layout.shared
        self._copier = copier
        self._live = live
        stagers = layout.shared_stagers
        #: Positions of those that this rank copies.
        self._copied = [at for at in range(len(self._specs)) if stagers.get(at, rank) == rank]
        self._offsets = layout.by_value_offsets(rank)
        self._batch: Batch | None = None

    def _now(self, position: int) -> torch.Tensor:
        """The live tensor; raises LayoutChangedError if it does not fit its place."""
        spec, held = self._specs[position], self._live[position].now()
        tensor = None if held is None else local(held)
        if tensor is None or tuple(tensor.shape) != spec.shape or dtype_name(tensor.dtype) != spec.dtype:
            found = "nothing" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"
            raise LayoutChangedError(f"{spec.name}: expected {list(spec.shape)} {spec.dtype}, found {found}")
        return tensor

    def copy(self, region: Region, base: int) -> None:
        """Copy them to their places, offset by `base` bytes.

        Raises:
            LayoutChangedError: a buffer has changed its shape or dtype, or was removed.
        """
        if not self._copied:
            return
        now = [self._live[position].now() for position in self._copied]
        found = [tensor for tensor in now if tensor is not None]
        if len(found) == len(now):
            if self._batch is None:
                self._batch = Batch(
                    [(self._offsets[at], self._specs[at].shape, self._specs[at].dtype) for at in self._copied],
                    self._copier,
                )
            if self._batch.copy(region.map, base, found):
                return
        for position in self._copied:
            self._copier.copy(self._place(position, region, base), self._now(position))

    def _place(self, position: int, region: Region, base: int) -> torch.Tensor:
        spec = self._specs[position]
        return tensor_at(region.map, base + self._offsets[position], spec.shape, spec.dtype)

    def digests(self) -> Digests | None:
        """Digests of the tensors held once, as they are now; None if there are none.

        Raises:
            LayoutChangedError: as :meth:`copy`.
        """
        return Digests([self._now(position) for position in self._shared], self._copier) if self._shared else None

    def differ(self, region: Region, base: int, digests: bytes) -> bool:
        """Whether a tensor differs, in any bit, from the copies at `base`, those held once from these digests.

        Waits for the copies. Another rank may still be copying a tensor that is held once, and may hold other values:
        so this rank's own digests count.
        """
        try:
            now = self.digests()
        except LayoutChangedError:
            return True
        self._copier.token()()
        if now is not None and now.encode() != digests:
            return True
        own = [(at, one.now()) for at, one in enumerate(self._live) if at not in self._shared]
        return any(
            held is None or not same_bits(local(held).detach().cpu(), self._place(at, region, base)) for at, held in own
        )
