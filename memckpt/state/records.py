"""What a record says beside its tensors, and what a node can say about the records it holds. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Timeline(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One attempt's line of records: one more than the highest number seen, and the attempt's nonce."""

    number: int
    nonce: str


class Branch(msgspec.Struct, frozen=True, array_like=True):
    """A timeline and the last record of it that the next one builds on (None: the current one)."""

    timeline: Timeline
    left_at: int | None


def timeline_of(history: Sequence[Branch], record: int) -> Timeline | None:
    """The timeline on which `record` was made, on the way to the newest record of `history`."""
    for branch in history:
        if branch.left_at is None or record <= branch.left_at:
            return branch.timeline
    return None


class GradientOp(msgspec.Struct, frozen=True, array_like=True):
    """A change that was made to gradients in place between backward and the optimizer's step.

    Attributes:
        kind: ``"mul"``, ``"div"`` or ``"clamp"``.
        value: codec encoding of the operand: a 0-dim or 1-element tensor, or (min, max) for ``"clamp"``.
        params: indices of the parameters it applies to.
    """

    kind: str
    value: bytes
    params: tuple[int, ...]


class SparseGradient(msgspec.Struct, frozen=True, array_like=True):
    """Shape of a staged sparse gradient: its indices (int64) lie first in the parameter's room, then its values."""

    param: int
    sparse_dim: int
    nnz: int
    coalesced: bool


class SubStep(msgspec.Struct, frozen=True, array_like=True):
    """One step of one optimizer.

    Attributes:
        optimizer: its index.
        index: which of this optimizer's steps in the record it is; selects the area in the gradient arena.
        groups: codec encoding of the list of hyperparameters of every group, as the step used them.
        absent: parameters whose gradient was None.
        sparse: parameters whose gradient was sparse.
        ops: factors to apply to the staged gradients, in order.
    """

    optimizer: int
    index: int
    groups: bytes
    absent: tuple[int, ...] = ()
    sparse: tuple[SparseGradient, ...] = ()
    ops: tuple[GradientOp, ...] = ()


class RecordMeta(msgspec.Struct, frozen=True, array_like=True):
    """The record's scalars; its tensors are in its slot.

    Attributes:
        record: its number.
        anchors_of: the record after which the anchors' values stood: ``record - 1``, or for the virtual records of a
            generation the record that the generation begins with.
        virtual: written by a generation: anchors only.
        sub_steps: in the order in which they were made.
        missing: (parameter, optimizer, key) of optimizer state that did not exist yet when it was anchored.
        plain: codec encoding of {parameter: {optimizer: {key: value}}} for anchored state that is not a tensor.
    """

    record: int
    anchors_of: int
    virtual: bool
    sub_steps: tuple[SubStep, ...] = ()
    missing: tuple[tuple[int, int, str], ...] = ()
    plain: bytes = b""


class HeldRecords(msgspec.Struct, frozen=True, array_like=True):
    """What one node can produce: its part of the inventory that the plan is made from.

    Attributes:
        node: its name.
        records: numbers of the records whose state it can produce, oldest first.
        steps: the user-facing step of each of them.
        ranks: the ranks whose rank states it holds for all of them.
        history: timelines, oldest first; the last one is that of the newest record.
        world_size: of the attempt that wrote them.
        digest: of the layout.
        sharding: which pieces of tensors these are (:meth:`StateSpec.sharding`).
        problem: why nothing of it may be used, in words; empty if nothing is wrong.
        newest: the newest record that all of its ranks have committed; where state is captured now and then, that is
            a later one than any that can be produced.
        replicas: all ranks of the job that hold the same shards; empty: all ranks of the job.
        standby: it was redone here for the node of these ranks; they have not run here.
    """

    node: str
    records: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    history: tuple[Branch, ...] = ()
    world_size: int = 0
    digest: str = ""
    problem: str = ""
    sharding: str = ""
    newest: int = 0
    replicas: tuple[int, ...] = ()
    standby: bool = False


class HeldPieces(msgspec.Struct, frozen=True, array_like=True):
    """What a node keeps in memory of another node's records: its part of the inventory that the plan is made from.

    Attributes:
        node: which keeps them.
        owner: the ranks whose records these are: they share a node and its shards.
        piece: which of the k + m - 1 pieces of each record; any k different ones make it whole.
        data: k.
        generation: which one of the owner's, by a name that no two have in common. Pieces of different ones do not go
            together.
        base: the record after which the generation began; its state is that of virtual records up to `base`.
        period: T, how many records up to one make its state; 1 where each record stands for itself.
        private: only what is these ranks' own is here (rank states, by-value tensors), as every rank of `replicas` on
            any node has the rest.
        replicas: all ranks of the job that hold the same shards as the owner; empty: all ranks of the job.
        records: those that are complete here, ascending; virtual ones among them.
        steps: the user-facing step of each.
        history: timelines, oldest first; the last one is that of the newest record.
        static: whether what is sent once in a generation is here, too.
        world_size: of the attempt that wrote them.
        digest: of the layout.
        sharding: which pieces of tensors these are (:meth:`StateSpec.sharding`).
        problem: why nothing of it may be used, in words; empty if nothing is wrong.
    """

    node: str
    owner: tuple[int, ...]
    piece: int
    data: int
    generation: str
    base: int
    period: int
    private: bool
    replicas: tuple[int, ...]
    records: tuple[int, ...]
    steps: tuple[int, ...]
    history: tuple[Branch, ...]
    static: bool = True
    world_size: int = 0
    digest: str = ""
    sharding: str = ""
    problem: str = ""


_meta_encoder = msgspec.msgpack.Encoder()
_meta_decoder = msgspec.msgpack.Decoder(RecordMeta)


def encode_meta(meta: RecordMeta) -> bytes:
    return _meta_encoder.encode(meta)


def decode_meta(data: bytes) -> RecordMeta:
    return _meta_decoder.decode(data)
