"""Per-step in-memory checkpointing for transformers.Trainer.

trainer = Trainer(...)
protect(trainer, run_dir)
trainer.train()             # killed at any moment and started again, it continues at the exact step
"""

from transformers_memckpt.callback import MemCheckpointTrainerCallback, protect

__all__ = ["MemCheckpointTrainerCallback", "protect"]
