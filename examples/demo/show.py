"""Output of the demo: the table of kills, the two loss curves, the table of the verdict."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich import box
from rich.columns import Columns
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from examples.demo.supervise import Kill, RunResult
from examples.demo.verdict import Comparison

#: Bits of a braille character's dots, by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


class Canvas:
    """A picture of braille characters, two dots wide and four high each. (0, 0) is at the top left."""

    def __init__(self, columns: int, rows: int) -> None:
        self.width, self.height = 2 * columns, 4 * rows
        self._cells = [[0] * columns for _ in range(rows)]

    def dot(self, x: int, y: int) -> None:
        if 0 <= x < self.width and 0 <= y < self.height:
            self._cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]

    def polyline(self, points: Sequence[tuple[float, float]]) -> None:
        """Join points, with at least one dot in every column between them."""
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            count = max(1, round(max(abs(x1 - x0), abs(y1 - y0))))
            for i in range(count + 1):
                self.dot(round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count))

    def lines(self) -> list[str]:
        return ["".join(chr(0x2800 + cell) for cell in row) for row in self._cells]


def curve(losses: dict[int, float], steps: int, limits: tuple[float, float], columns: int, rows: int) -> Canvas:
    """A loss curve from step 1 to `steps`, between `limits` of the loss."""
    canvas = Canvas(columns, rows)
    low, high = limits
    across, down = (canvas.width - 1) / max(1, steps - 1), (canvas.height - 1) / ((high - low) or 1)
    canvas.polyline([((step - 1) * across, (high - loss) * down) for step, loss in sorted(losses.items())])
    return canvas


def curves(plain: RunResult, killed: RunResult, steps: int, width: int) -> Columns:
    """Both curves side by side on one scale, with the kills marked below the second."""
    runs = {
        "uninterrupted": {step: float.fromhex(loss) for step, loss in plain.losses.items()},
        f"killed {len(killed.kills)} times": {step: float.fromhex(loss) for step, loss in killed.losses.items()},
    }
    values = [loss for losses in runs.values() for loss in losses.values()]
    limits = (min(values), max(values))
    columns = max(20, min(58, (width - 1) // 2 - 4))
    panels = []
    for (title, losses), kills, style in zip(runs.items(), ([], killed.kills), ("green", "yellow"), strict=True):
        marks = [" "] * columns
        for kill in kills:
            marks[min(columns - 1, int(max(kill.at.step - 1, 0) / steps * columns))] = "▲"
        picture = "\n".join(curve(losses, steps, limits, columns, rows=9).lines())
        body = Text.assemble((picture, style), "\n", ("".join(marks), "red"))
        panels.append(Panel(body, title=f"loss, {title}", subtitle=f"{limits[1]:.2f} … {limits[0]:.2f}", expand=False))
    return Columns(panels)


def kill_row(number: int, kill: Kill) -> tuple[str, ...]:
    """One row of the table of kills."""
    return (
        str(number),
        f"{kill.at.step}, {kill.at.phase}",
        str(kill.at.finished),
        str(kill.resumed),
        f"[{'green' if kill.lost == 0 else 'yellow'}]{kill.lost}[/]",
        f"[{'green' if kill.check == 'equal' else 'yellow'}]{kill.check or '-'}[/]",
        f"[bold]{kill.seconds:.1f}[/] {kill.start}",
        kill.tier,
    )


def kill_table(kills: Sequence[Kill]) -> Table:
    """Position and outcome of each kill."""
    table = Table(
        title="SIGKILL of the training process", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("#", justify="right")
    table.add_column("killed\nin step", no_wrap=True)
    for heading in ("last\ntaken", "resumed\nafter", "steps\nlost", "the\nrepeat", "kill to\nstep, s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("from", no_wrap=True)
    for number, kill in enumerate(kills, start=1):
        table.add_row(*kill_row(number, kill))
    return table


def verdict_table(comparisons: Sequence[Comparison]) -> Table:
    """Kinds of state compared, and whether all their bits agree."""
    table = Table(title="The two runs at their end", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("compared")
    table.add_column("tensors\nor values", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("equal bit for bit")
    for each in comparisons:
        names = ", ".join(each.differing[:3]) + (", ..." if len(each.differing) > 3 else "")
        result = "[green]yes[/]" if each.equal else f"[bold red]no[/]: {len(each.differing)} differ ({names})"
        table.add_row(each.kind, f"{each.tensors:,}", f"{each.nbytes:,}", result)
    return table
