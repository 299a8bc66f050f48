"""Hydra: the configuration group ``memckpt``, and the settings of a composed configuration.

defaults: [memckpt: default]        in the application's own configuration
run_dir, resume, config = memckpt_hydra.protection(cfg)
"""

from memckpt_hydra.protection import protection
from memckpt_hydra.structured import register

__all__ = ["protection", "register"]
