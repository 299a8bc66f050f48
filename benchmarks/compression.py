"""Compressed gradients as records: training, bytes, writing, recovery, and the compressors themselves."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.harness.command import Options, run
from benchmarks.harness.report import RATIO_COLUMNS, Ratio, Report, millions
from benchmarks.harness.scratch import scratch_directory
from benchmarks.harness.sides import interleaved, over
from benchmarks.harness.turns import start_server, take_turns
from benchmarks.workloads.compressed import RANKS, Arm, Compressor, Recorded, Sent, logged_bytes, running
from benchmarks.workloads.compressed_records import (
    GPT2,
    Records,
    Restoring,
    alone,
    averaged,
    bucket_of,
    computed,
    shapes_of,
    union_sizes,
)
from benchmarks.workloads.gpt import BATCH, Trainee, make_model
from memckpt import compression
from memckpt.config import HalfPrecision, PowerSGD, Quantized8, RandomK, TopK
from memckpt.storage.local_store import LocalStore

_SETTING = f"""\
A GPT with fused AdamW in DistributedDataParallel on {RANKS} ranks of one node (gloo, CPU), each a process with one
compute thread and {BATCH} new sequences of 64 bytes at each step."""
_TURNS = """
All trainings run at once and take turns in blocks of a few steps: while one has its turn, the others are blocked in a
read. The order changes from round to round, and the first step of a block is not timed. The slower rank counts. Ratios
are medians over rounds, the spread half the distance between the quartiles; the null pair is a second training with
nothing beside the first: what it differs from 1 is noise, and so is as much of everything else. Both ranks compute all
the time on a machine with as many cores, so that agent and writer take their time from training.
"""
TITLES = {
    "training": "Compressed gradients: time of a step, protected, over that of one without protection",
    "residual": "Compressed gradients: what keeping the left-out parts costs",
    "bytes": "Compressed gradients: bytes per step",
    "union": "Compressed gradients: entries of a top-k average against the number of ranks",
    "write": "Compressed gradients: time to write a record, by the number of records in a batch",
    "recovery": "Compressed gradients: time to load a checkpoint and redo records from the log",
    "frequency": "Compressed gradients: overhead of protecting every step",
    "compress": "Compressed gradients: time to compress a bucket",
}
METHODS = {
    "training": _SETTING
    + _TURNS
    + """
*torch.save* is rank 0's, of parameters and both moments, with an fsync, while the others wait. *memckpt, in memory*
survives the death of any trainer; the log is written to the same disk, with fsyncs, by a process of its own.""",
    "residual": """\
The trainings of `compression_training`; bytes of a record of both ranks: of its parts in memory, and of its share of a
batch in the log. *only in bases* is computed: what was left out is written with each checkpoint, here every 100 steps,
and a resume goes back to one.""",
    "bytes": _SETTING
    + """
*in memory* is the room for a record's gradients, which is for as many entries as there may be. *in the log* is the size
of its file, of the node's part, metadata included. *a rank sends* is counted where a compressor calls the collectives,
as ring algorithms send it over so many ranks. *kept* is what a rank carries from step to step, where a record has it:
what compression left out, and a factor with PowerSGD. Full state: parameters and two moments, 12 bytes per parameter.
*computed* has no training: sizes follow from shapes (GPT-2, `examples.gpt` with its vocabulary and context).""",
    "union": """\
