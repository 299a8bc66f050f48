"""A small training through traces of failures, beside what the simulator says of it."""

from __future__ import annotations

import collections
import random
import statistics
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.harness.command import Options, run
from benchmarks.harness.report import Report, millions
from benchmarks.harness.scratch import scratch_directory
from benchmarks.harness.turns import start_server
from benchmarks.workloads.failing_job import NODES, RACK, Began, FailingJob, Killed, failing_job
from benchmarks.workloads.peer_nodes import Nodes
from benchmarks.workloads.peer_ranks import Task
from memckpt import ErasureConfig, MemckptConfig, StorageConfig
from memckpt.journal.events import Protected, Stored, Whole
from memckpt.journal.reading import read_journal
from memckpt.planning.scheme import Scheme, Tier
from memckpt.planning.simulation import (
    KINDS,
    NOTHING,
    Cluster,
    Exponential,
    FailureModel,
    Failures,
    Outcome,
    Repair,
    Setup,
    Training,
    read_trace,
    simulate,
)
from tests.support.cluster import netns

TITLE = "A real run through traces of failures, and its simulation"
METHOD = f"""\
A GPT with AdamW in fp32, sharded with FSDP2 over {NODES} nodes of one rank each (gloo), all on one machine, agents and
replicators in network namespaces of their own where that is permitted. In each step the ranks wait for a while as for
an accelerator, since the nodes share the cores. Records are with peers (k=2, m=2), and checkpoints in storage. All
figures are measured first, in the same job:

- the time of a step, without protection and with it, and from that the overhead;
- for kills of each kind (processes only, one node, a rack of two nodes, all nodes): the time until all processes have
  ended (*detection*), until lost nodes have agents (*replacement*), and from there to the first new step (*restore*, by
  the tier that served; as the first steps are slower than others, what they take longer is part of it); the steps
  lost, and from that the lag of memory and peers;
- from the run's journal: how long after its step a checkpoint is stored, and from the first new step until memory and
  peers of replaced nodes are complete (*rebuild*).

Then failures of these kinds are drawn with a seed for each trace. The real job is trained through the trace: a failure
kills its ranks, and the agents of its nodes, at that moment, in a restart, too. The simulator reads the same trace as a
file, with the measured costs. A real ETTR is the steps at the end, times the time of a step without protection, over
the duration. Steps count with the part of the one in progress on both sides. *off by* is the simulated ETTR over the
real one, less one."""

#: Restarts come from these tiers, nearest first.
TIERS = ("local memory", "peers", "storage")
CLUSTER = Cluster(nodes=NODES, nodes_per_rack=RACK)
PERIOD = 8
#: Least steps before a kill whose costs are measured, and the number of first steps that count as slower than others.
_STEPS, _SLOW_STEPS = PERIOD + 12, 10
#: A restart that ended with the next failure.
INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Scale:
    """The size of the benchmark.

    Attributes:
        size: name of the model's size.
        device_seconds: part of a step that uses no core.
        every: interval of checkpoints, in steps.
        plain_steps: measured steps without protection.
        kills: measured kills of each kind.
        traces: number of traces.
        seconds: duration of each.
        failures: mean number of failures of each kind in a trace.
    """

    size: str
    device_seconds: float
    every: int
    plain_steps: int
    kills: int
    traces: int
    seconds: float
    failures: dict[str, float]

    @property
    def block(self) -> int:
        """Steps until every tier has something: a window, and a checkpoint."""
        return max(_STEPS, self.every + PERIOD)

    @property
    def config(self) -> MemckptConfig:
        peers = ErasureConfig(data=NODES - 2, tolerate=2, overhead=1.0, cadence="every_step")
        storage = StorageConfig(mode="replica", every_steps=self.every)
        # The costs of one setting are measured: it has to stay.
        return MemckptConfig(redo="lazy", anchor_period_steps=PERIOD, peers=peers, storage=storage, tuning="off")

    @property
    def model(self) -> FailureModel:
        """Distributions of failures: the mean of one unit of a kind is that of the job times their number."""
        each = {
            name: Exponential(CLUSTER.count(KINDS.index(name)) * self.seconds / count)
            for name, count in self.failures.items()
        }
        return FailureModel(
            nodes=each.get("node"), processes=each.get("process"), racks=each.get("rack"), cluster=each.get("cluster")
        )


