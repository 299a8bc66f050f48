"""Nodes, agents, trainers, a network and a disk: a job whose launcher starts it again whenever a trainer has died."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memckpt.config import MemckptConfig
from memckpt.processes.address import AgentAddress
from tests.faults.model import Model, Truth
from tests.faults.trainer import Attempt, Finish, Rank
from tests.support.cluster.netns import Network
from tests.support.cluster.processes import children, command
from tests.support.cluster.sharded_cases import Setup
from tests.support.trainings.engine_harness import Child, Lab
from tests.support.trainings.killed_ranks import NO_PROCESS_GROUP, node

#: Longest wait for a step, in seconds: a trainer may wait for an agent, and an agent be started.
PATIENCE_SECONDS = 90.0
#: Most attempts in a row that do not even resume.
_FRUITLESS = 20


class Stuck(AssertionError):
    """Training has not gone on for long."""


@dataclass
class _Rank:
    """A rank of the attempt that runs."""

    child: Child
    notes: int
    permit: int
    rest: bytes = b""


class Cluster:
    """Owns a job's processes, one rank on each node; :meth:`close` ends them.

    Without `config` the job is undisturbed and unprotected, without `network` all agents are on the loopback. `paced`:
    a rank takes a step only when that is permitted.
    """

    def __init__(
        self,
        lab: Lab,
        setup: Setup,
        config: MemckptConfig | None,
        *,
        tolerated: int = 0,
        network: Network | None = None,
        paced: bool = False,
        truth: Truth | None = None,
    ) -> None:
        self.lab, self.setup, self.config, self.network = lab, setup, config, network
        self.model = Model(setup.world_size, tolerated, truth or Truth())  # what the next resume owes
        self.finish = Finish()
        self.attempts = self.deaths = 0  # attempts begun, and those in which a trainer died
        self.agents_first = False  # agents are forked before trainers start, which else start them
        self.before_attempt: Callable[[], None] = lambda: None
        self._paced = paced
        #: Step up to which ranks may train, and up to which those of this attempt have been told so.
        self._target = 0
        self._permitted: int | None = None
        self._ranks: list[_Rank] = []
        self._finished = 0
        self._logs: list[Path] = []
        self._heard = 0.0

    @property
    def nodes(self) -> range:
        return range(self.setup.world_size)

    @property
    def running(self) -> bool:
        return bool(self._ranks)

    @property
    def finished(self) -> bool:
        return self._finished == self.setup.world_size

    # Attempts

    def begin(self) -> None:
        """Start the ranks of the next attempt."""
        assert not self._ranks
        self.before_attempt()
        if self.agents_first:
            self.revive()
        self._finished = 0
        self._permitted = None
        ends = [os.pipe2(os.O_CLOEXEC) for _ in self.nodes]
        kind = os.EFD_SEMAPHORE | os.EFD_CLOEXEC
        permits = [os.eventfd(0, kind) for _ in self.nodes]
        attempt = Attempt(
            setup=self.setup,
            number=self.attempts,
            seed=self.attempts if self.model.owed()[0] else 0,
            store=self.lab.directory / f"store-{self.attempts}-{os.urandom(4).hex()}",
            run_dir=self.lab.run_dir,
            config=self.config,
            notes=tuple(write for _, write in ends),
            permits=tuple(permits) if self._paced else None,
            finish=self.finish,
            network=self.network,
        )
        self.attempts += 1
        self._heard = time.monotonic()
        for rank, (read, _) in enumerate(ends):
            child = self.lab.fork(lambda rank=rank: Rank(attempt, rank).train(), f"rank{rank}")
            self._ranks.append(_Rank(child, read, permits[rank]))
        for _, write in ends:
            os.close(write)

    def poll(self, seconds: float) -> bool:
        """Wait for notes or ends of ranks, and tell the model; whether any came. A death is the end of the attempt."""
        if not self._ranks:
            return False
        handles = {rank.child._handle: rank for rank in self._ranks if rank.child._code is None}
        ready = set(select.select([*(rank.notes for rank in self._ranks), *handles], [], [], seconds)[0])
        if ready:
            self._heard = time.monotonic()
        ended = [rank for handle, rank in handles.items() if handle in ready]
        for rank in self._ranks:
            if rank.notes in ready:
                self._read(rank)
        codes = [rank.child.wait() for rank in ended]
        if any(codes):
            self._end_attempt()
        elif all(rank.child._code == 0 for rank in self._ranks):
            self._release()
        self._grant()
        return bool(ready)

    def _read(self, rank: _Rank) -> bool:
        """Read a rank's notes; False at their end."""
        data = os.read(rank.notes, 1 << 16)
        *lines, rank.rest = (rank.rest + data).split(b"\n")
        for line in lines:
            note = json.loads(line)
            self._finished += note["event"] == "finished"
            self.model.hear(note)
        return bool(data)

    def _end_attempt(self) -> None:
        """Kill the other ranks, as launchers do, and read what all have noted."""
        for rank in self._ranks:
            if rank.child._code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.child.pid, signal.SIGKILL)
        codes = [rank.child.wait() for rank in self._ranks]
        for rank in self._ranks:
            while select.select([rank.notes], [], [], 0)[0] and self._read(rank):
                continue
        logs = [rank.child.log for rank in self._ranks]
        self._release()
        # A rank that raises before another one was killed says why; one that lost its peers is no news.
        self.deaths += NO_PROCESS_GROUP not in codes
        self._forget_logs(logs)
        self._reap()

    def _release(self) -> None:
        for rank in self._ranks:
            os.close(rank.notes)
            os.close(rank.permit)
        self._ranks = []

    def _forget_logs(self, logs: list[Path]) -> None:
        """Keep the logs of the last attempts only."""
        self._logs += logs
        while len(self._logs) > 10 * self.setup.world_size:
            self._logs.pop(0).unlink(missing_ok=True)  # a rank that was killed at once has not opened its log

    def _reap(self) -> None:
        """Reap orphans that this process has adopted: agents, started by trainers that are dead."""
        ours = {child.pid for child in self.lab._children if child._code is None}
        for pid in children() - ours:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Run the job until something is true, and start it again if a trainer dies."""
        while not condition():
            if not self._ranks:
                self.begin()
            self.poll(1.0)
            self.check_progress(what)

    def check_progress(self, what: str = "a step") -> None:
        """Raise Stuck if nothing has come from the ranks for long."""
        if self.attempts - self.model.attempt > _FRUITLESS:
            raise Stuck(f"{_FRUITLESS} attempts have not come to their first step\n{self.told()}")
        if self._ranks and time.monotonic() - self._heard > PATIENCE_SECONDS:
            raise Stuck(f"waits for {what}\n{self.told()}")

    def train_to(self, step: int) -> None:
        """Train until all ranks have taken this step."""
        self._target = max(self._target, step)
        self._grant()
        self.until(f"step {step}", lambda: min(self.model.committed.get(rank, 0) for rank in self.nodes) >= step)

    def settle(self, limit: int) -> None:
        """Train until all is protected, at most to the step `limit`."""
        self.drain()
        while not self.model.whole and self.model.newest < limit:
            self.train_to(min(self.model.newest + 2, limit))

    def run_out(self, step: int) -> None:
        """Train to the end, which is this step."""
        self.finish.step = self._target = step
        self._grant()
        self.until("the end of training", lambda: self.finished and not self._ranks)

    def drain(self) -> None:
        """Read what ranks have noted, without waiting."""
        while self.poll(0):
            continue

    def _grant(self) -> None:
        """Permit the steps up to the target, once all ranks of this attempt have said where they begin."""
        if not self._paced or not self._ranks or self.model.attempt != self.attempts - 1:
            return
        if self._permitted is None:
            self._permitted = self.model.begun_at
        for rank in self._ranks:
            os.eventfd_write(rank.permit, max(0, self._target - self._permitted))
        self._permitted = max(self._permitted, self._target)

    # Processes

    def pid_of(self, rank: int) -> int | None:
        """The pid of a trainer; None if none runs."""
        return self._ranks[rank].child.pid if self._ranks else None

    def address(self, number: int) -> AgentAddress:
        return AgentAddress.of(self.lab.run_dir, f"node{number}")

    def agent_of(self, number: int) -> int | None:
        """The pid of a node's agent; None if it has none."""
        serving = self.address(number).serving()
        if serving is None or not alive(serving.pid):
            return None
        return serving.pid

    def helpers_of(self, number: int, module: str) -> list[int]:
        """The pids of the processes of a node's agent that run a module: its replicator, or its storage writers."""
        agent = self.agent_of(number)
        return [] if agent is None else [pid for pid in sorted(children(agent)) if module in command(pid)]

    def revive(self) -> None:
        """Fork an agent, with torch, for each node that has none, as a launcher does that starts agents first."""
        for number in self.nodes:
            with node(f"node{number}"), self.there(number):
                if self.agent_of(number) is None and not self.lab.agent_answers():
                    self.lab.start_agent(inherits=False)

    def there(self, number: int) -> contextlib.AbstractContextManager[None]:
        """This thread on a node's network."""
        return contextlib.nullcontext() if self.network is None else self.network.inside(number)

    # The end

    def told(self) -> str:
        """The ends of the logs."""
        ranks = [rank.child.log for rank in self._ranks] or self._logs[-self.setup.world_size :]
        logs = [*ranks, *sorted(self.lab.run_dir.glob("agent-*.log"))]
        return "".join(f"--- {path.name}\n{path.read_text()[-2500:]}" for path in logs if path.exists())

    def stop_agents(self) -> None:
        """Make all agents drop what they hold, and leave."""
        for number in self.nodes:
            with node(f"node{number}"), self.there(number):
                if self.agent_of(number) is not None:
                    self.lab.stop()
        self._reap()

    def close(self) -> None:
        """Kill the trainers, if any run."""
        for rank in self._ranks:
            if rank.child._code is None:
                os.kill(rank.child.pid, signal.SIGKILL)
                rank.child.wait()
        self._release()


def undisturbed(lab: Lab, setup: Setup, steps: int) -> Truth:
    """Losses and digests of the training without memckpt and without faults."""
    with contextlib.closing(Cluster(lab, setup, None)) as cluster:
        cluster.finish.step = steps
        cluster.until("the undisturbed training", lambda: cluster.finished and not cluster.running)
    assert not cluster.deaths, cluster.told()
    return cluster.model.truth


def alive(pid: int) -> bool:
    """Whether a process runs, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
