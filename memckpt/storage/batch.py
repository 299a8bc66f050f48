"""Batches of logged records as safetensors files. Writing them needs no torch.

A record's tensors, under ``<record>/``, are: ``meta`` (its scalars, as bytes), ``rank_state/<rank>`` (bytes),
``by_value/<rank>/<name>``, and for each optimizer step ``gradients/<optimizer>/<step>/<parameter>``. A sparse gradient
is two tensors, ``.../indices`` and ``.../values``. An encoded gradient is a tensor for each part
(:mod:`memckpt.state.spec`): ``.../sparse/0`` and so on, ``.../half/0``, ``.../quantized256/0``.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import re
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import msgspec

from memckpt.errors import DamagedStateError, StorageError
from memckpt.state.layout import HEADER_BYTES, Layout
from memckpt.state.records import RecordMeta, SubStep
from memckpt.state.spec import ITEM_BYTES, GradientEncoding, StateSpec, encoded_parts, is_possible
from memckpt.storage.format import Batch, encode_commit
from memckpt.storage.store import Store, read_back

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("memckpt.storage")
#: The first part of a sparse encoding that has a value for each entry.
_ENTRIES_FROM = 2
#: Names of the first parts of encoded gradients.
_FIRST_PART = re.compile(r"(.*)/(?:(sparse)|(half)|quantized([0-9]{1,7})|factors([0-9]{1,4})x([0-9]{1,12}))/0")
#: safetensors' names of dtypes; it does not support others.
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


@dataclass(frozen=True)
class FileTensor:
    """A tensor to be written; `data` is contiguous."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def not_loggable(spec: StateSpec) -> str:
    """The reason why records of this layout cannot be logged; empty if they can."""
    if spec.mode == "snapshot":
        return "the state is copied because steps are not redone, and a log is useless without redo"
    for tensor in [*(param.tensor for param in spec.params), *spec.by_value]:
        if tensor.dtype not in _DTYPES:
            return f"{tensor.name} is {tensor.dtype}, which safetensors does not support"
    return ""


def gradient_name(record: int, sub_step: SubStep, param: str) -> str:
    return f"{record}/gradients/{sub_step.optimizer}/{sub_step.index}/{param}"


def by_value_name(record: int, rank: int, name: str) -> str:
    return f"{record}/by_value/{rank}/{name}"


def rank_state_name(record: int, rank: int) -> str:
    return f"{record}/rank_state/{rank}"


def meta_name(record: int) -> str:
    return f"{record}/meta"


class RecordCopy:
    """One record copied out of its slot, which may be reused afterwards; if `full`, with its gradients."""

    def __init__(self, layout: Layout, slots: mmap.mmap, record: int, full: bool) -> None:
        self._layout = layout
        self.record = record
        base = layout.slot_offset(record)
        by_value = layout.by_value_base(record)
        with memoryview(slots) as slot:
            start = base + HEADER_BYTES
            self._gradients = memoryview(bytes(slot[start : start + layout.gradient_bytes * full]))
            self._by_value = memoryview(bytes(slot[by_value : by_value + layout.by_value_bytes]))

    @property
    def nbytes(self) -> int:
        return len(self._gradients) + len(self._by_value)

    def tensors(self, meta: bytes, sub_steps: Sequence[SubStep], rank_states: dict[int, bytes]) -> Iterator[FileTensor]:
        """The tensors to write: encoded scalars (empty without gradients) and rank states, and what was copied."""
        if meta:
            yield _bytes_tensor(meta_name(self.record), meta)
        for rank, state in sorted(rank_states.items()):
            yield _bytes_tensor(rank_state_name(self.record, rank), state)
        spec = self._layout.spec
        for rank in spec.local_ranks:
            for tensor, offset in zip(spec.by_value, self._layout.by_value_offsets(rank), strict=True):
                data = self._by_value[offset : offset + tensor.nbytes]
                yield FileTensor(by_value_name(self.record, rank, tensor.name), tensor.dtype, tensor.shape, data)
        for sub_step in sub_steps:
            yield from self._gradients_of(sub_step)

    def _gradients_of(self, sub_step: SubStep) -> Iterator[FileTensor]:
        sparse = {one.param: one for one in sub_step.sparse}
        absent = set(sub_step.absent)
        for param in self._layout.optimizer_params(sub_step.optimizer):
            if param in absent:
                continue
            described = self._layout.spec.params[param]
            tensor, grad_dtype = described.tensor, described.grad_dtype
            name = gradient_name(self.record, sub_step, tensor.name)
            start = self._layout.gradient_offset(sub_step.optimizer, sub_step.index, param) - HEADER_BYTES
            encoding = self._layout.spec.encoding(param)
            if encoding is not None:
                yield from self._encoded(name, encoding, tensor.numel, grad_dtype, start)
                continue
            if param not in sparse:
                nbytes = tensor.numel * ITEM_BYTES[grad_dtype]
                yield FileTensor(name, grad_dtype, tensor.shape, self._gradients[start : start + nbytes])
                continue
            one = sparse[param]
            for part, dtype, shape in (
                ("indices", "int64", (one.sparse_dim, one.nnz)),
                ("values", grad_dtype, (one.nnz, *tensor.shape[one.sparse_dim :])),
            ):
                nbytes = prod(shape) * ITEM_BYTES[dtype]
                yield FileTensor(f"{name}/{part}", dtype, shape, self._gradients[start : start + nbytes])
                start += nbytes

    def _encoded(
        self, name: str, encoding: GradientEncoding, numel: int, dtype: str, start: int
    ) -> Iterator[FileTensor]:
        """The parts of an encoded gradient that begins at byte `start`; entries, not the room for them."""
        count: int | None = None
        for index, part in enumerate(encoded_parts(encoding, numel, dtype)):
            length = part.length
            if encoding.kind == "sparse" and part.length == encoding.entries and index >= _ENTRIES_FROM:
                length = min(length, count or 0)
            at = start + part.offset
            data = self._gradients[at : at + length * ITEM_BYTES[part.dtype]]
            if encoding.kind == "sparse" and index == 0:
                count = max(0, int.from_bytes(data, "little", signed=True))
            yield FileTensor(f"{name}/{_encoding_name(encoding)}/{index}", part.dtype, (length,), data)


