"""Safe codec for rank states: plain trees, tensors and arrays; decoding never runs code.

A tree is msgpack in which every value without a msgpack type is a tagged list. Tensors and arrays are encoded as
(dtype, shape, bytes), tensors with their strides where these are not the usual ones, and decoded into fresh memory.
Torch and numpy are looked up only for values of theirs, so that a process without torch can use the rest.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from enum import Enum
from math import prod
from pathlib import PurePath
from typing import Any, TypeAlias

import msgspec

from memckpt.errors import DamagedStateError, UnsupportedStateError

# Tags are extension codes of the first element in a tagged list: ["\x00tag", ...]. A user's own list that begins
# with such a string is escaped with the "list" tag.
_MARK = "\x00"

#: Starts a copy of a tensor from a device, and returns the host tensor before the copy has arrived.
Fetch = Callable[[Any], Any]


#: The device that this process trains on; None in a process that trains nothing.
_own_device: Any = None


def use_device(device: Any) -> None:
    """Name the device that this process trains on, of which each process has one.

    Its tensors are encoded without its index, and decoded onto the device of the process that reads them: a rank may
    come back on another card. In a process that has none, as in an agent, they stay on the CPU.
    """
    global _own_device
    _own_device = device


def own_device() -> Any:
    """The device that this process trains on; None in a process that trains nothing."""
    return _own_device


def _role_of(device: Any) -> str:
    return device.type if _own_device is None or device.type == "cpu" or device == _own_device else str(device)


def on_host(tensor: Any) -> bool:
    """Whether a tensor can be read without waiting for a device."""
    return bool(tensor.device.type == "cpu")


class _Later:
    """Placeholder in a packed tree for a value whose copy has not arrived yet."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = read


def _read_later(value: Any) -> Any:
    if isinstance(value, _Later):
        return value.read()
    raise TypeError(f"{type(value).__qualname__} was not packed")


class OnDevice:
    """A number in a tensor on a device; encoded as its value at the time of packing. `kind`: ``float`` or ``int``."""

    def __init__(self, tensor: Any, kind: type[float] | type[int]) -> None:
        self._tensor = tensor
        self._kind = kind

    def fetch(self, fetch: Fetch) -> None:
        """Start a copy of the number; later changes on the device do not affect it."""
        self._tensor = fetch(self._tensor)

    def __float__(self) -> float:
        return float(self._tensor.item())

    def read(self) -> float | int:
        """The number. After :meth:`fetch`, call only once the copy has arrived."""
        return self._kind(self._tensor.item())


_encoder = msgspec.msgpack.Encoder(enc_hook=_read_later)
_decoder = msgspec.msgpack.Decoder()

_INT_RANGE = range(-(2**63), 2**64)
#: Types that msgpack takes directly. Every commit encodes hundreds of such values: they skip a call.
_PLAIN = frozenset({type(None), bool, float, str, bytes})
_STRINGS = frozenset({str})


def encode(value: Any) -> bytes:
    """Encode a tree of plain values, tensors and arrays; shares no memory with them. Raises UnsupportedStateError."""
    return _encoder.encode(_Packer().pack(value))


