"""Replicators of several nodes against what they promise: any m nodes may be lost, at any point, with what they
hold.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from memckpt.errors import MemoryBudgetError
from memckpt.recovery.plan import RestoreRecord
from memckpt.replication.coding import blob, code
from memckpt.replication.keeping import fragment_store as holder
from memckpt.replication.keeping import kept_window
from memckpt.replication.keeping.kept_window import BeingReservedError
from memckpt.replication.process import send, states_by_value
from memckpt.replication.transport.messages import Put, Window
from tests.support.cluster.peers_model import Node, Setting, Taken, Unit
from tests.support.cluster.peers_model_job import Job
from tests.support.cluster.peers_records import MemoryRoom, MemoryRooms

#: Picks one of several.
Choose = Callable[[Sequence[Any]], Any]
Say = Callable[[str], None]

SETTINGS = [
    Setting(data=1, tolerate=1, nodes=2),
    Setting(data=1, tolerate=2, nodes=3, slots=3),
    Setting(data=2, tolerate=1, nodes=3, period=3),
    Setting(data=2, tolerate=2, nodes=4),
    Setting(data=3, tolerate=1, nodes=4),
    Setting(data=2, tolerate=2, nodes=5, period=1),
    Setting(data=4, tolerate=2, nodes=6),
    Setting(data=2, tolerate=1, nodes=6, slots=3),
    Setting(data=1, tolerate=2, nodes=3, private=True),
    Setting(data=2, tolerate=2, nodes=4, private=True),
    Setting(data=2, tolerate=2, nodes=4, wait=False),
    Setting(data=2, tolerate=1, nodes=3, period=3, repeat=True),
    Setting(data=1, tolerate=2, nodes=3, private=True, repeat=True),
    Setting(data=2, tolerate=2, nodes=4, slots=3, eager=True),
    Setting(data=2, tolerate=2, nodes=4, slots=4, eager=True, repeat=True),
    Setting(data=1, tolerate=2, nodes=3, slots=4, private=True, eager=True, repeat=True),
    Setting(data=2, tolerate=1, nodes=3, slots=4, eager=True, repeat=True, wait=False),
    Setting(data=1, tolerate=1, nodes=2, wait=False, every=3),
    Setting(data=2, tolerate=2, nodes=4, period=3, wait=False, every=None),
    Setting(data=2, tolerate=1, nodes=3, every=None),
    Setting(data=2, tolerate=1, nodes=3, every=2),
    Setting(data=2, tolerate=1, nodes=3, slots=4, eager=True, wait=False, every=4),
    Setting(data=2, tolerate=1, nodes=3, slots=4, eager=True, wait=False, every=None),
]


@pytest.fixture(autouse=True, scope="module")
def _short_stripes() -> Iterator[None]:
    """So that a record of a few hundred bytes has several, and is sometimes more than was expected."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (blob, code, holder, kept_window):
            patch.setattr(module, "STRIPE_BYTES", 128)
        patch.setattr(kept_window, "_TAIL_BYTES", 64)
        patch.setattr(send, "PUMP_BYTES", 200)
        patch.setattr(states_by_value, "_StateCopy", Taken)
        yield


@contextlib.contextmanager
def begun(setting: Setting) -> Iterator[Job]:
    """A job in its first attempt, with a node for each unit."""
    job = Job(setting, room=50)
    try:
        places = {unit: Node(f"node{index}") for index, unit in enumerate(setting.units)}
        job.begin(job.plan(places, "first"), places, "first", hear={node.name for node in places.values()})
        yield job
    finally:
        job.close()


@pytest.mark.promise("a replica that stays one record behind for that always has this record, and the acknowledged one")
@pytest.mark.promise(
    "whichever nodes are lost at whatever point of the protocol, the newest watermark that a survivor has seen can "
    "be produced, and never wrong bytes"
)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@given(data=st.data())
@settings(max_examples=7, deadline=None)
def test_whatever_is_lost_what_was_promised_is_there_and_nothing_else_is_given_out(
    setting: Setting, data: st.DataObject
) -> None:
    play(setting, lambda options: data.draw(st.sampled_from(options)), note)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_many_jobs_drawn_at_random(setting: Setting) -> None:
    for seed in range(600):
        said: list[str] = []
        try:
            play(setting, random.Random(seed).choice, said.append)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}:\n" + "\n".join(said)) from error


