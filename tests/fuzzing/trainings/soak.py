"""``python -m tests.fuzzing.trainings.soak``: thousands of generated trainings, and a summary by class.

Exit status 0: not a single one is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path

from tests.fuzzing.trainings.programs import LOOPS, Program, drawn
from tests.fuzzing.trainings.running import Verdict, import_everything, minimal, run
from tests.fuzzing.trainings.text import text

#: What the loops of :data:`LOOPS` import.
_FRAMEWORKS = (
    "lightning.pytorch",
    "lightning_memckpt.callback",
    "accelerate_plugin",
    "transformers",
    "transformers_memckpt",
)
#: Seconds of processors are short where others use the machine: what was late is run once more before it counts.
_LATE = ("hangs", "left behind")


def main() -> int:
    """Run programs side by side; print each wrong one as it is found, and the numbers at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=1000, help="number of programs")
    parser.add_argument("--seed", type=int, default=None, help="the first one's; those that follow take the next ones")
    parser.add_argument("--processes", type=int, default=2, help="for plain loops; half as many for others")
    parser.add_argument("--scripts", type=Path, default=Path("build/programs"), help="where wrong ones are written to")
    parser.add_argument("--device", default="cpu", help="cuda, or late: plain loops train there")
    parser.add_argument("--named", type=re.compile, help="only programs in whose name this pattern is found")
    args = parser.parse_args()
    first = random.randrange(10**6, 10**9) if args.seed is None else args.seed
    print(f"{args.programs} programs from seed {first} on", flush=True)
    args.scripts.mkdir(parents=True, exist_ok=True)
    counted: Counter[str] = Counter()
    ways: Counter[str] = Counter()
    started = time.monotonic()
    loops = LOOPS if args.device == "cpu" else ("plain",)
    each = ((seed, drawn(seed, loops)) for seed in itertools.count(first))
    named = ((seed, program) for seed, program in each if args.named is None or args.named.search(str(program)))
    outcomes = _outcomes(itertools.islice(named, args.programs), args.processes, args.device)
    for number, (seed, script, verdict) in enumerate(outcomes, 1):
        counted[verdict.kind] += 1
        if verdict.kind in ("wrong", "invalid"):
            ways[f"{verdict.kind}: {verdict.way}"] += 1
        # Tensors that a program makes on the CPU go with a model there only.
        if verdict.wrong or (verdict.kind == "invalid" and args.device == "cpu"):
            path = args.scripts / f"{verdict.kind}_{seed}.py"
            path.write_text(script)
            lines = [f"seed {seed}: {verdict.kind}: {verdict.why}", *verdict.details, f"in {path}"]
            print("\n".join(lines), flush=True)
        if number % 100 == 0:
            print(f"{number} in {time.monotonic() - started:.0f} s: {dict(counted)}", flush=True)
    print("\nclass      programs")
    for kind in ("exact", "said", "refused", "invalid", "wrong"):
        print(f"{kind:10} {counted[kind]:8}")
    for way, times in ways.most_common():
        print(f"{times:6}  {way}")
    return 1 if counted["wrong"] else 0


def _outcomes(
    programs: Iterable[tuple[int, Program]], processes: int, device: str
) -> Iterator[tuple[int, str, Verdict]]:
    """Seeds of the programs with their scripts and verdicts, as they come.

    What imports frameworks costs twice as much to fork: plain loops are run by processes without them.
    """
    context = multiprocessing.get_context("spawn")
    plain = ProcessPoolExecutor(processes, context, _prepare)
    framed = ProcessPoolExecutor((processes + 1) // 2, context, _prepare, _FRAMEWORKS)
    with plain, framed:
        waiting: list[Future[tuple[int, str, Verdict]]] = []
        for seed, program in programs:
            waiting.append((plain if program.loop == "plain" else framed).submit(_outcome, seed, program, device))
            ended = [each for each in waiting if each.done()]
            waiting = [each for each in waiting if each not in ended]
            yield from (each.result() for each in ended)
        yield from (each.result() for each in as_completed(waiting))


def _prepare(*frameworks: str) -> None:
    import_everything(*frameworks)
    multiprocessing.set_start_method("fork", force=True)  # for loaders' workers, as in a process of a user's


def _outcome(seed: int, program: Program, device: str) -> tuple[int, str, Verdict]:
    try:
        verdict = run(program, device)
        if verdict.wrong and any(each in verdict.why for each in _LATE):
            verdict = run(program, device)
        elif verdict.wrong and (again := run(program, device)).way == verdict.way:
            program, verdict = minimal(program, again, device=device)
    except Exception:
        verdict = Verdict("invalid", "the harness failed", [traceback.format_exc()])
    return seed, text(program, device), verdict


if __name__ == "__main__":
    sys.exit(main())