def _encoding_name(encoding: GradientEncoding) -> str:
    match encoding.kind:
        case "quantized":
            return f"quantized{encoding.entries}"
        case "factors":
            return f"factors{encoding.entries}x{encoding.rows}"
        case _:
            return encoding.kind


def _bytes_tensor(name: str, data: bytes) -> FileTensor:
    return FileTensor(name, "uint8", (len(data),), memoryview(data))


def write_batch(store: Store, batch: Batch, tensors: Sequence[FileTensor]) -> Batch:
    """Write a batch's file, read it back, and write its commit file; returns the batch with its files."""
    ordered = sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype])  # keeps every tensor aligned
    with store.create(batch.log_path) as stream:
        stream.write(_header(ordered))
        for tensor in ordered:
            stream.write(tensor.data)
    committed = msgspec.structs.replace(batch, files=(stream.stored(batch.log_path),))
    try:
        read_back(store, committed.files)
        store.write(committed.commit_path, encode_commit(committed))
    except Exception:  # raised again after the file is deleted
        try:
            store.delete(committed.log_path)
        except StorageError as error:
            _log.warning("could not delete an unfinished batch: %s", error)
        raise
    return committed


def _header(tensors: Sequence[FileTensor]) -> bytes:
    """The header of a safetensors file: its length in bytes, then names, dtypes, shapes and offsets as JSON."""
    entries: dict[str, dict[str, object]] = {}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.data.nbytes
        entries[tensor.name] = {"dtype": _DTYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class RecordReader:
    """Reads the tensors of records from batches; holds one batch in memory at a time, and one that is read ahead."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._batch: Batch | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._encodings: dict[str, GradientEncoding] = {}

    def tensor(self, batch: Batch, name: str) -> torch.Tensor:
        """One tensor in host memory; do not modify it.

        Raises DamagedStateError if the batch lacks it or is no safetensors file, StorageError if it cannot be read.
        """
        self._load(batch)
        try:
            return self._tensors[name]
        except KeyError:
            raise DamagedStateError(f"{batch.log_path}: expected the tensor {name}, found none") from None

    def read_in_turn(self, wanted: Sequence[Batch]) -> Generator[Batch, None, None]:
        """Each batch once it is in memory, while a thread reads the next one. Close it behind the last."""
        with ThreadPoolExecutor(1, "memckpt-read-ahead") as reading:
            ahead: Future[dict[str, torch.Tensor]] | None = None
            for batch, following in itertools.zip_longest(wanted, wanted[1:]):
                if ahead is not None:
                    self._use_batch(batch, ahead.result())
                else:
                    self._load(batch)
                ahead = reading.submit(self._read, following) if following is not None else None
                yield batch

    def _load(self, batch: Batch) -> None:
        if self._batch is not batch and self._batch != batch:
            self._batch, self._tensors = None, {}
            self._use_batch(batch, self._read(batch))

    def _use_batch(self, batch: Batch, tensors: dict[str, torch.Tensor]) -> None:
        self._batch, self._tensors = batch, tensors
        self._encodings = dict(self._find_encodings())

    def _read(self, batch: Batch) -> dict[str, torch.Tensor]:
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            return load(self._store.read(batch.log_path))
        except SafetensorError as error:
            raise DamagedStateError(f"{batch.log_path}: expected a safetensors file: {error}") from error

    def _find_encodings(self) -> Iterator[tuple[str, GradientEncoding]]:
        for name, first in self._tensors.items():
            found = _FIRST_PART.fullmatch(name)
            if found is None:
                continue
            gradient, sparse, half, block, rank, rows = found.groups()
            if half:
                yield gradient, GradientEncoding("half", dtype=str(first.dtype).removeprefix("torch."))
            elif sparse:
                yield gradient, GradientEncoding("sparse")
            elif rank:
                yield gradient, GradientEncoding("factors", int(rank), rows=int(rows))
            else:
                yield gradient, GradientEncoding("quantized", int(block))

    def data(self, batch: Batch, name: str) -> bytes:
        """The bytes of one tensor."""
        return self.tensor(batch, name).numpy().tobytes()

    def gradient(
        self,
        batch: Batch,
        layout: Layout,
        meta: RecordMeta,
        sub_step: SubStep,
        param: int,
        cut: tuple[int, int] | None = None,
        device: torch.device | None = None,
    ) -> torch.Tensor | None:
        """The gradient of a parameter in one optimizer step, as staged (a ``GradientSource``).

        Raises DamagedStateError if the batch lacks it or it does not fit, StorageError if the file cannot be read.
        """
        import torch

        if param in sub_step.absent:
            return None
        spec = layout.spec.params[param].tensor
        name = gradient_name(meta.record, sub_step, spec.name)
        for sparse in sub_step.sparse:
            if sparse.param == param:
                indices, values = self.tensor(batch, f"{name}/indices"), self.tensor(batch, f"{name}/values")
                try:
                    # Checked: an index beyond the shape, which a file may name, would write to foreign memory.
                    return torch.sparse_coo_tensor(
                        indices, values, spec.shape, is_coalesced=sparse.coalesced, check_invariants=True
                    )
                except (RuntimeError, TypeError, ValueError) as error:  # whichever torch raises for which mistake
                    raise DamagedStateError(
                        f"{batch.log_path}: expected {name} as a sparse gradient of shape {list(spec.shape)}, found "
                        f"indices and values that make none: {error}"
                    ) from error
        self._load(batch)
        encoding = self._encodings.get(name)
        if encoding is not None:
            from memckpt.state import encodings

            dtype = layout.spec.params[param].grad_dtype
            encoding, parts = self._parts(batch, name, encoding, spec.numel, dtype)
            found = encodings.decode(encoding, parts, spec.numel, getattr(torch, dtype), cut, device)
            return found.view(spec.shape) if cut is None else found
        dense = self.tensor(batch, name)
        if dense.shape != torch.Size(spec.shape):
            raise DamagedStateError(
                f"{batch.log_path}: expected {name} of shape {list(spec.shape)}, found {list(dense.shape)}"
            )
        return dense if cut is None else dense.view(-1)[cut[0] : cut[1]]

    def _parts(
        self, batch: Batch, name: str, encoding: GradientEncoding, numel: int, dtype: str
    ) -> tuple[GradientEncoding, list[torch.Tensor]]:
        """The parts of an encoded gradient, and its encoding: that of a sparse one has as many entries as are there."""
        import torch

        from memckpt.state import encodings

        if encoding.kind == "sparse":
            values = self.tensor(batch, f"{name}/sparse/{_ENTRIES_FROM + 1}")
            encoding = GradientEncoding("sparse", values.numel(), str(values.dtype).removeprefix("torch."))
        parts: list[torch.Tensor] = []
        if is_possible(encoding, numel, dtype):
            count = len(encoded_parts(encoding, numel, dtype))
            parts = [self.tensor(batch, f"{name}/{_encoding_name(encoding)}/{index}") for index in range(count)]
        fit = parts and encodings.fits(encoding, parts, numel, getattr(torch, dtype))
        if not fit or any(part.dim() != 1 for part in parts):
            raise DamagedStateError(
                f"{batch.log_path}: expected {name} as the parts of {numel} elements of {dtype}, found "
                f"{encoding} in tensors of the shapes {[list(part.shape) for part in parts]}"
            )
        return encoding, parts
