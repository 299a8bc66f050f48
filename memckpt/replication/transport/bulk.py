"""Payloads beside their messages, on lanes: TCP connections that go one way, each with a key of its own.

A message goes over its link, and names its payload by a ticket: lane, number, bytes. Here nothing is repeated: who
finds a payload lost, or changed on its way, drops the message, and the link sends both again.

Whoever connects has to show the attempt's key before he may send more than 64 bytes. Both ends make HMACs of random
bytes of both under it; one of them is the lane's key (as HKDF does, RFC 5869). So no two lanes share a key.

Payloads are sealed by AES-256-GCM with nonces by counter (NIST SP 800-38D, section 8.2.1). The fixed field is empty: a
key has one lane and one direction. The invocation field is the payload's number in it, which no two have: what is sent
again has another. Both ends count (as in TLS 1.3), so that one that comes twice does not open. The message is the
associated data: whose record's which fragments these bytes are.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import select
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterator

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from memckpt.protocol.replication import PeerKeys
from memckpt.replication.transport.links import Pieces

_log = logging.getLogger("memckpt.replicator")
_ID_BYTES, _WORD_BYTES, _TAG_BYTES = 16, 32, 16
_HEAD, _TICKET, _NONCE = struct.Struct("!I"), struct.Struct("!16sQI"), struct.Struct("!4xQ")
#: Connections that have not shown the key: of more the oldest is closed. And lanes, and payloads that wait for one.
_MOST_STRANGERS, _MOST_LANES, _MOST_WAITING = 64, 1024, 4096


def _words(secret: bytes, *said: bytes) -> tuple[bytes, bytes, bytes]:
    """What proves that one knows the secret, of who connects and who listens, and a lane's key."""
    root = hmac.digest(secret, b"".join(said), "sha256")
    hello, welcome, key = (hmac.digest(root, use, "sha256") for use in (b"hello", b"welcome", b"seal"))
    return hello, welcome, key


def _link_id(incarnation: str) -> bytes:
    return hashlib.sha256(incarnation.encode()).digest()[:_ID_BYTES]


