"""What the user reads: one logger that shows INFO by default, spoken to by rank zero only."""

from __future__ import annotations

import logging
from collections.abc import Callable

from lightning.fabric.utilities.rank_zero import rank_zero_only

logger = logging.getLogger("lightning_memckpt")


def _on_rank_zero(say: Callable[[str], None]) -> Callable[[str], None]:
    """Lightning's decorator, whose own annotations type checkers do not always see."""
    limited: Callable[[str], None] = rank_zero_only(say)
    return limited


@_on_rank_zero
def inform(message: str) -> None:
    """Say one line about progress."""
    logger.info("memckpt: %s", message)


@_on_rank_zero
def warn(message: str) -> None:
    """Say one line about something that is not as the user may expect."""
    logger.warning("memckpt: %s", message)
