"""``python -m examples.demo``: train, train again through kills, compare."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from examples.demo import show
from examples.demo.black_box import Position
from examples.demo.cast import SPEED, Cast
from examples.demo.supervise import Kill, Plan, Run, RunResult, TrainingFailedError, draw_instants


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    description = "Kill a training run and see it resume."
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=description)
    parser.add_argument("--seed", type=int, help="seed of the times of the kills (default: random)")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--size", default="demo", help="size of the model: tiny, demo (default), 30M or 100M")
    parser.add_argument("--keep", action="store_true", help="leave logs and final states on disk")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="record the demo as a moving picture")
    parser.add_argument("--sabotage", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.kills < 1 or args.steps < 3 * args.kills + 5:
        parser.error("expected at least one kill, and at least 3 steps for each and 5 more")
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(10_000)
    return args


def explain(console: Console, args: argparse.Namespace, instants: list[float]) -> None:
    """Print what is going to happen."""
    console.print(
        f"A small GPT learns to write Python: the same {args.steps} steps in two runs.\n"
        "  1. uninterrupted, without memckpt\n"
        f"  2. with the MemCheckpoint callback, killed {args.kills} times with SIGKILL; no checkpoint\n"
        "     is written, an agent process that outlives the trainer holds the state;\n"
        "     `memckpt run` starts it again, from the second time on without its imports\n"
        "Then all bits of both are compared: weights, optimizer, RNG, every loss.\n",
        highlight=False,
    )
    drawn = ", ".join(f"{instant:.1f}" for instant in instants)
    console.print(f"Seed {args.seed} draws the times of the kills, in steps: {drawn}\n", highlight=False)


def train_twice(
    console: Console, cast: Cast, args: argparse.Namespace, instants: list[float], plan: Plan
) -> tuple[RunResult, RunResult]:
    """Train once uninterrupted and once with kills, with progress bars and a line for each kill."""
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[where]}"), console=console) as progress:
        first = progress.add_task("1. uninterrupted", total=args.steps, where="")
        second = progress.add_task(f"2. killed {args.kills} times", total=args.steps, where="", start=False)

        def show_position(task: TaskID, position: Position, process: str) -> None:
            where = "starting" if position.phase == "start-up" else f"{position.phase}"
            done: dict[str, Any] = {} if position.phase == "start-up" else {"completed": position.finished}
            progress.update(task, where=f"{process}: {where}", **done)

        def show_kill(kill: Kill) -> None:
            line = (
                f"  [red]SIGKILL[/] in step {kill.at.step}, {kill.at.phase}: {kill.start} restart, "
                f"step {kill.resumed + 1} taken {kill.seconds:.1f} s later"
            )
            progress.console.print(line, highlight=False)
            cast.print(line)

        plain = Run(plan, "uninterrupted", False, lambda *at: show_position(first, *at)).execute([])
        progress.update(first, completed=args.steps, where=f"{plain.step_seconds * 1e3:.0f} ms a step")
        progress.stop_task(first)
        cast.print(f"1. uninterrupted: {args.steps} steps of {plain.step_seconds * 1e3:.0f} ms, without memckpt")
        progress.start_task(second)
        cast.print(f"2. again, with memckpt, killed {args.kills} times")
        run = Run(plan, "killed", True, lambda *at: show_position(second, *at))
        killed = run.execute(instants, plain.step_seconds, show_kill)
        progress.update(second, completed=args.steps, where=f"{killed.step_seconds * 1e3:.0f} ms a step")
        progress.stop_task(second)
    return plain, killed


def judge(console: Console, cast: Cast, args: argparse.Namespace, plain: RunResult, killed: RunResult) -> bool:
    """Show the results; True if the two runs are equal."""

    def show_both(what: Any) -> None:
        console.print(what, highlight=False)
        cast.print(what)

    from examples.demo.verdict import compare_losses, compare_states  # torch takes seconds to import

    comparisons = [*compare_states(plain.final, killed.final), compare_losses(plain.losses, killed.losses)]
    show_both("")
    show_both(show.kill_table(killed.kills))
    if any(kill.lost for kill in killed.kills):
        show_both("Lost: killed between a step's optimizer and its commit; the step is repeated.")
    console.print(show.curves(plain, killed, args.steps, console.width))
    show_both(show.verdict_table(comparisons))
    equal = all(each.equal for each in comparisons)
    if equal:
        show_both(f"[bold green]Equal, bit for bit:[/] {len(killed.kills)} kills have left no trace in the result.")
    else:
        show_both("[bold red]Different:[/] the resumed run differs from the uninterrupted one.")
    return equal


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    console, cast = Console(), Cast()
    began = time.monotonic()
    instants = draw_instants(args.seed, args.kills, args.steps)
    explain(console, args, instants)
    cast.print(f"$ make demo    (a small GPT learns to write Python; {SPEED:.0f} times as fast as it was)")
    directory = Path(tempfile.mkdtemp(prefix="memckpt-demo-"))
    try:
        plan = Plan(args.steps, args.size, directory, args.sabotage)
        equal = judge(console, cast, args, *train_twice(console, cast, args, instants, plan))
        if args.svg is not None:
            cast.write(args.svg)
            console.print(f"Recorded: {args.svg}, which shows {SPEED:.0f} seconds in one.", highlight=False)
    except TrainingFailedError as error:
        console.print(f"[bold red]The demo failed:[/] {escape(str(error))}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted: all processes of the demo have been ended.")
        return 130
    finally:
        if args.keep:
            console.print(f"Kept: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    console.print(f"Seed {args.seed}, {time.monotonic() - began:.0f} s in all.", highlight=False)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
