"""Bytes that protection takes on a node, and times of redo and of restores. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from memckpt.config import (
    CompressionConfig,
    ErasureConfig,
    HalfPrecision,
    LossyConfig,
    MemckptConfig,
    PowerSGD,
    Quantized8,
    RandomK,
    RedoMode,
    SparseConfig,
)
from memckpt.state.layout import SNAPSHOTS
from memckpt.state.spec import ITEM_BYTES, GradientEncoding, encoded_bytes

#: Bytes that a node sends for each step where other nodes have its state anyway: rank states, by docs/costs.md.
PRIVATE_WIRE_BYTES = 13_000
#: Bytes per parameter of fp32 parameters with Adam.
STATE_BYTES = 12


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one node holds of a training, and how it is recorded."""

    parameters: float  #: on the node, each once
    gradient_bytes: float  #: g, of a gradient in a record, for each parameter
    state_bytes: float  #: s, of a parameter and its optimizer state
    period: int  #: T
    slots: int  #: D

    @property
    def whole_bytes(self) -> float:
        """Bytes of parameters and optimizer state."""
        return self.parameters * self.state_bytes

    @property
    def record_bytes(self) -> float:
        """Bytes of one record: gradients and the anchors due, P (g + s/T). Source: docs/design.md, "The idea"."""
        return self.parameters * (self.gradient_bytes + self.state_bytes / self.period)

    @property
    def window_bytes(self) -> float:
        """Bytes of T records, which make a whole checkpoint, P (T g + s). Source: docs/design.md, "Peers"."""
        return self.period * self.record_bytes


def default_held(mode: RedoMode) -> Held:
    """One parameter in fp32 with Adam, recorded with the default settings of a mode."""
    config = MemckptConfig()
    period, slots = config.anchor_period(mode), config.records_in_flight
    return Held(parameters=1, gradient_bytes=4, state_bytes=STATE_BYTES, period=period, slots=slots)


def base_and_log_bytes(mode: RedoMode, held: Held) -> float:
    """Memory of the agent for base and log, in bytes.

    Source: docs/configuration.md, "Memory": lazy (T + D)(g + s/T), eager s + D (g + s/T), snapshot 2 s per parameter.
    """
    if mode == "snapshot":
        return SNAPSHOTS * held.whole_bytes
    if mode == "eager":
        return held.slots * held.record_bytes + held.whole_bytes
    return (held.period + held.slots) * held.record_bytes


def kept_for_others_bytes(mode: RedoMode, peers: ErasureConfig, held: Held) -> float:
    """Memory of a node for other nodes' records, in bytes, once a generation is complete; twice while one begins.

    Source: docs/operations.md, "What it takes": (k + m - 1)/k (T + D)(g + s/T) per parameter. Snapshots are kept three
    at a time (``sizes_of``).
    """
    if mode == "snapshot":
        return _sent(peers) * (1 + SNAPSHOTS) * held.whole_bytes
    return _sent(peers) * (held.period + held.slots) * held.record_bytes


def wire_bytes(peers: ErasureConfig, held: Held) -> float:
    """Bytes that a node sends for each step: (k + m - 1)/k (g + s/T) per parameter, as above."""
    return _sent(peers) * held.record_bytes


def state_wire_bytes(peers: ErasureConfig, held: Held) -> float:
    """Bytes that a node sends for one state by value (``every_steps`` above 1): (k + m - 1)/k s per parameter."""
    return _sent(peers) * held.whole_bytes


def _sent(peers: ErasureConfig) -> float:
    """Bytes sent for each byte of a record: the owner keeps one of the pieces itself."""
    return (peers.data + peers.tolerate - 1) / peers.data


@dataclass(frozen=True, kw_only=True)
class NodeMemory:
    """Host memory of one node by who needs it, in bytes."""

    agent: float  #: base and log
    replicator: float = 0.0  #: records of other nodes
    state_copy: float = 0.0  #: a copy of the state, while a checkpoint is being written
    trainer: float = 0.0  #: what compression leaves out of gradients, for each rank (host or accelerator)
    starting: float = 0.0  #: more that is held for a moment while a new generation begins

    @property
    def total(self) -> float:
        """What is held most of the time, with a checkpoint on its way."""
        return self.agent + self.replicator + self.state_copy + self.trainer

    @property
    def peak(self) -> float:
        """The most that is held at once."""
        return self.total + self.starting


