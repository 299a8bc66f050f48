"""What watches a training by its optimizers alone: a line with digests behind each of their steps.

It comes into the command's processes as ``sitecustomize``, waits until they import torch's optimizers, and changes no
tensor and no generator. Steps and records are counted from 1 in each process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

#: Links in the directory of the lines. The order leads to the steps behind which the process ends itself: in the middle
#: of a file, or before so many events of files, a second number. What it would have done then is the other one.
ORDER, DONE = "order", "done"
#: While this is there a process waits behind its first step: the drill finds out which step that is.
HOLD = "hold"
_HOLD_SECONDS = 60.0
#: Events of files beside those of opening one to write.
_OF_TWO = frozenset({"os.link", "os.rename", "os.symlink"})
_EVENTS = frozenset({"os.mkdir", "os.remove", "os.rmdir", "os.truncate"}) | _OF_TWO
#: Smaller files are taken for logs.
_SAVE_BYTES = 32 << 10
#: Directory of the lines.
WITNESS = "DRILL_WITNESS_OF_MEMCKPT"  # memckpt warns of variables that begin with its name, and are no settings
_OPTIMIZERS = "torch.optim.optimizer"
_SITE = """\
import os, sys
import memckpt_tools.drill.witness

memckpt_tools.drill.witness.wait_for_optimizers()
# This file stands before another one of its name, which is imported now.
own, here = os.path.dirname(__file__), sys.modules.pop("sitecustomize")
sys.path[:] = [each for each in sys.path if each != own]
try:
    import sitecustomize
except ImportError:
    pass
sys.modules.setdefault("sitecustomize", here)
sys.path.insert(0, own)
"""


def variables(directory: Path, lines: Path) -> dict[str, str]:
    """What has the Python processes of a command watched: lines go to `lines`; `directory` gets what they import."""
    directory.mkdir(exist_ok=True)
    (directory / "sitecustomize.py").write_text(_SITE)
    path = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, WITNESS: str(lines)}


def limit_of(nbytes: int) -> int:
    """At how many bytes a file is cut off; `nbytes`: of all parameters of the process."""
    return max(_SAVE_BYTES, nbytes // 2)


def wait_for_optimizers() -> None:
    """Begin to watch once this process has imported torch's optimizers."""
    if WITNESS in os.environ:
        # A file that becomes larger than a limit ends the process. Python asks for an error in its place.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Stands before all finders until the module of the optimizers is found."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _OPTIMIZERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_watch(module: ModuleType) -> None:
                load(module)
                _Witness(Path(os.environ[WITNESS])).watch(module)

            spec.loader.exec_module = load_and_watch  # type: ignore[method-assign]
        return spec