def play(setting: Setting, choose: Choose, say: Say) -> None:
    """Some attempts, each of which ends with the loss of some nodes."""
    names = (f"node{number}" for number in itertools.count())
    job = Job(setting, room=choose([2, 4, 50]))
    try:
        places = {unit: Node(next(names)) for unit in setting.units}
        away: list[Node] = []
        promised = 0
        for number in range(choose([2, 3, 4])):
            nonce = f"attempt{number}"
            found = job.plan(places, nonce)
            say(f"{nonce}: {found}; {[(unit, node.name) for unit, node in places.items()]}")
            if isinstance(found, RestoreRecord):
                job.check_plan(found, places, promised)
            if promised:
                assert isinstance(found, RestoreRecord)
                assert found.record >= promised
            everybody = [node.name for node in places.values()]
            deaf = choose([[]] * 9 + [everybody[:1]])
            job.begin(found, places, nonce, hear=set(everybody) - set(deaf))
            if not deaf:
                for _ in range(choose([0, 1, 2, 4])):  # most jobs are protected before anything happens to them
                    _step(job, say)
                    job.settle()
                    job.look()
                for _ in range(choose([0, 5, 20, 40, 60])):
                    _let_happen(job, choose, say)
                if choose([True, False, False]):
                    _go_on(job, say)
            # Nodes are lost, some of them for a while only; others take their places, and units change theirs.
            lost = _some(
                list(places.values()), choose([*range(setting.tolerate + 1)] * 2 + [setting.tolerate + 1]), choose
            )
            promised = job.promised({node.name for node in lost}) if len(lost) < setting.nodes else 0
            say(f"{[node.name for node in lost]} are lost; promised: {promised}, watermarks {job.seen}")
            stay = [node for node in places.values() if node not in lost]
            others = [*(away if choose([True, False]) else []), *(Node(next(names)) for _ in lost)]
            nodes = [others.pop(0) if node in lost else node for node in places.values()]
            # A run of which nobody knows anything any more begins to count its attempts anew.
            away = lost if job.known(stay) else []
            if choose([True, False]):
                nodes = _some(nodes, len(nodes), choose)
            places = dict(zip(setting.units, nodes, strict=True))
    finally:
        job.close()


@pytest.mark.thinned(80)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_each_choice_of_nodes_may_be_lost_at_each_point(setting: Setting, seed: int) -> None:
    """After each single event of a job, for each choice of up to m nodes: what was promised is there, and right."""
    choose = random.Random(seed).choice
    job, said, promises = Job(setting, room=4), list[str](), list[int]()
    try:
        places = {unit: Node(f"node{index}") for index, unit in enumerate(setting.units)}
        for number in range(2):
            names = {node.name for node in places.values()}
            job.begin(job.plan(places, f"attempt{number}"), places, f"attempt{number}", hear=names)
            for event in range(60 if setting.every != 1 else 120):
                if setting.every is None and event == 3:
                    job.slow_down(setting.units[-1])
                if event < 3 or (setting.every != 1 and event % 6 == 0):
                    _step(job, said.append)
                    job.settle()
                    job.look()
                _let_happen(job, choose, said.append)
                promises += _lose_each_choice(job, said)
            # They are lost for real, and the next attempt begins with what is left.
            stay = list(places.items())[setting.tolerate :]
            lost = list(places)[: setting.tolerate]
            places = {**{unit: Node(f"new{number}{index}") for index, unit in enumerate(lost)}, **dict(stay)}
        assert not setting.wait or setting.every != 1 or sum(map(bool, promises)) > len(promises) / 10
    finally:
        job.close()


@pytest.mark.promise(
    "if links carry only part of the records, the watermark still advances: states by value follow each other "
    "every N steps, and all nodes can go back to the last one"
)
@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if setting.every != 1], ids=str)
def test_a_state_by_value_is_there_whichever_nodes_are_lost(setting: Setting) -> None:
    """Survivors go back to it as well, however far they have got since."""
    said, promises = list[str](), list[int]()
    with begun(setting) as job:
        for step in range(30):
            if step == 3 and setting.every is None:
                job.slow_down(setting.units[-1])
            _step(job, said.append)
            if step % 3 == 0:  # training is ahead of what is sent
                job.settle()
            _redo_all(job)
            promises += _lose_each_choice(job, said)
        assert sum(map(bool, promises)) > len(promises) / 6
        assert max(promises) >= 8


