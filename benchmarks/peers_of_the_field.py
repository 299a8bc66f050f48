"""One training under each protection of the field that installs from PyPI: cost of a step, loss at kills, exactness.

Peers are optional: ``pip install -c constraints.txt -r benchmarks/field/requirements.txt``.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.field.trainee import Block, Record, RunFailed, Trainee
from benchmarks.harness.command import Options, run
from benchmarks.harness.report import Report, median_and_spread
from benchmarks.harness.scratch import scratch_directory

TITLE = "One training under the protections of the field"
METHOD = """\
The training is a GPT of 3.2M parameters with dropout, shuffled text in epochs of 21 batches, AdamW, clipping and a
schedule; 63 steps from one seed. Each arm adds what its library's documentation asks for, and nothing else
(`benchmarks/field/arms.py`).

*A step takes* is measured in blocks of nine steps behind one that is not timed. All arms of a loop are alive at once,
and stand still but for the one whose turn it is; the unprotected training takes a block before and behind each. *times*
is the median over blocks of an arm's mean step over the mean of its two neighbours', ± half the distance between the
quartiles; *CPU* is the same for the CPU seconds of all processes of an arm, with what they do in the background behind
a block. *longest* is the longest of all timed steps. The unprotected row is a second one, its null pair: what it
differs from 1 is noise, and so is as much of everything else. *memory* is the resident memory of all processes, over
that of the unprotected training; *disk* is what all files of a run that was not killed take at its end.

Then each arm is started anew and killed by SIGKILL at the same drawn instants: as a step begins, or when it is computed
and its protection is owing. The command is given again, or the launcher does it. *again* counts completed steps that
are taken again, for each kill. *next step* is the time from the signal to the first step that had not been completed
before, Python's imports and repeated steps included. *exact*: losses, data, parameters and optimizer state at the end
equal those of the same arm when it was not killed, bit for bit.

*state by*: whether the library finds what belongs to the state, or the script hands it over. Where it is the script,
ours hands over all of it: generators, schedule and place in the data, too. memckpt repeats its last step at a run's
first resume on purpose, to compare the two."""

COLUMNS = (
    "training", "saves", "state by", "times", "±", "CPU", "longest, ms", "memory, MiB", "disk, MiB", "again",
    "next step, s", "exact",
)  # fmt: skip
SEED = 54
#: Programs with the loader of the unprotected training; those that hand over its place have another.
SAME_LOADER = {"ravex", "memckpt_plain", "memckpt_lightning", "memckpt_accelerate"}


@dataclass(frozen=True)
class Arm:
    """A way to protect the training.

    Attributes:
        name: in the table.
        program: in `benchmarks.field.arms`.
        saves: how often, and whose choice that is.
        package: on PyPI; empty: none beside torch and memckpt.
        library_finds: whether the library finds the state by itself.
        options: of the program.
        launcher: in front of the command; it starts the training again.
    """

    name: str
    program: str
    saves: str
    package: str = ""
    library_finds: bool = False
    options: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name with the version that is installed."""
        try:
            return f"{self.name} {importlib.metadata.version(self.package)}" if self.package else self.name
        except importlib.metadata.PackageNotFoundError:
            return self.name

    @property
    def missing(self) -> bool:
        """Whether its package is not installed."""
        try:
            importlib.metadata.version(self.package or "torch")
        except importlib.metadata.PackageNotFoundError:
            return True
        return False


@dataclass(frozen=True)
class Loop:
    """The arms of one kind of training loop, the unprotected one first."""

    unprotected: Arm
    arms: Sequence[Arm]


