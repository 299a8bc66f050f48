"""Machines for a test, each with its own network address, host name and processes, which can be lost as a whole.

A machine is a set of namespaces (network, UTS, PID, mount) whose first process is ours. The kernel ends every process
of a PID namespace with its first one. Requires root.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.cluster.netns import Network
from tests.support.cluster.processes import children

#: The first process: sets the host name, then reaps orphans until its input ends.
_INIT = """
import os, signal, socket, sys
def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
socket.sethostname(sys.argv[1])
signal.signal(signal.SIGCHLD, reap)
print("up", flush=True)
while sys.stdin.read(1):
    pass
"""


class Machines(Network):
    """Machines 0 to n - 1; a context manager, whose end ends them.

    `mounts`: by path, a directory to mount there on a machine; `%h` in it is the host name.
    """

    def __init__(self, names: Sequence[str], mounts: dict[str, str] | None = None) -> None:
        super().__init__(len(names))
        self.names = list(names)
        self._mounts = mounts or {}
        self._inits: dict[int, subprocess.Popen[str]] = {}

    def _build(self) -> None:
        super()._build()
        for node in range(len(self.names)):
            self.boot(node)

    def boot(self, node: int) -> None:
        """Start a machine that is down; nothing runs on it."""
        name = self.names[node]
        binds = []
        for place, directory in self._mounts.items():
            there = Path(directory.replace("%h", name))
            there.mkdir(parents=True, exist_ok=True)
            binds.append(f"mount --bind {there} {place} && ")
        inside = f"{''.join(binds)}exec {sys.executable} -S -c '{_INIT}' {name}"
        command = ["unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", inside]
        init = subprocess.Popen(
            super().command(node, command),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._inits[node] = init
        if init.stdout.readline() != "up\n":
            raise OSError(f"machine {name} does not start")

    def know_each_other(self, hosts: Path) -> None:
        """Give the running machines an /etc/hosts with all names, made at `hosts`."""
        lines = [f"{address} {name}" for address, name in zip(self.addresses, self.names, strict=True)]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        for node in self._inits:
            self.run(node, ["mount", "--bind", str(hosts), "/etc/hosts"]).check_returncode()

    def init(self, node: int) -> int:
        """Process id, outside, of the machine's first process."""
        (pid,) = children(self._inits[node].pid)
        return pid

    def lose(self, node: int) -> None:
        """End all its processes, and with them its memory, at once."""
        first = self.init(node)
        with self._inits.pop(node):
            os.kill(first, signal.SIGKILL)

    def command(self, node: int, arguments: Sequence[str]) -> list[str]:
        """The command that runs a program on a machine, as a child of the process that this command becomes."""
        where = ["--net", "--uts", "--pid", "--mount"]
        return ["nsenter", "--target", str(self.init(node)), *where, *arguments]

    def run(self, node: int, arguments: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program on a machine to its end."""
        options.setdefault("timeout", 60)
        return subprocess.run(self.command(node, arguments), capture_output=True, text=True, **options)

    def processes(self, node: int) -> dict[int, str]:
        """Command lines of all processes of a machine, by their ids outside."""
        inside = Path(f"/proc/{self.init(node)}/ns/pid").readlink()
        found = {}
        for each in Path("/proc").iterdir():
            try:
                if each.name.isdigit() and (each / "ns/pid").readlink() == inside:
                    found[int(each.name)] = (each / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                continue  # it has ended meanwhile
        return found

    def close(self) -> None:
        for node in list(self._inits):
            self.lose(node)
        super().close()
