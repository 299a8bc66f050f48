"""Arguments of `memckpt.attach`, and of every adapter, from a composed configuration."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, SCMode

from memckpt import ProtectionArguments
from memckpt.config import parse_resume
from memckpt.config.settings import from_mapping
from memckpt.errors import ConfigurationError

_log = logging.getLogger("memckpt")


def protection(cfg: DictConfig) -> ProtectionArguments:
    """Read ``memckpt``, ``resume`` and ``run_dir`` of an application's configuration.

    If ``run_dir`` is absent or null, it is ``memckpt`` in Hydra's output directory. That has a timestamp in its name
    unless ``hydra.run.dir`` (with ``--multirun`` ``hydra.sweep.dir`` and ``subdir``) is set; a restart would not find
    the run again. A warning is logged then; also if ``hydra.job.chdir`` puts a relative ``run_dir`` there, and if all
    jobs of a ``--multirun`` share one.

    Raises:
        ConfigurationError: a part is missing, or a value is out of range.
    """
    if "memckpt" not in cfg:
        raise ConfigurationError(
            "expected the group memckpt in the configuration, found none; add `- memckpt: default` to its defaults list"
        )
    values = OmegaConf.to_container(cfg.memckpt, resolve=True, enum_to_str=True, structured_config_mode=SCMode.DICT)
    if not isinstance(values, dict):
        raise ConfigurationError(f"memckpt: expected a mapping, found {values!r}")
    run_dir = cfg.get("run_dir")
    if run_dir is not None:
        written: Any = OmegaConf.to_container(cfg, resolve=False)
        _look_at(str(run_dir), str(written["run_dir"]))
    return ProtectionArguments(
        str(run_dir) if run_dir is not None else _in_output_directory(),
        parse_resume(cfg.get("resume", "auto")),
        from_mapping({str(name): value for name, value in values.items()}),
    )


def _look_at(run_dir: str, written: str) -> None:
    """Warn if the next start would use another run directory, or if several jobs share this one."""
    if not HydraConfig.initialized():
        return
    hydra: Any = HydraConfig.get()
    if hydra.job.chdir and not Path(run_dir).is_absolute():
        _in_output_directory()
    elif hydra.mode is not None and hydra.mode.name == "MULTIRUN" and "${" not in written:
        _log.warning(
            "memckpt: every job of a --multirun has the run_dir %r, where only their order tells them apart: set it to "
            "null, or to a name of each job's own such as runs/${hydra:job.override_dirname}",
            run_dir,
        )


def _in_output_directory() -> str:
    if not HydraConfig.initialized():
        raise ConfigurationError("run_dir: expected a directory outside a Hydra application, found none")
    hydra: Any = HydraConfig.get()
    unresolved: Any = HydraConfig.instance().cfg
    raw = OmegaConf.to_container(OmegaConf.masked_copy(unresolved.hydra, ["run", "sweep"]))
    assert isinstance(raw, dict)
    places = [raw["sweep"]["dir"], raw["sweep"]["subdir"]] if hydra.mode.name == "MULTIRUN" else [raw["run"]["dir"]]
    if any("${now:" in place for place in places):
        _log.warning(
            "memckpt: Hydra's output directory has a timestamp in its name, so a restart will not find this run: set "
            "an absolute run_dir, or hydra.run.dir (with --multirun hydra.sweep.dir) to a name that stays"
        )
    elif hydra.mode.name == "MULTIRUN" and "${hydra.job.num}" in places[1]:
        _log.warning(
            "memckpt: jobs are told apart by their number: a restart finds their runs only with the same sweep; set "
            "hydra.sweep.subdir=${hydra.job.override_dirname}"
        )
    return str(Path(hydra.runtime.output_dir) / "memckpt")
