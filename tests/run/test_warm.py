"""Warm starts: what is forked from a process that has imported ahead is what a cold start is, or is not forked."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from memckpt.processes.handles import children_of
from memckpt_run.attempts import Attempt, ColdStarter, Given, PythonCommand, python_command
from memckpt_run.notes import Notes
from memckpt_run.warm import Warm, WarmProcess, WarmStarter
from tests.support.trainings import start_probe, supervised_job
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.supervised_runs import forked_job, resumed, supervise, wait_for, weights

LIMIT_SECONDS = 60.0
ROOT = Path(__file__).parents[2]
#: The end of a script's first commit, as the supervisor sees it.
NOTE_IMPORTS = (
    "from memckpt.config.observers import observers_from_environment\nobservers_from_environment()[0].note_imports()\n"
)


class Warmed:
    """A starter, and what it has said."""

    def __init__(self, command: list[str], also: list[str], log: pytest.LogCaptureFixture) -> None:
        python = python_command(command)
        assert isinstance(python, PythonCommand)
        self.notes = Notes()
        self.starter = WarmStarter(python, ColdStarter(command).start, self.notes, also)
        self._log = log
        log.set_level("INFO", "memckpt.run")

    def attempt(self, **variables: str) -> Attempt:
        """Start one, and see it end."""
        environment = {**os.environ, **self.notes.environment(), **variables}
        attempt = self.starter.start(Given(environment, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        handle = os.pidfd_open(attempt.pid)
        assert select.select([handle], [], [], LIMIT_SECONDS)[0]
        os.close(handle)
        assert attempt.poll() == 0
        return attempt

    @property
    def said(self) -> list[str]:
        return self._log.messages

    @property
    def last(self) -> str:
        return self.said[-1]

    def warm_up(self, attempt: Attempt) -> str:
        """See the warm process ready, or refused; what was said."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while self.starter.prepare_next(attempt) is not None:
            assert time.monotonic() < deadline
            select.select([], [], [], 0.01)
        return self.last


