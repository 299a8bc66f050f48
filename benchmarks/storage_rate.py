"""What the storage tier costs: writing beside the disk's own speed, resuming beside torch.load and DCP, the stall."""

from __future__ import annotations

import os
import select
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import memckpt
from benchmarks.command import Options, run
from benchmarks.report import Report
from benchmarks.workloads import Trainee, scratch_directory
from memckpt import MemckptConfig, Session, StorageConfig
from memckpt.recovery.from_storage import StoredCheckpoint
from memckpt.storage import dcp as ours
from memckpt.storage.base import model_name, state_name
from memckpt.storage.catalog import read_catalog, verify
from memckpt.storage.store import LocalStore, Store

TITLE = "The storage tier: writing, resuming, and what a checkpoint takes of the training thread"
METHOD = """\
The state of a GPT with fused AdamW, 12 bytes a parameter. *write*: a base as the writer process makes it, checksums
and syncs included, beside one large sequential write of as many bytes with an fsync, in turn, and beside `torch.save`
and `dcp.save` with an fsync. *resume*: verifying every checksum and reading into live tensors, from the page cache,
beside `torch.load` and `dcp.load`. *stall*: what each checkpoint took of the training thread, lazy redo, one every N
steps; where the writer is not done when the next one is due, that one is left out. Medians."""


def tensors_of(trainee: Trainee) -> dict[str, torch.Tensor]:
    """The state by the names it has in a store."""
    tensors = {}
    for name, param in trainee.model.named_parameters():
        tensors[model_name(name)] = param.detach()
        for key, value in trainee.optimizer.state[param].items():
            tensors[state_name(0, name, key)] = value
    return tensors


def plain_write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with path.open("wb", buffering=0) as file:
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        os.fsync(file.fileno())


def sync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure_writes(report: Report, size: str, repetitions: int) -> None:
    trainee = Trainee(size)
    trainee.step()
    tensors = tensors_of(trainee)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    with scratch_directory() as directory:
        store: Store = LocalStore(directory / "store")

        def dcp_save(number: int) -> None:
            dcp.save(dict(tensors), checkpoint_id=str(directory / f"dcp-{number}"), no_dist=True)

        def torch_save(number: int) -> None:
            torch.save(tensors, directory / f"torch-{number}")
            with (directory / f"torch-{number}").open("rb") as file:
                os.fsync(file.fileno())

        sides: dict[str, Callable[[int], object]] = {
            "plain sequential write": lambda number: plain_write(directory / f"plain-{number}", tensors),
            "memckpt's base": lambda number: ours.save(store, f"base-{number}", tensors),
            "torch.save": torch_save,
            "dcp.save": dcp_save,
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(repetitions):
            for name, write in sides.items():
                times[name].append(seconds(partial(write, number)))
    table = report.table(
        f"{trainee.model.numel / 1e6:.1f}M parameters: write", "what", "s", "MB/s", "of the plain write"
    )
    plain = statistics.median(times["plain sequential write"])
    for name, taken in times.items():
        median = statistics.median(taken)
        share = statistics.median(
            one / other for one, other in zip(times["plain sequential write"], taken, strict=True)
        )
        table.add(
            name, f"{median:.2f}", f"{nbytes / median / 1e6:.0f}", f"{share:.2f}",
            what=name, seconds=taken, nbytes=nbytes, plain=plain,
        )  # fmt: skip


def until_stored(session: Session, step: int) -> None:
    while (session.stored_step or 0) < step:
        if not select.select([session._link.client.channel], [], [], 120)[0]:
            raise RuntimeError(f"step {step} does not get to storage")
        session._listen()


def measure_resume(report: Report, size: str, repetitions: int) -> None:
    trainee = Trainee(size)
    with scratch_directory() as directory:
        config = MemckptConfig(redo="lazy", storage=StorageConfig(every_steps=4))
        session = memckpt.attach(trainee.model, trainee.optimizer, run_dir=directory, config=config)
        with session:
            session.restore()
            for _ in range(6):
                trainee.step()
                session.commit()
            until_stored(session, 4)
        store = LocalStore(directory / "storage")
        checkpoint = read_catalog(store).complete[0]
        torch.save(trainee.state_dict(), directory / "torch")
        tensors = tensors_of(trainee)
        dcp.save(dict(tensors), checkpoint_id=str(directory / "dcp"), no_dist=True)
        live = dict(trainee.model.named_parameters()) | dict(trainee.model.named_buffers())

        def resume() -> None:
            if verify(store, checkpoint):
                raise RuntimeError("the checkpoint is damaged")
            StoredCheckpoint(store, checkpoint, 0).restore(live, [trainee.optimizer])

        def torch_load() -> None:
            state = torch.load(directory / "torch", weights_only=True)
            trainee.model.load_state_dict(state["model"])
            trainee.optimizer.load_state_dict(state["optimizer"])

        sides: dict[str, Callable[[], object]] = {
            "memckpt, from storage": resume,
            "of it: checksums": lambda: verify(store, checkpoint),
            "torch.load": torch_load,
            "dcp.load": lambda: dcp.load(dict(tensors), checkpoint_id=str(directory / "dcp"), no_dist=True),
        }
        table = report.table(f"{trainee.model.numel / 1e6:.1f}M parameters: resume", "what", "s")
        for name, action in sides.items():
            taken = [seconds(action) for _ in range(repetitions)]
            table.add(name, f"{statistics.median(taken):.2f}", what=name, seconds=taken)


def measure_stall(report: Report, size: str, steps: int) -> None:
    table = report.table(
        f"{size}: stall of the training thread", "every N steps", "checkpoints", "ms each", "ms per step"
    )
    for every in (1, 2, 5, 10, 20):
        trainee = Trainee(size)
        with scratch_directory() as directory:
            config = MemckptConfig(redo="lazy", storage=StorageConfig(every_steps=every))
            with memckpt.attach(trainee.model, trainee.optimizer, run_dir=directory, config=config) as session:
                session.restore()
                for _ in range(4):
                    trainee.step()
                    session.commit()
                before, taken = session.stall.snapshot, 0
                for _ in range(steps):
                    at = session.stall.snapshot
                    trainee.step()
                    session.commit()
                    taken += session.stall.snapshot > at
                stall = (session.stall.snapshot - before) * 1e3
        each = stall / taken if taken else 0.0
        table.add(
            str(every), str(taken), f"{each:.1f}", f"{stall / steps:.2f}",
            every=every, taken=taken, steps=steps, stall_ms=stall,
        )  # fmt: skip


def main(options: Options) -> None:
    report = Report("storage_rate", TITLE, METHOD, options.command, options.quick)
    repetitions = 2 if options.quick else 5
    for size in ("demo",) if options.quick else ("30M", "100M"):
        measure_writes(report, size, repetitions)
        measure_resume(report, size, repetitions)
    measure_stall(report, "demo" if options.quick else "30M", 12 if options.quick else 40)
    report.write(options.results)


if __name__ == "__main__":
    run("storage_rate", main)
