"""N, which records or states are protected: chosen once, the same on all nodes, and what links would carry."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from memckpt.replication.pacing.watermark import Cadence, Leader, LinkMeter
from memckpt.replication.transport.messages import Acknowledged, Watermark

NAMES = ("a", "b", "c")


def said(record: int = 10, **fields: int | bool) -> list[Acknowledged]:
    """All nodes say the same."""
    return [Acknowledged(name, record, record, True, **fields) for name in NAMES]  # type: ignore[arg-type]


def begun(every: int | None) -> Cadence:
    cadence = Cadence(every)
    cadence.begin_generation(snapshots=False)
    return cadence


@pytest.mark.promise(
    "if links carry only part of the records, the watermark still advances: states by value follow each other "
    "every N steps, and all nodes can go back to the last one"
)
def test_states_follow_each_other_every_n_records() -> None:
    cadence = begun(30)
    assert cadence.advance(said(), newest=20, watermark=10) == 10
    assert (cadence.every, cadence.due) == (30, 22)  # the first one at once
    assert cadence.advance([*said(state=22)[:2], said()[2]], newest=24, watermark=10) == 10
    assert cadence.due == 22
    assert cadence.advance(said(state=22), newest=26, watermark=10) == 22
    assert (cadence.reached, cadence.due) == (22, 0)
    assert cadence.advance(said(22, state=22), newest=49, watermark=22) == 22
    assert cadence.due == 0
    cadence.advance(said(22, state=22), newest=50, watermark=22)
    assert cadence.due == 52
    # Links that do not carry a state in N records: the next one is named when the last one is there.
    assert cadence.advance(said(22, state=52), newest=200, watermark=22) == 52
    assert cadence.due == 202
    assert cadence.every == 30


def test_n_is_chosen_when_all_have_measured_and_stays_until_a_generation_begins() -> None:
    cadence = begun(None)
    cadence.advance([*said(needed=1)[:2], *said()[2:]], newest=20, watermark=10)
    assert (cadence.every, cadence.needed) == (1, 0)
    cadence.advance([*said(needed=1)[:2], *said(needed=7)[2:]], newest=20, watermark=10)
    assert (cadence.every, cadence.needed, cadence.due) == (7, 7, 22)
    cadence.advance(said(needed=40), newest=20, watermark=10)
    assert (cadence.every, cadence.needed) == (7, 40)
    cadence.begin_generation(snapshots=False)
    cadence.advance(said(needed=40), newest=20, watermark=10)
    assert cadence.every == 40
    cadence.begin_generation(snapshots=False)
    cadence.advance(said(needed=1), newest=20, watermark=10)
    assert (cadence.every, cadence.due) == (1, 0)


def test_a_configured_n_stays() -> None:
    cadence = begun(5)
    cadence.advance(said(needed=40), newest=20, watermark=10)
    cadence.begin_generation(snapshots=False)
    cadence.advance(said(needed=40), newest=20, watermark=10)
    assert (cadence.every, cadence.needed) == (5, 40)


def test_snapshots_are_states_by_themselves() -> None:
    cadence = Cadence(5)
    cadence.begin_generation(snapshots=True)
    cadence.advance(said(), newest=20, watermark=10)
    assert (cadence.every, cadence.due) == (1, 0)
    cadence.begin_generation(snapshots=False)
    cadence.advance(said(), newest=20, watermark=10)
    assert (cadence.every, cadence.due) == (5, 22)


def test_a_leader_that_takes_the_place_of_another_goes_on_with_its_choice() -> None:
    cadence = begun(None)
    nodes = [Acknowledged("a", 0, 0, True), *said(50, every=9, ordered=80, state=50)[1:]]
    cadence.advance(nodes, newest=60, watermark=0)
    assert (cadence.every, cadence.due) == (9, 80)  # the state for which the others work
    # Who has another state than the one that is named has not reached it.
    assert cadence.advance([*nodes[:1], *said(80, every=9, ordered=90, state=90)[1:]], newest=95, watermark=0) == 0


def test_a_job_that_resumes_names_no_state_that_has_passed() -> None:
    """The leader's node has no record yet."""
    cadence = begun(10)
    cadence.advance(said(), newest=0, watermark=50)
    assert cadence.due == 52


def test_an_order_that_came_too_late_is_given_earlier() -> None:
    cadence = begun(10)
    cadence.advance(said(), newest=20, watermark=10)
    leads = []
    for newest in range(30, 900, 70):
        cadence.advance([*said()[:2], Acknowledged("c", 10, 10, True, missed=cadence.due)], newest, watermark=10)
        leads.append(cadence.due - newest)
        if len(leads) == 9:
            break
    assert leads[:4] == [4, 8, 16, 32]
    assert set(leads[4:]) == {64}


