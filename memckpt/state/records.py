"""A record's metadata, and a node's statements about the records it holds. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from memckpt.errors import MALFORMED, DamagedStateError

#: Ranks that hold the same shards, ascending: the unit in which state is held, sent, kept and restored.
RankGroup = tuple[int, ...]


class Timeline(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One attempt's line of records: one more than the highest number seen before, and the attempt's nonce."""

    number: int
    nonce: str


class Branch(msgspec.Struct, frozen=True, array_like=True):
    """A timeline, and the last record of it that the next one builds on (None: the current timeline)."""

    timeline: Timeline
    left_at: int | None


def timeline_of(history: Sequence[Branch], record: int) -> Timeline | None:
    """The timeline on which `record` was made, given the history of the newest record."""
    for branch in history:
        if branch.left_at is None or record <= branch.left_at:
            return branch.timeline
    return None


class GradientOp(msgspec.Struct, frozen=True, array_like=True):
    """An in-place change of the gradients of `params` between backward and the optimizer's step.

    `kind`: ``"mul"``, ``"clamp"``, or ``"div"``: the scale that a fused step itself divides by. `value`: codec encoding
    of the operand: a 0-dim or 1-element tensor, or (min, max) for ``"clamp"``.
    """

    kind: str
    value: bytes
    params: tuple[int, ...]


class SparseGradient(msgspec.Struct, frozen=True, array_like=True):
    """Shape of a staged sparse gradient. Its indices (int64) come first in the parameter's room, then its values."""

    param: int
    sparse_dim: int
    nnz: int
    coalesced: bool


class SubStep(msgspec.Struct, frozen=True, array_like=True):
    """One step of one optimizer.

    Attributes:
        index: number of the step among this optimizer's steps in the record; selects the area in the gradient arena.
        groups: codec encoding of the list of each group's hyperparameters, as the step found them.
        absent: parameters whose gradient was None.
        ops: changes to apply to the staged gradients, in order.
        ambient: encoding of torch's settings around the step; empty: as by default.
    """

    optimizer: int
    index: int
    groups: bytes
    absent: tuple[int, ...] = ()
    sparse: tuple[SparseGradient, ...] = ()
    ops: tuple[GradientOp, ...] = ()
    ambient: bytes = b""


class RecordMeta(msgspec.Struct, frozen=True, array_like=True):
    """A record's metadata; its tensors are in its slot.

    Attributes:
        anchors_of: the record whose state the anchors hold: ``record - 1``; for the virtual records of a generation the
            one that it begins with.
        virtual: whether it was written by a generation: anchors only.
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
    """Records whose state one node can produce: its part of the inventory for the plan.

    Attributes:
        records: their numbers, oldest first; `steps`: the user-facing step of each.
        ranks: the ranks whose rank states it holds for all of them.
        history: timelines, oldest first; the last one is that of the newest record.
        world_size: number of ranks of the attempt that wrote them.
        digest, sharding: of the layout, and of the shards (:meth:`StateSpec.sharding`).
        problem: reason why none of it may be used; empty if there is none.
        newest: the newest record that all of its ranks have committed; captured state may be older.
        replicas: all ranks of the job that hold the same shards; empty: all ranks of the job.
    """

    node: str
    records: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    ranks: RankGroup = ()
    history: tuple[Branch, ...] = ()
    world_size: int = 0
    digest: str = ""
    problem: str = ""
    sharding: str = ""
    newest: int = 0
    replicas: tuple[int, ...] = ()


class HeldFragments(msgspec.Struct, frozen=True, array_like=True):
    """Erasure-coded fragments of another node's records in a node's memory: its part of the inventory for the plan.

    Other attributes are as in HeldRecords.

    Attributes:
        owner: the ranks whose records these are; they share a node and its shards.
        index: index of the fragments, of k + m - 1 of each stripe; any k = `data` different ones decode it.
        generation: unique name of the owner's generation. Fragments of different generations do not fit together.
        base: the record after which the generation began; virtual records up to `base` hold its state.
        period: T, the number of records up to and including one that make its state; 1 if each record stands alone.
        private: whether only state private to these ranks is here (rank states, by-value tensors): every rank of
            `replicas` on any node has the rest.
        records: records that are complete here, virtual ones included, ascending.
        static: whether the data sent once per generation are here, too.
    """

    node: str
    owner: RankGroup
    index: int
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
    """Raises DamagedStateError."""
    try:
        return _meta_decoder.decode(data)
    except MALFORMED as error:
        raise DamagedStateError(f"expected the scalars of a record, found something else: {error}") from error
