"""What watches a session while it is drilled: it writes a line with digests of the whole state behind each commit."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from memckpt.capture.copier import Copier, copier_for, device_of
from memckpt.capture.digests import Digests, digest, on_host, sums
from memckpt.capture.live_state import state_of
from memckpt.config import MemckptConfig
from memckpt.config.observers import OBSERVERS, Committed, Observer, Watched
from memckpt.errors import ConfigurationError
from memckpt.processes.handles import start_ticks
from memckpt.state import codec
from memckpt.state.tensors import local
from memckpt_tools.drill.attributes import Attributes
from memckpt_tools.drill.job import DrillOrders
from memckpt_tools.drill.lines import SKETCHES, Begun, Key, Loaders, Restored, Taken, Tensors, Writer

#: Elements that share a set of signs; what lies behind gets other ones.
_BLOCK = 1024
_SEED = 0x6472696C6C


class Fingerprints:
    """Fingerprints of a training's tensors.

    Args:
        live: the session with the live tensors.
        copier: fetches digests from a device.
    """

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

    Args:
        model: hooks are registered on it and its modules until the first step is over, then on one of them.
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


class LossTap:
    """Notes the scalars that backward begins with. Replaces ``torch.autograd.backward`` until it is closed."""

    def __init__(self) -> None:
        self._noted: list[torch.Tensor] = []
        self._original = torch.autograd.backward
        torch.autograd.backward = self._backward

    def _backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            if isinstance(tensor, torch.Tensor) and tensor.numel() == 1:
                self._noted.append(tensor.detach().clone())
        self._original(tensors, *args, **kwargs)

    def take_losses(self) -> tuple[str, ...]:
        """The scalars since the last call, in order and exact."""
        noted, self._noted = self._noted, []
        return tuple(float(each).hex() for each in noted)

    def close(self) -> None:
        torch.autograd.backward = self._original


class Probe(Observer):
    """Writes the lines of one session. Draws no random numbers, and changes no tensor.

    Args:
        directory: directory of this run of the drill.
        nodes: number of nodes that it simulates.
    """

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
        self._keys: tuple[Key, ...] | None = None
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
        if keys != self._keys:
            self._keys = keys
            self._writer.write(Tensors(keys))
        return digests, sketches

    def close(self) -> None:
        self._losses.close()
        self._inputs.close()
        self._writer.close()