class Packed:
    """A packed tree, fixed from now on, of which some values may be in flight from a device.

    `token` is called once the tree is packed; it returns a function that waits until all fetched values have arrived.
    Raises UnsupportedStateError.
    """

    def __init__(self, value: Any, fetch: Fetch, token: Callable[[], Callable[[], None]]) -> None:
        packer = _Packer(fetch)
        self._tree = packer.pack(value)
        self._arrived: Callable[[], None] = token() if packer.fetched else lambda: None
        self._encoded: bytes | None = None

    def joined(self, other: Packed) -> Packed:
        """The union of two mappings with strings as keys."""
        both = Packed.__new__(Packed)
        both._tree = {**self._tree, **other._tree}

        def arrived() -> None:
            self._arrived()
            other._arrived()

        both._arrived = arrived
        both._encoded = None
        return both

    def encode(self) -> bytes:
        """Wait for values in flight, and encode the tree. Thread-safe; may be called repeatedly."""
        if self._encoded is None:
            self._arrived()
            self._encoded = _encoder.encode(self._tree)
        return self._encoded


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Decode the result of :func:`encode`. Raises DamagedStateError: the bytes are not a complete encoding."""
    try:
        return _unpack(_decoder.decode(data))
    except DamagedStateError:
        raise
    except (
        msgspec.DecodeError,
        LookupError,
        ValueError,
        TypeError,
        ArithmeticError,
        RuntimeError,
        MemoryError,
    ) as error:
        raise DamagedStateError(f"rank state of {len(data)} bytes cannot be decoded: {error}") from error


def keeps_default(value: defaultdict[Any, Any]) -> bool:
    """Whether it is decoded as one that makes the same; any other is decoded as a plain dict."""
    return value.default_factory is None or value.default_factory in _FACTORIES.values()


def unencodable_paths(value: Any) -> list[str]:
    """Paths, with types, of all values that a rank state cannot carry; empty if there are none."""
    found: list[str] = []

    def refuse(path: str, type_name: str) -> None:
        found.append(f"{path} ({type_name})")

    _Packer(refuse=refuse).pack(value)
    return found


def _refuse(path: str, type_name: str) -> None:
    raise UnsupportedStateError(path, type_name)


#: Place of a value: the path to what holds it, and its key there. Few paths are ever put into words.
_Path: TypeAlias = "tuple[_Path, object] | tuple[()]"


def _in_words(path: _Path) -> str:
    if not path:
        return ""
    outer = _in_words(path[0])
    return f"{outer}.{path[1]}" if outer else str(path[1])


class _Packer:
    """Replaces values without a msgpack type by tagged lists; without `fetch` it waits for copies from devices.

    `refuse` is called with path and type of a value that cannot be encoded. `fetched`: whether a copy has been started.
    """

    def __init__(self, fetch: Fetch | None = None, refuse: Callable[[str, str], None] = _refuse) -> None:
        self._fetch = fetch
        self._refuse = refuse
        self.fetched = False

    def pack(self, value: Any, path: _Path = ()) -> Any:
        """The tree of a value found at `path`."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if value in _INT_RANGE else [_MARK + "int", str(value)]
        if kind is list:
            packed = self._items(value, path)
            if packed and isinstance(packed[0], str) and packed[0].startswith(_MARK):
                return [_MARK + "list", *packed]
            return packed
        if kind is dict:
            if _STRINGS.issuperset(map(type, value)):
                if _PLAIN.issuperset(map(type, value.values())):
                    return value.copy()
                return {
                    key: item if type(item) in _PLAIN else self.pack(item, (path, key)) for key, item in value.items()
                }
            return [_MARK + "dict", *self._mapping(value, path)]
        if kind is tuple:
            return [_MARK + "tuple", *self._items(value, path)]
        return self._rare(value, path)

    def _items(self, values: Collection[Any], path: _Path) -> list[Any]:
        if _PLAIN.issuperset(map(type, values)):
            return list(values)
        return [item if type(item) in _PLAIN else self.pack(item, (path, index)) for index, item in enumerate(values)]

    def _mapping(self, value: Any, path: _Path) -> list[Any]:
        packed: list[Any] = []
        for key, item in value.items():
            packed.append(self.pack(key, (path, f"key {key!r}")))
            packed.append(self.pack(item, (path, key)))
        return packed

    def _rare(self, value: Any, path: _Path) -> Any:
        if isinstance(value, OrderedDict):
            return [_MARK + "odict", *self._mapping(value, path)]
        if type(value) is Counter:
            return [_MARK + "counter", *self._mapping(value, path)]
        if type(value) is defaultdict and keeps_default(value):
            made = "" if value.default_factory is None else value.default_factory.__name__
            return [_MARK + "defaultdict", made, *self._mapping(value, path)]
        if isinstance(value, dict):
            # Other subclasses of dict are decoded as plain dicts: any further state of theirs is unknown.
            return [_MARK + "dict", *self._mapping(value, path)]
        if isinstance(value, (set, frozenset)):
            tag = "set" if isinstance(value, set) else "frozenset"
            # In which order a set is iterated depends on its history: equal ones are encoded alike.
            return [_MARK + tag, *sorted((self.pack(item, (path, item)) for item in value), key=repr)]
        if isinstance(value, deque):
            return [_MARK + "deque", value.maxlen, *self._items(value, path)]
        if isinstance(value, complex):
            return [_MARK + "complex", value.real, value.imag]
        if isinstance(value, bytearray):
            return [_MARK + "bytearray", bytes(value)]
        if isinstance(value, array):
            return [_MARK + "array", value.typecode, value.tobytes()]
        if isinstance(value, PurePath):
            return str(value)
        if isinstance(value, OnDevice):
            if self._fetch is None:
                return value.read()
            self.fetched = True
            value.fetch(self._fetch)
            return _Later(value.read)
        torch = sys.modules.get("torch")
        if torch is not None:
            if isinstance(value, torch.Tensor):
                return self._tensor(torch, value, path)
            if isinstance(value, torch.Size):
                return [_MARK + "size", *value]
            if isinstance(value, torch.dtype):
                return [_MARK + "dtype", str(value).removeprefix("torch.")]
            if isinstance(value, torch.device):
                return [_MARK + "device", str(value)]
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.kind in "biufc":
            tag = "ndarray" if isinstance(value, numpy.ndarray) else "npscalar"
            return [_MARK + tag, value.dtype.str, list(value.shape), numpy.ascontiguousarray(value).tobytes()]
        # A subclass of str, int or float (a StrEnum member; numpy's float64 is handled above) is encoded as its plain
        # value, except true enums: their identity would be lost.
        if isinstance(value, (str, int, float)) and not isinstance(value, Enum):
            for plain in (str, int, float):
                if isinstance(value, plain):
                    return self.pack(plain(value), path)
        self._refuse(_in_words(path), f"{type(value).__module__}.{type(value).__qualname__}")
        return None

    def _tensor(self, torch: Any, value: Any, path: _Path) -> Any:
        mesh = sys.modules.get("torch.distributed.tensor")
        if mesh is not None and isinstance(value, mesh.DTensor):
            self._refuse(_in_words(path), "torch.distributed.tensor.DTensor")  # its mesh could not be rebuilt here
            return None
        if why := _why_no_bytes(torch, value):
            self._refuse(_in_words(path), f"torch.Tensor {why}")
            return None
        tensor = value.detach()
        name = str(tensor.dtype).removeprefix("torch.")
        data: Any
        if on_host(tensor) or self._fetch is None:
            data = _bytes_in(torch, tensor.to("cpu"))
        else:
            self.fetched = True
            host = self._fetch(tensor.contiguous())
            data = _Later(lambda: _bytes_in(torch, host))
        found = [_MARK + "tensor", name, list(tensor.shape), _role_of(tensor.device), data]
        # Products of matrices round by their layout.
        stride = list(tensor.stride())
        return [*found, stride] if not tensor.is_contiguous() and _fills(list(tensor.shape), stride) else found


