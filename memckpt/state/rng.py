"""States of random number generators, as plain values for a safe codec.

No function here draws a number, initialises a device, or touches one that is neither the current one nor this
process's own, unless it says so.
All functions act on the calling process and take no locks: a thread that draws at the same time makes the result
meaningless, as it makes the training itself unrepeatable.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch

from memckpt.state import codec

RngState: TypeAlias = "dict[str, Any]"
"""Result of `capture`: ``{"torch": bytes, "python": dict, "numpy": dict, "devices": {name: bytes}}``.

The generator of this process's own device goes by its type (``cuda``), on whichever card the process comes back; that
of another device by its index, too (``cuda:1``).

Holds only dict, str, int, float, bytes and None. Never changed in place, so records may share it without a copy.
"""

AnyGenerator: TypeAlias = "torch.Generator | random.Random | np.random.Generator | np.random.RandomState"
"""A generator object that the user owns, as opposed to the global ones."""

_KINDS: dict[type[Any], str] = {
    torch.Generator: "torch",
    random.Random: "python",
    np.random.Generator: "numpy.Generator",
    np.random.RandomState: "numpy.RandomState",
}
GENERATOR_TYPES = tuple(_KINDS)

_BIT_GENERATORS: dict[str, Any] = {
    each.__name__: each
    for each in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
}
_STATE_KEYS = frozenset({"torch", "python", "numpy", "devices"})
_PYTHON_WORDS_BYTES = 625 * array("I").itemsize
_MT19937_KEY_BYTES = 624 * 4
_LARGEST_PLAIN_INT = 2**63

_numpy_random: Any = np.random  # numpy's stub lacks the documented get_bit_generator


def _accelerator() -> tuple[Any, torch.device]:
    """Torch's module of the devices that have generators here (None: there are none), and this process's own device.

    The own device is the session's; else it has no index.
    """
    own = codec.own_device()
    if own is None or own.type == "cpu":
        try:
            own = torch.accelerator.current_accelerator()
        except RuntimeError:  # torch 2.6 raises it where there is none
            own = None
    if own is None or not hasattr(module := torch.get_device_module(own), "is_initialized"):
        return None, torch.device("cpu")
    return module, own


def _devices() -> dict[str, torch.device]:
    """The devices whose generators are captured, by role: this process's own one, and the current one.

    There are none before devices are initialised. Without a session the current device is the own one.
    """
    module, own = _accelerator()
    if module is None or not module.is_initialized():
        return {}
    current = torch.device(own.type, module.current_device())
    return {own.type: own} if own in (current, torch.device(own.type)) else {own.type: own, str(current): current}


def device_generators() -> tuple[torch.Generator, ...]:
    """The global generators of devices, where torch has objects for them."""
    return tuple(getattr(_accelerator()[0], "default_generators", ()))


def why_not_carried() -> str:
    """Why states lack the generator of this process's own device, in words; empty if they have it, as a CPU's do."""
    own = codec.own_device()
    if own is None or own.type == "cpu" or _accelerator()[0] is not None:
        return ""
    return (
        f"the generator of {own.type} is not carried, as torch.{own.type} has no is_initialized(); draw random numbers "
        "on the CPU"
    )


def capture() -> RngState:
    """The states of the global generators of torch (CPU), Python and numpy, and of initialised devices in use."""
    module, _ = _accelerator()
    return {
        "torch": _tensor_bytes(torch.default_generator.get_state()),
        "python": _capture_python(random.getstate()),
        "numpy": _capture_global_numpy(),
        "devices": {name: _tensor_bytes(module.get_rng_state(device)) for name, device in _devices().items()},
    }


def restore(state: RngState) -> None:
    """Set the global generators to `state`; that of a device takes effect when the device is initialised.

    Raises ValueError: `state` did not come from `capture`, or it belongs to a device that this machine lacks. All that
    can be checked is checked before the first generator is changed.
    """
    if not isinstance(state, dict) or not _STATE_KEYS.issubset(state):
        found = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"expected an RNG state with the keys {sorted(_STATE_KEYS)}, found {found}")
    torch_state = _bytes_tensor(state["torch"], "torch")
    expected = torch.default_generator.get_state().numel()
    if torch_state.numel() != expected:
        raise ValueError(f"expected a torch RNG state of {expected} bytes, found {torch_state.numel()}")
    python_state = _python_state(state["python"])
    numpy_state = _numpy_state(state["numpy"])
    device_states = _device_states(state["devices"])
    torch.default_generator.set_state(torch_state)
    random.setstate(python_state)
    try:
        np.random.set_state(numpy_state)
    except (TypeError, KeyError, ValueError) as error:
        live = type(_numpy_random.get_bit_generator()).__name__
        raise ValueError(f"expected a state of the global numpy generator ({live}), found another: {error}") from error
    for device, device_state in device_states:
        _accelerator()[0].set_rng_state(device_state, device)


def library_states(state: RngState) -> dict[str, Any]:
    """A captured state as Python, numpy and torch take it in their functions that set it. Raises ValueError.

    ``device`` is that of the rank's own device; None: it had none.
    """
    name, key, *rest = _numpy_state(state["numpy"])
    return {
        "python": _python_state(state["python"]),
        "numpy": (name, np.array(key), *rest),
        "torch": _bytes_tensor(state["torch"], "torch"),
        "device": next((_bytes_tensor(own, name) for name, own in state["devices"].items() if ":" not in name), None),
    }


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the global generators, on leaving the block, to their states on entering it."""
    state = capture()
    try:
        yield
    finally:
        restore(state)


