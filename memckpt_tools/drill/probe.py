"""What watches a session while it is drilled: it writes a line with digests of the whole state behind each commit.

Part of the lines are plain values of the user's objects, which a resume puts back only if they are part of some state.
That is attributes of modules and of objects whose classes are the user's own (callbacks, datasets), and variables of
the user's functions that are running, and of the script. The user's own is what is neither installed nor Python's.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
import sysconfig
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from memckpt.capture.by_value import Digests, digest, on_host, sums
from memckpt.capture.copier import Copier, copier_for, device_of
from memckpt.capture.live_state import state_of
from memckpt.config import MemckptConfig
from memckpt.config.observers import OBSERVERS, Committed, Observer, Watched
from memckpt.errors import ConfigurationError, UnsupportedStateError
from memckpt.processes.handles import start_ticks
from memckpt.state import codec
from memckpt.state.optimizers import own_attributes
from memckpt.state.tensors import local
from memckpt_tools.drill.job import DrillOrders
from memckpt_tools.drill.lines import (
    ATTRIBUTE,
    OF_OPTIMIZER,
    SKETCHES,
    TEXT,
    VARIABLE,
    Begun,
    Key,
    Loaders,
    Restored,
    Taken,
    Writer,
)
from memckpt_tools.drill.losses import LossTap

#: Length up to which a value's text stands for it.
_TEXT_CHARACTERS = 40
#: Largest containers, in elements, and tensors, in bytes, that are looked at.
_ELEMENTS, _TENSOR_BYTES = 1_000, 1 << 20
_OWN = ("memckpt", "memckpt_tools", "lightning_memckpt", "accelerate_plugin", "transformers_memckpt", "memckpt_hydra")
_NOT_PLAIN = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})


class Attributes:
    """The plain values of a training's objects, by name. `modules`: by path; the model's is empty."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = dict(modules)
        self._others: list[weakref.ref[Any]] | None = None

    def values(self, frame: FrameType | None) -> Iterator[tuple[str, str, str]]:
        """Kind, name, and text or digest of each value; `frame`: the innermost one that may be the user's."""
        if self._others is None:
            self._others = list(_find_others({id(module) for module in self._modules.values()}))
        for path, module in self._modules.items():
            yield from _attributes_of(module, f" ({path})" if path else "")
        for reference in self._others:
            if (found := reference()) is not None:
                yield from _attributes_of(found, "")
        seen: set[str] = set()
        while frame is not None:
            if _is_users_file(frame.f_code.co_filename) and frame.f_code.co_name not in seen:
                function = frame.f_code.co_name
                seen.add(function)
                where = "the script" if function == "<module>" else f"{function}()"
                for name, value in list(frame.f_locals.items()):
                    if not name.startswith("__") and (text := text_of(value)) is not None:
                        yield VARIABLE, f"{name} of {where}", text
            frame = frame.f_back


def _attributes_of(found: Any, where: str) -> Iterator[tuple[str, str, str]]:
    kind = OF_OPTIMIZER if isinstance(found, Optimizer) else " of "
    attributes = own_attributes(found) if isinstance(found, Optimizer) else vars(found)
    for name, value in list(attributes.items()):
        if name not in _NOT_PLAIN and not name.endswith("_hooks") and (text := text_of(value)) is not None:
            yield ATTRIBUTE, f"{name}{kind}{type(found).__qualname__}{where}", text


def _find_others(known: set[int]) -> Iterator[weakref.ref[Any]]:
    """Objects of the user's classes that are alive: those that are alone of their class, since names need be unique."""
    by_class: dict[type, list[Any]] = {}
    for found in gc.get_objects():
        kind = type(found)
        if kind.__module__ in sys.modules and id(found) not in known and _is_users_class(kind):
            by_class.setdefault(kind, []).append(found)
    for found, *others in by_class.values():
        if not others and hasattr(found, "__dict__") and not isinstance(found, type):
            try:
                yield weakref.ref(found)
            except TypeError:  # its class has no room for one
                continue


def _is_users_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    path = getattr(module, "__file__", None)
    return isinstance(path, str) and kind.__module__.partition(".")[0] not in _OWN and _is_users_file(path)


@functools.cache
def _is_users_file(path: str) -> bool:
    if path.startswith("<"):
        return False
    found = Path(path).absolute()
    if {"site-packages", "dist-packages"} & set(found.parts):
        return False
    own = Path(__file__).absolute().parents[2]
    if found.is_relative_to(own) and found.relative_to(own).parts[0] in _OWN:
        return False
    return not any(found.is_relative_to(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))