def test_a_state_waits_for_memory_that_is_being_reserved() -> None:
    """And is kept as soon as there is some."""
    setting = next(setting for setting in SETTINGS if setting.every is None)
    said = list[str]()

    class Reserving(MemoryRooms):
        """Of three times that it is asked it has a room once."""

        asked = 0

        def make_room(self, window: Window, unit: int, slot: int, nbytes: int) -> MemoryRoom:
            self.asked += 1
            if self.asked % 3:
                raise BeingReservedError("not yet")
            return super().make_room(window, unit, slot, nbytes)

    with begun(setting) as job:
        for step in range(12):
            if step == 3:
                job.slow_down(setting.units[-1])
                for node in job.places.values():
                    node.fragment_store._rooms = Reserving()
            _step(job, said.append)
            for _ in range(40):  # who does not get memory asks again after some seconds
                job.settle()
        assert all(node.fragment_store._rooms.asked > 5 for node in job.places.values())  # type: ignore[attr-defined]
        states = [member.states for member in job.members.values()]
        assert all(one is not None and one.acknowledged > 3 and not one.missed for one in states), said


@pytest.mark.thinned(2)
@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if setting.every is None], ids=str)
def test_where_no_state_can_be_kept_there_are_records(setting: Setting) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryBudgetError("none")

    with begun(setting) as job:
        for node in job.places.values():
            node.fragment_store.keep_own = no_memory  # type: ignore[assignment,method-assign]
        for step in range(600):
            if step == 3:
                job.slow_down(setting.units[-1])
            _step(job, lambda words: None)
            job.settle()
            _redo_all(job)
        assert {member.watermark.every for member in job.members.values()} == {1}
        assert min(job.made.values()) > 500
        for member in job.members.values():
            assert member.watermark.record > 500
            assert member.watermark.whole


def _lose_each_choice(job: Job, said: list[str]) -> Iterator[int]:
    """The record that was promised, for each choice."""
    nodes = list(job.places.values())
    for count in range(1, job.setting.tolerate + 1):
        for lost in itertools.combinations(nodes, count):
            names = {node.name for node in lost}
            promised = job.promised(names)
            after = {unit: Node(f"spare{node.name}") if node in lost else node for unit, node in job.places.items()}
            found = job.plan(after, "then")
            said_so = f"{sorted(names)} are lost after:\n" + "\n".join(said)
            assert not promised or (isinstance(found, RestoreRecord) and found.record >= promised), said_so
            if isinstance(found, RestoreRecord):
                job.check_plan(found, after, promised)
            yield promised


def _some(things: list[Any], count: int, choose: Choose) -> list[Any]:
    left = list(things)
    return [left.pop(choose(range(len(left)))) for _ in range(min(count, len(left)))]


def test_the_watermark_comes_to_rest_on_no_record_that_a_unit_has_lost() -> None:
    """A unit whose agent was lost begins anew, ahead of the watermark, which waits until all have got so far."""
    with _job_of_two() as (job, ours, theirs):
        for unit in (ours, theirs):
            job.stage(unit)
        for unit in (ours, theirs):
            job.commit(unit)
            job.stage(unit)
        job.lose_agent(job.places[theirs])
        job.commit(theirs)
        job.settle()
        assert job.made == {ours: 4, theirs: 5}
        assert set(job.seen.values()) == {3}
        found = job.plan(job.places, "again")
        assert found.record == 3
        job.check_plan(found, job.places)
        job.commit(ours)
        job.settle()
        assert set(job.seen.values()) == {5}


