"""Injects each kind of fault into a cluster, ends those that last, and counts what was injected and survived."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from memckpt.agent.saving import writer
from memckpt.replication import process as replicator
from memckpt.storage.catalog import Key, read_catalog
from memckpt.storage.local_store import LocalStore
from tests.faults.cluster import Cluster, alive
from tests.faults.kinds import INJECTED, Kind
from tests.support.cluster.peers_lab import damage
from tests.support.cluster.processes import kill_and_wait

#: Bits a second of a slow link; milliseconds of a slow disk's answer.
SLOW_BITS_PER_SECOND, SLOW_DISK_SECONDS = 4_000_000, 0.5
#: One byte of so many of a replicator's fragments is damaged.
_DAMAGED_EVERY = 5000

End = Callable[[], None]


def nothing() -> None:
    """The end of a fault that has none."""


class DiskSwitch:
    """Says how the disk of processes answers that are started inside :meth:`installed`."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def answer(self, how: str) -> None:
        written = self._file.with_suffix(".new")
        written.write_text(how)
        written.replace(self._file)

    @contextlib.contextmanager
    def installed(self) -> Iterator[DiskSwitch]:
        found = os.pathsep.join(filter(None, [str(Path(__file__).parent / "disk"), os.environ.get("PYTHONPATH")]))
        with mock.patch.dict(os.environ, {"PYTHONPATH": found, "MEMCKPT_TEST_DISK": str(self._file)}):
            yield self


@dataclass
class Lasting:
    """A fault that lasts until its end is called."""

    kind: Kind
    target: int
    end: End


