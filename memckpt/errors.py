"""Every error memckpt raises on purpose.

    MemckptError
     |- ConfigurationError (ValueError)     a setting that cannot be
     |- UnsupportedError (ValueError)       a model, optimizer or strategy that cannot be protected
     |   '- UnsupportedStateError           a value that the safe codec does not take
     |- NothingHeldError (LookupError)      resume="require" or a step number, and it is not held
     |- ForeignStateError (ValueError)      what is held belongs to another model or optimizer
     |- ResumeMismatchError (RuntimeError) a repeated step has led elsewhere than before
     |- DataPositionError (RuntimeError)    a data loader does not repeat what it has handed out
     |- MemoryBudgetError (MemoryError)     the node has no room for base and log
     |- RunBusyError (RuntimeError)         a live trainer holds this run
     |- DamagedStateError (ValueError)      bytes that are not what they claim to be
     |   '- DamagedPiecesError              too few pieces of a record are intact
     |- StorageError (OSError)              a disk or object store that does not do what it must
     |   |- StorageFullError                it has no room for what is to be written
     |   '- StorageAwayError                it is not where it was
     |- AgentError (RuntimeError)           the agent cannot be started, reached or understood
     |   |- AgentGoneError                  its connection ended
     |   '- AgentNotFoundError              none answers on this node
     |- PeerError (RuntimeError)            other nodes cannot be reached as they were to be
     |   '- PeerOverrunError                more waits to be sent to one than it takes
     '- UsageError (RuntimeError)           calls in an order that cannot work

A message says what was expected, what was found, and the remedy. `exit_code` is what the command line
returns for that kind of failure.
"""

from __future__ import annotations


class MemckptError(Exception):
    """Base of all errors of this package."""

    exit_code = 1


class ConfigurationError(MemckptError, ValueError):
    """A configuration value is out of range or contradicts another one."""

    exit_code = 2


class UnsupportedError(MemckptError, ValueError):
    """Something in the user's training cannot be protected by this version."""

    exit_code = 3


class UnsupportedStateError(UnsupportedError, TypeError):
    """A value inside a rank state that the safe codec does not take.

    Attributes:
        path: where in the state it was found, for example ``callbacks.MyCallback.handle``.
        type_name: its fully qualified type.
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
    """Nothing is held that satisfies the requested resume."""

    exit_code = 4


class ForeignStateError(MemckptError, ValueError):
    """What is held was written by another model or optimizer; the first difference is named."""

    exit_code = 5


class ResumeMismatchError(MemckptError, RuntimeError):
    """With ``resume_check="require"``: the repeated step differs from the held one, which is still held."""

    exit_code = 13


class DataPositionError(MemckptError, RuntimeError):
    """A loader cannot be brought exactly to a recorded position, so training must not go on with its data.

    The message names what differs (usually the sampler class) and the remedy.
    """


class MemoryBudgetError(MemckptError, MemoryError):
    """Base and log do not fit into this node's memory."""

    exit_code = 6


class RunBusyError(MemckptError, RuntimeError):
    """Another live trainer holds this run."""

    exit_code = 7


class DamagedStateError(MemckptError, ValueError):
    """Bytes that were to be decoded are not what they claim to be."""

    exit_code = 8


class DamagedPiecesError(DamagedStateError):
    """Fewer pieces of a record are intact than it takes to make it whole, or they contradict each other.

    Attributes:
        owner: the ranks whose record it is.
        record, stripe: which part of which record.
        bad: where pieces were found that are not what they claim to be.
        good, needed: how many intact ones there are, of how many.
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
            f"stripe {stripe} of record {record} of ranks {list(owner)}: expected {needed} intact pieces that agree, "
            f"found {good}{f' ({found})' if found else ''}; the record is lost to its peers, and the next tier serves"
        )


class StorageError(MemckptError, OSError):
    """A disk or object store could not be read or written; the path and the reason are named."""

    exit_code = 10


class StorageFullError(StorageError):
    """There is no room for what is to be written.

    Attributes:
        needed, free: bytes; None where that is not known.
        spare: bytes that would be let go of if that were enough.
    """

    exit_code = 14

    def __init__(self, message: str, needed: int | None = None, free: int | None = None, spare: int = 0) -> None:
        self.needed = needed
        self.free = free
        self.spare = spare
        super().__init__(message)

    @property
    def missing(self) -> int | None:
        """Bytes that have to be free before it is of use to try again; None: nobody can tell by what is free."""
        if self.needed is None or self.free is None or self.free >= self.needed:
            return None
        return self.needed - self.spare


class StorageAwayError(StorageError):
    """The store of a run that has stored before is not there: it was moved, or its disk is not mounted."""


class AgentError(MemckptError, RuntimeError):
    """The node's agent could not be started, reached or understood."""

    exit_code = 9


class AgentGoneError(AgentError):
    """The connection to the agent ended: it left or was killed."""


class AgentNotFoundError(AgentError):
    """No agent of this run answers on this node."""

    exit_code = 11


class PeerError(MemckptError, RuntimeError):
    """Other nodes cannot be reached in the way that was asked for: an address, a port, a message too large."""

    exit_code = 12


class PeerOverrunError(PeerError):
    """More messages wait to be sent to a peer than may wait."""


class UsageError(MemckptError, RuntimeError):
    """The library was called in an order that cannot work."""
