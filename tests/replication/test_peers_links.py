"""The links between replicators, without sockets: whatever connections lose, what arrives is what was sent, in
order.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.replication.transport import links
from memckpt.replication.transport.links import Data, Link, Payload, State

ADDRESS = "tcp://127.0.0.1:1"
WINDOW = 1000


class Side:
    """One node of a pair: its link, and the connections on which it has sent, of which the last is open or none is.

    `sent` is what it was told to send to the incarnation that it has met, `received` what came from that.
    """

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.connections: list[deque[tuple[Payload, ...]]] = []
        self.open = False
        self.captured: list[tuple[Payload, ...]] = []
        self.start(number)

    def start(self, number: int) -> None:
        """Begin as a new incarnation."""
        self.link = Link(self.name, f"{self.name}{number}", ADDRESS, WINDOW, self.hand)
        self.sent: list[bytes] = []
        self.received: list[bytes] = []

    def hand(self, frames: Sequence[Payload], payload: Sequence[Payload] | None) -> bool:
        if not self.open:
            return False
        self.connections[-1].append(tuple(frames))
        self.captured.append(tuple(frames))
        return True

    def connect(self) -> None:
        if not self.open:
            self.connections.append(deque())
            self.open = True

    def cut(self, lost: int) -> None:
        """End the connection; its last messages do not arrive."""
        if self.open:
            self.open = False
            for _ in range(min(lost, len(self.connections[-1]))):
                self.connections[-1].pop()

    def send(self, body: bytes) -> None:
        self.sent.append(body)
        self.link.send(body, ())

    def take(self, frames: tuple[Payload, ...]) -> None:
        envelope = links.decode(bytes(frames[0]))
        before = self.link.met
        if isinstance(envelope, State):
            self.link.take_state(envelope)
            reason: str | None = "no message"
        else:
            reason = self.link.take_data(envelope, len(frames[1]))
        if self.link.met != before:
            if before:
                # What is on its way to an earlier incarnation is gone.
                self.sent.clear()
            self.received.clear()
        if reason is None:
            self.received.append(bytes(frames[1]))


class Pair:
    """Two nodes, what they have sent each other, and an adversary who loses, repeats and restarts."""

    def __init__(self) -> None:
        self.sides = (Side("a", 0), Side("b", 0))
        self.made = 0

    def other(self, side: Side) -> Side:
        return self.sides[side is self.sides[0]]

    def deliver(self, side: Side, choice: int) -> None:
        """Take one message out of one of the connections of a side: older ones may still hold some."""
        filled = [connection for connection in side.connections if connection]
        if filled:
            self.other(side).take(filled[choice % len(filled)].popleft())

    def check(self) -> None:
        for side in self.sides:
            other = self.other(side)
            if side.link.met == other.link.own and other.link.met == side.link.own:
                assert other.received == side.sent[: len(other.received)]
                assert side.link.in_flight_bytes <= max([WINDOW, *map(len, side.sent)])

    def settle(self) -> None:
        """Let all arrive: some rounds to find what was lost, then at least a window's worth with each."""
        waiting = max(side.link.unacknowledged_messages for side in self.sides)
        for _ in range(6 + waiting):
            for side in self.sides:
                side.connect()
                side.link.beat()
                side.link.pump()
            while any(connection for side in self.sides for connection in side.connections):
                for side in self.sides:
                    self.deliver(side, 0)
                    if side.link.owes:
                        side.link.tell()
                self.check()


OPERATIONS = st.tuples(
    st.sampled_from(["send", "deliver", "deliver", "deliver", "connect", "cut", "beat", "tell", "replay", "restart"]),
    st.integers(0, 1),
    st.integers(0, 50),
)


@pytest.mark.promise("over an interrupted or slow network everything is delivered once, in order, with bounded memory")
@given(operations=st.lists(OPERATIONS, max_size=120))
@settings(max_examples=300, deadline=None)
def test_all_arrives_once_and_in_order(operations: list[tuple[str, int, int]]) -> None:
    run(operations)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_long_histories(seed: int) -> None:
    rng = random.Random(seed)
    kinds = ["send"] * 6 + ["deliver"] * 20 + ["connect", "connect", "cut", "beat", "tell", "replay"]
    operations = [(rng.choice(kinds), rng.randrange(2), rng.randrange(50)) for _ in range(3000)]
    run(operations)


