"""What a node holds of several sets of shards, from one attempt to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from memckpt.agent.group import Group
from memckpt.agent.groups import Groups
from memckpt.config import StorageConfig
from memckpt.errors import AgentError
from memckpt.processes.attempt import Attempt, TrainerHandle
from memckpt.processes.helper_process import HelperProcess
from memckpt.protocol.storing import Saved, SaveFailed
from memckpt.protocol.trainer import Commit, Configure, GenerationCommit, Hello, Launcher, Prepare, Resume
from memckpt.state.records import Branch, RecordMeta, SubStep, Timeline, encode_meta
from memckpt.state.spec import StateSpec
from tests.support.cluster.host import QuietHost
from tests.support.cluster.storage_node import Filled, Process, spec_of

T1, T2 = Timeline(1, "a"), Timeline(2, "b")


@dataclass
class Unit:
    """Ranks that share a group, and what they have committed: records that can be gone back to, by rank."""

    ranks: tuple[int, ...]
    world_size: int
    group: Group = field(init=False)
    spec: StateSpec = field(init=False)
    attempt: Attempt = field(init=False)
    host: QuietHost = field(default_factory=QuietHost)

    def __post_init__(self) -> None:
        self.spec = msgspec.structs.replace(spec_of(self.ranks, self.world_size), replicas=self.ranks)
        self.attempt = Attempt("n", self.world_size, tuple(range(self.world_size)))
        self.group = Group("n", self.ranks, f"n.rank{self.ranks[0]}", self.host, self.host)

    def begins(self, rank: int, record: int) -> None:
        """A rank writes its part of a generation that begins after a record."""
        generation = self.group.prepare(rank, Prepare(self.spec, T1, 1, None, False, record))
        metas = tuple(
            encode_meta(RecordMeta(virtual, record, True))
            for virtual in range(record - self.spec.period + 1, record + 1)
        )
        for virtual in range(record - self.spec.period + 1, record + 1):
            generation.ring.seal(virtual, rank)
        message = GenerationCommit(generation.number, record, record, b"state", metas if rank == self.ranks[0] else ())
        self.group.generation_committed(rank, message)

    def commits(self, rank: int, record: int) -> None:
        held = self.group._pending.generation
        held = held if held is not None and held.started_by(rank) else self.group.held
        meta = encode_meta(RecordMeta(record, record - 1, False, (SubStep(0, 0, b""),)))
        held.ring.seal(record, rank)
        message = Commit(held.number, record, record, b"state", meta if rank == self.ranks[0] else b"")
        self.group.commit(rank, message, self.attempt)


@pytest.fixture
def units() -> Iterator[Callable[..., Unit]]:
    with ExitStack() as stack:

        def make(ranks: tuple[int, ...], world_size: int) -> Unit:
            unit = Unit(ranks, world_size)
            stack.callback(unit.group.close)
            return unit

        yield make


def test_the_generation_before_goes_once_a_record_shows_that_all_have_the_newer_one(units: Callable[..., Unit]) -> None:
    one = units((0,), 2)
    one.begins(0, 1)
    one.commits(0, 2)
    one.begins(0, 3)
    assert list(one.group.generations.standing_still()) == [1, 2, 3]
    both = one.group.nbytes
    # Other ranks may find two records later that they have not agreed on the start of theirs.
    for record in (4, 5, 6):
        one.commits(0, record)
        assert list(one.group.generations.standing_still()) == list(range(1, record + 1))
    one.commits(0, 7)
    assert list(one.group.generations.standing_still()) == [4, 5, 6, 7]
    assert one.group.nbytes == both // 2


def test_ranks_that_drop_what_is_held_leave_what_others_have_begun(units: Callable[..., Unit]) -> None:
    """Each rank asks, as a run goes on from storage: what the first ones have prepared is of the new timeline."""
    apart = [units((rank,), 2) for rank in range(2)]
    attempt, process = Attempt("n", 2, (0, 1)), cast("Any", None)
    ranks = [TrainerHandle(rank, (rank,), process, process, 1) for rank in range(2)]
    for record, timeline in ((3, T1), (1, T2)):  # the newest state may be damaged
        for trainer, unit in zip(ranks, apart, strict=True):
            if attempt.is_first_to_discard(trainer):
                for each in apart:
                    each.group.discard()
            unit.group.prepare(trainer.rank, Prepare(unit.spec, timeline, 1, None, True, record))
        assert [unit.group.history for unit in apart] == [(Branch(timeline, None),)] * 2


def test_generations_are_few_while_peers_stand_still(
    units: Callable[..., Unit], caplog: pytest.LogCaptureFixture
) -> None:
    """What peers have got to stays, and what a rank may go back to that dies in the newest; then peers go on."""
    one = units((0,), 2)
    held = one.group.generations
    held.raise_redo_limit(1)
    for record in range(1, 21):
        one.begins(0, record)
    assert [each.base for each in held] == [1, 16, 17, 18, 19, 20]
    assert "peers have not got past record 1" in caplog.text
    held.raise_redo_limit(18)
    assert [each.base for each in held] == [16, 17, 18, 19, 20]


def test_alone_it_keeps_one_generation(units: Callable[..., Unit]) -> None:
    one = units((0,), 1)
    one.begins(0, 1)
    one.begins(0, 2)
    assert list(one.group.generations.standing_still()) == [2]


def test_going_back_behind_the_newer_generation_drops_it(units: Callable[..., Unit]) -> None:
    one = units((0,), 2)
    one.begins(0, 1)
    one.commits(0, 2)
    one.begins(0, 3)
    (before,) = one.group.generations.before
    one.group.begin_attempt()
    generation, prepared = one.group.resume(Resume(2, Timeline(2, "b")))
    assert generation is before is one.group.held
    assert prepared.generation == 1
    record = one.group.inventory(None)
    assert record.records == (1, 2)
    assert record.history == (Branch(T1, 2), Branch(Timeline(2, "b"), None))
    one.group.resume(Resume(1, Timeline(2, "b")))  # the ranks have found that record 2 is not what it says
    assert one.group.inventory(None).history == (Branch(T1, 1), Branch(Timeline(2, "b"), None))
    with pytest.raises(AgentError, match="different records: 1 and 2"):
        one.group.resume(Resume(2, Timeline(2, "b")))


@pytest.fixture
def introduced() -> Iterator[Callable[..., Groups]]:
    """A node's groups after ranks of these units have come."""
    groups = Groups("n", QuietHost())

    def introduce(*units: tuple[int, ...]) -> Groups:
        for unit in units:
            groups.introduce(Hello(1, "a", unit[0], 2, (0, 1), unit, Launcher(0, 0, 0), ()))
        return groups

    with closing(groups):
        yield introduce


