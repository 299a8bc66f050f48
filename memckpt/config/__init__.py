"""The settings: their schema and their sources (environment variables, files, command lines)."""

from __future__ import annotations

from memckpt.config.schema import (
    DEFAULT_ANCHOR_PERIOD,
    AckPolicy,
    AgentConfig,
    CadencePolicy,
    DomainLevel,
    ErasureConfig,
    MemckptConfig,
    MirrorConfig,
    PeersConfig,
    RedoChoice,
    RedoMode,
    ResumeCheckChoice,
    ResumeChoice,
    Security,
    StorageChoice,
    StorageConfig,
    StorageMode,
    TapChoice,
    check_resume,
    parse_resume,
)

__all__ = [
    "DEFAULT_ANCHOR_PERIOD",
    "AckPolicy",
    "AgentConfig",
    "CadencePolicy",
    "DomainLevel",
    "ErasureConfig",
    "MemckptConfig",
    "MirrorConfig",
    "PeersConfig",
    "RedoChoice",
    "RedoMode",
    "ResumeCheckChoice",
    "ResumeChoice",
    "Security",
    "StorageChoice",
    "StorageConfig",
    "StorageMode",
    "TapChoice",
    "check_resume",
    "parse_resume",
]
