"""Per-step, in-memory checkpointing for PyTorch Lightning.

trainer = Trainer(callbacks=[MemCheckpoint(run_dir)])
trainer.fit(model)          # killed at any moment and started again, it continues at the exact step
"""

from lightning_memckpt.callback import MemCheckpoint

__all__ = ["MemCheckpoint"]
