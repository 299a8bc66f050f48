"""The recording of a demo: its lines as an animated SVG, in which each appears when it was printed."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any

from rich.console import Console

#: Seconds of the demo that one second of the picture shows.
SPEED = 4.0
#: Seconds of the picture between lines that were printed at the same time, such as the tables at the end.
_BETWEEN = 0.6

#: By what rich begins the names of classes and clip paths.
_NAME = "demo"
_STYLE = f"""
    .{_NAME}-matrix text {{ animation: appear 0.2s backwards; }}
    @keyframes appear {{ from {{ opacity: 0; }} to {{ opacity: 1; }} }}
    @media (prefers-reduced-motion: reduce) {{ .{_NAME}-matrix text {{ animation: none; }} }}
"""


class Cast:
    """Lines of a demo and the seconds at which they appear in a picture of them.

    Args:
        width: characters in a line.
    """

    def __init__(self, width: int = 84) -> None:
        self._console = Console(
            record=True, file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor"
        )
        self._began = time.monotonic()
        self._seconds: list[float] = []

    def print(self, what: Any = "") -> None:
        """Record `what`, which rich can print, at this moment."""
        self._console.print(what, highlight=False)
        now = (time.monotonic() - self._began) / SPEED
        if self._seconds:
            now = max(now, self._seconds[-1] + _BETWEEN)
        lines = self._console.export_text(clear=False).count("\n")
        self._seconds += [now] * (lines - len(self._seconds))

    def write(self, path: Path) -> None:
        """Write the picture. Where pictures do not move, all lines are there from the begin."""
        svg = self._console.export_svg(title="make demo", unique_id=_NAME)
        svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # nothing is fetched from elsewhere
        svg = svg.replace("</style>", _STYLE + "</style>", 1)

        def delayed(found: re.Match[str]) -> str:
            seconds = self._seconds[min(int(found[2]), len(self._seconds) - 1)]
            return f'{found[1]} style="animation-delay:{seconds:.1f}s"'

        svg = re.sub(rf'(<text [^>]*clip-path="url\(#{_NAME}-line-(\d+)\)")', delayed, svg)
        path.write_text(svg + "\n", encoding="utf-8")
