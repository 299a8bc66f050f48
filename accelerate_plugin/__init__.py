"""memckpt for Hugging Face Accelerate: every step of an `Accelerator` training recoverable.

`MemCheckpointPlugin` is all that a training needs; docs/accelerate.md shows the lines that are new.
"""

from accelerate_plugin.plugin import MemCheckpointPlugin

__all__ = ["MemCheckpointPlugin"]
