"""Encoded gradients: the same bits back, sizes known in advance, damage found."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.errors import DamagedStateError
from memckpt.state.encodings import decode, fits, quantized_parts, sample, sparse_parts, views
from memckpt.state.optimizers import dtype_name
from memckpt.state.spec import INDEX_BLOCK, PART_ALIGN, GradientEncoding, encoded_bytes, encoded_parts, is_possible
from memckpt.state.tensors import bits_of

SIZES = [1, 7, 1000, INDEX_BLOCK, INDEX_BLOCK + 1, 3 * INDEX_BLOCK - 5]


def sparse(
    numel: int, count: int, entries: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A gradient with so many entries other than zero, and its parts."""
    numbers = torch.Generator().manual_seed(seed)
    where = torch.randperm(numel, generator=numbers)[:count].sort().values
    dense = torch.zeros(numel, dtype=dtype)
    dense[where] = torch.randn(count, generator=numbers).to(dtype)
    padded = torch.nn.functional.pad(where, (0, entries - count))
    return dense, sparse_parts(numel, padded, dense[padded], torch.tensor([count]))


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_sparse_gradient_comes_back_bit_for_bit(numel: int, dtype: torch.dtype) -> None:
    entries = min(numel, 900)
    for count in {0, 1, entries // 2, entries}:
        dense, parts = sparse(numel, count, entries, dtype, seed=count)
        encoding = GradientEncoding("sparse", entries)
        assert fits(encoding, parts, numel, dtype)
        assert torch.equal(bits_of(decode(encoding, parts, numel, dtype)), bits_of(dense))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_special_values_and_all_positions(data: st.DataObject) -> None:
    numel = data.draw(st.integers(1, 2 * INDEX_BLOCK + 3))
    where = sorted(data.draw(st.sets(st.integers(0, numel - 1), max_size=20)))
    kinds = st.sampled_from([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, 3.5])
    values = torch.tensor([data.draw(kinds) for _ in where], dtype=torch.float32)
    dense = torch.zeros(numel)
    dense[where] = values
    parts = sparse_parts(numel, torch.tensor(where, dtype=torch.int64), values, torch.tensor([len(where)]))
    found = decode(GradientEncoding("sparse", len(where)), parts, numel, torch.float32)
    assert torch.equal(bits_of(found), bits_of(dense))


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("block", [8, 256])
def test_quantized_values_are_at_most_half_a_step_away(numel: int, block: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1)) * 1e-3
    encoding = GradientEncoding("quantized", block)
    parts = quantized_parts(values, block)
    assert fits(encoding, parts, numel, torch.float32)
    found = decode(encoding, parts, numel, torch.float32)
    step = parts[1].repeat_interleave(block)[:numel]
    assert bool(((found - values).abs() <= step * 0.5001).all())


def test_a_block_with_an_overflow_is_not_finite_and_others_are() -> None:
    values = torch.ones(24)
    values[9] = float("inf")
    found = decode(GradientEncoding("quantized", 8), quantized_parts(values, 8), 24, torch.float32)
    assert not bool(found[8:16].isfinite().any())
    assert torch.equal(found[:8], torch.ones(8))
    assert torch.equal(found[16:], torch.ones(8))


def test_a_block_of_zeros_stays_zero() -> None:
    found = decode(GradientEncoding("quantized", 8), quantized_parts(torch.zeros(9), 8), 9, torch.float32)
    assert torch.equal(found, torch.zeros(9))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    values = torch.randn(33).to(dtype)
    encoding = GradientEncoding("half", dtype=dtype_name(dtype))
    assert fits(encoding, [values], 33, torch.float32)
    assert torch.equal(decode(encoding, [values], 33, torch.float32), values.to(torch.float32))


@pytest.mark.parametrize(
    "encoding",
    [GradientEncoding("sparse", 77), GradientEncoding("quantized", 8), GradientEncoding("half", dtype="float16")],
    ids=["sparse", "quantized", "half"],
)
@pytest.mark.parametrize("numel", SIZES)
def test_parts_do_not_overlap_and_lie_within_their_room(encoding: GradientEncoding, numel: int) -> None:
    end = 0
    buffer = bytearray(encoded_bytes(encoding, numel, "float32"))
    for part, view in zip(
        encoded_parts(encoding, numel, "float32"), views(buffer, 0, encoding, numel, "float32"), strict=True
    ):
        assert part.offset >= end
        assert part.offset % PART_ALIGN == 0
        assert (view.numel(), dtype_name(view.dtype)) == (part.length, part.dtype)
        end = part.offset + view.nbytes
    assert end <= len(buffer)


