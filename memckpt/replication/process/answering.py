"""Questions of peers that wait to be answered."""

from __future__ import annotations

from collections import deque

from memckpt.replication.keeping.fragment_store import FragmentStore
from memckpt.replication.process.mail import Mail
from memckpt.replication.process.serving import Question, Serving

#: Limit on questions of one peer that wait until it has room for the answers.
MOST_QUESTIONS = 4096


class Answering:
    """Answers peers' questions as they have room: questions are small, and a peer that does not read gets no more.

    Attributes:
        serving: generations that are handed out here.
    """

    def __init__(self) -> None:
        self.serving = Serving()
        self._waiting: dict[str, deque[Question]] = {}

    def add(self, peer: str, question: Question) -> bool:
        """Queue a question; False: the peer has so many that it is not."""
        waiting = self._waiting.setdefault(peer, deque())
        if len(waiting) >= MOST_QUESTIONS:
            return False
        waiting.append(question)
        return True

    def answer(self, peer: str, mail: Mail, store: FragmentStore) -> None:
        """Answer questions of a peer, as far as it has room.

        Args:
            mail: to the peer.
            store: fragments that are kept here.
        """
        waiting = self._waiting[peer]
        while waiting and mail.room(peer) > 0:
            question = waiting.popleft()
            answer, payload = self.serving.answer(question)
            if answer is None:
                answer, payload = self.serving.answer_from(store, question)
            mail.send(peer, answer, payload)
        if not waiting:
            del self._waiting[peer]

    def work(self, mail: Mail, store: FragmentStore) -> None:
        """Answer what peers have room for by now."""
        for peer in list(self._waiting):
            self.answer(peer, mail, store)

    def forget(self, peer: str) -> None:
        """Drop the questions of a peer that is gone."""
        self._waiting.pop(peer, None)

    def close(self) -> None:
        """Answer nothing more."""
        self._waiting.clear()
        self.serving.close()