FULL = Scale("tiny", 0.1, 50, 100, 4, 2, 180.0, {"process": 3, "node": 3, "rack": 1.5, "cluster": 1.5})
QUICK = Scale("tiny", 0.1, 20, 30, 1, 1, 40.0, {"process": 1, "node": 1, "rack": 0.5, "cluster": 0.5})


# What is measured before


@dataclass
class Measured:
    """What was measured at kills and restarts, in seconds unless named otherwise; by tier where it matters."""

    detection: list[float] = field(default_factory=list)
    replacement: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    lost_steps: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    #: From the start of processes to the end of the slow steps.
    restarted: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    rebuilt: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    stored_after: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Costs:
    """Costs of the job, as the simulator takes them; `plain` and `step`: seconds of a step without and with protection.

    Attributes:
        numel: number of parameters.
    """

    numel: int
    plain: float
    step: float
    scheme: Scheme
    repair: Repair


def plain_step(scale: Scale) -> tuple[float, int]:
    """Seconds of a step without protection, and the number of parameters."""
    with scratch_directory() as directory:
        nodes = Nodes(Task("fsdp", scale.size, NODES, directory, None, device_seconds=scale.device_seconds))
        with closing(nodes):
            nodes.wait_ready()
            return nodes.take(scale.plain_steps, untimed=_SLOW_STEPS).seconds, nodes.numel


def lost_nodes(kind: str, unit: int) -> range:
    """Nodes whose memory is lost."""
    return CLUSTER.nodes_of(KINDS.index(kind), unit)


def measure_costs(scale: Scale) -> tuple[Costs, Measured]:
    """Costs of the job, from kills of each kind, and what was measured for them."""
    plain, numel = plain_step(scale)
    print(f"a step without protection: {plain * 1e3:.1f} ms", flush=True)
    found, draws = Measured(), random.Random(0)
    with failing_job(scale.size, scale.device_seconds, scale.config) as job:
        began = _begin(job)
        for kind in [*scale.failures] * scale.kills:
            # Kills are to come at any moment of a step.
            _train(job, scale.block, draws.uniform(0.0, 10 * scale.device_seconds))
            _count_attempt(found, job, began, scale.block)
            unit = draws.randrange(CLUSTER.count(KINDS.index(kind)))
            killed = job.fail(lost_nodes(kind, unit), statistics.mean(found.steps))
            began = _begin(job)
            _count_kill(found, kind, killed, began)
            print(f"killed: {kind}; resumed from {began.tier or NOTHING}", flush=True)
        longer = scale.block + scale.plain_steps  # as an attempt between two failures is
        _train(job, longer, 0.0)
        _count_attempt(found, job, began, longer)
        _count_journal(found, job)
    return _costs_of(scale, plain, numel, found), found


def _begin(job: FailingJob) -> Began:
    began = job.begin()
    assert began is not None  # it has no deadline
    return began


def _train(job: FailingJob, block: int, more_seconds: float) -> None:
    """Train a block of steps, until every tier holds one of this attempt, and for so many seconds more."""
    job.nodes.take(block, untimed=0)
    job.nodes.wait_stored(job.begun[-1].step + 1)
    job.nodes.train_until_killed()
    job.nodes.watch(time.monotonic() + more_seconds)


def _count_attempt(found: Measured, job: FailingJob, began: Began, block: int) -> None:
    times = job.times()
    # Behind its block of steps the job pauses.
    found.steps += np.diff(times)[_SLOW_STEPS:block].tolist()
    found.restarted[began.tier].append(float(times[_SLOW_STEPS]) - began.began)


def _count_kill(found: Measured, kind: str, killed: Killed, began: Began) -> None:
    found.detection.append(killed.ended)
    if kind != "process":
        found.replacement.append(killed.spawning)
    found.lost_steps[began.tier].append(killed.steps - began.step)


def _count_journal(found: Measured, job: FailingJob) -> None:
    """Take from the journal what only agents know."""
    entries = read_journal(job.task.directory)
    ends = [*(began.began for began in job.begun[1:]), time.time()]
    for began, end in zip(job.begun, ends, strict=True):
        times = job.times(began.attempt)
        complete = {"local memory": float(times[0]), "peers": float(times[0])}
        stored: dict[int, float] = {}
        for entry in entries:
            at, event = entry.envelope.time, entry.event
            if not began.began <= at < end:
                continue
            if isinstance(event, Stored):  # each node tells it
                stored[event.step] = max(at, stored.get(event.step, at))
            elif isinstance(event, Protected):
                complete["local memory"] = max(complete["local memory"], at)
            elif isinstance(event, Whole) and event.tier == "peers":
                complete["peers"] = max(complete["peers"], at)
        for step, at in stored.items():
            if 0 < step - began.step < len(times):
                found.stored_after.append(at - float(times[step - began.step]))
        if began.tier in ("peers", "storage"):
            for tier, at in complete.items():
                found.rebuilt[tier].append(at - float(times[0]))


