"""A gradient scaler's state, read without making the host wait for the device.

Scale and growth count live on the device, and ``state_dict()`` reads them, which would drain the device's queue at each
commit. Here they are copied asynchronously, and encoded when the copies have arrived.
"""

from __future__ import annotations

from typing import Any

import torch

from memckpt.state import codec


def scaler_state(scaler: Any) -> Any:
    """The scaler's ``state_dict()``; values on a device are read when they are encoded.

    A scaler whose class overrides ``state_dict()`` is asked for it directly.
    """
    scale, count = getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)
    plain = getattr(type(scaler), "state_dict", None) is not torch.amp.GradScaler.state_dict
    if plain or not (isinstance(scale, torch.Tensor) and isinstance(count, torch.Tensor)) or codec.on_host(scale):
        return scaler.state_dict()
    return {
        "scale": codec.OnDevice(scale, float),
        "growth_factor": scaler._growth_factor,
        "backoff_factor": scaler._backoff_factor,
        "growth_interval": scaler._growth_interval,
        "_growth_tracker": codec.OnDevice(count, int),
    }