@contextmanager
def other_streams() -> Iterator[None]:
    """Make the global generators draw other numbers inside the block; restore them after it.

    ``torch.manual_seed`` would also seed devices that are not captured here, and those that are not initialised yet.
    """
    with preserved():
        seed = int(torch.randint(2**31, ()).item())
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        for device in _devices().values():
            _accelerator()[0].set_rng_state(torch.Generator(device).manual_seed(seed).get_state(), device)
        yield


def capture_generator(generator: AnyGenerator) -> dict[str, Any]:
    """The state of a user's generator object, as plain values. Raises ValueError: it has none, or an unknown type."""
    if isinstance(generator, torch.Generator):
        return {"kind": "torch", "data": _tensor_bytes(generator.get_state())}
    if isinstance(generator, random.Random):
        try:
            return {"kind": "python", "data": _capture_python(generator.getstate())}
        except NotImplementedError:  # random.SystemRandom has no state
            raise ValueError(
                f"expected a generator with a state, found {type(generator).__name__}, which draws from the "
                "operating system and cannot be repeated; use random.Random(seed) instead"
            ) from None
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return {"kind": "numpy.Generator", "data": _encode(dict(bits.state)), "seeds": _encode(_seeds_of(bits))}
    if isinstance(generator, np.random.RandomState):
        return {"kind": "numpy.RandomState", "data": _encode(generator.get_state(legacy=False))}
    raise ValueError(f"expected one of {[kind.__name__ for kind in GENERATOR_TYPES]}, found {type(generator).__name__}")


def restore_generator(generator: AnyGenerator, state: dict[str, Any]) -> None:
    """Set a generator to a state of :func:`capture_generator`. Raises ValueError: it is of another kind, or damaged."""
    found = state.get("kind") if isinstance(state, dict) else type(state).__name__
    expected = next(name for kind, name in _KINDS.items() if isinstance(generator, kind))
    if found != expected:
        raise ValueError(f"expected the state of a {expected} generator, found {found!r}")
    data = state["data"]
    try:
        if isinstance(generator, torch.Generator):
            generator.set_state(_bytes_tensor(data, "torch.Generator"))
        elif isinstance(generator, random.Random):
            generator.setstate(_python_state(data))
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = _decode(data)
            _set_seeds(generator.bit_generator, _decode(state["seeds"]))
        else:
            generator.set_state(_decode(data))
    except (TypeError, KeyError, RuntimeError) as error:
        raise ValueError(f"expected the state of this {expected} generator, found a damaged one: {error}") from error


def make_generator(state: dict[str, Any]) -> AnyGenerator:
    """A new generator with a state of :func:`capture_generator`. Raises ValueError: it is unknown, or damaged."""
    kind = state.get("kind") if isinstance(state, dict) else type(state).__name__
    generator: AnyGenerator
    match kind:
        case "torch":
            generator = torch.Generator("cpu")
        case "python":
            generator = random.Random(0)
        case "numpy.RandomState":
            generator = np.random.RandomState(0)
        case "numpy.Generator":
            name = state["data"].get("bit_generator") if isinstance(state.get("data"), dict) else None
            if name not in _BIT_GENERATORS:
                raise ValueError(f"expected one of {sorted(_BIT_GENERATORS)}, found {name!r}")
            generator = np.random.Generator(_BIT_GENERATORS[name](0))
        case _:
            raise ValueError(f"expected the state of a generator, found one of {kind!r}")
    restore_generator(generator, state)
    return generator


def _seeds_of(bits: np.random.BitGenerator) -> dict[str, Any]:
    """What ``spawn()`` makes the next child of; empty where there is nothing."""
    seeds = bits.seed_seq
    if not isinstance(seeds, np.random.SeedSequence):
        return {}
    entropy = () if seeds.entropy is None else np.ravel(np.asarray(seeds.entropy, dtype=object))
    words = [hex(one) for one in entropy]
    return {**seeds.state, "entropy": words, "spawn_key": [hex(one) for one in seeds.spawn_key]}


