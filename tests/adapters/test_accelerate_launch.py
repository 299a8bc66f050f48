"""The example, its configurations, and real launchers: killed, and gone on behind the last step."""

from __future__ import annotations

import os
import re
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from tests.support.trainings.engine_harness import Lab

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "accelerate_gpt.py"
CONFIGURATIONS = ROOT / "conf" / "accelerate"
_LIMIT_SECONDS = 120.0
_SHORT = ["--cpu", "--windows", "64", "--epochs", "2"]
#: An agent that need not import torch.
_QUICK = {"MEMCKPT_REDO": "lazy", "MEMCKPT_STORAGE": "none"}


class Output:
    """Lines that come out of a pipe; each wait has a limit."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""
        self.lines: list[str] = []

    def until(self, pattern: str) -> re.Match[str]:
        """Read on until a line matches; everything is kept.

        Raises:
            AssertionError: the output has ended, or nothing comes.
        """
        for line in self._more():
            found = re.search(pattern, line)
            if found:
                return found
        raise AssertionError(f"no line like {pattern!r} in:\n" + "\n".join(self.lines[-60:]))

    def rest(self) -> list[str]:
        """Read to the end; all lines there were."""
        for _ in self._more():
            pass
        return self.lines

    def _more(self) -> Iterator[str]:
        deadline = time.monotonic() + _LIMIT_SECONDS
        while True:
            while b"\n" in self._rest:
                line, _, self._rest = self._rest.partition(b"\n")
                self.lines.append(line.decode())
                yield self.lines[-1]
            ready = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, "no output any more:\n" + "\n".join(self.lines[-60:])
            read = os.read(self._fd, 65536)
            if not read:
                return
            self._rest += read


def computed(lines: list[str]) -> dict[str, str]:
    """What the example has printed of its training, by step and epoch."""
    found = [re.fullmatch(r"(step|epoch) (\d+): .*loss (\S+)", line) for line in lines]
    return {f"{match[1]} {match[2]}": match[3] for match in found if match}


@contextmanager
def example(lab: Lab, run: str, *arguments: str) -> Iterator[tuple[int, Output]]:
    """The example in a forked process: its pid and what it prints."""
    read_fd, write_fd = os.pipe()

    def body() -> None:
        os.dup2(write_fd, 1)
        os.environ.update(_QUICK)
        sys.argv = [str(EXAMPLE), str(lab.directory / run), *_SHORT, *arguments]
        runpy.run_path(str(EXAMPLE), run_name="__main__")

    child = lab.fork(body, "example")
    os.close(write_fd)
    try:
        yield child.pid, Output(read_fd)
        code = child.wait()
        assert code in (0, -signal.SIGKILL), child.log.read_text()[-4000:]
    finally:
        os.close(read_fd)


def test_the_example_is_killed_and_goes_on(lab: Lab) -> None:
    with example(lab, "undisturbed") as (_, output):
        expected = computed(output.rest())
    assert len(expected) == 10, "8 steps and 2 epochs"
    lines: list[str] = []
    for step in (3, 6):
        with example(lab, "run") as (pid, output):
            output.until(f"^step {step}: ")
            os.kill(pid, signal.SIGKILL)
            lines += output.rest()
    with example(lab, "run", "--resume", "require") as (_, output):
        behind = int(output.until(r"after step (\d+)")[1])
        lines += output.rest()
    assert behind >= 5, "other arguments: the last step is repeated once more"
    assert computed(lines) == expected
    with example(lab, "run", "--resume", "never") as (_, output):
        assert computed(output.rest()) == expected


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
def launched(command: list[str], **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], Output]]:
    """A launcher in a session of its own; it is ended if the test does not see its end."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        yield process, Output(process.stdout.fileno())
        process.wait(_LIMIT_SECONDS)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(_LIMIT_SECONDS)
        process.stdout.close()


@pytest.mark.slow
def test_accelerate_launch(lab: Lab) -> None:
    """Settings come from the environment, as a launcher gives them."""

    def launch(run: str, until: str | None) -> list[str]:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
        command += [str(CONFIGURATIONS / "single.yaml"), str(EXAMPLE), *_SHORT]
        with launched(command, MEMCKPT_RUN_DIR=str(lab.directory / run), **_QUICK) as (process, output):
            if until is not None:
                pid = int(output.until(r"^pid (\d+): ")[1])
                output.until(until)
                os.kill(pid, signal.SIGKILL)
            lines = output.rest()
        assert (process.returncode == 0) is (until is None), "\n".join(lines[-40:])
        return lines

    expected = computed(launch("undisturbed", None))
    lines = launch("run", "^step 3: ")
    rest = launch("run", None)
    assert any("lazy redo (as configured)" in line for line in rest)
    assert any("from local memory" in line for line in rest)
    assert len(expected) == 10
    assert computed(lines + rest) == expected


@pytest.mark.promise("Accelerate: two processes, either dies; torchrun restarts them")
@pytest.mark.slow
def test_torchrun_restarts_go_on_at_the_very_step(lab: Lab) -> None:
    def launch(run: str, during: Callable[[Output], None] | None) -> list[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += ["--max-restarts=1", str(EXAMPLE), str(lab.directory / run), *_SHORT]
        # Without it all restarts share one store, where gloo finds the addresses of the dead: docs/operations.md.
        with launched(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as (process, output):
            if during is not None:
                during(output)
            lines = output.rest()
        assert process.returncode == 0, "\n".join(lines[-60:])
        return lines

    def kill(output: Output) -> None:
        pid = int(output.until(r"^pid (\d+): ")[1])
        output.until("^step 2: ")
        os.kill(pid, signal.SIGKILL)

    expected = computed(launch("undisturbed", None))
    lines = launch("run", kill)
    assert any("from local memory" in line for line in lines)
    assert len(expected) == 6, "4 steps, as each process has half of the batches, and 2 epochs"
    assert computed(lines) == expected
