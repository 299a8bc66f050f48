"""A small DDP training in forked ranks, with deaths at chosen places, and its results."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import memckpt
from memckpt import compression
from memckpt.capture.self_test import SelfTest
from memckpt.config import MemckptConfig
from memckpt.processes.control import ask_status
from memckpt.session.generation_switch import SwitchState
from tests.support.cluster.processes import kill_and_wait
from tests.support.faults.frozen import freeze
from tests.support.trainings.engine_child import Journal
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.rank_group import PROCESS_GROUP_SECONDS, Death, become, join, run_ranks
from tests.support.trainings.resume_history import commit, journal_of, note_resume, why_unproved

STEPS = 14
#: Seconds to wait for storage: on a busy machine the writer's imports take longer than the above.
STORAGE_SECONDS = 45.0


@dataclass(frozen=True)
class Job:
    """One attempt of a DDP training.

    Attributes:
        directory: directory for its results; a new one for each attempt.
        run_dir: run directory; None to train without memckpt.
        number: number of the attempt, which launchers count.
        nodes: whether every rank is its own node.
        deaths: the planned deaths.
        hook: time at which a user's communication hook is registered.
        halved: steps in which a gradient is halved by hand, past torch's version counters.
        users_hook: which: "halving", or torch's "fp16" or "powersgd" (its "bf16" takes NCCL only).
        hang: the rank that stays alive, stuck, when another one has died.
        wait_at: step after which ranks wait until something is in storage.
        log: whether ranks wait at each step until its record has been taken for the log.
        die_when_stored: rank 0 dies as soon as it hears that something is in storage.
        slow_rank: a rank that is slower than the others.
        by_hand: (rank, step) at which a rank changes a large buffer of its own, unexpectedly.
        own_tables: whether that buffer has other initial values on each rank.
        optimizer: makes the optimizer.
        fails_test: a rank on which the optimizer's self-test fails.
        other_batch: a rank that continues with another batch than its own.
        averages: whether each rank keeps a moving average of the model.
        flip: (rank, step) at which one bit of a rank's average flips.
        dtype: of parameters, buffers and inputs.
    """

    directory: Path
    run_dir: Path | None
    config: MemckptConfig
    world_size: int = 2
    number: int = 0
    nodes: bool = False
    deaths: Sequence[Death] = ()
    hook: str = ""
    users_hook: str = "halving"
    halved: Sequence[int] = ()
    hang: int | None = None
    ddp: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    wait_at: int | None = None
    log: bool = False
    die_when_stored: bool = False
    slow_rank: int | None = None
    by_hand: Sequence[tuple[int, int]] = ()
    own_tables: bool = False
    last_step: int = STEPS
    optimizer: Callable[[Any], torch.optim.Optimizer] = field(
        default=lambda params: torch.optim.AdamW(params, lr=0.01), compare=False
    )
    fails_test: int | None = None
    other_batch: int | None = None
    averages: bool = False
    flip: tuple[int, int] | None = None
    dtype: torch.dtype = torch.float32

    def result(self, rank: int) -> Path:
        return self.directory / f"result-{rank}"

    def journal(self, rank: int) -> Path:
        return self.directory / f"journal-{rank}"


AnyJob = TypeVar("AnyJob", bound=Job)


class Net(nn.Module):
    """Examples of all that DDP treats specially: buffers, a layer that is used in some batches only."""

    table: torch.Tensor

    def __init__(self, with_unused: bool, with_table: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(16, 96)
        self.norm = nn.BatchNorm1d(96)
        self.drop = nn.Dropout(0.2)
        self.middle = nn.Linear(96, 96)
        self.now_and_then = nn.Linear(96, 96) if with_unused else None
        self.last = nn.Linear(96, 4)
        if with_table:
            self.register_buffer("table", torch.zeros(1 << 15))  # too large to be copied with every record

    def forward(self, x: torch.Tensor, use_all: bool) -> torch.Tensor:
        x = self.drop(torch.relu(self.norm(self.first(x))))
        x = torch.relu(self.middle(x))
        if self.now_and_then is not None and use_all:
            x = x + self.now_and_then(x)
        return self.last(x)


def halving_hook(state: Any, bucket: Any) -> Any:
    """A user's communication hook: averages in half the range, which gives other bits than DDP's own averaging."""
    flat = bucket.buffer().div_(2 * dist.get_world_size())
    work = dist.all_reduce(flat, async_op=True)
    return work.get_future().then(lambda done: done.value()[0].mul_(2))


def train(job: Job, rank: int) -> None:
    """One rank of the attempt."""
    logging.basicConfig(level=logging.INFO)
    become(rank, job.number, f"node{rank}" if job.nodes else None)
    join(rank, job.world_size, job.directory / "store")
    torch.manual_seed(0)
    net = Net(bool(job.ddp.get("find_unused_parameters")), bool(job.by_hand) or job.own_tables).to(job.dtype)
    average = copy.deepcopy(net).requires_grad_(False) if job.averages else None
    model = DistributedDataParallel(net, **{"bucket_cap_mb": 0.02, **job.ddp})
    if job.own_tables:
        net.table.fill_(rank + 1 if job.number == 0 else -1.0)
    torch.manual_seed(100 + rank)
    optimizer = job.optimizer(net.parameters())
    if job.fails_test == rank:
        SelfTest.after_record = lambda self: "it has failed here"  # type: ignore[method-assign]
    if job.hook == "before":
        _register_hook(job, model)
    if job.run_dir is None and job.config.compression is not None:
        params = [param for param in net.parameters() if param.requires_grad]
        model.register_comm_hook(compression.state(job.config.compression, params), compression.hook)
    if job.run_dir is None and job.hook == "after":
        _register_hook(job, model)
    session = None
    start = resumed = 0
    journal = Journal(job.journal(rank))
    if job.run_dir is not None:
        beside = {} if average is None else {"average": average}
        session = memckpt.attach(model, optimizer, run_dir=job.run_dir, config=job.config, extra_modules=beside)
        print("described:", session.describe())
        if job.hook == "after":
            _register_hook(job, model)
        report = session.restore()
        start, resumed = 0 if report is None else report.step, note_resume(journal, report)
        print("resumed:", resumed)
    if job.other_batch == rank:
        torch.manual_seed(7)
    deaths = {(death.step, death.place): death for death in job.deaths if death.who in (rank, "all", "agent")}

    def at(step: int, place: str) -> None:
        death = deaths.pop((step, place), None)
        if death is None:
            return
        if death.who != "agent":
            os.kill(os.getpid(), signal.SIGKILL)
        elif rank == 0 and session is not None and session.agent_pid is not None:
            kill_and_wait(session.agent_pid)
            print("killed the agent")

    place = [0]
    net.middle.weight.register_hook(lambda gradient: at(place[0], "backward"))
    losses = {}
    for step in range(start, job.last_step):
        place[0] = step
        try:
            losses[step] = _step(job, model, net, optimizer, step, at)
        except RuntimeError:
            if job.hang == rank:
                signal.pause()
            raise
        if (rank, step) in job.by_hand:
            net.table += rank + 1
        if average is not None:
            _follow(average, net)
            if job.flip == (rank, step):
                average.middle.weight.view(torch.int32)[7, 3] ^= 1
        at(step, "stepped")
        if session is not None:
            assert commit(journal, session, step)
            _note_what_is_shared(journal, session)
        if session is not None and session._protection.unprotected_since is not None and session._link.up:
            # On a busy machine a new agent takes longer than all of these steps.
            while session._switch.state is SwitchState.EMPTY:
                assert select.select([session._link.connection.channel], [], [], PROCESS_GROUP_SECONDS / 2)[0]
                session._protection.listen()
        at(step, "committed")
        if job.die_when_stored and rank == 0 and session is not None and session.stored_step is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == job.slow_rank:
            sum(range(200_000))
        if job.wait_at is not None and step == job.wait_at - 4 and session is not None and session.mode != "eager":
            # On a busy machine the snapshot's order would come too late for steps this short.
            while session._link.connection.order is None:
                assert select.select([session._link.connection.channel], [], [], PROCESS_GROUP_SECONDS / 2)[0]
                session._protection.listen()
        if step == job.wait_at and session is not None:
            while session.stored_step is None:
                assert select.select([session._link.connection.channel], [], [], STORAGE_SECONDS)[0]
                session._protection.listen()
        if job.log and step >= 2 and session is not None:
            _wait_for_log(session, based=step >= 6)
    state = {
        "params": [freeze(param) for param in net.parameters()],
        "buffers": [freeze(buffer) for buffer in net.buffers()],
        "average": [] if average is None else [each.numpy().tobytes() for each in average.parameters()],
        "optimizer": freeze(optimizer.state_dict()),
        "rng": torch.get_rng_state().numpy().tobytes(),
    }
    job.result(rank).write_bytes(pickle.dumps({"state": state, "losses": losses, "resumed": resumed}))
    if session is not None:
        session.close()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # the shutdown of DDP's reducer sometimes hangs in gloo, with and without memckpt


def _register_hook(job: Job, model: DistributedDataParallel) -> None:
    match job.users_hook:
        case "halving":
            model.register_comm_hook(None, halving_hook)
        case "powersgd" | "powersgd-in-fp16":
            state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=3, min_compression_rate=1)
            hook = powerSGD_hook.powerSGD_hook
            wrapped = default_hooks.fp16_compress_wrapper(hook) if job.users_hook != "powersgd" else hook
            model.register_comm_hook(state, wrapped)
        case name:
            model.register_comm_hook(None, getattr(default_hooks, f"{name}_compress_hook"))


def _follow(average: Net, net: Net) -> None:
    with torch.no_grad():
        for ours, theirs in zip(average.parameters(), net.parameters(), strict=True):
            ours.lerp_(theirs, 0.1)


def _note_what_is_shared(journal: Journal, session: memckpt.Session) -> None:
    writer = session._staging.writer
    if writer is not None and writer.spec.by_value:
        spec, ring = writer.spec, writer.layout.by_value_ring
        encoded = [encoding.kind for encoding in spec.encodings if encoding is not None]
        nbytes = writer._slots.nbytes
        journal.note("shared", names=spec.shared, apart=spec.apart, nbytes=nbytes, ring=ring, encoded=encoded)


def _wait_for_log(session: memckpt.Session, based: bool) -> None:
    """Wait until the newest record has been taken for the log; with `based` also for the log's first checkpoint."""
    record, deadline = session._recorder.record - 1, time.monotonic() + STORAGE_SECONDS
    while True:
        status = ask_status(session._link._address)
        assert status is not None
        assert status.storage is not None
        if (status.storage.logged or 0) >= record and (not based or status.storage.step is not None):
            return
        assert time.monotonic() < deadline, f"record {record} is not taken: {status.storage}"
        session._protection.listen()