def _set_seeds(bits: np.random.BitGenerator, seeds: dict[str, Any]) -> None:
    found = _seeds_of(bits)
    if not seeds or found == seeds:
        return
    children = seeds["n_children_spawned"] - found.get("n_children_spawned", 0)
    if children > 0 and all(found.get(name) == seeds[name] for name in seeds.keys() - {"n_children_spawned"}):
        live: Any = bits.seed_seq  # numpy's stubs have the interface only
        live.spawn(children)
    elif isinstance(bits.__reduce__()[2], tuple):  # from numpy 2 on
        entropy, key = ([int(one, 16) for one in seeds[name]] for name in ("entropy", "spawn_key"))
        own = {"spawn_key": tuple(key), "entropy": entropy[0] if len(entropy) == 1 else entropy}
        restore: Any = bits  # numpy's stubs lack what pickle calls
        restore.__setstate__((bits.state, np.random.SeedSequence(**{**seeds, **own})))


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def diverge(salt: int) -> None:
    """Move every generator to another stream, derived from its state and `salt`: for a rank that is new."""
    seed = int(torch.randint(2**31, ()).item()) ^ (salt * 0x9E3779B1 % 2**31)
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _bytes_tensor(data: object, name: str) -> torch.Tensor:
    if not isinstance(data, bytes):
        raise ValueError(f"expected the {name} RNG state as bytes, found {type(data).__name__}")
    # Through numpy, not torch.frombuffer: a default device set by the user must not move it.
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def _capture_python(state: tuple[Any, ...]) -> dict[str, Any]:
    version, words, gauss = state
    # 625 Python ints cost a codec a hundred times as much as their bytes.
    return {"version": version, "words": array("I", words).tobytes(), "gauss": gauss}


def _python_state(state: Any) -> tuple[int, tuple[int, ...], float | None]:
    try:
        version, words, gauss = state["version"], state["words"], state["gauss"]
    except (TypeError, KeyError):
        raise ValueError(f"expected a Python RNG state with version, words and gauss, found {state!r:.80}") from None
    if not isinstance(words, bytes) or len(words) != _PYTHON_WORDS_BYTES:
        found = f"{len(words)} bytes" if isinstance(words, bytes) else type(words).__name__
        raise ValueError(f"expected a Python RNG state of {_PYTHON_WORDS_BYTES} bytes, found {found}")
    return version, tuple(array("I", words)), gauss


def _capture_global_numpy() -> dict[str, Any]:
    if not isinstance(_numpy_random.get_bit_generator(), np.random.MT19937):
        return {"name": "other", "data": _encode(np.random.get_state(legacy=False))}
    # The costliest part of a capture. Comparing the twister's memory first would save it, but miss a stored second
    # normal deviate that is used up or put back.
    name, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "name": name,
        "key": np.asarray(key, dtype=np.uint32).tobytes(),
        "position": int(position),
        "has_gauss": int(has_gauss),
        "gauss": float(gauss),
    }


def _numpy_state(state: Any) -> Any:
    name = state.get("name") if isinstance(state, dict) else None
    if name == "other":
        return _decode(state["data"])
    if name != "MT19937":
        raise ValueError(f"expected the numpy RNG state of an MT19937, found {name!r}")
    try:
        key, position = state["key"], state["position"]
        has_gauss, gauss = state["has_gauss"], state["gauss"]
    except KeyError as error:
        raise ValueError(f"expected a numpy RNG state with {error.args[0]!r}, found {sorted(state)}") from None
    if not isinstance(key, bytes) or len(key) != _MT19937_KEY_BYTES:
        found = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        raise ValueError(f"expected a numpy RNG key of {_MT19937_KEY_BYTES} bytes, found {found}")
    return name, np.frombuffer(key, dtype=np.uint32), position, has_gauss, gauss


def _device_states(states: Any) -> list[tuple[torch.device, torch.Tensor]]:
    """Devices here and the states of their generators; that of the own device last, which another may be here."""
    if not isinstance(states, dict):
        raise ValueError(f"expected the RNG states of devices as a dict, found {type(states).__name__}")
    found = []
    module, own = _accelerator()
    count = module.device_count() if states and module is not None else 0
    for name, data in sorted(states.items(), reverse=True):
        device = torch.device(name)
        if (device.index or 0) >= count:
            raise ValueError(
                f"expected an RNG state of one of {count} {device.type} devices, found one of {name}; "
                "an exact resume needs the devices of the run it continues"
            )
        found.append((own if name == own.type else device, _bytes_tensor(data, name)))
    return found


def _encode(value: Any) -> Any:
    """numpy's nested state dictionaries, with arrays as bytes and 128-bit integers as text."""
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"array": value.tobytes(), "dtype": value.dtype.str}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int) and abs(value) >= _LARGEST_PLAIN_INT:
        return {"integer": hex(value)}
    return value


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() == {"array", "dtype"}:
        return np.frombuffer(value["array"], dtype=np.dtype(value["dtype"])).copy()
    if value.keys() == {"integer"}:
        return int(value["integer"], 16)
    return {key: _decode(item) for key, item in value.items()}
