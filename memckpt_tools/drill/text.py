"""What ``memckpt drill`` prints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from memckpt.cli.common import count, out, seconds_text
from memckpt.config import ErasureConfig
from memckpt_tools.drill import stock
from memckpt_tools.drill.comparison import BAND_FACTOR, PLAIN, RESULTS, STEPS, Band, Difference, Overhead, Verdict
from memckpt_tools.drill.lines import OF_OPTIMIZER
from memckpt_tools.drill.supervisor import FIRST, SECOND, Blow, Kind, Result

#: Characters that XML 1.0 forbids, as in the colours of a log.
_FORBIDDEN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
#: Differences that are named, at most.
_NAMED = 6
_PLURALS = {"loss": "losses", "frozen": "frozen tensors", "hyperparameters": "sets of hyperparameters"}
#: What a kill befalls by its kind, and what is said if it has not come.
_OF_FILES = {
    "save": ("while it wrote", "until then no file grew beyond half the size of the parameters, and 32 KiB"),
    "file": ("before", "no file was opened to write, moved or removed by Python in the steps before the next kill"),
}
#: Headings of what a kill has cost.
_WHERE = ("behind\nstep>", "resumed\nbehind>", "steps\nlost>")
_COUNTED = ("loss", "parameter", "buffer", "frozen", "state")


def printable(text: str) -> str:
    """The same without colours and characters that XML has not."""
    return _FORBIDDEN.sub("", text)


def table_of(*headings: str) -> Table:
    """An empty table; columns whose heading ends with ``>`` are flush right."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading.rstrip(">"), justify="right" if heading.endswith(">") else "left", no_wrap=True)
    return table


def print_result(result: Result) -> None:
    """Print what a drill has found, the verdict last."""
    verdict = result.verdict
    if result.lent_peers is not None:
        out.print(lent_peers_text(result.lent_peers), soft_wrap=True)
    out.print(blow_table(result.blows))
    if verdict.holes:  # the cause, before what it has led to
        out.print(holes_text(verdict), soft_wrap=True)
    for number, blow in enumerate(result.blows, start=1):
        if blow.kind == "agent":
            when = "not again until the end"
            if blow.unprotected is not None:
                when = f"again {count(blow.unprotected, 'step')} later, in {seconds_text(blow.seconds)}"
            out.print(f"Kill {number}: training went on without the agent, and was protected {when}.", soft_wrap=True)
        if blow.check not in ("equal", ""):
            out.print(Text(f"Kill {number}: {blow.check_line or 'nothing was compared'}"), soft_wrap=True)
    if (line := storage_line(result.blows)) is not None:
        out.print(line, soft_wrap=True)
    deadly = [blow for blow in result.blows if blow.kind != "agent"]
    if deadly:
        lost, seconds = sum(blow.lost for blow in deadly), sum(blow.seconds for blow in deadly) / len(deadly)
        out.print(
            f"Lost: {count(lost, 'step')}, and {seconds_text(seconds)} for each kill of a trainer, from its signal to "
            "the first new step.",
            soft_wrap=True,
        )
    out.print(stall_line(result), soft_wrap=True)
    if result.overhead is not None:
        out.print(overhead_text(result.overhead, verdict.repeats), soft_wrap=True)
    if result.untried:
        out.print(untried_text(result.untried), soft_wrap=True)
    out.print(verdict_text(result), soft_wrap=True)


def storage_line(blows: Sequence[Blow]) -> Text | None:
    """That nothing has come from storage, where it was to serve; None if it has served, or was not to."""
    anew = [blow.step for blow in blows if blow.kind == "both" and blow.tier == "nothing"]
    if not anew:
        return None
    return Text.assemble(
        ("Storage was not tried: ", "bold yellow"),
        f"agent and trainer were killed together in step {', '.join(map(str, anew))}, where no checkpoint was in "
        "storage yet, and training started over. Drill more --steps; a script with storage=None has none.",
    )


