"""States that this node reads from its peers, and what it asks them for that."""

from __future__ import annotations

import msgspec

from memckpt.memory.region import Region
from memckpt.protocol.recovery import Describe, Described, Fill, Filled, RecoveryProgress
from memckpt.replication.coding.code import Code
from memckpt.replication.process.asking import Asking
from memckpt.replication.process.mail import Mail
from memckpt.replication.process.questions import Questions
from memckpt.replication.process.reader import Reader
from memckpt.replication.transport.wire import Got, GotNone, Manifest, WindowIs

Answer = Manifest | Got | WindowIs | GotNone
News = RecoveryProgress | Described | Filled


class Fetching:
    """The states that are being read for the newest recovery, and the layouts that are asked for it."""

    def __init__(self) -> None:
        #: Number of the recovery that all below work for.
        self._recovery = 0
        self._readers: list[Reader] = []
        self._asking: list[Asking] = []
        self._last_number = 0

    @property
    def busy(self) -> bool:
        """Whether anything is asked or read."""
        return bool(self._readers or self._asking)

    def _number(self) -> int:
        self._last_number += 1
        return self._last_number

    def describe(self, message: Describe, mail: Mail, now: float) -> None:
        """Ask peers which layout a state has."""
        self._begin(message.recovery)
        self._asking.append(Asking(message.wanted, Questions(mail.send, self._number), now))

    def fill(self, message: Fill, regions: list[Region], code: Code, mail: Mail, now: float) -> None:
        """Read a state from peers into regions."""
        self._begin(message.recovery)
        questions = Questions(mail.send, self._number)
        self._readers.append(Reader(message.wanted, message.spec, regions, code, questions, now))

    def _begin(self, recovery: int) -> None:
        if recovery != self._recovery:
            self.stop()
            self._recovery = recovery

    def stop(self) -> None:
        """Read nothing more: nobody waits for it."""
        for reader in self._readers:
            reader.close()
        self._readers.clear()
        self._asking.clear()

    def take(self, peer: str, message: Answer, payload: bytes | memoryview, now: float) -> None:
        """Take a peer's answer."""
        for asking in self._asking:
            if message.request in asking.requests:
                asking.answered(peer, message, now)
        for reader in self._readers:
            if message.request in reader.requests:
                match message:
                    case Manifest():
                        reader.got_manifest(peer, message, now)
                    case Got():
                        reader.got(peer, message, bytes(payload), now)
                    case GotNone():
                        reader.got_none(peer, message, now)

    def tend(self, now: float) -> None:
        """Give up peers that say nothing. To be called every second or so."""
        for reader in self._readers:
            reader.tend(now)
        for asking in self._asking:
            asking.tend(now)

    def take_news(self) -> list[News]:
        """What the agent is to know since the last call; readers that are through are closed."""
        news: list[News] = []
        for reader in list(self._readers):
            if nbytes := reader.take_progress():
                news.append(RecoveryProgress(nbytes))
            if reader.result is not None:
                self._readers.remove(reader)
                reader.close()
                news.append(msgspec.structs.replace(reader.result, recovery=self._recovery))
        for asking in list(self._asking):
            if asking.result is not None:
                self._asking.remove(asking)
                news.append(msgspec.structs.replace(asking.result, recovery=self._recovery))
        return news

    def __str__(self) -> str:
        """What is being read, and how far that is; empty if nothing is."""
        if not self._readers:
            return ""
        taken = sum(reader.taken_bytes for reader in self._readers)
        expected = sum(reader.expected_bytes for reader in self._readers)
        ranks = ", ".join(str(rank) for rank in sorted({rank for one in self._readers for rank in one.wanted.ranks}))
        record = self._readers[0].wanted.record
        return (
            f"ranks {ranks} from peers after record {record}, {taken / max(1, expected):.0%} of {expected / 1e6:.1f} MB"
        )
