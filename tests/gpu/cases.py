"""Trainings that matter on an accelerator, beside those of the engine's tests."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.nn import functional

from memckpt.state import rng
from tests.support.late import process_group
from tests.support.trainings.engine_cases import SHAPE_CASES
from tests.support.trainings.engine_optimizers import OPTIMIZER_CASES
from tests.support.trainings.engine_steps import ACCUMULATION, UNKNOWN_CHANGE_CASES
from tests.support.trainings.engine_training import CLASSES, INPUTS, Case, Training


def alone(device: str | None = None) -> None:
    """A job of one rank, with the own backend of `device` (by default of where tensors are made)."""
    if not dist.is_initialized():
        kind = device or torch.get_default_device().type
        if kind == "late":
            process_group.register()
        backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "late": process_group.BACKEND}[kind]
        with torch.device("cpu"):
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


class FullySharded(Training):
    """FSDP2 on one rank."""

    def make_model(self) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        alone()
        model = super().make_model()
        fully_shard(model[0])
        return fully_shard(model)


class Flattened(Training):
    """FSDP1 on one rank."""

    def make_model(self) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel

        alone()
        model = super().make_model()
        device = next(model.parameters()).device
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=device)


class Parallel(Training):
    """DDP on one rank: buckets and a communication hook."""

    def make_model(self) -> nn.Module:
        alone()
        return nn.parallel.DistributedDataParallel(super().make_model())


class Inductor(Training):
    """The model is compiled, with the compiler that a GPU is trained with."""

    def watch_points(self) -> None:
        backend = "inductor" if self.device_type == "cuda" else "eager"
        inductor.compile_threads = 1  # its processes outlive a killed trainer by seconds
        self.compiled = torch.compile(self.model, backend=backend)

    def loss(self, step: int) -> Tensor:
        x, y = self.inputs()
        return functional.cross_entropy(self.compiled(x), y)


class Capturable(Training):
    """Rate and step counts on the device, as graphs need them."""

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        on_device = self.device_type != "cpu"
        rate = torch.tensor(1e-2) if on_device else 1e-2
        return [torch.optim.AdamW(self.model.parameters(), lr=rate, capturable=on_device)]

    def make_schedulers(self) -> list[torch.optim.lr_scheduler.LRScheduler]:
        return [torch.optim.lr_scheduler.ExponentialLR(self.optimizers[0], 0.95)]


class Replayed(Training):
    """Forward and backward in a CUDA graph; the step outside of it. On others as if there were none."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, 256), nn.ReLU(), nn.Linear(256, CLASSES))

    def begin(self, step: int) -> None:
        self.graph = None
        if self.device_type != "cuda":
            return
        with rng.preserved():
            self.record()

    def record(self) -> None:
        self.x, self.y = self.inputs()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            params = list(self.model.parameters())
            for _ in range(3):
                torch.autograd.grad(functional.cross_entropy(self.model(self.x), self.y), params)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        self.optimizers[0].zero_grad(set_to_none=True)
        with torch.cuda.graph(self.graph):
            self.captured = functional.cross_entropy(self.model(self.x), self.y)
            self.captured.backward()

    def batch(self, step: int) -> float:
        if self.graph is None:
            return super().batch(step)
        x, y = self.inputs()
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        self.at("before step")
        self.optimizers[0].step()
        self.schedulers[0].step()
        return float(self.captured)


#: They change the state behind each step: redo is given up for snapshots.
GIVEN_UP = {"projection"}
OWN = [
    Case("fsdp2", FullySharded),
    Case("fsdp1", Flattened),
    Case("ddp", Parallel),
    Case("inductor", Inductor, steps=16),
    Case("capturable", Capturable),
    Case("replayed", Replayed),
]
#: Of the engine's trainings; on a CPU they are tested there.
NAMES = [
    "adversarial", "kept-gradients", "step-in-backward", "interrupted", "zeroed-in-place", "gradient-penalty",
    "projection", "closure", "clip-norm", "clip-norm-parts", "clip-value", "scaler", "scaler-clip", "scaler-fused",
    "scaler-fused-clip", "bf16-autocast", "bf16-adamw", "bf16-adamw-fused", "bf16-sgd", "channels-last",
    "channels-last-fused", "odd", "buffers", "moving-average", "tied", "adamw", "adamw-foreach", "adamw-fused",
    "adamw-amsgrad", "sgd-momentum", "sgd-nesterov", "sgd-fused", "muon", "own-clipping", "gradient-noise",
]  # fmt: skip
_CASES = {case.name: case for case in [*SHAPE_CASES, *OPTIMIZER_CASES, *UNKNOWN_CHANGE_CASES]}
BORROWED = [ACCUMULATION, *(_CASES[name] for name in NAMES)]
