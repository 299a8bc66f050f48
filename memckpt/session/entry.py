"""Entry point of the engine: :func:`attach`, and the session that it returns where protection is disabled."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memckpt.capture.live_state import LiveState
from memckpt.capture.phases import StallClock
from memckpt.config import AgentConfig, MemckptConfig, RedoMode, ResumeChoice
from memckpt.config.arguments import DISABLE, disabled_by_environment, with_environment
from memckpt.config.observers import Committed, Observer, Watched, observers_from_environment
from memckpt.errors import ConfigurationError, UsageError, without_our_frames
from memckpt.processes.address import node_name
from memckpt.session.loop import LoaderT, bare_model, bare_optimizer
from memckpt.session.resume.report import ResumeCheck
from memckpt.session.session import Session

_log = logging.getLogger("memckpt")
_DISABLED = f"disabled by {DISABLE}"
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _settings_by_name(face: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate :func:`attach`: say what to write where a setting stands behind the optimizers without its name."""

    @functools.wraps(face)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if len(args) > 2:
            found, write = args[2], "optimizer, run_dir=..."
            match found:
                case str() | os.PathLike():
                    write = f"optimizer, run_dir={found!r}"
                case MemckptConfig() | Mapping():
                    write = "optimizer, config=..."
                case Optimizer():
                    write = "[optimizer, another]"
            shown = repr(found) if isinstance(found, str) else type(found).__name__
            raise UsageError(
                "attach(): expected a model, its optimizer or a list of them, and all else by its name, found a third "
                f"one without, {shown}; write attach(model, {write})"
            )
        return face(*args, **kwargs)

    return called


@without_our_frames
@_settings_by_name
def attach(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    *,
    run_dir: str | os.PathLike[str] | None = None,
    resume: ResumeChoice | int | None = None,
    config: MemckptConfig | dict[str, Any] | None = None,
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
        run_dir: names the run; attempts with the same directory continue each other. Once a training of this process
            has finished, the next one has the folder ``training-2`` in it. None: MEMCKPT_RUN_DIR.
        resume: ``"auto"`` resumes if something is held, ``"require"`` raises if nothing is. ``"exact"`` raises if what
            is held cannot be resumed exactly, ``"never"`` drops what is held, a number resumes at that step. None:
            MEMCKPT_RESUME, or ``"auto"``.
        config: settings, also as the mapping that a file holds. None: what MEMCKPT_* variables say, else the defaults.
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
    bare = [bare_optimizer(each) for each in (optimizers if isinstance(optimizers, Iterable) else [optimizers])]
    is_stage = type(model).__module__.startswith("torch.distributed.pipelining")  # which is refused by its name
    optimizes = bare and all(isinstance(each, Optimizer) for each in bare)
    if not (isinstance(model, nn.Module) or is_stage) or not optimizes:
        found = ", ".join(dict.fromkeys(type(each).__name__ for each in (model, *(bare or (None,)))))
        raise UsageError(
            f"attach(): expected a model, and its optimizer or a list of optimizers, found {found}; write "
            "attach(model, optimizer, run_dir=...)"
        )
    observers = observers_from_environment()
    if disabled_by_environment():
        return DisabledSession(model, bare, extra_modules or {}, observers)
    session = Session(
        model,
        bare,
        arguments,
        data_parallel=data_parallel if wrapper is None else wrapper,
        extra_modules=extra_modules or {},
        replicated=replicated,
        observers=observers,
    )
    _raise_oom_score()
    _warn_of_a_shared_store()
    return session


def _warn_of_a_shared_store() -> None:
    """Warn in the first attempt that restarts by torchrun may hang; torchrun has read its variable by then."""
    variables = os.environ.get
    restarts = variables("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and variables("TORCHELASTIC_RESTART_COUNT") == "0"
    shared = variables("TORCHELASTIC_USE_AGENT_STORE") == "True" and variables("LOCAL_RANK") == "0"
    if not (restarts and shared and dist.is_available() and dist.is_initialized() and "gloo" in dist.get_backend()):
        return
    remedy = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun (`memckpt run -- torchrun` does)"
    if variables("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":  # a static rendezvous does not read it
        remedy = "start torchrun with --standalone or --rdzv-backend=c10d in place of --master-port"
    _log.warning("memckpt: torchrun's restarts may hang, as Gloo finds the dead in a store that they share: %s", remedy)


class DisabledSession(Session):
    """A session that protects nothing: MEMCKPT_DISABLE=1 measures a script without protection, unchanged.

    It starts over always, and counts steps as a session counts records. No part of a session is made.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        extra_modules: Mapping[str, nn.Module],
        observers: Sequence[Observer],
    ) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        self._closed = self._stepped = False
        self._step = self._record = 0
        self._hooks = [each.register_step_post_hook(self._note_step) for each in optimizers]
        self._observers = observers
        for each in observers:
            live = LiveState(model, optimizers, extra_modules)
            each.begin_session(Watched(model, live.optimizers, live.tensors, None, node_name(), rank, world_size, None))
        if rank == 0:
            _log.warning("memckpt: %s: this training is not protected; it starts over, and nothing is held", _DISABLED)

    def _note_step(self, *_: Any) -> None:
        self._stepped = True

    def _do_nothing(self, *_: Any, **__: Any) -> None: ...

    provide = unrepeatable = register = inexact = carried = announce_accumulation = log = _do_nothing
    restore = restore_tensors = restore_rng = _do_nothing
    held = report = stored_step = agent_pid = None
    mode: RedoMode = "lazy"
    mode_reason = tap_reason = _DISABLED
    check = ResumeCheck("off", "off")
    drift_ulp = 0.0
    epoch = batch = 0

    @property
    def caveats(self) -> list[str]:
        return [_DISABLED]

    @property
    def stall(self) -> StallClock:
        return StallClock()

    def metrics(self) -> dict[str, float]:
        return {}

    logger_metrics = metrics

    def describe(self) -> str:
        return f"memckpt: protecting nothing: {_DISABLED}"

    def loader(self, loader: LoaderT) -> LoaderT:
        return loader

    def epochs(self, total: int) -> Iterator[int]:
        while self.epoch < total:
            yield self.epoch
            self.epoch += 1
            self.batch = 0

    def commit(
        self, step: int | None = None, gradients_pending: bool | None = None, *, epoch_over: bool = False
    ) -> bool:
        if self._closed:
            raise UsageError("commit() after close(): attach again to go on")
        self._step = self._step + 1 if step is None else step
        if gradients_pending or (gradients_pending is None and not self._stepped):
            return False
        self._stepped = False
        self._record += 1
        self.batch += 1
        for each in self._observers:
            each.see_committed(
                Committed(self._step, self._record, lambda: (), sys._getframe(1), 0.0, False, None, ("", ""))
            )
        return True

    def close(self, finished: bool = True, *, keep_held: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        for each in self._observers:
            each.close()


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
