"""Cost of the storage tier: write rate against the disk's, resume against torch.load and DCP, and the stall."""

from __future__ import annotations

import mmap
import os
import select
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import memckpt
from benchmarks.harness.command import Options, run
from benchmarks.harness.copies import seconds_of
from benchmarks.harness.processes import children
from benchmarks.harness.report import Report, millions
from benchmarks.harness.scratch import scratch_directory
from benchmarks.workloads.gpt import Trainee, train
from memckpt import MemckptConfig, Session, StorageConfig
from memckpt.config import StorageMode
from memckpt.recovery.from_storage import StoredState
from memckpt.storage import dcp as ours
from memckpt.storage.catalog import read_catalog
from memckpt.storage.chain import stored_points
from memckpt.storage.format import decode_node_state
from memckpt.storage.local_store import LocalStore
from memckpt.storage.node_files import model_name, state_name
from memckpt.storage.store import Store, StoredFile, read_back, verify_files

MODES: tuple[StorageMode, ...] = ("replica", "log")
TITLE = "The storage tier: the rate at which a base is written, beside the disk's"
METHOD = """\
The state of a GPT with fused AdamW, 12 bytes a parameter. A base as the writer process makes it, checksums and syncs
included, in turn with a direct write (`O_DIRECT`) of as many zeros in pieces of 8 MiB, one large sequential write of as
many bytes with an fsync, and `torch.save` and `dcp.save` with an fsync. *reading it back*: from the medium, as the page
cache keeps nothing of it. Medians."""
RESUME_TITLE = "The storage tier: seconds to resume"
RESUME_METHOD = """\
The state of a GPT with fused AdamW, 12 bytes a parameter: verifying every checksum and reading into live tensors, the
second time from the page cache, beside `torch.load` and `dcp.load`. Medians."""
TRAINING_TITLE = "The storage tier: training beside it"
TRAINING_METHOD = """\
A GPT with fused AdamW and lazy redo, a checkpoint every N steps, and in mode log every record, too; where the writer is
not done when a checkpoint is due, that one is left out. What is written is what the writing processes hand to the
kernel; beside it, what full checkpoints every N steps would come to. The mean of all steps beside that of a run without
storage right before."""


def tensors_of(trainee: Trainee) -> dict[str, torch.Tensor]:
    """The state's tensors by their names in a store."""
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


