"""Settings of compressors: by that key alone, from each source, and refused by name where they cannot be."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
import yaml

from memckpt.config import (
    CompressionConfig,
    HalfPrecision,
    LossyConfig,
    MemckptConfig,
    PowerSGD,
    Quantized8,
    RandomK,
    SparseConfig,
    TopK,
)
from memckpt.config.arguments import config_from_environment
from memckpt.config.settings import from_mapping, to_mapping
from memckpt.errors import ConfigurationError
from tests.support.trainings.flags import parse

#: A compressor with other values than the defaults, as a file has it.
WRITTEN: list[tuple[str, CompressionConfig]] = [
    ("{kind: topk, ratio: 0.02}", TopK(ratio=0.02)),
    ("{kind: randomk, ratio: 0.1, seed: 7}", RandomK(ratio=0.1, seed=7)),
    ("{kind: quantized8, block_elements: 64, residual: drop}", Quantized8(block_elements=64, residual="drop")),
    ("{kind: powersgd, rank: 2, min_elements: 16}", PowerSGD(rank=2, min_elements=16)),
    ("{kind: halfprecision, dtype: fp16}", HalfPrecision(dtype="fp16")),
    ("{kind: topk}", TopK()),
]


@pytest.mark.parametrize(("text", "compression"), WRITTEN)
def test_by_that_key_alone(text: str, compression: Any) -> None:
    """In a file, in the environment and on a command line; and back into a file."""
    config = MemckptConfig(compression=compression)
    assert from_mapping({"compression": yaml.safe_load(text)}) == config
    assert from_mapping(yaml.safe_load(yaml.safe_dump(to_mapping(config)))) == config
    kind, *fields = text.strip("{}").split(", ")
    variables = {"MEMCKPT_COMPRESSION": kind.removeprefix("kind: ")}
    options = ["--memckpt-compression", kind.removeprefix("kind: ")]
    for name, value in (field.split(": ") for field in fields):
        variables[f"MEMCKPT_COMPRESSION_{name.upper()}"] = value
        options += ["--memckpt-compression-" + name.replace("_", "-"), value]
    assert config_from_environment(variables) == config
    assert parse("--run-dir", "x", *options).config == config


WHOLE: list[tuple[type, str, int | None]] = [
    (TopK, "min_elements", None),
    (RandomK, "seed", 1 << 63),
    (Quantized8, "block_elements", (1 << 20) + 1),
    (PowerSGD, "rank", 1025),
    (PowerSGD, "start_seed", 1 << 63),
]


@pytest.mark.parametrize(("kind", "name", "too_large"), WHOLE, ids=lambda value: str(value))
def test_a_number_that_cannot_be_is_named(kind: type, name: str, too_large: int | None) -> None:
    least = 0 if "seed" in name else 1
    assert getattr(kind(**{name: least}), name) == least
    for wrong in (least - 1, "4", 2.0, math.nan, True, None, *([] if too_large is None else [too_large])):
        with pytest.raises(ConfigurationError) as raised:
            kind(**{name: wrong})
        expected = f"compression.{name}: expected a whole number, {least} "
        assert str(raised.value).startswith(expected)
        assert str(raised.value).endswith(f", found {wrong!r}")


@pytest.mark.parametrize("kind", [TopK, RandomK])
@pytest.mark.parametrize("wrong", [0, 1, 1.0, -0.1, 2, math.nan, math.inf, "0.1", True, None, 0.5j], ids=repr)
def test_a_ratio_that_cannot_be_is_named(kind: Any, wrong: Any) -> None:
    expected = f"compression.ratio: expected a number, more than 0, less than 1, found {wrong!r}"
    with pytest.raises(ConfigurationError, match=f"^{re.escape(expected)}$"):
        kind(ratio=wrong)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HalfPrecision(dtype="float16"), "compression.dtype: expected 'bf16' or 'fp16', found 'float16'"),  # type: ignore[arg-type]
        (
            lambda: TopK(residual="forget"),  # type: ignore[arg-type]
            "compression.residual: expected 'auto', 'keep' or 'drop', found 'forget'",
        ),
        (lambda: TopK(error_feedback=1), "compression.error_feedback: expected True or False, found 1"),  # type: ignore[arg-type]
        (lambda: MemckptConfig(compression="topk"), "such as TopK(), or None, found 'topk'"),  # type: ignore[arg-type]
        (lambda: MemckptConfig(compression=TopK), "such as TopK(), or None, found <class "),  # type: ignore[arg-type]
        (lambda: MemckptConfig(compression=LossyConfig()), "such as TopK(), or None, found LossyConfig("),  # type: ignore[arg-type]
        (lambda: MemckptConfig(compression=TopK(), redo="snapshot"), "expected None with redo='snapshot', found TopK("),
        (lambda: MemckptConfig(compression=TopK(), tap="step"), "tap: expected 'auto' with compression, found 'step'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        make()


def test_every_compressor_is_a_variant_of_the_setting() -> None:
    """So that none is left out of files, variables, options, Hydra and the tests above."""
    kinds: list[type] = [CompressionConfig]
    for kind in kinds:
        kinds += kind.__subclasses__()
    written = {type(compression) for _, compression in WRITTEN}
    assert set(kinds) == written | {CompressionConfig, LossyConfig, SparseConfig}
    assert all(dataclasses.is_dataclass(kind) for kind in kinds)