def example(kind: str, numel: int) -> tuple[GradientEncoding, list[torch.Tensor]]:
    """A random gradient in an encoding."""
    numbers = torch.Generator().manual_seed(numel)
    match kind:
        case "sparse":
            entries = min(numel, 900)
            return GradientEncoding("sparse", entries), sparse(numel, entries // 2, entries, torch.float32)[1]
        case "quantized":
            return GradientEncoding("quantized", 24), quantized_parts(torch.randn(numel, generator=numbers), 24)
        case "half":
            return GradientEncoding("half", dtype="bfloat16"), [torch.randn(numel, generator=numbers).bfloat16()]
        case _:
            rows = next(one for one in (35, 7, 5, 1) if numel % one == 0)
            parts = [torch.randn(size * 3, generator=numbers) for size in (rows, numel // rows)]
            return GradientEncoding("factors", 3, rows=rows), parts


@pytest.mark.parametrize("kind", ["sparse", "quantized", "half", "factors"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_piece_has_the_bits_of_the_whole(kind: str, data: st.DataObject) -> None:
    numel = data.draw(st.sampled_from(SIZES))
    encoding, parts = example(kind, numel)
    whole = decode(encoding, parts, numel, torch.float32)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    piece = decode(encoding, parts, numel, torch.float32, (start, stop))
    assert torch.equal(bits_of(piece), bits_of(whole[start:stop]))


@pytest.mark.parametrize("kind", ["sparse", "quantized", "half", "factors"])
@pytest.mark.parametrize("numel", SIZES)
def test_a_sample_has_elements_that_a_factor_changes(kind: str, numel: int) -> None:
    encoding, parts = example(kind, numel)
    whole = decode(encoding, parts, numel, torch.float32)
    seen = set()
    for turn in range(40):
        positions, values = sample(encoding, parts, numel, torch.float32, turn)
        assert torch.equal(bits_of(values), bits_of(whole[positions]))
        assert bool(values.count_nonzero()) or not bool(whole.count_nonzero())
        seen |= set(positions.tolist())
    assert len(seen) >= min(int(whole.count_nonzero()), 30)


@pytest.mark.parametrize(
    "encoding",
    [
        GradientEncoding("factors", 4, rows=-1_000_000),
        GradientEncoding("factors", 4, rows=1 << 62),
        GradientEncoding("factors", 4, rows=7),
        GradientEncoding("factors", 0, rows=10),
        GradientEncoding("sparse", 1 << 50),
        GradientEncoding("sparse", -1),
        GradientEncoding("sparse", 5, dtype="complex64"),
        GradientEncoding("quantized", 0),
        GradientEncoding("quantized", 1 << 40),
        GradientEncoding("half", dtype="bool"),
        GradientEncoding("half"),
    ],
    ids=str,
)
def test_impossible_encodings_from_elsewhere_are_refused(encoding: GradientEncoding) -> None:
    assert not is_possible(encoding, 100, "float32")


@pytest.mark.parametrize("kind", ["sparse", "quantized", "half", "factors"])
def test_possible_ones_are_not(kind: str) -> None:
    assert is_possible(example(kind, 1000)[0], 1000, "float32")
    assert not is_possible(example(kind, 1000)[0], 1000, "complex64")


@pytest.mark.parametrize(("part", "value"), [(0, 3), (0, -1), (1, 2), (2, 100), (2, -1)])
def test_parts_that_contradict_each_other_are_damage(part: int, value: int) -> None:
    """Never an index error, nor a gradient with elements elsewhere."""
    where = torch.tensor([7, INDEX_BLOCK + 99])
    parts = sparse_parts(INDEX_BLOCK + 100, where, torch.ones(2), torch.tensor([2]))
    parts[part][-1] = value
    with pytest.raises(DamagedStateError, match="a compressed gradient: expected"):
        decode(GradientEncoding("sparse", 2), parts, INDEX_BLOCK + 100, torch.float32)


@pytest.mark.parametrize("counts", [(-1, 51), (50, -50), (2**31 - 1, 50)])
def test_impossible_counts_are_damage(counts: tuple[int, int]) -> None:
    numel = INDEX_BLOCK + 100
    _, parts = sparse(numel, 50, 50, torch.float32)
    parts[1] = torch.tensor(counts, dtype=torch.int32)
    with pytest.raises(DamagedStateError, match="a compressed gradient: expected"):
        decode(GradientEncoding("sparse", 50), parts, numel, torch.float32)
