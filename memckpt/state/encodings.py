"""Encodings of gradients: from what was averaged to the parts in a record, and back to the same bits.

Decoding scatters or multiplies, and adds nothing up, so that each device gives the same gradient.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from memckpt.errors import DamagedStateError
from memckpt.state.optimizers import dtype_name, dtype_of
from memckpt.state.spec import INDEX_BLOCK, GradientEncoding, encoded_parts

#: Number of elements in a sample, and how far those of two turns are apart.
_SAMPLED, _STRIDE = 8, 7919


def sparse_parts(numel: int, indices: torch.Tensor, values: torch.Tensor, count: torch.Tensor) -> list[torch.Tensor]:
    """Parts of a sparse gradient; `indices` are ascending (int64), and mean nothing behind the first `count`.

    `count` is a tensor with one element on the same device.
    """
    blocks = -(-numel // INDEX_BLOCK)
    valid = torch.arange(indices.numel(), device=indices.device) < count
    by_block = torch.zeros(blocks, dtype=torch.int32, device=indices.device)
    by_block.scatter_add_(0, (indices // INDEX_BLOCK).clamp_(0, blocks - 1), valid.to(torch.int32))
    return [count.reshape(1).to(torch.int64), by_block, (indices % INDEX_BLOCK).to(torch.int16), values]


def quantized_parts(values: torch.Tensor, block: int) -> list[torch.Tensor]:
    """Parts of a gradient in signed bytes, rounded to nearest, with a scale per `block`; not finite if one is not."""
    numel = values.numel()
    padded = torch.nn.functional.pad(values.to(torch.float32), (0, -numel % block)).view(-1, block)
    scales = padded.abs().amax(dim=1) / 127
    steps = (padded / torch.where(scales > 0, scales, 1.0).unsqueeze(1)).round_().clamp_(-127, 127)
    return [steps.nan_to_num_(0.0).to(torch.int8).view(-1)[:numel].contiguous(), scales]


def decode(
    encoding: GradientEncoding,
    parts: Sequence[torch.Tensor],
    numel: int,
    dtype: torch.dtype,
    cut: tuple[int, int] | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """The gradient, one-dimensional, on `device`, or with its parts. Raises DamagedStateError: they are contradictory.

    `cut`: first element, and the one behind the last; None: all of it. The work is about that of these elements.
    """
    start, stop = (0, numel) if cut is None else cut
    device = parts[0].device if device is None else device
    match encoding.kind:
        case "sparse":
            return _from_sparse(parts, numel, dtype, (start, stop), device)
        case "quantized":
            block = encoding.entries
            first, last = start // block, -(-stop // block)
            steps, scales = parts[0][first * block : last * block].to(device), parts[1][first:last].to(device)
            padded = torch.nn.functional.pad(steps, (0, -steps.numel() % block)).view(-1, block)
            found = (padded.to(torch.float32) * scales.unsqueeze(1)).view(-1)
            return found[start - first * block : stop - first * block].to(dtype)
        case "half":
            return parts[0][start:stop].to(device).to(dtype)
        case "factors":
            left, right = (part.view(-1, encoding.entries) for part in parts)
            columns = max(1, right.shape[0])
            first, last = start // columns, -(-stop // columns)
            found = product(left[first:last].to(device), right.to(device)).view(-1)
            return found[start - first * columns : stop - first * columns].to(dtype)


def sample(
    encoding: GradientEncoding, parts: Sequence[torch.Tensor], numel: int, dtype: torch.dtype, turn: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A few elements of a gradient that tell whether it was changed, others in each turn: positions, and values.

    Of a sparse gradient it has entries, since a change by a factor leaves zeros as they are.
    """
    if encoding.kind != "sparse":
        start = turn * _STRIDE % numel
        stop = min(numel, start + _SAMPLED)
        return torch.arange(start, stop), decode(encoding, parts, numel, dtype, (start, stop))
    count, by_block, positions, values = int(parts[0]), *parts[1:]
    if not count:
        return torch.empty(0, dtype=torch.int64), values[:0].to(dtype)
    start, block, until = turn * _STRIDE % count, 0, count
    if by_block.numel() > 1:
        ends = by_block.cumsum(0)
        block = int(torch.searchsorted(ends, start, right=True))
        until = int(ends[block])
    stop = min(until, start + _SAMPLED)
    places = (positions[start:stop].to(torch.int64) & (INDEX_BLOCK - 1)) + block * INDEX_BLOCK
    return places, values[start:stop].to(dtype)


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product of two factors, ``left @ right.T``, one rank after the other.

    A matrix product's order of additions depends on the library, its threads and the device. These operations work on
    each element by itself and round each time, so that all devices get the same bits.
    """
    total = left[:, :1] * right[:, 0]
    for at in range(1, left.shape[1]):
        total += left[:, at : at + 1] * right[:, at]
    return total


def _from_sparse(
    parts: Sequence[torch.Tensor], numel: int, dtype: torch.dtype, cut: tuple[int, int], device: torch.device
) -> torch.Tensor:
    start, stop = cut
    count, by_block, positions, values = int(parts[0]), *parts[1:]
    counts = by_block.to(torch.int64)
    if not 0 <= count <= values.numel() or int(counts.sum()) != count or (counts.numel() and int(counts.amin()) < 0):
        raise DamagedStateError(f"a compressed gradient: expected {count} entries, found {int(counts.sum())}")
    # The blocks that the elements lie in, and their entries.
    first, last = start // INDEX_BLOCK, -(-stop // INDEX_BLOCK)
    before, until = int(counts[:first].sum()), int(counts[:last].sum())
    blocks = torch.arange(first, last, device=counts.device) * INDEX_BLOCK - start
    places = torch.repeat_interleave(blocks, counts[first:last], output_size=until - before)
    places += positions[before:until].to(torch.int64) & (INDEX_BLOCK - 1)
    if until > before and int(places.amax()) >= numel - start:
        raise DamagedStateError(
            f"a compressed gradient: expected positions below {numel}, found {int(places.amax()) + start}"
        )
    values = values[before:until].to(dtype)
    if last * INDEX_BLOCK > stop or first * INDEX_BLOCK < start:
        inside = (places >= 0) & (places < stop - start)
        places, values = places[inside], values[inside]
    dense = torch.zeros(stop - start, dtype=dtype, device=device)
    dense[places.to(device)] = values.to(device)
    return dense


def views(
    buffer: mmap.mmap | bytearray | memoryview, offset: int, encoding: GradientEncoding, numel: int, dtype: str
) -> list[torch.Tensor]:
    """Views of all parts of an encoded gradient that begins at byte `offset` of `buffer`."""
    found = []
    for part in encoded_parts(encoding, numel, dtype):
        name = dtype_of(part.dtype)
        found.append(
            torch.frombuffer(buffer, dtype=name, count=part.length, offset=offset + part.offset)
            if part.length
            else torch.empty(0, dtype=name)
        )
    return found


def fits(encoding: GradientEncoding, parts: Sequence[torch.Tensor], numel: int, dtype: torch.dtype) -> bool:
    """Whether parts have the lengths and dtypes of an encoding."""
    expected = encoded_parts(encoding, numel, dtype_name(dtype))
    found = [(one.numel(), dtype_name(one.dtype)) for one in parts]
    return found == [(part.length, part.dtype) for part in expected]
