"""The training's end of its connection to the benchmark: it reports steps, and waits to be let through."""

from __future__ import annotations

import json
import os
import socket
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

#: A number of steps that no training takes.
ALL_STEPS = 1_000_000


class Gate:
    """Reports to the benchmark, as lines of JSON; :meth:`begin` waits where it has not been let through.

    Args:
        path: the Unix socket on which the benchmark listens.
    """

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._orders = self._socket.makefile("rb")
        self._permits = 0
        self._say("hello", pid=os.getpid())

    def begin(self, step: int) -> None:
        """Report that a step begins, behind everything that the step before it owed; wait if no permit is left."""
        self._say("begin", step=step)
        if self._permits == 0:
            self._permits = int(self._orders.readline())
            self._say("released", step=step)
        self._permits -= 1

    def end(self, step: int, loss: Tensor, batch: Sequence[Tensor]) -> None:
        """Report that a step has been computed; its protection may be owing."""
        data = 0
        for tensor in batch:
            data = zlib.crc32(tensor.numpy().tobytes(), data)
        self._say("end", step=step, loss=float(loss).hex(), data=data)

    def finished(self, digests: dict[str, str]) -> None:
        """Report the digests of the final state."""
        self._say("finished", digests=digests)

    def failed(self, why: str) -> None:
        """Report why the training ends early."""
        self._say("failed", why=why)

    def _say(self, event: str, **values: Any) -> None:
        line = json.dumps({"event": event, "at": time.monotonic(), **values})
        self._socket.sendall(line.encode() + b"\n")
