"""memckpt: every training step recoverable.

Public names are loaded on first use, so that importing this package imports neither torch nor any framework; the
agent lives without them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from memckpt.config import AgentConfig as AgentConfig
    from memckpt.config import ErasureConfig as ErasureConfig
    from memckpt.config import MemckptConfig as MemckptConfig
    from memckpt.config import StorageConfig as StorageConfig
    from memckpt.config.arguments import ProtectionArguments as ProtectionArguments
    from memckpt.config.arguments import add_arguments as add_arguments
    from memckpt.config.arguments import from_args as from_args
    from memckpt.errors import MemckptError as MemckptError
    from memckpt.recovery.comparison import ComparedKind as ComparedKind
    from memckpt.session import HeldState as HeldState
    from memckpt.session import RestoreReport as RestoreReport
    from memckpt.session import Session as Session
    from memckpt.session import attach as attach
    from memckpt.state.codec import unencodable_paths as unencodable_paths
    from memckpt.storage.export import ExportedState as ExportedState

#: Module of each public name.
_HOMES = {
    "AgentConfig": "config",
    "ComparedKind": "recovery.comparison",
    "ErasureConfig": "config",
    "ExportedState": "storage.export",
    "HeldState": "session",
    "MemckptConfig": "config",
    "MemckptError": "errors",
    "ProtectionArguments": "config.arguments",
    "RestoreReport": "session",
    "Session": "session",
    "StorageConfig": "config",
    "add_arguments": "config.arguments",
    "attach": "session",
    "from_args": "config.arguments",
    "unencodable_paths": "state.codec",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memckpt' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"memckpt.{_HOMES[name]}"), name)
    return value
