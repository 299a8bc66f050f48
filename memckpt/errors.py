"""Errors that memckpt raises on purpose.

    MemckptError
     |- ConfigurationError (ValueError)     an invalid setting
     |- UnsupportedError (ValueError)       a model, optimizer or strategy that cannot be protected
     |   '- UnsupportedStateError           a value that the safe codec does not take
     |- NothingHeldError (LookupError)      the state that resume="require" or a step number asks for is not held
     |- ForeignStateError (ValueError)      the held state belongs to another model or optimizer
     |- ResumeMismatchError (RuntimeError)  a repeated step gave another result than before
     |- DataPositionError (RuntimeError)    a data loader does not repeat its batches
     |- MemoryBudgetError (MemoryError)     the node has no room for base and log
     |- RunBusyError (RuntimeError)         a live trainer holds this run
     |- DamagedStateError (ValueError)      bytes that fail validation
     |   '- DamagedFragmentsError              too few fragments of a record are intact
     |- StorageError (OSError)              a disk or object store that fails
     |   |- StorageFullError                it has no room for the write
     |   '- StorageAwayError                it is no longer at its place
     |- AgentError (RuntimeError)           the agent cannot be started or reached, or answers nonsense
     |   |- AgentGoneError                  its connection ended
     |   '- AgentNotFoundError              none answers on this node
     |- PeerError (RuntimeError)            other nodes cannot be reached as configured
     |   '- PeerOverrunError                the send queue of a peer is full
     |- DrillError (RuntimeError)           a drill could not be carried out
     '- UsageError (RuntimeError)           calls in an order that cannot work

A message names what was expected, what was found, and the remedy. `exit_code` is the command line's exit status for
that kind of failure.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_log = logging.getLogger("memckpt")
#: What decoding raises for bytes that are no message: msgspec's errors and those of text that is no UTF-8 are
#: ValueErrors, and lists in lists in lists are a RecursionError.
MALFORMED = (ValueError, RecursionError)


class MemckptError(Exception):
    """Base of all errors of this package."""

    exit_code = 1


class ConfigurationError(MemckptError, ValueError):
    """A configuration value is out of range or contradicts another one."""

    exit_code = 2


class UnsupportedError(MemckptError, ValueError):
    """A part of the user's training cannot be protected by this version."""

    exit_code = 3


class UnsupportedStateError(UnsupportedError, TypeError):
    """A value inside a rank state that the safe codec does not take.

    Attributes:
        path: path of the value in the state, for example ``callbacks.MyCallback.handle``.
        type_name: fully qualified name of its type.
    """

    def __init__(self, path: str, type_name: str) -> None:
        self.path = path
        self.type_name = type_name
        super().__init__(
            f"state at {path or 'the top'!s} is of type {type_name}, which cannot be stored safely: expected "
            "None, bool, int, float, complex, str, bytes, list, tuple, set, dict, deque, a torch tensor, dtype, "
            "device or Size, or a numpy array or scalar; return such values from state_dict()"
        )


class NothingHeldError(MemckptError, LookupError):
    """No held state satisfies the requested resume."""

    exit_code = 4


class ForeignStateError(MemckptError, ValueError):
    """The held state was written by another model or optimizer; the first difference is named."""

    exit_code = 5


class ResumeMismatchError(MemckptError, RuntimeError):
    """The repeated step differs from the held one, which is kept (``resume_check="require"``)."""

    exit_code = 13


class DataPositionError(MemckptError, RuntimeError):
    """A loader cannot be brought exactly to a recorded position, so training must not continue with its data.

    The message names the difference (usually the sampler class) and the remedy.
    """


class MemoryBudgetError(MemckptError, MemoryError):
    """Base and log do not fit into this node's memory."""

    exit_code = 6


class RunBusyError(MemckptError, RuntimeError):
    """Another live trainer holds this run."""

    exit_code = 7


class DamagedStateError(MemckptError, ValueError):
    """Bytes to be decoded are damaged."""

    exit_code = 8


class DamagedFragmentsError(DamagedStateError):
    """Fewer fragments of a record are intact than are needed to decode it, or they contradict each other.

    Attributes:
        owner: the ranks whose record it is.
        record, stripe: number of the record, and index of the stripe in it.
        bad: sources of fragments that failed validation.
        good, needed: number of intact fragments, and number needed.
    """

    def __init__(
        self, owner: tuple[int, ...], record: int, stripe: int, bad: tuple[str, ...], good: int, needed: int, found: str
    ) -> None:
        self.owner = owner
        self.record = record
        self.stripe = stripe
        self.bad = bad
        self.good = good
        self.needed = needed
        super().__init__(
            f"stripe {stripe} of record {record} of ranks {list(owner)}: expected {needed} intact fragments that "
            f"agree, found {good}{f' ({found})' if found else ''}; the record is lost to its peers, and the next tier "
            "serves"
        )


class StorageError(MemckptError, OSError):
    """A disk or object store could not be read or written; the path and the reason are named."""

    exit_code = 10


class StorageFullError(StorageError):
    """There is no room for a write.

    Attributes:
        needed, free: bytes; None if unknown.
        spare: bytes that would be deleted if that were enough.
    """

    exit_code = 14

    def __init__(self, message: str, needed: int | None = None, free: int | None = None, spare: int = 0) -> None:
        self.needed = needed
        self.free = free
        self.spare = spare
        super().__init__(message)

    @property
    def missing(self) -> int | None:
        """Bytes that have to be free before a retry makes sense; None if free space does not tell."""
        if self.needed is None or self.free is None or self.free >= self.needed:
            return None
        return self.needed - self.spare


class StorageAwayError(StorageError):
    """The store of a run that has stored before is missing: it was moved, or its disk is not mounted."""


class AgentError(MemckptError, RuntimeError):
    """The node's agent could not be started or reached, or its answer was not understood."""

    exit_code = 9


class AgentGoneError(AgentError):
    """The connection to the agent ended: the agent left or was killed."""


class AgentNotFoundError(AgentError):
    """No agent of this run answers on this node."""

    exit_code = 11


class PeerError(MemckptError, RuntimeError):
    """Other nodes cannot be reached as configured: an address, a port, a message too large."""

    exit_code = 12


class PeerOverrunError(PeerError):
    """The send queue of a peer is full."""


class DrillError(MemckptError, RuntimeError):
    """A drill could not be carried out: the script failed by itself, stood still, or is not protected."""

    exit_code = 15


class UsageError(MemckptError, RuntimeError):
    """The library was called in an order that cannot work."""


def without_our_frames(face: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate what users call: messages of our errors say it all, and our frames are logged at DEBUG.

    An error keeps its cause and its context for scripts. A cause is printed, and has no frames of ours either.
    """

    @functools.wraps(face)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return face(*args, **kwargs)
        except MemckptError as error:
            _log.debug("memckpt: where that was found", exc_info=error)
            cause, seen = error.__cause__, set[int]()  # a script may have made a circle of them
            while cause is not None and id(cause) not in seen:
                seen.add(id(cause))
                cause.__traceback__ = frames_of_others(cause.__traceback__)
                cause = cause.__cause__ or cause.__context__
            raise error.with_traceback(None) from error.__cause__

    return called


def frames_of_others(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of this package; None if it has no others."""
    kept = []
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__", "").partition(".")[0] != "memckpt":
            kept.append(traceback)
        traceback = traceback.tb_next
    found: TracebackType | None = None
    for each in reversed(kept):
        found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found
