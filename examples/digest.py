"""A digest to compare runs by."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import nn


def digest(model: nn.Module) -> str:
    """Of all parameters and buffers: two runs with the same one ended alike, bit for bit."""
    return digest_of(model.state_dict())


def digest_of(state: Mapping[str, Any]) -> str:
    """The same of a model's ``state_dict()``."""
    found = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        found.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]