_MEMCKPT_RUN = (sys.executable, "-m", "memckpt", "run", "--", sys.executable)
_DLROVER_RUN = (sys.executable, "-m", "benchmarks.field.dlrover_run")
_EACH = "each step"
LOOPS = (
    Loop(
        Arm("plain loop, unprotected", "plain", "-"),
        (
            Arm("torch.save", "torch_save", _EACH),
            Arm("dcp.async_save", "dcp_async", _EACH),
            Arm("torch_checkpointing", "torch_checkpointing", _EACH, "torch_checkpointing"),
            Arm(
                "DLRover Flash Checkpoint", "dlrover", "memory each step, disk each 500th", "dlrover",
                options=("--disk-every", "500"), launcher=_DLROVER_RUN,
            ),
            Arm(
                "DLRover Flash Checkpoint", "dlrover", "memory each 50th, disk each 500th (its example)", "dlrover",
                options=("--every", "50", "--disk-every", "500"), launcher=_DLROVER_RUN,
            ),
            Arm("NVRx local", "nvrx_local", _EACH, "nvidia-resiliency-ext"),
            Arm("lm-resiliency", "lm_resiliency", "memory and disk each step", "lm-resiliency"),
            Arm(
                "lm-resiliency", "lm_resiliency", "memory each 10th, disk each 100th (defaults)", "lm-resiliency",
                options=("--every", "10", "--disk-every", "100"),
            ),
            Arm("ravex", "ravex", "a delta each step (default)", "ravex", library_finds=True),
            Arm("memckpt", "memckpt_plain", "each step (default)", library_finds=True),
            Arm("memckpt, `memckpt run`", "memckpt_plain", "each step (default)", "", True, launcher=_MEMCKPT_RUN),
        ),
    ),
    Loop(
        Arm("Lightning, unprotected", "lightning", "-", "lightning"),
        (
            Arm("Lightning, ModelCheckpoint", "lightning_steps", _EACH, "lightning", True),
            Arm("Lightning, ModelCheckpoint", "lightning_epochs", "each epoch (default)", "lightning", True),
            Arm("Lightning, memckpt", "memckpt_lightning", "each step (default)", "lightning", True),
        ),
    ),
    Loop(
        Arm("Accelerate, unprotected", "accelerate", "-", "accelerate"),
        (
            Arm("Accelerate, save_state", "accelerate_save_state", _EACH, "accelerate", True),
            Arm("Accelerate, memckpt", "memckpt_accelerate", "each step (default)", "accelerate", True),
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """How much is measured; the epochs hold the steps of all blocks.

    Attributes:
        size: of the model.
        epochs, batches: of the training.
        rounds, steps: blocks of an arm, and timed steps in each.
        kills: of an arm.
    """

    size: str
    epochs: int
    batches: int
    rounds: int
    steps: int
    kills: int

    def __post_init__(self) -> None:
        assert self.rounds * (self.steps + 1) <= self.epochs * self.batches

    def arguments(self, arm: Arm, epochs: int | None = None) -> list[str]:
        """Arguments of the training's command."""
        return [
            "--program", arm.program, "--size", self.size, "--epochs", str(epochs or self.epochs),
            "--batches", str(self.batches), *arm.options,
        ]  # fmt: skip


@dataclass(frozen=True)
class Kill:
    """A kill as a step begins, or when it is computed and its protection is owing."""

    step: int
    event: str

    def __str__(self) -> str:
        return f"{self.step} ({'begins' if self.event == 'begin' else 'computed'})"


def draw_kills(seed: int, steps: int, count: int) -> list[Kill]:
    """Kills of a run of so many steps, both kinds in turn, not at its very ends."""
    drawn = random.Random(seed)
    chosen = sorted(drawn.sample(range(3, steps - 1), count))
    first = drawn.randrange(2)
    return [Kill(step, ("begin", "end")[(first + number) % 2]) for number, step in enumerate(chosen)]


@dataclass
class Cost:
    """Times of an arm's steps, beside those of the unprotected steps next to them.

    Attributes:
        pairs, cpu_pairs: mean seconds of a step, and CPU seconds of a step: the arm's, and the unprotected.
        longest: seconds of the longest step.
        memory_bytes: of all processes.
        disk_bytes: of all files, at the end.
        record: of the whole run, which was not killed.
        failure: why there is less than that; empty: there is not.
    """

    pairs: list[tuple[float, float]] = field(default_factory=list)
    cpu_pairs: list[tuple[float, float]] = field(default_factory=list)
    longest: float = 0.0
    memory_bytes: int = 0
    disk_bytes: int = 0
    record: Record = field(default_factory=Record)
    failure: str = ""

    def add(self, block: Block, before: Block, behind: Block) -> None:
        """Add a block and its neighbours."""
        neighbours = before.seconds + behind.seconds
        self.pairs.append((statistics.mean(block.seconds), statistics.mean(neighbours)))
        self.cpu_pairs.append((block.cpu_seconds, (before.cpu_seconds + behind.cpu_seconds) / 2))
        self.longest = max(self.longest, *block.seconds)


def measure_costs(loop: Loop, scale: Scale, directory: Path) -> dict[Arm, Cost]:
    """Let the arms of a loop take turns, each between two blocks of the unprotected training."""
    arms = [arm for arm in (loop.unprotected, *loop.arms) if not arm.missing]
    costs = {arm: Cost() for arm in arms}
    if loop.unprotected not in costs:
        return costs
    with contextlib.ExitStack() as stack:
        # It takes a block for each of theirs, and may never end.
        beside = stack.enter_context(_trainee(loop.unprotected, scale, directory / "beside", epochs=10**6))
        _bring_to_gate(beside)
        trainees = {}
        for number, arm in enumerate(arms):
            trainee = stack.enter_context(_trainee(arm, scale, directory / str(number)))
            with _noting(costs[arm]):
                _bring_to_gate(trainee)
                trainees[arm] = trainee
        beside.take_block(scale.steps, settle=False)
        for number in range(scale.rounds):
            shift = number % len(arms)
            before = beside.take_block(scale.steps, settle=False)
            for arm in [*arms[shift:], *arms[:shift]]:
                if costs[arm].failure:
                    continue
                with _noting(costs[arm]):
                    block = trainees[arm].take_block(scale.steps, settle=arm != loop.unprotected)
                behind = beside.take_block(scale.steps, settle=False)
                if not costs[arm].failure:
                    costs[arm].add(block, before, behind)
                before = behind
        for arm, trainee in trainees.items():
            if not costs[arm].failure:
                with _noting(costs[arm]):
                    costs[arm].memory_bytes = trainee.memory_bytes()
                    trainee.let_through()
                    trainee.wait_for("finished")
                    trainee.wait_until_ended()
                    costs[arm].disk_bytes = trainee.disk_bytes()
                costs[arm].record = trainee.record
    return costs


def _trainee(arm: Arm, scale: Scale, directory: Path, epochs: int | None = None) -> Trainee:
    return Trainee(arm.launcher, scale.arguments(arm, epochs), directory)


def _bring_to_gate(trainee: Trainee) -> None:
    trainee.start()
    trainee.wait_for("begin")


@contextlib.contextmanager
def _noting(cost: Cost) -> Iterator[None]:
    """Note a run's failure with its cost."""
    try:
        yield
    except RunFailed as error:
        cost.failure = str(error)


@dataclass
class Survival:
    """What kills did to an arm.

    Attributes:
        lost: for each kill, completed steps that were taken again.
        seconds: for each kill, from the signal to the first step that had not been completed.
        record: of the whole run.
        failure: why there is less than that; empty: there is not.
    """

    lost: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    record: Record = field(default_factory=Record)
    failure: str = ""


def measure_survival(arm: Arm, scale: Scale, kills: Sequence[Kill], directory: Path) -> Survival:
    """Kill a run of an arm, and see what it comes back with."""
    found = Survival()
    with _trainee(arm, scale, directory) as trainee:
        found.record = trainee.record
        try:
            trainee.start()
            trainee.let_through()
            for number, kill in enumerate(kills, 1):
                trainee.wait_for(kill.event, kill.step)
                try:
                    sent_at = trainee.kill()
                    trainee.let_through()
                    first = trainee.wait_for("begin")
                    found.lost.append(max(0, kill.step - int(first["step"])))
                    reached = first if first["step"] >= kill.step else trainee.wait_for("begin", kill.step)
                except RunFailed as error:
                    raise RunFailed(f"cannot start after kill {number}: {error}") from None
                found.seconds.append(float(reached["at"]) - sent_at)
            trainee.wait_for("finished")
            trainee.wait_until_ended()
        except RunFailed as error:
            found.failure = str(error)
    return found


def difference(whole: Record, killed: Record) -> str:
    """What differs first between an undisturbed run and a killed one; empty: nothing."""
    for name, one, other in (("data", whole.data, killed.data), ("loss", whole.losses, killed.losses)):
        steps = [step for step in sorted(one.keys() | other.keys()) if one.get(step) != other.get(step)]
        if steps:
            return f"{name} of step {steps[0]}"
    parts = [part for part in whole.digests if whole.digests[part] != killed.digests.get(part)]
    return f"{parts[0]} at the end" if parts else ""


def add_row(report: Report, arm: Arm, cost: Cost | None, plain: Cost | None, survival: Survival | None) -> None:
    """Add the row of an arm, whatever there is of it."""
    times, spread, cpu, longest, memory, disk, lost, seconds, exact = ["-"] * 9
    why = "not installed" if cost is None else cost.failure
    if why:
        exact = f"not run: {_short(why)}"
    if cost is not None and cost.pairs and plain is not None:
        ratio, width = median_and_spread([one / other for one, other in cost.pairs])
        times, spread = f"{ratio:.2f}", f"{width:.2f}"
        cpu = f"{statistics.median(one / other for one, other in cost.cpu_pairs):.2f}"
        longest = f"{cost.longest * 1e3:.0f}"
        memory = f"{(cost.memory_bytes - plain.memory_bytes) / 2**20:.0f}" if cost.memory_bytes else "-"
        disk = f"{cost.disk_bytes / 2**20:.0f}" if cost.record.digests else "-"
    if cost is not None and survival is not None:
        lost = ", ".join(map(str, survival.lost)) or "-"
        seconds = ", ".join(f"{took:.1f}" for took in survival.seconds) or "-"
        differs = difference(cost.record, survival.record)
        exact = f"no: {_short(survival.failure)}" if survival.failure else f"no: {differs}" if differs else "yes"
    by = "-" if arm.saves == "-" else "library" if arm.library_finds else "script"
    report.add(
        arm.label, arm.saves, by, times, spread, cpu, longest, memory, disk, lost, seconds, exact,
        arm=arm.name, saves=arm.saves, program=arm.program,
        pairs=cost.pairs if cost else [], cpu_pairs=cost.cpu_pairs if cost else [],
        longest=cost.longest if cost else None, memory_bytes=cost.memory_bytes if cost else None,
        disk_bytes=cost.disk_bytes if cost else None,
        lost=survival.lost if survival else [], seconds=survival.seconds if survival else [], exact=exact,
    )  # fmt: skip
    print(" | ".join(report.rows[-1]), flush=True)


def _short(why: str, length: int = 140) -> str:
    """An error without line ends and bars, which would break the table."""
    flat = " ".join(why.replace("|", "/").split())
    return flat if len(flat) <= length else f"{flat[:length]}..."


def measure_loop(report: Report, loop: Loop, scale: Scale, kills: Sequence[Kill], directory: Path) -> None:
    """The rows of a loop's arms."""
    directory.mkdir()
    costs = measure_costs(loop, scale, directory)
    plain = costs.get(loop.unprotected)
    for number, arm in enumerate((loop.unprotected, *loop.arms)):
        cost = costs.get(arm)
        survival = None
        if cost is not None and not cost.failure and arm != loop.unprotected:
            survival = measure_survival(arm, scale, kills, directory / f"killed {number}")
        add_row(report, arm, cost, plain, survival)
        if cost is not None and plain is not None and not cost.failure:
            differs = difference(plain.record, cost.record)
            if differs and arm.program in SAME_LOADER:
                report.notes.append(f"{arm.label}, {arm.saves}: not the unprotected training, not killed: {differs}.")


def main(options: Options) -> None:
    began = time.monotonic()
    scale = Scale("tiny", 2, 8, 2, 3, 2) if options.quick else Scale("demo", 3, 21, 6, 9, 3)
    kills = draw_kills(SEED, scale.epochs * scale.batches, scale.kills)
    report = options.report(TITLE, METHOD, *COLUMNS)
    report.notes.append(f"Kills in steps {', '.join(map(str, kills))}, drawn with seed {SEED}.")
    with scratch_directory() as directory:
        for number, loop in enumerate(LOOPS):
            measure_loop(report, loop, scale, kills, directory / f"loop{number}")
    report.run["duration"] = f"{time.monotonic() - began:.0f} s"
    report.write()


if __name__ == "__main__":
    run("peers_of_the_field", main)
