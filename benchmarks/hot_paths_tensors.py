"""Host time per tensor and step for models of many small tensors, compared to a plain loop and bare gradient copies."""

from __future__ import annotations

import contextlib
import gc
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import memckpt
from benchmarks.harness.command import Options, run
from benchmarks.harness.copies import SharedCopy
from benchmarks.harness.report import Report
from benchmarks.workloads.gpt import catch_up, redo_config
from memckpt import Session

TITLE = "Host time per tensor and step, many small tensors"
METHOD = """\
Models of linear layers of 16 x 16 (weight and bias, 272 parameters a layer) and fused AdamW: tensors so small that what
is measured is the cost of each tensor, not that of its bytes. All arms train in one process and take turns, a step
each, in an order that moves on from round to round; an eager agent has applied its records before the next arm's turn.
Given are medians: of a step, of the ratio to the plain loop's step in the same round, and of the difference to it,
divided by the number of tensors. *CPU* is the same difference in process CPU time, which a busy machine disturbs less
than the clock. *Stall* is what the session itself counts (`stall_ms`). The first rounds, in which slots are touched for
the first time and every value is compared, do not count.

*Copy* is the least that any protection of every step does: each gradient is copied into shared memory, one by one,
between backward and the optimizer's step; *hook* does that in a hook on each parameter, during backward. Neither knows
what the optimizer did with the gradients, keeps a base, or can say that a record is whole."""
COUNTS = (100, 1_000, 10_000)
WARM_UP = 20  # past all slots of a ring with T = 8, and past the records that are compared in full


class Layers(nn.Module):
    """A model of many parallel layers."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(tensors // 2)])

    def loss(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).square().mean()


class Arm:
    """A training and its protection."""

    def __init__(self, tensors: int) -> None:
        torch.manual_seed(0)
        self.model = Layers(tensors)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.x = torch.randn(4, 16)

    def step(self) -> None:
        self.model.loss(self.x).backward()
        self.before_optimizer()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after_optimizer()

    def before_optimizer(self) -> None:
        return

    def after_optimizer(self) -> None:
        return

    def settle(self) -> None:
        """Wait, untimed, for the step's background work."""


class Copies(Arm):
    """Copies gradients one by one into shared memory after backward."""

    def __init__(self, tensors: int) -> None:
        super().__init__(tensors)
        self.params = list(self.model.parameters())
        self.shared = SharedCopy([param.detach() for param in self.params])

    def before_optimizer(self) -> None:
        self.shared.take([param.grad for param in self.params if param.grad is not None])


class Hooks(Arm):
    """Copies gradients into shared memory in backward hooks."""

    def __init__(self, tensors: int) -> None:
        super().__init__(tensors)
        params = list(self.model.parameters())
        shared = SharedCopy([param.detach() for param in params])
        self.views = {id(param): view for param, view in zip(params, shared.views, strict=True)}
        for param in params:
            param.register_post_accumulate_grad_hook(self.take)

    def take(self, param: Tensor) -> None:
        if param.grad is not None:
            self.views[id(param)].copy_(param.grad)


class Protected(Arm):
    """Protected by a session."""

    def __init__(self, tensors: int, mode: str, directory: Path) -> None:
        super().__init__(tensors)
        self.session: Session = memckpt.attach(self.model, self.optimizer, run_dir=directory, config=redo_config(mode))
        self.session.restore()

    def after_optimizer(self) -> None:
        self.session.commit()

    def settle(self) -> None:
        catch_up(self.session)


def _measure(arms: dict[str, Arm], rounds: int) -> dict[str, list[tuple[float, float, float]]]:
    """Seconds, seconds of CPU and of stall of each arm's steps."""
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in arms}
    names = list(arms)
    gc.collect()
    gc.freeze()  # a collection would scan all arms' objects in one arm's turn
    try:
        for number in range(rounds):
            for position in range(len(names)):
                name = names[(number + position) % len(names)]
                arm = arms[name]
                stalled = arm.session.stall.total if isinstance(arm, Protected) else 0.0
                cpu, clock = time.process_time(), time.perf_counter()
                arm.step()
                clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
                stalled = arm.session.stall.total - stalled if isinstance(arm, Protected) else 0.0
                arm.settle()
                taken[name].append((clock, cpu, stalled))
    finally:
        gc.unfreeze()
    return taken


def add_count(report: Report, tensors: int, rounds: int) -> None:
    """The rows of all arms, for one number of tensors."""
    with contextlib.ExitStack() as stack:
        arms: dict[str, Arm] = {"plain": Arm(tensors), "copy": Copies(tensors), "hook": Hooks(tensors)}
        for mode in ("lazy T=8", "eager"):
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memckpt-bench-")))
            arm = Protected(tensors, mode, directory)
            stack.callback(arm.session.close)
            arms[f"memckpt, {mode}"] = arm
        _measure(arms, WARM_UP)
        taken = _measure(arms, rounds)
    plain = taken["plain"]
    for name, mine in taken.items():
        clock = statistics.median(one[0] for one in mine)
        ratio = statistics.median(one[0] / other[0] for one, other in zip(mine, plain, strict=True))
        extra, cpu = (
            statistics.median(one[i] - other[i] for one, other in zip(mine, plain, strict=True)) / tensors * 1e6
            for i in (0, 1)
        )
        stall = statistics.median(one[2] for one in mine) / tensors * 1e6
        if name == "plain":
            cells = ("1.00", "", "", "")
        else:
            cells = (f"{ratio:.2f}", f"{extra:.1f}", f"{cpu:.1f}", f"{stall:.1f}" if stall else "")
        report.add(
            f"{tensors:,}", str(rounds), name, f"{clock * 1e3:.2f}", *cells,
            tensors=tensors, arm=name, step_seconds=clock, ratio=ratio, tensor_us=extra, tensor_cpu_us=cpu,
            tensor_stall_us=stall,
        )  # fmt: skip


def main(options: Options) -> None:
    report = options.report(
        TITLE, METHOD, "tensors", "rounds", "arm", "step, ms", "x plain", "us a tensor", "CPU, us a tensor",
        "stall, us a tensor",
    )  # fmt: skip
    for tensors in COUNTS[:1] if options.quick else COUNTS:
        add_count(report, tensors, rounds=5 if options.quick else max(20, min(200, 100_000 // tensors)))
    report.write()


if __name__ == "__main__":
    run("hot_paths_tensors", main)
