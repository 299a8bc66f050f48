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
    """An in-place change of gradients between backward and the optimizer's step."""

    #: ``"mul"``, ``"clamp"``, ``"unscale"``: by a gradient scaler; or ``"div"``: by the scale, in a fused step.
    kind: str
    value: bytes  #: codec encoding of the operand: a 0-dim or 1-element tensor, or (min, max) for ``"clamp"``
    params: tuple[int, ...]  #: indices of the parameters it applies to


class SparseGradient(msgspec.Struct, frozen=True, array_like=True):
    """Shape of a staged sparse gradient. Its indices (int64) come first in the parameter's room, then its values."""

    param: int
    sparse_dim: int
    nnz: int
    coalesced: bool


class SubStep(msgspec.Struct, frozen=True, array_like=True):
    """One step of one optimizer."""

    optimizer: int
    index: int  #: number of the step among this optimizer's steps in the record; selects the area in the gradient arena
    groups: bytes  #: codec encoding of the list of each group's hyperparameters, as the step found them
    absent: tuple[int, ...] = ()  #: parameters whose gradient was None
    sparse: tuple[SparseGradient, ...] = ()
    ops: tuple[GradientOp, ...] = ()  #: changes to apply to the staged gradients, in order
    ambient: bytes = b""  #: encoding of torch's settings around the step; empty: as by default


class RecordMeta(msgspec.Struct, frozen=True, array_like=True):
    """A record's metadata; its tensors are in its slot."""

    record: int
    anchors_of: int  #: the record whose state the anchors hold: the one before, or that which a generation begins with
    virtual: bool  #: whether it was written by a generation: anchors only
    sub_steps: tuple[SubStep, ...] = ()
    #: (parameter, optimizer, key) of optimizer state that did not exist yet when it was anchored.
    missing: tuple[tuple[int, int, str], ...] = ()
    plain: bytes = b""  #: codec encoding of {parameter: {optimizer: {key: value}}} for anchored state but tensors


class HeldRecords(msgspec.Struct, frozen=True, array_like=True):
    """Records whose state one node can produce: its part of the inventory for the plan."""

    node: str
    records: tuple[int, ...] = ()  #: their numbers, oldest first
    steps: tuple[int, ...] = ()  #: the user-facing step of each
    ranks: RankGroup = ()  #: the ranks whose rank states it holds for all of them
    history: tuple[Branch, ...] = ()  #: timelines, oldest first; the last one is that of the newest record
    world_size: int = 0  #: number of ranks of the attempt that wrote them
    problem: str = ""  #: reason why none of it may be used; empty if there is none
    sharding: str = ""  #: :meth:`StateSpec.sharding`
    newest: int = 0  #: the newest record that all of its ranks have committed; captured state may be older
    replicas: tuple[int, ...] = ()  #: all ranks of the job that hold the same shards; empty: all ranks of the job


class HeldFragments(msgspec.Struct, frozen=True, array_like=True):
    """Erasure-coded fragments of another node's records in a node's memory: its part of the inventory for the plan."""

    node: str
    owner: RankGroup  #: the ranks whose records these are; they share a node and its shards
    index: int  #: index of the fragments, of k + m - 1 of each stripe; any k = `data` different ones decode it
    data: int
    generation: str  #: unique name of the owner's generation. Fragments of different generations do not fit together.
    base: int  #: the record after which the generation began; virtual records up to `base` hold its state
    period: int  #: T, the number of records up to and including one that make its state; 1 if each record stands alone
    private: bool  #: only private state of these ranks is here: every rank of `replicas` on any node has the rest
    replicas: tuple[int, ...]
    records: tuple[int, ...]  #: records that are complete here, virtual ones included, ascending
    steps: tuple[int, ...]
    history: tuple[Branch, ...]
    static: bool = True  #: whether the data sent once per generation are here, too
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
