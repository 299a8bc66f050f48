"""Small trainings with DDP, and with FullyShardedDataParallel (FSDP1), for ranks that are killed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from memckpt import compression
from memckpt.config import CompressionConfig
from memckpt.processes.control import ask_status
from tests.support.cluster.waiting import until
from tests.support.faults.frozen import freeze
from tests.support.trainings.engine_child import config, listen_until
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import Job, Rank, RankTraining, fresh_directory

STEPS = 14


@dataclass(frozen=True)
class DdpJob(Job):
    """One attempt of a DDP training."""

    last_step: int = STEPS
    world_size: int = 2
    hook: str = ""  # time at which a user's communication hook is registered, before or after attach()
    users_hook: str = "halving"  # which: "halving", or torch's "fp16" or "powersgd" (its "bf16" takes NCCL only)
    halved: Sequence[int] = ()  # steps in which a gradient is halved by hand, past torch's version counters
    ddp: dict[str, Any] = field(default_factory=dict)  # arguments of DistributedDataParallel
    accumulate: int = 1  # micro-batches of a step
    #: Whether there is a buffer too large to be copied with every record; "own": with other initial values on each
    #: rank.
    table: str = ""
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.AdamW(params, lr=0.01)
    averages: bool = False  # whether ranks keep a moving average of the model
    average_on: Sequence[int] = (0, 1)  # which
    flip: tuple[int, int] | None = None  # (rank, step) at which one bit of a rank's average flips
    dtype: torch.dtype = torch.float32  # of parameters, buffers and inputs

    def training(self, rank: Rank) -> DdpTraining:
        return DdpTraining(self, rank)


def job_of(lab: Lab, redo: str = "lazy", compression: CompressionConfig | None = None, **settings: Any) -> DdpJob:
    """An attempt with DDP; `nodes=True`: every rank is its own node."""
    if settings.get("nodes") is True:
        settings["nodes"] = settings.get("world_size", 2)
    return DdpJob(fresh_directory(lab), lab.run_dir, config(redo, compression=compression), **settings)


class Net(nn.Module):
    """Examples of all that DDP treats specially: buffers, a layer that is used in some batches only."""

    table: torch.Tensor

    def __init__(self, with_unused: bool, with_table: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(16, 96)
        self.norm = nn.BatchNorm1d(96)
        self.drop = nn.Dropout(0.2)
        self.middle = nn.Linear(96, 96)
        self.now_and_then = nn.Linear(96, 96) if with_unused else None
        self.last = nn.Linear(96, 4)
        if with_table:
            self.register_buffer("table", torch.zeros(1 << 15))

    def forward(self, x: torch.Tensor, use_all: bool) -> torch.Tensor:
        x = self.drop(torch.relu(self.norm(self.first(x))))
        x = torch.relu(self.middle(x))
        if self.now_and_then is not None and use_all:
            x = x + self.now_and_then(x)
        return self.last(x)


def halving_hook(state: Any, bucket: Any) -> Any:
    """A user's communication hook: averages in half the range, which gives other bits than DDP's own averaging."""
    flat = bucket.buffer().div_(2 * dist.get_world_size())
    work = dist.all_reduce(flat, async_op=True)
    return work.get_future().then(lambda done: done.value()[0].mul_(2))


halving_hook.__annotations__.clear()  # torch compares them with its own classes


class DdpTraining(RankTraining):
    def __init__(self, job: DdpJob, rank: Rank) -> None:
        self.job, self.rank, self.at = job, rank.rank, rank.at
        torch.manual_seed(0)
        net = self.net = Net(bool(job.ddp.get("find_unused_parameters")), bool(job.table)).to(job.dtype)
        averages = job.averages and rank.rank in job.average_on
        self.average = copy.deepcopy(net).requires_grad_(False) if averages else None
        self.model = DistributedDataParallel(net, **{"bucket_cap_mb": 0.02, **job.ddp})
        if job.table == "own":
            net.table.fill_(rank.rank + 1 if job.number == 0 else -1.0)
        torch.manual_seed(100 + rank.rank)
        self.optimizers = job.optimizer(net.parameters())
        self.attach_arguments = {} if self.average is None else {"extra_modules": {"average": self.average}}
        if job.hook == "before":
            self._register_hook()
        if job.run_dir is None and job.config is not None and job.config.compression is not None:
            params = [param for param in net.parameters() if param.requires_grad]
            self.model.register_comm_hook(compression.state(job.config.compression, params), compression.hook)
        net.middle.weight.register_hook(lambda gradient: self.at("backward"))

    def attached(self) -> None:
        if self.job.hook == "after":
            self._register_hook()

    def _register_hook(self) -> None:
        match self.job.users_hook:
            case "halving":
                self.model.register_comm_hook(None, halving_hook)
            case "powersgd" | "powersgd-in-fp16":
                state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=3, min_compression_rate=1)
                hook = powerSGD_hook.powerSGD_hook
                wrapped = hook if self.job.users_hook == "powersgd" else default_hooks.fp16_compress_wrapper(hook)
                self.model.register_comm_hook(state, wrapped)
            case name:
                self.model.register_comm_hook(None, getattr(default_hooks, f"{name}_compress_hook"))

    def step(self, number: int) -> str:
        job, net, optimizer = self.job, self.net, self.optimizers
        optimizer.zero_grad()
        total = 0.0
        for micro in range(job.accumulate):
            x, y = torch.randn(8, 16).to(job.dtype), torch.randint(0, 4, (8,))
            loss = nn.functional.cross_entropy(self.model(x, number % 3 != 1), y)
            self.at("forward")
            with contextlib.nullcontext() if micro == job.accumulate - 1 else self.model.no_sync():
                loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        if number in job.halved and net.middle.weight.grad is not None:
            net.middle.weight.grad.data.mul_(0.5)
        optimizer.step()
        if self.average is not None:
            with torch.no_grad():
                for ours, theirs in zip(self.average.parameters(), net.parameters(), strict=True):
                    ours.lerp_(theirs, 0.1)
            if job.flip == (self.rank, number):
                self.average.middle.weight.view(torch.int32)[7, 3] ^= 1
        return total.hex()

    def committed(self, rank: Rank) -> None:
        session = rank.session
        if session is None:
            return
        writer = session._staging.writer
        if writer is not None and writer.spec.by_value:
            spec, ring, nbytes = writer.spec, writer.layout.by_value_ring, writer._slots.nbytes
            encoded = [encoding.kind for encoding in spec.encodings if encoding is not None]
            shared = {"names": spec.shared, "apart": spec.apart, "nbytes": nbytes, "ring": ring, "encoded": encoded}
            rank.journal.note("shared", **shared)
        if session._protection.unprotected_since is not None and session._link.up:
            # On a busy machine a new agent takes longer than all of these steps.
            listen_until(session, lambda: session._switch.is_open or session._switch.after is not None)
        if self.job.log and rank.step >= 2:
            until(lambda: self._is_logged(session, rank.step >= 6))
            dist.barrier()  # all must know before one continues and kills the agent

    def _is_logged(self, session: Any, based: bool) -> bool:
        """Whether the newest record has been taken for the log; with `based` also the log's first checkpoint."""
        session._protection.listen()
        status = ask_status(session._link._address)
        assert status is not None
        assert status.storage is not None
        taken = (status.storage.logged or 0) >= session._recorder.record - 1
        return taken and (not based or status.storage.step is not None)

    def local_state(self) -> dict[str, Any]:
        return {
            "params": [freeze(param) for param in self.net.parameters()],
            "buffers": [freeze(buffer) for buffer in self.net.buffers()],
            "average": [] if self.average is None else [freeze(each) for each in self.average.parameters()],
            "optimizer": freeze(self.optimizers.state_dict()),
            "rng": torch.get_rng_state().numpy().tobytes(),
        }


