"""Storage as an attempt sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memckpt.config import StorageConfig
from memckpt.session.resume.storage_tier import StorageTier
from tests.support.cluster.thread_ranks import on_ranks


def start(place: Path, run_dir: Path, **settings: Any) -> StorageTier:
    """The storage tier of an attempt with one rank."""
    config = StorageConfig(url=str(place), **settings)
    tier: StorageTier = on_ranks(1, lambda ranks: StorageTier(config, run_dir, ranks, None))[0]
    return tier
