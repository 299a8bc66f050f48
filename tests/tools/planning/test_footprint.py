"""Bytes: compared with the product's own layouts, compressors and measurements."""

from __future__ import annotations

import pytest
import torch

from memckpt.compression.hook import reducer_for
from memckpt.config import (
    CompressionConfig,
    ErasureConfig,
    HalfPrecision,
    PowerSGD,
    Quantized8,
    RandomK,
    RedoMode,
    TopK,
)
from memckpt.replication.coding.code import STRIPE_BYTES
from memckpt.replication.keeping.kept_window import sizes_of
from memckpt.state.layout import Layout
from memckpt.state.spec import OptimizerSpec, OwnerSpec, ParamSpec, StateSpec, StateTensorSpec, TensorSpec
from memckpt_tools.planning.footprint import (
    Held,
    base_and_log_bytes,
    compressed_gradient_bytes,
    encoding_of,
    kept_for_others_bytes,
    node_memory,
    wire_bytes,
)

#: A small GPT: 12 layers of 256, and 8,192 tokens.
_LAYER = [(768, 256), (768,), (256, 256), (256,), (1024, 256), (1024,), (256, 1024), (256,), (256,), (256,)]
SHAPES: list[tuple[int, ...]] = [(8192, 256), (256, 256), *12 * _LAYER, (256,), (256,)]
PARAMETERS = sum(torch.Size(shape).numel() for shape in SHAPES)


def a_spec(mode: RedoMode, period: int, slots: int, compression: CompressionConfig | None = None) -> StateSpec:
    """A small model with Adam, fp32."""
    params = []
    for number, shape in enumerate(SHAPES):
        state = tuple(StateTensorSpec(key, shape, "float32", True, False) for key in ("exp_avg", "exp_avg_sq"))
        owner = OwnerSpec(0, 0, (StateTensorSpec("step", (), "float32", False, True), *state))
        params.append(ParamSpec(TensorSpec(f"p{number}", shape, "float32"), (owner,), False, 0))
    adam = OptimizerSpec("torch.optim.adam", "Adam", b"", (len(params),), 1)
    encodings = () if compression is None else tuple(encoding_of(compression, shape, ranks=4) for shape in SHAPES)
    return StateSpec(tuple(params), (adam,), (), (), mode, period, slots, (0,), 1, encodings=encodings)


def held(period: int, slots: int, gradient_bytes: float = 4.0) -> Held:
    return Held(parameters=PARAMETERS, gradient_bytes=gradient_bytes, state_bytes=12.0, period=period, slots=slots)


@pytest.mark.parametrize(("period", "slots"), [(8, 3), (4, 2), (32, 5)])
@pytest.mark.parametrize("mode", ["lazy", "eager", "snapshot"])
def test_base_and_log_are_those_of_the_layout(mode: RedoMode, period: int, slots: int) -> None:
    layout = Layout(a_spec(mode, 1 if mode == "snapshot" else period, slots))
    assert base_and_log_bytes(mode, held(period, slots)) == pytest.approx(layout.total_bytes, rel=0.01)
    if mode != "snapshot":
        assert held(period, slots).record_bytes == pytest.approx(layout.slot_bytes, rel=0.01)
    assert held(period, slots).whole_bytes == pytest.approx(layout.state_bytes, rel=0.01)


COMPRESSORS: list[CompressionConfig] = [
    TopK(), RandomK(ratio=0.05), Quantized8(), Quantized8(block_elements=64), PowerSGD(rank=4), HalfPrecision(),
]  # fmt: skip


@pytest.mark.parametrize("compression", COMPRESSORS, ids=repr)
def test_compressed_records_are_those_of_the_layout_and_the_compressor(
    compression: CompressionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [torch.nn.Parameter(torch.empty(shape)) for shape in SHAPES]
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 4)
    reducer = reducer_for(compression, params, None)
    encodings = [encoding_of(compression, shape, ranks=4) for shape in SHAPES]
    assert encodings == [reducer.encoding(param) for param in params]
    gradient_bytes = compressed_gradient_bytes(compression, SHAPES, ranks=4)
    layout = Layout(a_spec("lazy", 8, 3, compression))
    assert gradient_bytes * PARAMETERS == pytest.approx(layout.gradient_bytes, rel=0.01)
    assert held(8, 3, gradient_bytes).record_bytes == pytest.approx(layout.slot_bytes, rel=0.01)


@pytest.mark.parametrize(("data", "tolerate"), [(1, 1), (3, 1), (2, 2), (4, 2)])
def test_windows_of_other_nodes_are_what_holders_reserve(data: int, tolerate: int) -> None:
    """Each of the k + m - 1 holders reserves a fragment of every stripe of T + D records."""
    sizes = sizes_of(a_spec("lazy", 8, 3), private=False)
    reserved = (data + tolerate - 1) * sizes.kept * sizes.stripes * STRIPE_BYTES / data
    peers = ErasureConfig(data=data, tolerate=tolerate)
    assert kept_for_others_bytes("lazy", peers, held(8, 3)) == pytest.approx(reserved, rel=0.02)
    snapshots = sizes_of(a_spec("snapshot", 1, 3), private=False)
    reserved = (data + tolerate - 1) * snapshots.kept * snapshots.stripes * STRIPE_BYTES / data
    assert kept_for_others_bytes("snapshot", peers, held(8, 3)) == pytest.approx(reserved, rel=0.02)


@pytest.mark.parametrize(
    ("data", "tolerate", "formula", "measured"),
    [(1, 1, 5.50, 5.53), (3, 1, 5.50, 5.56), (2, 2, 8.25, 8.32), (4, 2, 6.88, 6.98)],
)
def test_traffic_is_what_the_kernel_has_counted(data: int, tolerate: int, formula: float, measured: float) -> None:
    """docs/costs.md, "Peers": bytes per parameter on the wire, T = 8."""
    found = wire_bytes(ErasureConfig(data=data, tolerate=tolerate), held(8, 3)) / PARAMETERS
    assert round(found, 2) == pytest.approx(formula, abs=0.006)
    assert found == pytest.approx(measured, rel=0.02)


def test_memory_by_who_needs_it() -> None:
    peers, one = ErasureConfig(data=4, tolerate=2), held(8, 3)
    alone = node_memory("lazy", one)
    assert alone.agent / PARAMETERS == pytest.approx(60.5)
    assert alone.peak / PARAMETERS == pytest.approx(60.5 + 12 + 12)
    several = node_memory("lazy", one, peers=peers, nodes=6)
    assert several.replicator / PARAMETERS == pytest.approx(75.6, abs=0.1)
    assert several.starting == pytest.approx(several.agent + several.replicator)
    assert node_memory("lazy", one, peers=peers, nodes=6, private=True).replicator == 0
    assert node_memory("eager", one, stores=False).state_copy == 0
