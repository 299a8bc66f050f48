"""Digests of a model's state, to compare runs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import nn


def digest(model: nn.Module) -> str:
    """Digest of all parameters and buffers, 16 hex digits: equal for runs that ended bit for bit alike."""
    return digest_of(model.state_dict())


def digest_of(state: Mapping[str, Any]) -> str:
    """As :func:`digest`, for a model's ``state_dict()``."""
    found = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        found.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]
