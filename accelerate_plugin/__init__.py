"""The place of the Accelerate plugin, which is not part of this release.

Until it is, only Lightning trainings and plain PyTorch loops are protected.
"""

__all__: list[str] = []
