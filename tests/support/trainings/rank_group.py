"""The ranks of a job as children of a test: their process group, planned deaths, end, results and comparison."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from memckpt.processes.address import NODE_VARIABLE
from tests.support.cluster.processes import CHILD_SECONDS
from tests.support.faults.frozen import differences
from tests.support.trainings.engine_harness import Child, Lab

#: Exit code of a rank that found no others: gloo's ranks do not always find each other, with or without memckpt.
NO_PROCESS_GROUP = 77
#: Attempts of a job whose ranks do not find each other.
TRIES = 4
#: Seconds within which a rank learns that it has lost the others.
PROCESS_GROUP_SECONDS = 20


@dataclass(frozen=True)
class Death:
    """A death: who, and where.

    Attributes:
        who: a rank, "all" (ranks), "agent" (of rank 0's node), "agents" (of all nodes), or names of nodes, separated by
            commas: each with its ranks and its agent.
        place: "forward", "backward", "reduced" (gradients are clipped), "in step" (between two groups of the
            optimizer's step), "stepped", "in commit" or "committed".
    """

    who: int | str
    step: int
    place: str = "forward"

    @property
    def resumed(self) -> int:
        """The step at which training resumes: no step that all ranks have committed is lost."""
        return self.step + (self.place == "committed")


class Attempt(Protocol):
    """One attempt of a job: a directory for its results, and the number of its ranks."""

    @property
    def directory(self) -> Path: ...

    @property
    def world_size(self) -> int: ...


# In a rank


def become(rank: int, number: int = 0, node: str | None = None) -> None:
    """Be a rank of an attempt of this number, on this node."""
    torch.set_num_threads(1)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
    if node is not None:
        os.environ[NODE_VARIABLE] = node


def join(rank: int, ranks: int, store: Path, seconds: float = PROCESS_GROUP_SECONDS, *, launched: bool = False) -> None:
    """Join the process group of a rank's job, in that rank; ends the process with NO_PROCESS_GROUP if that fails.

    `launched`: with the variables that torchrun sets.
    """
    if launched:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({name: str(value) for name, value in numbers.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=seconds)
        )
    except RuntimeError as error:
        give_up(error)


def give_up(error: RuntimeError) -> NoReturn:
    """End the attempt for a retry."""
    print(error)
    os._exit(NO_PROCESS_GROUP)


# From outside


def run_ranks(
    lab: Lab,
    ranks: int,
    body: Callable[[int], None],
    directory: Path,
    *,
    patience: float | None = 0.0,
    hangs: int | None = None,
    limit: float = 3 * CHILD_SECONDS,
    name: str = "rank",
) -> list[Child]:
    """Run one attempt to its end: `body` in each rank, with its number. Repeated where ranks did not find each other.

    Args:
        directory: has the store of the process group, and what ranks leave; emptied before it is repeated.
        patience, limit: as for :func:`wait`.
        hangs: a rank that is left alive.
    """
    for _ in range(TRIES):
        children = [lab.fork(partial(body, rank), f"{name}{rank}") for rank in range(ranks)]
        awaited = [child for rank, child in enumerate(children) if rank != hangs]
        if NO_PROCESS_GROUP not in wait(awaited, patience, limit):
            break
        if hangs is not None:
            children[hangs].wait()
        for left in directory.iterdir():
            left.unlink()
    return children


def wait(ranks: Sequence[Child], patience: float | None = 0.0, limit: float = 3 * CHILD_SECONDS) -> list[int]:
    """The ranks' exit codes.

    Args:
        patience: seconds that ranks have to notice that one has died, before they are killed, as launchers do; None:
            they are not.
        limit: seconds from one end to the next.

    Raises:
        TimeoutError: ranks live on.
    """
    running = {child._handle: child for child in ranks}
    failed = False
    while running:
        ready, _, _ = select.select(list(running), [], [], patience if failed and patience is not None else limit)
        if failed and patience is not None and (patience == 0 or not ready):
            for child in running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
            break
        if not ready:
            raise TimeoutError("ranks live on:\n" + "\n".join(child.log.read_text()[-3000:] for child in ranks))
        for handle in ready:
            failed |= running.pop(handle).wait() != 0
    return [child.wait() for child in ranks]


def fresh_directory(lab: Lab) -> Path:
    return Path(tempfile.mkdtemp(dir=lab.directory))


def results(attempt: Attempt) -> list[Any]:
    """What each rank has left."""
    return [pickle.loads((attempt.directory / f"result-{rank}").read_bytes()) for rank in range(attempt.world_size)]


def check_same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Check that each rank's losses and final state equal the undisturbed training's, bit for bit."""
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        wrong = [step for step, loss in ours["losses"].items() if loss != theirs["losses"][step]]
        assert not wrong, f"rank {rank}: losses differ at steps {wrong}"
        different = differences(theirs["state"], ours["state"])
        assert not different, f"rank {rank}:\n" + "\n".join(different[:10])
