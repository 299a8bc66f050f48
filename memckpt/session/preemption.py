"""Handler of SIGTERM in the trainer: tells the agent, then calls the handler that was installed before."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class PreemptionNotice:
    """Chains a handler before the installed one.

    Launchers send SIGTERM on ordinary restarts, too. So the handler only tells the agent, which saves meanwhile.

    Args:
        tell: called in the main thread, between any two instructions.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._pid = os.getpid()
        self._previous: Any = None
        self._installed = False

    def install(self) -> None:
        """Install the handler. No-op outside the main thread, where Python cannot install one."""
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGTERM)
            if self._previous is not None:  # None: not installed from Python, so it could not be called
                signal.signal(signal.SIGTERM, self._received)
                self._installed = True

    def _received(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:  # a forked child has inherited the handler, and nothing else
            self._tell()
        if callable(self._previous):
            self._previous(number, frame)
        elif self._previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def remove(self) -> None:
        """Give the signal back, unless somebody has put a handler on top of ours."""
        if self._installed and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._received:
                signal.signal(signal.SIGTERM, self._previous)
            self._installed = False
