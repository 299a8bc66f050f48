"""History of a run's attempts according to their journals, and the check that the next resume was proved.

A rank's journal has the events "fresh" or "restored" (`step`, `held`: the record, `tier`), "commit" (`record`, `done`),
"generation" (`record` that it began with, `every`: number of records between captures of its state) and "checked"
(`verdict`, `line`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from memckpt import Session
from memckpt.config import MemckptConfig
from memckpt.session.resume.report import RestoreReport

Events = list[dict[str, Any]]
ByRank = Sequence[Events]


class Notes(Protocol):
    """A journal."""

    def note(self, event: str, **fields: Any) -> None: ...


def journal_of(path: Path) -> Events:
    """A process's notes so far."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def note_resume(notes: Notes, report: RestoreReport | None, **fields: Any) -> int:
    """Note what a session has restored; returns the held step, 0 if there is none."""
    if report is None:
        notes.note("fresh")
        return 0
    # From every tier and in every mode: exact is known, or is not said.
    assert report.evidence or not report.exact, f"step {report.step} from {report.tier}: compared with nothing"
    again = report.repeated is not None  # one more record is held after the restored one
    step = report.step if report.repeated is None else report.repeated
    fields |= {"tier": report.tier, "lost": report.steps_lost, "exact": report.exact}
    notes.note("restored", step=step, held=report.record + again, **fields)
    if report.check.verdict != "pending":
        notes.note("checked", verdict=report.check.verdict, line=report.check.line)
    return step


def commit(notes: Notes, session: Session, number: int, **arguments: Any) -> bool:
    """Commit step `number`, and note the outcome."""
    pending, began = session.check.verdict == "pending", session._switch.began
    done = session.commit(**arguments)
    record = session._last.record if session._last is not None else 0
    notes.note("commit", step=number, record=record, done=done)
    if session._switch.began != began:
        notes.note("generation", record=session._switch.began, every=session._switch.request.every)
    if pending and session.check.verdict != "pending":
        notes.note("checked", verdict=session.check.verdict, line=session.check.line)
    return done


class History:
    """Follows one rank's journals over successive attempts."""

    def __init__(self, journals: Iterable[Events]) -> None:
        #: Records between captures of the state, by the first record of the generation.
        self._begun: dict[int, int] = {}
        self._newest = 0
        for journal in journals:
            for event in journal:
                self._follow(event)

    def _follow(self, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "fresh":
                self._go_back(0)
            case "restored":
                self._go_back(event["held"])
            case "commit" if event["done"]:
                self._newest = event["record"]
            case "generation":
                self._begun[event["record"]] = event["every"]

    def _go_back(self, record: int) -> None:
        self._newest = record
        self._begun = {one: every for one, every in self._begun.items() if one <= record}

    def reasons(self, record: int) -> list[str]:
        """Reasons, as in a resume's report, why a record's step cannot be repeated; storage is unknown here."""
        found = []
        if record in self._begun:
            found.append(f"a generation began at record {record}")
        every = self._begun.get(max((one for one in self._begun if one <= record), default=0), 1)
        if every > 1 and record == self._newest:
            found.append(f"state is copied every {every} steps")
        return found


def why_unproved(
    ranks: ByRank, earlier: Sequence[ByRank], settings: MemckptConfig, died: bool, reasons: Sequence[str] = ()
) -> str:
    """The reason why an attempt's resume counts as unproved; empty if each rank says *equal*, or *none* validly.

    `ranks`: the attempt's journals; `earlier`: those of the run's earlier attempts. If some rank `died`, and no record
    had ended by then, there need not be a verdict. `reasons`: parts of valid ones beside those that the journals imply.
    """
    restored = [each for journal in ranks for each in journal if each["event"] == "restored"]
    if not settings.replays or not restored:
        return ""
    verdicts = {(e["verdict"], e["line"]) for journal in ranks for e in journal if e["event"] == "checked"}
    if not verdicts:
        ended = any(each["event"] == "commit" and each["done"] for journal in ranks for each in journal)
        return "" if died and not ended else "there is no verdict"
    if len(verdicts) > 1:
        return f"ranks do not agree: {verdicts}"
    ((verdict, line),) = verdicts
    one = restored[0]
    if one["tier"] == "storage":
        logs = settings.storage is None or settings.storage.mode == "log"  # a log has the previous state, too
        implied = [] if logs else [f"storage does not have the state from which step {one['step']} was taken"]
    else:
        implied = [
            reason
            for rank in range(len(ranks))
            for reason in History(attempt[rank] for attempt in earlier if rank < len(attempt)).reasons(one["held"])
        ]
    compared = "no step was compared" not in line
    fine = verdict == "equal" and (compared or any(part in line for part in (*implied, *reasons)))
    return "" if fine else f"{verdict}: {line}; expected: equal, or one of {[*implied, *reasons]}"
