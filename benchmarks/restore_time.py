"""Time from the SIGKILL of a training to its restored state, and to the end of its first new step."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.command import Options, run
from benchmarks.harness.copies import copy_bandwidth
from benchmarks.harness.report import Report
from benchmarks.harness.scratch import scratch_directory
from benchmarks.workloads.trainee_process import TraineeProcess, trainee_process

TITLE = "From SIGKILL to the restored state, and to the end of the first new step"
METHOD = """\
A training in a process of its own is killed after 12 steps and started again at once, with the same command. Medians
of several kills, in seconds. *reaped*: the kernel has freed the killed process. *imports*: from the start of the new
one through the imports and the first torch optimizer, which imports torch's compiler. *built*: model and optimizer.
*restored*: for memckpt attaching, copying and redoing; for a file `torch.load` with `weights_only=True` and both
`load_state_dict`. *bound* is one copy of 12 bytes a parameter at the speed of a copy between memories, measured here.
The file is read from the page cache (warm), or after the kernel was asked to drop it (cold)."""

#: Stages, with the events that delimit them.
STAGES = {
    "imports": ("started", "first optimizer"),
    "built": ("first optimizer", "built"),
    "restored": ("built", "restored"),
    "first step": ("restored", "step"),
}


@dataclass(frozen=True)
class Restart:
    """Seconds of one kill and restart, by stage."""

    reaped: float
    stages: dict[str, float]

    @property
    def to_restored(self) -> float:
        """Seconds from the signal to the restored state."""
        return self.reaped + sum(self.stages[name] for name in ("imports", "built", "restored"))

    @property
    def apart(self) -> float:
        """Seconds from the signal to the restored state, without imports."""
        return self.to_restored - self.stages["imports"]

    @property
    def to_step(self) -> float:
        """Seconds from the signal to the end of the first new step."""
        return self.to_restored + self.stages["first step"]


def restart_of(killed: tuple[float, float], process: TraineeProcess) -> Restart:
    moments = {**process.moments, "started": process.started_at}
    stages = {name: moments[end] - moments[begin] for name, (begin, end) in STAGES.items()}
    return Restart(process.started_at - killed[0], stages)


def from_memory(size: str, mode: str, kills: int) -> tuple[list[Restart], int]:
    """Restarts from an agent's memory; and the number of parameters."""
    with scratch_directory() as directory:
        arguments = ("--size", size, "--protect", mode, "--run-dir", str(directory), "--steps", "100000")
        found = []
        process = TraineeProcess(*arguments)
        try:
            process.wait_for("step", 12)
            for _ in range(kills):
                killed = process.kill()
                agent = process.agent_pid
                process.agent_pid = None  # it must live on
                process.close()
                process = TraineeProcess(*arguments)
                process.agent_pid = agent
                step = process.wait_for("restored")["step"]
                if step < 12:
                    raise RuntimeError(f"expected a restore of step 12 or later, found step {step}")
                process.wait_for("step")  # the window of records stays full, so one step is enough
                found.append(restart_of(killed, process))
            return found, process.numel
        finally:
            process.close()


def from_file(size: str, kills: int, cold: bool) -> list[Restart]:
    """Restarts from a file with the same state."""
    with scratch_directory() as directory:
        file = directory / "checkpoint.pt"
        with trainee_process("--size", size, "--steps", "2", "--save", str(file)) as process:
            process.wait_for("waiting")
        found = []
        for _ in range(kills):
            with trainee_process("--size", size, "--steps", "100000") as process:
                process.wait_for("step")
                if cold:
                    drop_from_cache(file)
                killed = process.kill()
            with trainee_process("--size", size, "--steps", "100000", "--load", str(file)) as process:
                process.wait_for("step")
                found.append(restart_of(killed, process))
        return found


def drop_from_cache(file: Path) -> None:
    """Drop the file's pages from the page cache."""
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def add_row(report: Report, size: str, name: str, restarts: list[Restart]) -> None:
    def median(of: Callable[[Restart], float]) -> float:
        return statistics.median(map(of, restarts))

    figures = {
        "reaped": median(lambda r: r.reaped),
        **{stage: statistics.median(restart.stages[stage] for restart in restarts) for stage in STAGES},
        "to restored, imports apart": median(lambda r: r.apart),
        "to restored": median(lambda r: r.to_restored),
        "to first step": median(lambda r: r.to_step),
    }
    cells = (f"{value:.2f}" for value in figures.values())
    report.add(size, name, *cells, size=size, source=name, kills=len(restarts), **figures)


def measure_size(report: Report, size: str, kills: int, bandwidth: float) -> None:
    numel = 0
    for mode in ("lazy T=8", "eager"):
        restarts, numel = from_memory(size, mode, kills)
        add_row(report, size, f"memckpt, {mode}", restarts)
    add_row(report, size, "torch.load, warm", from_file(size, kills, cold=False))
    add_row(report, size, "torch.load, cold", from_file(size, kills, cold=True))
    bound = 12 * numel / bandwidth
    report.notes.append(f"{size}: {numel / 1e6:.1f}M parameters; bound of *restored*: {bound:.3f} s.")


def main(options: Options) -> None:
    report = options.report(
        TITLE, METHOD, "size", "state from", "reaped, s", *STAGES, "kill to restored, imports apart",
        "kill to restored", "kill to end of first step",
    )  # fmt: skip
    bandwidth = copy_bandwidth()
    report.notes.append(f"One thread copies {bandwidth / 1e9:.2f} GB/s between memories.")
    for size in ("demo",) if options.quick else ("30M", "100M"):
        measure_size(report, size, kills=1 if options.quick else 3, bandwidth=bandwidth)
    report.write()


if __name__ == "__main__":
    run("restore_time", main)
