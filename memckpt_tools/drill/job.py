"""The commands of a drilled training, one for each node, and what its sessions are ordered to do. Torch-free."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from memckpt.config import ErasureConfig, MemckptConfig
from memckpt.config.observers import with_observer
from memckpt.errors import DrillError
from memckpt.processes.address import NODE_VARIABLE
from memckpt.processes.handles import ProcessHandle, children_of, parent_of, start_ticks


@dataclass(frozen=True)
class DrillOrders:
    """What a session does while it is drilled: it uses another run directory, and writes a line for each step."""

    directory: Path
    nodes: int = 1

    def variables(self) -> dict[str, str]:
        """What has the sessions of a training observed."""
        return with_observer("memckpt_tools.drill.probe:Probe", str(self.directory), self.nodes)

    @property
    def run_dir(self) -> Path:
        """The run directory, in place of the script's own."""
        return self.directory / "run"

    def lines_of(self, rank: int) -> Path:
        """The file of a rank's lines."""
        return self.directory / f"rank-{rank}.jsonl"

    def configure(self, config: MemckptConfig) -> MemckptConfig:
        """The script's settings, with storage in the run directory; :meth:`repeat` says how a resume is proved.

        A script without peers gets them where nodes are simulated; :attr:`lent_peers` tells the drill.
        """
        storage = config.storage
        if storage is not None:
            storage = replace(storage, url=None, owner=None)
        peers = config.peers
        if peers is None and self.nodes > 1:
            peers = self.peers
            self._lent.touch()
        return replace(
            config, storage=storage, peers=peers, resume_check="witness" if self._unrepeated.exists() else "replay"
        )

    def repeat(self, repeats: bool) -> None:
        """Have the next resume repeat its last step, or go on at once, as all but a script's first resume do.

        What a repeated step puts right by itself a drill finds only where none is repeated.
        """
        if repeats:
            self._unrepeated.unlink(missing_ok=True)
        else:
            self._unrepeated.touch()

    @property
    def _unrepeated(self) -> Path:
        return self.directory / "unrepeated"

    @property
    def peers(self) -> ErasureConfig:
        """Peers for a script that configures none: any one of the nodes may be lost."""
        return ErasureConfig(data=self.nodes - 1, tolerate=1)

    @property
    def lent_peers(self) -> bool:
        """Whether the script of this run configures no peers, and was given :attr:`peers`."""
        return self._lent.exists()

    @property
    def _lent(self) -> Path:
        return self.directory / "lent-peers"


#: Seconds between two looks at lines and processes; a kill is as exact as that.
_POLL_SECONDS = 0.002
#: Seconds that killed processes get to end.
END_SECONDS = 60.0
_TAIL_LINES = 25
_LOOPBACK = "127.0.0.1"


class Command(Protocol):
    """A started command: a ``subprocess.Popen``."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...


Variables = Mapping[str, str | None]
#: Starts the command with these variables beside the environment's, without those that are None, and its output in the
#: file. The command leads a process group of its own.
Start = Callable[[Variables, Path], Command]


class Job:
    """The commands of one run, one for each node. Owns them; `directory` gets their outputs."""

    def __init__(self, start: Start, nodes: int, directory: Path) -> None:
        self._start = start
        self._commands: list[Command] = []
        self.logs = [directory / ("output.txt" if nodes == 1 else f"output-{node_name(i)}.txt") for i in range(nodes)]

    @property
    def nodes(self) -> int:
        return len(self.logs)

    def start(self, variables: Variables) -> None:
        """Start all of them, as a job that replaces the one before."""
        self._commands = []
        with socket.create_server((_LOOPBACK, 0)) as server:  # a port that is free
            port: int = server.getsockname()[1]
        for index, log in enumerate(self.logs):
            self._commands.append(self._start({**variables, **_node_variables(index, self.nodes, port)}, log))

    def poll(self) -> int | None:
        """Exit status: that of the first one that has failed; 0 if all have ended well; None while some run."""
        ends = [command.poll() for command in self._commands]
        failed = [end for end in ends if end]
        if failed:
            return failed[0]
        return None if None in ends else 0

    def command_of(self, pid: int) -> int:
        """Process id of the command to which a process belongs; its own, if it belongs to none."""
        leaders, above = {command.pid for command in self._commands}, pid
        while above > 1:
            if above in leaders:
                return above
            above = parent_of(above)
        return pid

    def kill(self) -> None:
        """Send SIGKILL to the process groups of all commands."""
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM to the process groups of all commands."""
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        for command in self._commands:
            # While a member lives, so does the group, and its number is not given to another one.
            with suppress(ProcessLookupError):
                os.killpg(command.pid, number)

    def wait(self) -> None:
        """Wait until all have ended. Raises DrillError if one does not end."""
        deadline = time.monotonic() + END_SECONDS
        for command in self._commands:
            while command.poll() is None:
                if time.monotonic() > deadline:
                    raise DrillError(f"pid {command.pid} does not end after SIGKILL")
                pause()

    def tail(self) -> str:
        """The last lines of the output of the command that has failed, or of the first one, for a message."""
        ends = [command.poll() for command in self._commands]
        failed = next((index for index, end in enumerate(ends) if end), 0)
        log = self.logs[failed]
        if not log.exists():
            return ""
        lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join([f"; the last lines of its output ({log}):", *lines])


def node_name(index: int) -> str:
    """Name of a simulated node."""
    return f"node{index}"


def _node_variables(index: int, nodes: int, port: int) -> dict[str, str]:
    """Variables of a node's command: those of a rank for a script, and defaults of torchrun's options for torchrun."""
    if nodes == 1:
        return {}
    rank = {"RANK": index, "WORLD_SIZE": nodes, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    place = {"NODE_RANK": index, "GROUP_RANK": index, "MASTER_ADDR": _LOOPBACK, "MASTER_PORT": port}
    torchrun = {"PET_NNODES": nodes, "PET_NODE_RANK": index, "PET_MASTER_ADDR": _LOOPBACK, "PET_MASTER_PORT": port}
    ours: dict[str, str | int] = {NODE_VARIABLE: node_name(index)}
    # Without it torchrun's restarts share one store, where gloo finds the addresses of the dead: docs/operations.md.
    ours["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = 1
    return {name: str(value) for name, value in {**rank, **place, **torchrun, **ours}.items()}


def pause() -> None:
    """Let a moment pass: lines and ends are looked at, as nothing tells when they come."""
    select.select([], [], [], _POLL_SECONDS)


def kill_processes(pids: Collection[int]) -> None:
    """Kill processes, and those that they have started, and wait until all have ended. Raises as :meth:`Job.wait`."""
    with ExitStack() as stack:
        handles = []
        found = list(dict.fromkeys(pids))
        for pid in found:  # grows meanwhile by their descendants
            found += [child for child in children_of(pid) if child not in found]
            with suppress(ProcessLookupError):
                handles.append(stack.enter_context(closing(ProcessHandle.of(pid, start_ticks(pid)))))
        for handle in handles:
            handle.kill()
        for handle in handles:
            if not handle.wait(END_SECONDS):
                raise DrillError(f"pid {handle.pid} does not end after SIGKILL: its state is {handle.state()}")
