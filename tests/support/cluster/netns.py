"""A network for a test: nodes in network namespaces, joined by a bridge, with cables that can be cut or slowed down.

It is made as root, or else inside a user namespace; if neither is permitted, :func:`problem` says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

_TOOLS = ("unshare", "nsenter", "ip", "tc")
_COMMAND_SECONDS = 30.0
_CLONE_NEWNET = 0x40000000


class Network:
    """Nodes 0 to n - 1, each in a network namespace; a context manager."""

    def __init__(self, nodes: int) -> None:
        self.addresses = [f"10.77.0.{node + 1}" for node in range(nodes)]
        self._root = os.geteuid() == 0
        self._keepers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Network:
        try:
            self._build()
        except BaseException:  # nobody else owns these processes
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> None:
        hub = self._keep(["unshare", "--net"] if self._root else ["unshare", "--user", "--map-root-user", "--net"])
        self._hub = hub
        self._in(hub, "ip link add hub type bridge")
        self._in(hub, "ip link set hub up")
        self._nodes = [self._keep([*self._enter(hub), "unshare", "--net"]) for _ in self.addresses]
        for node, address in enumerate(self.addresses):
            keeper = self._nodes[node]
            self._in(hub, f"ip link add cable{node} type veth peer name eth0 netns {keeper}")
            self._in(hub, f"ip link set cable{node} master hub up")
            self._in(keeper, "ip link set lo up")
            self._in(keeper, f"ip addr add {address}/24 dev eth0")
            self._in(keeper, "ip link set eth0 up")

    def _keep(self, command: Sequence[str]) -> int:
        """Start a process that keeps a namespace until its input ends; returns its id."""
        keeper = subprocess.Popen(
            [*command, "sh", "-c", "echo $$; exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._keepers.append(keeper)
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        line = keeper.stdout.readline()
        if not line:
            raise OSError(f"no network namespace: {keeper.stderr.read().strip()}")
        return int(line)

    def _enter(self, keeper: int) -> list[str]:
        user = [] if self._root else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(keeper), *user, "--net"]

    def _in(self, keeper: int, command: str) -> None:
        done = subprocess.run(
            [*self._enter(keeper), *command.split()], capture_output=True, text=True, timeout=_COMMAND_SECONDS
        )
        if done.returncode:
            raise OSError(f"{command}: {done.stderr.strip()}")

    # Programs

    def command(self, node: int, arguments: Sequence[str]) -> list[str]:
        """The command that runs a program on a node; it becomes that program, under the same process id."""
        return [*self._enter(self._nodes[node]), *arguments]

    def popen(self, node: int, arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program on a node; the caller ends it."""
        return subprocess.Popen(self.command(node, arguments), **options)

    @contextlib.contextmanager
    def inside(self, node: int) -> Iterator[None]:
        """Move this thread to a node: sockets, processes and threads that it makes stay there. Requires root."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            there = os.open(f"/proc/{self._nodes[node]}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                _set_namespace(there)
            finally:
                os.close(there)
            try:
                yield
            finally:
                _set_namespace(before)
        finally:
            os.close(before)

    # Cables

    def cut(self, *nodes: int) -> None:
        """Silently drop traffic to and from these nodes."""
        self._set(nodes, "nomaster")

    def mend(self, *nodes: int) -> None:
        """Carry their traffic again."""
        self._set(nodes, "master hub")

    def unplug(self, *nodes: int) -> None:
        """Unplug the cables: the nodes see that there is no link."""
        self._set(nodes, "down")

    def plug(self, *nodes: int) -> None:
        self._set(nodes, "up")

    def _set(self, nodes: Sequence[int], state: str) -> None:
        for node in nodes:
            self._in(self._hub, f"ip link set cable{node} {state}")

    def limit(self, node: int, bits_per_second: int) -> None:
        """Limit a node's bandwidth in both directions."""
        # A bucket of 10 ms, and a queue of 50 ms.
        burst = max(bits_per_second // 800, 16 << 10)
        shape = f"root tbf rate {bits_per_second}bit burst {burst} latency 50ms"
        self._in(self._nodes[node], f"tc qdisc replace dev eth0 {shape}")
        self._in(self._hub, f"tc qdisc replace dev cable{node} {shape}")

    def unlimit(self, node: int) -> None:
        self._in(self._nodes[node], "tc qdisc del dev eth0 root")
        self._in(self._hub, f"tc qdisc del dev cable{node} root")

    def close(self) -> None:
        """End the namespaces, except those in which a program still runs."""
        for keeper in reversed(self._keepers):
            with keeper:
                keeper.kill()
        self._keepers.clear()


def _set_namespace(file: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(file, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns failed")


@functools.cache
def problem(as_root: bool = False) -> str | None:
    """Reason why there can be no such network here, or None; `as_root`: with :meth:`Network.inside`."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} here"
    if as_root and os.geteuid() != 0:
        return "moving a thread into a network namespace requires root"
    try:
        with Network(1) as network:
            network.limit(0, 10**9)
            if as_root:
                with network.inside(0):
                    pass
    except OSError as error:
        return f"no network namespaces here: {error}"
    return None
