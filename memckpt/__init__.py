"""memckpt: every training step recoverable.

Public names are loaded on first use, so that importing this package imports neither torch nor any framework; the
agent lives without them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from memckpt.config import AgentConfig, ErasureConfig, MemckptConfig, StorageConfig
    from memckpt.config.arguments import ProtectionArguments, add_arguments, from_args
    from memckpt.errors import MemckptError
    from memckpt.recovery.comparison import Kind as ComparedKind
    from memckpt.session import HeldState, RestoreReport, Session, attach
    from memckpt.state.codec import unencodable_paths
    from memckpt.storage.export import ExportedState

_PUBLIC = {
    "AgentConfig": ("memckpt.config", "AgentConfig"),
    "ComparedKind": ("memckpt.recovery.comparison", "Kind"),
    "ErasureConfig": ("memckpt.config", "ErasureConfig"),
    "ProtectionArguments": ("memckpt.config.arguments", "ProtectionArguments"),
    "add_arguments": ("memckpt.config.arguments", "add_arguments"),
    "from_args": ("memckpt.config.arguments", "from_args"),
    "ExportedState": ("memckpt.storage.export", "ExportedState"),
    "StorageConfig": ("memckpt.config", "StorageConfig"),
    "HeldState": ("memckpt.session", "HeldState"),
    "MemckptConfig": ("memckpt.config", "MemckptConfig"),
    "MemckptError": ("memckpt.errors", "MemckptError"),
    "RestoreReport": ("memckpt.session", "RestoreReport"),
    "Session": ("memckpt.session", "Session"),
    "attach": ("memckpt.session", "attach"),
    "unencodable_paths": ("memckpt.state.codec", "unencodable_paths"),
}

__all__ = [
    "AgentConfig",
    "ComparedKind",
    "ErasureConfig",
    "ExportedState",
    "HeldState",
    "MemckptConfig",
    "MemckptError",
    "ProtectionArguments",
    "RestoreReport",
    "Session",
    "StorageConfig",
    "add_arguments",
    "attach",
    "from_args",
    "unencodable_paths",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'memckpt' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value
