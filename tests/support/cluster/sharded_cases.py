"""Small trainings with models sharded over ranks in every way that torch has, their jobs and their final states."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from memckpt.config import MemckptConfig
from tests.support.faults.frozen import freeze
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.engine_optimizers import Momentum, Own
from tests.support.trainings.killed_ranks import Job, Rank, RankTraining, fresh_directory, noted

#: Not divisible by four: the last of four ranks has less of the embedding and of each norm, and nothing of a bias of 5.
VOCABULARY, WIDTH = 21, 10
#: Even, as tensor parallelism requires; so large that a quarter of a weight is still anchored in pieces.
HIDDEN = 1704
BATCH, LENGTH = 4, 6
#: Parameters that tensor parallelism leaves as they are, equal on all ranks.
REPLICATED = ("embed.*", "head.*", "frozen.*", "norm.*", "blocks.*.norm.*", "blocks.*.mix", "blocks.*.attend.*")

#: The step whose gradients overflow if there is a scaler.
OVERFLOW_AT = 3

At = Callable[[str], None]


@dataclass(frozen=True)
class Setup:
    """Distribution of a training, and contents of its steps."""

    kind: str = "fsdp"  # "fsdp" (FSDP2), "hsdp", "tp", "fsdp-tp", "ddp" or "plain" (one rank)
    world_size: int = 2  # number of ranks; "hsdp" and "fsdp-tp" have a mesh of two by half of it
    #: "adamw", "fused" (AdamW), "sgd" (momentum), "nesterov" (and foreach, which changes gradients in its step), "muon"
    #: (requires whole matrices, with AdamW for the rest), "own" (user-defined, with plain values in its state) or
    #: "lion" (user-defined, element-wise).
    optimizer: str = "adamw"
    accumulate: int = 1  # micro-batches in a step; `sync_each`: gradients are reduced after each of them
    sync_each: bool = False
    precision: str = ""  # precision of the computation; "bf16" reduces in fp32, "bf16-reduce" in bf16, too
    reshard: bool = True  # whether parameters are freed between forward and backward
    offload: bool = False
    scaler: bool = False  # whether the loss is scaled; the gradients of one step overflow, on one rank
    table: bool = False  # whether there is a buffer too large to be copied with every record
    compiled: bool = False  # whether each block is compiled; a block in several graphs ends the training

    @property
    def name(self) -> str:
        parts = [self.kind, str(self.world_size), self.optimizer, self.precision]
        if self.accumulate > 1:
            parts += [f"accumulate{self.accumulate}", "sync-each" if self.sync_each else ""]
        parts += ["" if self.reshard else "kept"]
        parts += [each for each in ("offload", "scaler", "table", "compiled") if getattr(self, each)]
        return "-".join(part for part in parts if part)


def named(value: Any) -> str | None:
    """A setup's name, for tests named by their parameters."""
    return value.name if isinstance(value, Setup) else None