def direct_write(path: Path, nbytes: int) -> None:
    """Write as many bytes with direct I/O: the disk's own rate."""
    piece = mmap.mmap(-1, 8 << 20)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    try:
        for _ in range(-(-nbytes // len(piece))):
            os.write(fd, piece)
        os.fsync(fd)
    finally:
        os.close(fd)
        piece.close()


def measure_writes(report: Report, size: str, repetitions: int) -> None:
    trainee = Trainee(size)
    trainee.step()
    tensors = tensors_of(trainee)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    with scratch_directory() as directory:
        store: Store = LocalStore(directory / "store")

        def dcp_saves(number: int) -> None:
            dcp_save(dict(tensors), checkpoint_id=str(directory / f"dcp-{number}"), no_dist=True)

        def torch_save(number: int) -> None:
            torch.save(tensors, directory / f"torch-{number}")
            with (directory / f"torch-{number}").open("rb") as file:
                os.fsync(file.fileno())

        written: list[tuple[StoredFile, ...]] = []
        sides: dict[str, Callable[[int], object]] = {
            "direct write": lambda number: direct_write(directory / f"direct-{number}", nbytes),
            "plain sequential write": lambda number: plain_write(directory / f"plain-{number}", tensors),
            "memckpt's base": lambda number: written.append(ours.save(store, f"base-{number}", tensors)),
            "reading it back": lambda number: read_back(store, written[-1]),
            "torch.save": torch_save,
            "dcp.save": dcp_saves,
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(repetitions):
            for name, write in sides.items():
                times[name].append(seconds_of(partial(write, number)))
    direct = statistics.median(times["direct write"])
    for name, taken in times.items():
        median = statistics.median(taken)
        share = statistics.median(one / other for one, other in zip(times["direct write"], taken, strict=True))
        report.add(
            millions(trainee.model.numel), name, f"{median:.2f}", f"{nbytes / median / 1e6:.0f}", f"{share:.2f}",
            what=name, seconds=taken, nbytes=nbytes, direct=direct,
        )  # fmt: skip


def until_stored(session: Session, step: int) -> None:
    while (session.stored_step or 0) < step:
        if not select.select([session._link.connection.channel], [], [], 120)[0]:
            raise RuntimeError(f"step {step} does not get to storage")
        session._protection.listen()


def measure_resume(report: Report, size: str, repetitions: int) -> None:
    trainee = Trainee(size)
    with scratch_directory() as directory:
        config = MemckptConfig(redo="lazy", storage=StorageConfig(every_steps=4))
        session = memckpt.attach(trainee.model, trainee.optimizer, run_dir=directory, config=config)
        with session:
            session.restore()
            train(trainee, session, 6)
            until_stored(session, 4)
        store = LocalStore(directory / "storage")
        point = stored_points(read_catalog(store))[0]
        torch.save(trainee.state_dict(), directory / "torch")
        tensors = tensors_of(trainee)
        dcp_save(dict(tensors), checkpoint_id=str(directory / "dcp"), no_dist=True)
        spec = decode_node_state(store.read(point.checkpoint.part_serving(0).state_path)).spec
        live = dict(trainee.model.named_parameters()) | dict(trainee.model.named_buffers())

        def resume() -> None:
            if verify_files(store, point.files):
                raise RuntimeError("the checkpoint is damaged")
            StoredState(store, point, 0, spec).restore(live, [trainee.optimizer])

        def torch_load() -> None:
            state = torch.load(directory / "torch", weights_only=True)
            trainee.model.load_state_dict(state["model"])
            trainee.optimizer.load_state_dict(state["optimizer"])

        sides: dict[str, Callable[[], object]] = {
            "memckpt, from storage": resume,
            "of it: checksums": lambda: verify_files(store, point.files),
            "torch.load": torch_load,
            "dcp.load": lambda: dcp_load(dict(tensors), checkpoint_id=str(directory / "dcp"), no_dist=True),
        }
        for name, action in sides.items():
            taken = [seconds_of(action) for _ in range(repetitions)]
            cells = (millions(trainee.model.numel), name, f"{statistics.median(taken):.2f}")
            report.add(*cells, what=name, seconds=taken)


def written_by(agent_pid: int) -> int:
    """Bytes that the agent's processes have written so far."""
    lines = [Path(f"/proc/{child}/io").read_text().splitlines() for child in children(agent_pid)]
    return sum(int(line.split()[1]) for one in lines for line in one if line.startswith("wchar"))


def train_with(size: str, storage: StorageConfig | None, steps: int) -> dict[str, float]:
    """Run steps. Returns their time, the share of storage in it, and the bytes written."""
    trainee = Trainee(size)
    with scratch_directory() as directory:
        config = MemckptConfig(redo="lazy", storage=storage)
        with memckpt.attach(trainee.model, trainee.optimizer, run_dir=directory, config=config) as session:
            session.restore()
            train(trainee, session, 4)
            while storage is not None and session.stored_step is None:  # until the writer processes are running
                train(trainee, session, 1)
            agent = session.agent_pid
            assert agent is not None
            before, copies, written = session.stall.state_copy, 0, written_by(agent)
            began = time.perf_counter()
            for _ in range(steps):
                at = session.stall.state_copy
                trainee.step()
                session.commit()
                copies += session.stall.state_copy > at
            took = time.perf_counter() - began
            stall, written = session.stall.state_copy - before, written_by(agent) - written
            state = sum(tensor.nbytes for tensor in tensors_of(trainee).values())
    return {
        "step_ms": took / steps * 1e3,
        "checkpoints": copies,
        "stall_ms": stall * 1e3,
        "written": written / steps,
        "state": state,
    }


def measure_intervals(report: Report, size: str, steps: int) -> None:
    for every in (1, 2, 5, 10, 20):
        plain = train_with(size, None, steps)
        for mode in MODES:
            found = train_with(size, StorageConfig(every_steps=every, mode=mode), steps)
            taken = found["checkpoints"]
            ratio = found["step_ms"] / plain["step_ms"]
            report.add(
                size, mode, f"{every} steps", f"{taken:.0f}", f"{found['stall_ms'] / taken if taken else 0.0:.0f}",
                f"{ratio:.2f}", f"{found['written'] / 1e6:.0f}", f"{found['state'] / every / 1e6:.0f}",
                mode=mode, every=every, steps=steps, found=found, without=plain,
            )  # fmt: skip


def main(options: Options) -> None:
    writes = options.report(TITLE, METHOD, "parameters", "what", "s", "MB/s", "of the direct write")
    resumes = options.report(RESUME_TITLE, RESUME_METHOD, "parameters", "what", "s", part="resume")
    training = options.report(
        TRAINING_TITLE, TRAINING_METHOD, "size", "mode", "checkpoint every", "taken", "stall ms each", "step, of none",
        "MB written a step", "full checkpoints, MB a step", part="training",
    )  # fmt: skip
    repetitions = 2 if options.quick else 5
    for size in ("demo",) if options.quick else ("30M", "100M"):
        measure_writes(writes, size, repetitions)
        measure_resume(resumes, size, repetitions)
    measure_intervals(training, "demo" if options.quick else "30M", 12 if options.quick else 24)
    for report in (writes, resumes, training):
        report.write()


if __name__ == "__main__":
    run("storage_rate", main)