def _costs_of(scale: Scale, plain: float, numel: int, found: Measured) -> Costs:
    if missing := [tier for tier in ("", *TIERS) if not found.restarted.get(tier)]:
        raise RuntimeError(f"expected restarts from {', '.join(TIERS)} and afresh, found none from {missing}")
    step = statistics.mean(found.steps)
    restores = {
        tier: max(0.0, statistics.mean(seconds) - _SLOW_STEPS * step) for tier, seconds in found.restarted.items()
    }

    def held_at_once(name: str) -> float:
        """Lag of a tier that holds each step: of a step in progress half is lost on average."""
        lost = found.lost_steps[name]
        return max(0.0, statistics.mean(lost) - 0.5)

    def rebuild(name: str) -> float:
        return statistics.mean(found.rebuilt[name])

    local, peers, storage = TIERS
    tiers = (
        Tier(
            name=local, every_steps=1, lag_steps=held_at_once(local), restore_seconds=restores[local],
            rebuild_seconds=rebuild(local),
        ),
        Tier(
            name=peers, every_steps=1, lag_steps=held_at_once(peers), restore_seconds=restores[peers],
            group_nodes=NODES, tolerates=2, rebuild_seconds=rebuild(peers),
        ),
        Tier(
            name=storage, every_steps=scale.every, lag_steps=statistics.mean(found.stored_after) / step,
            restore_seconds=restores[storage], survives_cluster=True,
        ),
    )  # fmt: skip
    repair = Repair(
        detection_seconds=statistics.mean(found.detection), replacement_seconds=statistics.mean(found.replacement),
        start_seconds=restores[""],
    )  # fmt: skip
    return Costs(numel, plain, step, Scheme(name="measured", overhead=max(0.0, step / plain - 1), tiers=tiers), repair)


# The trace, real and simulated


@dataclass(frozen=True)
class Real:
    """What became of the real training.

    Attributes:
        steps: steps at the end.
        lost_steps: steps that were lost with failures.
        recoveries: number of recoveries by tier, and from nothing; of those that were interrupted by a failure, too.
        late: seconds by which kills came later than in the trace, at most.
    """

    steps: float
    lost_steps: float
    recoveries: dict[str, int]
    late: float


def trace_text(failures: Failures) -> str:
    """Failures as a file of the simulator."""
    lines = ["time_seconds,kind,node"]
    for at, kind, unit in zip(failures.seconds, failures.kinds, failures.units, strict=True):
        lines.append(f"{at:.3f},{KINDS[kind]},{unit * (CLUSTER.size(int(kind)) or 1)}")
    return "\n".join(lines) + "\n"


def train_through(scale: Scale, failures: Failures, step_seconds: float) -> Real:
    """Train the real job through a trace; its time begins with its first step."""
    recoveries = dict.fromkeys((*TIERS, NOTHING, INTERRUPTED), 0)
    lost_steps = reached = late = 0.0
    with failing_job(scale.size, scale.device_seconds, scale.config) as job:
        began: Began | None = _begin(job)
        start = time.monotonic()
        moments = [*(start + failures.seconds), start + scale.seconds]
        for number, (kind, unit) in enumerate(zip(failures.kinds.tolist(), failures.units.tolist(), strict=True)):
            late = max(late, _train_until(job, began, moments[number]))
            killed = job.fail(CLUSTER.nodes_of(kind, unit), step_seconds)
            reached = reached if began is None else killed.steps
            # The last restart goes through, for the step that it resumes from.
            began = job.begin(moments[number + 1] if number + 1 < len(failures) else None)
            recoveries[INTERRUPTED if began is None else began.tier or NOTHING] += 1
            lost_steps += 0.0 if began is None else reached - began.step
            source = "no attempt got ready" if began is None else f"{began.tier or NOTHING}, step {began.step}"
            print(f"{failures.seconds[number]:.1f} s: {KINDS[kind]}, step {reached:.1f}; then {source}", flush=True)
        _train_until(job, began, moments[-1])
        return Real(job.fail([], step_seconds).steps, lost_steps, recoveries, late)