class _End(ABC):
    """One end of a connection: what it is told goes to the memory that its conversation names next; none: it waits."""

    def __init__(self, bulk: Bulk, sock: socket.socket) -> None:
        self._bulk, self._sock, self.closed = bulk, sock, False
        self.until = time.monotonic() + bulk.patience
        self._wakes_at = 1
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A cut network shows while something is on its way.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(bulk.patience * 1000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        bulk.ends[sock.fileno()] = self
        bulk.poll.register(sock, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
        self._conversation = self._talk()
        self._place = memoryview(bytearray(1))

    @abstractmethod
    def _talk(self) -> Iterator[memoryview]:
        """The conversation of this end: it yields the memory in which it wants what comes next."""

    def work(self) -> None:
        """Read and write what can be."""
        try:
            while self._place.nbytes:
                count = self._sock.recv_into(self._place)
                self._place = self._place[count:]
                if not count:
                    self.close()
                elif not self._place.nbytes:
                    self._go_on()
        except BlockingIOError:
            if self._place.nbytes != self._wakes_at:  # not for every packet of a payload
                self._wakes_at = self._place.nbytes
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, self._wakes_at)
        except OSError:
            self.close()

    def _go_on(self) -> None:
        place = next(self._conversation, None)
        if place is None:
            self.close()
        else:
            self._place = place

    def close(self) -> None:
        if not self.closed:
            self.closed, self._place = True, memoryview(b"")
            del self._bulk.ends[self._sock.fileno()]
            self._sock.close()


class Incoming(_End):
    """A lane on which a peer sends, or a stranger who wants one. A payload is read ahead, into memory of the lane."""

    def __init__(self, bulk: Bulk, sock: socket.socket) -> None:
        super().__init__(bulk, sock)
        self.link = self._lane = b""
        self._number, self._wanted = -1, 0
        self._here = self._lent = False
        self._go_on()

    def _talk(self) -> Iterator[memoryview]:
        bulk, challenge, said = self._bulk, os.urandom(_WORD_BYTES), bytearray(2 * _ID_BYTES + _WORD_BYTES)
        self._sock.send(challenge)
        yield memoryview(said)
        names = bytes(said[: 2 * _ID_BYTES])
        hello, welcome, self._key = _words(bulk.secret, challenge, names, bulk.address.encode())
        has_key = hmac.compare_digest(hello, said[2 * _ID_BYTES :])
        if not has_key or not bulk.admit(self, names[:_ID_BYTES]):
            bulk.strangers.remove(self)
            bulk.refused["too many lanes" if has_key else "unauthenticated"] += 1
            return
        self._lane = names[_ID_BYTES:]
        self._sock.send(welcome)
        head, memory = bytearray(_HEAD.size), bytearray()
        while True:
            self._number += 1
            yield memoryview(head)
            (nbytes,) = _HEAD.unpack(head)
            if not 0 < nbytes <= bulk.max_bytes + _TAG_BYTES:
                bulk.refused["malformed"] += 1
                return
            if nbytes > len(memory):
                memory = bytearray(nbytes)
            self._sealed = memoryview(memory)[:nbytes]
            yield self._sealed
            if self._number >= self._wanted:
                self._here = True
                yield memoryview(b"")
                self._here = self._lent = False

    def take_payload(self, lane: bytes, number: int, nbytes: int, said: bytes) -> memoryview | str | None:
        """A payload, lent until :meth:`give_back`; why it is lost; None: it is not here yet."""
        if lane != self._lane or number < self._number + self._lent:
            return "payload lost"
        self._wanted = number
        if self._here and self._number < number and not self._lent:
            self.give_back()
        if not self._here or self._number < number:
            return None
        if len(self._sealed) != nbytes + _TAG_BYTES * self._bulk.sealed or not self._open(said):
            self.close()
            return "tampered"
        self._lent = True
        return self._sealed[:nbytes]

    def _open(self, said: bytes) -> bool:
        if self._bulk.sealed:
            payload, tag = self._sealed[:-_TAG_BYTES], bytes(self._sealed[-_TAG_BYTES:])
            opening = Cipher(AES(self._key), GCM(_NONCE.pack(self._number))).decryptor()
            opening.authenticate_additional_data(said)
            opening.update_into(payload, payload)
            try:
                opening.finalize_with_tag(tag)
            except InvalidTag:
                return False
        return True

    def give_back(self) -> None:
        """Read the next payload: the last one has been used, or nobody wants it."""
        if not self.closed:
            self._go_on()
            self.work()

    def close(self) -> None:
        super().close()
        self._bulk.forget(self)


class Lane(_End):
    """A lane on which we send. Payloads are sealed when their turn comes, and must not change before."""

    def __init__(self, bulk: Bulk, link: bytes, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        [(family, kind, _, _, where), *_] = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
        super().__init__(bulk, socket.socket(family, kind))
        self.ready = False
        self._names, self._address = link + os.urandom(_ID_BYTES), address.encode()
        self._number = 0
        self._waiting: deque[tuple[int, Pieces, bytes]] = deque()
        self._rest: list[memoryview] = []
        self._memory = memoryview(b"")
        self._go_on()
        self._sock.connect_ex(where)

    def _talk(self) -> Iterator[memoryview]:
        said = bytearray(_WORD_BYTES)
        yield memoryview(said)
        hello, welcome, self._key = _words(self._bulk.secret, bytes(said), self._names, self._address)
        self._sock.send(self._names + hello)
        yield memoryview(said)
        self.ready = hmac.compare_digest(said, welcome)
        if self.ready:
            yield memoryview(said)  # nothing comes on a lane: its end shows
        else:
            self._bulk.refused["unauthenticated"] += 1

    def ticket(self, nbytes: int) -> bytes | None:
        if not self.ready or self.closed or len(self._waiting) >= _MOST_WAITING:
            return None
        return _TICKET.pack(self._names[_ID_BYTES:], self._number, nbytes)

    def put(self, pieces: Pieces, said: bytes) -> None:
        self._waiting.append((self._number, pieces, said))
        self._number += 1
        self._write()

    def work(self) -> None:
        super().work()
        self._write()

    def _write(self) -> None:
        try:
            while not self.closed and (self._rest or self._waiting):
                self._rest = self._rest or self._seal(*self._waiting.popleft())
                count = self._sock.sendmsg(self._rest)
                while self._rest and count >= self._rest[0].nbytes:
                    count -= self._rest.pop(0).nbytes
                if count:
                    self._rest[0] = self._rest[0][count:]
        except BlockingIOError:
            return
        except OSError:
            self.close()

    def _seal(self, number: int, pieces: Pieces, said: bytes) -> list[memoryview]:
        nbytes = sum(map(len, pieces))
        if not self._bulk.sealed:
            return [memoryview(_HEAD.pack(nbytes)), *(memoryview(piece) for piece in pieces)]
        whole = _HEAD.size + nbytes + _TAG_BYTES
        if whole > len(self._memory):
            self._memory = memoryview(bytearray(whole))
        sealing = Cipher(AES(self._key), GCM(_NONCE.pack(number))).encryptor()
        sealing.authenticate_additional_data(said)
        _HEAD.pack_into(self._memory, 0, nbytes + _TAG_BYTES)
        at = _HEAD.size
        for piece in pieces:
            at += sealing.update_into(piece, self._memory[at:])
        sealing.finalize()
        self._memory[at:whole] = sealing.tag
        return [self._memory[:whole]]

    def close(self) -> None:
        super().close()
        self._waiting.clear()
        self._rest.clear()


class Outgoing:
    """Payloads for one peer, on one lane at a time; it is opened when there is a payload. `own`: of the link."""

    def __init__(self, bulk: Bulk, own: str) -> None:
        self._bulk, self._link = bulk, _link_id(own)
        self._address = ""
        self.lane: Lane | None = None

    def move(self, address: str) -> None:
        """Send to this address from now on."""
        if address != self._address:
            self._address = address
            self.close()

    def ticket(self, nbytes: int) -> bytes | None:
        """The ticket of the next payload; None: there is no lane yet, or no room in it."""
        if self.lane is None:
            self._open()
        self.renew()
        return None if self.lane is None else self.lane.ticket(nbytes)

    def renew(self) -> None:
        """Open another lane in place of one that has ended: it tells the peer that nothing more comes on that."""
        lane = self.lane
        if lane is not None and not (lane.ready or lane.closed) and time.monotonic() > lane.until:
            _log.warning(
                "%s does not answer, where a peer takes records: does this node reach that port?", self._address
            )
            lane.close()
        if lane is not None and lane.closed:
            self._open()

    def _open(self) -> None:
        try:
            self.lane = Lane(self._bulk, self._link, self._address) if self._address else None
        except OSError as error:
            _log.warning("a peer takes records at %s, which is no address here: %s", self._address, error)
            self._address, self.lane = "", None

    def put(self, pieces: Pieces, said: bytes) -> None:
        """Send a payload, of which the ticket was taken. `said`: the message, without the ticket."""
        assert self.lane is not None
        self.lane.put(pieces, said)

    def close(self) -> None:
        if self.lane is not None:
            self.lane.close()


class Bulk:
    """All lanes of a replicator; :meth:`close` it. `patience`: seconds after which who does not answer is cut off.

    `keys`: as for a Transport; without PeerKeys payloads are not sealed. Whoever polls `poll` is woken. OSError: it
    cannot listen there.
    """

    def __init__(
        self,
        where: tuple[str, int],
        keys: PeerKeys | str | None,
        max_bytes: int,
        patience: float,
        refused: Counter[str],
        advertise: str | None,
    ) -> None:
        self.sealed, self.max_bytes, self.patience = isinstance(keys, PeerKeys), max_bytes, patience
        self.secret = (keys.bulk if isinstance(keys, PeerKeys) else keys or "").encode()
        self.refused, self.ends = refused, dict[int, _End]()
        self.strangers: deque[Incoming] = deque()
        self._lanes: dict[bytes, Incoming] = {}
        self._lent: Incoming | None = None
        family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
        self.listener = socket.create_server(where, family=family)
        self.listener.setblocking(False)
        host, port = self.listener.getsockname()[:2]
        self.address = advertise or (f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        self.poll = select.epoll()
        self.poll.register(self.listener, select.EPOLLIN)

    def work(self) -> None:
        """Read and write what can be, and cut off strangers who say nothing."""
        while self.strangers and self.strangers[0].until < time.monotonic():
            self.strangers[0].close()
        for fd, _ in self.poll.poll(0):
            if fd == self.listener.fileno():
                self._accept()
            elif (end := self.ends.get(fd)) is not None:
                end.work()

    def _accept(self) -> None:
        for _ in range(_MOST_STRANGERS):
            try:
                sock, _ = self.listener.accept()
                stranger = Incoming(self, sock)
            except OSError:  # nobody any more, or he is gone again
                return
            self.strangers.append(stranger)
            if len(self.strangers) > _MOST_STRANGERS:
                self.strangers[0].close()

    def admit(self, incoming: Incoming, link: bytes) -> bool:
        """Take somebody who has shown the key, in place of an earlier lane of this link; False: there are too many."""
        if (former := self._lanes.get(link)) is not None:
            former.close()
        if len(self._lanes) >= _MOST_LANES:
            return False
        self.strangers.remove(incoming)
        self._lanes[link], incoming.link = incoming, link
        return True

    def forget(self, incoming: Incoming) -> None:
        """Note that one is closed."""
        if incoming in self.strangers:
            self.strangers.remove(incoming)
            self.refused["handshake"] += 1
        if self._lanes.get(incoming.link) is incoming:
            del self._lanes[incoming.link]

    def take_payload(self, incarnation: str, ticket: bytes, said: bytes) -> memoryview | str | None:
        """A payload, lent until :meth:`give_back`; why there is none; None: it is not here yet."""
        if len(ticket) != _TICKET.size:
            return "malformed"
        lane, number, nbytes = _TICKET.unpack(ticket)
        incoming = self._lanes.get(_link_id(incarnation))
        payload = "payload lost" if incoming is None else incoming.take_payload(lane, number, nbytes, said)
        if isinstance(payload, memoryview):
            self._lent = incoming
        return payload

    def give_back(self) -> None:
        """End the loan: the memory of the last payload is the lane's again."""
        lent, self._lent = self._lent, None
        if lent is not None:
            lent.give_back()

    def close(self) -> None:
        for end in list(self.ends.values()):
            end.close()
        self.listener.close()
        self.poll.close()
