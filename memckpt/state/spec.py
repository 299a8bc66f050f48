"""Description of a training state: its tensors, its optimizers, and how it is protected. Torch-free.

Every rank and the agent compute the same :class:`~memckpt.state.layout.Layout` from the same :class:`StateSpec`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import prod
from typing import Any

import msgspec

from memckpt.config import RedoMode
from memckpt.state.encoding_spec import GradientEncoding, encoded_bytes

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


def is_ours(name: str) -> bool:
    """Whether a tensor is none of the user's modules, but one that memckpt keeps beside them."""
    return name.startswith("memckpt_")


#: First word of the names of tensors with what compression has left out of gradients.
RESIDUALS = "memckpt_residuals"


def is_residual(name: str) -> bool:
    """Whether a tensor has what compression has left out of a gradient: an attempt may go on without it."""
    return name.startswith(f"{RESIDUALS}.")


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """Position of a shard in its whole tensor, as in DCP: offsets of its first element, and the whole shape."""

    offsets: tuple[int, ...]
    whole: tuple[int, ...]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Name, shape and dtype of the part of one tensor that a rank holds.

    `shape`: shape of that part: all of a plain tensor, the local shard of a DTensor. `shard`: position of the shard;
    None for a plain tensor.
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
    one of torch's sparse gradients, 0 for a dense one. `other_grad_dtype` is the dtype of its gradients if it differs
    from its own.
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


class OptimizerSpec(msgspec.Struct, frozen=True, array_like=True):
    """An optimizer class by name, with the data needed to build it elsewhere.

    `attributes` is a codec encoding of the instance attributes (including ``defaults``), `group_sizes` the number of
    parameters in each group, `sub_steps` the number of its steps that one record has room for.
    """

    module: str
    qualname: str
    attributes: bytes
    group_sizes: tuple[int, ...]
    sub_steps: int


class StateSpec(msgspec.Struct, frozen=True, array_like=True):
    """Everything that determines a layout.

    `static`: tensors that no optimizer steps (frozen parameters), staged once per generation. `by_value`: tensors
    (buffers, averaged models) staged with every record by every local rank.

    `every`: N in mode ``"snapshot"``: records whose number is a multiple of N are captured.

    `local_ranks`: the ranks of this node that hold the same shards and share each record's slot.
    `replicas`: all ranks of the job that hold these shards, the local ones included; empty: all ranks of the job.

    `aliases` and `outside` relate these names to the model's ``state_dict()``. `aliases`: further keys of a tensor,
    with its name here (tied weights). `outside`: names that the ``state_dict()`` lacks (non-persistent buffers, modules
    beside the model).

    `flattened`: parameters are shards of flat parameters (FSDP1), which only the rank itself can interpret.

    `trails`: eager redo stays one record behind what it could apply, so that the newest record can be repeated.

    `by_value_slots`: number of records whose by-value tensors are held at once; 0: as many as there are slots. Lazy
    redo needs D + 1: a rank that begins record n + 1 overwrites the first record that a restore of n - D would redo.
    Peers and a log read whole records later, and so need all.

    `shared`: names of by-value tensors that are held once for all local ranks, as long as these agree. `apart`: names
    of those known to differ between ranks.

    `encodings`: for each parameter, how its gradients are encoded in records, None: as they are; empty: all as they
    are.

    `late`: names of tensors that a new process does not have, or has in another shape or dtype: a resume makes them.
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
    encodings: tuple[GradientEncoding | None, ...] = ()
    late: tuple[str, ...] = ()

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
        fields = msgspec.structs.astuple(self)
        while not fields[-1] and len(fields) > _ALWAYS:
            fields = fields[:-1]  # as before there were any: stored digests stay what they are
        return hashlib.blake2b(msgspec.msgpack.encode(fields), digest_size=16).hexdigest()

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

        Names, shapes of whole tensors, dtypes and optimizer classes. Not the groups, which change with freezing, nor
        the sharding.
        """
        tensors = sorted((one for one in self.tensors() if not is_ours(one.name)), key=lambda one: one.name)
        lines = [f"{spec.name} {list(spec.whole_shape)} {spec.dtype}" for spec in tensors]
        lines += [f"optimizer {index} {spec.module}.{spec.qualname}" for index, spec in enumerate(self.optimizers)]
        lines += ["pieces of flat parameters (FSDP1)"] * self.flattened
        return lines

    def difference(self, fingerprint: Sequence[str]) -> str | None:
        """The first line in which another state's fingerprint differs from this one's, as text; None if it fits.

        Tensors that came late may be there or not.
        """
        late = {*self.late}
        both = self.fingerprint(), fingerprint
        ours, theirs = ([line for line in lines if line.rpartition(" [")[0] not in late] for lines in both)
        return first_difference(ours, theirs)

    def sharding(self) -> str:
        """A digest of the shards; empty if no tensor is sharded.

        A held state can be restored into a rank with the same sharding directly; for another one it has to be
        resharded.
        """
        pieces = sorted((spec.name, spec.shape, spec.shard) for spec in self.tensors() if spec.shard is not None)
        if not pieces:
            return ""
        return hashlib.blake2b(msgspec.msgpack.encode(pieces), digest_size=16).hexdigest()


#: Number of fields that are part of every digest.
_ALWAYS = StateSpec.__struct_fields__.index("encodings")


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
