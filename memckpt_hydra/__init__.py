"""Hydra: the configuration group ``memckpt``, and what an application has asked for.

defaults: [memckpt: default]        in the application's own configuration
run_dir, resume, config = memckpt_hydra.protection(cfg)
"""

from memckpt_hydra.protection import protection
from memckpt_hydra.structured import register

__all__ = ["protection", "register"]
