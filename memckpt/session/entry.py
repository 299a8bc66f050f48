"""Entry point of the engine: :func:`attach`."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memckpt.config import AgentConfig, MemckptConfig, ResumeChoice
from memckpt.config.arguments import disabled_by_environment, with_environment
from memckpt.config.observers import observers_from_environment
from memckpt.errors import ConfigurationError
from memckpt.session.disabled import DisabledSession
from memckpt.session.loop import bare_model, bare_optimizer
from memckpt.session.observed import ObservedSession
from memckpt.session.session import Session

_log = logging.getLogger("memckpt")


def attach(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    *,
    run_dir: str | os.PathLike[str] | None = None,
    resume: ResumeChoice | int | None = None,
    config: MemckptConfig | None = None,
    data_parallel: DistributedDataParallel | None = None,
    extra_modules: Mapping[str, nn.Module] | None = None,
    replicated: Sequence[str] = (),
) -> Session:
    """Protect a training from here on.

    Connects to this node's agent (starts it if there is none), agrees with the other ranks on what to resume, and
    installs the taps. Call it when model and optimizers exist and, with several ranks, after the process group does.
    With MEMCKPT_DISABLE=1 it does none of that, and the session protects nothing.

    Args:
        model: the model; a DistributedDataParallel wrapper is taken apart, and what ``fabric.setup`` returned. Its
            parameters may be DTensors (FSDP2, HSDP, tensor parallel).
        optimizers: one, or several; also what ``fabric.setup`` returned.
        run_dir: names the run; attempts with the same directory continue each other. None: MEMCKPT_RUN_DIR.
        resume: ``"auto"`` resumes if something is held, ``"require"`` raises if nothing is, ``"exact"`` raises if what
            is held cannot be resumed exactly, ``"never"`` drops what is held, a number resumes at that step. None:
            MEMCKPT_RESUME, or ``"auto"``.
        config: settings. None: what MEMCKPT_* variables say, else the defaults.
        data_parallel: the DDP wrapper, where `model` is not it.
        extra_modules: modules outside the model whose tensors belong to the state (averaged models).
        replicated: names, or patterns of names, of parameters that are plain tensors in a sharded model and the same on
            all ranks. Others are taken for a rank's own.

    Raises:
        ConfigurationError, NothingHeldError, ForeignStateError, RunBusyError, MemoryBudgetError, UnsupportedError,
        AgentError
    """
    arguments = with_environment(run_dir, resume, config)
    _check_metrics(arguments.config.agent)
    model, wrapper = bare_model(model)
    bare = [bare_optimizer(each) for each in ([optimizers] if isinstance(optimizers, Optimizer) else optimizers)]
    observers = observers_from_environment()
    if disabled_by_environment():
        return DisabledSession(model, bare, extra_modules or {}, observers)
    session = (partial(ObservedSession, observers) if observers else Session)(
        model,
        bare,
        arguments,
        data_parallel=data_parallel if wrapper is None else wrapper,
        extra_modules=extra_modules or {},
        replicated=replicated,
    )
    _raise_oom_score()
    return session


def _check_metrics(config: AgentConfig) -> None:
    """Refuse to ask for metrics without the package that makes them."""
    asked = config.metrics_port is not None or config.metrics_file is not None
    if asked and importlib.util.find_spec("prometheus_client") is None:
        raise ConfigurationError(
            "agent.metrics_port, agent.metrics_file: expected the package prometheus-client, found none; pip install "
            "'lightning-memckpt[metrics]', or set neither"
        )


def _raise_oom_score() -> None:
    """Make the OOM killer prefer the trainer to the agent, which holds the state."""
    path = Path("/proc/self/oom_score_adj")
    try:
        score = int(path.read_text())
        path.write_text(str(min(1000, max(score, 0) + 50)))
    except OSError as error:
        _log.debug("memckpt: oom_score_adj stays as it is: %s", error)