A GPT in one process that takes the place of 16 ranks: each has a batch of its own, a compressor (the product's) with
its own left-out parts, and its own choice of elements; the model steps with the average of all 16 (AdamW). Entries of
the union of the first N ranks' choices, over those of one, median over the last steps. *independent* would be choices
without anything in common: (1 - (1 - ratio)^N) / ratio.""",
    "write": """\
Records of a GPT's gradients with the product's functions: copied out of a slot, written as one file with its checksum
and fsyncs, read back from the disk, and committed by a second file. Sides take turns; medians.""",
    "recovery": _SETTING
    + """
Its log, in batches of 5 records, is read by one process: `StoredState.restore`, which loads the checkpoint behind the
first step and redoes so many records with the user's optimizer class, as a resume does once checksums are verified.
With one thread groups of parameters are redone in turn, with more of them side by side. *ms a record* is what restores
took above that of the checkpoint alone. Beside it `torch.load` of the full state. All from the page cache, in turn;
medians.""",
    "frequency": _SETTING
    + _TURNS
    + """
The reference has the same compression and no protection. memckpt records every step; what may be chosen is how many
records a batch of the log has. *stall* is the time that memckpt counts in the training thread.""",
    "compress": """\
One bucket of 25 MB as DDP makes it: gradients of two blocks of a GPT of width 512. A compressor's whole work on one
rank, with error feedback: adding what was left out, choosing or rounding, making the record's encoding and the dense
average, filling the bucket anew; nothing is sent. Beside it `torch.topk` of the absolute values of the whole bucket at
once, as many entries as TopK(0.01) takes, and nothing else; and the same of one gradient after the other, as TopK
chooses. Sides take turns; medians.""",
}
PARTS = ("compress", "union", "write", "recovery", "bytes", "training", "frequency")
_TOP_K = TopK(ratio=0.01, residual="drop")


def short(config: Compressor | None) -> str:
    """A compressor's name with its main setting."""
    match config:
        case None:
            return "uncompressed"
        case TopK() | RandomK():
            return f"{type(config).__name__}({config.ratio})"
        case PowerSGD():
            return f"PowerSGD({config.rank})"
        case HalfPrecision():
            return f"HalfPrecision({config.dtype})"
        case _:
            return f"{type(config).__name__}()"


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.2f}"


# Trainings


@dataclass(frozen=True)
class Scale:
    """Size and rounds of trainings."""

    size: str
    rounds: int
    steps: int
    warm_up: int


FULL = Scale("demo", rounds=6, steps=10, warm_up=6)
QUICK = Scale("tiny", rounds=2, steps=10, warm_up=3)


def measure_training(report: Report, residual: Report, scale: Scale) -> None:
    keep = replace(_TOP_K, residual="keep")
    arms = (
        Arm(_TOP_K, "nothing"), Arm(_TOP_K, "nothing"), Arm(_TOP_K, "memory"), Arm(keep, "memory"),
        Arm(_TOP_K, "log", 10), Arm(keep, "log", 10), Arm(_TOP_K, "torch.save", 1), Arm(_TOP_K, "torch.save", 10),
        Arm(None, "nothing"), Arm(None, "memory"),
    )  # fmt: skip
    with running(scale.size, arms, scale.warm_up) as trainings:
        rounds = take_turns([one.take for one in trainings], scale.rounds, scale.steps)
        recorded = [training.recorded() for training in trainings]
        logged: list[float | None] = [None] * len(arms)
        for index, arm in enumerate(arms):
            if arm.protected == "log":
                trainings[index].fill_log(2 * arm.every)
                logged[index] = logged_bytes(trainings[index])
    numel = make_model(scale.size).numel
    training_name = f"{millions(numel)} parameters, {RANKS} ranks"
    for index, arm in enumerate(arms[1:], 1):
        name = f"{short(arm.compression)}: {arm.name}" + (" (null pair)" if index == 1 else "")
        if arm.compression == keep:
            name += ", left-out parts kept"
        stall_ms = rounds.stall_ms(index) if arm.protected in ("memory", "log") else None
        report.add_ratio(training_name, name, rounds.pairs(index, 0), scale.steps, stall_ms)
    for index in (2, 3, 4, 5):
        add_residual(residual, arms[index], rounds.pairs(index, 0), recorded[index], logged[index])
    drop = recorded[2]
    assert drop is not None
    assert logged[4] is not None
    kept = 4 * numel * RANKS / 100
    residual.add(
        "only in bases (computed)", "in a log", "-", "-", megabytes(drop.gradients), megabytes(drop.anchors),
        megabytes(kept), megabytes(logged[4] + kept),
        residual="bases", logged=logged[4] + kept,
    )  # fmt: skip