@pytest.fixture
def warmed(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def make(*command: str, also: list[str] | None = None) -> Warmed:
            found = Warmed([sys.executable, *command], also or [], caplog)
            stack.callback(found.notes.close)
            stack.callback(found.starter.close)
            return found

        yield make


@pytest.mark.parametrize("way", ["script", "module", "text"])
def test_an_attempt_is_what_a_cold_one_is(
    warmed: Any, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", "" if way == "text" else str(tmp_path))
    if way == "script":
        monkeypatch.delenv("PYTHONPATH")
    name = start_probe.__name__
    commands = {
        "script": ["-W", "ignore::ImportWarning", "-u", str(start_probe.__file__), "out", "torch"],
        "module": ["-X", "utf8", "-m", name, "out", "--lr", "1"],
        "text": ["-c", f"from {name} import main; main()", "out"],
    }
    out = tmp_path / "out"
    command = [str(out) if each == "out" else each for each in commands[way]]
    training = warmed(*command)
    attempts, found = [training.attempt()], [json.loads(out.read_text())]
    assert "modules are imported ahead" in training.warm_up(attempts[0])
    for _ in range(2):
        attempts.append(training.attempt())
        found.append(json.loads(out.read_text()))
    assert [isinstance(each, Warm) for each in attempts] == [False, True, True]
    assert [each["pid"] for each in found] == [each.pid for each in attempts]
    cold = found[0]
    for each in found[1:]:
        for part in ("start", "now"):
            different = {name for name in cold[part] if cold[part][name] != each[part][name]}
            assert not different, {name: (cold[part][name], each[part][name]) for name in different}
    for generator in cold["fresh"]:
        assert len({each["fresh"][generator] for each in found}) == 3  # none goes on with another's


MODULES = {
    "thread": (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
        "starts a thread",
    ),
    "socket": ("import socket\npair = socket.socketpair()", "leaves socket:"),
    "random": ("import random\nrandom.seed(3)", "uses Python's random generator"),
    "process": (
        "import subprocess\nchild = subprocess.Popen(['sleep', '1'], stdin=subprocess.DEVNULL)",
        "starts processes",
    ),
    "device": ("import torch\ntorch.xpu.is_initialized = lambda: True", "opens xpu"),
    "variable": ("import os\nos.environ.get('WHERE')", "sets the environment variable WHERE, which inner reads"),
}  # fmt: skip


#: They are done by a known module: its package, and what imports that, are left to the attempts.
OF_A_PACKAGE = ("thread", "socket", "random")
HARMLESS = {"nothing": "", "draws": "import random\nidentifiers = [random.random() for _ in range(100)]"}


@pytest.mark.parametrize("kind", [*MODULES, *HARMLESS])
def test_imports_that_a_fork_would_not_repeat_are_named(
    warmed: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = MODULES.get(kind) or (HARMLESS[kind], "modules are imported ahead")
    (tmp_path / "inner.py").write_text(code)
    (tmp_path / "outer.py").write_text("import inner")
    (tmp_path / "script.py").write_text(
        f"import os, sys\nos.environ['WHERE'] = 'here'\nimport outer\nsys.path.append({str(ROOT)!r})\n" + NOTE_IMPORTS
    )
    monkeypatch.delenv("WHERE", raising=False)
    training = warmed(str(tmp_path / "script.py"), also=["outer", "inner"])
    attempt = training.attempt()
    lines = [training.warm_up(attempt), *training.said]
    found = [line for line in lines if said in line]
    assert found
    warm = isinstance(training.attempt(), Warm)
    assert warm is (kind in (*OF_A_PACKAGE, *HARMLESS))
    if kind in (*OF_A_PACKAGE, "variable"):
        assert "inner" in found[0]


def test_a_package_that_no_fork_can_follow_and_what_imports_it_are_left_to_the_attempts(
    warmed: Any, tmp_path: Path
) -> None:
    """As pandas imports pyarrow, which starts a thread."""
    (tmp_path / "opens.py").write_text("import socket\npair = socket.socketpair()")
    for name, text in {"inner": "import opens", "outer": "import inner", "other": ""}.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "script.py").write_text(
        f"import sys\nimport outer, other\nsys.path.append({str(ROOT)!r})\n" + NOTE_IMPORTS
    )
    training = warmed(str(tmp_path / "script.py"), also=["opens", "inner", "outer", "other"])
    assert "modules are imported ahead" in training.warm_up(training.attempt())
    left = [each.split(":")[1].strip() for each in training.said if each.startswith("not imported ahead")]
    assert left == ["opens", "inner", "outer"]
    assert isinstance(training.attempt(), Warm)


#: What Lightning, deterministic trainings, transformers and users set before a device is opened.
OF_DEVICES = (
    "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING",
    "CUBLAS_WORKSPACE_CONFIG", "NCCL_DEBUG", "HIP_VISIBLE_DEVICES", "ROCM_PATH", "NVIDIA_TF32_OVERRIDE",
)  # fmt: skip


@pytest.mark.parametrize(
    ("names", "is_warm"), [(OF_DEVICES, True), (("OMP_NUM_THREADS",), False)], ids=["devices", "loads"]
)
def test_a_training_may_set_variables_that_are_read_as_a_device_is_opened(
    warmed: Any, names: Sequence[str], is_warm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in names:
        monkeypatch.delenv(name, raising=False)
    script = tmp_path / "script.py"
    script.write_text(f"import os\nos.environ.update(dict.fromkeys({names}, '0'))\n" + NOTE_IMPORTS)
    training = warmed(str(script))
    training.warm_up(training.attempt())
    assert isinstance(training.attempt(), Warm) is is_warm, training.last


def test_only_what_is_installed_is_imported_ahead_and_what_has_changed_since_is_not_used(
    warmed: Any, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text("PID = __import__('os').getpid()")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, own\n"
        + NOTE_IMPORTS
        + f"print(own.PID == os.getpid(), file=open({str(tmp_path / 'out')!r}, 'a'))\n"
    )
    for also, said in (([], ["True"] * 3), (["own"], ["True", "False", "True"])):
        training = warmed(str(script), also=also)
        (tmp_path / "out").write_text("")
        cold = training.attempt()
        training.warm_up(cold)
        assert isinstance(training.attempt(), Warm)
        with (tmp_path / "own.py").open("a") as file:
            file.write("\n")  # a repair
        assert isinstance(training.attempt(), Warm) is (not also)
        assert (tmp_path / "out").read_text().split() == said


def test_a_module_that_cannot_be_imported_ahead_is_named_and_the_others_are(
    warmed: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own.py").write_text("")
    script = tmp_path / "script.py"
    script.write_text("import own\n" + NOTE_IMPORTS)
    training = warmed(str(script), also=["own", "onw"])
    training.warm_up(training.attempt())
    assert isinstance(training.attempt(), Warm)
    said = [each for each in caplog.messages if "--warm" in each]
    assert said == ["--warm onw: nothing is imported ahead of that name: ModuleNotFoundError: No module named 'onw'"]


def test_a_start_with_another_variable_is_cold_where_an_import_has_read_it(warmed: Any, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import os\nall = dict(os.environ)\nos.environ.get('PLACE')")
    script = tmp_path / "script.py"
    script.write_text("import own\n" + NOTE_IMPORTS)
    training = warmed(str(script), also=["own"])
    training.warm_up(training.attempt(PLACE="1", OTHER="1"))
    assert isinstance(training.attempt(PLACE="1", OTHER="2"), Warm)
    assert not isinstance(training.attempt(PLACE="2", OTHER="2"), Warm)
    assert "the environment variable PLACE has changed, which own reads" in training.last


def test_a_warm_process_that_has_died_is_replaced(warmed: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NOTE_IMPORTS)
    training = warmed(str(script))
    for _ in range(2):
        cold = training.attempt()
        assert not isinstance(cold, Warm)
        training.warm_up(cold)
        assert isinstance(training.attempt(), Warm)
        os.kill(training.starter.pid, signal.SIGKILL)


def test_a_killed_supervisor_s_warm_process_and_attempt_end(lab: Lab) -> None:
    script = lab.directory / "script.py"
    script.write_text(
        "import os, signal\n"
        + NOTE_IMPORTS
        + "print('attempt', os.environ['MEMCKPT_RESTART_COUNT'], flush=True)\nsignal.pause()\n"
    )
    child = supervise(lab, sys.executable, str(script))
    wait_for(child.log, "modules are imported ahead")
    cold, _ = children_of(child.pid)
    os.kill(cold, signal.SIGKILL)
    wait_for(child.log, "attempt 1")
    handles = [os.pidfd_open(each) for each in children_of(child.pid)]
    assert len(handles) == 2
    os.kill(child.pid, signal.SIGKILL)
    for handle in handles:
        assert select.select([handle], [], [], LIMIT_SECONDS)[0]
        os.close(handle)


@pytest.mark.parametrize(
    ("command", "interpreter"),
    [
        ("python train.py -x", "python"),
        ("python3 -u -W ignore -X dev -m train", "python3 -u -W ignore -X dev"),
        ("python -Wignore -OO -c pass", "python -Wignore -OO"),
        ("python -uc pass", "python -u"),
        ("python -BuW ignore train.py", "python -BuW ignore"),
        ("python --check-hash-based-pycs never train.py", "python --check-hash-based-pycs never"),
        ("python -uE train.py", None),
        ("python -I train.py", None),
        ("python -", None),
        ("python -V", None),
        ("python", None),
        ("sh train.sh", None),
    ],
)
def test_a_python_command_is_taken_apart_and_others_are_not(
    command: str, interpreter: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("python", "python3"):
        (tmp_path / name).symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert shutil.which("python") == str(tmp_path / "python")
    found = python_command(command.split())
    assert (" ".join(found.interpreter) if isinstance(found, PythonCommand) else None) == interpreter


def test_a_training_that_is_forked_warm_ends_as_if_nothing_had_been(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = forked_job(lab, "none", "12")
    monkeypatch.setenv("JOB_WAITS", str(lab.directory / "go"))
    job = [sys.executable, str(supervised_job.__file__), "run", "12", "kill@5", "raise@9"]
    child = supervise(lab, *job)
    wait_for(child.log, "modules are imported ahead")
    (lab.directory / "go").write_text("go")
    assert (plain.wait(90), child.wait(90)) == (0, 0), child.log.read_text()
    log = child.log.read_text()
    assert resumed(child) == [("0", "None"), ("1", "RestoreReport(step=4"), ("2", "RestoreReport(step=8")], log
    assert re.findall(r"^forked (\w+)", log, re.MULTILINE) == ["False", "True", "True"], log
    assert weights(child) == weights(plain)


def test_a_warm_process_that_cannot_be_made_leaves_the_training_alone(warmed: Any, tmp_path: Path) -> None:
    found = warmed(str(tmp_path / "job.py"))

    def fail(attempt: Attempt) -> None:
        raise BlockingIOError("Resource temporarily unavailable")  # no process is left

    found.starter._step = fail
    assert found.starter.prepare_next(Warm(0)) is None
    assert found.last == "restarts will be cold: the warm process cannot be made: Resource temporarily unavailable"
    assert found.starter.how == "cold"


def test_a_warm_process_that_cannot_be_started_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        WarmProcess(["/no/such/python"], {})
    assert os.listdir("/proc/self/fd") == before
