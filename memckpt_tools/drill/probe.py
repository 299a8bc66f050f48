"""What watches a session while it is drilled: it writes a line with digests of the whole state behind each commit."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import xxhash

from memckpt.capture.copier import copier_for, device_of
from memckpt.config import MemckptConfig
from memckpt.config.observers import OBSERVERS, Committed, Observer, Watched
from memckpt.errors import ConfigurationError
from memckpt.processes.handles import start_ticks
from memckpt.state import codec
from memckpt_tools.drill.attributes import Attributes
from memckpt_tools.drill.fingerprint import Fingerprints
from memckpt_tools.drill.inputs import InputTap, loaders
from memckpt_tools.drill.lines import Begun, Key, Loaders, Restored, Taken, Tensors, Writer
from memckpt_tools.drill.orders import DrillOrders


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

    def take(self) -> tuple[str, ...]:
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

    def begin(self, session: Watched) -> None:
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
        digests, sketches = self._take()
        self._writer.write(Restored(step, record, tier, seconds, repeated, digests, sketches))

    def see_committed(self, committed: Committed) -> None:
        now = time.monotonic()
        losses = self._losses.take()
        digests, sketches = self._take()
        named: dict[str, dict[str, str]] = {}
        for kind, name, value in committed.parts():
            named.setdefault(kind, {})[name] = xxhash.xxh3_128_hexdigest(codec.encode(value))
        named["input"] = self._inputs.take()
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

    def _take(self) -> tuple[bytes, bytes]:
        keys, digests, sketches = self._fingerprints.take()
        if keys != self._keys:
            self._keys = keys
            self._writer.write(Tensors(keys))
        return digests, sketches

    def close(self) -> None:
        self._losses.close()
        self._inputs.close()
        self._writer.close()
