"""Signals of a supervisor: which it passes on, which ask for the end, and how it dies by one itself."""

from __future__ import annotations

import os
import resource
import signal

#: Passed on to the training.
PASSED_ON = frozenset(
    {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
)  # fmt: skip
#: Those of them behind which no restart is wanted.
ENDING = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM})
#: `si_code` of a signal that the kernel has sent: that of a terminal, to all processes in the foreground.
_BY_KERNEL = 0x80


class Inbox:
    """Signals to this process, taken one at a time in place of handlers. They are blocked until :meth:`close`.

    `before` is the signal mask before, which is the children's.
    """

    def __init__(self) -> None:
        self._taken = PASSED_ON | {signal.SIGCHLD}
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would reap children before they are asked for
        self.before = signal.pthread_sigmask(signal.SIG_BLOCK, self._taken)

    def next_signal(self, seconds: float | None) -> signal.struct_siginfo | None:
        """The next signal; None if none comes within so many seconds (None: no limit)."""
        if seconds is None:
            return signal.sigwaitinfo(self._taken)
        return signal.sigtimedwait(self._taken, max(0.0, seconds))

    def close(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self.before)


def has_it_already(received: signal.struct_siginfo) -> bool:
    """Whether the training has got the signal, too: Ctrl-C in a terminal reaches all processes in the foreground.

    A terminal that hangs up tells only the first process of its session.
    """
    return received.si_code == _BY_KERNEL and received.si_signo in (signal.SIGINT, signal.SIGQUIT)


def end_like(code: int) -> int:
    """End this process as another one has, by the same signal; returns the exit status where `code` is one."""
    if code >= 0:
        return code
    resource.setrlimit(
        resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
    )  # one core dump is enough
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code  # the first process of a container does not die of its own signals
