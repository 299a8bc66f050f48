"""Rate of redo, and memory of protection."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.command import Options, run
from benchmarks.harness.copies import best_of
from benchmarks.harness.processes import proportional_bytes
from benchmarks.harness.report import Report, millions
from benchmarks.harness.scratch import scratch_directory
from benchmarks.workloads.gpt import OPTIMIZERS, Trainee, redo_config
from benchmarks.workloads.trainee_process import trainee_process
from memckpt.capture.live_state import LiveState
from memckpt.capture.spec_request import SpecRequest
from memckpt.config import RedoMode
from memckpt.state import codec
from memckpt.state.layout import Layout
from memckpt.state.optimizers import hyperparameters, rebuild_like
from memckpt.state.records import RecordMeta, SubStep
from memckpt.state.redo import RedoGroup, RedoTarget
from memckpt.state.spec import StateSpec

TITLE = "Redo of one record of AdamW"
METHOD = """\
`memckpt.state.redo` applies one record, with all gradients in memory, to a whole state with the user's optimizer class;
beside it that optimizer's own `step()` on the same tensors. Best of several, with the number of threads given."""
MEMORY_TITLE = "Memory of trainer and agent over an unprotected trainer"
MEMORY_METHOD = """\
The sum of the proportional set sizes of trainer and agent (without pages of files, which are libraries) when every slot
has been written, less that of an unprotected trainer; beside it the layout's own figure, `Layout.total_bytes`, which is
what is asked for before anything is allocated. The difference is the agent itself: its interpreter, and torch where it
redoes eagerly."""


@dataclass
class RedoCase:
    """A state, the gradients of one record, and the two ways to apply them."""

    redo: Callable[[], None]
    step: Callable[[], None]
    numel: int


def spec_of(trainee: Trainee, mode: str) -> StateSpec:
    """The StateSpec that a session would make."""
    config = redo_config(mode)
    kind: RedoMode = "eager" if mode == "eager" else "lazy"
    request = SpecRequest(kind, config.anchor_period(kind), config.records_in_flight, local_ranks=(0,), world_size=1)
    return LiveState(trainee.model, [trainee.optimizer], {}).spec(request)


def redo_case(size: str, optimizer: str) -> RedoCase:
    """A record with random gradients, on copies of a trainee's state."""
    trainee = Trainee(size, optimizer)
    trainee.step()
    layout = Layout(spec_of(trainee, "eager"))
    live = dict(trainee.model.named_parameters())
    gradients: list[Tensor] = []
    redo_targets: list[RedoTarget] = []
    for index, spec in enumerate(layout.spec.params):
        param = live[spec.tensor.name]
        gradients.append(torch.randn_like(param) * 1e-3)
        state = {key: value.clone() for key, value in trainee.optimizer.state[param].items()}
        copied = nn.Parameter(param.detach().clone())
        redo_targets.append(RedoTarget(index, 0, param.numel(), copied, {0: state}))
        param.grad = gradients[-1]
    group = RedoGroup(layout, redo_targets, lambda _, groups: rebuild_like(trainee.optimizer, groups))
    groups: list[dict[str, Any]] = hyperparameters(trainee.optimizer)
    meta = RecordMeta(1, 0, False, (SubStep(0, 0, codec.encode(groups)),))
    return RedoCase(
        redo=lambda: group.apply(meta, lambda _, __, index, ___=None: gradients[index]),
        step=lambda: trainee.optimizer.step(),
        numel=layout.numel,
    )


def measure_redo(report: Report, sizes: tuple[str, ...], repetitions: int) -> None:
    threads_at_start = torch.get_num_threads()
    for size in sizes:
        for optimizer in OPTIMIZERS:
            case = redo_case(size, optimizer)
            for threads in sorted({1, threads_at_start}):
                torch.set_num_threads(threads)
                redo, step = best_of(case.redo, repetitions), best_of(case.step, repetitions)
                rate = case.numel / redo
                report.add(
                    millions(case.numel), optimizer, str(threads), f"{redo * 1e3:.1f}", f"{step * 1e3:.1f}",
                    f"{redo / step:.2f}", f"{rate / 1e6:.0f}",
                    numel=case.numel, optimizer=optimizer, threads=threads, redo_s=redo, step_s=step,
                )  # fmt: skip
            torch.set_num_threads(threads_at_start)


# Memory


def memory_of(size: str, mode: str | None) -> int:
    """Bytes of trainer and agent after all pages have been touched."""
    with scratch_directory() as directory, contextlib.ExitStack() as stack:
        arguments = ["--size", size, "--steps", "24"]
        if mode is not None:
            arguments += ["--protect", mode, "--run-dir", str(directory)]
        process = stack.enter_context(trainee_process(*arguments))
        process.wait_for("waiting")
        pids = [process.pid] + ([process.agent_pid] if process.agent_pid is not None else [])
        return sum(proportional_bytes(pid) for pid in pids)


def add_memory(report: Report, size: str) -> None:
    trainee = Trainee(size)
    trainee.step()
    alone = memory_of(size, None)
    for mode in ("lazy T=8", "lazy T=16", "eager"):
        layout = Layout(spec_of(trainee, mode))
        extra = memory_of(size, mode) - alone
        measured, designed = extra / layout.numel, layout.total_bytes / layout.numel
        report.add(
            millions(layout.numel), mode, f"{extra / 2**20:.0f}", f"{layout.total_bytes / 2**20:.0f}",
            f"{(extra - layout.total_bytes) / 2**20:.0f}", f"{measured:.1f}", f"{designed:.1f}",
            mode=mode, numel=layout.numel, measured_bytes=extra, designed_bytes=layout.total_bytes,
        )  # fmt: skip


def main(options: Options) -> None:
    report = options.report(
        TITLE, METHOD, "parameters", "implementation", "threads", "redo ms", "step() ms", "redo / step()",
        "redo, M parameters/s",
    )  # fmt: skip
    sizes = ("demo",) if options.quick else ("30M", "100M")
    measure_redo(report, sizes, repetitions=3 if options.quick else 7)
    report.write()
    report = options.report(
        MEMORY_TITLE, MEMORY_METHOD, "parameters", "mode", "measured MiB", "layout MiB", "difference MiB",
        "measured bytes/parameter", "layout bytes/parameter", part="memory",
    )  # fmt: skip
    if Path("/proc/self/smaps_rollup").exists():
        for size in sizes:
            add_memory(report, size)
    else:
        report.leave_out("memory", "this kernel has no /proc/PID/smaps_rollup")
    report.write()


if __name__ == "__main__":
    run("redo_rate", main)
