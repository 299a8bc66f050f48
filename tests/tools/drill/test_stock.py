"""A script's own checkpoints are drilled: what they bring back, and the known faults of stock checkpointing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

from memckpt.errors import ConfigurationError, DrillError
from memckpt_tools.drill import command, witness
from memckpt_tools.drill.comparison import Verdict
from memckpt_tools.drill.lines import Attempt, Begun, Point, RankHistory, Restored, RunHistory, Taken
from memckpt_tools.drill.stock import Blow, Result, aligned, check_begin
from memckpt_tools.drill.summary import junit_xml, print_beside, summary_of_own

SCRIPTS = Path(__file__).parent / "stock_scripts.py"
LIMIT_SECONDS = 600


def drill(tmp_path: Path, script: list[str], *options: str, status: int) -> tuple[str, dict[str, Any]]:
    """Output of the drill of a script, and its findings."""
    started = [sys.executable, "-m", "memckpt", "drill", "--stock", "--steps", "48", "--seed", "4", *options]
    ended = subprocess.run(
        [*started, "--json", "found.json", "--dir", "drill", "--", sys.executable, str(SCRIPTS), *script],
        cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    assert ended.returncode == status, ended.stdout + ended.stderr
    return ended.stdout, json.loads((tmp_path / "found.json").read_bytes())


def test_a_file_that_is_written_over_is_torn_by_a_kill_and_nothing_starts_again(tmp_path: Path) -> None:
    printed, found = drill(tmp_path, ["plain"], "--kills", "1", "--kinds", "save", status=1)
    (kill,) = found["kills"]
    assert (found["outcome"], kill["outcome"], kill["resumed"]) == ("cannot start", "cannot start", None)
    assert "while it wrote saved.pt, 66.0 KiB of it" in printed
    assert "torch.load" in kill["why_none"], "the user sees where the script ended"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drill", "found.json"], "results are the user's"
    assert "To see it again: python" in printed
    again = subprocess.run(
        [sys.executable, tmp_path / "drill" / "repro-kill-1.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    assert (again.returncode, "The fault is there: no step is trained" in again.stdout) == (1, True), again.stderr


@pytest.mark.slow
def test_a_whole_checkpoint_under_another_name_first_is_exact_and_loses_steps(tmp_path: Path) -> None:
    printed, found = drill(tmp_path, ["plain", "--atomic"], "--kills", "4", status=0)
    kills = found["kills"]
    assert found["outcome"] == "exact"
    assert {kill["kind"] for kill in kills} == {"step", "save", "file", "term"}
    assert [kill["file"] for kill in kills if kill["kind"] == "file"] == ["rename saved.tmp to saved.pt"]
    assert all(kill["step"] - kill["resumed"] == kill["lost"] <= 5 and kill["resumed"] % 5 == 0 for kill in kills)
    assert "Exact: 4 kills left no trace" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forgotten", "said"),
    [
        ("optimizer", "not all of its state: state 0.weight (step)"),
        ("generator", "the data go on elsewhere, or a generator"),
        ("schedule", "not the schedule: step"),
    ],
)
def test_what_a_checkpoint_forgets_is_named(forgotten: str, said: str, tmp_path: Path) -> None:
    script = ["plain", "--atomic", "--forget", forgotten]
    printed, found = drill(tmp_path, script, "--kills", "2", "--kinds", "term", status=1)
    assert found["outcome"] == "diverged"
    assert said in printed


@pytest.mark.slow
def test_both_ways_of_resuming_one_script_stand_in_one_table(tmp_path: Path) -> None:
    started = [sys.executable, "-m", "memckpt", "drill", "--both", "--steps", "24", "--seed", "6", "--kills", "1"]
    options = ["--no-overhead", "--json", "found.json", "--junit", "junit.xml", "--html", "page.html"]
    ended = subprocess.run(
        [*started, *options, "--", sys.executable, str(SCRIPTS), "plain", "--atomic", "--forget", "optimizer",
         "--protected"],
        cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr  # memckpt's verdict
    rows = [line.split() for line in ended.stdout.splitlines() if line.strip().startswith(("its own", "memckpt "))]
    assert [row[:4] for row in rows] == [["its", "own", "diverged", "1"], ["memckpt", "exact", "1", "0.0"]]
    assert "names no setting" not in ended.stdout
    found = json.loads((tmp_path / "found.json").read_bytes())
    assert (found["its own"]["outcome"], found["memckpt"]["outcome"]) == ("diverged", "equal")
    suites = {suite.get("name"): suite for suite in ElementTree.parse(tmp_path / "junit.xml").iter("testsuite")}
    assert suites["memckpt"].get("failures") == "0"
    assert suites["its own"].get("failures") != "0"
    assert "its own" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_lightning_goes_on_with_other_data_in_mid_epoch(tmp_path: Path) -> None:
    printed, found = drill(tmp_path, ["lightning"], "--kills", "2", "--kinds", "step", status=1)
    assert found["outcome"] == "diverged"
    assert "the data go on elsewhere, or a generator" in printed


@pytest.mark.slow
def test_transformers_chooses_a_checkpoint_that_is_half_written(tmp_path: Path) -> None:
    printed, found = drill(tmp_path, ["trainer"], "--kills", "1", "--kinds", "save", status=1)
    assert found["outcome"] == "cannot start"
    assert "saved/checkpoint-" in printed, "the user sees which one it chose"


def _point(step: int, bits: bytes) -> Point[Taken]:
    digest, sketch = bits * 16, bytes(32)
    line = Taken(step, step, 0.0, 0.0, (), digest, sketch, {}, 0.0, False, None, None)
    return Point(line, (("parameter", "weight"),))


def _attempt(bits: bytes, *steps: bytes) -> Attempt:
    begun = Begun(1, 1, 0, 1, time.monotonic(), None, "")
    restored = Point(Restored(0, 0, "", 0.0, None, bits * 16, bytes(32)), (("parameter", "weight"),))
    return Attempt(begun, restored, [_point(index, each) for index, each in enumerate(steps, start=1)])


def test_a_process_begins_with_the_last_step_that_had_its_parameters(tmp_path: Path) -> None:
    run = RunHistory(tmp_path)
    run.ranks[0] = RankHistory(
        [
            _attempt(b"0", b"1", b"2", b"2", b"4"),  # the third step is skipped: it changes nothing
            _attempt(b"2", b"4", b"5"),
            _attempt(b"0", b"1"),
        ]
    )
    found, begins = aligned(run)
    assert begins == [0, 3, 0]
    assert [[point.step for point in each.points] for each in found.ranks[0].attempts] == [[1, 2, 3, 4], [4, 5], [1]]


def test_a_second_run_that_goes_on_from_the_first_ones_files_is_refused(tmp_path: Path) -> None:
    """It saves where no copy keeps runs apart. A first step that changes nothing is no such case."""

    def run(attempt: Attempt) -> RunHistory:
        history = RunHistory(tmp_path)
        history.ranks[0] = RankHistory([attempt])
        return history

    first = run(_attempt(b"0", b"0", b"1", b"2"))
    check_begin(first, run(_attempt(b"0", b"0", b"1")))
    check_begin(first, run(_attempt(b"7", b"8")))
    with pytest.raises(DrillError, match="begins behind step 2 of the first: the script saves outside"):
        check_begin(first, run(_attempt(b"1", b"2")))


def test_a_step_that_only_makes_a_state_is_none_of_training() -> None:
    """torch's get_state_dict makes it before it loads; a first step of a warmup is one of training."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], 0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda one, args, kwargs: seen.append(witness.makes_state(one, kwargs)))
    get_state_dict(torch.nn.ParameterList([weight]), optimizer)
    weight.sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert seen == [True, False, False]


