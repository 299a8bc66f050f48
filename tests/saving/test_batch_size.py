"""Records in a batch of the log: few where writing is fast, and steady."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memckpt.agent.saving.writer.record_writer import BatchSize


def history(size: BatchSize, fixed: float, each: float, step: float, batches: int, now: float = 0.0) -> list[int]:
    """Sizes of batches whose writes take `fixed` seconds, and `each` more for each record; `step` seconds a record."""
    found = []
    for _ in range(batches):
        found.append(size.records)
        now += step * found[-1]
        size.wrote(found[-1], fixed + each * found[-1], now)
    return found


def test_fast_writes_are_made_at_every_step() -> None:
    assert history(BatchSize(64, fixed=False), 0.04, 0.0, 1.0, 4) == [64, 64, 1, 1]


def test_short_steps_make_no_more_than_a_batch_each_second() -> None:
    assert history(BatchSize(64, fixed=False), 0.0001, 0.0, 0.1, 4) == [64, 64, 10, 10]


def test_slow_writes_are_rare() -> None:
    assert history(BatchSize(64, fixed=False), 0.1, 0.0, 0.1, 12)[-1] == 20
    assert history(BatchSize(64, fixed=False), 5.0, 0.0, 0.01, 12) == [64] * 12


def test_a_configured_number_stays() -> None:
    assert history(BatchSize(7, fixed=True), 0.001, 0.0, 10.0, 5) == [7] * 5


def test_storage_that_becomes_slow_gets_larger_batches() -> None:
    size = BatchSize(64, fixed=False)
    assert history(size, 0.01, 0.0, 1.0, 5)[-1] == 1
    assert history(size, 2.0, 0.0, 1.0, 8, now=100.0)[-1] == 40


@given(fixed=st.floats(0.0, 10.0), each=st.floats(0.0, 1.0), step=st.floats(0.001, 10.0), most=st.integers(1, 64))
def test_it_settles_and_stays(fixed: float, each: float, step: float, most: int) -> None:
    found = history(BatchSize(most, fixed=False), fixed, each, step, 200)
    assert all(1 <= one <= most for one in found)
    assert len(set(found[-20:])) == 1, "constant times, and yet it changes"
    b = found[-1]
    assert b == most or (fixed + each * b) / (b * step) < 0.0502, "writing takes too much of the time"
    assert b == most or b * step > 0.99, "batches follow each other at once"
