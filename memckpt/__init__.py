"""memckpt: every training step recoverable.

Public names are loaded on first use, so that importing this package imports neither torch nor any framework; the
agent lives without them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from memckpt.cli.export import load as load
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

_NAMES = {
    "cli.export": ("load",),
    "config": ("AgentConfig", "ErasureConfig", "MemckptConfig", "StorageConfig"),
    "config.arguments": ("ProtectionArguments", "add_arguments", "from_args"),
    "errors": ("MemckptError",),
    "recovery.comparison": ("ComparedKind",),
    "session": ("HeldState", "RestoreReport", "Session", "attach"),
    "state.codec": ("unencodable_paths",),
    "storage.export": ("ExportedState",),
}
#: Module of each public name.
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memckpt' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"memckpt.{_HOMES[name]}"), name)
    return value
