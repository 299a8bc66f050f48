"""``memckpt doctor``: checks of the environment, with remedies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from memckpt.cli.common import AsJson, Url, count, directory_only, out, print_json

if TYPE_CHECKING:  # imported only when doctor runs, so that other commands start fast
    from memckpt_tools.doctor.checks import Check

OptionalRun = Annotated[
    Path | None,
    typer.Argument(help="A run directory. Default: the current directory, as storage.", callback=directory_only),
]
_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(run: OptionalRun = None, url: Url = None, as_json: AsJson = False) -> None:
    """Check what will not work in this environment, with remedies.

    Writes and removes 64 MiB, but at most a quarter of the free bytes, where checkpoints would be (1 KiB in an object
    store). Exit status 1 if there is a problem; warnings are no problems.
    """
    from memckpt_tools.doctor.probes import examine

    found = []
    for check in examine(run, url):
        found.append(check)
        if not as_json:
            _show(check)
    problems, warnings = ([one for one in found if one.outcome == kind] for kind in ("problem", "warning"))
    if as_json:
        print_json({"checks": found, "problems": len(problems), "warnings": len(warnings)})
    else:
        out.print(f"{count(len(problems), 'problem')}, {count(len(warnings), 'warning')}")
    if problems:
        raise typer.Exit(1)


def _show(check: Check) -> None:
    style = _STYLES[check.outcome]
    out.print(f"[{style}]{check.outcome:<7}[/]  {check.name:<17}  {escape(check.text)}", soft_wrap=True)
    if check.remedy:
        out.print(f"{'':28}{escape(check.remedy)}", style=style, soft_wrap=True)
