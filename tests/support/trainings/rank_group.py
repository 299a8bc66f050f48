"""Ranks of a job as children of a test: their process group, and their end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.support.trainings.engine_harness import Child

NO_PROCESS_GROUP = 77
_PROCESS_GROUP_SECONDS = 20


def join(rank: int, ranks: int, store: Path) -> None:
    """Join the process group of a rank's job, in that rank; ends the process with NO_PROCESS_GROUP if that fails."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        OMP_NUM_THREADS="1",
    )
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=_PROCESS_GROUP_SECONDS),
        )
    except RuntimeError as error:
        print(error)  # gloo's ranks do not always find each other: the attempt is retried
        os._exit(NO_PROCESS_GROUP)


def wait(ranks: Sequence[Child]) -> list[int]:
    """The ranks' exit codes; when one dies the others are killed, as launchers do."""
    codes: dict[int, int] = {}
    handles = {os.pidfd_open(rank.pid): rank for rank in ranks}
    try:
        while handles:
            ready = select.select(list(handles), [], [], 90)[0]
            if not ready:
                raise TimeoutError("ranks live on:\n" + "\n".join(rank.log.read_text()[-3000:] for rank in ranks))
            for handle in ready:
                rank = handles.pop(handle)
                os.close(handle)
                codes[rank.pid] = rank.wait()
                if codes[rank.pid] != 0:
                    for other in handles.values():
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(other.pid, signal.SIGKILL)
    finally:
        for handle in handles:
            os.close(handle)
    # The code of a rank killed because another one had died means nothing.
    return [codes[rank.pid] for rank in ranks]
