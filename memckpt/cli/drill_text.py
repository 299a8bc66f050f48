"""What ``memckpt drill`` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from memckpt.cli.common import count, out, seconds_text
from memckpt.drill.carry_out import FIRST, Result
from memckpt.drill.difference import RESULTS, Difference
from memckpt.drill.supervisor import Blow
from memckpt.drill.verdict import BAND_FACTOR, Band, Verdict

#: Differences that are named, at most.
_NAMED = 6
_PLURALS = {"loss": "losses", "frozen": "frozen tensors", "hyperparameters": "sets of hyperparameters"}
_COUNTED = ("loss", "parameter", "buffer", "frozen", "state")


def print_result(result: Result) -> None:
    """Print what a drill has found, the verdict last."""
    verdict = result.verdict
    out.print(undisturbed_line(verdict), soft_wrap=True)
    for line in left_out_lines(verdict):
        out.print(Text(line), soft_wrap=True)
    out.print(blow_table(result.blows))
    for number, blow in enumerate(result.blows, start=1):
        if blow.check != "equal":
            out.print(Text(f"Repeat {number}: {blow.check_line or 'nothing was compared'}"), soft_wrap=True)
    step = seconds_text(result.step_seconds[FIRST]) if result.step_seconds[FIRST] >= 0.1 else None
    step = step or f"{result.step_seconds[FIRST] * 1e3:.1f} ms"
    lost, seconds = sum(blow.lost for blow in result.blows), sum(blow.seconds for blow in result.blows)
    out.print(
        f"Lost: {count(lost, 'step')}, and {seconds_text(seconds / len(result.blows))} for each kill, from its signal "
        f"to the first new step. A step takes {step}.",
        soft_wrap=True,
    )
    out.print(verdict_text(result), soft_wrap=True)


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
    if not verdict.repeats or not verdict.unrepeatable:
        return []
    names = ", ".join(dict.fromkeys(each.label for each in verdict.unrepeatable))
    return [f"Not compared, as two undisturbed runs differ in it (their results are equal): {names}"]


def blow_table(blows: Sequence[Blow]) -> Table:
    """Each kill, and the resume behind it."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("#", "killed\nbehind step", "resumed\nbehind", "steps\nlost", "the\nrepeat", "until new\nstep"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("from", no_wrap=True)
    ranks = any(blow.rank for blow in blows)
    for number, blow in enumerate(blows, start=1):
        where = f"{blow.step}, rank {blow.rank}" if ranks else str(blow.step)
        cells = (where, str(blow.resumed), str(blow.lost), blow.check, f"{blow.seconds:.1f} s", blow.tier)
        table.add_row(str(number), *cells)
    return table


def verdict_text(result: Result) -> Text:
    """The verdict."""
    verdict = result.verdict
    kills = count(len(result.blows), "kill")
    if verdict.outcome == "equal":
        return Text.assemble(("Equal, bit for bit: ", "bold green"), f"{kills} left no trace in the training.")
    if verdict.band is None:
        first = verdict.differences[0]
        where = "right behind a restore of" if first.restored else "in"
        return Text.assemble(
            ("Different: ", "bold red"),
            f"the killed run is not the undisturbed one, first {where} step {first.step}: "
            f"{_named(verdict.differences)}",
        )
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
