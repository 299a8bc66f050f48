"""What happens to a run stands in its journal: trainings that are killed, agents that die, storage that fills up."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from memckpt.journal import events
from memckpt.journal.journal import read_journal
from tests.support.trainings.cli_harness import invoke
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import config, kill_agent, kill_self
from tests.support.trainings.engine_harness import Lab

Kind = TypeVar("Kind")


def of(entries: list[events.Entry], kind: type[Kind]) -> list[Kind]:
    return [entry.event for entry in entries if isinstance(entry.event, kind)]


def kinds(entries: list[events.Entry]) -> list[str]:
    """Names of the classes, without the samples, whose number depends on the time."""
    return [type(entry.event).__name__ for entry in entries if not isinstance(entry.event, events.Sample)]


def test_a_training_that_is_killed_and_resumed(lab: Lab) -> None:
    settings = config("lazy")
    died = lab.train(PLAIN, settings, actions={("backward", 9): kill_self})
    again = lab.train(PLAIN, settings, seed=2)
    lab.check_same(PLAIN, died, again)
    entries = read_journal(lab.run_dir)
    assert kinds(entries) == [
        "AgentStarted",
        "AttemptBegan",
        "StartedOver",
        "FirstStep",
        "Protected",
        "TrainerDied",
        "AttemptBegan",
        "Recovered",
        "ResumeChecked",
        "FirstStep",
        "Finished",
        "AgentLeft",
    ]
    (started,) = of(entries, events.AgentStarted)
    assert (started.by_operator, started.replaces, started.schema) == (False, None, 1)
    first, second = of(entries, events.AttemptBegan)
    (dead,) = of(entries, events.TrainerDied)
    assert (dead.rank, dead.pid, dead.step) == (0, first.trainers[0][1], 8)
    assert second.trainers[0][1] != dead.pid
    assert [each.envelope.attempt for each in entries if isinstance(each.event, events.AttemptBegan)] == [1, 2]
    (recovered,) = of(entries, events.Recovered)
    assert (recovered.step, recovered.repeated) == (7, 8), "the last step is taken once more, as a proof"
    assert (recovered.tier, recovered.steps_lost, recovered.exact) == ("local memory", 0, True)
    assert [one.step for one in of(entries, events.FirstStep)] == [1, 9]
    (checked,) = of(entries, events.ResumeChecked)
    assert (checked.verdict, checked.line) == again.verdict
    (protected,) = of(entries, events.Protected)
    assert (protected.ranks, protected.mode) == ((0,), "lazy")
    (finished,) = of(entries, events.Finished)
    assert finished.step == len(again.losses) + 8 - 1
    assert of(entries, events.AgentLeft)[0].reason == "training finished"
    assert of(entries, events.StartedOver)[0].reason
    assert {each.envelope.node for each in entries} == {"node"}


def test_an_agent_that_is_killed_is_replaced_and_the_gap_is_counted(lab: Lab) -> None:
    ended = lab.train(PLAIN, config("lazy"), actions={("after commit", 6): kill_agent})
    lab.check_same(PLAIN, ended)
    entries = read_journal(lab.run_dir)
    first, second = of(entries, events.AgentStarted)
    assert (first.replaces, second.replaces) == (None, first.pid)
    assert [each.rejoined for each in of(entries, events.AttemptBegan)] == [False, True]
    assert [each.envelope.attempt for each in entries if isinstance(each.event, events.AttemptBegan)] == [1, 1]
    (gap,) = of(entries, events.GapEnded)
    assert (gap.step, gap.steps) == (7, 0)
    assert len(of(entries, events.FirstStep)) == 1, "training has never stopped"
    assert not of(entries, events.Recovered)


def test_a_journal_that_cannot_be_written_changes_no_bit_of_training(lab: Lab) -> None:
    lab.run_dir.mkdir(parents=True)
    (lab.run_dir / "events-node.jsonl").symlink_to("/dev/full")
    died = lab.train(PLAIN, config("lazy"), actions={("backward", 9): kill_self})
    assert "No space left" in lab.status().journal
    again = lab.train(PLAIN, config("lazy"), seed=2)
    lab.check_same(PLAIN, died, again)
    logs = "".join(path.read_text() for path in lab.run_dir.glob("agent-*.log"))
    assert logs.count("events are lost until it can") == 1


def test_the_command_shows_a_journal_of_a_run_that_is_over(lab: Lab, tmp_path: Path) -> None:
    lab.train(PLAIN, config("lazy"), actions={("backward", 4): kill_self})
    lab.stop()
    code, text = invoke("events", lab.run_dir)
    assert code == 0
    assert "attempt began: 1 rank" in text
    assert "trainer of rank 0 died" in text
    assert "agent left: stopped by pid" in text
    code, text = invoke("events", lab.run_dir, "--json")
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    (path,) = lab.run_dir.glob("events-*.jsonl")
    assert sorted(lines, key=str) == sorted((msgspec.json.decode(line) for line in path.open("rb")), key=str)
    assert len(invoke("events", lab.run_dir, "--last", 1)[1].splitlines()) == 1
    other = tmp_path / "elsewhere"
    shutil.copytree(lab.run_dir, other, ignore=shutil.ignore_patterns("agent-*"))
    assert invoke("events", other)[1] == invoke("events", lab.run_dir)[1]
    assert events.Preempted not in {type(entry.event) for entry in read_journal(other)}
