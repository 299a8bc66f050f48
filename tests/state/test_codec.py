"""The codec for rank states: everything it takes comes back, and damaged bytes never do harm."""

from __future__ import annotations

import contextlib
import enum
import math
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.errors import DamagedStateError, UnsupportedStateError
from memckpt.state import codec
from tests.support import odd_tensors

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["\x00tuple", "\x00", "\x00dict"])
    | st.binary(max_size=8)
)
keys = (
    st.text(max_size=4)
    | st.integers(-(2**70), 2**70)
    | st.booleans()
    | st.tuples(st.integers(0, 3), st.text(max_size=2))
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, inner, max_size=4).map(lambda items: Counter(items))
        | st.dictionaries(keys, inner, max_size=4).map(lambda items: defaultdict(list, items))
        | st.lists(inner, max_size=4).map(lambda items: deque(items, maxlen=7))
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
    ),
    max_leaves=20,
)


def alike(first: Any, second: Any) -> bool:
    """Equal in values, types and orders, all the way down."""
    if type(first) is not type(second):
        return False
    if isinstance(first, defaultdict) and first.default_factory is not second.default_factory:
        return False
    if isinstance(first, dict):
        pairs = zip(first.items(), second.items(), strict=False)
        return len(first) == len(second) and all(alike(a, c) and alike(b, d) for (a, b), (c, d) in pairs)
    if isinstance(first, (list, tuple, deque)):
        return len(first) == len(second) and all(map(alike, first, second))
    if isinstance(first, float):
        return first.hex() == second.hex()
    return bool(first == second)


@given(trees)
@settings(max_examples=60, deadline=None)
def test_trees_come_back_as_they_were(tree: Any) -> None:
    assert alike(codec.decode(codec.encode(tree)), tree)
    assert codec.unencodable_paths(tree) == []


@pytest.mark.promise("decoding never runs code, and damaged bytes are noticed")
@given(trees, st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_bytes_raise_nothing_but_a_damaged_state_error(tree: Any, data: Any) -> None:
    encoded = bytearray(codec.encode({"tree": tree, "tensor": torch.arange(3.0), "array": np.arange(3)}))
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    damaged = encoded[: data.draw(st.integers(0, len(encoded)))]
    with contextlib.suppress(DamagedStateError):
        codec.decode(bytes(damaged))


@pytest.mark.promise("decoding never runs code, and damaged bytes are noticed")
@given(st.binary(max_size=64))
@settings(max_examples=150, deadline=None)
def test_any_bytes_raise_nothing_but_a_damaged_state_error(data: bytes) -> None:
    with contextlib.suppress(DamagedStateError):
        codec.decode(data)


@pytest.mark.parametrize(
    "tagged",
    [
        ["\x00tensor"],
        ["\x00tensor", "float32", [2], "cpu", b"123"],
        ["\x00tensor", "float32", [-1], "cpu", b""],
        ["\x00tensor", "float32", [2, "x"], "cpu", b"12345678"],
        ["\x00tensor", "nn", [1], "cpu", b"1234"],
        ["\x00tensor", "float32", [1], 7, b"1234"],
        ["\x00tensor", "float32", [10**18], "cpu", b""],
        ["\x00ndarray", "O", [1], b"12345678"],
        ["\x00ndarray", "<f8", [3], b"12345678"],
        ["\x00ndarray", "<f8", None, b"12345678"],
        ["\x00ndarray", 5, [1], b"12345678"],
        ["\x00npscalar", "<f8", [2], b"12345678"],
        ["\x00array", "Q", b"123"],
        ["\x00array", "?", b"123"],
        ["\x00dict", 1],
        ["\x00dict", [], 1],
        ["\x00set", []],
        ["\x00defaultdict"],
        ["\x00defaultdict", "eval"],
        ["\x00counter", []],
        ["\x00deque"],
        ["\x00deque", -3],
        ["\x00complex", "a", 1],
        ["\x00int", "9" * 5000],
        ["\x00int", None],
        ["\x00bytearray", 10**9],
        ["\x00size", "ab"],
        ["\x00dtype", "nn"],
        ["\x00device", "nowhere:3"],
        ["\x00device", 9],
        ["\x00from the future", 1],
    ],
    ids=repr,
)
def test_wrong_contents_of_a_tag_raise_a_damaged_state_error(tagged: list[Any]) -> None:
    with pytest.raises(DamagedStateError):
        codec.decode(msgspec.msgpack.encode(tagged))


def test_deep_nesting_is_refused_and_does_not_end_the_process() -> None:
    for depth in (300, 2_000, 200_000):
        with pytest.raises(DamagedStateError):
            codec.decode(b"\x91" * depth)
        nested = b"\x91" * depth + msgspec.msgpack.encode(1)
        try:
            codec.decode(nested)
        except DamagedStateError:
            continue


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)], ids=str)
def test_tensors_come_back_bit_for_bit_in_memory_of_their_own(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    found = codec.decode(codec.encode({"it": tensor}))["it"]
    assert (found.dtype, found.shape) == (dtype, shape)
    assert torch.equal(found, tensor)
    if tensor.numel():
        tensor.zero_()
        found.fill_(1)
        assert not torch.equal(found, tensor)


def test_special_floats_keep_their_bits() -> None:
    bits = torch.tensor([0x7FC00001, -1, -(2**31), 0x7F800000], dtype=torch.int32)
    found = codec.decode(codec.encode(bits.view(torch.float32)))
    assert torch.equal(found.view(torch.int32), bits)
    assert math.isnan(codec.decode(codec.encode(math.nan)))
    assert math.copysign(1, codec.decode(codec.encode(-0.0))) == -1


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.arange(12).reshape(3, 4).t(), True),
        (torch.linalg.eigh(torch.rand(5, 5) + torch.eye(5)).eigenvectors, True),
        (torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.arange(10)[::3], False),
        (torch.tensor(1.0).expand(3, 3), False),
        (torch.nn.Parameter(torch.ones(2)), True),
    ],
    ids=["transposed", "column major", "channels last", "strided", "expanded", "parameter"],
)
def test_tensors_keep_their_values_and_strides_where_these_fill_memory(tensor: torch.Tensor, dense: bool) -> None:
    """Products of matrices round by their strides."""
    back = codec.decode(codec.encode([tensor]))[0]
    assert torch.equal(back, tensor.detach())
    assert not dense or back.stride() == tensor.stride()


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(3.5),
        np.array([], dtype=np.complex64),
        np.array([True, False]),
    ],
    ids=str,
)
def test_arrays_come_back(value: np.ndarray[Any, Any]) -> None:
    found = codec.decode(codec.encode([value]))[0]
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert np.array_equal(found, value)
    assert found.flags.writeable