def text_of(value: Any) -> str | None:
    """A short value's text, behind ``=``; a longer one's digest; None for what is no plain value."""
    value = _plain(value)
    if value is None or getattr(value, "nbytes", 0) > _TENSOR_BYTES:
        return None
    if isinstance(value, (list, tuple, set, dict)) and len(value) > _ELEMENTS:
        return None
    if isinstance(value, (bool, int, float, complex, str)) and len(repr(value)) <= _TEXT_CHARACTERS:
        return TEXT + repr(value)
    try:
        return xxhash.xxh3_128_hexdigest(codec.encode(_in_order(value)))
    except UnsupportedStateError:
        return None


def _in_order(value: Any) -> Any:
    """The same with all mappings in the order of their keys: load_state_dict() and others change it."""
    if type(value) is dict:
        return {key: _in_order(value[key]) for key in sorted(value, key=repr)}
    if type(value) in (list, tuple):
        return type(value)(_in_order(one) for one in value)
    return value


def _has_parameters(value: Any) -> bool:
    """Whether it is a parameter, or lists some: these are compared by themselves."""
    if isinstance(value, dict):
        return any(map(_has_parameters, value.values()))
    if isinstance(value, (list, tuple, set)):
        return any(map(_has_parameters, value))
    return isinstance(value, nn.Parameter)


