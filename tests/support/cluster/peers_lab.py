"""Attempts of trainings whose nodes keep each other's records, and faults of nodes, agents and replicators."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from memckpt.config import ErasureConfig, MemckptConfig, StorageConfig
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import ask_status
from memckpt.protocol.replication import Recover, Recovered
from memckpt.session.peers import PeerRecovery
from tests.support.cluster.netns import Network
from tests.support.cluster.processes import children, command, kill_and_wait
from tests.support.cluster.sharded_cases import Setup, ShardedJob, check_verdict
from tests.support.cluster.waiting import until
from tests.support.trainings import killed_ranks
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import node

#: Port of replicators that have a network namespace to themselves.
_PORT = 4077
#: Longest life, in seconds, of a rank: agents and replicators share the cores with it, and links may be slow.
_RANK_SECONDS = 150


@dataclass(frozen=True)
class Act:
    """A rank's action when its training first reaches a place."""

    rank: int
    step: int
    place: str
    do: Callable[[PeersRank], None]


@dataclass(frozen=True)
class PeersJob(ShardedJob):
    """One attempt."""

    names: tuple[str, ...] = ()  # names of the nodes, in the order of the ranks on them; empty: node0, node1, ..
    acts: Sequence[Act] = ()  # the ranks' actions, by place
    #: Steps after whose commit all ranks wait until every node's peers have that record.
    acknowledged_at: Sequence[int] = ()
    #: Steps after whose commit all ranks wait until every node's records up to it are with its peers.
    protected_at: Sequence[int] = ()
    #: Network of the agents and replicators of node0, node1, ...; ranks share the loopback. None: all do.
    network: Network | None = None
    once: ClassVar[tuple[str, ...]] = (*ShardedJob.once, "acts", "acknowledged_at", "protected_at")

    def node(self, rank: int) -> str:
        index = rank * self.nodes // self.world_size
        return self.names[index] if self.names else f"node{index}"

    @property
    def node_names(self) -> list[str]:
        """The nodes, each once, in the order of the ranks."""
        return list(dict.fromkeys(self.node(rank) for rank in range(self.world_size)))

    def again(self, lab: Lab, **changes: Any) -> PeersJob:
        """The next attempt, without faults; one that starts over has number 0, and so the undisturbed one's numbers."""
        return killed_ranks.next_attempt(lab, self, **changes)


def peers_config(data: int, tolerate: int, redo: str = "lazy", **settings: Any) -> MemckptConfig:
    """Peers on the loopback."""
    own = ("ack", "every_steps", "rate_bytes_per_second", "ack_timeout_seconds", "recovery_patience_seconds")
    ours = {name: settings.pop(name) for name in own if name in settings}
    return config(redo, peers=ErasureConfig(data=data, tolerate=tolerate, host="127.0.0.1", **ours), **settings)


def peers_job(lab: Lab, setup: Setup, config: MemckptConfig, **settings: Any) -> PeersJob:
    """The first attempt, one rank per node; the launcher ends all ranks when one has died."""
    settings.setdefault("nodes", setup.world_size)
    settings.setdefault("launcher", True)
    return PeersJob(killed_ranks.fresh_directory(lab), lab.run_dir, config, setup=setup, **settings)


def stored_job(lab: Lab, setup: Setup, data: int, tolerate: int) -> PeersJob:
    """Step 4 is in storage when steps after 5 are trained."""
    settings = peers_config(data, tolerate, storage=StorageConfig(every_steps=4))
    return peers_job(lab, setup, settings, wait_at=5)


# In a rank


