"""Descriptors beyond the first 1,024: how many a process may have, and how one of them is waited for."""

from __future__ import annotations

import logging
import math
import resource
import select
from typing import Protocol

#: Descriptors that a replicator has open for each peer: sockets to it and of it. And more for each with which it shares
#: fragments of records: a lane to it and one of it.
PEER_DESCRIPTORS, LANE_DESCRIPTORS = 3, 2
_log = logging.getLogger("memckpt.agent")


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def raise_limit() -> None:
    """Let this process have as many descriptors as the system allows: a replicator needs several for each peer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:  # no limit at all, which some kernels do not take as a soft one
        _log.warning("the limit of %d open files stays: %s", soft, error)


def readable(source: int | HasDescriptor, timeout: float | None) -> bool:
    """Wait until there is something to read, or an end to be seen; False after `timeout` seconds (None: never)."""
    return _wait(source, select.POLLIN, timeout)


def writable(source: int | HasDescriptor, timeout: float | None) -> bool:
    """Wait until something can be written, or an end to be seen; False after `timeout` seconds (None: never)."""
    return _wait(source, select.POLLOUT, timeout)


def _wait(source: int | HasDescriptor, events: int, timeout: float | None) -> bool:
    # Not select.select, which takes no descriptor above 1023.
    poll = select.poll()
    poll.register(source, events)
    return bool(poll.poll(None if timeout is None else math.ceil(max(0.0, timeout) * 1000)))
