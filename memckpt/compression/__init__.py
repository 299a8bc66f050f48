"""Compressed averages of gradients: communication hooks for DDP, with or without checkpoints.

Under memckpt, ``MemckptConfig(compression=TopK(ratio=0.01))`` is all: the compressed average is the record. Without it,
a compressor is an ordinary hook::

    model.register_comm_hook(compression.state(TopK(ratio=0.01), model.module.parameters()), compression.hook)
"""

from __future__ import annotations

from memckpt.compression.hook import hook, reducer_for, state
from memckpt.compression.reduction import Reducer
from memckpt.config import CompressionConfig, HalfPrecision, PowerSGD, Quantized8, RandomK, TopK

__all__ = [
    "CompressionConfig",
    "HalfPrecision",
    "PowerSGD",
    "Quantized8",
    "RandomK",
    "Reducer",
    "TopK",
    "hook",
    "reducer_for",
    "state",
]
