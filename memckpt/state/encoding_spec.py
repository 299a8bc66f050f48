"""Encodings of gradients in records: their parts, and the bytes that these take. Torch-free.

An encoded gradient is a sequence of one-dimensional parts, which lie one behind the other at multiples of
:data:`PART_ALIGN` bytes. Sizes depend on the encoding alone, not on the values, so that an accelerator makes all parts
without the host waiting for a count.

*sparse*: number of entries (int64), entries by block of 65,536 elements (int32), position of each entry in its block
(16 bits), values. Entries are ascending. Parts have room for :attr:`GradientEncoding.entries`; what is behind the
number of entries has no meaning.

*quantized*: a signed byte for each element, and a float32 scale for each block.

*half*: each element in 16 bits.

*factors*: two matrices, rows by rank and columns by rank, whose outer products add up to the gradient.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

PART_ALIGN = 8
#: Elements whose positions are told by 16 bits and the number of their block.
INDEX_BLOCK = 1 << 16

EncodingKind = Literal["sparse", "quantized", "half", "factors"]
#: Dtypes of gradients that are encoded, and of their values.
_VALUES = ("float64", "float32", "float16", "bfloat16")
_MOST_IN_BLOCK = 1 << 20
_ITEM_BYTES = {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class GradientEncoding(msgspec.Struct, frozen=True, array_like=True):
    """How a parameter's gradient lies in a record.

    Attributes:
        kind: sparse, quantized, half or factors.
        entries: sparse: the largest number of entries; quantized: elements that share a scale; factors: their rank.
        dtype: dtype of the values (sparse, half); that of the gradient where it is empty.
        rows: factors: rows of the matrix as which the gradient is taken.
    """

    kind: EncodingKind
    entries: int = 0
    dtype: str = ""
    rows: int = 0


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
        offset += -(-length * _ITEM_BYTES[name] // PART_ALIGN) * PART_ALIGN
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
    return last.offset + -(-last.length * _ITEM_BYTES[last.dtype] // PART_ALIGN) * PART_ALIGN