def untried_text(untried: Sequence[Kind | stock.Kind]) -> Text:
    """The kills that the drill says nothing about, and the options that try them."""
    what = {
        "trainer": "the loss of a trainer",
        "agent": "the loss of an agent",
        "both": "the loss of agent and trainer at once",
        "node": "the loss of a whole node",
        "step": "SIGKILL within a step",
        "save": "SIGKILL within a file",
        "file": "SIGKILL between files",
        "term": "SIGTERM",
    }
    options = f"--kinds {','.join(untried)}{' --nodes 2' if 'node' in untried else ''}"
    named = ", ".join(what[kind] for kind in untried)
    return Text.assemble(("Not tried: ", "bold yellow"), f"{named}; a drill of its own with {options} tries it")


def print_undisturbed(verdict: Verdict) -> None:
    """Print what the two undisturbed runs say."""
    out.print(undisturbed_line(verdict), soft_wrap=True)
    for line in left_out_lines(verdict):
        out.print(Text(line), soft_wrap=True)
    if (data := data_line(verdict)) is not None:
        out.print(data, soft_wrap=True)


def lent_peers_text(peers: ErasureConfig) -> Text:
    """The peers that a script without any was drilled with, and how to have them."""
    data, tolerate = peers.data, peers.tolerate
    return Text.assemble(
        ("No peers: ", "bold yellow"),
        f"the script configures none, so the loss of a node would lose what is in its memory. It was drilled with "
        f"ErasureConfig(data={data}, tolerate={tolerate}). To have them: config=MemckptConfig(peers=ErasureConfig("
        f"data={data}, tolerate={tolerate})), or MEMCKPT_PEERS=erasure MEMCKPT_PEERS_DATA={data} "
        f"MEMCKPT_PEERS_TOLERATE={tolerate} where the script passes no config.",
    )


def overhead_text(overhead: Overhead, repeats: bool) -> Text:
    """What protection costs a step, beside a run without it."""
    label = ("Overhead: ", "bold")
    if overhead.problem or not overhead.unprotected:
        why = overhead.problem or "the run without protection has too few steps"
        return Text.assemble(label, f"not measured: {why}")
    changed = ""
    if repeats and overhead.changed is not None:
        each = overhead.changed
        changed = (
            f". Without protection another training results, from step {each.step} on: {each.label}"
            f"{f': {each.text}' if each.text else ''}; compression, or a loader that draws what it need not, does that"
        )
    elif repeats:
        changed = "; its losses and its state are the same, bit for bit"
    without = f"{1e3 * overhead.unprotected:.1f} ms without protection (MEMCKPT_DISABLE=1){changed}"
    if overhead.share < 0 or overhead.noise > overhead.share:  # protection makes no step faster
        runs = f"two protected runs differ by {100 * overhead.noise:.1f}% of a step, which takes {without}"
        return Text.assemble(label, f"not measurable here: {runs}. Drill more --steps, or where nothing else runs")
    share = f"{100 * overhead.share:.1f}% ± {100 * overhead.noise:.1f}%"
    return Text.assemble(label, f"{share} of a step, which takes {without}")


def stall_line(result: Result) -> str:
    """What protection takes of a step, and how much two undisturbed runs differ in that."""
    steps, stalls = (
        [each[name] * 1e3 for name in (FIRST, SECOND)] for each in (result.step_seconds, result.stall_seconds)
    )
    shares = [100 * stall / step if step else 0.0 for stall, step in zip(stalls, steps, strict=True)]
    return (
        f"A step takes {sum(steps) / 2:.1f} ms ({_spread(steps):.1f}), of which protection holds the trainer up for "
        f"{sum(stalls) / 2:.2f} ms ({_spread(stalls):.2f}), {sum(shares) / 2:.1f}% ({_spread(shares):.1f}); in "
        "brackets: by how much two undisturbed runs differ"
    )


