"""Frozen values of trainings, for comparison: equal means equal in all bits."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from memckpt.state.tensors import local
from tests.support.trainings.engine_training import Training


def outcome(training: Training) -> dict[str, Any]:
    """Everything that an interruption might have changed, as plain values."""
    modules = {"model": training.model, **training.extra_modules}
    return {
        "parameters": {f"{m}.{n}": freeze(p) for m, each in modules.items() for n, p in each.named_parameters()},
        "buffers": {f"{m}.{n}": freeze(b) for m, each in modules.items() for n, b in each.named_buffers()},
        "optimizers": [freeze(optimizer.state_dict()) for optimizer in training.optimizers],
        "registered": {name: freeze(each.state_dict()) for name, each in training.registered.items()},
        "torch rng": freeze(torch.get_rng_state()),
        "cuda rng": freeze(torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None),
        "numpy rng": freeze(np.random.get_state()),
        "python rng": freeze(random.getstate()),
    }


def freeze(value: Any) -> Any:
    """A plain value that equals another if and only if all bits, types, strides and orders of keys do."""
    if isinstance(value, torch.Tensor):
        grad, value = value.requires_grad, local(value)
        data = value.detach().contiguous().reshape(-1)
        raw = data.view(torch.uint8).cpu().numpy().tobytes() if data.numel() else b""
        return ("tensor", value.device.type, str(value.dtype), tuple(value.shape), value.stride(), grad, raw)
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, Mapping):
        return {freeze(key): freeze(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [freeze(item) for item in value])
    if isinstance(value, float):
        return ("float", value.hex())
    if value is None or isinstance(value, (bool, int, str, bytes)):
        return (type(value).__name__, value)
    return (type(value).__name__, repr(value))


def differences(expected: Any, found: Any, path: str = "") -> list[str]:
    """The places at which two frozen values differ."""
    if type(expected) is not type(found):
        return [f"{path}: {str(expected)[:80]} became {str(found)[:80]}"]
    if isinstance(expected, dict):
        keys = [] if list(expected) == list(found) else [f"{path}: keys {_keys(expected)} became {_keys(found)}"]
        both = [key for key in expected if key in found]
        return keys + [line for key in both for line in differences(expected[key], found[key], f"{path}/{key}")]
    if isinstance(expected, (list, tuple)) and not (expected and expected[0] == "tensor"):
        if len(expected) != len(found):
            return [f"{path}: {len(expected)} items became {len(found)}: {str(expected)[:200]} / {str(found)[:200]}"]
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for index, (a, b) in pairs for line in differences(a, b, f"{path}/{index}")]
    return [] if expected == found else [f"{path}: {str(expected)[:120]} became {str(found)[:120]}"]


def _keys(mapping: dict[Any, Any]) -> list[Any]:
    return [key[1] if isinstance(key, tuple) else key for key in mapping]
