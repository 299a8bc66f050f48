"""What the user reads: one logger that shows INFO by default, spoken to by rank zero only."""

from __future__ import annotations

import logging

from lightning.fabric.utilities.rank_zero import rank_zero_only

logger = logging.getLogger("lightning_memckpt")


@rank_zero_only  # type: ignore[untyped-decorator, unused-ignore]
def inform(message: str) -> None:
    """Say one line about progress."""
    logger.info("memckpt: %s", message)


@rank_zero_only  # type: ignore[untyped-decorator, unused-ignore]
def warn(message: str) -> None:
    """Say one line about something that is not as the user may expect."""
    logger.warning("memckpt: %s", message)