class _Witness:
    """Writes the lines of one process, from its first step on."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._begun = self._limits = False
        self._steps = 0
        self._below = os.path.join(os.getcwd(), "")
        self._events: list[str] = []  # of files, since the last step
        self._deadly = 0  # number of the event before which this process ends; 0: none

    def watch(self, optimizers: ModuleType) -> None:
        from memckpt_tools.drill.losses import LossTap

        sys.addaudithook(self._see)
        self._losses = LossTap()
        optimizers.register_optimizer_step_pre_hook(self._before)
        optimizers.register_optimizer_step_post_hook(self._behind)

    def _see(self, event: str, args: tuple[Any, ...]) -> None:
        """Note an event of a file below the working directory, or end this process before it."""
        if event in _EVENTS or (event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
            found = args[: 2 if event in _OF_TWO else 1]
            paths = [os.path.abspath(os.fsdecode(one)) for one in found if isinstance(one, (str, bytes))]
            if any(one.startswith(self._below) and "__pycache__" not in one for one in paths):
                names = " to ".join(map(os.path.basename, paths))
                self._events.append(f"{event.removeprefix('os.')} {names}")
                if len(self._events) == self._deadly:
                    with contextlib.suppress(FileExistsError):  # another rank was first
                        os.symlink(self._events[-1], self._directory / DONE)
                    os.kill(os.getpid(), signal.SIGKILL)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._begun and not makes_state(optimizer, kwargs):
            self._begun = True
            self._begin(optimizer)

    def _begin(self, optimizer: Optimizer) -> None:
        """Write the state before the first step: the one that the script has loaded, or made."""
        from torch.nn import Parameter

        from memckpt.capture.copier import copier_for, device_of
        from memckpt.config.observers import Watched
        from memckpt.processes.handles import start_ticks
        from memckpt_tools.drill.lines import Begun, Restored, Weights, Writer
        from memckpt_tools.drill.probe import Fingerprints

        rank, world_size = _place()
        optimizers = _optimizers(optimizer)
        tensors = _named_tensors(optimizers)
        live = Watched(None, optimizers, lambda: tensors, None, "", rank, world_size, None)  # type: ignore[arg-type]
        self._fingerprints = Fingerprints(live, copier_for(device_of(tensors)))
        self._writer = Writer(self._directory / f"rank-{rank}.jsonl")
        pid = os.getpid()
        self._writer.write(Begun(pid, start_ticks(pid), rank, world_size, time.monotonic(), None, ""))
        self._nbytes = sum(each.nbytes for each in tensors.values() if isinstance(each, Parameter))
        self._writer.write(Weights(self._nbytes))
        digests, sketches = self._fingerprint()
        self._writer.write(Restored(0, 0, "", 0.0, None, digests, sketches))

    def _behind(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        from memckpt_tools.drill.job import pause
        from memckpt_tools.drill.lines import TEXT, Files, Taken

        if not self._begun:
            return
        now = time.monotonic()
        self._limit_files(False)  # a line is no save
        events, self._events = tuple(self._events), []
        if events:
            self._writer.write(Files(self._steps, events))
        self._steps += 1
        losses = self._losses.take_losses()
        digests, sketches = self._fingerprint()
        groups = {
            f"{name} of group {index}": repr(value)
            for index, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if isinstance(value, (bool, int, float, tuple)) and name != "initial_lr"
        }
        values = {"hyperparameters": {name: TEXT + text for name, text in groups.items()}}
        seconds = time.monotonic() - now
        self._writer.write(
            Taken(self._steps, self._steps, now, seconds, losses, digests, sketches, values, 0.0, False, None, None)
        )
        while self._steps == 1 and (self._directory / HOLD).exists() and time.monotonic() < now + _HOLD_SECONDS:
            pause()
        with contextlib.suppress(FileNotFoundError):
            due, _, event = os.readlink(self._directory / ORDER).partition(" ")
            self._limit_files(self._steps >= int(due) and not event)
            self._deadly = int(event or 0) if self._steps >= int(due) else 0

    def _limit_files(self, limits: bool) -> None:
        """Have the kernel end this process in the middle of a file that becomes large, or not.

        Processes that it has started before go on without: workers of loaders share memory as files.
        """
        if limits != self._limits:
            self._limits = limits
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_of(self._nbytes) if limits else most, most))

    def _fingerprint(self) -> tuple[bytes, bytes]:
        keys, digests, sketches = self._fingerprints.fingerprint_state()
        self._writer.name_tensors(keys)
        return digests, sketches


def makes_state(optimizer: Optimizer, kwargs: dict[str, Any]) -> bool:
    """Whether this is no step of training: so torch's ``get_state_dict`` makes the state that is loaded."""
    return kwargs == {"closure": None} and not any(group.get("lr", 1) for group in optimizer.param_groups)


def _place() -> tuple[int, int]:
    """Rank and world size of this process."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _optimizers(first: Optimizer) -> list[Optimizer]:
    """The optimizer that steps first, and all others that are alive, but for those that wrap another one."""
    from torch.optim import Optimizer

    alive = [each for each in gc.get_objects() if issubclass(type(each), Optimizer) and "param_groups" in vars(each)]
    return [first, *(each for each in alive if each is not first)]


def _named_tensors(optimizers: Sequence[Optimizer]) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, of the models that are stepped; by number where a parameter is no model's."""
    from torch import nn

    stepped = {id(each): each for one in optimizers for group in one.param_groups for each in group["params"]}
    models = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    inside = {id(child) for each in models for child in each.children()}
    found: dict[str, torch.Tensor] = {}
    for model in models:
        if id(model) in inside or stepped.keys().isdisjoint(map(id, model.parameters())):
            continue
        prefix = f"{type(model).__qualname__}: " if found else ""
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            found[prefix + name] = tensor
    known = set(map(id, found.values()))
    rest = [each for key, each in stepped.items() if key not in known]
    return found | {f"tensor {index} of no model": each for index, each in enumerate(rest)}
