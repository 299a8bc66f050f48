"""Per-step, in-memory checkpointing for PyTorch Lightning.

trainer = Trainer(callbacks=[MemCheckpoint(run_dir)])
trainer.fit(model)          # killed at any moment and started again, it continues at the exact step

The callback is loaded on first use. Lightning imports this package for every Trainer of every script in an environment
that has it, to ask it for callbacks (`entry_points`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_memckpt.callback import MemCheckpoint

__all__ = ["MemCheckpoint"]


def __getattr__(name: str) -> Any:
    if name != "MemCheckpoint":
        raise AttributeError(f"module 'lightning_memckpt' has no attribute {name!r}")
    from lightning_memckpt.callback import MemCheckpoint

    globals()[name] = MemCheckpoint
    return MemCheckpoint
