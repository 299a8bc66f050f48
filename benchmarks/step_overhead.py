"""Wall time of a step with every step protected, relative to a step without protection."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness.command import Options, run
from benchmarks.harness.copies import SharedCopy
from benchmarks.harness.report import RATIO_COLUMNS, Report, millions
from benchmarks.harness.scratch import scratch_directory
from benchmarks.harness.stall import StallPerStep
from benchmarks.workloads.async_saver import AsyncSaver
from benchmarks.workloads.gpt import NO_AUDIT, Trainee, catch_up, protected
from memckpt import Session
from memckpt.errors import MemoryBudgetError
from memckpt.processes.control import ask_status

TITLE = "Wall time of a step with every step protected, over a step without"
METHOD = """\
Two sides take turns in one process, in blocks of a few steps whose order changes from pair to pair; each block begins
with a step that is not timed, and work left in the background is waited for, untimed, before the other side's turn.
The ratio is the median over pairs of blocks, the spread half the distance between its quartiles. For memckpt and for
the null pair the sides are two copies of model and optimizer; for the others one, saved after each step or not. The
null pair has nothing on either side: what it differs from 1 is noise, and so is as much of everything else.
`torch.save`, `ModelCheckpoint` and `dcp.async_save` write to a disk, without a sync; `ModelCheckpoint` keeps the
newest file. The audit of lazy redo begins ten seconds behind the first step and may take 1% of a core; the figures have
the CPU seconds that its process had taken by the end of an arm, its start among them. The bare copy moves parameters
and optimizer state into shared memory after each step, and nothing more.
The optimizer is AdamW; a batch has 512 tokens."""

MEMCKPT_MODES = ("lazy T=8", f"lazy T=8{NO_AUDIT}", "lazy T=16", "eager")


@dataclass
class Sides:
    """The two sides of one comparison.

    Attributes:
        protected, plain: one training step each.
        settle: waits for the background work of a protected step.
        stall: collects memckpt's time in the training thread by cause; None: memckpt is not in use.
        audit_cpu_seconds: that the auditor has taken so far; None: there is none.
    """

    protected: Callable[[], None]
    plain: Callable[[], None]
    settle: Callable[[], None] = lambda: None
    stall: StallPerStep | None = None
    audit_cpu_seconds: Callable[[], float | None] = lambda: None


@dataclass(frozen=True)
class Arm:
    """A way to protect steps, and the number of pairs to measure: few if the ratio is far from 1."""

    name: str
    open: Callable[[str, str], contextlib.AbstractContextManager[Sides]]
    costly: bool = False


def measure(sides: Sides, pairs: int, block: int) -> list[tuple[float, float]]:
    """Pairs of seconds per step (protected, plain)."""
    found = []
    for number in range(pairs):
        seconds: dict[bool, float] = {}
        for turn in ((True, False), (False, True))[number % 2]:
            step = sides.protected if turn else sides.plain
            step()
            with sides.stall.collect(block) if turn and sides.stall is not None else contextlib.nullcontext():
                started = time.perf_counter()
                for _ in range(block):
                    step()
                seconds[turn] = (time.perf_counter() - started) / block
            sides.settle()
        found.append((seconds[True], seconds[False]))
    return found


# Arms


@contextlib.contextmanager
def nothing(size: str, optimizer: str) -> Iterator[Sides]:
    yield Sides(Trainee(size, optimizer).step, Trainee(size, optimizer).step)


def memckpt_arm(mode: str) -> Arm:
    @contextlib.contextmanager
    def open_sides(size: str, optimizer: str) -> Iterator[Sides]:
        ours, plain = Trainee(size, optimizer), Trainee(size, optimizer)
        with protected(ours, mode) as session:

            def step() -> None:
                ours.step()
                session.commit()

            for _ in range(4):  # past the generation, the first records and their extra checks
                step()
                plain.step()
            yield Sides(
                step, plain.step, lambda: catch_up(session), StallPerStep(session), lambda: _audit_cpu_seconds(session)
            )

    return Arm(f"memckpt, {mode}", open_sides)


def _audit_cpu_seconds(session: Session) -> float | None:
    status = ask_status(session._link._address)
    return None if status is None or status.audit is None else status.audit.cpu_seconds


@contextlib.contextmanager
def bare_copy(size: str, optimizer: str) -> Iterator[Sides]:
    trainee = Trainee(size, optimizer)
    trainee.step()
    target = SharedCopy(trainee.tensors())

    def step() -> None:
        trainee.step()
        target.take(trainee.tensors())

    yield Sides(step, trainee.step)


@contextlib.contextmanager
def torch_save(size: str, optimizer: str) -> Iterator[Sides]:
    trainee = Trainee(size, optimizer)
    with scratch_directory() as directory:

        def step() -> None:
            trainee.step()
            torch.save(trainee.state_dict(), directory / "checkpoint.pt")

        yield Sides(step, trainee.step)


@contextlib.contextmanager
def dcp_async_save(size: str, optimizer: str) -> Iterator[Sides]:
    with scratch_directory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainee = Trainee(size, optimizer)
        saver = AsyncSaver([directory / "0", directory / "1"], no_dist=True)

        def step() -> None:
            trainee.step()
            saver.save(trainee.state_dict())

        try:
            yield Sides(step, trainee.step, saver.wait)
        finally:
            saver.wait()


NULL = Arm("nothing (null pair)", nothing)
BESIDE = (
    Arm("bare copy of the state", bare_copy),
    Arm("torch.save", torch_save, costly=True),
    Arm("dcp.async_save", dcp_async_save, costly=True),
)


def model_checkpoint(size: str, pairs: int, block: int) -> list[tuple[float, float]]:
    """Pairs for Lightning's ModelCheckpoint: each side is a separate fit, timed between batch starts."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    trainee = Trainee(size)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = trainee.model

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = trainee.model.loss(*trainee.batch)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return trainee.optimizer

    class Clock(pl.Callback):
        def __init__(self) -> None:
            self.starts: list[float] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.starts.append(time.perf_counter())

    module = Module()

    def fit(*callbacks: pl.Callback) -> float:
        clock = Clock()
        trainer = pl.Trainer(
            max_steps=block + 2,
            accelerator="cpu",
            callbacks=[clock, *callbacks],
            logger=False,
            enable_checkpointing=bool(callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(TensorDataset(torch.arange(block + 2))))
        return (clock.starts[-1] - clock.starts[1]) / (len(clock.starts) - 2)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found = []
    with scratch_directory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(pairs):
            saving = fit(ModelCheckpoint(directory, every_n_train_steps=1))
            found.append((saving, fit()))
    return found


# The whole


def arms_for(size: str, optimizer: str) -> list[Arm]:
    ours = [memckpt_arm(mode) for mode in MEMCKPT_MODES]
    return [NULL, *ours] if optimizer != "fused" else [NULL, *ours, *BESIDE]


def measure_size(report: Report, options: Options, size: str, optimizer: str) -> None:
    """The rows of a model size and an implementation of AdamW."""
    pairs, block = (2, 3) if options.quick else (6, 3) if size == "30M" else (4, 2)
    costly_pairs = min(pairs, 3)
    training = f"{millions(Trainee(size).model.numel)} parameters, {optimizer} AdamW"
    for arm in arms_for(size, optimizer):
        try:
            with arm.open(size, optimizer) as sides:
                found = measure(sides, costly_pairs if arm.costly else pairs, block)
                stall_ms = sides.stall.total_ms if sides.stall is not None else None
                report.add_ratio(
                    training, arm.name, found, block, stall_ms, audit_cpu_seconds=sides.audit_cpu_seconds()
                )
        except (MemoryBudgetError, MemoryError) as error:
            report.leave_out(f"{arm.name} at {size}", str(error))
    if optimizer == "fused" and size != "100M":
        found = model_checkpoint(size, costly_pairs, block)
        report.add_ratio(training, "Lightning ModelCheckpoint", found, block)


def main(options: Options) -> None:
    report = options.report(TITLE, METHOD, *RATIO_COLUMNS)
    if options.quick:
        measure_size(report, options, "demo", "fused")
        report.write()
    else:
        for size, optimizer in (("30M", "fused"), ("30M", "single-tensor"), ("100M", "fused")):
            measure_size(report, options, size, optimizer)
            report.write()  # the next one takes minutes


if __name__ == "__main__":
    run("step_overhead", main)
