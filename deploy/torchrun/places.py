"""N places for the nodes of a run: further nodes are spares, which start when a place becomes free.

    python places.py serve --places 4 --port 29401 --store-port 29400          # on a machine that is no node of the run
    python places.py take --at HOST:29401 -- torchrun --nnodes=4 ...           # on each node, spare ones too

Starting more torchruns than --nnodes does not make spare nodes: when a rank dies, all of them compete for the N places
of the next round, and those left waiting make the others restart, again and again. So a torchrun is started only when
it has a place. A place becomes free when its torchrun fails or its node is lost; a torchrun that succeeds keeps it. A
node that has lost its place ends its torchrun. `serve` can also host the store of torchrun's rendezvous, so that every
node of the run may be lost. See docs/recipes/torchrun.md
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time

GO, DONE, OVER = b"go\n", b"done\n", b"no\n"
#: A connection is dead after idle + interval x probes = 15 s of silence, the time that torchrun's rendezvous waits.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 2, socket.TCP_USER_TIMEOUT: 15_000}
#: Seconds for torchrun to end its workers (30 s) and itself.
_END_SECONDS = 45.0
_CONNECT_SECONDS = 10.0
_AGAIN_SECONDS = 1.0


def watch_over(connection: socket.socket) -> None:
    """Enable TCP keep-alive, so that a lost peer is noticed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Places:
    """Nodes with a place, and nodes that wait for one. Owns their connections."""

    def __init__(self, listener: socket.socket, places: int) -> None:
        self._listener = listener
        self._free = places
        self._waiting: list[socket.socket] = []
        self._placed: list[socket.socket] = []
        self._done: list[socket.socket] = []

    def serve(self) -> None:
        """Assign places; never returns."""
        while True:
            for ready in select.select([self._listener, *self._waiting, *self._placed, *self._done], [], [])[0]:
                if ready is self._listener:
                    self._take_in()
                else:
                    self._hear(ready)
            self._give()

    def _take_in(self) -> None:
        connection, (host, *_) = self._listener.accept()
        watch_over(connection)
        self._waiting.append(connection)
        print(f"{host} asks for a place", flush=True)

    def _hear(self, connection: socket.socket) -> None:
        try:
            said = connection.recv(16)
        except OSError as error:  # its machine or the network is lost
            print(f"a node is not heard any more: {error.strerror}", flush=True)
            said = b""
        if said == DONE and connection in self._placed:
            self._placed.remove(connection)
            self._done.append(connection)
            return
        connection.close()
        if connection in self._placed:
            self._placed.remove(connection)
            self._free += 1
            print("a place falls free", flush=True)
        for others in (self._waiting, self._done):
            if connection in others:
                others.remove(connection)

    def _give(self) -> None:
        if not self._free and not self._placed:
            for connection in self._waiting:
                print("a node waits for a place, and the run has ended: serve the next one anew", flush=True)
                with contextlib.suppress(OSError):  # it is gone, which is heard next
                    connection.sendall(OVER)
            self._done += self._waiting
            self._waiting = []
        while self._free and self._waiting:
            connection = self._waiting.pop(0)
            try:
                connection.sendall(GO)
            except OSError:
                connection.close()
                continue
            self._free -= 1
            self._placed.append(connection)


def serve(args: argparse.Namespace) -> None:
    if args.store_port is not None:
        import torch.distributed as dist

        store = dist.TCPStore("0.0.0.0", args.store_port, is_master=True, wait_for_workers=False)
        print(f"torchrun's store is on port {store.port}", flush=True)
    with socket.create_server(("", args.port), backlog=1024) as listener:
        print(f"{args.places} places are given on port {listener.getsockname()[1]}", flush=True)
        Places(listener, args.places).serve()


def ask(at: str) -> socket.socket:
    """Connect to the server; retries until it is started."""
    host, _, port = at.rpartition(":")
    said = False
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS)
        except OSError as error:
            if not said:
                print(f"places.py: {at} gives no places yet ({error}); it is asked again", file=sys.stderr, flush=True)
            said = True
            time.sleep(_AGAIN_SECONDS)  # nothing tells when another machine begins to listen


def take(args: argparse.Namespace) -> int:
    """Wait for a place and run the command. Returns its exit status, or 75 if the place was lost."""
    with ask(args.at) as connection:
        watch_over(connection)
        connection.settimeout(None)
        said = connection.recv(len(GO))
        if said == OVER:
            over = f"the run of {args.at} has ended; for the next one start `places.py serve` anew"
            print(f"places.py: {over}", file=sys.stderr, flush=True)
            said = connection.recv(len(GO))
        if said != GO:
            print("places.py: who gives the places is gone", file=sys.stderr)
            return 75  # EX_TEMPFAIL: a service manager restarts it
        command = subprocess.Popen(args.command)
        for told in (signal.SIGTERM, signal.SIGINT):
            signal.signal(told, lambda number, _: command.send_signal(number))
        ended = os.pidfd_open(command.pid)
        if ended not in select.select([ended, connection.fileno()], [], [])[0]:
            print("places.py: the place is lost; the command is ended", file=sys.stderr)
            command.terminate()
            try:
                command.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                command.kill()
                command.wait()
            return 75
        status = command.wait()
        if status == 0:
            connection.sendall(DONE)
        return status if status >= 0 else 128 - status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    orders = parser.add_subparsers(required=True)
    serving = orders.add_parser("serve", help="give the places; until it is ended")
    serving.add_argument("--places", type=int, required=True)
    serving.add_argument("--port", type=int, required=True, help="on which nodes ask; 0: any that is free")
    serving.add_argument("--store-port", type=int, help="also have torchrun's store, on this port")
    serving.set_defaults(do=serve)
    taking = orders.add_parser("take", help="run a command when there is a place for it")
    taking.add_argument("--at", required=True, metavar="HOST:PORT")
    taking.add_argument("command", nargs="+")
    taking.set_defaults(do=take)
    args = parser.parse_args()
    return args.do(args) or 0


if __name__ == "__main__":
    sys.exit(main())