# FSDP1


@dataclass(frozen=True)
class FlatJob(Job):
    """One attempt of a training with FSDP1."""

    last_step: int = STEPS
    world_size: int = 2
    strategy: str = "FULL_SHARD"
    use_orig_params: bool = True  # whether the optimizer steps views of flat parameters, or those themselves
    accumulate: int = 1  # micro-batches of a step
    half: bool = False  # computes in bfloat16, and reduces in float32
    bare: bool = False  # whether the wrapped module is attached, and not the wrapper
    evaluate: str = ""  # whether to evaluate between each step and its commit, "with" gradients or "without"

    def training(self, rank: Rank) -> FlatTraining:
        return FlatTraining(self, rank)


def flat_job_of(lab: Lab, redo: str = "lazy", **settings: Any) -> FlatJob:
    """An attempt with FSDP1; `nodes=True`: every rank is its own node."""
    if settings.get("nodes") is True:
        settings["nodes"] = settings.get("world_size", 2)
    return FlatJob(fresh_directory(lab), lab.run_dir, config(redo), **settings)


class FlatBlock(nn.Module):
    def __init__(self, at: Callable[[str], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(33, 33)
        self.drop = nn.Dropout(0.1)
        self._at = at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: self._at("backward"))
        return self.drop(torch.relu(self.linear(x))) + x


class FlatTraining(RankTraining):
    """Sizes that no number of ranks divides, and buffers."""

    def __init__(self, job: FlatJob, rank: Rank) -> None:
        self.job, self.at = job, rank.at
        torch.manual_seed(0)
        blocks = nn.Sequential(FlatBlock(rank.at), FlatBlock(rank.at))
        net = nn.Sequential(nn.Linear(7, 33), blocks, nn.BatchNorm1d(33), nn.Linear(33, 3))
        hybrid = job.strategy.startswith(("HYBRID", "_HYBRID"))
        names = ("replicate", "shard")
        self.whole = FullyShardedDataParallel(
            net,
            sharding_strategy=ShardingStrategy[job.strategy],
            use_orig_params=job.use_orig_params,
            auto_wrap_policy=ModuleWrapPolicy({FlatBlock}),
            device_id=torch.device("cpu"),
            device_mesh=init_device_mesh("cpu", (job.world_size // 2, 2), mesh_dim_names=names) if hybrid else None,
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32) if job.half else None,
        )
        self.model = net if job.bare else self.whole
        torch.manual_seed(100 + rank.rank)
        self.optimizers = torch.optim.AdamW(self.whole.parameters(), lr=0.01)

    def attached(self) -> None:
        if self.session is not None:
            self.evaluate(gradients=False)  # leaves whole parameters with initial values in the outermost module

    def evaluate(self, gradients: bool) -> None:
        """A forward without backward that draws no random number."""
        self.whole.eval()
        with torch.set_grad_enabled(gradients):
            self.whole(torch.ones(2, 7))
        self.whole.train()

    def step(self, number: int) -> str:
        job, whole = self.job, self.whole
        self.optimizers.zero_grad()
        total = 0.0
        for micro in range(job.accumulate):
            x, y = torch.randn(8, 7), torch.randint(0, 3, (8,))
            with contextlib.nullcontext() if micro == job.accumulate - 1 else whole.no_sync():
                loss = nn.functional.cross_entropy(whole(x).float(), y)
                self.at("forward")
                loss.backward()
            total += float(loss.detach())
        whole.clip_grad_norm_(0.5)
        self.optimizers.step()
        if job.evaluate:
            self.evaluate(gradients=job.evaluate == "with")
        return total.hex()

    def local_state(self) -> dict[str, Any]:
        return {
            "params": [param.detach().numpy().tobytes() for param in self.whole.parameters()],
            "buffers": [buffer.numpy().tobytes() for buffer in self.whole.buffers()],
            "optimizer": freeze(self.optimizers.state_dict()),
            "rng": torch.get_rng_state().numpy().tobytes(),
        }