@pytest.mark.parametrize("lost", ["holder", "owner"])
def test_what_is_still_coming_is_acknowledged_though_nobody_needs_it_any_more(lost: str) -> None:
    """Or its owner would wait for ever."""
    with _job_of_two() as (job, ours, theirs):
        owner, holder = job.places[ours].name, job.places[theirs].name
        job.lose_replicator(job.places[theirs if lost == "holder" else ours])
        job.deliver((holder, owner))
        job.deliver((owner, holder))
        message = None
        while not isinstance(message, Put) or message.fragments[-1].stripe == message.fragments[-1].stripes - 1:
            job.work(owner)
            message = job.deliver((owner, holder))
        assert message.fragments[0].stripe == 0
        job.places[theirs].fragment_store.watermark_advanced(message.fragments[0].record + job.setting.period, False)
        job.settle()
        _step(job, lambda words: None)
        job.settle()
        assert set(job.seen.values()) == {4}
        assert all(one.whole for member in job.members.values() for one in member.senders)


@contextlib.contextmanager
def _job_of_two() -> Iterator[tuple[Job, Unit, Unit]]:
    """A job that is protected after record 3, and its units."""
    with begun(SETTINGS[0]) as job:
        for _ in range(3):
            _step(job, lambda words: None)
            job.settle()
        assert set(job.seen.values()) == {3}
        yield job, *SETTINGS[0].units


_HAPPENS = [
    *["deliver"] * 6, *["work"] * 4, *["train"] * 6, *["step"] * 2, *["slow"] * 2, "settle", "generation", "replicator",
    "agent",
]  # fmt: skip


def _let_happen(job: Job, choose: Choose, say: Say) -> None:
    happens = [*_HAPPENS, *["redo"] * 6 * job.setting.eager, *["slow link"] * (job.setting.every is None)]
    match choose(happens):
        case "deliver":
            if ready := job.network.ready():
                pair = choose(ready)
                say(f"{pair[0]} -> {pair[1]}: {job.deliver(pair)}")
        case "work":
            name = choose(sorted(job.members))
            say(f"{name} works")
            job.work(name)
        case "train":
            _train(job, choose(job.setting.units), say)
        case "redo":
            unit = choose(job.setting.units)
            say(f"{unit} redoes a record: {job.redo(unit)}")
        case "step":
            _step(job, say)
        case "settle":
            say("all comes to rest")
            job.settle()
        case "slow":
            name = choose(sorted(job.members))
            say(f"all but {name} comes to rest")
            job.settle(name)
        case "slow link":
            unit = choose(job.setting.units)
            say(f"the links of {unit} do not carry its records")
            job.slow_down(unit)
        case "generation":
            unit = choose(job.setting.units)
            say(f"{unit} is to begin a generation")
            job.begin_anew(unit)
        case loss:
            node = choose(list(job.places.values()))
            say(f"{node.name} loses its {loss}")
            (job.lose_replicator if loss == "replicator" else job.lose_agent)(node)
    job.look()


def _go_on(job: Job, say: Say) -> None:
    """Nothing more happens: training goes on, and is as well protected as at first."""
    before = min(job.made.values())
    if job.setting.every != 1:
        _go_on_with_states(job, say)
        return
    for _ in range(job.setting.period + job.setting.slots + 3):
        _step(job, say)
        job.settle()
        job.look()
    newest = min(job.made.values())
    assert newest >= before + job.setting.period + job.setting.slots
    assert job.whole
    assert not job.emptied
    assert set(job.seen.values()) == {newest}
    assert all(member.watermark.whole for member in job.members.values())


def _go_on_with_states(job: Job, say: Say) -> None:
    """Nothing more happens, but links may be too slow: some state soon is with all peers, and records after it."""
    before = min(job.made.values())
    for _ in range(400):
        _step(job, say)
        job.settle()
        _redo_all(job)  # no message may make it go on, where no record is sent
        job.look()
        member = next(iter(job.members.values()))
        if member.watermark.record > before and member.watermark.whole:
            return
    raise AssertionError([(one.watermark, one._told) for one in job.members.values()])


def _redo_all(job: Job) -> None:
    for unit in job.setting.units:
        while job.redo(unit):
            pass


def _step(job: Job, say: Say) -> None:
    for unit in job.setting.units * 2:
        _train(job, unit, say)


def _train(job: Job, unit: Unit, say: Say) -> None:
    if job.may_start(unit):
        job.start(unit)
        say(f"{unit} begins a generation after {job.made[unit]}")
    elif job.may_commit(unit):
        job.commit(unit)
        say(f"{unit} commits {job.made[unit]}")
    elif job.may_stage(unit):
        job.stage(unit)
        say(f"{unit} stages {job.made[unit] + 1}")
