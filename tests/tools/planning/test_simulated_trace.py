"""Failures from a file: replayed exactly, and errors with line, column and range."""

from __future__ import annotations

from pathlib import Path

import pytest

from memckpt.errors import ConfigurationError
from memckpt_tools.planning.scheme import Scheme, Tier
from memckpt_tools.simulation.failures import Cluster, parse_trace, read_trace
from memckpt_tools.simulation.replay import Outcome, Repair, Training
from memckpt_tools.simulation.run import Setup, simulate

FOUR = Cluster(nodes=4)

TRACE = """\
# made by hand
time_seconds,kind,node
255,process,0
485,node,1
605,node,2

900,process,3
1150,process,3
1600,cluster,
1845,process,0
2000,process,0
2600,process,0
"""

THREE_TIERS = Scheme(
    name="three tiers",
    overhead=0.25,
    tiers=(
        Tier(name="memory", every_steps=1, lag_steps=0, restore_seconds=20, group_nodes=1, rebuild_seconds=100),
        Tier(
            name="peers", every_steps=1, lag_steps=2, restore_seconds=50, group_nodes=4, tolerates=1,
            rebuild_seconds=100,
        ),
        Tier(name="disk", every_steps=10, lag_steps=5, restore_seconds=200, survives_cluster=True),
    ),
)  # fmt: skip


def test_a_replay_is_what_was_computed_by_hand() -> None:
    """A step takes 10 s with protection; 10 s until a failure is noticed, 30 s until a node is replaced.

    |    at | fails            | step | back to, from                               | lost | goes on |
    |  255  | process          | 25.5 | 25, memory                                  |  0.5 |     285 |
    |  485  | node             | 45   | 43, peers: two steps behind                 |  2   |     575 |
    |  605  | node, same group | 46   | 40, disk: the first one is not back         |  6   |     845 |
    |  900  | process          | 45.5 | 40, disk: memory is empty until 945         |  5.5 |    1110 |
    | 1150  | process          | 44   | 40, disk: and until 1210                    |  4   |    1360 |
    | 1600  | cluster          | 64   | 50, disk: five steps behind                 | 14   |    1840 |
    | 1845  | process          | 50.5 | 50, disk                                    |  0.5 |    2055 |
    | 2000  | process          | 50   | 50, disk, while it starts                   |  0   |    2210 |
    """
    setup = Setup(
        cluster=FOUR,
        failures=parse_trace(TRACE, FOUR),
        training=Training(step_seconds=8, duration_seconds=2510),
        repair=Repair(detection_seconds=10, replacement_seconds=30),
    )
    (summary,) = simulate(setup, [THREE_TIERS], repetitions=7)
    assert summary.outcomes == (
        Outcome(
            useful_seconds=80 * 8,
            overhead_seconds=80 * 2,
            lost_seconds=325,
            down_seconds=30 + 90 + 240 + 210 + 210 + 240 + 155 + 210,
            steps=80,
            lost_steps=32.5,
            failures=(5, 2, 0, 0, 1),
            recoveries=(1, 1, 6, 0),
        ),
    )
    assert summary.ettr.mean == 640 / 2510
    assert summary.ettr.half_width is None
    assert summary.recoveries["disk"].mean == 6


def test_columns_in_any_order_and_a_file(tmp_path: Path) -> None:
    cluster = Cluster(nodes=12, nodes_per_rack=2, racks_per_zone=2)
    path = tmp_path / "trace.csv"
    path.write_text('node, comment, kind, time_seconds\n5,"a, b",rack,1.5\n11,,zone,2\n0,,process,2\n')
    failures = read_trace(path, cluster)
    assert failures.seconds.tolist() == [1.5, 2, 2]
    assert failures.kinds.tolist() == [2, 3, 0]
    assert failures.units.tolist() == [2, 2, 0]
    assert len(parse_trace("time_seconds,kind,node\n", cluster)) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace: expected a line of columns time_seconds, kind, node, found an empty file"),
        ("time,kind,node\n", "trace, line 1: expected the columns .* found time, kind, node: time_seconds missing"),
        ("time_seconds,kind,node\n1,node\n", "trace, line 2: expected 3 columns, found 2"),
        ("time_seconds,kind,node\nsoon,node,1\n", "line 2: time_seconds: expected seconds of 0 or more, found 'soon'"),
        ("time_seconds,kind,node\n-1,node,1\n", "line 2: time_seconds: expected seconds of 0 or more, found '-1'"),
        ("time_seconds,kind,node\nnan,node,1\n", "line 2: time_seconds: .* found 'nan'"),
        (
            "time_seconds,kind,node\n5,node,1\n\n4,node,1\n",
            "line 4: time_seconds: expected 5 or more, .* found 4; sort",
        ),
        ("time_seconds,kind,node\n5,gpu,1\n", "line 2: kind: expected one of process, node, .* found 'gpu'"),
        ("time_seconds,kind,node\n5,node,4\n", "line 2: node: expected a number of 0 to 3, .* found '4'"),
        ("time_seconds,kind,node\n5,node,-1\n", "line 2: node: expected a number of 0 to 3, .* found '-1'"),
        ("time_seconds,kind,node\n5,process,\n", "line 2: node: expected a number of 0 to 3, .* found ''"),
        ("time_seconds,kind,node\n5,rack,1\n", "line 2: kind: expected a cluster whose racks are known"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_trace(text, FOUR)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"trace: expected a readable text file, found .*missing\.csv"):
        read_trace(tmp_path / "missing.csv", FOUR)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigurationError, match="trace: expected a readable text file"):
        read_trace(tmp_path / "binary", FOUR)
