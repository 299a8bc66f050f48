"""MEMCKPT_AUTO=1 where it cannot protect a training: what is said there."""

from __future__ import annotations

import logging
from typing import Any

from memckpt.capture.step_hooks import is_followed
from memckpt.config.arguments import AUTO
from memckpt.errors import UnsupportedError
from memckpt.user_messages import show_by_default

_log = logging.getLogger("lightning_memckpt")


def refusing_callback() -> Any:
    """A callback for `pytorch_lightning`, which refuses to fit unprotected."""
    import pytorch_lightning

    class RefusingMemCheckpoint(pytorch_lightning.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if stage == "fit":
                raise UnsupportedError(
                    f"{AUTO}=1: expected a Trainer of lightning.pytorch, found one of pytorch_lightning; use `import "
                    f"lightning.pytorch as pl` throughout, or unset {AUTO} to train without memckpt"
                )

    return RefusingMemCheckpoint()


class FabricReminder:
    """Says once that a Fabric loop, which is the script's own, is not protected by a variable."""

    def __init__(self) -> None:
        self._looked = False

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        """Called by Fabric after each step."""
        if self._looked:
            return
        self._looked = True
        if is_followed(optimizer) or getattr(strategy, "global_rank", 0) != 0:
            return
        show_by_default(_log)
        _log.warning(
            "memckpt: %s=1 does not protect a Fabric loop, which is the script's own: add memckpt.attach(model, "
            "optimizer), session.loader(loader), session.restore() and session.commit()",
            AUTO,
        )