class Lion(Own):
    """A user-defined element-wise optimizer that is no torch class."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, 0.003, weight_decay=0.0)

    def step_one(self, param: Any, group: dict[str, Any]) -> None:
        average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(average.lerp(param.grad, 0.1).sign_(), alpha=-group["lr"])
        average.lerp_(param.grad, 0.01)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attend = Attention()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.mix = nn.Parameter(torch.ones(2))  # on four ranks, two have an empty shard

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm(x))
        return self.mix[0] * x + self.mix[1] * self.down(self.drop(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    """A transformer of two blocks, with tied weights, a frozen layer, and a buffer that changes on each rank."""

    mean: Tensor

    def __init__(self, with_table: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        if with_table:
            self.register_buffer("table", torch.zeros(1 << 15))
        self.at: At = lambda place: None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.frozen(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.float().mean((0, 1)), alpha=0.1)
        x = self.blocks[0](x - self.mean)
        self.at("forward")
        if x.requires_grad:
            x.register_hook(lambda gradient: self.at("backward"))
        return self.head(self.norm(self.blocks[1](x)))


class Distributed(RankTraining):
    """A training described by a setup: model, optimizer, and one step."""

    def __init__(self, setup: Setup, at: At, seed: int = 0) -> None:
        """Build the model, equal on all ranks; then each data-parallel rank draws its own random numbers."""
        self.setup = setup
        self.rank = self.data_rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(seed)
        self.net = Net(setup.table)
        self.net.at = self._at_last
        self.model: nn.Module = self.net
        self._at = at
        self._last = False
        self._distribute()
        torch.manual_seed(1000 * (seed + 1) + self.data_rank)
        self.optimizers = self._make_optimizers()
        self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.95) for each in self.optimizers]
        self.registered: dict[str, Any] = {f"scheduler {index}": each for index, each in enumerate(self.schedulers)}
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4, enabled=setup.scaler)
        if setup.scaler:
            self.registered["scaler"] = self.scaler
            # A step that the scaler has skipped leaves gradients behind: only the loop knows that the step is over.
            self.commit_arguments = {"gradients_pending": False}

    def _at_last(self, place: str) -> None:
        """Report a place only in the last micro-batch of a step."""
        if self._last:
            self._at(place)

    # Distribution

    def _distribute(self) -> None:
        setup = self.setup
        half = setup.world_size // 2
        match setup.kind:
            case "fsdp":
                kind = torch.get_default_device().type
                self._shard(init_device_mesh(kind, (setup.world_size,), mesh_dim_names=("shard",)))
            case "hsdp":
                self._shard(init_device_mesh("cpu", (2, half), mesh_dim_names=("replicate", "shard")))
            case "tp":
                self._parallelize(init_device_mesh("cpu", (setup.world_size,), mesh_dim_names=("tp",)))
                self.data_rank = 0
            case "fsdp-tp":
                mesh = init_device_mesh("cpu", (half, 2), mesh_dim_names=("shard", "tp"))
                self._parallelize(mesh["tp"])
                self._shard(mesh["shard"])
                self.data_rank = mesh["shard"].get_local_rank()
            case "ddp":
                self.model = DistributedDataParallel(self.net, bucket_cap_mb=0.02, broadcast_buffers=False)

    def _shard(self, mesh: DeviceMesh) -> None:
        precisions = {
            "": MixedPrecisionPolicy(),
            "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "bf16-reduce": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        }
        settings: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": self.setup.reshard,
            "mp_policy": precisions[self.setup.precision],
            "offload_policy": CPUOffloadPolicy(pin_memory=False) if self.setup.offload else OffloadPolicy(),
        }
        for block in self.net.blocks:
            if self.setup.compiled:
                block.compile(backend="eager")
            fully_shard(block, **settings)
        fully_shard(self.net, **settings)

    def _parallelize(self, mesh: DeviceMesh) -> None:
        for block in self.net.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        trained = [param for param in self.net.parameters() if param.requires_grad]
        matrices = [param for param in trained if param.dim() > 1]
        others = [param for param in trained if param.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        match self.setup.optimizer:
            case "sgd":
                return [torch.optim.SGD(groups, lr=0.05, momentum=0.9)]
            case "nesterov":
                return [torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True, foreach=True)]
            case "own":
                return [Momentum(groups)]
            case "lion":
                return [Lion(groups)]
            case "muon":
                return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]
        return [torch.optim.AdamW(groups, lr=0.01, fused=self.setup.optimizer == "fused" or None)]

    # A step

    def step(self, number: int) -> str:
        """Train one step; returns its loss as exact text."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        total = 0.0
        for micro in range(self.setup.accumulate):
            self._last = micro == self.setup.accumulate - 1
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(self._last or self.setup.sync_each)
            tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
            logits = self.model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            overflow = self.setup.scaler and number == OVERFLOW_AT and self.data_rank == 0
            scaled = self.scaler.scale(loss / self.setup.accumulate)
            (scaled * math.inf if overflow else scaled).backward()
            total += float(loss.detach())
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        clip_gradients(self.net.parameters(), 0.5)
        self._at("reduced")
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            self.scaler.step(optimizer)
            scheduler.step()
        self.scaler.update()
        if self.setup.compiled:
            self._refuse_graph_breaks()
        return total.hex()

    def _refuse_graph_breaks(self) -> None:
        from torch._dynamo.utils import counters  # a second of imports

        if counters["graph_break"]:
            raise AssertionError(f"expected one graph a block, found breaks: {list(counters['graph_break'])}")

    # Final state

    def local_state(self) -> dict[str, Any]:
        """This rank's state, with every bit: shards of parameters and optimizer state, buffers, generator."""
        return {
            "params": {name: freeze(_local(param)) for name, param in self.net.named_parameters()},
            "buffers": {name: freeze(buffer) for name, buffer in self.net.named_buffers()},
            "optimizers": [freeze(_locals(optimizer.state_dict())) for optimizer in self.optimizers],
            "registered": {name: freeze(each.state_dict()) for name, each in self.registered.items()},
            "rng": torch.get_rng_state().numpy().tobytes(),
        }

    def full_state(self) -> dict[str, Any]:
        """Whole parameters and their optimizer state by name, independent of the sharding."""
        found = {}
        for name, param in self.net.named_parameters():
            states = [optimizer.state[param] for optimizer in self.optimizers if param in optimizer.state]
            frozen = [{key: freeze(_full(value)) for key, value in state.items()} for state in states]
            found[name] = (freeze(_full(param.detach())), frozen)
        return found