def _why_no_bytes(torch: Any, tensor: Any) -> str:
    """What keeps a tensor's values from being bytes in one memory, in words; empty if nothing does."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "inside a torch.func transform"
    if tensor.is_nested or tensor.is_quantized:
        return "that is nested" if tensor.is_nested else "that is quantized"
    if tensor.layout != torch.strided:
        return f"with layout {tensor.layout}"
    if tensor.is_meta or torch.nn.parameter.is_lazy(tensor):
        return "without values"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"of class {type(tensor).__qualname__}"
    return "without memory" if tensor.numel() and not tensor.untyped_storage().nbytes() else ""


def _fills(shape: list[int], stride: list[int]) -> bool:
    """Whether these strides put a tensor's elements behind each other, in any order."""
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return last == prod(shape) - 1 and min(stride) > 0


def _bytes_in(torch: Any, tensor: Any) -> bytes:
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _unpack(value: Any) -> Any:
    if isinstance(value, dict):
        return {sys.intern(key): _unpack(item) for key, item in value.items()}
    if isinstance(value, str):
        return sys.intern(value)  # as names in code are: pickle shows which are one object
    if not isinstance(value, list):
        return value
    if not value or not isinstance(value[0], str) or not value[0].startswith(_MARK):
        return [_unpack(item) for item in value]
    tag = value[0][1:]
    unpack = _UNPACKERS.get(tag)
    if unpack is None:
        raise DamagedStateError(f"rank state has an unknown tag {tag!r}; it was written by a newer version")
    return unpack(value[1:])


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    unpacked = [_unpack(item) for item in items]
    return list(zip(unpacked[::2], unpacked[1::2], strict=True))