def _spread(pair: Sequence[float]) -> float:
    return max(pair) - min(pair)


def data_line(verdict: Verdict) -> Text | None:
    """Where data that do not repeat themselves come from."""
    changed = next((each for each in verdict.unrepeatable if each.kind == "input"), None)
    if changed is None or verdict.repeats:
        return None
    unseeded = any(each.kind == "generators" and each.name == "torch" for each in verdict.unrepeatable)
    origin = ", ".join(verdict.loaders) or "the script itself, without a DataLoader"
    why = "torch's generator, which shuffles, differs, too: seed it"
    if not unseeded:
        why = (
            "torch's generator, which shuffles, does repeat itself: so it is the dataset, or a worker of its loader, "
            "that draws from a generator that is not seeded"
        )
    return Text.assemble(
        ("Data: ", "bold yellow"),
        f"what the model is given differs from step {changed.step} on (input {changed.name}), so the data do not "
        f"repeat themselves. They come from {origin}; {why}",
    )


def holes_text(verdict: Verdict) -> Text:
    """The plain values that a resume has not put back."""
    named = [
        f"{each.label}{f': {each.text}' if each.text else ''}, behind step {each.step}"
        for each in sorted(verdict.holes, key=lambda one: (one.record, one.name.startswith("_")))
    ]
    more = f"; and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    effect = "" if verdict.outcome == "different" else " In these steps that had no effect on what was trained."
    hidden = any(OF_OPTIMIZER in each.name for each in verdict.holes)
    captured = ' An optimizer\'s steps depend on its own: redo="snapshot" carries them.' if hidden else ""
    return Text.assemble(
        ("Not restored: ", "bold red" if not effect else "bold yellow"),
        f"{'; '.join(named[:_NAMED])}{more}. It changes in training and is in no state that a resume puts back: make "
        "it a buffer, put it into a state_dict(), or name it: attributes=[...] of MemCheckpoint, protect(), or "
        'session.register("name", object, attributes=[...]) in a loop of your own.',
        captured,
        effect,
    )


def as_json(result: Result, command: Sequence[str], seed: int) -> dict[str, Any]:
    """Findings of a drill, of plain types; numbers that are not finite become null."""
    return {
        **_common_json(result, command, seed),
        "lent_peers": None if result.lent_peers is None else asdict(result.lent_peers),
        "outcome": result.verdict.outcome,
        "kills": [asdict(blow) for blow in result.blows],
        "seconds_lost": sum(blow.seconds for blow in result.blows if blow.kind != "agent"),
        "stall_seconds": result.stall_seconds,
        "overhead": None if result.overhead is None else _overhead_json(result.overhead),
        "not_restored": [asdict(each) for each in result.verdict.holes],
        "loaders": list(result.verdict.loaders),
        "band": None if result.verdict.band is None else asdict(result.verdict.band),
    }


def stock_json(result: stock.Result, command: Sequence[str], seed: int) -> dict[str, Any]:
    """Findings of a drill of a script's own checkpoints, of plain types."""
    kills = [{**asdict(blow), "lost": blow.lost, "outcome": blow.outcome} for blow in result.blows]
    return {**_common_json(result, command, seed), "outcome": result.outcome, "kills": kills}


def _common_json(result: Result | stock.Result, command: Sequence[str], seed: int) -> dict[str, Any]:
    verdict = result.verdict
    return {
        "command": list(command),
        "seed": seed,
        "repeats_itself": verdict.repeats,
        "steps": verdict.last_step,
        "compared": verdict.compared,
        "not_tried": result.untried,
        "steps_lost": sum(blow.lost for blow in result.blows),
        "step_seconds": result.step_seconds,
        "differences": [asdict(each) for each in verdict.differences],
        "unrepeatable": [asdict(each) for each in verdict.unrepeatable],
    }


