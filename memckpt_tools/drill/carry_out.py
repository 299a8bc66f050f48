"""All runs of a drill: made with and without kills, and compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memckpt.config import ErasureConfig
from memckpt.errors import DrillError
from memckpt_tools.drill.comparison import Overhead, Verdict, first_change, judge
from memckpt_tools.drill.job import Start
from memckpt_tools.drill.supervisor import Blow, Instant, Kind, Limits, Run, draw

#: Names of the runs, which are those of their directories.
FIRST, WITHOUT, SECOND, KILLED = "undisturbed-1", "unprotected", "undisturbed-2", "killed"


@dataclass(frozen=True)
class Plan:
    """What is drilled.

    Attributes:
        kills: number of kills.
        steps: steps of each run, at most.
        seed: of the kills' instants.
        kinds: who is killed.
        nodes: number of nodes to simulate, with a command for each.
        overhead: whether a run without protection is compared, too.
        silence_seconds: seconds without a new step after which a run is given up.
    """

    kills: int
    steps: int
    seed: int
    silence_seconds: float = 300.0
    kinds: tuple[Kind, ...] = ("trainer",)
    nodes: int = 1
    overhead: bool = False


@dataclass(frozen=True)
class Result:
    """What a drill has found.

    Attributes:
        verdict: of the comparison.
        instants: drawn kills.
        blows: kills that were made.
        step_seconds: median duration of a step, by run.
        stall_seconds: median time of a step in which protection kept the process from training, by run.
        overhead: what protection costs; None: it was not asked for.
        lent_peers: the peers that the drill has configured, as the script configures none; None where it does.
    """

    verdict: Verdict
    instants: list[Instant]
    blows: list[Blow]
    step_seconds: dict[str, float]
    stall_seconds: dict[str, float]
    overhead: Overhead | None
    lent_peers: ErasureConfig | None


def drill(
    directory: Path,
    start: Start,
    plan: Plan,
    on_progress: Callable[[str, int, int], None],
    on_undisturbed: Callable[[Verdict], None] = lambda verdict: None,
) -> Result:
    """Train twice undisturbed and once with kills, and once without protection if that is asked for, and compare.

    Args:
        directory: existing directory, in which each run gets one of its own.
        start: starts the command.
        plan: what is drilled.
        on_progress: called with a run's name, its newest record, and its kills.
        on_undisturbed: called with what the two undisturbed runs say alone.

    Raises:
        DrillError: a run could not be carried out, or none of the kills could be made.
        ConfigurationError: the training is too short for the kills.
    """

    def run(name: str, records: int) -> Run:
        limits = Limits(records, plan.silence_seconds, plan.nodes, name != WITHOUT)
        return Run(directory / name, start, limits, lambda record, kills: on_progress(name, record, kills))

    first = run(FIRST, plan.steps)
    first.train()
    records = min(plan.steps, first.history.furthest)
    instants = draw(plan.seed, plan.kills, records, plan.kinds)
    without, problem = run(WITHOUT, records) if plan.overhead else None, ""
    if without is not None:  # between the other two: a machine that slows down makes no difference then
        try:
            without.train()
        except DrillError as error:  # its time is not known; all else can be found out
            problem = str(error)
    second = run(SECOND, records)
    second.train()
    on_undisturbed(judge(first.history, second.history, second.history, records))
    killed = run(KILLED, records)
    blows = killed.train(instants, first.step_seconds, to_its_end=first.ended_by_itself)
    if not blows and instants[0].kind == "node":
        raise DrillError(
            f"expected peers that protect the training's nodes by its step {records}, found none that did; drill more "
            "steps, or longer ones; `memckpt status` has the row peers, which says what is missing"
        )
    if not blows:
        raise DrillError(
            f"expected a training that can be killed, found one that ended before its first kill (step "
            f"{instants[0].record} of {records}); drill more steps, or longer ones"
        )
    runs = {FIRST: first, SECOND: second, KILLED: killed}
    verdict = judge(first.history, second.history, killed.history, records, whole=first.ended_by_itself)
    steps = {name: each.step_seconds for name, each in runs.items()}
    stalls = {name: each.stall_seconds for name, each in runs.items()}
    overhead = None
    if without is not None:
        changed = first_change(without.history, first.history, second.history, records) if not problem else None
        protected = first.step_seconds, second.step_seconds
        overhead = Overhead(protected, without.step_seconds, changed, problem)
    return Result(verdict, instants, blows, steps, stalls, overhead, killed.lent_peers)
