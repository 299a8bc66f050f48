"""Settings of gradient compression: one dataclass for each compressor.

Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memckpt.errors import ConfigurationError

ResidualChoice = Literal["auto", "keep", "drop"]
HalfType = Literal["bf16", "fp16"]


def _require(condition: bool, name: str, expected: str, found: object) -> None:
    if not condition:
        raise ConfigurationError(f"compression.{name}: expected {expected}, found {found!r}")


def _require_whole(name: str, value: int, lowest: int, highest: int | None, expected: str) -> None:
    """Refuse what is no whole number within limits; True and False are none."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    fits = whole and lowest <= value and (highest is None or value <= highest)
    _require(fits, name, f"a whole number, {expected}", value)


def _require_seed(name: str, value: int) -> None:
    _require_whole(name, value, 0, (1 << 63) - 1, "0 to 2**63 - 1")


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """Averages gradients over all ranks in compressed form; use one of the subclasses."""


@dataclass(frozen=True, kw_only=True)
class LossyConfig(CompressionConfig):
    """Common settings of compressors that leave out parts of a gradient.

    Args:
        min_elements: parameters with fewer elements are averaged as they are, uncompressed.
        error_feedback: adds what compression left out of a gradient to the next one (Karimireddy et al., 2019).
            Without it, training converges worse.
        residual: what becomes of left-out parts at a resume. ``"keep"`` makes them a part of each record, 4 bytes per
            parameter and rank, so that a resume is exact; ``"drop"`` sets them to zero, and the report of the resume
            says that it is not exact; ``"auto"`` keeps them unless records go to peers or to a log in storage.
    """

    min_elements: int = 1024
    error_feedback: bool = True
    residual: ResidualChoice = "auto"

    def __post_init__(self) -> None:
        _require_whole("min_elements", self.min_elements, 1, None, "1 or more")
        _require(isinstance(self.error_feedback, bool), "error_feedback", "True or False", self.error_feedback)
        known = ("auto", "keep", "drop")
        _require(self.residual in known, "residual", "'auto', 'keep' or 'drop'", self.residual)
        kept = self.residual == "keep" and not self.error_feedback
        _require(not kept, "residual", "'auto' without error_feedback, as nothing is left out", self.residual)


@dataclass(frozen=True, kw_only=True)
class SparseConfig(LossyConfig):
    """Common settings of compressors that average a share of a gradient's elements.

    Args:
        ratio: share of a gradient's elements that each rank sends, more than 0 and less than 1.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = isinstance(self.ratio, (int, float)) and not isinstance(self.ratio, bool) and 0 < self.ratio < 1
        _require(fits, "ratio", "a number, more than 0, less than 1", self.ratio)


@dataclass(frozen=True, kw_only=True)
class TopK(SparseConfig):
    """The elements of each gradient that are largest in absolute value.

    Each rank sends its own choice, so that the average over N ranks has up to N times as many elements.
    """


@dataclass(frozen=True, kw_only=True)
class RandomK(SparseConfig):
    """Elements of each gradient that are drawn anew at each step, the same on all ranks.

    Args:
        seed: seed of the draws.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_seed("seed", self.seed)


@dataclass(frozen=True, kw_only=True)
class Quantized8(LossyConfig):
    """Each element as a signed byte, with a scale for each block of elements.

    Each rank sends a byte per element to each other rank: less than an uncompressed ring all-reduce up to 8 ranks.

    Args:
        block_elements: number of elements that share a scale.
    """

    block_elements: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_whole("block_elements", self.block_elements, 1, 1 << 20, "1 to 1048576")


@dataclass(frozen=True, kw_only=True)
class PowerSGD(LossyConfig):
    """The gradient as a product of two factors of low rank (Vogels et al., 2019, algorithm 1), with a warm start.

    Args:
        rank: number of columns of the factors.
        start_seed: seed of the factors at the start.
    """

    rank: int = 4
    start_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_whole("rank", self.rank, 1, 1024, "1 to 1024")
        _require_seed("start_seed", self.start_seed)


@dataclass(frozen=True, kw_only=True)
class HalfPrecision(CompressionConfig):
    """Each element in 16 bits, averaged in that type, as torch's ``bf16_compress_hook`` and ``fp16_compress_hook`` do.

    There is no error feedback: what rounding leaves out is not known before the average.

    Args:
        dtype: type in which gradients are averaged.
    """

    dtype: HalfType = "bf16"

    def __post_init__(self) -> None:
        _require(self.dtype in ("bf16", "fp16"), "dtype", "'bf16' or 'fp16'", self.dtype)
