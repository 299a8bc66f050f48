"""The agent's end of the writer process."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from memckpt.agent.channel import Channel
from memckpt.agent.messages import Message

_log = logging.getLogger("memckpt.agent")
_END_SECONDS = 5.0


class WriterProcess:
    """Owns the process and the connection to it; :meth:`close` ends both at once, as far as the kernel lets it.

    Args:
        what: it writes.
        released: called first of all by :meth:`close`, while the connection is still open.
    """

    def __init__(self, what: Literal["checkpoints", "records"], released: Callable[[WriterProcess], None]) -> None:
        self._released = released
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        package_root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH", "")]))
        try:
            arguments = ["--fd", str(theirs.fileno()), "--agent", str(os.getpid()), "--what", what]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "memckpt.writer", *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.channel = Channel(ours)

    def send(self, message: Message, fds: Sequence[int]) -> None:
        """Hand over a job. Raises AgentGoneError if the process is gone."""
        self.channel.send(message, fds, timeout=5.0)

    def close(self) -> None:
        """Kill it, wait for its end a while, and close the connection. Idempotent."""
        if self.channel.fileno() < 0:
            return
        self._released(self)
        self._process.kill()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            # In a system call that the storage does not let end. It dies when that does, and writes nothing more.
            _log.warning("writer pid %d is killed but hangs in the storage", self._process.pid)
        self.channel.close()
