"""Callbacks that Lightning asks for when a Trainer or a Fabric is made: none, unless MEMCKPT_AUTO is set.

pyproject.toml names these functions. They run in every script of an environment in which memckpt is installed, so this
module imports nothing until that variable is there.
"""

from __future__ import annotations

import os
from typing import Any


def _on() -> bool:
    if "MEMCKPT_AUTO" not in os.environ:
        return False
    from memckpt.config.arguments import auto_from_environment

    return auto_from_environment()


def trainer_callbacks() -> list[Any]:
    """Callbacks for a Trainer of `lightning.pytorch`."""
    if not _on():
        return []
    from lightning_memckpt.automatic import AutomaticMemCheckpoint

    return [AutomaticMemCheckpoint()]


def other_trainer_callbacks() -> list[Any]:
    """Callbacks for a Trainer of `pytorch_lightning`, a package with other classes."""
    if not _on():
        return []
    from lightning_memckpt.automatic_elsewhere import refusing_callback

    return [refusing_callback()]


def fabric_callbacks() -> list[Any]:
    """Callbacks for a Fabric of either package."""
    if not _on():
        return []
    from lightning_memckpt.automatic_elsewhere import FabricReminder

    return [FabricReminder()]
