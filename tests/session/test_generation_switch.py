"""The state machine of generations, event by event, with an agent and slots that only take notes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from memckpt.capture.phases import StallClock
from memckpt.capture.spec_request import Growth
from memckpt.protocol.trainer import Begin
from memckpt.session.generation_switch import GenerationSwitch, SwitchState
from memckpt.session.session import Session
from memckpt.session.staging import RestorePoint
from memckpt.state import codec

EMPTY, OPEN, DUE = SwitchState.EMPTY, SwitchState.OPEN, SwitchState.DUE
#: Sent as they are; their fields do not matter here.
WRITTEN, COMMITTED = object(), object()


class Notes:
    """Fakes of what a switch works on, and a list of what it has done with them."""

    def __init__(self, ranks: int = 1, local: int = 1, mode: str = "lazy", every: int = 1) -> None:
        self.done: list[Any] = []
        self.problem: str | None = None
        self.tested = False
        self.orders: list[tuple[int, str]] = []
        self.room = True
        self.growth = Growth()
        self.ranks = SimpleNamespace(unit=tuple(range(local)), world_size=ranks)
        self.live: Any = SimpleNamespace(
            growth=self.growth, left_out=(), redone_only_here=(), spec=lambda request: request
        )
        self.mode: Any = SimpleNamespace(
            mode=mode,
            reason="",
            redoes=mode != "snapshot",
            not_redoable="",
            every=every,
            request=lambda asynchronous: SimpleNamespace(mode=self.mode.mode, every=self.mode.every),
            after_record=lambda compiled, changing, record: self.tested,
            fall_back=lambda reason: setattr(self.mode, "mode", "lazy"),
        )
        self.recorder: Any = SimpleNamespace(
            record=1,
            problem=None,
            tap_mismatch=None,
            compiled="",
            check=SimpleNamespace(restart=lambda: None),
            pending=SimpleNamespace(regroup=lambda: None),
            begin_record=self._begin,
            fail=lambda reason: setattr(self.recorder, "problem", reason),
            record_steps=lambda needed: None,
        )
        self.staging: Any = SimpleNamespace(
            writer=None,
            ready=True,
            commits_uncaptured=lambda record: False,
            outgrown=lambda record, request: False,
            ranks_disagree=lambda record: False,
            stage_by_value=lambda record: None,
            take_prepared=lambda spec: None,
            write_generation=lambda regions, point: (self._writer(), WRITTEN),
            adopt_writer=lambda writer: setattr(self.staging, "writer", writer),
            drop=lambda: setattr(self.staging, "writer", None),
            seal=lambda point: lambda: COMMITTED,
            begin_record=lambda record: self._begin(None, record),
        )
        self.link: Any = SimpleNamespace(
            order=None,
            connection=SimpleNamespace(applied=0),
            make_slots=lambda generation: self.room,
            ask_for_generation=self._ask_for_generation,
            send=self.done.append,
            finish_sending=lambda: None,
            prepare=lambda spec, record, reason: None,
            take_order=lambda record: None,
            wait_for_room=lambda record, spec, began: 0.0,
        )
        changes: Any = SimpleNamespace(problem=None, persistent="", static_changes=list, look_at_commit=lambda: None)
        self.changes = changes
        self.taken_at_step: list[str] = []
        tap: Any = SimpleNamespace(
            reinstall=lambda: None,
            holds_reductions_back=True,
            at_step_because="",
            take_at_step=self.taken_at_step.append,
        )
        training: Any = SimpleNamespace(
            ranks=self.ranks,
            live=self.live,
            recorder=self.recorder,
            copier=SimpleNamespace(asynchronous=False),
            clock=StallClock(),
            caveats=[],
        )
        self.switch = GenerationSwitch(training, self.link, self.staging, changes, self.mode, tap)
        self.session = Session.__new__(Session)  # its part that brings a record to the agent
        self.session._switch, self.session._staging, self.session._link = self.switch, self.staging, self.link
        self.session._copier, self.session._recorder = training.copier, self.recorder
        self.session._protection = SimpleNamespace(end_gap=lambda point: None)  # type: ignore[assignment]

    def _writer(self) -> Any:
        return SimpleNamespace(
            whole=False, generation=1, spec=self.switch.request, use_all_slots=lambda record: None, close=lambda: None
        )

    def _begin(self, writer: Any, record: int) -> None:
        self.recorder.record, self.recorder.problem = record, None

    def _ask_for_generation(
        self, record: int, reason: str, changing: frozenset[str], at_step_because: str = ""
    ) -> Begin:
        self.orders.append((record, reason))
        return Begin(record, reason, changing)

    def end(self) -> tuple[int, str, SwitchState]:
        """End the current record: its number, what became of it, and the state then."""
        record = self.recorder.record
        self.done.clear()
        point = RestorePoint(record, record, codec.Packed({}, lambda one: one, lambda: lambda: None))
        self.session._stage_and_commit(point)
        if self.recorder.record == record:
            self._begin(None, record + 1)
        [one] = self.done
        what = {id(WRITTEN): "written", id(COMMITTED): "committed"}.get(id(one), "void")
        return record, what, self.switch.state

    def opened(self) -> Notes:
        self.switch.start(1)
        assert self.end() == (1, "written", OPEN)
        return self


def test_the_first_record_of_an_attempt_begins_a_generation() -> None:
    notes = Notes()
    assert notes.switch.state is EMPTY
    notes.switch.start(1)
    assert notes.switch.state is DUE
    assert [notes.end() for _ in range(3)] == [(1, "written", OPEN), (2, "committed", OPEN), (3, "committed", OPEN)]
    assert notes.switch.began == 1


def test_a_rank_of_its_own_writes_a_record_that_cannot_be_staged() -> None:
    notes = Notes().opened()
    notes.recorder.fail("a tap raised")
    assert notes.end() == (2, "written", OPEN)
    notes.changes.problem = "w was changed outside the optimizer"
    assert notes.end() == (3, "written", OPEN)
    assert notes.changes.problem is None
    assert notes.end() == (4, "committed", OPEN)


def test_ranks_that_share_slots_begin_after_the_record_that_the_agent_orders() -> None:
    notes = Notes(ranks=2, local=2).opened()
    notes.recorder.fail("a tap raised")
    assert notes.end() == (2, "void", DUE)
    assert notes.orders == [(3, "a tap raised")]
    assert notes.end() == (3, "written", OPEN)


def test_a_record_before_the_one_that_is_due_is_committed() -> None:
    notes = Notes(ranks=2, local=2).opened()
    notes.switch.obey(Begin(4, "buffer changed", frozenset({"buffer"})))
    assert notes.growth.changing == {"buffer"}
    assert [notes.end() for _ in range(3)] == [(2, "committed", DUE), (3, "committed", DUE), (4, "written", OPEN)]


def test_a_second_order_for_a_generation_that_has_begun_begins_no_other() -> None:
    notes = Notes(ranks=2, local=2).opened()
    notes.switch.obey(Begin(2, "asked for"))
    assert notes.end() == (2, "written", OPEN)
    notes.switch.obey(Begin(2, "asked for"))
    assert notes.switch.state is OPEN


@pytest.mark.parametrize(("local", "after"), [(1, 8), (2, 7)])
def test_captured_generations_of_some_of_the_ranks_begin_with_a_record_that_all_capture(local: int, after: int) -> None:
    notes = Notes(ranks=2, local=local, mode="snapshot", every=4)
    notes.switch.obey(Begin(7, "asked for"))
    assert notes.switch.after == after


def test_the_end_of_the_self_test_begins_a_generation_in_its_mode() -> None:
    notes = Notes(mode="snapshot").opened()
    notes.tested, notes.mode.mode = True, "lazy"
    notes.switch.end_self_test(2)
    assert (notes.switch.state, notes.switch.request.mode) == (DUE, "lazy")
    assert notes.end() == (2, "written", OPEN)


def test_a_replica_that_cannot_be_redone_is_followed_by_a_lazy_generation() -> None:
    notes = Notes(mode="eager").opened()
    notes.switch.lose_replica("out of memory")
    assert notes.switch.request.mode == "lazy"
    assert notes.end() == (2, "written", OPEN)


def test_after_another_agent_has_come() -> None:
    alone, shared = Notes().opened(), Notes(ranks=2, local=2).opened()
    for notes in (alone, shared):
        notes.staging.drop()
        assert notes.switch.state is EMPTY
        notes.switch.rejoin(notes.recorder.record)
    assert alone.end() == (2, "written", OPEN)
    shared.staging.ready = False
    assert shared.end() == (2, "void", EMPTY)
    shared.switch.obey(Begin(3, "asked for"))
    assert shared.end() == (3, "written", OPEN)


def test_without_slots_there_is_nothing_to_write_to() -> None:
    notes = Notes()
    notes.switch.start(1)
    notes.room = False
    assert notes.end() == (1, "written", EMPTY)
    notes.staging.ready = False
    assert notes.end() == (2, "void", EMPTY)


@pytest.mark.parametrize(
    ("held", "anew", "state", "after"),
    [("lazy", False, OPEN, None), ("lazy", True, DUE, 6), ("snapshot", False, DUE, 6)],
)
def test_a_held_generation_goes_on_with_the_same_settings(
    held: str, anew: bool, state: SwitchState, after: int | None
) -> None:
    notes = Notes()
    notes.switch.start(None)
    writer = notes._writer()
    writer.spec = SimpleNamespace(mode=held, every=1)
    notes.staging.adopt_writer(writer)
    notes.switch.resume(writer, 5, anew)
    assert (notes.switch.state, notes.switch.after, notes.recorder.record) == (state, after, 6)


def test_what_one_rank_has_found_of_gradients_all_do() -> None:
    notes = Notes(ranks=2, local=2).opened()
    notes.switch.obey(Begin(3, "a gradient was changed", at_step_because="the gradient of w was changed"))
    assert notes.taken_at_step == ["the gradient of w was changed"]
    notes.switch.obey(Begin(5, "asked for"))
    assert len(notes.taken_at_step) == 1