def run(operations: list[tuple[str, int, int]]) -> None:
    pair = Pair()
    for kind, which, value in operations:
        side = pair.sides[which]
        if kind == "send":
            pair.made += 1
            side.send(b"%d " % pair.made + b"." * (value * 20))
        elif kind == "deliver":
            pair.deliver(side, value)
        elif kind == "connect":
            side.connect()
        elif kind == "cut":
            side.cut(value % 5)
        elif kind == "beat":
            side.link.beat()
        elif kind == "tell":
            side.link.tell()
        elif kind == "replay" and side.captured:
            pair.other(side).take(side.captured[value % len(side.captured)])
        elif kind == "restart" and value < 10:
            pair.made += 1
            side.start(pair.made)
        pair.check()
    pair.settle()
    first, second = pair.sides
    assert first.link.met == second.link.own
    assert second.link.met == first.link.own
    assert second.received == first.sent
    assert first.received == second.sent
    for side in pair.sides:
        assert side.link.unacknowledged_bytes == 0
        assert side.link.unacknowledged_messages == 0


def met_pair() -> Pair:
    pair = Pair()
    pair.settle()
    return pair


def test_nothing_is_sent_again_where_nothing_was_lost() -> None:
    pair = met_pair()
    first = pair.sides[0]
    for number in range(50):
        first.send(b"%d" % number)
        if number % 7 == 0:
            pair.deliver(first, 0)
            first.link.beat()
    pair.settle()
    assert first.link.traffic.resent_messages == 0
    assert first.link.traffic.sent_messages == 50


@pytest.mark.parametrize("behind", [0, 5])
def test_a_loss_is_sent_again_once(behind: int) -> None:
    """However often it is noticed, and with it what was sent behind it."""
    pair = met_pair()
    first = pair.sides[0]
    for number in range(10):
        first.send(b"%d" % number)
    first.cut(lost=4)
    first.connect()
    for number in range(10, 10 + behind):
        first.send(b"%d" % number)
        first.link.beat()
    pair.settle()
    assert pair.sides[1].received == first.sent
    assert first.link.traffic.resent_messages == 4 + behind


def test_what_an_old_connection_still_brings_is_not_sent_again() -> None:
    pair = met_pair()
    first, second = pair.sides
    for number in range(10):
        first.send(b"%d" % number)
    first.cut(lost=0)
    first.connect()
    first.send(b"10")
    # The new connection is read first: a gap is seen where nothing is lost, and told.
    second.take(first.connections[-1].popleft())
    first.cut(lost=0)
    pair.deliver(second, 0)
    assert first.link.unacknowledged_messages == 11
    while first.connections[0]:
        pair.deliver(first, 0)
    pair.settle()
    assert second.received == first.sent
    assert first.link.traffic.resent_messages == 1


def test_a_gap_of_an_earlier_turn_is_not_told() -> None:
    pair = met_pair()
    first, second = pair.sides
    for number in range(4):
        first.send(b"%d" % number)
    data = list(first.connections[-1])
    first.connections[-1].clear()
    second.take(data[1])
    told = len(second.connections[-1])
    pair.deliver(second, 0)
    # All of it is on its way again; what comes late of the former turn says nothing new.
    pair.deliver(first, 0)
    second.take(data[3])
    assert second.received == [b"0"]
    assert len(second.connections[-1]) == told - 1
    pair.settle()
    assert second.received == first.sent
    assert first.link.traffic.resent_messages == 4


def test_one_who_acknowledges_what_was_not_sent_is_not_believed() -> None:
    pair = met_pair()
    first, second = pair.sides
    first.send(b"x")
    lie = State("b", second.link.own, first.link.own, 0, 0, 2, 0, False, False, ADDRESS)
    assert first.link.take_state(lie) == "malformed"
    assert first.link.unacknowledged_messages == 1


def test_a_former_incarnation_is_not_listened_to() -> None:
    pair = met_pair()
    first, second = pair.sides
    former = second.link.own
    second.start(1)
    pair.settle()
    assert first.link.met == second.link.own
    assert first.link.take_data(Data("b", former, first.link.own, 0, 0), 0) == "wrong incarnation"
    greeting = State("b", former, "", 0, 0, 0, 0, False, True, ADDRESS)
    assert first.link.take_state(greeting) == "wrong incarnation"
    assert first.link.met == second.link.own


def test_a_greeting_is_not_believed_before_it_names_us() -> None:
    """Whoever repeats an old greeting cannot know our incarnation."""
    pair = met_pair()
    first, second = pair.sides
    first.send(b"x")
    greeting = State("b", "b-other", "", 0, 0, 0, 0, False, True, ADDRESS)
    assert first.link.take_state(greeting) is None
    assert first.link.met == second.link.own
    pair.settle()
    assert second.received == [b"x"]