def _train_until(job: FailingJob, began: Began | None, moment: float) -> float:
    """Train until a moment of the monotonic clock, if an attempt is ready; how late it is then, in seconds."""
    if began is not None:
        job.nodes.train_until_killed()
        job.nodes.watch(moment)
    return time.monotonic() - moment


def simulated(scale: Scale, costs: Costs, trace: Path) -> Outcome:
    """Outcome of a trace in the simulator."""
    setup = Setup(
        cluster=CLUSTER,
        failures=read_trace(trace, CLUSTER),
        training=Training(step_seconds=costs.plain, duration_seconds=scale.seconds),
        repair=costs.repair,
    )
    (outcome,) = simulate(setup, [costs.scheme])[0].outcomes
    return outcome


def add_row(report: Report, scale: Scale, costs: Costs, seed: int) -> None:
    failures = scale.model.draw(CLUSTER, scale.seconds, np.random.SeedSequence(seed))
    with scratch_directory() as directory:
        trace = directory / "trace.csv"
        trace.write_text(trace_text(failures))
        said = simulated(scale, costs, trace)
    real = train_through(scale, failures, costs.step)
    ettr = real.steps * costs.plain / scale.seconds
    recoveries = dict(zip((*TIERS, NOTHING), said.recoveries, strict=True))
    off = said.ettr / ettr - 1
    kinds: dict[str, int] = {name: count for name, count in zip(KINDS, said.failures, strict=True) if count}
    report.add(
        str(seed), _counts(kinds), f"{ettr:.3f}", f"{said.ettr:.3f}", f"{off:+.1%}",
        _counts(real.recoveries), _counts(recoveries), f"{real.lost_steps:.0f}", f"{said.lost_steps:.0f}",
        f"{real.steps:.0f}", f"{said.steps:.0f}",
        seed=seed, seconds=scale.seconds, failures=kinds, real=asdict(real) | {"ettr": ettr},
        simulated=asdict(said) | {"ettr": said.ettr}, simulated_recoveries=recoveries, off=off,
    )  # fmt: skip
    print(f"trace {seed}: ETTR {ettr:.3f}, simulated {said.ettr:.3f}", flush=True)


def _counts(numbers: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in numbers.items() if count) or "none"


def describe(costs: Costs, found: Measured) -> list[str]:
    """The measured costs, in words."""
    repair = costs.repair
    step = (
        f"A step takes {costs.plain * 1e3:.1f} ms without protection, {costs.step * 1e3:.1f} ms with it: an overhead "
        f"of {costs.scheme.overhead:.1%}."
    )
    restarts = (
        f"Detection {repair.detection_seconds:.2f} s, replacement {repair.replacement_seconds:.2f} s, a first start "
        f"{repair.start_seconds:.2f} s; means of {len(found.detection)} kills."
    )
    said = [step, restarts]
    for tier in costs.scheme.tiers:
        said.append(
            f"From {tier.name}: {tier.restore_seconds:.2f} s to the first new step, lag {tier.lag_steps:.2f} steps of "
            f"{tier.every_steps:.0f}, rebuilt after {tier.rebuild_seconds:.2f} s."
        )
    return said


def main(options: Options) -> None:
    report = options.report(
        TITLE, METHOD, "trace", "failures", "ETTR, real", "simulated", "off by", "recoveries from, real", "simulated",
        "steps lost, real", "simulated", "steps at the end, real", "simulated",
    )  # fmt: skip
    report.run["compute threads"] = f"{NODES} ranks of 1"
    if (problem := netns.problem(as_root=True)) is not None:
        report.notes.append(f"All nodes are on the loopback, not in networks of their own: {problem}.")
    start_server("benchmarks.workloads.peer_ranks")
    scale = QUICK if options.quick else FULL
    try:
        costs, found = measure_costs(scale)
        report.notes.append(
            f"{millions(costs.numel)} parameters; {scale.device_seconds * 1e3:.0f} ms of each step wait as for an "
            f"accelerator; checkpoints every {scale.every} steps; traces of {scale.seconds:.0f} s."
        )
        report.notes += describe(costs, found)
        for seed in range(1, scale.traces + 1):
            add_row(report, scale, costs, seed)
    except MemoryError as error:
        report.leave_out("traces", str(error))
    report.write()


if __name__ == "__main__":
    run("simulated_run", main)