def clip_gradients(params: Iterable[nn.Parameter], max_norm: float) -> None:
    """Clip by the norm of all; torch adds up norms of one mesh only, so they are added per mesh, as in torchtitan."""
    meshes: dict[Any, list[nn.Parameter]] = {}
    for param in params:
        if param.grad is not None:
            mesh = param.device_mesh if isinstance(param, DTensor) else None
            meshes.setdefault(mesh, []).append(param)
    if len(meshes) == 1:
        (same,) = meshes.values()
        nn.utils.clip_grad_norm_(same, max_norm)
        return
    norms = [_full(nn.utils.get_total_norm([p.grad for p in each if p.grad is not None])) for each in meshes.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for each in meshes.values():
        nn.utils.clip_grads_with_norm_(each, max_norm, norm)


def _full(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    if value.device.type != "late":
        return value.full_tensor()
    # Torch's functional collectives know no process group that is written in Python.
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, value.to_local().detach().cpu())
    (placement,) = value.placements
    return torch.cat(shards, placement.dim)  # type: ignore[attr-defined]


def _local(value: Any) -> Any:
    """This rank's shard of a DTensor, and its position."""
    if isinstance(value, DTensor):
        return [str(value.placements), tuple(value.shape), value.to_local().detach()]
    return value


def _locals(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _locals(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_locals(item) for item in value]
    return _local(value)


# Attempts

_OTHER_RANKS = "the ranks, or their shards, are not those"
#: Valid reasons for not repeating the step of a resumed record.
UNCHECKED = (
    "a generation began at record",
    "the replica has gone past record",
    "came from other nodes, without the one before it",
    "storage does not have the state from which",
    _OTHER_RANKS,
    "had not laid out its buckets for good before that step",
)


@dataclass(frozen=True)
class ShardedJob(Job):
    """One attempt of a sharded training."""

    nodes: int = 1
    setup: Setup = Setup()
    declare: bool = True  # whether parameters that tensor parallelism leaves alone are declared replicated

    @property
    def world_size(self) -> int:
        return self.setup.world_size

    @property
    def grouped(self) -> bool:
        return self.setup.kind != "plain" or self.world_size > 1

    def training(self, rank: Rank) -> Distributed:
        # Other random numbers than in the previous attempt: state that is not restored shows.
        training = Distributed(self.setup, rank.at, seed=self.number)
        if "tp" in self.setup.kind and self.declare:
            training.attach_arguments = {"replicated": REPLICATED}
        return training

    def undisturbed(self, directory: Path) -> ShardedJob:
        calm: dict[str, Any] = {"last_step": self.last_step, "each_step": self.each_step, "device": self.device}
        return ShardedJob(directory, None, setup=self.setup, **calm)

    def problem(self, attempts: Sequence[Job], died: bool, reasons: Sequence[str]) -> str:
        check_verdict(self)
        return ""


def job_of(lab: Lab, setup: Setup, config: MemckptConfig | None, **settings: Any) -> ShardedJob:
    return ShardedJob(fresh_directory(lab), lab.run_dir, config, setup=setup, **settings)


def check_verdict(attempt: Job, ahead: bool = False) -> set[str]:
    """Check that all ranks report an equal repeated step, or none for a valid reason; returns their reports.

    `ahead`: the dead attempt was as far ahead of its peers as it may be, or does not wait for them. The record before
    the resumed one may have given its slot away.
    """
    verdicts = {(each["verdict"], each["line"]) for rank in noted(attempt, "checked") for each in rank}
    if attempt.config is None or not attempt.config.replays:
        return {verdict for verdict, _ in verdicts}
    proceeds = attempt.config.peers is not None and attempt.config.peers.ack == "proceed"
    reasons = (*UNCHECKED, "is not held any more") if ahead or proceeds else UNCHECKED
    for verdict, line in verdicts:
        if line != "no step was compared: nothing was resumed":
            # What other ranks, or shards, go on with was never theirs: no sample is of it.
            assert verdict == ("none" if _OTHER_RANKS in line else "equal"), f"{verdict}: {line}"
            assert "no step was compared" not in line or any(reason in line for reason in reasons), line
    assert len(verdicts) <= 1, verdicts
    if any(noted(attempt, "restored")) and not verdicts:
        assert not any(noted(attempt, "committed")), "a step has ended since the resume without a verdict"
    return {verdict for verdict, _ in verdicts}