class Injector:
    """Faults on a cluster and its storage; `chance` chooses victims, bytes and signals."""

    def __init__(self, cluster: Cluster, store: Path, disk: DiskSwitch, chance: random.Random) -> None:
        self.cluster, self.store, self._disk, self._chance = cluster, store, disk, chance
        self.injected: Counter[Kind] = Counter()  # those that took place
        self.survived: Counter[Kind] = Counter()  # training went on, with all states equal bit for bit
        self.lasting: list[Lasting] = []
        #: Agents that were told to end, by node: they save first, and may be here for a while.
        self._leaving: list[tuple[int, int]] = []
        #: Keys of checkpoints that were damaged.
        self._damaged: set[Key] = set()
        #: Faults that no step has followed yet, with the attempt of each, and the step that has to follow in that one.
        self._open: list[tuple[Kind, int, int]] = []
        self._do: dict[Kind, Callable[[int], End | None]] = {
            Kind.KILL_TRAINER: lambda node: self._kill(cluster.pid_of(node)) if self._begun() else None,
            Kind.KILL_RESUMING: lambda node: None if self._begun() else self._kill(cluster.pid_of(node)),
            Kind.KILL_TRAINERS: self._kill_trainers,
            Kind.KILL_AGENT: self._kill_agent,
            Kind.KILL_REPLICATOR: self._kill_replicator,
            Kind.KILL_WRITER: lambda node: self._kill(next(iter(cluster.helpers_of(node, writer.__name__)), None)),
            Kind.TERMINATE_AGENT: self._terminate_agent,
            Kind.STOP_TRAINER: lambda node: self._stop(cluster.pid_of(node)),
            Kind.STOP_AGENT: lambda node: self._stop_weakening(node, cluster.agent_of(node)),
            Kind.STOP_REPLICATOR: lambda node: self._stop_weakening(node, self._replicator(node)),
            Kind.LOSE_NODE: lambda node: self._lose([node]),
            Kind.LOSE_NODES: self._lose_several,
            Kind.CUT_NETWORK: self._cut,
            Kind.SLOW_LINK: self._slow,
            Kind.DISK_FULL: lambda node: self._fail_disk("full"),
            Kind.DISK_SLOW: lambda node: self._fail_disk(f"slow {SLOW_DISK_SECONDS}"),
            Kind.DISK_ERRORS: lambda node: self._fail_disk("errors"),
            Kind.DAMAGE_STORED: lambda node: self._damage_stored(),
            Kind.DAMAGE_FRAGMENTS: self._damage_fragments,
            Kind.GARBAGE_TO_AGENT: self._garbage_to_agent,
            Kind.GARBAGE_TO_REPLICATOR: self._garbage_to_replicator,
        }
        assert set(self._do) == set(INJECTED)

    def inject(self, kind: Kind, node: int | None = None) -> bool:
        """Inject a fault now; False if there is nothing that it could befall."""
        node = self._chance.choice(self.cluster.nodes) if node is None else node
        if any(each.kind is kind and each.target == node for each in self.lasting):
            return False
        end = self._do[kind](node)
        if end is None:
            return False
        self.injected[kind] += 1
        self._open.append((kind, self.cluster.attempts, self.cluster.model.newest + 1))
        if end is not nothing:
            self.lasting.append(Lasting(kind, node, end))
        return True

    def end(self, fault: Lasting) -> None:
        self.lasting.remove(fault)
        fault.end()

    def end_all(self) -> None:
        for fault in list(self.lasting):
            self.end(fault)

    def count_survived(self) -> None:
        """Count the faults that all ranks have trained past, whose every state since has been compared."""
        model = self.cluster.model
        trained = min((model.committed.get(rank, 0) for rank in self.cluster.nodes), default=0)
        trains = self.cluster.running or self.cluster.finished
        if not trains or model.attempt != self.cluster.attempts - 1:
            return
        waiting = []
        for kind, attempt, step in self._open:
            # A later attempt may have gone back: its first step follows the fault, too.
            if trained >= (step if attempt == self.cluster.attempts else model.begun_at + 1):
                self.survived[kind] += 1
            else:
                waiting.append((kind, attempt, step))
        self._open = waiting

    # Processes

    def _kill(self, pid: int | None) -> End | None:
        if pid is None:
            return None
        try:
            kill_and_wait(pid)
        except ProcessLookupError:
            return None  # it has ended by itself
        return nothing

    def _begun(self) -> bool:
        """Whether the ranks of this attempt have all resumed."""
        return self.cluster.model.attempt == self.cluster.attempts - 1

    def _kill_trainers(self, node: int) -> End | None:
        ends = [self._kill(self.cluster.pid_of(rank)) for rank in self.cluster.nodes]
        return nothing if any(ends) else None

    def _kill_agent(self, node: int) -> End | None:
        end = self._kill(self.cluster.agent_of(node))
        if end is not None:
            self._weaken(node)
        return end

    def _kill_replicator(self, node: int) -> End | None:
        end = self._kill(self._replicator(node))
        if end is not None:
            self.cluster.drain()
            self.cluster.model.end_replicator(node)
        return end

    def _terminate_agent(self, node: int) -> End | None:
        pid = self.cluster.agent_of(node)
        if pid is None:
            return None
        os.kill(pid, signal.SIGTERM)
        self._leaving.append((node, pid))
        self.cluster.drain()
        self.cluster.model.end_agent(node, pid)
        return nothing

    def _weaken(self, *nodes: int, lasting: bool = False) -> None:
        """The model counts these nodes as weak; what ranks have said before is read first."""
        self.cluster.drain()
        self.cluster.model.weaken(nodes, lasting)

    def _stop(self, pid: int | None, then: End = nothing) -> End | None:
        if pid is None:
            return None
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        signal.pidfd_send_signal(handle, signal.SIGSTOP)

        def go_on() -> None:
            with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
                signal.pidfd_send_signal(handle, signal.SIGCONT)
            os.close(handle)
            then()

        return go_on

    def _stop_weakening(self, node: int, pid: int | None) -> End | None:
        """Stop an agent, or a replicator: that is killed if it stands still for long, and others do not wait for it."""
        end = self._stop(pid, lambda: self.cluster.model.strengthen(node))
        if end is not None:
            self._weaken(node, lasting=True)
        return end

    def _replicator(self, node: int) -> int | None:
        return next(iter(self.cluster.helpers_of(node, replicator.__name__)), None)

    def _lose(self, nodes: list[int]) -> End | None:
        """Kill all processes of nodes at once; their shared memory goes with them."""
        pids = [self.cluster.pid_of(node) for node in nodes] + [self.cluster.agent_of(node) for node in nodes]
        pids += [pid for node, pid in self._leaving if node in nodes and alive(pid)]
        for pid in pids:
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        ends = [self._kill(pid) for pid in pids]
        self._weaken(*nodes)
        return nothing if any(ends) else None

    def _lose_several(self, node: int) -> End | None:
        more = self.cluster.model.tolerated + 1
        if more > len(self.cluster.nodes):
            return None
        return self._lose(self._chance.sample(self.cluster.nodes, more))

    # Network, disk, bytes

    def _cut(self, node: int) -> End | None:
        network = self.cluster.network
        if network is None:
            return None
        network.cut(node)
        self.cluster.model.apart.add(node)

        def mend() -> None:
            network.mend(node)
            self.cluster.model.apart.discard(node)

        return mend

    def _slow(self, node: int) -> End | None:
        network = self.cluster.network
        if network is None:
            return None
        network.limit(node, SLOW_BITS_PER_SECOND)
        return lambda: network.unlimit(node)

    def _fail_disk(self, how: str) -> End | None:
        disk = (Kind.DISK_FULL, Kind.DISK_SLOW, Kind.DISK_ERRORS)
        if any(each.kind in disk for each in self.lasting):
            return None
        self._disk.answer(how)
        return lambda: self._disk.answer("")

    def _damage_stored(self) -> End | None:
        """Flip a bit in a file of the newest checkpoint, unless there is no other one that is whole.

        Where none is whole a start is refused, for the user to decide.
        """
        complete = read_catalog(LocalStore(self.store)).complete
        if len(complete) < 2 or any(each.key in self._damaged for each in complete):
            return None
        newest = max(complete, key=lambda each: each.step)
        path = self.store / self._chance.choice(newest.part_files).path
        self.cluster.model.damage_stored(newest.step)
        self._damaged.add(newest.key)
        try:
            with path.open("r+b") as file:
                place = self._chance.randrange(max(1, path.stat().st_size))
                file.seek(place)
                byte = file.read(1)
                file.seek(place)
                file.write(bytes([byte[0] ^ 1 << self._chance.randrange(8)]))
        except FileNotFoundError:
            return None  # retention has deleted it meanwhile
        return nothing

    def _damage_fragments(self, node: int) -> End | None:
        pid = self._replicator(node)
        if pid is None or not damage(pid, _DAMAGED_EVERY):
            return None
        self._weaken(node)
        return nothing

    def _garbage_to_agent(self, node: int) -> End | None:
        """A process of the same user connects, and sends what is no message."""
        if any(each.kind is Kind.STOP_AGENT and each.target == node for each in self.lasting):
            return None
        with self.cluster.there(node):
            sock = self.cluster.address(node).connect() if self.cluster.agent_of(node) is not None else None
        if sock is None:
            return None
        with sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is shown the door
            for _ in range(self._chance.randrange(1, 5)):
                sock.send(self._chance.randbytes(self._chance.randrange(1, 2000)), socket.MSG_DONTWAIT)
        return nothing

    def _garbage_to_replicator(self, node: int) -> End | None:
        """A stranger connects to the port for peers, and sends bytes."""
        pid = self._replicator(node)
        found = [] if pid is None else _listening(pid)
        if not found:
            return None
        with self.cluster.there(node), socket.socket() as sock:
            sock.settimeout(5.0)
            with contextlib.suppress(OSError):  # it does not talk with strangers
                sock.connect(found[0])
                sock.sendall(self._chance.randbytes(self._chance.randrange(1, 4000)))
                select.select([sock], [], [], 0.05)
        return nothing


def _listening(pid: int) -> list[tuple[str, int]]:
    """Addresses on which a process accepts TCP connections."""
    inodes = set[str]()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
        lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
        found = [line[1].split(":") for line in lines if line[3] == "0A" and line[9] in inodes]
        return [(socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)) for host, port in found]
    return []