def _plain(value: Any) -> Any:
    """The state of a generator, a detached tensor, or the value itself if it may be plain; None if it is not."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return dict(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if callable(value) or _has_parameters(value):
        return None
    if isinstance(value, torch.Tensor):  # one with a gradient was computed: it is an effect
        return (
            value if type(value) is torch.Tensor and value.layout is torch.strided and not value.requires_grad else None
        )
    plain = (bool, int, float, complex, str, bytes, list, tuple, set, dict, np.ndarray, np.generic)
    return value if isinstance(value, plain) else None


#: Elements that share a set of signs; what lies behind gets other ones.
_BLOCK = 1024
_SEED = 0x6472696C6C


class Fingerprints:
    """Fingerprints of a training's live tensors; the copier fetches digests from a device."""

    def __init__(self, live: Watched, copier: Copier) -> None:
        self._live = live
        self._copier = copier
        generator = torch.Generator("cpu").manual_seed(_SEED)
        drawn = torch.randint(0, 2, (_BLOCK, SKETCHES + 1), generator=generator, device="cpu")
        self._signs = (drawn * 2 - 1).double()

    def fingerprint_state(self) -> tuple[tuple[Key, ...], bytes, bytes]:
        """Names, digests and sketches of all tensors of the state at this point. Changes nothing."""
        with torch.no_grad():
            found = dict(self._tensors())
            digests = Digests(list(found.values()), self._copier)
            sketches = [self._sketch(local(tensor)) for tensor in found.values()]
            self._copier.token()()
            data = torch.stack(sketches).numpy().tobytes() if sketches else b""
            return tuple(found), digests.encode(), data

    def _tensors(self) -> Iterator[tuple[Key, torch.Tensor]]:
        tensors = self._live.tensors()
        stepped = {id(each) for one in self._live.optimizers for group in one.param_groups for each in group["params"]}
        for name, tensor in tensors.items():
            if id(tensor) in stepped and tensor.requires_grad:
                yield ("parameter", name), tensor
            else:
                yield ("frozen" if isinstance(tensor, torch.nn.Parameter) else "buffer", name), tensor
        for index, optimizer in enumerate(self._live.optimizers):
            several = f" of optimizer {index}" if len(self._live.optimizers) > 1 else ""
            yield from _states(optimizer, tensors, several)

    def _sketch(self, tensor: torch.Tensor) -> torch.Tensor:
        """float64 of shape (4,), in host memory."""
        if tensor.is_sparse or tensor.layout is not torch.strided:
            return torch.zeros(SKETCHES, dtype=torch.float64)
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
        dtype = torch.float32 if flat.dtype in (torch.float16, torch.bfloat16, torch.float32) else torch.float64
        whole = flat.numel() // _BLOCK * _BLOCK
        signs = self._signs.to(flat.device, dtype)
        rows = (flat[:whole].view(-1, _BLOCK).to(dtype) @ signs[:, :SKETCHES]).double()
        # Blocks get signs of their own: a change that is the same in all of them must not add up.
        turns = self._signs[:, SKETCHES].to(flat.device).repeat(len(rows) // _BLOCK + 1)[: len(rows), None]
        tail = flat[whole:].to(dtype) @ signs[: flat.numel() - whole, :SKETCHES]
        return ((rows * turns).sum(0) + tail.double()).cpu()


def _states(
    optimizer: Optimizer, tensors: Mapping[str, torch.Tensor], several: str
) -> Iterator[tuple[Key, torch.Tensor]]:
    for name, tensor in tensors.items():
        for path, value in _leaves(state_of(optimizer, tensor), ""):
            yield ("state", f"{name} ({path}){several}"), value


def _leaves(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (bool, int, float)):
        yield path, torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{path}.{index}")


class InputTap:
    """Digests of the tensors that the first module called in a step is given, while it trains.

    Hooks are registered on the model and its modules until the first step is over, then on one of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._entry: nn.Module | None = None
        self._noted: list[str] = []
        self._handles = {
            id(module): module.register_forward_pre_hook(self._called, with_kwargs=True) for module in model.modules()
        }

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not module.training or not torch.is_grad_enabled():
            return
        if self._entry is None:
            self._entry = module
        if module is self._entry:
            found = xxhash.xxh3_128()
            for tensor in _tensors((args, kwargs)):
                here = tensor.detach()
                found.update(digest(here) if on_host(here) else sums(here).cpu().numpy().tobytes())
            self._noted.append(found.hexdigest())

    def take_inputs(self) -> dict[str, str]:
        """Digests since the last call, by the name of the module that was called."""
        noted, self._noted = self._noted, []
        if self._entry is None:
            return {}
        for key in [key for key in self._handles if key != id(self._entry)]:
            self._handles.pop(key).remove()
        return {f"of {type(self._entry).__qualname__}": ".".join(noted)}

    def close(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def loaders() -> tuple[str, ...]:
    """The loaders that are alive, each by its dataset and number of workers."""
    found = set()
    for each in gc.get_objects():
        if issubclass(type(each), DataLoader):
            dataset, workers = each.dataset, each.num_workers
            while type(dataset).__module__.startswith("torch.") and hasattr(dataset, "dataset"):
                dataset = dataset.dataset  # a Subset's
            found.add(f"{type(dataset).__qualname__} ({workers} worker{'' if workers == 1 else 's'})")
    return tuple(sorted(found))


class Probe(Observer):
    """Writes the lines of one session. Draws no random numbers, and changes no tensor. Arguments: of the orders."""

    def __init__(self, directory: str, nodes: int) -> None:
        self._orders = DrillOrders(Path(directory), nodes)
        self.run_dir = str(self._orders.run_dir)
        if not self._orders.directory.is_dir():
            raise ConfigurationError(
                f"{OBSERVERS}: expected the directory of a running `memckpt drill`, which alone sets it, found "
                f"{directory!r}; unset it"
            )

    def change_config(self, config: MemckptConfig) -> MemckptConfig:
        return self._orders.configure(config)

    def begin_session(self, session: Watched) -> None:
        self._fingerprints = Fingerprints(session, copier_for(device_of(session.tensors())))
        self._attributes = Attributes(dict(session.model.named_modules()))
        self._inputs = InputTap(session.model)
        self._loaders: tuple[str, ...] | None = None
        self._writer = Writer(self._orders.lines_of(session.rank))
        self._losses = LossTap()
        self._check = ("", "")
        pid = os.getpid()
        place = (session.rank, session.world_size, time.monotonic(), session.agent, session.node)
        self._writer.write(Begun(pid, start_ticks(pid), *place))

    def see_restored(self, step: int, record: int, tier: str, seconds: float, repeated: int | None) -> None:
        digests, sketches = self._fingerprint()
        self._writer.write(Restored(step, record, tier, seconds, repeated, digests, sketches))

    def see_committed(self, committed: Committed) -> None:
        now = time.monotonic()
        losses = self._losses.take_losses()
        digests, sketches = self._fingerprint()
        named: dict[str, dict[str, str]] = {}
        for kind, name, value in committed.parts():
            named.setdefault(kind, {})[name] = xxhash.xxh3_128_hexdigest(codec.encode(value))
        named["input"] = self._inputs.take_inputs()
        for kind, name, text in self._attributes.values(committed.caller):
            named.setdefault(kind, {})[name] = text
        if self._loaders is None:
            self._loaders = loaders()
            self._writer.write(Loaders(self._loaders))
        check = committed.check
        news = check if check != self._check and check[0] not in ("", "pending", "off") else None
        self._check = check
        seconds = time.monotonic() - now
        self._writer.write(
            Taken(
                committed.step,
                committed.record,
                now,
                seconds,
                losses,
                digests,
                sketches,
                named,
                committed.stalled,
                committed.repeated,
                committed.agent,
                news,
            )
        )

    def _fingerprint(self) -> tuple[bytes, bytes]:
        keys, digests, sketches = self._fingerprints.fingerprint_state()
        self._writer.name_tensors(keys)
        return digests, sketches

    def close(self) -> None:
        self._losses.close()
        self._inputs.close()
        self._writer.close()
