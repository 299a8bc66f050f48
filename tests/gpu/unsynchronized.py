"""A training whose host runs ahead of the device, as it should: whatever copies too early or too late takes wrong bits.

It stops and is attached to again within one process. Nothing in a step waits for the device, unlike in trainings that
note their losses.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import memckpt
from memckpt.capture.copier import AcceleratorCopier
from memckpt.config import MemckptConfig
from memckpt.state.tensors import local
from tests.support.late import device as late
from tests.support.trainings.engine_child import use_device

#: The host stops after these steps, and attaches anew.
STOPS = (5, 6, 11, 16)


@dataclass(frozen=True)
class Kind:
    """How it is trained.

    Attributes:
        precision: "fp32", "bf16" (parameters), or "fp16" (autocast with a gradient scaler, which skips a step).
        optimizer: its keyword arguments beside the rate; of SGD where there is a momentum, else of AdamW.
        clip: whether gradients are clipped by their norm.
        accumulate: micro-batches of a step.
        tap: as in the settings.
        zero_in_place: whether gradients are set to zero in place.
        own_stream: whether it trains on a stream of its own, and commits outside of it.
        averaged: whether an average of all parameters is kept beside the model, and carried.
        masked: whether biases are others while forward and backward run, unseen.
        swapped: whether other weights take the model's place between steps, unseen, as averages for a validation.
    """

    precision: str = "fp32"
    optimizer: dict[str, Any] = field(default_factory=dict)
    clip: bool = False
    accumulate: int = 1
    tap: str = "auto"
    zero_in_place: bool = False
    own_stream: bool = False
    swapped: bool = False
    averaged: bool = False
    masked: bool = False


class Net(nn.Module):
    """Channels-last convolutions with running statistics, then wide matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # The gradient of a bias before a norm is rounding and nothing else.
        self.convolution = nn.Conv2d(3, 32, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(32)
        self.wide = nn.ModuleList(nn.Linear(32 * 64 if not index else width, width) for index in range(3))
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(torch.relu(self.norm(self.convolution(x))), 0.1, self.training).flatten(1)
        for layer in self.wide:
            x = torch.relu(layer(x))
        return self.last(x)


class Run:
    """One model with what trains it."""

    def __init__(self, kind: Kind, device: str, width: int) -> None:
        torch.manual_seed(7)
        self.kind, self.device = kind, torch.device(device)
        self.model = Net(width).to(device).to(memory_format=torch.channels_last)
        if kind.precision == "bf16":
            self.model.to(torch.bfloat16)
        self.beside = {"average": copy.deepcopy(self.model).requires_grad_(False)} if kind.averaged else {}
        make: Any = torch.optim.SGD if "momentum" in kind.optimizer else torch.optim.AdamW
        self.optimizer = make(self.model.parameters(), lr=1e-3, **kind.optimizer)
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=kind.precision == "fp16", init_scale=256.0, growth_interval=4
        )

        self._stream: Callable[[], Any] = contextlib.nullcontext

    def begin(self) -> None:
        """Train from here on, behind what made and restored the model."""
        if self.kind.own_stream and self.device.type != "cpu":
            module = torch.get_device_module(self.device)
            stream = module.Stream()
            stream.wait_stream(module.current_stream())
            self._stream = functools.partial(module.stream, stream)

    def step(self, number: int) -> None:
        with self._stream():
            if self.kind.swapped:
                self._swap()
            self._step(number)

    def _swap(self) -> None:
        kept = [param.detach().clone() for param in self.model.parameters()]
        for param in self.model.parameters():
            param.data.zero_()
        for param, value in zip(self.model.parameters(), kept, strict=True):
            param.data.copy_(value)

    @contextlib.contextmanager
    def _masked(self) -> Iterator[None]:
        bias = self.model.last.bias.data[3:5]
        kept = bias.clone()
        bias.fill_(-1e4)
        yield
        bias.copy_(kept)

    def _step(self, number: int) -> None:
        with self._masked() if self.kind.masked else contextlib.nullcontext():
            self._backward(number)
        if self.kind.clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not self.kind.zero_in_place)
        for average in self.beside.values():
            for ours, theirs in zip(average.parameters(), self.model.parameters(), strict=True):
                ours.lerp_(theirs.detach(), 0.1)

    def _backward(self, number: int) -> None:
        for _ in range(self.kind.accumulate):
            x = torch.randn(16, 3, 8, 8, device=self.device)
            x = x.to(self.model.last.weight.dtype).to(memory_format=torch.channels_last)
            y = torch.randint(0, 10, (16,), device=self.device)
            with torch.autocast(self.device.type, torch.float16, enabled=self.kind.precision == "fp16"):
                loss = functional.cross_entropy(self.model(x).float(), y)
            scaled = self.scaler.scale(loss / self.kind.accumulate)
            (scaled * float("inf") if number == 8 and self.kind.precision == "fp16" else scaled).backward()

    def tensors(self) -> dict[str, Tensor]:
        found = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        for average in self.beside.values():
            found.update((f"average.{name}", param) for name, param in average.named_parameters())
        for index, state in self.optimizer.state_dict()["state"].items():
            found.update({f"{index}.{key}": value for key, value in state.items() if isinstance(value, Tensor)})
        return {name: local(tensor) for name, tensor in found.items()}

    def digests(self) -> dict[str, str]:
        found = {}
        for name, tensor in self.tensors().items():
            raw = tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
            found[name] = hashlib.blake2b(raw, digest_size=8).hexdigest()
        found["scaler"] = str(self.scaler.state_dict())
        return found