def node_memory(
    mode: RedoMode,
    held: Held,
    *,
    peers: ErasureConfig | None = None,
    private: bool = False,
    stores: bool = True,
    residual_bytes: float = 0.0,
    nodes: int = 1,
) -> NodeMemory:
    """Memory of a node, by who needs it.

    Source: docs/configuration.md, "Memory" (a new base takes s more, with ranks on other nodes base and log twice).
    Also docs/operations.md, "What it takes" (windows twice while a new generation is written).

    `private`: whether enough nodes hold the same state, so that only the ranks' own bytes are sent. `stores`: whether
    checkpoints go to storage. `residual_bytes`: what compression leaves out of gradients, on all ranks of the node.
    """
    agent = base_and_log_bytes(mode, held)
    kept = 0.0 if peers is None or private else kept_for_others_bytes(mode, peers, held)
    starting = kept + (agent if nodes > 1 else held.whole_bytes)
    return NodeMemory(
        agent=agent,
        replicator=kept,
        state_copy=held.whole_bytes if stores else 0.0,
        trainer=residual_bytes,
        starting=starting,
    )


def encoding_of(
    config: CompressionConfig, shape: Sequence[int], dtype: str = "float32", ranks: int = 1
) -> GradientEncoding | None:
    """How a compressor's averages of one parameter lie in a record; None: as they are.

    Source: the compressors themselves (``Reducer.encoding`` in ``memckpt.compression``), without torch. Top-k chooses
    on each of the `ranks`; `dtype` is the gradient's.
    """
    numel = prod(shape)
    if isinstance(config, LossyConfig) and numel < config.min_elements:
        return None
    match config:
        case SparseConfig(ratio=ratio):
            sent = max(1, round(ratio * numel)) * (1 if isinstance(config, RandomK) else ranks)
            return GradientEncoding("sparse", min(numel, sent))
        case Quantized8(block_elements=block):
            return GradientEncoding("quantized", block)
        case PowerSGD(rank=rank) if len(shape) >= 2 and (shape[0] + numel // shape[0]) * rank < numel:
            return GradientEncoding("factors", rank, rows=shape[0])
        case HalfPrecision(dtype=half) if ITEM_BYTES[dtype] > 2:
            return GradientEncoding("half", dtype={"bf16": "bfloat16", "fp16": "float16"}[half])
    return None


def compressed_gradient_bytes(
    config: CompressionConfig, shapes: Sequence[Sequence[int]], dtype: str = "float32", ranks: int = 1
) -> float:
    """g of compressed gradients: bytes for each parameter, over all parameters of a model.

    Source: :func:`memckpt.state.spec.encoded_bytes` of each parameter; docs/compression.md has the rule.
    """
    total = found = 0
    for shape in shapes:
        numel = prod(shape)
        encoding = encoding_of(config, shape, dtype, ranks)
        total += numel
        found += numel * ITEM_BYTES[dtype] if encoding is None else encoded_bytes(encoding, numel, dtype)
    return found / total


def redo_seconds(records: float, parameters: float, parameters_per_second: float) -> float:
    """Time to apply records to parameters. Source: docs/compression.md, "Anchors"; measured on one machine."""
    return records * parameters / parameters_per_second


def from_window_seconds(held: Held, copy_bytes_per_second: float, parameters_per_second: float) -> float:
    """Time to restore from a window in this node's memory (lazy): copy its anchors, then redo.

    Anchors in a record are the state before its step. Each of the last T records anchors its share of a node: so
    (T + 1)/2 records are redone for a parameter on average. Source: docs/design.md, "The idea" and "A resume".
    """
    redone = redo_seconds((held.period + 1) / 2, held.parameters, parameters_per_second)
    return held.whole_bytes / copy_bytes_per_second + redone


def from_peers_seconds(
    held: Held, peer_bytes_per_second: float, copy_bytes_per_second: float, parameters_per_second: float
) -> float:
    """Time to restore a lost node from peers: it fetches and decodes one window, then restores from it.

    Source: docs/design.md, "Peers": from there on a restore is the same as from local memory.
    """
    fetched = held.window_bytes / peer_bytes_per_second
    return fetched + from_window_seconds(held, copy_bytes_per_second, parameters_per_second)