@pytest.mark.parametrize("configured", [None, 8])
def test_records_are_all_that_there_is_where_no_state_can_be_copied(configured: int | None) -> None:
    """Until the next generation; unless it is configured otherwise."""
    cadence, newest = begun(configured), 20
    cadence.advance(said(needed=8), newest, watermark=10)
    for _ in range(30):
        newest = max(newest, cadence.due) + 1
        cadence.advance(
            [*said(needed=8)[:2], Acknowledged("c", 10, 10, True, missed=cadence.due, needed=8)], newest, 10
        )
    assert cadence.every == (configured or 1)
    cadence.begin_generation(snapshots=False)
    cadence.advance(said(needed=8), newest, watermark=10)
    assert (cadence.every, cadence.due > newest) == (8, True)


def test_a_state_counts_until_records_reach_further_everywhere() -> None:
    leader = Leader(["a", "b"], 0, Cadence(None))
    leader.begin_generation(snapshots=False)
    leader.look(20)
    leader.acknowledged(Acknowledged("a", 10, 0, True, needed=6))
    leader.acknowledged(Acknowledged("b", 10, 0, True, needed=1))
    assert leader.watermark == Watermark(10, True, every=6, due=22, needed=6)
    for name in "ab":
        leader.acknowledged(Acknowledged(name, 10, 10, True, state=22, needed=1, every=6))
    assert leader.watermark == Watermark(22, True, every=6, due=0, needed=1)
    leader.begin_generation(snapshots=False)
    assert leader.watermark.every == 1
    for name in "ab":
        leader.acknowledged(Acknowledged(name, 22, 22, True, state=22, needed=1))
    leader.acknowledged(Acknowledged("a", 31, 30, True, state=22, needed=1))
    assert (leader.watermark.record, leader.watermark.whole) == (22, True)
    leader.acknowledged(Acknowledged("b", 31, 31, True, state=22, needed=1))
    assert leader.watermark == Watermark(31, True, needed=1)


@pytest.mark.parametrize("rate", [0.5, 3.0, 40.0, 700.0])
@pytest.mark.parametrize("every", [2, 40])
def test_lag_is_bounded_at_any_rate(rate: float, every: int) -> None:
    """Links carry a state in so many steps; orders take some to arrive, and each node has its own."""
    choose = random.Random(rate).randint
    cadence, newest, watermark, lags = begun(every), 100, 90, []
    cadence.advance(said(90), newest, watermark)
    done, due = 0, 0.0
    for _ in range(int(400 * max(rate, 1))):
        newest += 1
        cut = cadence.due
        if cut and newest == cut:
            due = newest + rate + choose(0, 2)
        if cut and done < cut <= newest and newest >= due:
            done = cut
        watermark = cadence.advance(said(watermark, state=done), newest, watermark)
        lags.append(newest - watermark)
    assert max(lags[int(4 * rate) + 20 :]) <= rate + max(rate, every) + 12


def measured(meter: LinkMeter, happens: Callable[[int], tuple[float, bool, bool]], records: int = 200) -> int:
    """N, where before each record so long a wait is, and it is carried or left out."""
    now, carried, left_out = 0.0, 0, 0
    for record in range(records):
        waited, arrives, lost = happens(record)
        if waited:
            meter.count_wait(waited)
            now += waited
        now += 1.0
        carried, left_out = carried + arrives, left_out + lost
        meter.count_record()
        meter.measure(now, record > 0, carried, left_out)
    return meter.needed


@pytest.mark.parametrize(
    ("happens", "needed"),
    [
        (lambda record: (0.0, True, False), 1),
        (lambda record: (4.0, True, False), 10),  # a record takes 5 steps, a state twice that
        (lambda record: (0.0, record % 4 == 0, record % 4 != 0), 8),
        (lambda record: (30.0 * (record % 40 == 0), True, False), 1),  # a peer that is away for a while
        (lambda record: (0.01, True, False), 1),  # what is allowed
        (lambda record: (0.1 * (record % 3 == 0), True, False), 1),
    ],
)
def test_waits_and_records_that_are_left_out_say_how_much_links_carry(
    happens: Callable[[int], tuple[float, bool, bool]], needed: int
) -> None:
    meter = LinkMeter(0.03)
    meter.ratio = 2.0
    assert measured(meter, happens) == needed


def test_what_links_carry_is_not_known_before_there_is_enough_to_judge_by() -> None:
    assert measured(LinkMeter(0.03), lambda record: (0.0, True, False), records=20) == 0
    assert measured(LinkMeter(0.03), lambda record: (0.0, record % 500 == 499, True), records=1010) >= 400


def test_states_on_their_way_say_how_much_links_carry() -> None:
    meter = LinkMeter(0.03)
    meter.ratio = 2.2
    meter.count_state(40)
    assert meter.needed == 40
    meter.count_state(2)
    assert meter.needed == 1