@contextlib.contextmanager
def no_waits(device: str, forbidden: bool) -> Iterator[None]:
    """Have torch raise where the host would wait for the device."""
    if device == "cpu" or not forbidden:
        yield
        return
    if device.startswith("late"):
        with late.no_waits():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def attach(run: Run, run_dir: Path, redo: str) -> memckpt.Session:
    """A session whose every commit has all that a resume needs."""
    config = MemckptConfig(
        redo=redo,  # type: ignore[arg-type]
        tap=run.kind.tap,  # type: ignore[arg-type]
        anchor_period_steps=4,
        storage=None,
        resume_check="off",
    )
    session = memckpt.attach(run.model, run.optimizer, run_dir=run_dir, config=config, extra_modules=run.beside)
    session.register("scaler", run.scaler)
    return session


def train(kind: Kind, device: str, width: int, run_dir: Path, redo: str, watch_waits: bool, report: Path) -> None:
    """Train undisturbed, then with stops; writes what differs, drifted or kept memory, and where it resumed."""
    use_device(device)
    torch.set_default_device("cpu")
    is_late = torch.device(device).type == "late"
    if is_late:
        AcceleratorCopier.BUCKET_BYTES = 1 << 12  # so that each large tensor is on its way at once, as on a card
    undisturbed = Run(kind, device, width)
    undisturbed.begin()
    for number in range(1, STOPS[-1] + 1):
        undisturbed.step(number)
    if device != "cpu":
        torch.accelerator.synchronize()
    expected = undisturbed.digests()
    reference = {name: tensor.double() for name, tensor in undisturbed.tensors().items()} if redo == "eager" else {}
    del undisturbed

    resumed, problems, drift = [], [], 0.0
    for index, stop in enumerate(STOPS):
        if is_late:
            late.be_slow(*[(150, 0), (0, 600)][index % 2])  # computing, and copying
        run = Run(kind, device, width)
        session = attach(run, run_dir, redo)
        restored = session.restore()
        first = 0 if restored is None else restored.step
        resumed.append(first)
        run.begin()
        for number in range(first + 1, stop + 1):
            # The first steps of a process make generations and settle what is done once.
            with no_waits(device, watch_waits and number > first + 3):
                random.random()
                run.step(number)
                session.commit(number, gradients_pending=False)
            if session._recorder.problem is not None:
                problems.append(f"step {number}: {session._recorder.problem}")
        drift = max(drift, session.drift_ulp)
        session.close(finished=stop == STOPS[-1])
    if device != "cpu":
        torch.accelerator.synchronize()
    found = run.digests()
    far = {
        name: float((tensor.double() - reference[name]).abs().max() / reference[name].abs().max().clamp(min=1e-30))
        for name, tensor in run.tensors().items()
        if name in reference and tensor.numel()
    }
    kept = late.memory_sizes()[1] if is_late else 0
    differing = [name for name, digest in expected.items() if found.get(name) != digest]
    result = {"differing": differing, "resumed": resumed, "problems": problems, "drift": drift, "far": far}
    result["kept"] = kept
    report.write_text(json.dumps(result))
