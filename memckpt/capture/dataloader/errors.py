"""The error of this package; a leaf, so that every part may raise it."""

from __future__ import annotations


class DataPositionError(RuntimeError):
    """A loader cannot be brought exactly to a recorded position, so training must not go on with its data.

    The message names what differs (usually the sampler class) and the remedy.
    """
