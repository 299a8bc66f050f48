"""``torch.distributed.checkpoint.async_save`` at every step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import async_save


class AsyncSaver:
    """Saves states one after the other, as it must: each waits for the one before.

    Args:
        targets: directories, which are written in turn.
        options: of `async_save`.
    """

    def __init__(self, targets: Sequence[Path], **options: Any) -> None:
        self._targets = itertools.cycle(targets)
        self._options = options
        self._pending: Any = None

    def save(self, state: dict[str, Any]) -> None:
        """Begin to save when the last save has ended."""
        self.wait()
        self._pending = async_save(state, checkpoint_id=next(self._targets), **self._options)

    def wait(self) -> None:
        """Wait for the last save."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
