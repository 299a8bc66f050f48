"""Parts of a drill: lines, fingerprints, draws, comparison, and what a drill replaces of the script's settings."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from memckpt.config import ErasureConfig, MemckptConfig, StorageConfig
from memckpt.config.arguments import with_environment
from memckpt.config.observers import OBSERVERS
from memckpt.errors import ConfigurationError
from memckpt.processes.handles import start_ticks
from memckpt_tools.drill import lines
from memckpt_tools.drill.command import parse_kinds
from memckpt_tools.drill.comparison import Difference, Overhead, first_change, judge
from memckpt_tools.drill.job import DrillOrders, Job, kill_processes
from memckpt_tools.drill.probe import Attributes, text_of
from memckpt_tools.drill.supervisor import KINDS, Blow, Result, draw
from memckpt_tools.drill.text import (
    holes_text,
    overhead_text,
    storage_line,
    undisturbed_line,
    untried_text,
    verdict_text,
)
from tests.support.cluster.waiting import until

KEYS = (("parameter", "weight"), ("state", "weight (exp_avg)"))
BEGUN = lines.Begun(1, 2, 0, 1, 0.0, None, "node")


def taken(step: int, loss: float, weight: float, *, generator: str = "", repeated: bool = False) -> lines.Taken:
    """A step whose parameter has one element, and whose sketch therefore is that element."""
    digests = b"".join(f"{value!r:>16}"[-lines.DIGEST_BYTES :].encode() for value in (weight, 0.0))
    sketches = torch.tensor([weight] * lines.SKETCHES + [0.0] * lines.SKETCHES, dtype=torch.float64).numpy().tobytes()
    values = {"generators": {"torch": generator}}
    return lines.Taken(
        step, step, float(step), 0.0, (loss.hex(),), digests, sketches, values, 0.0, repeated, None, None
    )


def a_run(tmp_path: Path, *attempts: list[lines.Taken]) -> lines.RunHistory:
    run = lines.RunHistory(tmp_path)
    run.ranks[0] = lines.RankHistory(
        [lines.Attempt(BEGUN, None, [lines.Point(each, KEYS) for each in one]) for one in attempts]
    )
    return run


def plain(slip: float = 0.0, steps: int = 4) -> list[lines.Taken]:
    return [taken(step, 1.0 / step + slip, step + slip) for step in range(1, steps + 1)]


def test_lines_are_read_as_they_come_and_torn_ones_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    writer = lines.Writer(path)
    reader = lines.Reader(path)
    assert reader.poll() == []
    writer.write(BEGUN)
    writer.write(lines.Tensors(KEYS))
    assert reader.poll() == [BEGUN, lines.Tensors(KEYS)]
    writer.write(taken(1, 0.1, 2.0))
    writer.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])  # killed while it wrote
    assert reader.poll() == []
    second = lines.Writer(path)
    second.write(taken(2, 0.2, 3.0))
    assert reader.poll() == [taken(2, 0.2, 3.0)]
    second.close()
    reader.close()


def test_each_kill_has_its_part_of_the_run_and_the_seed_says_when() -> None:
    instants = draw(7, 5, 200)
    assert instants == draw(7, 5, 200) != draw(8, 5, 200)
    assert [2 <= each.record < 198 and 0 <= each.fraction < 1 for each in instants] == [True] * 5
    assert all(after.record - before.record >= 3 for before, after in itertools.pairwise(instants))
    assert {each.kind for each in instants} == {"trainer"}
    kinds = [each.kind for each in draw(7, 5, 200, KINDS)]
    assert set(kinds[:4]) == set(KINDS)
    assert parse_kinds("both, trainer", KINDS) == ("trainer", "both")
    with pytest.raises(ConfigurationError, match="at most 3 in a training of 10 steps, found 4"):
        draw(7, 4, 10)


def test_overhead_has_its_noise_and_says_what_changes_without_protection(tmp_path: Path) -> None:
    overhead = Overhead((0.011, 0.012), 0.010)
    text = overhead_text(overhead, repeats=True).plain
    assert text == (
        "Overhead: 15.0% ± 10.0% of a step, which takes 10.0 ms without protection (MEMCKPT_DISABLE=1); its losses and "
        "its state are the same, bit for bit"
    )
    assert overhead_text(overhead, repeats=False).plain.endswith("(MEMCKPT_DISABLE=1)")
    # The noise hides it; and what is less than nothing is noise, however near two runs are to each other.
    for other, apart in ((Overhead((0.008, 0.012), 0.0099), "40.4"), (Overhead((0.0062, 0.0063), 0.010), "1.0")):
        assert overhead_text(other, repeats=False).plain == (
            f"Overhead: not measurable here: two protected runs differ by {apart}% of a step, which takes "
            f"{1e3 * other.unprotected:.1f} ms without protection (MEMCKPT_DISABLE=1). Drill more --steps, or where "
            "nothing else runs"
        )
    changed = first_change(*(a_run(tmp_path, each) for each in (plain(0.1), plain(), plain())), 4)  # type: ignore[arg-type]
    assert changed is not None
    text = overhead_text(replace(overhead, changed=changed), repeats=True).plain
    assert "another training results, from step 1 on: loss: 1.1 in place of 1;" in text
    assert overhead_text(Overhead((0.1, 0.1), 0.0, problem="no data"), True).plain == "Overhead: not measured: no data"


class Ends:
    """A command that ends as it is told."""

    def __init__(self, variables: dict[str, str | None]) -> None:
        self.variables = variables
        self.pid, self.end = 1 << 30, None  # a process id that no process has

    def poll(self) -> int | None:
        return self.end


def test_each_node_gets_a_command_with_its_place_in_one_job(tmp_path: Path) -> None:
    started: list[Ends] = []
    job = Job(lambda variables, log: started.append(Ends(dict(variables))) or started[-1], 3, tmp_path)  # type: ignore[func-returns-value]
    job.start({"A": "b"})
    assert [each.variables["MEMCKPT_NODE"] for each in started] == ["node0", "node1", "node2"]
    assert [each.variables["RANK"] for each in started] == ["0", "1", "2"]
    assert [each.variables["PET_NODE_RANK"] for each in started] == ["0", "1", "2"]
    for name in ("WORLD_SIZE", "PET_NNODES", "MASTER_ADDR", "MASTER_PORT", "PET_MASTER_PORT", "A"):
        assert len({each.variables[name] for each in started}) == 1
    assert job.poll() is None
    started[0].end = started[1].end = 0
    assert job.poll() is None
    job.logs[2].write_text("out of data\n")
    started[2].end = 3
    assert job.poll() == 3
    assert job.tail().endswith("out of data")
    started[2].end = 0
    assert job.poll() == 0
    alone = Job(lambda variables, log: Ends(dict(variables)), 1, tmp_path)
    alone.start({})
    assert alone._commands[0].variables == {}  # type: ignore[attr-defined]


def test_a_process_is_killed_with_those_that_it_has_started(tmp_path: Path) -> None:
    script = "sleep 600 & echo $!; setsid sleep 600 & echo $!; wait"
    process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True)
    children = [int(process.stdout.readline()) for _ in range(2)]
    process.stdout.close()
    killer = threading.Thread(target=process.wait)  # a parent reaps its child, as the drill does
    killer.start()
    kill_processes([process.pid])
    killer.join()
    assert process.returncode == -signal.SIGKILL
    assert [start_ticks(pid) for pid in children] == [0, 0]


def test_a_drill_that_is_ended_ends_what_it_has_started(tmp_path: Path) -> None:
    """By a CI's time limit, say."""
    script = ["sh", "-c", "echo $$ > started; mv started pid; exec sleep 600"]
    with subprocess.Popen(
        [sys.executable, "-m", "memckpt", "drill", "--dir", "drill", "--in-place", "--", *script],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as command:
        until((tmp_path / "pid").exists)
        pid = int((tmp_path / "pid").read_text())
        assert start_ticks(pid)
        command.terminate()
        said, _ = command.communicate(timeout=60)
        assert command.returncode == 128 + signal.SIGTERM, said
    assert start_ticks(pid) == 0


def test_the_first_difference_is_named_with_its_distance(tmp_path: Path) -> None:
    wrong = [*plain()[:2], taken(3, 0.4, 3.3), taken(4, 0.5, 4.4)]
    verdict = judge(a_run(tmp_path, plain()), a_run(tmp_path, plain()), a_run(tmp_path, plain()[:2], wrong[1:]), 4)
    assert (verdict.outcome, verdict.repeats) == ("different", True)
    loss, parameter = verdict.differences
    assert (loss.label, loss.step, loss.count, loss.text) == ("loss", 3, 2, "0.4 in place of 0.333333333")
    assert (parameter.label, parameter.step) == ("parameter weight", 3)
    assert parameter.relative == pytest.approx(0.1)
    same = judge(a_run(tmp_path, plain()), a_run(tmp_path, plain()), a_run(tmp_path, plain()[:2], plain()[1:]), 4)
    assert (same.outcome, same.differences) == ("equal", [])
    # What lies behind the last step is not compared.
    assert judge(a_run(tmp_path, plain()), a_run(tmp_path, plain()), a_run(tmp_path, wrong), 2).outcome == "equal"


def test_a_generator_that_nobody_seeds_is_left_out_where_results_agree(tmp_path: Path) -> None:
    runs = [a_run(tmp_path, [taken(1, 0.1, 1.0, generator=name)]) for name in "abc"]
    verdict = judge(*runs, 1)  # type: ignore[call-arg]
    assert (verdict.outcome, verdict.repeats) == ("equal", True)
    assert [each.label for each in verdict.unrepeatable] == ["generators torch"]


@pytest.mark.parametrize(
    ("attempts", "missing"),
    [
        ([(1, 10)], "in step 11: steps: 30 of 40 are missing"),
        ([(1, 10), (31, 40)], "in step 11: steps: 20 of 40 are missing"),
        ([(1, 39)], "in step 40: steps: 1 of 40 are missing"),
        ([(1, 12), (9, 40)], ""),
    ],
    ids=str,
)
@pytest.mark.parametrize("repeats", [True, False], ids=["repeats", "does not repeat"])
def test_a_killed_run_that_leaves_steps_out_is_different(
    attempts: list[tuple[int, int]], missing: str, repeats: bool, tmp_path: Path
) -> None:
    """A resume that makes the loop shorter, such as a wrong epoch counter, ends with status 0."""
    first = a_run(tmp_path, plain(steps=40))
    second = a_run(tmp_path, plain(0.0 if repeats else 1e-4, steps=40))
    steps = plain(steps=40)
    verdict = judge(first, second, a_run(tmp_path, *(steps[begin - 1 : end] for begin, end in attempts)), 40)
    assert verdict.outcome == ("different" if missing else "equal" if repeats else "within")
    if missing:
        text = verdict_text(Result(verdict, [], [], {}, {}, None, None)).plain
        assert text == f"Different: the killed run is not the undisturbed one, first {missing}"


def test_training_that_takes_another_number_of_steps_each_time_is_not_blamed_on_kills(tmp_path: Path) -> None:
    short = a_run(tmp_path, plain(steps=30))
    verdict = judge(a_run(tmp_path, plain(steps=40)), short, short, 40)
    assert [each.label for each in verdict.unrepeatable] == ["steps"]
    assert verdict.outcome == "equal"


def test_a_training_that_does_not_repeat_itself_is_compared_within_its_band(tmp_path: Path) -> None:
    first, second = a_run(tmp_path, plain(steps=40)), a_run(tmp_path, plain(1e-4, steps=40))
    within = judge(first, second, a_run(tmp_path, plain(-2e-4, steps=40)), 40)
    assert (within.outcome, within.repeats) == ("within", False)
    assert "does not repeat itself" in undisturbed_line(within).plain
    assert "differ from step 1 on: loss: 1.0001 in place of 1;" in undisturbed_line(within).plain
    wrong = [*plain(steps=40)[:19], *plain(-0.1, steps=40)[19:]]
    outside = judge(first, second, a_run(tmp_path, wrong), 40)
    assert outside.outcome == "different"
    assert outside.band.outside == 20


def test_the_order_of_keys_is_no_difference() -> None:
    """load_state_dict() of an optimizer puts the parameters of a group behind its other keys."""
    group = {"params": [0, 1], "lr": 0.1, "betas": (0.9, {"b": 1, "a": 2})}
    moved = {"lr": 0.1, "betas": (0.9, {"a": 2, "b": 1}), "params": [0, 1]}
    assert text_of([group]) == text_of([moved])
    assert text_of([group]) != text_of([{**moved, "lr": 0.2}])
    assert text_of([1, 2]) != text_of([2, 1])


class Counted(torch.optim.SGD):
    """Counts, and lists its parameters once more."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, 0.1, momentum=0.9)
        self.calls, self.listed = 3, [*self.param_groups[0]["params"]]


def test_of_an_optimizer_only_its_own_attributes_are_named_and_their_remedy(tmp_path: Path) -> None:
    """What it has in its state and its groups is compared by itself, as are parameters."""
    model = nn.Linear(2, 1)
    optimizer = Counted(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = {name: text for _, name, text in Attributes({"": model}).values(None) if "Counted" in name}
    assert found.pop("calls of optimizer Counted") == "=3"
    assert {name.split()[0] for name in found} <= {"defaults"}
    run = a_run(tmp_path, plain())
    hole = Difference(0, 3, 3, "attribute", "calls of optimizer Counted", None, "0 in place of 3")
    text = holes_text(replace(judge(run, run, run, 4), holes=[hole])).plain
    assert 'redo="snapshot" carries them' in text


def test_that_storage_was_not_tried_is_said() -> None:
    blows = [Blow("both", 0, 7, 7), Blow("both", 0, 20, 20, resumed=20, tier="storage"), Blow("trainer", 0, 30, 30)]
    line = storage_line(blows)
    assert line.plain.startswith("Storage was not tried: agent and trainer were killed together in step 7, where")
    assert storage_line(blows[1:]) is None


def test_a_drill_replaces_what_names_a_run_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OBSERVERS, DrillOrders(tmp_path).variables()[OBSERVERS])
    config = MemckptConfig(slots=5, storage=StorageConfig(url="s3://bucket/run", owner="me", every_steps=7))
    found = with_environment("runs/mine", "never", config)
    assert (found.run_dir, found.resume) == (str(tmp_path / "run"), "auto")
    assert found.config.slots == 5
    assert found.config.storage == StorageConfig(every_steps=7)
    assert found.config.resume_check == "replay"
    for repeats, check in ((False, "witness"), (True, "replay")):
        DrillOrders(tmp_path).repeat(repeats)
        assert with_environment("runs/mine", "never", config).config.resume_check == check
    assert with_environment(None, None, MemckptConfig(storage=None)).config.storage is None
    assert found.config.peers is None
    monkeypatch.delenv(OBSERVERS)
    monkeypatch.setenv(OBSERVERS, DrillOrders(tmp_path, 4).variables()[OBSERVERS])
    copies = ErasureConfig(data=1, tolerate=2)
    assert with_environment(None, None, MemckptConfig(peers=copies)).config.peers == copies
    assert not DrillOrders(tmp_path, 4).lent_peers
    lent = with_environment(None, None, None).config
    assert lent.peers == ErasureConfig(data=3, tolerate=1)
    assert with_environment(None, None, lent).config.peers == lent.peers  # an adapter, then the engine
    assert DrillOrders(tmp_path, 4).lent_peers
    monkeypatch.setenv(OBSERVERS, DrillOrders(tmp_path / "gone").variables()[OBSERVERS])
    with pytest.raises(ConfigurationError, match="MEMCKPT_OBSERVERS: expected the directory of a running"):
        with_environment("runs/mine", None, None)


def test_losses_that_were_not_tried_are_said_with_the_options_that_try_them() -> None:
    both = [Blow("both", 0, 4, 4), Blow("trainer", 0, 8, 8), Blow("agent", 0, 9, 9)]
    result = Result(None, [], both, {}, {}, None, None)  # type: ignore[arg-type]
    assert result.untried == ["node"]
    tries = "a drill of its own with --kinds node --nodes 2 tries it"
    assert untried_text(result.untried).plain == f"Not tried: the loss of a whole node; {tries}"
    text = untried_text(["agent", "both"]).plain
    assert "the loss of agent and trainer at once; a drill of its own with --kinds agent,both tries it" in text