def add_residual(
    report: Report, arm: Arm, pairs: list[tuple[float, float]], recorded: Recorded | None, logged: float | None
) -> None:
    assert recorded is not None
    assert isinstance(arm.compression, TopK)
    ratio = Ratio.of(pairs)
    report.add(
        arm.compression.residual, "in memory" if arm.protected == "memory" else "in a log",
        f"{ratio.ratio:.3f}", f"{ratio.spread:.3f}", megabytes(recorded.gradients), megabytes(recorded.anchors),
        megabytes(recorded.by_value), "-" if logged is None else megabytes(logged),
        residual=arm.compression.residual, pairs=pairs, recorded=vars(recorded), logged=logged,
    )  # fmt: skip


def measure_frequency(report: Report, scale: Scale, ratios: Sequence[float]) -> None:
    scale = replace(scale, rounds=max(2, scale.rounds // 2))
    for ratio in ratios:
        config = TopK(ratio=ratio, residual="drop")
        arms = [Arm(config, "nothing"), Arm(config, "nothing"), Arm(config, "memory")]
        arms += [Arm(config, "log", batch) for batch in (1, 5, 20)]
        with running(scale.size, arms, scale.warm_up) as trainings:
            rounds = take_turns([one.take for one in trainings], scale.rounds, scale.steps)
        for index, arm in enumerate(arms[1:], 1):
            found, stall_ms = Ratio.of(rounds.pairs(index, 0)), rounds.stall_ms(index)
            report.add(
                short(config), arm.name + (" (null pair)" if index == 1 else ""), f"{found.ratio:.3f}",
                f"{found.spread:.3f}", f"{found.with_ms:.1f}", f"{found.without_ms:.1f}", f"{stall_ms:.1f}",
                f"{stall_ms / found.without_ms:.1%}",
                ratio=ratio, arm=arm.name, pairs=rounds.pairs(index, 0), stall_ms=stall_ms,
            )  # fmt: skip


# Bytes


def measure_bytes(report: Report, scale: Scale, count: int) -> None:
    compressors: list[Compressor | None] = [
        TopK(ratio=0.001, residual="drop"), RandomK(ratio=0.01, residual="drop"),
        None, HalfPrecision(), Quantized8(residual="drop"), PowerSGD(rank=4, residual="drop"),
        TopK(ratio=0.1, residual="drop"), TopK(ratio=0.01, residual="drop"),
    ]  # fmt: skip
    model = make_model(scale.size)
    for config in compressors[-count:]:
        size = computed(model, config, RANKS)
        with running(scale.size, [Arm(config, "log", 5)], 1) as (training,):
            training.fill_log(5)
            logged, recorded, sent = logged_bytes(training), training.recorded(), training.sent(3)
        assert recorded is not None
        add_bytes(report, "measured", millions(model.numel), config, RANKS, size.numel, recorded.gradients, logged,
                  sent, size.carried)  # fmt: skip
    for name, shape in GPT2.items():
        large = shapes_of(shape)
        for config in compressors:
            size = computed(large, config, 8)
            add_bytes(report, "computed", f"{name}, {millions(size.numel)}", config, 8, size.numel, size.gradients,
                      None, None, size.carried)  # fmt: skip


def add_bytes(
    report: Report, how: str, model: str, config: Compressor | None, ranks: int, numel: int, gradients: int,
    logged: float | None, sent: Sent | None, carried: int,
) -> None:  # fmt: skip
    record = gradients if logged is None else logged
    wire = None if sent is None else sent.on_wire(ranks)
    report.add(
        how, model, str(ranks), short(config), megabytes(gradients), "-" if logged is None else megabytes(logged),
        "-" if wire is None else megabytes(wire), megabytes(carried), megabytes(12 * numel),
        f"{12 * numel / record:.1f}", f"{12 * numel / (record + carried * ranks):.1f}",
        how=how, model=model, ranks=ranks, compressor=short(config), numel=numel, gradients=gradients, logged=logged,
        wire=wire, carried=carried,
    )  # fmt: skip


# One process


def measure_union(report: Report, size: str, steps: int) -> None:
    for ratio in (0.1, 0.01, 0.001):
        for ranks, unions in union_sizes(size, ratio, steps, max(1, steps // 3)).items():
            independent = (1 - (1 - ratio) ** ranks) / ratio
            median = statistics.median(unions)
            report.add(
                str(ratio), str(ranks), f"{median:.2f}", f"{independent:.2f}", f"{median / ranks:.2f}",
                ratio=ratio, ranks=ranks, unions=unions, independent=independent,
            )  # fmt: skip


def measure_write(report: Report, size: str, repetitions: int) -> None:
    trainee = Trainee(size)
    trainee.step()
    trainee.loss().backward()
    for config in (TopK(ratio=0.01), TopK(ratio=0.1), None):
        batches = (1, 2, 5, 10, 20) if config is not None else (1, 2)
        sizes: dict[int, int] = {}
        with scratch_directory() as directory, closing(Records(trainee, config)) as records:
            write = partial(write_records, records, LocalStore(directory), sizes)
            times = interleaved({str(count): partial(write, count) for count in batches}, repetitions)
        for count in batches:
            taken = [took / count for took in times[str(count)]]
            median, nbytes = statistics.median(taken), sizes[count] / count
            report.add(
                millions(trainee.model.numel), short(config), str(count), megabytes(nbytes), f"{median * 1e3:.1f}",
                f"{over(taken, times['1']):.2f}", f"{nbytes / median / 1e6:.0f}",
                config=short(config), batch=count, seconds=times[str(count)], nbytes=sizes[count],
            )  # fmt: skip


def write_records(records: Records, store: LocalStore, sizes: dict[int, int], count: int, number: int) -> None:
    """Write a batch of so many records, and note its size."""
    sizes[count] = records.write(store, 1000 * number + 100 * count, count).nbytes


def measure_recovery(report: Report, scale: Scale, repetitions: int) -> None:
    counts = (5, 10, 20, 50)
    with running(scale.size, [Arm(_TOP_K, "log", 5)], 1) as (training,):
        training.fill_log(counts[-1])
        restoring = Restoring(training.directory / "storage", scale.size)
        sides: dict[str, Callable[[int], object]] = {"torch.load": restoring.torch_load}
        cases = [(threads, count) for count in (0, *counts) for threads in sorted({1, torch.get_num_threads()})]
        sides |= {f"{threads} {count}": partial(restoring.restore, threads, count) for threads, count in cases}
        times = interleaved(sides, repetitions)
    model, plain = make_model(scale.size).numel, times["torch.load"]
    report.add(
        millions(model), "torch.load", "-", f"{statistics.median(plain) * 1e3:.0f}", "1.00", "-", "-",
        records=None, threads=None, seconds=plain,
    )  # fmt: skip
    for threads, count in cases:
        taken = times[f"{threads} {count}"]
        each = (statistics.median(taken) - statistics.median(times[f"{threads} 0"])) / count if count else None
        report.add(
            millions(model), f"checkpoint and {count} records" if count else "checkpoint", str(threads),
            f"{statistics.median(taken) * 1e3:.0f}", f"{over(taken, plain):.2f}",
            "-" if each is None else f"{each * 1e3:.1f}", "-" if each is None else f"{model / each / 1e6:.0f}",
            records=count, threads=threads, seconds=taken,
        )  # fmt: skip


def measure_compress(report: Report, width: int, repetitions: int) -> None:
    torch.manual_seed(0)
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * 2
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    gradients = [torch.randn(shape) * torch.rand(shape) * 1e-3 for shape in shapes]
    compressors: tuple[Compressor, ...] = (
        TopK(ratio=0.1), TopK(ratio=0.01), TopK(ratio=0.001), RandomK(ratio=0.01), Quantized8(), PowerSGD(rank=4),
        HalfPrecision(),
    )  # fmt: skip
    flat = torch.cat([gradient.view(-1) for gradient in gradients])
    alone_name = "torch.topk of 0.01, alone"
    sides: dict[str, Callable[[int], object]] = {
        alone_name: lambda _: torch.topk(flat.abs(), flat.numel() // 100, sorted=False),
        "the same, a gradient at a time": lambda _: [
            torch.topk(one.view(-1).abs(), one.numel() // 100, sorted=False) for one in gradients
        ],
    }
    bucket = bucket_of(params, gradients)

    def compress(reducer: compression.Reducer, _: int) -> None:
        averaged(reducer, bucket)
        bucket.buffer.copy_(flat)

    for config in compressors:
        sides[short(config)] = partial(compress, compression.reducer_for(config, params))
    threads = torch.get_num_threads()
    for number in sorted({1, threads}):
        torch.set_num_threads(number)
        times = interleaved(sides, repetitions)
        for name, taken in times.items():
            report.add(
                millions(flat.numel()), str(number), name, f"{statistics.median(taken) * 1e3:.1f}",
                f"{over(taken, times[alone_name]):.2f}",
                what=name, threads=number, seconds=taken, numel=flat.numel(),
            )  # fmt: skip
    torch.set_num_threads(threads)


def main(options: Options) -> None:
    def table(name: str, *columns: str, part: str = "") -> Report:
        made = replace(options, arguments=f" --what {part or name}")
        return made.report(TITLES[name], METHODS[name], *columns, part=name)

    scale, quick, ranks = QUICK if options.quick else FULL, options.quick, f"{RANKS} ranks of 1"
    start_server("benchmarks.workloads.compressed")
    for part in options.parts or PARTS:
        match part:
            case "compress":
                made = [table(part, "elements", "threads", "compressor", "ms", "of torch.topk alone")]
                with alone():
                    measure_compress(made[0], 64 if quick else 512, 2 if quick else 9)
            case "union":
                made = [table(part, "ratio", "ranks", "union / k", "independent", "of ranks")]
                with alone():
                    measure_union(made[0], scale.size, 3 if quick else 24)
            case "write":
                made = [table(part, "parameters", "gradients", "records in a batch", "MB a record", "ms a record",
                              "of batches of 1", "MB/s")]  # fmt: skip
                with alone():
                    measure_write(made[0], "tiny" if quick else "30M", 2 if quick else 7)
            case "recovery":
                made = [table(part, "parameters", "what", "threads", "ms", "of torch.load", "ms a record",
                              "M parameters/s")]  # fmt: skip
                measure_recovery(made[0], scale, 2 if quick else 7)
            case "bytes":
                made = [table(part, "how", "model", "ranks", "gradients", "in memory, MB", "in the log, MB",
                              "a rank sends, MB", "kept on each rank, MB", "full state, MB", "full state / record",
                              "the same, left-out parts kept")]  # fmt: skip
                measure_bytes(made[0], scale, 2 if quick else 6)
            case "training":
                columns = ("left-out parts", "records", "ratio", "± spread", "gradients, MB", "anchors, MB",
                           "by value, MB", "in the log, MB")  # fmt: skip
                made = [table(part, *RATIO_COLUMNS), table("residual", *columns, part=part)]
                measure_training(made[0], made[1], scale)
            case _:
                made = [table(part, "gradients", "every step protected by", "ratio", "± spread", "ms with",
                              "ms without", "stall ms", "stall, of a step")]  # fmt: skip
                measure_frequency(made[0], scale, (0.01,) if quick else (0.1, 0.01, 0.001))
        for report in made:
            if part in ("recovery", "bytes", "training", "frequency"):
                report.run["compute threads"] = ranks
            report.write()


if __name__ == "__main__":
    run("compression", main, PARTS)
