"""Failures from a file: replayed exactly, and errors with line, column and range."""

from __future__ import annotations

from pathlib import Path

import pytest

from memckpt.errors import ConfigurationError
from memckpt_tools.simulation.failures import Cluster, parse_trace, read_trace

FOUR = Cluster(nodes=4)


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