def hold(groups: Groups, unit: tuple[int, ...], records: int) -> None:
    one = Unit(unit, 2)
    one.group.close()
    one.group = groups[unit]
    one.begins(unit[0], 1)
    for record in range(2, records + 1):
        one.commits(unit[0], record)


def test_what_an_attempt_that_got_nowhere_leaves_is_no_part_of_what_is_held(introduced: Callable[..., Groups]) -> None:
    """It had other units; all ranks of the one before are still there, one of them a record ahead."""
    groups = introduced((0,), (1,), (0, 1))
    hold(groups, (0,), 3)
    hold(groups, (1,), 2)
    assert groups.common() == 2
    groups.save_held(as_checkpoint=False)
    groups.save_asked()
    groups.begin_attempt()
    assert sorted(one.ranks for one in groups) == [(0,), (1,)]


def test_all_are_told_as_early_as_the_one_that_was_told_too_late(introduced: Callable[..., Groups]) -> None:
    groups = introduced((0,), (1,))
    leads = {one.ranks: one.saver.state_copies.lead for one in groups}
    groups[(0,)].saver.state_copies.hurry()
    assert [one.saver.state_copies.lead for one in groups] == [2 * leads[0,]] * 2


def test_a_record_can_be_produced_until_its_slot_is_filled_anew() -> None:
    """Training that waits for peers has not begun the next one: the watermark may be the oldest that is left."""
    with closing(Filled(spec=spec_of((0,), 2))) as one:
        for _ in range(6):
            one.commit()
        assert one.held.reachable() == [3, 4, 5, 6]
        one.open(7, 0.0)
        assert one.held.reachable() == [4, 5, 6]


class Node:
    """What a node holds through several attempts, each with a rank alone there, and how its parts are called."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[Process] = []
        self.groups = Groups("n", QuietHost(self._start))

    def _start(self, what: str, received: Any, ended: Any) -> HelperProcess:
        self._processes.append(Process(received, ended))
        return cast("HelperProcess", self._processes[-1])

    def begins(self, rank: int) -> None:
        self.groups.begin_attempt()
        self.groups.introduce(Hello(1, "a", rank, 2, (rank,), (rank,), Launcher(0, 0, 0), ()))

    def trains(self, rank: int, timeline: Timeline) -> None:
        self.groups.configure((rank,), Configure(0.0, timeline, StorageConfig()), self._directory)
        self._hold(rank)

    def adopts(self, rank: int) -> None:
        self.groups.adopt((rank,))
        self._hold(rank)

    def _hold(self, rank: int) -> None:
        filled = Filled(spec=spec_of((rank,), 2))
        for _ in range(2):
            filled.commit()
        self.groups[rank,].take_over(filled.held, ())

    def saves(self) -> dict[tuple[int, ...], tuple[str, Timeline]]:
        """The name and the timeline of each unit's part."""
        answers: list[Saved | SaveFailed] = []
        self.groups.save_record(2, "elsewhere", answers.append)
        parts = [(process, process.sent.pop().part) for process in self._processes if process.sent]
        for process, part in parts:
            process.received(Saved(part.step, part.record, 0, 0.0, 0.0, part.timeline))
        assert [type(answer) for answer in answers] == [Saved]
        return {part.ranks: (part.node, part.timeline) for _, part in parts}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    with closing(node.groups):
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
    node.groups.discard(Attempt("n", 1, ()))
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
        node.groups.adopt((0,))
