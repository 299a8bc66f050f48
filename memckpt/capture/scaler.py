"""A gradient scaler's state without making the host wait for the device.

Scale and growth count live on the device, and ``state_dict()`` reads them: at each commit that would drain the device's
queue. Here they are copied as everything else is, and encoded when the copy has arrived.
"""

from __future__ import annotations

from typing import Any

import torch

from memckpt.state import codec


def scaler_state(scaler: Any) -> Any:
    """What ``scaler.state_dict()`` returns; on a device with numbers that are read when they are encoded.

    A scaler whose class makes its own ``state_dict()`` is asked for that.
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
