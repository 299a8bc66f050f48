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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

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
    from memckpt_tools.drill.workplace import Workplace


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
            "trainer,agent,both; with --nodes: trainer,agent,node. With --stock, when: step, save, term (all three).",
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
    resume_command: Annotated[
        str | None,
        typer.Option(
            help="With --stock: the command that resumes, as one argument. Default: the same command.",
            metavar="COMMAND",
            show_default=False,
        ),
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0, help="With --stock: seconds between SIGTERM and SIGKILL, for kills of kind term.")
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
) -> None:
    """Train twice undisturbed, then with kills, and say whether these have left a trace.

    The script is run as it is, three times and more, each time in a copy of the working directory, with a run directory
    of its own. What it writes below the working directory stays apart from your files; what it writes elsewhere, it
    writes again. Large files are linked, and named if they change.

    Most resumes repeat their last step as a proof. --stock judges any training's own checkpoints instead: exact,
    diverged, or cannot start, and how many steps are lost.

    Exit status: 0 if the killed run is equal to an undisturbed one bit for bit, or, where two undisturbed ones differ,
    no further from them than they are from each other; 1 if it is not; 15 if the drill could not be carried out.
    """
    from memckpt_tools.drill.workplace import Workplace

    seed = random.SystemRandom().randrange(10_000) if seed is None else seed
    drilled = _own if stock else _protected
    if resume_command is not None and not stock:
        raise ConfigurationError("--resume-command: expected --stock beside it; with memckpt the same command resumes")
    asked = _Asked(command, resume_command, kills, steps, seed, kinds, nodes, overhead, patience, grace, json)
    asked.check(stock)  # refuses what cannot be, before anything is trained
    place = _make(directory)
    workplace = None if in_place else Workplace(Path.cwd(), place)
    on_nodes = f", {nodes} nodes simulated on this machine" if nodes > 1 else ""
    out.print(
        f"{shlex.join(command)}: {steps} steps, {kills} kills, seed {seed}{on_nodes}", markup=False, soft_wrap=True
    )
    keeps, passed = True, False
    try:
        with _ending_by_signal():
            passed = drilled(asked, place, workplace)
        keeps = directory is not None or not passed
    finally:
        own = () if json is None else (json.resolve(),)
        for path in workplace.changed(own) if workplace is not None else ():
            err.print(f"{path} has changed meanwhile: the script may have written to it", style="red", markup=False)
        if keeps:
            err.print(f"Kept: {place} (outputs of the script, run directories)", markup=False, soft_wrap=True)
        else:
            shutil.rmtree(place, ignore_errors=True)
    if not passed:
        raise typer.Exit(1)


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
    json: Path | None

    def protected_plan(self) -> supervisor.Plan:
        """Raises ConfigurationError."""
        from memckpt_tools.drill.supervisor import ON_ONE, ON_SEVERAL, Plan, parse_kinds

        kinds = parse_kinds(self.kinds or (ON_ONE if self.nodes == 1 else ON_SEVERAL), self.nodes)
        return Plan(self.kills, self.steps, self.seed, self.patience, kinds, self.nodes, self.overhead)

    def stock_plan(self) -> stock_drill.Plan:
        """Raises ConfigurationError."""
        from memckpt_tools.drill.stock import KINDS, Plan, parse_kinds

        if self.nodes > 1:
            raise ConfigurationError("--nodes: expected one node with --stock, whose checkpoints are files")
        kinds = parse_kinds(self.kinds or ",".join(KINDS))
        return Plan(self.kills, self.steps, self.seed, kinds, self.patience, self.grace)

    def check(self, stock: bool) -> None:
        """Refuse what cannot be. Raises ConfigurationError."""
        from memckpt_tools.drill.supervisor import draw

        _ = self.stock_plan() if stock else self.protected_plan()
        draw(self.seed, self.kills, self.steps)


def _protected(asked: _Asked, place: Path, workplace: Workplace | None) -> bool:
    """Drill a training that memckpt protects; True if it is equal to an undisturbed one."""
    from memckpt_tools.drill import supervisor
    from memckpt_tools.drill.supervisor import FIRST, KILLED, SECOND, WITHOUT
    from memckpt_tools.drill.text import as_json, print_result, print_undisturbed

    names = {FIRST: "undisturbed", WITHOUT: "without memckpt", SECOND: "undisturbed again", KILLED: "killed"}
    undisturbed: list[Verdict] = []
    try:
        with _showing(names, asked.steps) as show:
            start = _start(asked.command, workplace)
            result = supervisor.drill(place, start, asked.protected_plan(), show, undisturbed.append)
        if asked.json is not None:
            _write(asked.json, as_json(result, asked.command, asked.seed))
        print_undisturbed(undisturbed.pop())
    finally:
        for verdict in undisturbed:  # the killed run failed: these two may say why
            print_undisturbed(verdict)
    print_result(result)
    return result.verdict.outcome != "different"


def _own(asked: _Asked, place: Path, workplace: Workplace | None) -> bool:
    """Drill a script's own checkpoints; True if training goes on as an undisturbed one does."""
    from memckpt_tools.drill import stock
    from memckpt_tools.drill.supervisor import FIRST, KILLED, SECOND
    from memckpt_tools.drill.text import print_stock, stock_json

    again = asked.command if asked.resume_command is None else shlex.split(asked.resume_command)
    starts = _start(asked.command, workplace), _start(again, workplace)

    with _showing({FIRST: "undisturbed", SECOND: "undisturbed again", KILLED: "killed"}, asked.steps) as show:
        result = stock.drill(place, starts, asked.stock_plan(), show)
    if asked.json is not None:
        _write(asked.json, stock_json(result, asked.command, asked.seed))
    print_stock(result)
    return result.outcome in ("exact", "within")


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


def _write(path: Path, value: Any) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    except OSError as error:
        raise DrillError(f"--json: expected a file that can be written, found {error}; name another one") from error


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
