"""Who may connect: answers ZeroMQ's questions about keys (ZAP), and counts who has failed at the door."""

from __future__ import annotations

from collections import Counter

import zmq
from zmq.utils import z85

from memckpt.replication.transport.keys import Keys, Password
from memckpt.replication.transport.sockets import USERNAME, Context, Socket

_NOBLOCK = int(zmq.NOBLOCK)
_ZAP = "inproc://zeromq.zap.01"
_MONITOR = "inproc://monitor"
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
# Number of unread failures at which the thread that reports them waits.
_UNREAD_FAILURES = 100_000


class Doorkeeper:
    """Lets in who has the client's key, or the password. Its sockets are the context's, which closes them.

    Args:
        context: context of the sockets that it answers for; the doorkeeper is made before they are bound.
        keys: or a password; None: there is nothing to ask.
        refused: counts, by reason: "unauthenticated" is another client's key, or password, "handshake" are garbage, the
            wrong server's key, and clients without either.
    """

    def __init__(self, context: Context, keys: Keys | Password | None, refused: Counter[str]) -> None:
        self.sockets: list[Socket] = []
        self._context = context
        self._refused = refused
        self._questions: Socket | None = None
        self._failures: Socket | None = None
        if keys is not None:
            self._allowed = (
                [b"PLAIN", USERNAME, keys.word.encode()]
                if isinstance(keys, Password)
                else [b"CURVE", z85.decode(keys.client_public.encode())]
            )
            self._questions = context.socket(zmq.REP)
            self._questions.linger = 0
            self._questions.bind(_ZAP)
            self.sockets.append(self._questions)

    def watch(self, socket: Socket) -> None:
        """Count the connections that fail on a socket that is about to be bound."""
        socket.monitor(_MONITOR, _FAILED)
        self._failures = self._context.socket(zmq.PAIR)
        self._failures.linger = 0
        self._failures.rcvhwm = _UNREAD_FAILURES
        self._failures.connect(_MONITOR)
        self.sockets.append(self._failures)

    def attend(self) -> None:
        """Answer all questions that are there."""
        while (question := _read(self._questions)) is not None:
            self._answer(question)
        while _read(self._failures) is not None:
            self._refused["handshake"] += 1

    def _answer(self, question: list[bytes]) -> None:
        assert self._questions is not None
        # version, request, domain, address, identity, mechanism, credentials
        welcome = question[5:] == self._allowed
        if not welcome:
            self._refused["unauthenticated"] += 1
        status = [b"200", b"OK"] if welcome else [b"400", b"unknown key"]
        self._questions.send_multipart([question[0], question[1], *status, b"", b""])


def _read(socket: Socket | None) -> list[bytes] | None:
    if socket is None:
        return None
    try:
        return socket.recv_multipart(_NOBLOCK)
    except zmq.Again:
        return None
