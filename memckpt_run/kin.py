"""What the kernel does for kin: orphans that are adopted, and children that end with their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(number: int, parent: int) -> None:
    """Have the kernel send a signal to this process when its parent ends, however that ends.

    Args:
        number: the signal.
        parent: process id that the parent should have; if it has ended already, this process ends, too.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Processes below this one become its children meanwhile when their own parents end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
