"""Sizes of a window of an owner's records: a function of its layout, so that owner and holders get the same."""

from __future__ import annotations

from typing import NamedTuple

from memckpt.replication.coding.blob import MOST_TAIL_BYTES, STATIC
from memckpt.replication.coding.code import STRIPE_BYTES
from memckpt.replication.coding.fragments import Fragment
from memckpt.replication.transport.wire import Window
from memckpt.state.layout import SNAPSHOTS, Layout
from memckpt.state.spec import StateSpec

#: Bytes of room for what belongs to a record beside its slot; more is reserved when more comes.
_TAIL_BYTES = 64 << 10


class WindowSizes(NamedTuple):
    """Sizes of a window, and of the memory that a holder needs for it.

    Attributes:
        period, kept, every, record_bytes, static: as in Window.
        stripes: number of stripes of a record, as a rule.
        most_stripes, most_static_stripes: limits on the stripes of a record, and of the static tensors.
    """

    period: int
    kept: int
    every: int
    record_bytes: int
    static: bool
    stripes: int
    most_stripes: int
    most_static_stripes: int


def sizes_of(spec: StateSpec, private: bool, by_value: bool = False) -> WindowSizes:
    """Sizes of a window of records with a layout.

    Args:
        spec: what the layout is made from.
        private: whether they have only the bytes of their ranks alone.
        by_value: whether they are virtual records of one state.
    """
    layout = Layout(spec)
    period = 1 if private else spec.period
    capture = spec.mode == "snapshot"
    record_bytes = layout.by_value_area()[1]
    if not private:
        record_bytes += layout.anchor_bytes + (0 if by_value else layout.gradient_bytes)
    static_bytes = 0 if private else layout.static_bytes
    return WindowSizes(
        period=period,
        kept=period + (0 if by_value else SNAPSHOTS if capture else spec.slots),
        every=spec.every if capture else 1,
        record_bytes=record_bytes,
        static=static_bytes > 0,
        stripes=_stripes(record_bytes + _TAIL_BYTES),
        most_stripes=_stripes(record_bytes + MOST_TAIL_BYTES),
        most_static_stripes=_stripes(static_bytes + _TAIL_BYTES) if static_bytes else 0,
    )


def differing(window: Window, spec: StateSpec, sizes: WindowSizes) -> str:
    """Why a window does not follow from its layout, in words; empty if it does."""
    names = ("period", "kept", "every", "record_bytes", "static")
    expected: dict[str, object] = {name: getattr(sizes, name) for name in names}
    expected |= {"owner": spec.local_ranks, "replicas": spec.serves}
    for name, value in expected.items():
        if getattr(window, name) != value:
            return f"expected {name}={value} by its layout, found {getattr(window, name)}"
    return ""


def misfit(window: Window, sizes: WindowSizes, fragment: Fragment) -> str:
    """Why a fragment that is whole cannot be one of a window, in words; empty if it can."""
    told, one = window, fragment
    if (one.index, one.data, one.tolerate) != (told.index, told.data, told.tolerate):
        return f"it is fragment {one.index} of a ({one.data}, {one.tolerate}) code"
    if one.record != STATIC and one.record <= told.base - told.period * told.every:
        return f"record {one.record} lies before the generation, which begins after {told.base}"
    most = sizes.most_static_stripes if one.record == STATIC else sizes.most_stripes
    if one.stripes > most:
        return f"expected a record of at most {most} stripes, found {one.stripes}"
    if one.length < STRIPE_BYTES and one.stripe < one.stripes - 1:
        return f"expected {STRIPE_BYTES} bytes of all stripes but the last, found {one.length}"
    return ""


def _stripes(nbytes: int) -> int:
    return -(-nbytes // STRIPE_BYTES)
