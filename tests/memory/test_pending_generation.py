"""The generation that trainers are about to write: one for all ranks of a node, however they come to ask for it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import msgspec
import pytest

from memckpt.errors import MemoryBudgetError
from memckpt.memory.pending_generation import Difference, PendingGeneration
from memckpt.memory.region import Allowance, GenerationRegions
from memckpt.protocol.channel import Channel, Message
from memckpt.protocol.trainer import Begin, GenerationCommit, NeedGeneration, Prepare, Prepared
from memckpt.session.link import AgentLink
from memckpt.state.layout import Layout
from memckpt.state.records import Timeline
from memckpt.state.spec import StateSpec, TensorSpec
from tests.support.cluster.storage_node import spec_of
from tests.support.linked import link_over

SMALL = [TensorSpec(name, (4,), "float32") for name in ("a", "b", "both")]


def staging(*names: str) -> StateSpec:
    """The layout of a rank that has seen these of the small tensors change."""
    by_value = tuple(one for one in SMALL if one.name in names)
    static = tuple(one for one in SMALL if one.name not in names)
    return msgspec.structs.replace(spec_of((0, 1, 2)), by_value=by_value, static=static)


PLAIN = staging()


def request(record: int, spec: StateSpec = PLAIN, budget: int | None = None) -> Prepare:
    return Prepare(spec, Timeline(1, "a"), 1, budget, False, record)


class Ranks:
    """What ranks ask for, one after the other, and what is made of it."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        self.building = PendingGeneration(lambda message: None, self.gone.append)

    def prepare(self, rank: int, record: int, spec: StateSpec = PLAIN) -> tuple[int, Difference | None]:
        """The number of the generation that the rank gets, and what it is told to bring together."""
        message = request(record, spec)
        differing = self.building.ask(rank, message)
        generation, _ = self.building.allocate(rank, message, 0)
        return generation.number, differing

    def writes(self, rank: int, record: int) -> None:
        self.building.generation.start(rank, GenerationCommit(1, record, record, b"state"))


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.building.drop_generation()


def test_all_ranks_get_the_same_though_the_first_has_written_its_part(ranks: Ranks) -> None:
    assert ranks.prepare(0, 5) == (1, None)
    ranks.writes(0, 5)
    assert ranks.prepare(2, 5) == (1, None)
    assert ranks.prepare(1, 5) == (1, None)


def test_ranks_that_have_seen_different_tensors_change_are_told_all_of_them(ranks: Ranks) -> None:
    assert ranks.prepare(0, 5, staging("both", "a")) == (1, None)
    ranks.writes(0, 5)
    assert ranks.prepare(1, 5, staging("both", "b")) == (2, Difference(frozenset({"a", "b"})))
    ranks.writes(1, 5)
    assert ranks.prepare(2, 5, staging("both")) == (3, Difference(frozenset({"a", "b"})))
    together = staging("a", "b", "both")
    assert {ranks.prepare(rank, 6, together) for rank in range(3)} == {(4, None)}


def test_what_one_rank_has_begun_is_not_given_to_another_for_a_later_record(ranks: Ranks) -> None:
    """The one that had seen more gets what it wants the second time, too: only the record differs."""
    ranks.prepare(0, 5)
    assert ranks.prepare(1, 5, staging("a")) == (2, Difference(frozenset({"a"})))
    ranks.writes(1, 5)
    assert ranks.prepare(0, 6, staging("a")) == (3, None)
    assert ranks.prepare(1, 6, staging("a")) == (3, None)


def test_tensors_that_only_some_ranks_have_are_named_apart_and_another_difference_has_no_names(ranks: Ranks) -> None:
    more = TensorSpec("x", (1,), "int8")
    ranks.prepare(0, 5, staging("a"))
    seen = msgspec.structs.replace(PLAIN, by_value=(more,))
    assert ranks.prepare(1, 5, seen) == (2, Difference(frozenset({"a"}), missing=frozenset({"x"})))
    ranks.prepare(0, 6)
    assert ranks.prepare(1, 6, msgspec.structs.replace(PLAIN, period=PLAIN.period + 1)) == (4, Difference())


def test_ranks_that_know_of_different_tensors_that_differ_are_told_all_of_them(ranks: Ranks) -> None:
    ranks.prepare(0, 5, msgspec.structs.replace(PLAIN, apart=("a", "both")))
    other = msgspec.structs.replace(PLAIN, apart=("b", "both"))
    assert ranks.prepare(1, 5, other) == (2, Difference(apart=frozenset({"a", "b"})))


def test_ranks_that_all_ask_for_something_else_before_they_write_agree(ranks: Ranks) -> None:
    """A layout may change between the start and the first record."""
    for rank in range(3):
        assert ranks.prepare(rank, 1) == (1, None)
    for rank in range(3):
        assert ranks.prepare(rank, 1, staging("a")) == (2, None)


def test_another_attempt_s_wishes_are_of_no_account(ranks: Ranks) -> None:
    ranks.prepare(0, 1, staging("a"))
    ranks.building.begin_attempt()
    assert ranks.building.generation is None
    assert ranks.prepare(1, 1) == (2, None)


def test_where_two_generations_do_not_fit_the_old_one_goes_and_that_is_said(ranks: Ranks) -> None:
    room = 2 * PLAIN_BYTES
    message = request(5, budget=room)
    generation, fresh = ranks.building.allocate(0, message, room)
    assert (generation.number, fresh) == (1, True)
    assert len(ranks.gone) == 1
    with pytest.raises(MemoryBudgetError):
        ranks.building.allocate(0, request(6, budget=PLAIN_BYTES // 2), 0)
    assert len(ranks.gone) == 1
    assert ranks.building.generation is None


PLAIN_BYTES = 5 * 2 * 4096  # a ring of five records, each a header and a page


# The question for one


@pytest.fixture
def client_and_agent() -> Iterator[tuple[AgentLink, Channel]]:
    ours, theirs = (Channel(sock) for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    yield link_over(ours), theirs
    ours.close()
    theirs.close()


def test_a_late_answer_to_an_earlier_question_is_not_taken_for_the_answer(
    client_and_agent: tuple[AgentLink, Channel],
) -> None:
    """Then other ranks might not know of the new one yet."""
    client, agent = client_and_agent
    orders: list[Message] = [Begin(4, "of another rank's question"), Begin(9, "ours")]
    for order in orders:
        agent.send(order)
    assert client.ask_for_generation(9, "a reason") == orders[1]
    assert agent.receive(5)[0] == NeedGeneration(9, "a reason")
    assert client.notices() == orders[:1]


def test_regions_of_a_question_that_was_given_up_are_closed_and_never_taken(
    client_and_agent: tuple[AgentLink, Channel],
) -> None:
    """The trainer had waited for them for too long, and has gone on."""
    client, agent = client_and_agent

    def answers(number: int, record: int) -> None:
        regions = GenerationRegions.create(Layout(PLAIN), Allowance())
        agent.send(Prepared(number, PLAIN, begins=record), [region.fd for region in regions])
        regions.close()

    open_before = len(os.listdir("/proc/self/fd"))
    answers(1, 4)
    assert client.notices() == []
    answers(2, 4)
    answers(3, 9)
    prepared = client.prepare(PLAIN, 9)
    assert prepared.message.generation == 3
    prepared.close()
    assert len(os.listdir("/proc/self/fd")) == open_before
