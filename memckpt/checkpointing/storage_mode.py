"""The storage mode (are records logged between checkpoints?), decided from measurements by a pure function."""

from __future__ import annotations

from dataclasses import dataclass

from memckpt.config import StorageChoice, StorageMode

#: The share of the storage's bandwidth that a log may take where nobody has asked for it.
_SHARE = 0.1
#: How much further both limits of a log are where there is one, so that noise does not end it.
_BAND = 1.5


@dataclass(frozen=True)
class Measured:
    """Measurements of a run and its storage.

    Attributes:
        record_bytes: size of one record in the log.
        checkpoint_bytes: size of one checkpoint.
        step_seconds: time from one record to the next; None before enough of them have come.
        bytes_per_second: rate of the last checkpoint; None before the first.
        interval_steps: records from one checkpoint to the next, about, where none are logged.
        logged: whether records are logged so far.
    """

    record_bytes: int
    checkpoint_bytes: int
    step_seconds: float | None
    bytes_per_second: float | None
    interval_steps: float | None
    logged: bool = False


def choose_mode(asked: StorageChoice, impossible: str, measured: Measured) -> tuple[StorageMode, str]:
    """The mode and, in words, its reason.

    Args:
        asked: the configured mode.
        impossible: reason why records of this run cannot be logged at all; empty if they can.
        measured: measurements so far.
    """
    if asked == "replica":
        return "replica", "as configured"
    if impossible:
        return "replica", f"records cannot be logged: {impossible}"
    if asked == "log":
        return "log", "as configured"
    if measured.step_seconds is None or measured.bytes_per_second is None or measured.interval_steps is None:
        return "replica", "the first checkpoint measures what storage takes, and the mode is chosen with the next one"
    size = f"a record is {_text(measured.record_bytes)}"
    needed = measured.record_bytes / max(measured.step_seconds, 1e-9)
    share = needed / max(measured.bytes_per_second, 1.0)
    further = _BAND if measured.logged else 1.0
    if share > _SHARE * further:
        return "replica", (
            f"{size}, which at {measured.step_seconds * 1e3:.3g} ms a step would take {share:.1%} of the "
            f"{_text(measured.bytes_per_second)}/s that this storage takes (at most {_SHARE:.0%})"
        )
    between = measured.record_bytes * measured.interval_steps
    if between > measured.checkpoint_bytes * further:
        return "replica", (
            f"{size}, and those between two checkpoints would take {_text(between)}, more than a checkpoint "
            f"({_text(measured.checkpoint_bytes)})"
        )
    return "log", (
        f"{size}: {share:.1%} of what this storage takes, and {_text(between)} between two checkpoints of "
        f"{_text(measured.checkpoint_bytes)}"
    )


def _text(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} GiB"


class Pace:
    """Time per record, over those since :meth:`restart`."""

    _ENOUGH = 8

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._newest: tuple[int, float] | None = None

    def restart(self) -> None:
        self._first = self._newest = None

    def note(self, record: int, now: float) -> None:
        """Note a record that was committed at `now`, in seconds of the monotonic clock."""
        self._first = self._first or (record, now)
        self._newest = record, now

    @property
    def seconds(self) -> float | None:
        """Seconds per record; None before there are enough of them."""
        if self._first is None or self._newest is None or self._newest[0] - self._first[0] < self._ENOUGH:
            return None
        return (self._newest[1] - self._first[1]) / (self._newest[0] - self._first[0])
