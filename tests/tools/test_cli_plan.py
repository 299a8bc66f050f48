"""``memckpt plan``: the table, JSON, sources of the job's size, the picture, measurements, bad input."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from memckpt.cli import common
from memckpt.cli.main import app
from memckpt.cli.run_view import Stored, View
from memckpt.config import MemckptConfig
from memckpt.config.settings import from_mapping
from memckpt.errors import AgentNotFoundError, ConfigurationError, PeerError
from memckpt.processes.address import AgentAddress
from memckpt.protocol.status import Status, StorageStatus
from memckpt_tools.plan import measure as plan_measure
from memckpt_tools.plan.command import parse_count
from memckpt_tools.plan.measure import describe, link_rate, parse_address, serve
from memckpt_tools.planning.scheme import Scheme
from memckpt_tools.planning.values import read_tree

ROOT = Path(__file__).resolve().parents[2]
LLAMA = [
    "--parameters", "405B", "--nodes", "2048", "--domains", "128", "--step-seconds", "6", "--mtbf-hours", "3.093",
    "--software-share", "0.22", "--disk", "2000",
]  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}


def run(*options: str) -> Any:
    """The result of ``memckpt plan``."""
    return CliRunner().invoke(app, ["plan", *options], env={"COLUMNS": "200"})


def planned(*options: str) -> dict[str, Any]:
    result = run(*options, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refused(*options: str) -> str:
    result = run(*options)
    assert isinstance(result.exception, ConfigurationError), result.output
    return str(result.exception)


def test_the_answer_comes_first_then_one_table_of_six_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common.out, "_width", 80)  # it reads the environment once, whoever imports it first
    result = run(*LLAMA, "--papers")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].startswith("recommended: (k, m), k=8, m=2, lazy, T=8: ETTR 96.7")
    assert "Storage serves with a probability of 1.4e-06 a month" in lines[1]
    table = [line for line in lines if line.startswith(("┃", "│"))]
    assert {len(line) for line in table} == {80}
    assert {len(line.split(line[0])) - 2 for line in table} == {6}
    heads = [line for line in table if line.startswith("┃ scheme")]
    assert len(heads) == 1
    for name in ("torch.save", "dcp.async_save", "CheckFreq", "Gemini", "ECCheck", "memory", "copies", "(k, m)"):
        assert sum(line.startswith(f"│ {name} ") for line in table) == 1, name
    for expected in (
        "405B parameters on 2048 nodes of 8 GPUs, a step of 6 s, a failure every 3 h, 22%",
        "# YAML, for Hydra", "tolerate: 2", "peers=ErasureConfig(",
        "not compressed: compression: expected DistributedDataParallel", "not REFT: replicas: expected 2 or more",
    ):  # fmt: skip
        assert expected in result.output
    assert "none" not in result.output, "what starts over is no way to protect it"


def test_papers_are_in_json_and_in_files_for_the_simulator(tmp_path: Path) -> None:
    names = {"CheckFreq", "Gemini", "REFT", "ECCheck", "LowDiff", "LowDiff+"}
    target = tmp_path / "schemes.json"
    job = ["--parameters", "1B", "--nodes", "8", "--replicas", "8", "--cpu-redo", "2000"]
    found = planned(*job, "--papers", "--schemes", str(target))
    assert names <= {row["scheme"]["name"] for row in found["schemes"]}
    assert found["job"]["agent_redo_parameters_per_second"] == 2e9
    assert not names & {row["scheme"]["name"] for row in planned(*job)["schemes"]}
    (row,) = (row for row in found["schemes"] if row["scheme"]["name"] == "Gemini")
    assert row["two_nodes_survival_probability"] == pytest.approx(1 - 4 / 28)
    assert row["exact"]
    assert row["monthly_loss_probability"] > 0
    written = json.loads(target.read_text())
    assert names <= {one.name for one in msgspec.convert(written["schemes"], list[Scheme])}
    assert written["job"] == found["job"]
    assert "expected a name that ends in .json" in refused(*job, "--schemes", str(tmp_path / "schemes.txt"))
    assert "No such file" in refused(*job, "--schemes", str(tmp_path / "no" / "schemes.json"))


def test_json_has_units_in_names_and_a_configuration() -> None:
    found = planned(*LLAMA)
    assert found["recommended"] == "(k, m)"
    assert from_mapping(found["config"]) == from_mapping(yaml.safe_load(found["yaml"])["memckpt"])
    names: dict[str, Any] = {}
    exec(found["python"], names)
    assert isinstance(names["config"], MemckptConfig)
    assert names["config"] == from_mapping(found["config"])
    assert found["job"]["mtbf_seconds"] == pytest.approx(3.093 * 3600)
    row = found["schemes"][5]
    assert {"ettr", "lost_steps", "recovery_seconds", "served_by", "fits", "problems"} <= set(row)
    assert row["memory_bytes_by_owner"]["total"] == row["scheme"]["memory_bytes"]
    assert [tier["name"] for tier in row["scheme"]["tiers"]] == ["memory", "peers", "storage"]
    assert row["served_by"] == {"process": "memory", "nodes": "peers", "cluster": "storage"}


def test_no_scheme_within_the_budgets_is_exit_status_1() -> None:
    result = run("--parameters", "70B", "--nodes", "2", "--memory-budget", "1")
    assert result.exit_code == 1
    assert "no scheme keeps the budgets" in result.output
    assert "recommended" not in result.output


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_model_configuration_gives_the_parameters(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"config.{suffix}"
    path.write_text(json.dumps(GPT2))
    found = planned("--model", str(path))
    assert found["job"]["parameters"] == 124_439_808
    assert any("124,439,808 parameters by" in note and "like GPT-2" in note for note in found["notes"])


def test_rates_and_types() -> None:
    found = planned("--parameters", "1e9", "--gpus-per-node", "0", "--dtype", "bf16", "--optimizer", "sgd")
    assert (found["job"]["state_bytes"], found["job"]["gradient_bytes"]) == (2, 2)
    assert (found["job"]["copy_bytes_per_second"], found["job"]["copy_overlap"]) == (4e9, 0)
    assert planned("--parameters", "1e9", "--gpus-per-node", "4")["job"]["copy_bytes_per_second"] == 80e9
    own = planned("--parameters", "1e9", "--state-bytes", "16", "--gradient-bytes", "2", "--network", "0.5")
    assert (own["job"]["state_bytes"], own["job"]["gradient_bytes"]) == (16, 2)
    assert own["job"]["network_bytes_per_second"] == 0.5e9
    nodes = planned("--parameters", "1e9", "--nodes", "100", "--node-mtbf-hours", "1000")
    assert nodes["job"]["mtbf_seconds"] == pytest.approx(36000)


def test_it_says_what_hides_of_the_copies_and_what_would_help() -> None:
    short = planned("--parameters", "1.5B", "--gpus-per-node", "1", "--copy", "50", "--step-seconds", "0.05")
    (said,) = [note for note in short["notes"] if "copies to the host" in note]
    assert "each step recorded with T=8: copies to the host take 165 ms of a step of 0.165 s, at 50 GB/s; 30%" in said
    assert "less with anchor_period_steps=64" in said
    long = planned("--parameters", "1.5B", "--gpus-per-node", "1", "--copy", "50", "--step-seconds", "1")
    (said,) = [note for note in long["notes"] if "copies to the host" in note]
    assert "90% of that hides behind compute, and a step waits 16.5 ms for the rest: it is what backward" in said
    assert not any("copies to" in note for note in planned("--parameters", "1e9", "--gpus-per-node", "0")["notes"])


@pytest.mark.parametrize(("text", "number"), [("7B", 7e9), ("1.5t", 1.5e12), ("405e9", 405e9), ("1_000", 1000)])
def test_numbers_of_parameters(text: str, number: float) -> None:
    assert parse_count(text) == number


def test_plan_needs_no_torch() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom memckpt.cli.main import app\n"
        "result = CliRunner().invoke(app, ['plan', '--parameters', '1B', '--json'])\n"
        "assert result.exit_code == 0, result.output\n"
        "print([name for name in ('torch', 'matplotlib', 'yaml') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == "[]", found.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "--parameters", "7B", "--mtbf-hours", "24h"), "found '24h': Hours between two failures of the job"),
        (("plan", "--parameters", "7B", "--network=10GB"), "found '10GB': GB/s that a node sends to peers"),
        (("simulate", "--nodes", "4x"), "expected a whole number, found '4x'"),
    ],
)
def test_what_is_no_number_is_named_with_what_is_meant(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())


def test_numbers_in_yaml_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    text = "a: 1e9\nb: -1.5E-3\nc: .5e+2\nd: 1e9x\ne: '1e9'\nf: 7\ng: 1.5\n"
    (tmp_path / "x.yaml").write_text(text)
    found = read_tree(tmp_path / "x.yaml", "--model x.yaml")
    assert found == {"a": 1e9, "b": -1.5e-3, "c": 50.0, "d": "1e9x", "e": "1e9", "f": 7, "g": 1.5}


# A live run


def a_view(step: int, age: float, **fields: Any) -> View:
    settings: dict[str, Any] = {
        "pid": 7, "run_dir": "/runs/one", "node": "a", "mode": "lazy", "trainers": ((0, 43), (1, 44)), "committed": (),
        "applied": None, "step": step, "held_bytes": 605_000_000, "generation": 1, "max_drift_ulp": 0.0,
        "redo_seconds_per_record": 0.1, "stall_ms": 100.0, "seconds_since_commit": age,
        "storage": StorageStatus("/runs/one/storage", 8, 60.0, None, 5e8, False, ""),
    }  # fmt: skip
    return View(AgentAddress.of("/runs/one", "a"), Status(**{**settings, **fields}), "", None)


def test_what_a_run_shows_of_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_NUM_NODES", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    seen = describe(a_view(10, 0.5), a_view(14, 0.1), 2.0, 12.0)
    assert seen.facts["step_seconds"] == pytest.approx(0.5)  # 2.4 s for 4 steps, each with a stall of 0.1 s
    assert (seen.facts["copy_bytes_per_second"], seen.facts["copy_overlap"]) == (pytest.approx(5.5e8), 0)
    assert seen.facts["parameters"] == pytest.approx(10_000_000)
    assert seen.facts["gpus_per_node"] == 0, "it trains on CPUs"
    assert describe(a_view(10, 0.5), a_view(14, 0.1, accelerators=2), 2.0, 12.0).facts["gpus_per_node"] == 2
    assert seen.facts["disk_bytes_per_second"] == 5e8
    assert seen.facts["agent_redo_parameters_per_second"] == pytest.approx(1e8)
    stored = View(a_view(10, 0.1).address, a_view(10, 0.1).agent, "", Stored("/s", nbytes=24_000_000))
    still = describe(stored, stored, 2.0, 12.0)
    assert still.facts["parameters"] == 2_000_000
    assert "step_seconds" not in still.facts
    assert any("no step was committed" in note for note in still.notes)


def test_a_run_without_an_agent(tmp_path: Path) -> None:
    assert isinstance(run("--run", str(tmp_path)).exception, AgentNotFoundError)


# The picture


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plan_is_drawn(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / f"plan.{suffix}"
    assert run(*LLAMA, "--plot", str(target)).exit_code == 0
    assert target.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_a_picture_that_cannot_be_drawn_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    assert "expected a suffix of" in refused("--plot", str(tmp_path / "plan.xyz"))
    assert "expected a directory, found none" in refused("--plot", str(tmp_path / "no" / "plan.png"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'lightning-memckpt[plot]'" in refused("--plot", str(tmp_path / "plan.png"))


# Measurements


def test_this_machine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_measure, "_SECONDS", 0.0)
    for function, arguments in (("copy_rate", (1 << 20,)), ("encode_rate", (1 << 20,)), ("redo_rate", (1 << 12,))):
        real = getattr(plan_measure, function)
        monkeypatch.setattr(plan_measure, function, lambda real=real, arguments=arguments: real(*arguments))
    disk_rate = plan_measure.disk_rate
    monkeypatch.setattr(plan_measure, "disk_rate", lambda directory: disk_rate(directory, 1 << 24))
    found = planned("--parameters", "1B", "--measure", "--directory", str(tmp_path), "--disk", "3")
    assert found["job"]["disk_bytes_per_second"] == 3e9  # what is given wins
    assert found["job"]["encode_bytes_per_second"] not in (0, 2e9)
    assert found["job"]["agent_redo_parameters_per_second"] not in (0, 1e8)
    assert sum(note.startswith("measured: ") for note in found["notes"]) == 4
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_measured_by_what_arrives() -> None:
    ready, place = threading.Event(), []
    served: list[tuple[int, float]] = []

    def listening(at: str) -> None:
        place.append(at)
        ready.set()

    server = threading.Thread(target=lambda: served.append(serve("127.0.0.1", 0, listening)), daemon=True)
    server.start()
    assert ready.wait(30)
    rate = link_rate(*parse_address("--link", place[0]), seconds=0.05)
    server.join(30)
    assert rate > 0
    assert served[0][0] > 0
    with pytest.raises(PeerError, match="memckpt plan --listen"):
        link_rate(*parse_address("--link", place[0]), seconds=0.05)  # nobody serves there any more


# Bad input


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((), "expected --parameters, --model or --run"),
        (("--parameters", "many"), "--parameters: expected a number such as 7B"),
        (("--parameters", "0"), "--parameters: expected a number, 1 to 1e+15, found 0.0"),
        (("--parameters", "1B", "--mtbf-hours", "0"), "--mtbf-hours: expected 0.000277778 to 888889 hours, found 0.0"),
        (("--parameters", "1B", "--node-mtbf-hours", "0"), "--node-mtbf-hours: expected 0.000277778 to 888889"),
        (("--parameters", "1B", "--mtbf-hours", "1", "--node-mtbf-hours", "1"), "found both"),
        (("--parameters", "1B", "--step-seconds", "450"), "--step-seconds: expected at most 300 s"),
        (("--parameters", "1B", "--nodes", "0"), "--nodes: expected a whole number, 1 to 1000000, found 0"),
        (("--parameters", "1B", "--nodes", "4", "--replicas", "3"), "--replicas: expected a divisor"),
        (("--parameters", "1B", "--network", "-1"), "--network: expected 1e-06 to 1e+06 GB/s, found -1.0"),
        (("--parameters", "1B", "--software-share", "78"), "--software-share: expected"),
        (("--parameters", "1B", "--dtype", "fp8"), "--dtype: expected one of fp32, bf16, fp16, found 'fp8'"),
        (("--parameters", "1B", "--optimizer", "muon"), "--optimizer: expected one of adam"),
        (("--parameters", "1B", "--link", "a:1"), "--link: expected it with --measure"),
        (("--parameters", "1B", "--measure", "--link", "a"), "--link: expected HOST:PORT"),
        (("--parameters", "1B", "--measure", "--directory", "/nonexistent"), "--directory: expected a directory"),
        (("--listen", "a:b"), "--listen: expected HOST:PORT"),
    ],
)
def test_bad_options_are_named(options: tuple[str, ...], named: str) -> None:
    assert named in refused(*options)


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("c.json", "{", "expected JSON, found"),
        ("c.yaml", "a: [", "expected YAML, found"),
        ("c.json", "[1]", "expected a mapping of settings, found a list"),
        ("c.json", "{}", "model: expected hidden_size"),
        ("c.json", '{"hidden_size": -1}', "model: hidden_size: expected a whole number"),
    ],
)
def test_bad_model_configurations_are_named(name: str, text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert named in refused("--model", str(tmp_path / name))
    assert "expected it without --parameters" in refused("--model", str(tmp_path / name), "--parameters", "1B")


def test_a_missing_model_configuration_is_named(tmp_path: Path) -> None:
    assert "No such file" in refused("--model", str(tmp_path / "none.json"))