SAVES = """
import sys, torch
models = [torch.nn.Linear(4, 4) for _ in range(50)]
optimizer = torch.optim.SGD([each for model in models for each in model.parameters()], 0.1)
for _ in range(20):
    sum(model(torch.ones(4)).sum() for model in models).backward()
    optimizer.step()
    with open("saved", "wb") as file:
        file.write(bytes(int(sys.argv[1])))
"""


@pytest.mark.parametrize(("nbytes", "status"), [(30_000, 0), (40_000, -signal.SIGXFSZ)])
def test_a_limit_cuts_off_what_is_saved_and_no_lines(nbytes: int, status: int, tmp_path: Path) -> None:
    (tmp_path / witness.ORDER).symlink_to("3")
    variables = witness.variables(tmp_path / "site", tmp_path)
    ended = subprocess.run(
        [sys.executable, "-c", SAVES, str(nbytes)],
        cwd=tmp_path, env={**os.environ, **variables}, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    assert ended.returncode == status
    run = RunHistory(tmp_path)
    run.poll()
    run.close()
    limit = witness.limit_of(run.ranks[0].nbytes)
    if status:
        assert run.furthest == 3, "it goes on until then"
        assert (tmp_path / "saved").stat().st_size == limit
    else:
        assert run.furthest == 20
        assert (tmp_path / "rank-0.jsonl").stat().st_size > limit


def test_each_kill_is_a_test_case_with_what_has_failed(capsys: pytest.CaptureFixture[str]) -> None:
    """The whole training is the last one."""
    kills = [Blow("step", 12, resumed=10, seconds=3.0), Blow("term", 20, why_none="it \x1b[31mended\x00\nTraceback")]
    verdict = Verdict("equal", 24, 24, [], [], [], (), {}, None)
    summary = summary_of_own(Result(verdict, kills, 0.004), ["python", "train.py"], 7)
    assert (summary.outcome, summary.passed, summary.lost, summary.seconds) == ("cannot start", False, [2], [3.0])
    suites = ElementTree.fromstring(junit_xml([summary]))
    found = [(case.get("name"), case.findtext("failure")) for case in suites.iter("testcase")]
    assert found == [
        ("kill 1: step behind step 12", None),
        ("kill 2: term behind step 20", "it ended\nTraceback"),
        ("training", "Cannot start: behind kill 2 no process trained on."),
    ]
    (suite,) = suites
    assert (suite.get("tests"), suite.get("failures")) == ("3", "2")
    print_beside([summary])
    assert "its own cannot start 2 2.0 2 3.0 s 4.0 ms" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"both": True, "kinds": "step"}, "--both: expected neither --kinds nor --nodes"),
        ({"both": True, "nodes": 2}, "--both: expected neither --kinds nor --nodes"),
        ({"resume_command": "python b.py"}, "--resume-command: expected --stock beside it"),
        ({"in_place": True, "stock": True}, "--in-place: expected neither --stock nor --both"),
        ({"stock": True, "kinds": "agent"}, "--kinds: expected names among step, save, file, term"),
        ({"kinds": "nodes"}, "--kinds: expected names among trainer, agent, both"),
        ({"kinds": "node"}, "--kinds node: expected --nodes N of 2 or more beside it"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        command.drill(["python", "train.py"], **options)