def _overhead_json(overhead: Overhead) -> dict[str, Any]:
    known = not overhead.problem and overhead.unprotected > 0
    figures = {"share": overhead.share, "noise": overhead.noise} if known else {"share": None, "noise": None}
    return {**asdict(overhead), **figures}


def undisturbed_line(verdict: Verdict) -> Text:
    """Whether the training repeats itself."""
    if verdict.repeats:
        kinds = [
            f"{number} {kind if number == 1 else _PLURALS.get(kind, kind + 's')}"
            for kind in _COUNTED
            if (number := verdict.compared.get(kind, 0))
        ]
        return Text(
            f"Two undisturbed runs: equal, bit for bit, in {count(verdict.last_record, 'step')} "
            f"({', '.join(kinds)} at each)"
        )
    first = next(each for each in verdict.unrepeatable if each.kind in RESULTS)
    return Text.assemble(
        ("This training does not repeat itself. ", "bold yellow"),
        f"Two undisturbed runs differ from step {first.step} on: {_named(verdict.unrepeatable)}. Whether a resume is "
        "exact cannot be seen beyond what two undisturbed runs differ by. Seed what is not seeded, and ask for "
        "deterministic kernels, then drill again.",
    )


def left_out_lines(verdict: Verdict) -> list[str]:
    """What is not compared, although results are equal."""
    found = [each for each in verdict.unrepeatable if each.kind not in PLAIN]
    if not verdict.repeats or not found:
        return []
    names = ", ".join(dict.fromkeys(each.label for each in found))
    return [f"Not compared, as two undisturbed runs differ in it (their results are equal): {names}"]


def blow_table(blows: Sequence[Blow]) -> Table:
    """Each kill, and the resume behind it."""
    table = table_of("#>", "killed", *_WHERE, "the\nrepeat>", "until new\nstep>", "from")
    ranks = any(blow.rank for blow in blows)
    for number, blow in enumerate(blows, start=1):
        where = f"{blow.step}, rank {blow.rank}" if ranks else str(blow.step)
        cells = (where, str(blow.resumed), str(blow.lost), blow.check, f"{blow.seconds:.1f} s", blow.tier)
        if blow.kind == "agent":
            cells = (where, "-", "-", "-", "-", "-")
        table.add_row(str(number), blow.kind, *cells)
    return table


def verdict_text(result: Result) -> Text:
    """The verdict."""
    verdict = result.verdict
    kills = count(len(result.blows), "kill")
    if verdict.outcome == "equal":
        return Text.assemble(("Equal, bit for bit: ", "bold green"), f"{kills} left no trace in the training.")
    differences = [each for each in verdict.differences if verdict.band is None or each.kind == STEPS]
    if differences:
        first = differences[0]
        where = "right behind a restore of" if first.restored else "in"
        return Text.assemble(
            ("Different: ", "bold red"),
            f"the killed run is not the undisturbed one, first {where} step {first.step}: {_named(differences)}",
        )
    assert verdict.band is not None
    if verdict.outcome == "within":
        return Text.assemble(
            ("No difference found beyond the training's own: ", "bold yellow"),
            f"{kills} left the killed run as near to an undisturbed one as two of these are to each other: "
            f"{_band(verdict.band)}",
        )
    return Text.assemble(
        ("Different: ", "bold red"),
        f"the killed run is further from the undisturbed ones than they are from each other, first in step "
        f"{verdict.band.outside}: {verdict.band.outside_text} (more than {BAND_FACTOR:g} times as far); at most "
        f"{_band(verdict.band)}",
    )


