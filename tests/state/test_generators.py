"""The states of random generators: captured as plain values, put back, refused when damaged."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from memckpt.state import codec, rng


@pytest.mark.promise("global generators of torch, numpy, Python; of the rank's own accelerator, on whichever card")
def test_generators_repeat_after_restore() -> None:
    def draw() -> list[float]:
        return [torch.rand(()).item(), random.random(), random.gauss(0, 1), float(np.random.randn())]

    for _ in range(4):
        state = codec.decode(codec.encode(rng.capture()))
        first = draw()
        rng.restore(state)
        assert rng.capture() == state
        with rng.preserved():
            assert draw() == first
        assert draw() == first


@pytest.mark.parametrize(("device", "is_carried"), [("cpu", True), ("cuda:1", True), ("xpu", True), ("mps", False)])
def test_a_device_whose_generator_is_not_carried_is_named(device: str, is_carried: bool) -> None:
    codec.use_device(torch.device(device))
    try:
        assert ("the generator of mps is not carried" in rng.why_not_carried()) != is_carried
        assert bool(rng.why_not_carried()) != is_carried
        assert rng.capture()["devices"] == {}
    finally:
        codec.use_device(None)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("torch", b"1", "torch RNG state of 5056 bytes, found 1"),
        ("torch", 1, "as bytes, found int"),
        ("python", {}, "version, words and gauss"),
        ("python", {"version": 3, "words": b"", "gauss": None}, "2500 bytes, found 0 bytes"),
        ("numpy", {"name": "PCG64"}, "of an MT19937, found 'PCG64'"),
        ("devices", {"cuda:99": b""}, "found one of cuda:99"),
    ],
)
def test_a_damaged_state_changes_nothing(key: str, value: Any, message: str) -> None:
    state = rng.capture()
    with pytest.raises(ValueError, match=message):
        rng.restore({**state, key: value})
    assert rng.capture() == state


@pytest.mark.parametrize("seed", [5, None, [1, 2, 3], np.random.SeedSequence(3).spawn(2)[1]])
def test_a_generator_spawns_the_same_children_after_restore(seed: Any) -> None:
    def draw(generator: Any) -> list[float]:
        return [*(each.random() for each in generator.spawn(2)), generator.random()]

    generator = np.random.default_rng(seed)
    generator.spawn(3)
    state = codec.decode(codec.encode(rng.capture_generator(generator)))
    drawn = draw(generator)
    for each in (generator, np.random.default_rng(seed), rng.make_generator(state)):
        rng.restore_generator(each, state)
        assert draw(each) == drawn


@pytest.mark.parametrize(
    "generator",
    [
        torch.Generator(),
        random.Random(1),
        np.random.default_rng(1),
        np.random.RandomState(1),
        np.random.Generator(np.random.Philox(1)),
    ],
    ids=lambda generator: type(generator).__name__,
)
def test_a_users_generator_repeats_after_restore(generator: Any) -> None:
    def draw(generator: Any) -> float:
        if isinstance(generator, torch.Generator):
            return torch.rand((), generator=generator).item()
        return float(generator.random() if hasattr(generator, "random") else generator.rand())

    state = codec.decode(codec.encode(rng.capture_generator(generator)))
    first = draw(generator)
    rng.restore_generator(generator, state)
    made = rng.make_generator(state)
    assert type(made) is type(generator)
    assert draw(made) == draw(generator) == first
    with pytest.raises(ValueError, match="expected the state of a"):
        rng.restore_generator(generator, {"kind": "other", "data": None})
    for damaged in ({"kind": "other"}, {"kind": "numpy.Generator", "data": {"bit_generator": "eval"}}, None):
        with pytest.raises(ValueError, match="expected"):
            rng.make_generator(damaged)  # type: ignore[arg-type]  # what a file might hold