@pytest.mark.parametrize(
    "value",
    [
        complex(1.5, -0.0),
        bytearray(b"abc"),
        array("d", [1.0, 2.0]),
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cpu"),
        2**64,
        -(2**63) - 1,
        ["\x00tuple", 1],
        {1: "a", "1": "b", None: "c", (1, 2): "d"},
        {"": {}},
        (),
        deque([1, 2], maxlen=2),
    ],
    ids=repr,
)
def test_rarer_types_come_back(value: Any) -> None:
    found = codec.decode(codec.encode(value))
    assert type(found) is type(value)
    assert found == value
    if isinstance(value, deque):
        assert found.maxlen == value.maxlen


def test_numpy_scalars_come_back_with_their_type() -> None:
    for value in (np.float32(1.5), np.int8(-3), np.bool_(True), np.float64(0.1)):
        found = codec.decode(codec.encode(value))
        assert found == value
        assert isinstance(found, (type(value), type(value.item())))


def test_what_comes_back_as_a_plainer_type() -> None:
    assert codec.decode(codec.encode(defaultdict(lambda: 1, a=[1]))) == {"a": [1]}
    assert codec.decode(codec.encode(Path("a") / "b")) == "a/b"


class _Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "path", "type_name"),
    [
        ({"a": [1, {"b": object()}]}, "a.1.b", "builtins.object"),
        ({"loss": torch.nn.MSELoss()}, "loss", "torch.nn.modules.loss.MSELoss"),
        ({"color": _Color.RED}, "color", "_Color"),
        ({"f": len}, "f", "builtin_function_or_method"),
        ([np.array(["text"])], "0", "numpy.ndarray"),
        ({"s": torch.eye(3).to_sparse()}, "s", "torch.Tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_types_are_refused_with_their_path(value: Any, path: str, type_name: str) -> None:
    with pytest.raises(UnsupportedStateError) as caught:
        codec.encode(value)
    assert caught.value.path == path
    assert type_name in caught.value.type_name
    (found,) = codec.unencodable_paths(value)
    assert found.startswith(path)


@pytest.mark.parametrize("name", odd_tensors.NOT_STORED)
def test_tensors_that_are_no_bytes_in_one_memory_are_refused(name: str) -> None:
    value = {"kept": odd_tensors.NOT_STORED[name]()}
    with pytest.raises(UnsupportedStateError) as caught:
        codec.encode(value)
    assert caught.value.path == "kept"
    assert codec.unencodable_paths(value)


@pytest.mark.parametrize("name", odd_tensors.STORED)
def test_tensors_in_odd_states_are_stored(name: str) -> None:
    tensor = odd_tensors.STORED[name]()
    assert codec.unencodable_paths({"kept": tensor}) == []
    assert torch.equal(codec.decode(codec.encode({"kept": tensor}))["kept"].cfloat(), tensor.detach().cfloat())


def test_a_shard_is_refused_by_its_type() -> None:
    """It would come back as a plain tensor of its global shape, or of that of a shard."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    shard = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)
    assert codec.unencodable_paths({"average": shard}) == ["average (torch.distributed.tensor.DTensor)"]
    with pytest.raises(UnsupportedStateError, match=r"average .*DTensor"):
        codec.encode({"average": shard})
