"""``memckpt events``: the journal of a run."""

from __future__ import annotations

import contextlib
import select
from datetime import datetime
from typing import Annotated

import typer
from rich.text import Text

from memckpt.cli.common import AsJson, Node, Run, count, out, ranks_text
from memckpt.errors import AgentNotFoundError, StorageError
from memckpt.journal import events as journal
from memckpt.journal.events import AnyEvent, Entry, Sample, Unknown, encode, name_of
from memckpt.journal.journal import Follower
from memckpt.user_messages import nbytes_text, seconds_text

#: Seconds between two looks at the files.
_POLL_SECONDS = 0.5

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C, and show what comes.")]
Samples = Annotated[bool, typer.Option("--samples", help="Show regular figures, too.")]
Last = Annotated[int | None, typer.Option("--last", "-n", min=0, help="Only the newest N.", metavar="N")]


def events(
    run: Run,
    node: Node = None,
    follow: Follow = False,
    last: Last = None,
    samples: Samples = False,
    as_json: AsJson = False,
) -> None:
    """Show what has happened to a run: starts, failures, recoveries, stalls, tiers, checkpoints.

    Read from the journals in the run directory, of all nodes or of --node; no agent need live. With --json: the lines
    of the journal. Exit status 11 if there is none, and no --follow.
    """
    follower = Follower(run, node)

    def show(entries: list[Entry]) -> None:
        for entry in entries:
            if as_json:
                typer.echo(encode(entry.envelope, entry.event).decode())
            else:
                out.print(Text(line_of(entry, nodes=node is None), style=style_of(entry.event)), soft_wrap=True)

    def poll() -> list[Entry]:
        try:
            entries = follower.poll()
        except OSError as error:
            raise StorageError(f"the journal cannot be read: {error}") from error
        return [entry for entry in entries if samples or as_json or not isinstance(entry.event, Sample)]

    with contextlib.closing(follower), contextlib.suppress(KeyboardInterrupt):  # the normal end
        found = poll()
        show(found if last is None else found[max(0, len(found) - last) :])
        while follow:
            select.select([], [], [], _POLL_SECONDS)
            show(poll())
    if not found and not follow:
        expected = "expected events-NODE.jsonl of an agent" if run.is_dir() else "there is no such directory"
        raise AgentNotFoundError(f"no journal in {run}" + (f" of node {node}" if node else "") + f": {expected}")


# Events in words


def style_of(event: AnyEvent | Unknown) -> str:
    """Style of an event: red for a loss, yellow for a warning, else plain."""
    match event:
        case journal.ResumeChecked():
            return "red" if event.verdict == "different" else ""
        case journal.AgentStarted():
            return "red" if event.replaces is not None else ""
        case journal.Recovered():
            return "green"
        case journal.TrainerDied() | journal.Degraded() | journal.NotStored() | journal.PeersGap():
            return "red"
        case journal.Voided() | journal.Drifted() | journal.Lost():
            return "red"
        case journal.TrainerLeft() | journal.Stalled() | journal.Lagging():
            return "yellow"
        case journal.Preempted() | journal.Fenced() | journal.GapEnded():
            return "yellow"
    return ""


def line_of(entry: Entry, nodes: bool = False) -> str:
    """One line: local time, the node where the journals of several `nodes` are shown, attempt, event."""
    envelope = entry.envelope
    moment = datetime.fromtimestamp(envelope.time).strftime("%Y-%m-%d %H:%M:%S")
    node = f"  {envelope.node}" if nodes else ""
    return f"{moment}{node}  #{envelope.attempt}  {words_of(entry.event)}"