class PeersRank(killed_ranks.Rank):
    """One rank of an attempt."""

    job: PeersJob

    def __init__(self, job: PeersJob, rank: int) -> None:
        super().__init__(job, rank)
        self._known = 0
        self._acts = {(act.step, act.place): act for act in job.acts if act.rank == rank}
        self.journal.note("started", pid=os.getpid())

    @property
    def acknowledged(self) -> int:
        """The newest record that this rank knows to be with the peers of every node."""
        if self.session is not None and self.session._link.up:
            self._known = max(self._known, self.session._link.connection.watermark)
        return self._known

    def at(self, place: str) -> None:
        act = self._acts.pop((self.step, place), None)
        if act is not None:
            self.journal.note("acted", step=self.step, place=place)
            act.do(self)
        super().at(place)

    def _kill_node(self) -> None:
        mine = self.job.node(self.rank)
        names = (str(death.who).split(",") for death in self.job.deaths)
        kill_nodes(self.job, next(each for each in names if mine in each))

    def _note_committed(self) -> None:
        loss = self.losses[self.step]
        self.journal.note("committed", step=self.step, acknowledged=self.acknowledged, loss=loss)
        if self.step in self.job.acknowledged_at:
            self.await_acknowledgements()
        if self.step in self.job.protected_at:
            self.await_protection()

    def await_acknowledgements(self) -> None:
        """Wait until the newest record is with the peers of every node."""
        while self.session._link.connection.watermark < self.step + 1:
            assert self.listen(killed_ranks.PROCESS_GROUP_SECONDS * 0.6), "not acknowledged for long"

    def await_protection(self) -> None:
        """Wait until all committed records are with the peers of every node."""
        client = self.session._link.connection
        while not client.whole or client.watermark < self.step + 1:
            assert self.listen(killed_ranks.PROCESS_GROUP_SECONDS * 0.6), "not protected for long"
        self.journal.note("protected", step=self.step, acknowledged=client.watermark)

    def listen(self, seconds: float) -> bool:
        """Wait for a message of the agent, and handle it; False if there was none."""
        said = bool(select.select([self.session._link.connection.channel], [], [], seconds)[0])
        self.session._protection.listen()
        return said


def recovers_with(
    ranks: Collection[int], before: Callable[[int], None], after: Callable[[int], None] = lambda rank: None
) -> Callable[[int], None]:
    """A `Job.prepare` with actions of these ranks before their nodes fetch or hand out, and of all others after it.

    Only the first rank of each node does anything.
    """

    def prepare(rank: int) -> None:
        original = PeerRecovery._ask

        def ask(peers: PeerRecovery, message: Recover) -> Recovered:
            if rank in ranks:
                before(rank)
            recovered = original(peers, message)
            if rank not in ranks:
                after(rank)
            return recovered

        PeerRecovery._ask = ask  # type: ignore[method-assign]  # in a forked child

    return prepare


def train(job: ShardedJob, rank: int) -> None:
    """The body of one rank of the attempt; never returns."""
    assert isinstance(job, PeersJob)
    faulthandler.dump_traceback_later(_RANK_SECONDS, exit=True, file=sys.stderr)
    PeersRank(_on_network(job, rank), rank).train()


def _on_network(job: PeersJob, rank: int) -> PeersJob:
    """The attempt with a rank's node configured for its own address."""
    if job.network is None or job.config is None:
        return job
    assert job.config.peers is not None
    # Each attempt has the same port, so that latecomers reach the right peer; the namespace has no other users.
    host = job.network.addresses[place_of(job.node(rank))]
    return replace(job, config=replace(job.config, peers=replace(job.config.peers, host=host, port=_PORT)))


def place_of(name: str) -> int:
    return int(name.removeprefix("node"))


def stop_here(rank: PeersRank) -> None:
    """Stop this rank here; the launcher ends it."""
    signal.pause()


# Nodes and their processes, from a rank or from outside


