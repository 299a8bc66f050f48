"""A small training with FullyShardedDataParallel (FSDP1) in forked ranks, with deaths at chosen places."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import memckpt
from tests.support.faults.frozen import freeze
from tests.support.trainings import ddp_cases
from tests.support.trainings.ddp_cases import Job
from tests.support.trainings.engine_child import Journal
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.rank_group import become, join
from tests.support.trainings.resume_history import commit, note_resume


@dataclass(frozen=True)
class FlatJob(Job):
    """One attempt of a training with FSDP1.

    Attributes:
        strategy: sharding strategy.
        use_orig_params: whether the optimizer steps views of flat parameters, or those themselves.
        half: computes in bfloat16, and reduces in float32.
        bare: whether the wrapped module is attached, and not the wrapper.
        evaluate: whether to evaluate between each step and its commit, "with" gradients or "without".
        by_hand_at: the step before which a parameter is changed by hand.
    """

    strategy: str = "FULL_SHARD"
    use_orig_params: bool = True
    half: bool = False
    bare: bool = False
    evaluate: str = ""
    by_hand_at: int | None = None


class Block(nn.Module):
    def __init__(self, place: list[int], at: Callable[[int, str], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(33, 33)
        self.drop = nn.Dropout(0.1)
        self._place, self._at = place, at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: self._at(self._place[0], "backward"))
        return self.drop(torch.relu(self.linear(x))) + x


class Net(nn.Module):
    """Sizes that no number of ranks divides, a frozen layer, buffers."""

    def __init__(self, place: list[int], at: Callable[[int, str], None]) -> None:
        super().__init__()
        self.first = nn.Linear(7, 33)
        self.blocks = nn.Sequential(Block(place, at), Block(place, at))
        self.norm = nn.BatchNorm1d(33)
        self.last = nn.Linear(33, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.blocks(self.first(x))))


def wrap(job: FlatJob, net: Net) -> FullyShardedDataParallel:
    hybrid = job.strategy.startswith(("HYBRID", "_HYBRID"))
    names = ("replicate", "shard")
    return FullyShardedDataParallel(
        net,
        sharding_strategy=ShardingStrategy[job.strategy],
        use_orig_params=job.use_orig_params,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        device_mesh=init_device_mesh("cpu", (job.world_size // 2, 2), mesh_dim_names=names) if hybrid else None,
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32) if job.half else None,
    )


def train(job: FlatJob, rank: int) -> None:
    """One rank of the attempt."""
    logging.basicConfig(level=logging.INFO)
    become(rank, job.number, f"node{rank}" if job.nodes else None)
    join(rank, job.world_size, job.directory / "store")
    deaths = {(death.step, death.place) for death in job.deaths if death.who in (rank, "all")}

    def at(step: int, place: str) -> None:
        if (step, place) in deaths:
            os.kill(os.getpid(), signal.SIGKILL)

    place = [0]
    torch.manual_seed(0)
    net = Net(place, at)
    model = wrap(job, net)
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = None
    start = resumed = 0
    journal = Journal(job.journal(rank))
    if job.run_dir is not None:
        attached = net if job.bare else model
        session = memckpt.attach(attached, optimizer, run_dir=job.run_dir, config=job.config)
        print("described:", session.describe())
        evaluate(model)  # leaves whole parameters with initial values in the outermost module
        report = session.restore()
        start, resumed = 0 if report is None else report.step, note_resume(journal, report)
        print("resumed:", resumed)
    losses = {}
    for step in range(start, job.last_step):
        place[0] = step
        if step == job.by_hand_at:
            with torch.no_grad():
                next(param for param in model.parameters() if param.numel()).mul_(0.5)
        losses[step] = _step(job, model, optimizer, step, at)
        at(step, "stepped")
        if job.evaluate:
            evaluate(model, gradients=job.evaluate == "with")
        if session is not None:
            assert commit(journal, session, step)
        at(step, "committed")
    state = {
        "params": [param.detach().numpy().tobytes() for param in model.parameters()],
        "buffers": [buffer.numpy().tobytes() for buffer in model.buffers()],
        "optimizer": freeze(optimizer.state_dict()),
        "rng": torch.get_rng_state().numpy().tobytes(),
    }
    job.result(rank).write_bytes(pickle.dumps({"state": state, "losses": losses, "resumed": resumed}))
    if session is not None:
        session.close()
    dist.barrier()  # no rank leaves while another one still talks to it
    sys.stdout.flush()
    os._exit(0)


def evaluate(model: nn.Module, gradients: bool = False) -> None:
    """A forward without backward that draws no random number."""
    model.eval()
    with torch.set_grad_enabled(gradients):
        model(torch.ones(2, 7))
    model.train()


def _step(
    job: FlatJob,
    model: FullyShardedDataParallel,
    optimizer: torch.optim.Optimizer,
    step: int,
    at: Callable[[int, str], None],
) -> str:
    optimizer.zero_grad()
    total = 0.0
    for micro in range(job.accumulate):
        x, y = torch.randn(8, 7), torch.randint(0, 3, (8,))
        last = micro == job.accumulate - 1
        context: Any = contextlib.nullcontext() if last else model.no_sync()
        with context:
            loss = nn.functional.cross_entropy(model(x).float(), y)
            at(step, "forward")
            loss.backward()
        total += float(loss.detach())
    model.clip_grad_norm_(0.5)
    optimizer.step()
    return total.hex()


def run(lab: Lab, job: FlatJob) -> list[int]:
    """Run one attempt; returns the exit codes of its ranks."""
    return ddp_cases.run(lab, job, train)
