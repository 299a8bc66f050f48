"""The example, its configurations, and real launchers: killed, and gone on behind the last step."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.script_runs import ROOT, Scripts
from tests.support.trainings.supervised_runs import wait_for

EXAMPLE = "examples/accelerate_gpt.py"
CONFIGURATIONS = ROOT / "conf" / "accelerate"
_LIMIT_SECONDS = 120.0
_SHORT = ["--cpu", "--windows", "64", "--epochs", "2"]
#: An agent that need not import torch.
_QUICK = {"MEMCKPT_REDO": "lazy", "MEMCKPT_STORAGE": "none"}


def computed(log: str) -> dict[str, str]:
    """What the example has printed of its training, by step and epoch."""
    return dict(re.findall(r"^((?:step|epoch) \d+): .*loss (\S+)$", log, re.MULTILINE))


def test_the_example_is_killed_and_goes_on(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in _QUICK.items():
        monkeypatch.setenv(name, value)
    scripts = Scripts(lab)
    expected = computed(scripts.run(EXAMPLE, "run", *_SHORT, directory=lab.directory / "undisturbed"))
    assert len(expected) == 10, "8 steps and 2 epochs"
    logs = [scripts.killed(f"step {step}", EXAMPLE, "run", *_SHORT) for step in (3, 6)]
    logs.append(scripts.run(EXAMPLE, "run", *_SHORT, "--resume", "require"))
    (behind,) = re.findall(r"continues after step (\d+)", logs[-1])
    assert int(behind) >= 5, "other arguments: the last step is repeated once more"
    assert computed("".join(logs)) == expected
    assert computed(scripts.run(EXAMPLE, "run", *_SHORT, "--resume", "never")) == expected


@pytest.mark.parametrize(
    ("name", "kind", "processes"),
    [("single", "NO", 1), ("multi_cpu", "MULTI_CPU", 2), ("multi_gpu", "MULTI_GPU", 8), ("fsdp2", "FSDP", 8)],
)
def test_the_configurations_are_what_accelerate_reads(name: str, kind: str, processes: int) -> None:
    found: Any = load_config_from_file(str(CONFIGURATIONS / f"{name}.yaml"))
    assert (found.distributed_type, found.num_processes) == (kind, processes)
    assert (found.fsdp_config.get("fsdp_version") == 2) is (name == "fsdp2")
    assert sorted(path.stem for path in CONFIGURATIONS.iterdir()) == ["fsdp2", "multi_cpu", "multi_gpu", "single"]


@contextmanager
def launched(log: Path, *command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher in a session of its own; it is ended if the test does not see its end."""
    whole = [sys.executable, "-m", *command]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    with log.open("wb") as output:
        process = subprocess.Popen(whole, stdout=output, stderr=output, cwd=ROOT, env=variables, start_new_session=True)
    try:
        yield process
        process.wait(_LIMIT_SECONDS)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(_LIMIT_SECONDS)


def kill_at(step: int, log: Path) -> None:
    """Kill the first of the processes that have said their ids, when this step is over."""
    wait_for(log, f"\nstep {step}: ")
    pid = re.search(r"^pid (\d+): ", log.read_text(), re.MULTILINE)
    assert pid is not None, log.read_text()
    os.kill(int(pid[1]), signal.SIGKILL)


@pytest.mark.slow
def test_accelerate_launch(lab: Lab) -> None:
    """Settings come from the environment, as a launcher gives them."""

    def launch(run: str, name: str, dies_at: int | None = None) -> str:
        log = lab.directory / f"{name}.log"
        command = ["accelerate.commands.launch", "--config_file", str(CONFIGURATIONS / "single.yaml"), EXAMPLE, *_SHORT]
        with launched(log, *command, MEMCKPT_RUN_DIR=str(lab.directory / run), **_QUICK) as process:
            if dies_at is not None:
                kill_at(dies_at, log)
        assert (process.returncode == 0) is (dies_at is None), log.read_text()[-4000:]
        return log.read_text()

    expected = computed(launch("undisturbed", "undisturbed"))
    killed, rest = launch("run", "killed", dies_at=3), launch("run", "rest")
    assert "lazy redo (as configured)" in rest
    assert "from local memory" in rest
    assert len(expected) == 10
    assert computed(killed + rest) == expected


@pytest.mark.promise("Accelerate: two processes, either dies; torchrun restarts them")
@pytest.mark.slow
def test_torchrun_restarts_go_on_at_the_very_step(lab: Lab) -> None:
    def launch(run: str, dies_at: int | None = None) -> str:
        log = lab.directory / f"{run}.log"
        command = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", EXAMPLE]
        # Without it all restarts share one store, where gloo finds the addresses of the dead: docs/operations.md.
        with launched(
            log, *command, str(lab.directory / run), *_SHORT, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"
        ) as process:
            if dies_at is not None:
                kill_at(dies_at, log)
        assert process.returncode == 0, log.read_text()[-4000:]
        return log.read_text()

    expected = computed(launch("undisturbed"))
    log = launch("run", dies_at=2)
    assert "from local memory" in log
    assert len(expected) == 6, "4 steps, as each process has half of the batches, and 2 epochs"
    assert computed(log) == expected
