"""``memckpt simulate``: options, files of schemes, traces, what is shown, plots, and errors that name their place."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memckpt.errors import ConfigurationError
from memckpt_tools.planning.scheme import Scheme, Tier
from memckpt_tools.simulation.command import parse_tier, planned_schemes, read_schemes
from memckpt_tools.simulation.failures import Cluster, FailureModel, Lifetime
from memckpt_tools.simulation.replay import Repair, Training
from memckpt_tools.simulation.run import Setup
from memckpt_tools.simulation.run import simulate as simulated
from tests.support.trainings.cli_harness import invoke, invoke_json

DISK = "name=disk,every_steps=100,lag_steps=5,restore_seconds=300,survives_cluster=true"
PEERS = "name=peers,every_steps=1,lag_steps=1,restore_seconds=60,group_nodes=4,tolerates=2"
JOB = ("simulate", "--nodes", 64, "--step-seconds", 5, "--days", 30, "--repetitions", 3)

SCHEMES_YAML = """\
schemes:
  - name: async to disk
    overhead: 0.01
    tiers:
      - {name: disk, every_steps: 100, lag_steps: 5, restore_seconds: 300, survives_cluster: true}
  - name: nothing
    overhead: 0
    tiers: []
"""


@pytest.fixture
def schemes(tmp_path: Path) -> Path:
    path = tmp_path / "schemes.yaml"
    path.write_text(SCHEMES_YAML)
    return path


def test_options_lead_to_the_simulation_that_they_name() -> None:
    code, found = invoke_json(
        *JOB, "--job-mtbf-hours", 5, "--software-share", 0.25, "--weibull-shape", 0.8, "--nodes-per-rack", 8,
        "--racks-per-zone", 4, "--rack-mtbf-hours", 9000, "--zone-mtbf-hours", 1000, "--cluster-mtbf-hours", 500,
        "--detection-seconds", 30, "--replacement-seconds", 120, "--repair-seconds", 86400, "--spares", 9,
        "--start-seconds", 77, "--tier", PEERS, "--tier", DISK, "--overhead", 0.02, "--name", "mine", "--seed", 4,
        "--new-nodes", "--confidence", 0.9,
    )  # fmt: skip
    assert code == 0
    model = FailureModel.of_nodes(5 * 3600 * 64, software_share=0.25, shape=0.8, new=True)
    setup = Setup(
        cluster=Cluster(nodes=64, nodes_per_rack=8, racks_per_zone=4),
        failures=replace(
            model, racks=Lifetime(9000 * 3600), zones=Lifetime(1000 * 3600), cluster=Lifetime(500 * 3600)
        ),
        training=Training(step_seconds=5, duration_seconds=30 * 86400),
        repair=Repair(
            detection_seconds=30, replacement_seconds=120, repair_seconds=86400, spares=9, start_seconds=77
        ),
    )  # fmt: skip
    scheme = Scheme(name="mine", overhead=0.02, tiers=(parse_tier(PEERS), parse_tier(DISK)))
    (summary,) = simulated(setup, [scheme], repetitions=3, seed=4, confidence=0.9)
    (row,) = found["schemes"]
    assert row["name"] == "mine"
    assert row["ettr"] == {"mean": summary.ettr.mean, "half_width": summary.ettr.half_width}
    assert row["recoveries"]["peers"]["mean"] == summary.recoveries["peers"].mean
    assert found["failures"]["zone"]["mean"] == summary.failures["zone"].mean
    assert (found["nodes"], found["repetitions"], found["seed"], found["confidence"]) == (64, 3, 4, 0.9)


def test_a_table_for_people(schemes: Path) -> None:
    code, text = invoke(*JOB, "--node-mtbf-hours", 500, "--schemes", schemes, "--tier", PEERS)
    assert code == 0
    assert "64 nodes, 30 days" in text
    assert "means of 3 repetitions with 0.95 confidence, seed 0" in text
    flat = " ".join(text.split())
    for expected in ("async to disk", "nothing", "options", "ETTR", "steps lost", "disk: ", "peers: ", " ± "):
        assert expected in flat


def test_files_of_schemes(tmp_path: Path, schemes: Path) -> None:
    (first, second), job = read_schemes(schemes)
    assert job is None
    disk = Tier(name="disk", every_steps=100, lag_steps=5, restore_seconds=300, survives_cluster=True)
    assert first == Scheme(name="async to disk", overhead=0.01, tiers=(disk,))
    assert second == Scheme(name="nothing", overhead=0, tiers=())
    assert parse_tier(DISK) == disk
    path = tmp_path / "schemes.json"
    path.write_text(json.dumps([{"name": "a", "overhead": 0.5, "tiers": [], "memory_bytes": 7}]))
    assert read_schemes(path) == ([Scheme(name="a", overhead=0.5, tiers=(), memory_bytes=7)], None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected JSON, found "),
        ("{}", "expected a list of schemes, found {}"),
        ("[]", r"expected a list of schemes, found \[\]"),
        ("[3]", r"schemes\[0\]: expected `object`, got `int`, found 3"),
        ('[{"name": "a", "tiers": []}]', r"schemes\[0\]: object missing required field `overhead`, found {'name'"),
        ('[{"name": "a", "tiers": 3}]', r"schemes\[0\].tiers: expected `array`, got `int`, found 3"),
        ('[{"name": "a", "overhed": 1}]', r"schemes\[0\]: object contains unknown field `overhed`"),
        ('[{"name": "a", "overhead": "1%", "tiers": []}]', r"schemes\[0\].overhead: expected `float`, .* found '1%'"),
        ('[{"name": "a", "overhead": true, "tiers": []}]', r"schemes\[0\].overhead: expected `float`, .* found True"),
        (
            '[{"name": "a", "overhead": 0, "tiers": [{"name": "b", "group_nodes": 1.5}]}]',
            r"schemes\[0\].tiers\[0\].group_nodes: expected `int`, .* found 1.5",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "schemes.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_schemes(path)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="expected a readable text file"):
        read_schemes(tmp_path / "missing.yaml")
    path = tmp_path / "schemes.yaml"
    path.write_text("a: [")
    with pytest.raises(ConfigurationError, match="expected YAML, found"):
        read_schemes(path)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigurationError, match=r"pip install pyyaml, or write JSON"):
        read_schemes(path)


PLANNED = (
    "plan", "--parameters", "1B", "--nodes", 8, "--replicas", 8, "--step-seconds", 2, "--mtbf-hours", 1, "--domains", 4,
    "--domain-share", 0.25, "--cluster-share", 0.05, "--software-share", 0.4, "--restart-seconds", 20,
    "--replacement-seconds", 40, "--papers",
)  # fmt: skip


def test_a_plan_is_simulated_as_it_was_planned(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    _, plan = invoke_json(*PLANNED, "--schemes", path)
    by_hand = (
        "--nodes", 8, "--step-seconds", 2, "--job-mtbf-hours", 1 / 0.7, "--software-share", 4 / 7,
        "--nodes-per-rack", 2, "--rack-mtbf-hours", 4 / 0.25, "--cluster-mtbf-hours", 20, "--detection-seconds", 20,
        "--replacement-seconds", 40,
    )  # fmt: skip
    common = ("simulate", "--schemes", path, "--days", 2, "--repetitions", 3)
    _, found = invoke_json(*common)
    _, same = invoke_json(*common, *by_hand)
    assert found["failures"]["rack"]["mean"] > 0
    assert [row["ettr"]["mean"] for row in found["schemes"]] == pytest.approx(
        [row["ettr"]["mean"] for row in same["schemes"]], abs=1e-6
    )
    assert {"Gemini", "LowDiff+", "REFT"} <= {row["name"] for row in found["schemes"]}
    _, other = invoke_json(*common, "--job-mtbf-hours", 100, "--only", "Gemini")
    assert [row["name"] for row in other["schemes"]] == ["Gemini"]
    assert other["failures"]["rack"]["mean"] == 0, "failures of options are in the place of the plan's"
    planned = next(row["ettr"] for row in plan["schemes"] if row["scheme"]["name"] == "Gemini")
    assert other["schemes"][0]["ettr"]["mean"] > planned


def test_a_sweep_plans_anew_at_each_point(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.json"
    invoke_json(*PLANNED, "--schemes", path)
    _, found = invoke_json(
        "simulate", "--schemes", path, "--days", 1, "--repetitions", 2, "--only", "torch.save", "--only", "ECCheck",
        "--plot", tmp_path / "sweep.svg", "--sweep-mtbf-hours", "0.1,5", "--sweep-nodes", "2,16",
    )  # fmt: skip
    assert [point["mtbf_seconds"] for point in found["by_mtbf"]] == [360, 18000]
    few, many = found["by_nodes"]
    assert (few["nodes"], many["nodes"]) == (2, 16)
    assert (set(few["ettr"]), set(many["ettr"])) == ({"torch.save"}, {"torch.save", "ECCheck"})
    schemes, job = read_schemes(path)
    planned = [one for one in schemes if one.name == "torch.save"]
    assert job is not None
    often, seldom = (planned_schemes(job, planned, hours * 3600, 8)[0] for hours in (0.1, 5))
    assert often.tiers[0].every_steps < seldom.tiers[0].every_steps / 4
    by_hand = Scheme(name="by hand", overhead=0.1, tiers=())
    assert planned_schemes(job, [by_hand], 360, 8) == planned_schemes(None, [by_hand], 360, 8) == [by_hand]


def test_a_trace_is_replayed_once(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("time_seconds,kind,node\n86400,node,63\n")
    code, found = invoke_json(*JOB, "--trace", trace, "--tier", DISK)
    assert code == 0
    assert found["repetitions"] == 1
    (row,) = found["schemes"]
    # 17,280 steps, of which those since 17,200 are lost; and 300 s.
    assert row["lost_steps"] == {"mean": 80, "half_width": None}
    assert row["ettr"]["mean"] == pytest.approx(1 - (80 * 5 + 300) / (30 * 86400))
    _, text = invoke(*JOB, "--trace", trace, "--tier", DISK)
    assert "1.0 failures (node 1.0); one replay of a trace" in text


def test_a_plot(tmp_path: Path, schemes: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "ettr.svg"
    small: tuple[Any, ...] = ("simulate", "--nodes", 16, "--step-seconds", 5, "--days", 9, "--repetitions", 2)
    code, found = invoke_json(*small, "--node-mtbf-hours", 99, "--schemes", schemes, "--tier", PEERS, "--plot", plot)
    assert code == 0
    assert plot.read_text().startswith("<?xml")
    assert [point["nodes"] for point in found["by_nodes"]] == [4, 8, 16, 32, 64]
    hours = [point["mtbf_seconds"] / 3600 for point in found["by_mtbf"]]
    assert hours == pytest.approx([99 / 16 * factor for factor in (0.25, 0.5, 1, 2, 4)])
    # Both lines go through the simulation itself.
    for row in found["schemes"]:
        assert found["by_nodes"][2]["ettr"][row["name"]] == found["by_mtbf"][2]["ettr"][row["name"]] == row["ettr"]
    ettrs = [point["ettr"]["async to disk"]["mean"] for point in found["by_mtbf"]]
    assert ettrs == sorted(ettrs)
    again = tmp_path / "again.png"
    assert invoke(*small, "--node-mtbf-hours", 99, "--tier", DISK, "--plot", again)[0] == 0
    assert again.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "directory.png").mkdir()
    with pytest.raises(ConfigurationError, match="expected a file that can be written"):
        invoke(*small, "--node-mtbf-hours", 99, "--tier", DISK, "--plot", tmp_path / "directory.png")


def test_a_plot_that_cannot_be_drawn_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"expected a suffix of .*pdf.*, found ''"):
        invoke(*JOB, "--node-mtbf-hours", 99, "--tier", DISK, "--plot", tmp_path / "plot")
    with pytest.raises(ConfigurationError, match=r"such.png: expected a directory, found none at .*/no"):
        invoke(*JOB, "--node-mtbf-hours", 99, "--tier", DISK, "--plot", tmp_path / "no" / "such.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'lightning-memckpt\[plot\]'"):
        invoke(*JOB, "--node-mtbf-hours", 99, "--tier", DISK, "--plot", tmp_path / "plot.png")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--node-mtbf-hours", 0, "--tier", DISK), "--node-mtbf-hours: expected 0 to .* hours, found 0"),
        (("--job-mtbf-hours", -1, "--tier", DISK), "--job-mtbf-hours: .* found -1"),
        (("--job-mtbf-hours", 1, "--node-mtbf-hours", 1, "--tier", DISK), "expected one of them, found both"),
        (("--tier", DISK), "failures: expected --node-mtbf-hours, --job-mtbf-hours or --trace, found none"),
        (("--node-mtbf-hours", 1), "schemes: expected --schemes FILE or --tier, found neither"),
        (("--node-mtbf-hours", 1, "--repair-seconds", 9, "--tier", DISK), "--repair-seconds 9: expected --spares with"),
        (("--node-mtbf-hours", 1, "--overhead", 0.5), "--overhead 0.5: expected --tier beside it"),
        (("--trace", "x", "--node-mtbf-hours", 1, "--tier", DISK), "--trace x: expected no --node-mtbf-hours with it"),
        (("--node-mtbf-hours", 1, "--tier", "disk"), "--tier disk: expected FIELD=VALUE, .* found 'disk'"),
        (("--node-mtbf-hours", 1, "--tier", DISK + ",name=x"), "each field once, found 'name=x'"),
        (("--node-mtbf-hours", 1, "--tier", "name=x"), "object missing required field `every_steps`, found"),
        (("--node-mtbf-hours", 1, "--tier", DISK.replace("100", "ten")), "every_steps: expected `float`, .*'ten'"),
        (("--node-mtbf-hours", 1, "--tier", DISK.replace("true", "ten")), "survives_cluster: expected `bool`, .*'ten'"),
        (("--node-mtbf-hours", 1, "--tier", DISK, "--only", "x"), "--only x: expected one of none: --schemes is miss"),
        (("--node-mtbf-hours", 1, "--tier", DISK, "--sweep-nodes", "2"), "--sweep-nodes: expected --plot with it"),
        (("--node-mtbf-hours", 1, "--tier", DISK, "--sweep-nodes", "2,x"), "--sweep-nodes: expected numbers .* '2,x'"),
        (("--node-mtbf-hours", 1, "--tier", DISK, "--days", 0), "--days: expected 0 to .* days, found 0"),
        (("--node-mtbf-hours", 1, "--tier", DISK, "--step-seconds", 450), "^--step-seconds: .* found 450"),
        (("--node-mtbf-hours", 1, "--tier", DISK, "--spares", -1), "^--spares: expected a whole number, 0 .* found -1"),
        (("--node-mtbf-hours", 1, "--tier", DISK, "--racks-per-zone", 2), "-zone: expected --nodes-per-rack beside"),
        (("--rack-mtbf-hours", 1, "--tier", DISK), "-hours: expected --nodes-per-rack of the cluster"),
        (("--node-mtbf-hours", 1, "--tier", PEERS.replace("=4", "=65")), "group_nodes: .* 0 to 64 nodes, found 65"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_options_is_named(options: tuple[object, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        invoke(*JOB, *options)


def test_nodes_and_steps_come_from_options_or_a_plan() -> None:
    with pytest.raises(ConfigurationError, match="--nodes: expected it, or a plan in --schemes, found neither"):
        invoke("simulate", "--step-seconds", 5, "--node-mtbf-hours", 1, "--tier", DISK)
