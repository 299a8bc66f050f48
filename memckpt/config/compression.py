"""Settings of gradient compression: one dataclass for each compressor.

Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from memckpt.config.checks import Checked, Count, require

ResidualChoice = Literal["auto", "keep", "drop"]
HalfType = Literal["bf16", "fp16"]


Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


@dataclass(frozen=True, kw_only=True)
class CompressionConfig(Checked):
    """Averages gradients over all ranks in compressed form; use one of the subclasses."""

    part: ClassVar[str] = "compression."


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

    min_elements: Count = 1024
    error_feedback: bool = True
    residual: ResidualChoice = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        kept = self.residual == "keep" and not self.error_feedback
        expected = "'auto' without error_feedback, as nothing is left out"
        require(not kept, "compression.residual", expected, self.residual)


@dataclass(frozen=True, kw_only=True)
class SparseConfig(LossyConfig):
    """Common settings of compressors that average a share of a gradient's elements.

    Args:
        ratio: share of a gradient's elements that each rank sends, more than 0 and less than 1.
    """

    ratio: Annotated[float, Meta(gt=0, lt=1)] = 0.01


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

    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class Quantized8(LossyConfig):
    """Each element as a signed byte, with a scale for each block of elements.

    Each rank sends a byte per element to each other rank: less than an uncompressed ring all-reduce up to 8 ranks.

    Args:
        block_elements: number of elements that share a scale.
    """

    block_elements: Annotated[int, Meta(ge=1, le=1 << 20)] = 256


@dataclass(frozen=True, kw_only=True)
class PowerSGD(LossyConfig):
    """The gradient as a product of two factors of low rank (Vogels et al., 2019, algorithm 1), with a warm start.

    Args:
        rank: number of columns of the factors.
        start_seed: seed of the factors at the start.
    """

    rank: Annotated[int, Meta(ge=1, le=1024)] = 4
    start_seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class HalfPrecision(CompressionConfig):
    """Each element in 16 bits, averaged in that type, as torch's ``bf16_compress_hook`` and ``fp16_compress_hook`` do.

    There is no error feedback: what rounding leaves out is not known before the average.

    Args:
        dtype: type in which gradients are averaged.
    """

    dtype: HalfType = "bf16"
