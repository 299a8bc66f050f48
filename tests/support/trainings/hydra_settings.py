"""Settings that Hydra composes."""

from __future__ import annotations

from typing import Any


def compose(*overrides: str) -> Any:
    """In an application of somebody else's, which has no configuration of its own."""
    import hydra

    with hydra.initialize(version_base="1.3", config_path=None):
        return hydra.compose(overrides=["+run_dir=somewhere", *overrides])
