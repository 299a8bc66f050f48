"""Ways to train on several ranks that a session refuses: what it says names the thing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import memckpt
from memckpt.errors import UnsupportedError
from tests.support.cluster.sharded_cases import Setup, ShardedJob, job_of
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import logs, run

PLAIN = Setup("plain", 2)


def refused(job: ShardedJob, model: Any, optimizer: Any, **arguments: Any) -> str:
    """What attach() says."""
    try:
        session = memckpt.attach(model, optimizer, run_dir=job.run_dir, config=job.config, **arguments)
    except UnsupportedError as error:
        return str(error)
    session.close()
    return "not refused"


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def neither(job: ShardedJob) -> str:
    model = nn.Linear(4, 4)
    return refused(job, model, adam(model))


def part_of_the_mesh(job: ShardedJob) -> str:
    """As with pipeline stages: each half of the ranks shards a model of its own."""
    mesh = init_device_mesh("cpu", (2, job.world_size // 2), mesh_dim_names=("stage", "shard"))
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh["shard"])
    return refused(job, model, adam(model))


def both_ways(job: ShardedJob) -> str:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (job.world_size,)))
    return refused(job, DistributedDataParallel(model, init_sync=False), adam(model))


def partial_sum(job: ShardedJob) -> str:
    mesh = init_device_mesh("cpu", (job.world_size,), mesh_dim_names=("shard",))
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    model.register_parameter("sum", nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Partial()])))
    return refused(job, model, adam(model))


def declared_and_different(job: ShardedJob) -> str:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    parallelize_module(model, init_device_mesh("cpu", (job.world_size,)), {"0": ColwiseParallel()})
    return refused(job, model, adam(model), replicated=["1.*", "2.bias"])


def pipeline_stage(job: ShardedJob) -> str:
    model = nn.Linear(4, 4)
    stage = PipelineStage(model, dist.get_rank(), job.world_size, torch.device("cpu"))
    return refused(job, stage, adam(model))


def local_sgd_optimizer(job: ShardedJob) -> str:
    model = DistributedDataParallel(nn.Linear(4, 4))
    averager = averagers.PeriodicModelAverager(period=4, warmup_steps=10)
    return refused(job, model, PostLocalSGDOptimizer(optim=adam(model), averager=averager))


def local_sgd_hook(job: ShardedJob) -> str:
    model = DistributedDataParallel(nn.Linear(4, 4))
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    state = local_sgd.PostLocalSGDState(process_group=None, subgroup=group, start_localSGD_iter=3)
    model.register_comm_hook(state, local_sgd.post_localSGD_hook)
    return refused(job, model, adam(model))


def uneven_inputs(job: ShardedJob) -> str:
    """Ranks with less data go on with shadows of the others' steps."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = adam(model)
    session = memckpt.attach(model, optimizer, run_dir=job.run_dir, config=job.config)
    try:
        with model.join():
            for _ in range(2 + dist.get_rank()):
                optimizer.zero_grad()
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
                session.commit()
    except UnsupportedError as error:
        return str(error)
    finally:
        session.close()
    return "not refused"


def wider_on_one_rank(job: ShardedJob) -> str:
    model = DistributedDataParallel(nn.Linear(4, 4))
    average = nn.Linear(4, 4 + dist.get_rank())
    return refused(job, model, adam(model), extra_modules={"average": average})


@pytest.mark.promise("models that would desynchronize ranks are refused by name")
@pytest.mark.promise("pipeline stages (`torch.distributed.pipelining`), meshes that do not cover all ranks")
@pytest.mark.promise("local SGD (`PostLocalSGDOptimizer`, the communication hook)")
@pytest.mark.promise("DDP's `join` with uneven inputs")
@pytest.mark.promise("DDP around sharded parameters")
@pytest.mark.promise("`Partial` placements of parameters")
@pytest.mark.parametrize(
    ("attempt", "world_size", "named"),
    [
        (neither, 2, "DistributedDataParallel"),
        (neither, 2, "fully_shard"),
        (part_of_the_mesh, 4, "mesh"),
        (wider_on_one_rank, 2, "average.bias on rank 0 is [4] of torch.float32, on rank 1 [5] of torch.float32"),
        (both_ways, 2, "DistributedDataParallel around sharded parameters"),
        (partial_sum, 2, "partial sum"),
        (declared_and_different, 2, "2.bias"),
        (pipeline_stage, 2, "pipeline stage"),
        (local_sgd_optimizer, 2, "PostLocalSGDOptimizer"),
        (local_sgd_hook, 2, "local SGD"),
        (uneven_inputs, 2, "join"),
    ],
)
def test_refused(lab: Lab, attempt: Callable[[ShardedJob], str], world_size: int, named: str) -> None:
    job = job_of(lab, replace(PLAIN, world_size=world_size), config())

    def body(job: ShardedJob, rank: int) -> None:
        job.join(rank)
        (job.directory / f"said-{rank}").write_text(attempt(job))
        os._exit(0)  # taking gloo's groups down has been seen to hang

    assert run(lab, job, body) == [0] * world_size, logs(lab)[-3000:]
    for rank in range(world_size):
        assert named in (job.directory / f"said-{rank}").read_text()
