"""Which states are protected in place of records, what holders keep of them, and when links are too slow."""

from __future__ import annotations

import random

import pytest

from memckpt.replication.keeping.watermark import Leader
from memckpt.replication.pacing.cadence import NONE_CAN_BE_HAD, Cadence
from memckpt.replication.process.holding_up import HeldUp
from memckpt.replication.transport.wire import Acknowledged, Watermark

NAMES = ("a", "b", "c")


def said(record: int = 10, **fields: int | bool) -> list[Acknowledged]:
    """All nodes say the same."""
    return [Acknowledged(name, record, record, True, **fields) for name in NAMES]  # type: ignore[arg-type]


@pytest.mark.promise(
    "if links carry only part of the records, the watermark still advances: states by value follow each other as "
    "fast as links allow, all nodes can go back to the last one, and records are sent again later"
)
def test_states_follow_each_other_as_soon_as_the_last_one_is_everywhere() -> None:
    cadence = Cadence()
    assert cadence.look(said(), newest=20, watermark=10) == 10
    assert (cadence.every, cadence.cut) == (0, 0)
    slow = [*said()[:2], Acknowledged("c", 10, 10, True, behind=True)]
    assert cadence.look(slow, newest=20, watermark=10) == 10
    assert cadence.cut == 22
    assert cadence.every > 0
    assert cadence.look([*said(cut=22)[:2], said()[2]], newest=40, watermark=10) == 10
    assert cadence.cut == 22
    assert cadence.look(said(cut=22), newest=60, watermark=10) == 22
    assert (cadence.reached, cadence.cut) == (22, 62)
    assert cadence.look(said(22, cut=62), newest=101, watermark=22) == 62
    assert cadence.every == 40


def test_an_order_that_came_too_late_is_given_earlier() -> None:
    cadence = Cadence()
    cadence.look(said(behind=True), newest=20, watermark=10)
    leads = []
    for newest in range(30, 900, 70):
        cadence.look([*said()[:2], Acknowledged("c", 10, 10, True, missed=cadence.cut)], newest, watermark=10)
        leads.append(cadence.cut - newest)
        if len(leads) == 9:
            break
    assert leads[:4] == [4, 8, 16, 32]
    assert set(leads[4:]) == {64}


def test_records_are_all_that_there_is_where_no_state_can_be_copied() -> None:
    cadence, newest = Cadence(), 20
    cadence.look(said(behind=True), newest, watermark=10)
    while cadence.cut > 0:
        newest = cadence.cut + 1
        cadence.look([*said()[:2], Acknowledged("c", 10, 10, True, missed=cadence.cut)], newest, watermark=10)
        assert newest < 1000
    assert (cadence.every, cadence.cut) == (0, NONE_CAN_BE_HAD)
    cadence.look(said(behind=True), newest + 900, watermark=10)
    assert (cadence.every, cadence.cut) == (0, NONE_CAN_BE_HAD)
    cadence.look(said(behind=True), newest + 1000, watermark=10)
    cadence.look(said(behind=True), newest + 1000, watermark=10)
    assert cadence.every > 0
    assert cadence.cut > newest + 1000


def test_records_are_tried_again_ever_later_until_they_get_through() -> None:
    cadence, newest, states = Cadence(), 20, []
    cadence.look(said(behind=True), newest, watermark=10)
    for _ in range(8):
        made = 0
        while cadence.cut:
            newest = cadence.cut + 10
            cadence.look(said(cut=cadence.cut), newest, watermark=cadence.reached)
            made += 1
        states.append(made)
        assert cadence.every > 0
        cadence.look(said(cadence.reached, behind=True), newest, watermark=cadence.reached)
    assert states == [2, 4, 8, 16, 32, 64, 64, 64]
    while cadence.cut:
        cadence.look(said(cut=cadence.cut), cadence.cut + 10, watermark=cadence.reached)
    newest = cadence.reached + 50
    assert cadence.look(said(newest), newest, watermark=newest) == newest
    assert (cadence.every, cadence.cut) == (0, 0)
    # What has kept up for long and falls behind then is tried again soon.
    cadence.look(said(newest + 1000, behind=True), newest + 1000, watermark=newest + 1000)
    made = 0
    while cadence.cut:
        cadence.look(said(cut=cadence.cut), cadence.cut + 10, watermark=cadence.reached)
        made += 1
    assert made == 2


def test_a_state_counts_until_records_reach_further_everywhere() -> None:
    leader = Leader(["a", "b"], 0, Cadence())
    leader.newest = 20
    leader.acknowledged(Acknowledged("a", 10, 0, True))
    leader.acknowledged(Acknowledged("b", 10, 0, True, behind=True))
    assert leader.watermark == Watermark(10, True, every=2, cut=22)
    cut = 22
    for _ in range(2):
        for name in "ab":
            leader.acknowledged(Acknowledged(name, 10, 10, True, cut=cut))
        reached, cut = cut, leader.watermark.cut
        leader.newest += 20
        assert leader.watermark.record == reached
    assert cut == 0
    assert leader.watermark.every > 0
    for name in "ab":
        leader.acknowledged(Acknowledged(name, reached, reached, True, cut=reached))
    leader.acknowledged(Acknowledged("a", reached + 9, reached + 8, True, cut=reached))
    assert (leader.watermark.record, leader.watermark.whole) == (reached, True)
    leader.acknowledged(Acknowledged("b", reached + 9, reached + 9, True, cut=reached))
    assert leader.watermark == Watermark(reached + 9, True)


@pytest.mark.parametrize("rate", [0.5, 3.0, 40.0, 700.0])
def test_lag_is_bounded_at_any_rate(rate: float) -> None:
    """Links carry a state in so many steps; orders take some to arrive, and each node has its own."""
    choose = random.Random(rate).randint
    cadence, newest, watermark, lags = Cadence(), 100, 90, []
    cadence.look(said(90, behind=True), newest, watermark)
    done, due = 0, 0.0
    for _ in range(int(400 * max(rate, 1))):
        newest += 1
        cut, missed = cadence.cut, 0
        if cut and newest == cut:
            due = newest + rate + choose(0, 2)
        if cut and done < cut <= newest and newest >= due:
            done = cut
        watermark = cadence.look(said(watermark, cut=done, missed=missed, behind=not cut), newest, watermark)
        lags.append(newest - watermark)
    assert max(lags[int(4 * rate) + 20 :]) <= 2 * rate + 12
    assert cadence.every <= rate + 8


def test_waiting_at_each_step_says_that_links_are_too_slow() -> None:
    held = HeldUp(0.03)
    held.look(0.0, counts=True)
    now = 0.0
    for _ in range(40):
        now += 1.0
        held.waited(0.1)
        held.committed()
        held.look(now, counts=True)
    assert held.too_long
    held.forget()
    assert not held.too_long


@pytest.mark.parametrize(("seconds", "every"), [(30.0, 40), (0.01, 1), (0.1, 3)])
def test_a_peer_that_is_away_for_a_while_and_what_is_allowed_say_nothing(seconds: float, every: int) -> None:
    held = HeldUp(0.03)
    held.look(0.0, counts=True)
    now = 0.0
    for record in range(200):
        now += 1.0
        if record % every == 0:
            held.waited(seconds)
            now += seconds
        held.committed()
        held.look(now, counts=True)
        assert not held.too_long
