"""What a node holds through several attempts, of its own ranks and of those that it adopts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from memckpt.agent.units import Units
from memckpt.config import StorageConfig
from memckpt.errors import AgentError
from memckpt.processes.attempt import Attempt
from memckpt.processes.helper_process import HelperProcess
from memckpt.protocol.storing import Saved, SaveFailed
from memckpt.protocol.trainer import Configure, Hello, Launcher
from memckpt.state.records import Timeline
from tests.support.cluster.host import QuietHost
from tests.support.cluster.storage_node import Filled, Process, spec_of

T1, T2 = Timeline(1, "a"), Timeline(2, "b")


def test_a_record_can_be_produced_until_its_slot_is_filled_anew() -> None:
    """Training that waits for peers has not begun the next one: the watermark may be the oldest that is left."""
    with closing(Filled(spec=spec_of((0,), 2))) as one:
        for _ in range(6):
            one.commit()
        assert one.held.producible() == [3, 4, 5, 6]
        one.open(7, 0.0)
        assert one.held.producible() == [4, 5, 6]


class Node:
    """What a node holds through several attempts, each with a rank alone there, and how its parts are called."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[Process] = []
        self.units = Units("n", QuietHost(self._start))

    def _start(self, what: str, received: Any, ended: Any) -> HelperProcess:
        self._processes.append(Process(received, ended))
        return cast("HelperProcess", self._processes[-1])

    def begins(self, rank: int) -> None:
        self.units.begin_attempt()
        self.units.introduce(Hello(1, "a", rank, 2, (rank,), (rank,), Launcher(0, 0, 0), ()))

    def trains(self, rank: int, timeline: Timeline) -> None:
        self.units.configure((rank,), Configure(0.0, timeline, StorageConfig()), self._directory)
        self._hold(rank)

    def adopts(self, rank: int) -> None:
        self.units.adopt((rank,))
        self._hold(rank)

    def _hold(self, rank: int) -> None:
        filled = Filled(spec=spec_of((rank,), 2))
        for _ in range(2):
            filled.commit()
        self.units[rank,].take_over(filled.held, ())

    def saves(self) -> dict[tuple[int, ...], tuple[str, Timeline]]:
        """The name and the timeline of each unit's part."""
        answers: list[Saved | SaveFailed] = []
        self.units.save_record(2, "elsewhere", answers.append)
        parts = [(process, process.sent.pop().part) for process in self._processes if process.sent]
        for process, part in parts:
            process.received(Saved(part.step, part.record, 0, 0.0, 0.0, part.timeline))
        assert [type(answer) for answer in answers] == [Saved]
        return {part.ranks: (part.node, part.timeline) for _, part in parts}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    with closing(node.units):
        yield node


@pytest.mark.parametrize(("own", "adopted"), [(1, 0), (0, 1)])
@pytest.mark.parametrize("now", [0, 1])
def test_a_part_of_adopted_ranks_has_a_name_of_its_own(own: int, adopted: int, now: int, node: Node) -> None:
    """Whichever rank the node has in the attempt that adopts, and though parts of its own were saved before."""
    node.begins(own)
    node.trains(own, T1)
    assert node.saves() == {(own,): ("n", T1)}
    node.begins(now)
    node.adopts(adopted)
    both = {(own,): ("n", T1), (adopted,): (f"n.rank{adopted}", T1)}
    assert node.saves() == both
    node.begins(1 - now)  # that attempt got no further
    node.adopts(adopted)
    assert node.saves() == both
    node.units.discard(Attempt("n", 1, ()))
    node.begins(now)
    node.trains(now, T2)
    assert node.saves() == {(now,): ("n", T2)}


def test_adopted_ranks_are_written_for_the_last_attempt_though_the_node_had_them_in_an_earlier_one(node: Node) -> None:
    node.begins(1)
    node.trains(1, T1)
    node.begins(0)  # the nodes have changed places
    node.trains(0, T2)
    node.begins(0)
    node.adopts(1)
    assert node.saves() == {(0,): ("n", T2), (1,): ("n.rank1", T2)}


def test_nothing_is_adopted_where_no_trainers_were(node: Node) -> None:
    node.begins(0)
    with pytest.raises(AgentError, match="expected trainers of the last attempt to have been on node n, found none"):
        node.units.adopt((0,))
