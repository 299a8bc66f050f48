"""The place of the Accelerate plugin, which is not part of this release.

Until it is, Accelerate scripts attach the engine directly with `memckpt.attach`, just as plain PyTorch
loops do.
"""

__all__: list[str] = []
