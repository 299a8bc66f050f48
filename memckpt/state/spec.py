"""Description of a training state: its tensors, its optimizers, and how it is protected. Torch-free.

Every rank and the agent compute the same :class:`~memckpt.state.layout.Layout` from the same :class:`StateSpec`.

A gradient may be encoded in a record, as a sequence of one-dimensional parts, which lie one behind the other at
multiples of :data:`PART_ALIGN` bytes. Sizes depend on the encoding alone, not on the values, so that an accelerator
makes all parts without the host waiting for a count.

*sparse*: number of entries (int64), entries by block of 65,536 elements (int32), position of each entry in its block
(16 bits), values. Entries are ascending. Parts have room for :attr:`GradientEncoding.entries`; what is behind the
number of entries has no meaning.

*quantized*: a signed byte for each element, and a float32 scale for each block.

*half*: each element in 16 bits.

*factors*: two matrices, rows by rank and columns by rank, whose outer products add up to the gradient.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import prod
from typing import Any, Literal, NamedTuple

import msgspec

from memckpt.config import RedoMode

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
PART_ALIGN = 8
#: Elements whose positions are told by 16 bits and the number of their block.
INDEX_BLOCK = 1 << 16

EncodingKind = Literal["sparse", "quantized", "half", "factors"]
#: Dtypes of gradients that are encoded, and of their values.
_VALUES = ("float64", "float32", "float16", "bfloat16")
_MOST_IN_BLOCK = 1 << 20


class GradientEncoding(msgspec.Struct, frozen=True, array_like=True):
    """How a parameter's gradient lies in a record."""

    kind: EncodingKind  #: sparse, quantized, half or factors
    entries: int = 0  #: sparse: the largest number; quantized: elements that share a scale; factors: their rank
    dtype: str = ""  #: dtype of the values (sparse, half); that of the gradient where it is empty
    rows: int = 0  #: factors: rows of the matrix as which the gradient is taken


class EncodedPart(NamedTuple):
    """Place of a part behind the beginning of its gradient, in bytes, and its length in elements."""

    offset: int
    length: int
    dtype: str


