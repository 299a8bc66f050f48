"""memckpt for Hugging Face Accelerate: makes every step of an `Accelerator` training recoverable.

`MemCheckpointPlugin` is the whole interface; docs/accelerate.md shows the lines to add to a training.
"""

from accelerate_plugin.plugin import MemCheckpointPlugin

__all__ = ["MemCheckpointPlugin"]
