"""Settings that the tuner finds on running jobs, and the effect of its changes on the step."""

from __future__ import annotations

import os
import select
import signal
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.harness.command import Options, run
from benchmarks.harness.processes import end_agent
from benchmarks.harness.report import Report
from benchmarks.harness.scratch import scratch_directory
from benchmarks.harness.turns import Worker, start_server
from benchmarks.workloads.tuned import Section, TunedTask, run_slow_agent, run_tuned
from memckpt import AgentConfig, MemckptConfig
from memckpt.journal.events import Decision
from memckpt.journal.reading import read_journal

TITLE = "What the tuner finds on a running job"
METHOD = """\
A GPT with AdamW in fp32 in one process with one compute thread, and its agent. In each step it waits for a while as
for an accelerator. The tuner is the product's (`tuning="auto"`), but looks each 5 s and not each 30 s, in quick runs
more often. The cases:

- *defaults*: nothing is set, and nothing is needed.
- *slow agent*: the automatic choice is eager redo, and the agent takes longer for a record than training for a step.
- *never fails*, *fails often*: lazy redo, whose T is left to the tuner. The one that fails is told a mean time between
  failures of 30 s, and is killed after each third of the time; the other expects the default, one a day.

*settings* are those of the first step and of the last: redo mode, T, D. Before and after are the longest runs of steps
with settings unchanged directly before the tuner's last change, and after it, without the first ten steps of each.
*stall* is the share of the step's time in which protection keeps the thread from training, *wait* the part of it that
training waits for the agent's redo. *within the budget*: the stall after the last change is at most
`overhead_budget`."""

#: Name of the model's size: steps short enough for several decisions in a case.
_SIZE = "demo"


@dataclass(frozen=True)
class Case:
    """A job.

    Attributes:
        redo_seconds: what the agent takes for a record at least; 0: what it needs.
        attempts: number of attempts, each of which but the last is killed.
    """

    name: str
    config: MemckptConfig
    device_seconds: float = 0.1
    redo_seconds: float = 0.0
    attempts: int = 1


@dataclass
class Found:
    """What became of a job: settings at the start, sections in order, decisions of the tuner in words."""

    start: str
    sections: list[Section] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)


def cases() -> list[Case]:
    linger = AgentConfig(linger_seconds=120.0)
    lazy = MemckptConfig(redo="lazy", agent=linger, storage=None)
    return [
        Case("defaults", MemckptConfig(agent=linger)),
        Case("slow agent", MemckptConfig(agent=linger, storage=None), redo_seconds=0.4),
        Case("never fails", lazy),
        Case("fails often", replace(lazy, mtbf_seconds=30.0), attempts=3),
    ]


def train(case: Case, seconds: float, look_seconds: float | None) -> Found:
    """Train through all attempts."""
    with ExitStack() as stack:
        directory: Path = stack.enter_context(scratch_directory())
        if case.redo_seconds:
            slow = stack.enter_context(closing(Worker("agent", run_slow_agent, directory, case.redo_seconds)))
            stack.callback(end_agent, slow.receive())
        found: Found | None = None
        agents: set[int] = set()
        stack.callback(_end_all, agents)
        for attempt in range(case.attempts):
            task = TunedTask(
                _SIZE, directory, case.config, look_seconds, bool(case.redo_seconds), case.device_seconds, attempt
            )
            with closing(Worker(f"{case.name}, attempt {attempt}", run_tuned, task)) as training:
                settings, agent = training.receive()
                agents |= {agent} if agent is not None and not case.redo_seconds else set()
                found = found or Found(settings)
                found.sections += training.execute(seconds / case.attempts)
                if attempt + 1 < case.attempts:
                    _kill(training.pid)
        assert found is not None
        events = [entry.event for entry in read_journal(directory)]
        found.decisions = [
            f"{event.name}: {event.old} -> {event.new}, {event.reason}"
            for event in events
            if isinstance(event, Decision)
        ]
        return found


def _end_all(agents: set[int]) -> None:
    for agent in agents:
        end_agent(agent)


def _kill(pid: int) -> None:
    handle = os.pidfd_open(pid)
    signal.pidfd_send_signal(handle, signal.SIGKILL)
    select.select([handle], [], [])
    os.close(handle)


def before_and_after(sections: list[Section]) -> tuple[Section | None, Section]:
    """The sections directly before the last change of settings, and after it; of several the longest."""
    last = sections[-1].settings
    first = next(at for at in range(len(sections)) if all(one.settings == last for one in sections[at:]))
    after = max(sections[first:], key=lambda section: section.steps)
    if first == 0:
        return None, after
    same = [one for one in sections[:first] if one.settings == sections[first - 1].settings]
    return max(same, key=lambda section: section.steps), after


def share(section: Section | None, seconds: float) -> str:
    return "-" if section is None or not section.steps else f"{seconds / section.seconds:.1%}"


def add_row(report: Report, case: Case, found: Found) -> None:
    before, after = before_and_after(found.sections)
    budget = case.config.overhead_budget
    stalled = after.stall / after.seconds if after.steps else None
    within = "-" if stalled is None else "yes" if stalled <= budget else "no"
    report.add(
        case.name, _SIZE, found.start, found.sections[-1].settings, str(len(found.decisions)),
        share(before, before.stall if before else 0.0), share(before, before.wait if before else 0.0),
        share(after, after.stall), share(after, after.wait),
        f"{after.seconds / after.steps * 1e3:.0f}" if after.steps else "-", f"{budget:.0%}", within,
        case=case.name, size=_SIZE, start=found.start, end=found.sections[-1].settings, decisions=found.decisions,
        sections=[asdict(section) for section in found.sections], budget=budget, stall_share=stalled,
    )  # fmt: skip
    for decision in found.decisions:
        report.notes.append(f"{case.name}: {decision}.")
    print(f"{case.name}: {found.start} -> {found.sections[-1].settings}", flush=True)


def main(options: Options) -> None:
    report = options.report(
        TITLE, METHOD, "case", "size", "settings at the start", "at the end", "changes", "stall before", "wait before",
        "stall after", "wait after", "step after, ms", "budget", "within the budget",
    )  # fmt: skip
    report.run["compute threads"] = "1"
    seconds, look_seconds = (20.0, 2.0) if options.quick else (60.0, 5.0)
    report.notes.append(f"{seconds:.0f} s each.")
    start_server("benchmarks.workloads.tuned")
    for case in cases():
        try:
            found = train(case, seconds, look_seconds)
        except MemoryError as error:
            report.leave_out(case.name, str(error))
            continue
        add_row(report, case, found)
    report.write()


if __name__ == "__main__":
    run("tuning", main)