def print_stock(result: stock.Result) -> None:
    """Print what a drill of a script's own checkpoints has found, the verdict last."""
    print_undisturbed(result.verdict)
    table = table_of("#>", "killed", *_WHERE, "until new\nstep>", "training goes on", "parameters\napart by>")
    for number, blow in enumerate(result.blows, start=1):
        cells = ("-", "-", "-", blow.outcome, "-")
        if blow.resumed is not None:
            seconds, apart = f"{blow.seconds:.1f} s", f"{blow.apart:.1g}" if blow.difference else "0"
            cells = (str(blow.resumed) if blow.resumed else "anew", str(blow.lost), seconds, blow.outcome, apart)
        table.add_row(str(number), blow.kind, str(blow.step), *cells)
    out.print(table)
    for number, blow in enumerate(result.blows, start=1):
        if blow.kind in _OF_FILES:
            done, none = _OF_FILES[blow.kind]
            out.print(Text(f"Kill {number}: {f'{done} {blow.file}' if blow.file else none}."), soft_wrap=True)
        if blow.difference is not None and not blow.inherited:
            out.print(Text(f"Kill {number}: {divergence(blow.difference)}"), soft_wrap=True)
        if blow.why_none:
            out.print(Text(f"Kill {number}: {blow.why_none}"), soft_wrap=True)
    if result.untried:
        out.print(untried_text(result.untried), soft_wrap=True)
    out.print(stock_verdict_text(result), soft_wrap=True)


def divergence(difference: Difference) -> str:
    """What differs first behind a resume, and what that says."""
    what = f"{difference.label}{f': {difference.text}' if difference.text else ''}"
    if difference.restored and difference.kind == "parameter":
        return f"no step has had the parameters that are loaded. The nearest is {difference.step}: {what}"
    if difference.restored:
        return f"the parameters of step {difference.step} are loaded, not all of its state: {what}"
    cause = "the state is loaded; the data go on elsewhere, or a generator"
    if difference.kind == "hyperparameters":
        cause = "the state is loaded, not the schedule"
    elif difference.kind != "loss":
        cause = "the state is loaded; something else than the data has another effect"
    return f"{cause}: step {difference.step} differs: {what}"


def stock_verdict_text(result: stock.Result) -> Text:
    """The verdict on a script's own checkpoints."""
    kills, lost = count(len(result.blows), "kill"), count(sum(blow.lost for blow in result.blows), "step")
    if result.outcome == "exact":
        return Text.assemble(("Exact: ", "bold green"), f"{kills} left no trace; {lost} trained again.")
    if result.outcome == "cannot start":
        number = len(result.blows)
        return Text.assemble(("Cannot start: ", "bold red"), f"behind kill {number} no process trained on.")
    if result.outcome == "within":
        return Text.assemble(
            ("No difference found beyond the training's own: ", "bold yellow"), f"{kills}, {lost} trained again."
        )
    missing = next((each for each in result.verdict.differences if each.kind == STEPS), None)
    diverged = [str(number) for number, blow in enumerate(result.blows, start=1) if blow.difference is not None]
    parts = [f"training is another one behind kill {', '.join(diverged)}"] if diverged else []
    parts += [f"steps: {missing.text}"] if missing is not None else []
    if not parts and result.verdict.band is not None:
        parts = [f"further from the undisturbed runs than they are from each other: {_band(result.verdict.band)}"]
    return Text.assemble(("Diverged: ", "bold red"), "; ".join(parts) + f". {lost} trained again.".capitalize())


def _band(band: Band) -> str:
    return (
        f"losses {band.killed_loss:.2g} (undisturbed: {band.loss:.2g}), parameters {band.killed_parameters:.2g} "
        f"({band.parameters:.2g}), as fractions"
    )


def _named(differences: Sequence[Difference]) -> str:
    """The first difference of each kind, of those that differ first."""
    first = differences[0].record
    parts, kinds = [], set()
    for each in differences:
        if each.record != first or each.kind in kinds:
            continue
        kinds.add(each.kind)
        others = sum(one.kind == each.kind and one.record == first for one in differences) - 1
        more = f" (and {others} more)" if others else ""
        rank = f" on rank {each.rank}" if len({one.rank for one in differences}) > 1 else ""
        parts.append(f"{each.label}{rank}{f': {each.text}' if each.text else ''}{more}")
    return "; ".join(parts[:_NAMED])
