"""Time to redo a record before anything is measured. Seconds."""

from __future__ import annotations

#: Elements that redo advances by a record in a second, on the low side: one core with Adam; an accelerator.
_REDONE_ON_HOST, _REDONE_ON_DEVICE = 1e8, 2e10
#: Seconds that a piece of a parameter takes for each record whatever its size: decoding, the optimizer's Python.
_PIECE_ON_HOST, _PIECE_ON_DEVICE = 1e-4, 3e-4


def record_redo_seconds(elements: float, pieces: float, on_host: bool) -> float:
    """Time to redo one record of a model of which nothing is measured yet, on the high side.

    Source: docs/compression.md, "Anchors"; measured on one machine.

    Args:
        elements: number of elements of all parameters.
        pieces: number of parameters and pieces of parameters that are redone apart.
        on_host: whether they are in host memory.
    """
    rate, each = (_REDONE_ON_HOST, _PIECE_ON_HOST) if on_host else (_REDONE_ON_DEVICE, _PIECE_ON_DEVICE)
    return elements / rate + pieces * each
