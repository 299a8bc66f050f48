"""Trainings that end batches with unused gradients: some of these are used later, others discarded."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.optim import Optimizer

from tests.support.trainings.engine_state import BranchNet
from tests.support.trainings.engine_steps import Adversarial
from tests.support.trainings.engine_training import CLASSES, INPUTS, Case, Training


class TwoPaces(Training):
    """The first layers step after every batch, the last one after every fourth, with accumulated gradients."""

    def make_optimizers(self) -> list[Optimizer]:
        return [
            torch.optim.AdamW(self.model[:-1].parameters(), lr=1e-2),
            torch.optim.AdamW(self.model[-1].parameters(), lr=1e-2),
        ]

    def batch(self, step: int) -> float:
        loss = self.loss(step)
        loss.backward()
        self.at("before step")
        for optimizer in self.optimizers if step % 4 == 0 else self.optimizers[:1]:
            optimizer.step()
            optimizer.zero_grad()
        self.at("after step")
        self.schedulers[0].step()
        return float(loss)


class ZeroedInPlace(Training):
    """Gradients are zeroed, not set to None: in most batches a rarely used layer is stepped with zeros."""

    def make_model(self) -> nn.Module:
        return BranchNet()

    def loss(self, step: int) -> Tensor:
        self.model.use_extra = step % 4 == 3
        return super().loss(step)

    def batch(self, step: int) -> float:
        self.optimizers[0].zero_grad(set_to_none=False)
        loss = self.loss(step)
        loss.backward()
        self.at("before step")
        self.optimizers[0].step()
        self.at("after step")
        self.schedulers[0].step()
        return float(loss)


class SparseZeroedInPlace(Training):
    """The same with sparse gradients."""

    def make_model(self) -> nn.Module:
        embedding = nn.Embedding(50, 16, sparse=True)
        return nn.ModuleDict({"table": embedding, "head": nn.Linear(16, CLASSES)})

    def make_optimizers(self) -> list[Optimizer]:
        return [
            torch.optim.SparseAdam(self.model["table"].parameters(), lr=1e-2),
            torch.optim.SGD(self.model["head"].parameters(), lr=1e-2, momentum=0.9),
        ]

    def batch(self, step: int) -> float:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=False)
        x = self.model["table"](torch.randint(0, 50, (16,)))
        if step % 3 == 1:
            x = x.detach()
        loss = functional.cross_entropy(self.model["head"](x), torch.randint(0, CLASSES, (16,)))
        loss.backward()
        self.at("before step")
        for optimizer in self.optimizers:
            optimizer.step()
        self.at("after step")
        self.schedulers[0].step()
        return float(loss)


class Recycled(Adversarial):
    """A generator's backward leaves gradients on the critic; they are discarded, except in one batch, which uses them.

    Args:
        how: way of discarding: "none" and "zero" by ``zero_grad``, "by hand" without.
        used_at: the batch that uses them; 0 for none.
    """

    def __init__(self, how: str, used_at: int = 0) -> None:
        self._how, self._used_at = how, used_at
        super().__init__()

    def throw_away(self) -> None:
        match self._how:
            case "none":
                self.optimizers[1].zero_grad()
            case "zero":
                self.optimizers[1].zero_grad(set_to_none=False)
            case "by hand":
                for param in self.model["critic"].parameters():
                    param.grad = None

    def batch(self, step: int) -> float:
        generator, critic = self.model["generator"], self.model["critic"]
        if step != self._used_at:
            self.throw_away()
        loss = critic(generator(torch.randn(16, 8)).detach()).mean() - critic(self.inputs()[0]).mean()
        loss.backward()
        self.optimizers[1].step()
        self.at("before step")
        self.optimizers[0].zero_grad()
        generator_loss = -critic(generator(torch.randn(16, 8))).mean()
        generator_loss.backward()
        self.optimizers[0].step()
        self.at("after step")
        for scheduler in self.schedulers:
            scheduler.step()
        return float(loss)


class Unsynchronized(Training):
    """One rank, as from ``torchrun --nproc_per_node=1``, that reduces only the last gradients of a step.

    Args:
        kind: "ddp" or "fsdp2".
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        super().__init__()

    def make_model(self) -> nn.Module:
        if not dist.is_initialized():
            store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        model = nn.Sequential(nn.Linear(INPUTS, 64), nn.ReLU(), nn.Linear(64, CLASSES))
        if self._kind == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(model[0], mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def batch(self, step: int) -> float:
        last = step % 3 == 0
        model: Any = self.model
        if self._kind == "fsdp2":
            model.set_requires_gradient_sync(last)
        with model.no_sync() if self._kind == "ddp" and not last else contextlib.nullcontext():
            loss = self.loss(step) / 3
            loss.backward()
        if last:
            self.at("before step")
            self.optimizers[0].step()
            self.at("after step")
            self.optimizers[0].zero_grad()
            self.schedulers[0].step()
        return float(loss)


TWO_PACES = Case("two-paces", TwoPaces)
ZEROED_IN_PLACE = Case("zeros-in-place", ZeroedInPlace)
SPARSE_ZEROED_IN_PLACE = Case("sparse-zeros-in-place", SparseZeroedInPlace)


def unsynchronized(kind: str) -> Case:
    return Case(f"unsynchronized {kind}", lambda: Unsynchronized(kind))


def recycled(how: str, used_at: int = 0) -> Case:
    return Case(f"recycled {how} {used_at}", lambda: Recycled(how, used_at))
