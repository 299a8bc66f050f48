"""What a session does while it is drilled: it writes a line with digests of the whole state behind each commit."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
import xxhash
from torch import nn

from memckpt.config.drill import DrillOrders
from memckpt.processes.handles import start_ticks
from memckpt.state import codec
from memckpt_tools.drill.attributes import Attributes
from memckpt_tools.drill.fingerprint import Fingerprints
from memckpt_tools.drill.inputs import InputTap, loaders
from memckpt_tools.drill.lines import Begun, Key, Loaders, Restored, Taken, Tensors, Writer


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


class Probe:
    """Writes the lines of one session. Draws no random numbers, and changes no tensor.

    Args:
        orders: where.
        fingerprints: of the tensors.
        model: the model.
        rank, world_size, node: place of the session in the job.
    """

    def __init__(
        self,
        orders: DrillOrders,
        fingerprints: Fingerprints,
        model: nn.Module,
        rank: int,
        world_size: int,
        node: str,
    ) -> None:
        self._fingerprints = fingerprints
        self._attributes = Attributes(dict(model.named_modules()))
        self._inputs = InputTap(model)
        self._loaders: tuple[str, ...] | None = None
        self._place = (rank, world_size, node)
        self._writer = Writer(orders.lines_of(rank))
        self._losses = LossTap()
        self._keys: tuple[Key, ...] | None = None
        self._check = ("", "")

    def begin(self, agent: int | None) -> None:
        """The session has begun."""
        rank, world_size, node = self._place
        pid = os.getpid()
        self._writer.write(Begun(pid, start_ticks(pid), rank, world_size, time.monotonic(), agent, node))

    def restored(self, step: int, record: int, tier: str, seconds: float, repeated: int | None) -> None:
        """The tensors of a state are restored."""
        digests, sketches = self._take()
        self._writer.write(Restored(step, record, tier, seconds, repeated, digests, sketches))

    def taken(
        self,
        step: int,
        record: int,
        values: Iterable[tuple[str, str, Any]],
        *,
        caller: FrameType | None,
        stalled: float,
        repeated: bool,
        agent: int | None,
        check: tuple[str, str],
    ) -> None:
        """A step is committed.

        Args:
            step, record: its numbers.
            values: kind, name and value of each part of the state that is no tensor by name.
            caller: innermost frame whose variables may be the user's.
            stalled: seconds that protection has kept the process from training so far.
            repeated: whether it was repeated as a proof.
            agent: process id of the agent.
            check: verdict of the resume check, and its line.
        """
        now = time.monotonic()
        losses = self._losses.take()
        digests, sketches = self._take()
        named: dict[str, dict[str, str]] = {}
        for kind, name, value in values:
            named.setdefault(kind, {})[name] = xxhash.xxh3_128_hexdigest(codec.encode(value))
        named["input"] = self._inputs.take()
        for kind, name, text in self._attributes.values(caller):
            named.setdefault(kind, {})[name] = text
        if self._loaders is None:
            self._loaders = loaders()
            self._writer.write(Loaders(self._loaders))
        news = check if check != self._check and check[0] not in ("", "pending", "off") else None
        self._check = check
        seconds = time.monotonic() - now
        self._writer.write(
            Taken(step, record, now, seconds, losses, digests, sketches, named, stalled, repeated, agent, news)
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