def _step(
    job: Job, model: nn.Module, net: Net, optimizer: torch.optim.Optimizer, step: int, at: Callable[[int, str], None]
) -> str:
    optimizer.zero_grad()
    total = 0.0
    for micro in range(job.accumulate):
        x, y = torch.randn(8, 16).to(job.dtype), torch.randint(0, 4, (8,))
        loss = nn.functional.cross_entropy(model(x, step % 3 != 1), y)
        at(step, "forward")
        last = micro == job.accumulate - 1
        if last:
            loss.backward()
        else:
            untyped: Any = model
            with untyped.no_sync():
                loss.backward()
        total += float(loss.detach())
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    if step in job.halved and net.middle.weight.grad is not None:
        net.middle.weight.grad.data.mul_(0.5)
    optimizer.step()
    return total.hex()


def run(lab: Lab, job: AnyJob, body: Callable[[AnyJob, int], None] = train) -> list[int]:
    """Run one attempt; returns the exit codes of its ranks. A rank that is to hang is left alive."""
    ranks = run_ranks(lab, job.world_size, partial(body, job), job.directory, patience=None, hangs=job.hang)
    return [0 if job.hang == rank else child.wait() for rank, child in enumerate(ranks)]


def check_verdicts(attempts: Sequence[Job], died: bool, reasons: Sequence[str] = ()) -> None:
    """Check that all ranks of the last attempt report an equal repeated step, or none for a valid reason.

    Args:
        attempts: attempts of one run, in order.
        died, reasons: as for :func:`why_unproved`.
    """
    journals = [[journal_of(each.journal(rank)) for rank in range(each.world_size)] for each in attempts]
    problem = why_unproved(journals[-1], journals[:-1], attempts[-1].config, died, reasons)
    assert not problem, f"attempt {attempts[-1].number}: {problem}"


halving_hook.__annotations__.clear()  # torch compares them with its own classes
