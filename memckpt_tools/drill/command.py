"""``memckpt drill``: a script of the user's is killed and resumed, and compared with itself."""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from memckpt.cli.common import err, out
from memckpt.errors import ConfigurationError, DrillError

if TYPE_CHECKING:
    from memckpt_tools.drill import stock as stock_drill
    from memckpt_tools.drill import supervisor
    from memckpt_tools.drill.comparison import Verdict
    from memckpt_tools.drill.job import Start
    from memckpt_tools.drill.summary import Summary
    from memckpt_tools.drill.workplace import Workplace

KindT = TypeVar("KindT", bound=str)


def drill(
    command: Annotated[list[str], typer.Argument(help="The training as you start it.", metavar="-- COMMAND...")],
    kills: Annotated[int, typer.Option(min=1, help="Number of kills.")] = 5,
    steps: Annotated[
        int, typer.Option(min=6, help="Steps of each run; a script that ends earlier is drilled that far.")
    ] = 200,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the instants of the kills. Default: random; it is shown.")
    ] = None,
    kinds: Annotated[
        str | None,
        typer.Option(
            help="Who is killed, in turn: trainer, agent, both at once, node (all of a simulated node). Default: "
            "trainer,agent,both; with --nodes: trainer,agent,node. With --stock, when: step, save, file, term (all).",
            metavar="KIND,...",
            show_default=False,
        ),
    ] = None,
    nodes: Annotated[
        int,
        typer.Option(min=1, help="Nodes to simulate: the command is started once for each, with an agent of its own."),
    ] = 1,
    stock: Annotated[
        bool,
        typer.Option("--stock", help="Drill the script's own checkpoints, with memckpt off; also of other scripts."),
    ] = False,
    both: Annotated[
        bool,
        typer.Option("--both", help="Drill the script's own checkpoints, then memckpt, and put them into one table."),
    ] = False,
    resume_command: Annotated[
        str | None,
        typer.Option(
            help="With --stock or --both, of the script's own checkpoints: the command that resumes, as one "
            "argument. Default: the same command.",
            metavar="COMMAND",
            show_default=False,
        ),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(min=0, help="With --stock or --both: seconds from SIGTERM to SIGKILL, for kills of kind term."),
    ] = 30.0,
    overhead: Annotated[
        bool,
        typer.Option(
            "--overhead/--no-overhead", help="Train once without protection, too, and compare the time of a step."
        ),
    ] = True,
    patience: Annotated[
        float, typer.Option(min=1, help="Seconds without a new step after which a run is given up.")
    ] = 300.0,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", help="New directory for run directories and outputs; it is kept. Default: a temporary one."
        ),
    ] = None,
    in_place: Annotated[
        bool,
        typer.Option("--in-place", help="Run the script in the working directory itself, not in copies."),
    ] = False,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write what was found to a file, too, as JSON.", metavar="FILE")
    ] = None,
    junit: Annotated[
        Path | None,
        typer.Option("--junit", help="Write a test case for each kill, as JUnit's XML, for CI.", metavar="FILE"),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write what is printed to a page, too.", metavar="FILE")
    ] = None,
    repro: Annotated[
        Path | None,
        typer.Option(
            "--repro",
            help="Directory for a script for each failure, which shows it again; with --stock without memckpt. "
            "Default: with what else is kept of a drill that has failed.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train twice undisturbed, then with kills, and say whether these have left a trace.

    The script is run as it is, three times and more, each time in a copy of the working directory, with its own run
    directory. What it writes below the working directory stays apart from your files; what it writes elsewhere, it
    writes again. Large files are linked, and named if they change.

    Most resumes repeat their last step as a proof. --stock judges any training's own checkpoints instead: exact,
    diverged, or cannot start, and how many steps are lost.

    Exit status: 0 if the killed run is equal to an undisturbed one bit for bit, or, where two undisturbed ones differ,
    no further from them than they are from each other. It is 1 if it is not; 15 if the drill could not be carried out.
    """
    from memckpt_tools.drill.summary import junit_xml, print_beside
    from memckpt_tools.drill.workplace import Workplace

    seed = random.SystemRandom().randrange(10_000) if seed is None else seed
    ways = [_own, _protected] if both else [_own if stock else _protected]
    if resume_command is not None and _own not in ways:
        raise ConfigurationError("--resume-command: expected --stock beside it; with memckpt the same command resumes")
    if in_place and _own in ways:
        raise ConfigurationError("--in-place: expected neither --stock nor --both: each run would resume the last one")
    if both and (kinds is not None or nodes > 1):
        raise ConfigurationError("--both: expected neither --kinds nor --nodes, which mean other things for the two")
    asked = _Asked(command, resume_command, kills, steps, seed, kinds, nodes, overhead, patience, grace)
    asked.check([way is _own for way in ways])  # refuses what cannot be, before anything is trained
    files = tuple(path.resolve() for path in (json, junit, html) if path is not None)
    out.record = html is not None
    place = _make(directory)
    workplace = None if in_place else Workplace(Path.cwd(), place)
    on_nodes = f", {nodes} nodes simulated on this machine" if nodes > 1 else ""
    out.print(
        f"{shlex.join(command)}: {steps} steps, {kills} kills, seed {seed}{on_nodes}", markup=False, soft_wrap=True
    )
    keeps, passed = True, False  # where the drill cannot be carried out
    summaries: list[Summary] = []
    try:
        with _ending_by_signal():
            for way in ways:
                below = place / way.__name__.strip("_") if both else place
                below.mkdir(exist_ok=True)
                summaries.append(way(asked, below, workplace))
        if both:
            print_beside(summaries)
        passed = summaries[-1].passed
        keeps = directory is not None or not passed
        if repro is not None or keeps:
            _write_repros(repro or place, {name: text for each in summaries for name, text in each.repros.items()})
        findings: Any = {each.way: each.findings for each in summaries} if both else summaries[0].findings
        _write("--json", json, lambda: msgspec.json.format(msgspec.json.encode(findings), indent=2) + b"\n")
        _write("--junit", junit, lambda: junit_xml(summaries))
        _write("--html", html, lambda: out.export_html(clear=False).encode())
    finally:
        for path in workplace.changed(files) if workplace is not None else ():
            err.print(f"{path} has changed meanwhile: the script may have written to it", style="red", markup=False)
        if keeps:
            err.print(f"Kept: {place} (outputs of the script, run directories)", markup=False, soft_wrap=True)
        else:
            shutil.rmtree(place, ignore_errors=True)
    if not passed:
        raise typer.Exit(1)


def parse_kinds(text: str, known: Sequence[KindT]) -> tuple[KindT, ...]:
    """The kinds in ``"trainer,both"``. Raises ConfigurationError."""
    found = [each.strip() for each in text.split(",")]
    if not set(found) <= set(known):
        raise ConfigurationError(f"--kinds: expected names among {', '.join(known)}, with commas, found {text!r}")
    return tuple(kind for kind in known if kind in found)


@dataclass(frozen=True)
class _Asked:
    """Options of the command line, under their names there."""

    command: list[str]
    resume_command: str | None
    kills: int
    steps: int
    seed: int
    kinds: str | None
    nodes: int
    overhead: bool
    patience: float
    grace: float

    def protected_plan(self) -> supervisor.Plan:
        """Raises ConfigurationError."""
        from memckpt_tools.drill.supervisor import KINDS, ON_ONE, ON_SEVERAL, Plan

        kinds = parse_kinds(self.kinds or (ON_ONE if self.nodes == 1 else ON_SEVERAL), KINDS)
        if "node" in kinds and self.nodes < 2:
            raise ConfigurationError("--kinds node: expected --nodes N of 2 or more beside it, found one node")
        return Plan(self.kills, self.steps, self.seed, self.patience, kinds, self.nodes, self.overhead)

    def stock_plan(self) -> stock_drill.Plan:
        """Raises ConfigurationError."""
        from memckpt_tools.drill.stock import KINDS, Plan

        if self.nodes > 1:
            raise ConfigurationError("--nodes: expected one node with --stock, whose checkpoints are files")
        kinds = parse_kinds(self.kinds, KINDS) if self.kinds else KINDS
        return Plan(self.kills, self.steps, self.seed, kinds, self.patience, self.grace)

    def check(self, stock: Sequence[bool]) -> None:
        """Refuse what cannot be, of each way that is to be drilled. Raises ConfigurationError."""
        from memckpt_tools.drill.supervisor import draw

        for own in stock:
            _ = self.stock_plan() if own else self.protected_plan()
        draw(self.seed, self.kills, self.steps)


def _protected(asked: _Asked, place: Path, workplace: Workplace | None) -> Summary:
    """Drill a training that memckpt protects."""
    from memckpt_tools.drill import repro, supervisor
    from memckpt_tools.drill.summary import summary_of_protected
    from memckpt_tools.drill.supervisor import FIRST, KILLED, SECOND, WITHOUT
    from memckpt_tools.drill.text import print_result, print_undisturbed, verdict_text

    names = {FIRST: "undisturbed", WITHOUT: "without memckpt", SECOND: "undisturbed again", KILLED: "killed"}
    undisturbed: list[Verdict] = []
    try:
        with _showing(names, asked.steps) as show:
            start = _start(asked.command, workplace)
            result = supervisor.drill(place, start, asked.protected_plan(), show, undisturbed.append)
        print_undisturbed(undisturbed.pop())
    finally:
        for verdict in undisturbed:  # the killed run failed: these two may say why
            print_undisturbed(verdict)
    print_result(result)
    summary = summary_of_protected(result, asked.command, asked.seed)
    if summary.passed:
        return summary
    options = ["--seed", asked.seed, "--kills", asked.kills, "--steps", asked.steps, "--nodes", asked.nodes]
    options += ["--no-overhead", "--patience", asked.patience, *(["--kinds", asked.kinds] if asked.kinds else [])]
    script = repro.same_drill(list(map(str, options)), asked.command, verdict_text(result).plain)
    return replace(summary, repros={"repro.py": script})


def _own(asked: _Asked, place: Path, workplace: Workplace | None) -> Summary:
    """Drill a script's own checkpoints."""
    from memckpt_tools.drill import repro, stock
    from memckpt_tools.drill.summary import summary_of_own
    from memckpt_tools.drill.supervisor import FIRST, KILLED, SECOND
    from memckpt_tools.drill.text import print_stock

    again = asked.command if asked.resume_command is None else shlex.split(asked.resume_command)
    starts = _start(asked.command, workplace), _start(again, workplace)

    with _showing({FIRST: "undisturbed", SECOND: "undisturbed again", KILLED: "killed"}, asked.steps) as show:
        result = stock.drill(place, starts, asked.stock_plan(), show)
    print_stock(result)
    scripts = repro.scripts(result, (asked.command, again), asked.stock_plan())
    return replace(summary_of_own(result, asked.command, asked.seed), repros=scripts)


@contextlib.contextmanager
def _showing(names: Mapping[str, str], steps: int) -> Iterator[Callable[[str, int, int], None]]:
    """Bars of the runs, by name; what is yielded is told a run, its newest step, and its kills."""
    tasks: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=err) as progress:

        def show(name: str, record: int, made: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(names[name], total=steps, note="")
            progress.update(tasks[name], completed=min(record, steps), note=f"{made} killed" if made else "")

        yield show


@contextlib.contextmanager
def _ending_by_signal() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end this process as Ctrl-C does: with all that it has started."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _make(directory: Path | None) -> Path:
    """The directory of the drill. Raises DrillError if it exists, or cannot be made."""
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="memckpt-drill-"))
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise DrillError(f"--dir: expected a directory that can be made, found {error}; name a new one") from error
    return directory.resolve()


def _write_repros(directory: Path, scripts: Mapping[str, str]) -> None:
    for name, text in scripts.items():
        directory.mkdir(parents=True, exist_ok=True)
        _write("--repro", directory / name, text.encode)
        out.print(f"To see it again: python {directory / name}", markup=False, soft_wrap=True)


def _write(option: str, path: Path | None, content: Callable[[], bytes]) -> None:
    try:
        if path is not None:
            path.write_bytes(content())
    except OSError as error:
        raise DrillError(f"{option}: expected a file that can be written, found {error}; name another one") from error


def _start(command: list[str], workplace: Workplace | None) -> Start:
    def start(variables: Mapping[str, str | None], log: Path) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if variables.get(name, "") is not None}
        environment |= {name: value for name, value in variables.items() if value is not None}
        directory = None if workplace is None else workplace.of(log.parent)
        if directory is not None:
            environment["PWD"] = str(directory)
        with log.open("ab") as output:
            try:
                return subprocess.Popen(
                    command,
                    env=environment,
                    cwd=directory,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            except OSError as error:
                raise DrillError(f"expected a command that can be started behind --, found {error}") from error

    return start