def encoded_parts(encoding: GradientEncoding, numel: int, dtype: str) -> tuple[EncodedPart, ...]:
    """Places of all parts."""
    values = encoding.dtype or dtype
    match encoding.kind:
        case "sparse":
            blocks = -(-numel // INDEX_BLOCK)
            sizes = [(1, "int64"), (blocks, "int32"), (encoding.entries, "int16"), (encoding.entries, values)]
        case "quantized":
            sizes = [(numel, "int8"), (-(-numel // encoding.entries), "float32")]
        case "half":
            sizes = [(numel, values)]
        case "factors":
            columns = numel // max(1, encoding.rows)
            sizes = [(encoding.rows * encoding.entries, "float32"), (columns * encoding.entries, "float32")]
    parts, offset = [], 0
    for length, name in sizes:
        parts.append(EncodedPart(offset, length, name))
        offset += -(-length * ITEM_BYTES[name] // PART_ALIGN) * PART_ALIGN
    return tuple(parts)


def is_possible(encoding: GradientEncoding, numel: int, dtype: str) -> bool:
    """Whether a gradient can be encoded in this way; for encodings that come from elsewhere."""
    entries, rows = encoding.entries, encoding.rows
    if (encoding.dtype or dtype) not in _VALUES or dtype not in _VALUES:
        return False
    match encoding.kind:
        case "sparse":
            return 0 <= entries <= numel
        case "quantized":
            return 1 <= entries <= _MOST_IN_BLOCK
        case "half":
            return encoding.dtype != ""
        case "factors":
            return 0 < rows <= numel and numel % rows == 0 and 1 <= entries <= numel


def encoded_bytes(encoding: GradientEncoding, numel: int, dtype: str) -> int:
    """Bytes of an encoded gradient, from the first part's beginning to the last one's end."""
    last = encoded_parts(encoding, numel, dtype)[-1]
    return last.offset + -(-last.length * ITEM_BYTES[last.dtype] // PART_ALIGN) * PART_ALIGN


def is_ours(name: str) -> bool:
    """Whether a tensor is none of the user's modules, but one that memckpt keeps beside them."""
    return name.startswith("memckpt_")


#: First word of the names of tensors with what compression has left out of gradients.
RESIDUALS = "memckpt_residuals"


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """Position of a shard in its whole tensor, as in DCP: offsets of its first element, and the whole shape."""

    offsets: tuple[int, ...]
    whole: tuple[int, ...]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Name, shape and dtype of what a rank holds of one tensor: all of a plain tensor, the local shard of a DTensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    shard: Shard | None = None
    elsewhere: bool = False  #: it is in another node's slice, and has no elements here (`memckpt/state/slices.py`)

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
    """One tensor of an optimizer's state for one parameter."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    elementwise: bool  #: it has the parameter's shape, and is sharded and cut as the parameter is
    on_cpu: bool  #: it stays in host memory whatever the parameter's device (Adam's ``step``)

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
    """A parameter that some optimizer steps."""

    tensor: TensorSpec
    owners: tuple[OwnerSpec, ...]
    whole: bool  #: it must not be cut (shape-aware optimizers, sparse gradients, bf16 tails)
    sparse_bytes: int  #: room for one of torch's sparse gradients, 0 for a dense one
    other_grad_dtype: str = ""  #: dtype of its gradients if it is not its own
    #: Strides in the memory of training, in elements; empty if row by row. Kernels round by the order in memory.
    stride: tuple[int, ...] = ()

    @property
    def grad_dtype(self) -> str:
        return self.other_grad_dtype or self.tensor.dtype

    @property
    def dense_grad_bytes(self) -> int:
        return self.tensor.numel * ITEM_BYTES[self.grad_dtype]


class OptimizerSpec(msgspec.Struct, frozen=True, array_like=True):
    """An optimizer class by name, with the data needed to build it elsewhere."""

    module: str
    qualname: str
    attributes: bytes  #: codec encoding of the instance attributes (including ``defaults``)
    group_sizes: tuple[int, ...]  #: number of parameters in each group
    sub_steps: int  #: number of its steps that one record has room for


class StateSpec(msgspec.Struct, frozen=True, array_like=True):
    """Everything that determines a layout."""

    params: tuple[ParamSpec, ...]
    optimizers: tuple[OptimizerSpec, ...]
    static: tuple[TensorSpec, ...]  #: those that no optimizer steps (frozen parameters), staged once per generation
    by_value: tuple[TensorSpec, ...]  #: buffers and averaged models, staged with every record by every local rank
    mode: RedoMode
    period: int
    slots: int
    local_ranks: tuple[int, ...]  #: the ranks of this node that hold the same shards and share each record's slot
    world_size: int
    aliases: tuple[tuple[str, str], ...] = ()  #: further keys of a ``state_dict()``, with names here (tied weights)
    outside: tuple[str, ...] = ()  #: names that the ``state_dict()`` lacks (non-persistent buffers, other modules)
    replicas: tuple[int, ...] = ()  #: all ranks of the job that hold these shards; empty: all ranks of the job
    every: int = 1  #: N in mode ``"snapshot"``: records whose number is a multiple of N are captured
    flattened: bool = False  #: parameters are shards of flat ones (FSDP1), which only the rank itself can interpret
    trails: bool = False  #: eager redo stays one record behind, so that the newest record can be repeated
    #: Number of records whose by-value tensors are held at once; 0: as many as there are slots. Lazy redo needs D + 1:
    #: a rank that begins record n + 1 overwrites the first record that a restore of n - D would redo. Peers and a log
    #: read whole records later, and so need all.
    by_value_slots: int = 0
    shared: tuple[str, ...] = ()  #: by-value tensors held once for all local ranks, as long as these agree
    apart: tuple[str, ...] = ()  #: by-value tensors known to differ between ranks
    encodings: tuple[GradientEncoding | None, ...] = ()  #: how each parameter's gradients are encoded; empty: not
    late: tuple[str, ...] = ()  #: tensors that a new process has not, or not in this shape: a resume makes them
    slice_number: int = 0  #: the slice of the state that this node holds
    slice_count: int = 1  #: of so many

    def encoding(self, param: int) -> GradientEncoding | None:
        """How the gradients of a parameter are encoded; None: as they are."""
        return self.encodings[param] if self.encodings else None

    def grad_bytes(self, param: int) -> int:
        """Room for one gradient of a parameter, in bytes."""
        encoding, spec = self.encoding(param), self.params[param]
        if encoding is None:
            return spec.sparse_bytes or spec.dense_grad_bytes
        return encoded_bytes(encoding, spec.tensor.numel, spec.grad_dtype)

    def has_dense_room(self, param: int) -> bool:
        """Whether a gradient of a parameter fits as it is: not where it was sparse, or is encoded."""
        return self.encoding(param) is None and self.params[param].dense_grad_bytes <= self.grad_bytes(param)

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
        how |= {"shared": (), "apart": (), "encodings": (), "late": ()}
        return msgspec.structs.replace(self, **how).digest()

    def structure(self) -> tuple[Any, ...]:
        """The tensors, and the optimizers that step each parameter."""
        stepped = tuple((param.tensor, tuple(one.optimizer for one in param.owners)) for param in self.params)
        return stepped, self.static, self.by_value

    def tensors(self) -> list[TensorSpec]:
        return [*(param.tensor for param in self.params), *self.static, *self.by_value]

    def fingerprint(self) -> list[str]:
        """One line per property that must match for a held state to be restored into a model.

        Not the groups, which change with freezing, nor the sharding.
        """
        tensors = sorted((one for one in self.tensors() if not is_ours(one.name)), key=lambda one: one.name)
        lines = [f"{spec.name} {list(spec.whole_shape)} {spec.dtype}" for spec in tensors]
        lines += [f"optimizer {index} {spec.module}.{spec.qualname}" for index, spec in enumerate(self.optimizers)]
        lines += ["pieces of flat parameters (FSDP1)"] * self.flattened
        return lines

    def difference(self, fingerprint: Sequence[str]) -> str | None:
        """The first line in which another state's fingerprint differs, as text; late tensors may be there or not."""
        late = {*self.late}
        both = self.fingerprint(), fingerprint
        ours, theirs = ([line for line in lines if line.rpartition(" [")[0] not in late] for lines in both)
        return first_difference(ours, theirs)

    def sharding(self) -> str:
        """A digest of the shards; empty if no tensor is sharded. For a rank with another one, state is resharded."""
        if self.slice_count > 1:
            return f"slice {self.slice_number} of {self.slice_count}"
        pieces = sorted((spec.name, spec.shape, spec.shard) for spec in self.tensors() if spec.shard is not None)
        if not pieces:
            return ""
        return hashlib.blake2b(msgspec.msgpack.encode(pieces), digest_size=16).hexdigest()


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


#: Upper bounds beyond any real node: bytes of memory, and counts of anything.
_MOST_BYTES = 1 << 50
_MOST = 1 << 20


def read_spec(data: bytes) -> StateSpec:
    """Decode a spec, and check that a layout can be made from it. Raises ValueError: it cannot."""
    try:
        spec = msgspec.msgpack.decode(data, type=StateSpec)  # msgspec's other errors are ValueErrors
    except RecursionError as error:
        raise ValueError("expected a layout spec, found lists in lists in lists") from error
    problem = problem_of(spec)
    if problem:
        raise ValueError(f"expected a valid layout spec, found {problem}")
    return spec


def problem_of(spec: StateSpec) -> str:
    """The reason why no layout can be made from a spec; empty if one can."""
    for name in ("period", "slots", "every", "world_size", "slice_count"):
        if not 1 <= getattr(spec, name) <= _MOST:
            return f"{name}={getattr(spec, name)}"
    if not 0 <= spec.by_value_slots <= _MOST:
        return f"by_value_slots={spec.by_value_slots}"
    if not {*spec.shared} <= {one.name for one in spec.by_value}:
        return f"shared={spec.shared} not among the by-value tensors"
    ranks = {*spec.local_ranks, *spec.replicas}
    if not spec.local_ranks or min(ranks) < 0 or max(ranks) >= spec.world_size:
        return f"local_ranks={spec.local_ranks}, replicas={spec.replicas} of {spec.world_size} ranks"
    if any(not 0 <= one.sub_steps <= _MOST for one in spec.optimizers):
        return "an impossible number of steps of an optimizer"
    states = [state for param in spec.params for owner in param.owners for state in owner.state]
    tensors: list[TensorSpec | StateTensorSpec] = [*spec.tensors(), *states]
    for one in tensors:
        if one.dtype not in ITEM_BYTES or any(length < 0 for length in one.shape):
            return f"{one}"
    indices = [owner.optimizer for param in spec.params for owner in param.owners]
    if any(not 0 <= index < len(spec.optimizers) for index in indices):
        return f"a parameter of optimizer {max(indices)} of {len(spec.optimizers)}"
    if any(param.grad_dtype not in ITEM_BYTES for param in spec.params):
        return "gradients of an unknown dtype"
    if any(not 0 <= param.sparse_bytes <= _MOST_BYTES for param in spec.params):
        return "an impossible size of a sparse gradient"
    if spec.encodings and len(spec.encodings) != len(spec.params):
        return f"{len(spec.encodings)} encodings of {len(spec.params)} gradients"
    for param, encoding in zip(spec.params, spec.encodings, strict=bool(spec.encodings)):
        if encoding is not None and not is_possible(encoding, param.tensor.numel, param.grad_dtype):
            return f"an impossible encoding of a gradient: {encoding}"
    if sum(prod(one.shape) * ITEM_BYTES[one.dtype] for one in tensors) > _MOST_BYTES:
        return "an impossible number of bytes of tensors"
    pieces = [(one.name, one.shape) for one in spec.tensors() if one.shard is not None]
    return "a shard of a tensor twice" if len(set(pieces)) < len(pieces) else ""