def agent_of(job: PeersJob, name: str) -> int | None:
    """The pid of a node's agent; None if it has none."""
    assert job.run_dir is not None
    sock = AgentAddress.of(job.run_dir, name).connect()
    if sock is None:
        return None
    with sock:
        return int(struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def replicators_of(job: PeersJob, name: str) -> set[int]:
    """The pid of a node's replicator, if it has one."""
    agent = agent_of(job, name)
    return set() if agent is None else {pid for pid in children(agent) if "memckpt.replication" in command(pid)}


def replicator_of(job: PeersJob, name: str) -> int:
    (found,) = replicators_of(job, name)
    return found


def ranks_of(job: PeersJob, names: Iterable[str]) -> Iterator[int]:
    for rank in range(job.world_size):
        if job.node(rank) in names:
            lines = (job.directory / f"journal-{rank}").read_text().splitlines()
            yield from (each["pid"] for each in map(json.loads, lines) if each["event"] == "started")


def kill_nodes(job: PeersJob, names: Sequence[str], *, itself: bool = False) -> None:
    """Kill all processes of these nodes at once; the caller only if `itself`. Replicators end with their agents."""
    with open(job.directory / "killer", "w") as killer:
        # One at a time: two ranks that kill the same nodes would end one another, and leave the agents.
        fcntl.flock(killer, fcntl.LOCK_EX)
        agents = [pid for name in names if (pid := agent_of(job, name)) is not None]
        for pid in [*ranks_of(job, names), *agents]:
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
        for pid in agents:
            kill_and_wait(pid)
    if itself:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_agent(rank: PeersRank) -> None:
    """Kill the agent of the rank's node, and with it its replicator; the ranks live on."""
    assert rank.session.agent_pid is not None
    kill_and_wait(rank.session.agent_pid)


def kill_replicator(rank: PeersRank) -> None:
    kill_and_wait(replicator_of(rank.job, rank.job.node(rank.rank)))


def kill_replicators(rank: PeersRank) -> None:
    """Kill the replicator of the rank's node, and three successors, each as soon as it runs."""
    name = rank.job.node(rank.rank)
    for _ in range(4):
        until(lambda: bool(replicators_of(rank.job, name)), "a replicator")
        kill_and_wait(replicator_of(rank.job, name))


def kill_once(job: PeersJob, name: str) -> None:
    """Kill a node's replicator, the first time that this process is asked to."""
    if name not in _killed_once:
        _killed_once.add(name)
        kill_and_wait(replicator_of(job, name))


_killed_once: set[str] = set()


def _signal(rank: PeersRank, pid_of: Callable[[PeersJob, str], int | None], number: int) -> None:
    """Send a signal to a process of the rank's node."""
    pid = pid_of(rank.job, rank.job.node(rank.rank))
    assert pid is not None
    os.kill(pid, number)


def stop_replicator(rank: PeersRank) -> None:
    _signal(rank, replicator_of, signal.SIGSTOP)


def continue_replicator(rank: PeersRank) -> None:
    _signal(rank, replicator_of, signal.SIGCONT)


def stop_agent(rank: PeersRank) -> None:
    """Stop the agent of the rank's node; its replicator continues."""
    _signal(rank, agent_of, signal.SIGSTOP)


def stop_both(rank: PeersRank) -> None:
    stop_replicator(rank)
    stop_agent(rank)


def continue_both(rank: PeersRank) -> None:
    """Continue both, and wait until the agent has handled its pending messages."""
    assert rank.session.agent_pid is None, "training no longer waits for it"
    continue_replicator(rank)
    _signal(rank, agent_of, signal.SIGCONT)
    assert rank.job.run_dir is not None
    address = AgentAddress.of(rank.job.run_dir, rank.job.node(rank.rank))
    until(lambda: ask_status(address) is not None, "the agent answers")


def revive_agents(lab: Lab, job: PeersJob) -> None:
    """Fork an agent, with torch, for each node that has none."""
    assert job.run_dir is not None
    for name in job.node_names:
        there = contextlib.nullcontext() if job.network is None else job.network.inside(place_of(name))
        with node(name), there:
            if not lab.agent_answers(job.run_dir):
                lab.start_agent(job.run_dir)


def damage(pid: int, every: int = 1) -> int:
    """Flip bits in one byte of `every` of all fragments that a replicator keeps; returns the number changed."""
    seen: set[int] = set()
    damaged = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "memfd:memckpt:fragments" not in os.readlink(fd):
                continue
            region = open(fd, "r+b", buffering=0)  # noqa: SIM115
        except FileNotFoundError:  # the replicator has closed it meanwhile
            continue
        with region:
            inode = os.fstat(region.fileno()).st_ino
            if inode in seen:  # a mapping keeps a descriptor of its own
                continue
            seen.add(inode)
            data = bytearray(region.read())
            data[::every] = bytes(each ^ 0x55 for each in data[::every])
            region.seek(0)
            region.write(data)
            damaged += len(data[::every])
    return damaged


# Attempts


def start(lab: Lab, job: PeersJob) -> list[int]:
    """Run the attempt; returns the exit codes of its ranks."""
    if job.config is not None and (job.config.redo == "eager" or job.network is not None):
        revive_agents(lab, job)
    return killed_ranks.run(lab, job, train)


def bounds(attempt: PeersJob) -> tuple[int, int]:
    """Lowest and highest record that the next attempt may continue from, judged by the notes of one that was killed.

    Lowest: the newest record that any rank knew to be acknowledged. Highest: the newest that all have committed; a
    killed rank may not have noted its last one.
    """
    committed = killed_ranks.noted(attempt, "committed")
    restored = [rank[0]["step"] if rank else 0 for rank in killed_ranks.noted(attempt, "restored")]
    known = [each["acknowledged"] for rank in committed + killed_ranks.noted(attempt, "protected") for each in rank]
    newest = [rank[-1]["step"] + 1 if rank else begin for rank, begin in zip(committed, restored, strict=True)]
    return max([*known, *restored], default=0), min(newest) + 1


def fail(lab: Lab, job: PeersJob, *deaths: killed_ranks.Death) -> PeersJob:
    """Run an attempt in which these die, each for real."""
    attempt = replace(job, deaths=deaths)
    codes = start(lab, attempt)
    assert -signal.SIGKILL in codes, codes
    assert any(killed_ranks.noted(attempt, "killed")), f"nothing died where it was to:\n{told(lab)}"
    return attempt


def goes_on(attempt: PeersJob, low: int, high: int, tier: str | None = "peers", ahead: bool = False) -> int:
    """Check that all ranks resumed at the same step within the bounds, from this tier; returns the step.

    `ahead`: see :func:`check_verdict`.
    """
    restored = killed_ranks.noted(attempt, "restored")
    starts = {rank[0]["step"] if rank else 0 for rank in restored}
    assert len(starts) == 1, f"ranks went on at {sorted(starts)}"
    (begin,) = starts
    assert low <= begin <= high, f"went on at {begin}, expected {low} to {high}"
    tiers = {rank[0]["tier"] for rank in restored if rank}
    assert tier is None or not begin or tiers == {tier}, f"went on from {tiers}, expected {tier}"
    check_verdict(attempt, ahead)
    return begin


def finishes(lab: Lab, attempt: PeersJob, expected: Sequence[Any]) -> None:
    """Run an attempt to its end, which must equal that of the undisturbed training."""
    assert start(lab, attempt) == [0] * attempt.world_size, told(lab)
    killed_ranks.check_same(killed_ranks.results(attempt), expected)


def loses(lab: Lab, job: PeersJob, step: int, who: str = "node1") -> tuple[PeersJob, list[Any]]:
    """Lose nodes in a step, when all of the step before is protected; what the undisturbed training gives, too."""
    expected = killed_ranks.reference(lab, job)
    return fail(lab, replace(job, protected_at=(step - 1,)), killed_ranks.Death(who, step, "backward")), expected


def recovers(lab: Lab, died: PeersJob, expected: Sequence[Any], *found: Any, **changes: Any) -> PeersJob:
    """Run the next attempt to its end. `found`: where it goes on, as for :func:`goes_on`; by default within bounds."""
    last = died.again(lab, **changes)
    finishes(lab, last, expected)
    goes_on(last, *(found or bounds(died)))
    return last


def check_losses(attempt: PeersJob, expected: Sequence[Any]) -> None:
    """Check that the attempt's losses equal those of the undisturbed training."""
    for rank, (steps, theirs) in enumerate(zip(killed_ranks.noted(attempt, "committed"), expected, strict=True)):
        wrong = [each["step"] for each in steps if each["loss"] != theirs["losses"][each["step"]]]
        assert not wrong, f"attempt {attempt.number}, rank {rank}: losses differ at steps {wrong}"


def survives(
    lab: Lab, job: PeersJob, deaths: Sequence[killed_ranks.Death], *, protected_before: int | None = None
) -> PeersJob:
    """Lose nodes, one death per attempt; each attempt resumes at the acknowledged step or later; returns the last one.

    `protected_before`: steps before each death at which ranks wait until they are protected; None: they do not. A node
    lost before all is protected again counts together with earlier ones.
    """
    expected = killed_ranks.reference(lab, job)
    attempt, low, high = job, 0, 0
    for number, death in enumerate([*deaths, None]):
        waits = () if death is None or protected_before is None else (death.step - protected_before,)
        attempt = replace(
            job, directory=killed_ranks.fresh_directory(lab), number=job.number + number, protected_at=waits
        )
        if death is None:
            finishes(lab, attempt, expected)
        else:
            attempt = fail(lab, attempt, death)
        goes_on(attempt, low, high)
        check_losses(attempt, expected)
        low, high = bounds(attempt)
        assert all(step < low for step in waits), "what was protected is not known"
    return attempt


def falls_to_storage(lab: Lab, job: PeersJob, lost: str) -> None:
    """Lose more nodes than tolerated, and check that all ranks resume at step 4, which is in storage."""
    expected = killed_ranks.reference(lab, job)
    died = fail(lab, job, killed_ranks.Death(lost, 7, "backward"))
    last = died.again(lab)
    finishes(lab, last, expected)
    goes_on(last, 4, 4, "storage")
    assert "resuming from storage" in told(lab)


def told(lab: Lab) -> str:
    """All that trainers and agents have logged."""
    agents = "".join(f"{path.name}:\n{path.read_text()}" for path in sorted(lab.run_dir.glob("agent-*.log")))
    return killed_ranks.logs(lab) + agents