def words_of(event: AnyEvent | Unknown) -> str:
    """An event in words."""
    match event:
        case journal.AgentStarted():
            how = "beside the job" if event.by_operator else "by a trainer"
            dead = f"; pid {event.replaces} before it has died" if event.replaces is not None else ""
            return f"agent pid {event.pid} started {how}{dead}"
        case journal.AgentLeft():
            return f"agent left: {event.reason}"
        case journal.AttemptBegan():
            pids = ", ".join(f"rank {rank} is pid {pid}" for rank, pid in event.trainers)
            what = "trainers came from another agent" if event.rejoined else "attempt began"
            return f"{what}: {count(event.world_size, 'rank')}, {pids}"
        case journal.StartedOver():
            return f"training starts at step 1: {event.reason}"
        case journal.Recovered():
            lost = "" if event.steps_lost is None else f", {count(event.steps_lost, 'step')} lost"
            proof = "" if event.repeated is None else f"; step {event.repeated} is repeated as a proof"
            other = "" if event.exact else f"; not bit for bit: {'; '.join(event.reasons)}"
            return f"recovered step {event.step} from {event.tier} in {seconds_text(event.seconds)}{lost}{proof}{other}"
        case journal.FirstStep():
            after = seconds_text(event.seconds)
            return f"first step {event.step}, {after} after the end of the former attempt or start"
        case journal.ResumeChecked():
            return f"resume check {event.verdict}: {event.line}"
        case journal.TrainerDied():
            return f"trainer of rank {event.rank} died (pid {event.pid}), {_held(event.step)}"
        case journal.TrainerLeft():
            return f"trainer of rank {event.rank} disconnected (pid {event.pid}), {_held(event.step)}"
        case journal.Fenced():
            return f"waiting for the end of pid {', '.join(map(str, event.pids))}, of the former attempt"
        case journal.Preempted():
            return f"rank {event.rank} got SIGTERM"
        case journal.Finished():
            return f"training finished, {_held(event.step)}"
        case journal.Protected():
            mode = f"{event.mode} ({event.mode_reason})" if event.mode_reason else event.mode
            what = f"{ranks_text(event.ranks)}, generation {event.generation}, {mode}, {nbytes_text(event.held_bytes)}"
            return f"protected from record {event.record} on: {what}"
        case journal.GenerationDue():
            return f"a new generation is due after record {event.record}: {event.reason}"
        case journal.GapEnded():
            return f"protected again at step {event.step}, after {count(event.steps, 'step')} that were not"
        case journal.Degraded():
            return f"{event.tier} degraded: {event.reason}"
        case journal.Whole():
            return f"{event.tier} whole, after {seconds_text(event.seconds)}"
        case journal.PeersGap():
            return f"records {event.first} to {event.last} were in no peer's memory"
        case journal.Stalled():
            several = f" ({count(event.count, 'stall')} of 1 s or more)" if event.count > 1 else ""
            waited = seconds_text(event.longest_ms / 1e3)
            return f"training waited {waited} for protection at step {event.step}{several}"
        case journal.Lagging():
            return f"{event.tier} lags: {count(event.behind, 'record')} behind, {event.limit} fit"
        case journal.CaughtUp():
            return f"{event.tier} has caught up, after {seconds_text(event.seconds)}"
        case journal.Drifted():
            return f"drift of {event.max_ulp:g} ulp at record {event.record}, in {event.tensor}"
        case journal.Voided():
            return f"rank {event.rank} could not stage record {event.record}: {event.reason}"
        case journal.Decision():
            return f"{event.name}: {event.old} -> {event.new}: {event.reason}"
        case journal.Advised():
            return f"{event.line} would pay: {event.reason}" if event.line else event.reason
        case journal.Stored():
            size = f"{nbytes_text(event.nbytes)}, {seconds_text(event.seconds)}"
            return f"step {event.step} is in storage ({ranks_text(event.ranks)}, {size})"
        case journal.NotStored():
            return f"step {event.step} is not in storage: {event.reason}"
        case journal.Sample():
            stall = "" if event.stall_ms is None else f", {event.stall_ms:g} ms stall a step"
            return f"step {event.step}, stored {event.stored_step}{stall}, {nbytes_text(event.held_bytes)} held"
        case journal.Lost():
            return f"{count(event.count, 'event')} lost: the journal could not be written"
        case Unknown():
            return f"{name_of(event)}: " + ", ".join(f"{name}={value}" for name, value in event.fields.items())


def _held(step: int | None) -> str:
    return "nothing is held" if step is None else f"step {step} is held"