def _torch() -> Any:
    import torch

    return torch


def _unpack_tensor(items: list[Any]) -> Any:
    torch = _torch()
    name, shape, device, data, *strides = items
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not isinstance(device, str):
        raise DamagedStateError(f"rank state has a tensor of unknown dtype {name!r} or device {device!r}")
    _check_room(shape, dtype.itemsize, data)
    if not data:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    for stride in strides:
        if not isinstance(stride, list) or [*map(type, stride)] != [int] * len(shape) or not _fills(shape, stride):
            raise DamagedStateError(f"rank state has a tensor of the shape {shape!r} with the strides {stride!r}")
        tensor = torch.empty_strided(shape, stride, dtype=dtype).copy_(tensor)
    kind = None if _own_device is None or _own_device.type == "cpu" else _own_device.type
    if device == kind:
        return tensor.to(_own_device)
    # A tensor of an accelerator that this process lacks stays on the CPU; load_state_dict moves it.
    return tensor.to(device) if device.partition(":")[0] == kind else tensor


def _check_room(shape: Any, item_bytes: int, data: Any) -> None:
    """Check, before memory is allocated, that the shape is valid and the bytes fill it."""
    valid = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not valid or not isinstance(data, bytes) or prod(shape) * item_bytes != len(data):
        raise DamagedStateError(f"rank state has a tensor or array whose bytes do not fill its shape {shape!r}")


def _bytes_of(items: list[Any]) -> bytearray:
    if len(items) != 1 or not isinstance(items[0], bytes):
        raise DamagedStateError("rank state has an invalid bytearray")
    return bytearray(items[0])


def _unpack_array(items: list[Any]) -> Any:
    import numpy

    name, shape, data = items
    dtype = numpy.dtype(name)
    if dtype.kind not in "biufc":
        raise DamagedStateError(f"rank state has an array of dtype {name!r}")
    _check_room(shape, dtype.itemsize, data)
    return numpy.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _unpack_dtype(items: list[Any]) -> Any:
    torch = _torch()
    dtype = getattr(torch, items[0], None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedStateError(f"rank state has an unknown dtype {items[0]!r}")
    return dtype


def _unpack_typed_array(items: list[Any]) -> Any:
    typed = array(items[0])
    typed.frombytes(items[1])
    return typed


def _unpack_defaultdict(items: list[Any]) -> Any:
    return defaultdict(_FACTORIES[items[0]] if items[0] else None, _pairs(items[1:]))


#: Types whose empty values a defaultdict may give, by name.
_FACTORIES: dict[str, type[Any]] = {kind.__name__: kind for kind in (int, float, bool, str, list, tuple, dict, set)}
_UNPACKERS: dict[str, Callable[[list[Any]], Any]] = {
    "list": lambda items: [_unpack(item) for item in items],
    "tuple": lambda items: tuple(_unpack(item) for item in items),
    "dict": lambda items: dict(_pairs(items)),
    "odict": lambda items: OrderedDict(_pairs(items)),
    "counter": lambda items: Counter(dict(_pairs(items))),
    "defaultdict": _unpack_defaultdict,
    "set": lambda items: {_unpack(item) for item in items},
    "frozenset": lambda items: frozenset(_unpack(item) for item in items),
    "deque": lambda items: deque([_unpack(item) for item in items[1:]], maxlen=items[0]),
    "int": lambda items: int(items[0]),
    "complex": lambda items: complex(items[0], items[1]),
    "bytearray": _bytes_of,
    "array": _unpack_typed_array,
    "tensor": _unpack_tensor,
    "ndarray": _unpack_array,
    "npscalar": lambda items: _unpack_array(items)[()],
    "size": lambda items: _torch().Size(items),
    "dtype": _unpack_dtype,
    "device": lambda items: _torch().device(items[0]),
}
