"""Restore of a sharded checkpoint with another number of ranks, compared to torch.distributed.checkpoint's load."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as CutAlong
from torch.distributed.tensor import distribute_tensor

from benchmarks.harness.command import Options, run
from benchmarks.harness.report import Report, millions
from benchmarks.harness.scratch import scratch_directory
from benchmarks.workloads.gpt import Trainee
from memckpt.recovery.from_storage import StoredState
from memckpt.state.records import Timeline
from memckpt.state.spec import (
    OptimizerSpec,
    OwnerSpec,
    ParamSpec,
    Shard,
    StateSpec,
    StateTensorSpec,
    TensorSpec,
)
from memckpt.state.tensors import local, shard_of
from memckpt.storage.base import StoredNames, model_name, state_name, write_base
from memckpt.storage.catalog import read_catalog
from memckpt.storage.chain import stored_points
from memckpt.storage.dcp_metadata import write_merged
from memckpt.storage.format import FORMAT_VERSION, NodeState, Part
from memckpt.storage.local_store import LocalStore

TITLE = "Restoring a sharded checkpoint into another number of ranks"
METHOD = """\
The state of a GPT with AdamW, 12 bytes a parameter, written by 4 ranks that each hold a quarter of every tensor, as
with FSDP2. It is read into other numbers of ranks, each a process of its own with DTensors that are cut along their
first dimension (one rank: plain tensors), by memckpt, and by `torch.distributed.checkpoint.load`, which reads the same
files. The two take turns. Files are in the page cache, checksums are left out. The time is that of the slowest rank;
medians, and the median of the ratios of neighbours."""
WRITTEN_BY = 4
_KEYS = ("exp_avg", "exp_avg_sq")
_PATIENCE = timedelta(seconds=300)


def quarter(tensor: Tensor, rank: int) -> tuple[Tensor, Shard]:
    """The shard of a tensor that a rank held when the checkpoint was written."""
    size = -(-tensor.shape[0] // WRITTEN_BY)
    start = min(rank * size, tensor.shape[0])
    return tensor[start : start + size], Shard((start, *[0] * (tensor.dim() - 1)), tuple(tensor.shape))


def spec_of(held: dict[str, tuple[Tensor, Shard | None]], rank: int, world_size: int) -> StateSpec:
    """The layout of a rank's shards."""
    params = []
    for name, (tensor, shard) in held.items():
        shape = tuple(tensor.shape)
        state = tuple(StateTensorSpec(key, shape, "float32", True, False) for key in _KEYS)
        owner = OwnerSpec(0, 0, (StateTensorSpec("step", (), "float32", False, False), *state), ("step", *_KEYS))
        params.append(ParamSpec(TensorSpec(name, shape, "float32", shard), (owner,), False, 0))
    optimizers = (OptimizerSpec("torch.optim.adamw", "AdamW", b"", (len(params),), 1),)
    return StateSpec(tuple(params), optimizers, (), (), "lazy", 4, 3, (rank,), world_size, replicas=(rank,))


def write_checkpoint(store: LocalStore, params: dict[str, Tensor]) -> None:
    """Write a checkpoint as four ranks would; all state tensors have the parameters' values."""
    for rank in range(WRITTEN_BY):
        pieces = {name: quarter(param, rank) for name, param in params.items()}
        spec = spec_of({**pieces}, rank, WRITTEN_BY)
        names = StoredNames(spec)
        tensors = {}
        for param in spec.params:
            piece = pieces[param.tensor.name][0].clone()
            tensors[names.tensor(param.tensor)] = piece
            for state in param.owners[0].state:
                value = piece if state.elementwise else torch.tensor(1.0)
                tensors[names.state(param, 0, state)] = value
        part = Part(
            FORMAT_VERSION, Timeline(1, "a"), 1, 1, WRITTEN_BY, (rank,), f"n{rank}", True, time.time(),
            content=spec.content(), serves=(rank,),
        )  # fmt: skip
        write_base(store, part, NodeState(spec, (), b"", {rank: b""}), tensors)
    (checkpoint,) = read_catalog(store).complete
    write_merged(store, checkpoint.directory, checkpoint.tensor_nodes)


def read_as(rank: int, world_size: int, directory: Path, size: str, repetitions: int, results: Any) -> None:
    """One rank: reads the checkpoint in both ways in turn, and reports the slowest rank's seconds."""
    store = LocalStore(directory / "store")
    trainee = Trainee(size)
    params: dict[str, Tensor] = dict(trainee.model.named_parameters())
    if world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/ranks-{world_size}",
            rank=rank,
            world_size=world_size,
            timeout=_PATIENCE,
        )
        mesh = init_device_mesh("cpu", (world_size,))
        params = {
            name: torch.nn.Parameter(distribute_tensor(param.detach(), mesh, [CutAlong(0)], src_data_rank=None))
            for name, param in params.items()
        }
    optimizer = torch.optim.AdamW(params.values())
    spec = spec_of({name: (local(param), shard_of(param)) for name, param in params.items()}, rank, world_size)
    point = stored_points(read_catalog(store))[0]
    state: dict[str, Any] = {model_name(name): param.detach() for name, param in params.items()}
    for name, param in params.items():
        state |= {state_name(0, name, key): torch.empty_like(param.detach()) for key in _KEYS}
        state[state_name(0, name, "step")] = torch.zeros(())

    def restore() -> None:
        StoredState(store, point, rank, spec).restore(params, [optimizer])

    def load() -> None:
        checkpoint = str(store.root / point.checkpoint.directory)
        dcp_load(dict(state), checkpoint_id=checkpoint, no_dist=world_size == 1)

    taken = [(slowest(restore), slowest(load)) for _ in range(repetitions + 1)]
    if rank == 0:
        results.send(taken[1:])
    if world_size > 1:
        dist.destroy_process_group()


def slowest(action: Callable[[], None]) -> float:
    """Seconds until the slowest rank is done."""
    if dist.is_initialized():
        dist.barrier()
    started = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - started)
    if dist.is_initialized():
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def measure(report: Report, directory: Path, size: str, world_size: int, repetitions: int) -> None:
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    arguments = (world_size, directory, size, repetitions, sending)
    ranks = [context.Process(target=read_as, args=(rank, *arguments)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    sending.close()  # so that receiving ends if all ranks die
    try:
        taken: list[tuple[float, float]] = receiving.recv()
    finally:
        for process in ranks:
            process.join(_PATIENCE.total_seconds())
    mine, theirs = (statistics.median(side) for side in zip(*taken, strict=True))
    ratio = statistics.median(first / second for first, second in taken)
    report.add(
        str(world_size), f"{mine:.3f}", f"{theirs:.3f}", f"{ratio:.2f}",
        ranks=world_size, memckpt=mine, dcp=theirs, ratio=ratio, taken=taken,
    )  # fmt: skip


def main(options: Options) -> None:
    report = options.report(TITLE, METHOD, "ranks", "memckpt, s", "dcp.load, s", "ratio")
    size = "demo" if options.quick else "100M"
    trainee = Trainee(size)
    report.notes.append(f"{millions(trainee.model.numel)} parameters, written by {WRITTEN_BY} ranks.")
    with scratch_directory() as directory:
        params = {name: param.detach() for name, param in trainee.model.named_parameters()}
        write_checkpoint(LocalStore(directory / "store"), params)
        for world_size in (1, 2, 3):
            measure(report, directory, size, world_size, repetitions=2 if options.quick else 7)
    report.write()


if __name__ == "__main__":
    run("resharding", main)
