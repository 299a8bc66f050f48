"""Journals with everything that a report shows, and the report."""

from __future__ import annotations

from pathlib import Path

from memckpt.journal import events as journal
from memckpt.journal.events import AnyEvent, Entry, Envelope
from memckpt.journal.journal import Journal


class Told:
    """Journals that are made up: a training of a second a step, of two ranks a node."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.now = 1000.0
        self.number = 0

    def note(self, event: AnyEvent, node: str = "a") -> None:
        self.entries.append(Entry(Envelope(time=self.now, node=node, attempt=self.number), event))

    def begin(self, nodes: str = "a") -> None:
        self.number += 1
        for node in nodes:
            self.note(journal.AttemptBegan(2 * len(nodes), ((0, 1), (1, 2))), node)

    def recover(self, step: int, tier: str = "local memory", lost: int | None = 0, seconds: float = 1.0) -> None:
        self.note(journal.Recovered(step, step, tier, seconds, lost))

    def train(self, first: int, last: int, stall_ms: float = 0.0) -> None:
        """The first step, then a sample every ten steps and at the last one."""
        self.note(journal.FirstStep(first, 0.0))
        for step in range(first + 1, last + 1):
            self.now += 1.0
            if step % 50 == 0:
                self.note(journal.Stored((0, 1), step, step, 1 << 20, 0.1))
            if step % 10 == 0 or step == last:
                figures = (step, None, None, step, 20, stall_ms, stall_ms, 0, 0.0, 1 << 20, 0, 1 << 20, 0)
                sample = journal.Sample(*figures, {"lr": 0.1, "loss": 1 / step, "val_loss": 2 / step})
                self.note(sample)

    def die(self, step: int, *nodes: str) -> None:
        for node in nodes or ("a",):
            for rank in (0, 1):
                self.note(journal.TrainerDied(rank, rank + 1, step), node)


def write(run: Path, told: Told) -> None:
    run.mkdir(exist_ok=True)
    for node in {entry.envelope.node for entry in told.entries}:
        file = Journal(run, node)
        for entry in told.entries:
            if entry.envelope.node == node:
                file.attempt = entry.envelope.attempt
                file.add(entry.event, entry.envelope.time)
        file.close()


def everything() -> Told:
    told = Told()
    told.begin()
    told.note(journal.Degraded("peers", "<b>silent</b>"))
    told.train(1, 60, stall_ms=1.5)
    told.note(journal.Decision("redo", "eager", "lazy", "no idle core"))
    told.note(journal.AgentStarted(9, False, replaces=4))
    told.die(60)
    told.now += 5
    told.begin()
    told.recover(60)
    told.now += 2
    told.note(journal.Stored((0, 1), 60, 60, 1 << 20, 0.1))
    told.train(61, 90, stall_ms=1.5)
    return told
