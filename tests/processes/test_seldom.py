"""What recurs at every step is told the first times, then now and then."""

from __future__ import annotations

from memckpt.processes.log import Seldom


def test_the_first_times_are_told_then_one_in_a_while_with_the_number_of_those_left_out() -> None:
    now = [0.0]
    seldom = Seldom(first=3, seconds=60.0, clock=lambda: now[0])
    told = []
    for second in range(200):
        now[0] = float(second)
        if (more := seldom.count()) is not None:
            told.append((second, more))
    assert told[:3] == [(0, ""), (1, ""), (2, "")]
    assert told[3:] == [(second, " (59 more since the last line)") for second in (62, 122, 182)]
