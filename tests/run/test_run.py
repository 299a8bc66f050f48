"""`memckpt run`: what a command gets of signals, and what its caller gets of its end."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memckpt.config.observers import OBSERVERS, Committed, Watched, observers_from_environment
from memckpt.errors import ConfigurationError
from memckpt.processes.address import AgentAddress
from memckpt.processes.handles import children_of
from memckpt_run import supervisor
from memckpt_run.attempts import Attempt, ColdStarter, Given
from memckpt_run.notes import Notes, Recorder
from memckpt_run.supervisor import Supervisor
from tests.support.trainings import supervised_job
from tests.support.trainings.engine_harness import Child, Lab
from tests.support.trainings.supervised_runs import LIMIT_SECONDS, forked_job, resumed, supervise, wait_for, weights


def shell(lab: Lab, script: str, restarts: int = 100) -> Child:
    return supervise(lab, "sh", "-c", script, restarts=restarts)


def test_a_command_that_fails_is_started_again_and_counts_its_restarts(lab: Lab) -> None:
    child = shell(
        lab,
        "echo $MEMCKPT_RESTART_COUNT >> counts; exit $((MEMCKPT_RESTART_COUNT == 3 ? 0 : 10 + MEMCKPT_RESTART_COUNT))",
    )
    assert child.wait(LIMIT_SECONDS) == 0
    assert (lab.directory / "counts").read_text().split() == ["0", "1", "2", "3"]
    assert "exit status 12; restart 3 in 1 s" in child.log.read_text()


def test_its_exit_status_is_that_of_the_last_attempt(lab: Lab) -> None:
    child = shell(lab, "echo x >> starts; exit 21")
    assert child.wait(LIMIT_SECONDS) == 21
    assert (lab.directory / "starts").read_text() == "x\n" * 2
    assert "before its first step twice in a row" in child.log.read_text()
    assert shell(lab, "kill -KILL $$", restarts=0).wait(LIMIT_SECONDS) == -signal.SIGKILL
    assert shell(lab, "kill -SEGV $$", restarts=0).wait(LIMIT_SECONDS) == -signal.SIGSEGV


def test_each_failure_starts_a_command_of_the_user_s(lab: Lab) -> None:
    said = 'echo "$MEMCKPT_FAILURE; $MEMCKPT_FOLLOWS" >> failures; exit 3'
    child = supervise(lab, "sh", "-c", "exit 21", on_failure=said)
    assert child.wait(LIMIT_SECONDS) == 21
    first, last = (lab.directory / "failures").read_text().splitlines()
    assert first == "exit status 21; restart 1"
    assert last.startswith("exit status 21; no restart: it has ended with exit status 21 before its first step twice")
    assert child.log.read_text().count("--on-failure ended with exit status 3") == 2


def test_a_command_for_failures_that_hangs_is_ended_with_what_it_has_started(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_COMMAND_SECONDS", 0.5)
    child = supervise(lab, "sh", "-c", "exit 21", restarts=0, on_failure="sleep 1000 & echo $! > pid; wait")
    assert child.wait(LIMIT_SECONDS) == 21
    assert "--on-failure took more than" in child.log.read_text()
    pid = int((lab.directory / "pid").read_text())
    with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(pid)) as process:
        assert select.select([process], [], [], LIMIT_SECONDS)[0]


LISTENER = """
import os, signal, sys
def got(number, frame):
    os.write(fd, signal.Signals(number).name.encode() + b" ")
    if number != signal.SIGUSR1:
        sys.exit(9)
fd = os.open("got", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for each in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(each, got)
os.write(fd, b"ready ")
while True:
    signal.pause()
"""


def listener(lab: Lab) -> Child:
    """A supervised process that writes the names of its signals to the file `got`."""
    child = supervise(lab, sys.executable, "-S", "-c", LISTENER)
    wait_for(lab.directory / "got", "ready")
    return child


@pytest.mark.promise("any end, after SIGTERM, SIGINT, SIGHUP or SIGQUIT to `memckpt run`")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_passed_on_and_ends_restarts(lab: Lab, number: signal.Signals) -> None:
    child = listener(lab)
    os.kill(child.pid, signal.SIGUSR1)
    wait_for(lab.directory / "got", "SIGUSR1")
    os.kill(child.pid, number)
    assert child.wait(LIMIT_SECONDS) == 9
    assert (lab.directory / "got").read_text().split() == ["ready", "SIGUSR1", number.name]
    assert "; restart" not in child.log.read_text()


def test_a_terminal_s_ctrl_c_reaches_the_training_once(lab: Lab) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-S", "-c", LISTENER.replace("sys.exit(9)", "pass")]

    def body() -> None:
        os.close(leader)
        os.setsid()
        fcntl.ioctl(follower, termios.TIOCSCTTY, 0)
        os.chdir(lab.directory)
        code = Supervisor(ColdStarter(command), 100, Notes()).run()
        os._exit(code & 0xFF)

    child = lab.fork(body, "run")
    wait_for(lab.directory / "got", "ready")
    os.write(leader, b"\x03")
    wait_for(lab.directory / "got", "SIGINT")
    # Whatever was passed on as well has come before this one.
    os.kill(child.pid, signal.SIGUSR1)
    wait_for(lab.directory / "got", "SIGUSR1")
    assert (lab.directory / "got").read_text().split() == ["ready", "SIGINT", "SIGUSR1"]
    os.close(follower)
    os.close(leader)  # the terminal hangs up: SIGHUP to the session's leader, who passes it on
    wait_for(lab.directory / "got", "SIGHUP")
    os.kill(child.pid, signal.SIGTERM)  # to an attempt that ignores it, and goes on
    wait_for(lab.directory / "got", "SIGTERM")
    (attempt,) = children_of(child.pid)
    os.kill(attempt, signal.SIGKILL)
    assert child.wait(LIMIT_SECONDS) == 256 - signal.SIGKILL  # no restart: the end was asked for


def test_a_signal_in_a_pause_ends_it(lab: Lab) -> None:
    child = shell(lab, "kill -KILL $$")
    wait_for(child.log, "restart 3 in 1 s")
    os.kill(child.pid, signal.SIGTERM)
    assert child.wait(LIMIT_SECONDS) == -signal.SIGKILL
    assert child.log.read_text().count("restart ") < 10


def test_a_killed_supervisor_s_training_ends_and_nothing_stays(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = lab.directory / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    child = listener(lab)
    (attempt,) = children_of(child.pid)
    handle = os.pidfd_open(attempt)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait(LIMIT_SECONDS) == -signal.SIGKILL
    assert select.select([handle], [], [], LIMIT_SECONDS)[0]
    os.close(handle)
    assert (lab.directory / "got").read_text().split() == ["ready", "SIGTERM"]
    assert list(temporary.iterdir()) == []


A_STEP = Committed(1, 1, lambda: (), sys._getframe(), 0.0, False, None, ("", ""))


def a_session(run_dir: str) -> Watched:
    return Watched(torch.nn.Linear(1, 1), [], dict, run_dir, "here", 0, 1, None)


def test_notes_reach_all_supervisors_and_survive_a_writer_that_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Notes()) as above, contextlib.closing(Notes()) as notes:
        monkeypatch.delenv(OBSERVERS, raising=False)
        monkeypatch.setenv(OBSERVERS, above.environment()[OBSERVERS])
        monkeypatch.setenv(OBSERVERS, notes.environment()[OBSERVERS])
        assert notes.run() is None
        for each in observers_from_environment():
            each.begin_session(a_session("/first"))
        ((_, path), _) = json.loads(os.environ[OBSERVERS])
        with open(path, "ab") as file:
            file.write(b'\n{"name":"run","pid":3,"con')  # a kill in the middle
        for each in observers_from_environment():
            each.begin_session(a_session("/second"))
            each.see_committed(A_STEP)
        for each in (notes, above):
            assert each.run() == AgentAddress.of("/second")
            imports = each.imports_of(os.getpid())
            assert "memckpt_run.notes" in imports.decode()
            assert each.imports_of(1) is None


def test_a_note_is_written_to_no_other_file(tmp_path: Path) -> None:
    """As after the end of a supervisor whose process id is another process's."""
    with (tmp_path / "file").open("wb") as file:
        Recorder(f"/proc/{os.getpid()}/fd/{file.fileno()}").begin_session(a_session(str(tmp_path)))
    assert (tmp_path / "file").read_bytes() == b""


def test_a_program_that_does_not_exist_is_refused(lab: Lab) -> None:
    with pytest.raises(ConfigurationError, match="'no-such-program': no such program; put the whole command"):
        ColdStarter(["no-such-program", "x"])
    with pytest.raises(ConfigurationError, match="must not be executed; put its interpreter before it: -- python"):
        ColdStarter([str(Path(__file__))])


def test_options_behind_the_command_are_the_command_s(capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "memckpt", "run", "--restarts", "0", "printf", "%s|", "--restarts", "-x"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert (ended.returncode, ended.stdout) == (0, "--restarts|-x|"), ended.stderr


# Trainings


def cold_job(lab: Lab, run_dir: str, *arguments: str) -> Child:
    return supervise(lab, sys.executable, supervised_job.__file__, run_dir, *arguments)


@pytest.fixture(params=["forked", pytest.param("cold", marks=pytest.mark.slow)])
def job(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Child]:
    # What is tested is what follows the agent's word; a busy machine's agent takes longer for it than a run waits.
    monkeypatch.setattr(supervisor, "_STATUS_SECONDS", LIMIT_SECONDS)
    return {"forked": forked_job, "cold": cold_job}[request.param]


@pytest.mark.promise("an error: another status, or a signal such as SIGSEGV or SIGABRT")
def test_a_training_that_fails_goes_on_at_its_step_and_ends_as_if_nothing_had_been(
    lab: Lab, job: Callable[..., Child]
) -> None:
    plain = job(lab, "none", "12")
    failing = job(lab, "failing", "12", "kill@5", "raise@9")
    assert (plain.wait(90), failing.wait(90)) == (0, 0), failing.log.read_text()
    assert resumed(failing) == [("0", "None"), ("1", "RestoreReport(step=4"), ("2", "RestoreReport(step=8")]
    assert "SIGKILL at step 5; restart 1, " in failing.log.read_text()
    assert "exit status 1 at step 8; restart 2" in failing.log.read_text()
    assert weights(failing) == weights(plain)


def test_a_bug_that_strikes_again_at_its_step_is_not_tried_a_third_time(lab: Lab, job: Callable[..., Child]) -> None:
    child = job(lab, "run", "12", "kill@3", *["raise@6"] * 9)
    assert child.wait(90) == 1
    assert [number for number, _ in resumed(child)] == ["0", "1", "2"]
    assert "it has ended with exit status 1 at step 5 twice in a row" in child.log.read_text()
    lab.stop(lab.directory / "run")


def test_a_start_over_is_obeyed_by_a_launch_and_not_again_by_its_restarts(
    lab: Lab, job: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert job(lab, "run", "12", "raise@3", "raise@3").wait(90) == 1
    monkeypatch.setenv("MEMCKPT_RESUME", "never")
    child = job(lab, "run", "12", "kill@1", "kill@5")
    assert child.wait(90) == 0, child.log.read_text()
    # Behind one commit nothing may be held yet: that restart starts over, too.
    assert resumed(child)[-3:] == [("0", "None"), ("1", "None"), ("2", "RestoreReport(step=4")]
    assert "resume='never' was obeyed by an earlier attempt of this launch" in child.log.read_text()


class Failing:
    """A starter whose restarts fail as often as it is told, as where no process is left."""

    how = "cold"

    def __init__(self, failures: int) -> None:
        self._failures = failures
        self.starts = 0

    def start(self, given: Given) -> Attempt:
        self.starts += 1
        if self.starts == 1 + self._failures + 1:
            return Ended(0)
        if self.starts == 1:
            return Ended(1)
        raise BlockingIOError("Resource temporarily unavailable")

    def prepare_next(self, attempt: Attempt) -> float | None:
        return None

    def close(self) -> None: ...


class Ended:
    """An attempt that has ended at once."""

    pid = 0

    def __init__(self, code: int) -> None:
        self._code = code

    def poll(self) -> int | None:
        return self._code


@pytest.mark.parametrize("failures", [0, 1, 3, 100])
def test_a_restart_that_cannot_be_made_is_tried_again(
    failures: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(Supervisor, "_pause", lambda supervisor, seconds: pauses.append(seconds) or True)
    starter = Failing(failures)
    with contextlib.closing(Supervisor(starter, 100, Notes())) as supervisor:
        if failures == 100:
            with pytest.raises(BlockingIOError):
                supervisor.run()
        else:
            assert supervisor.run() == 0
            assert starter.starts == failures + 2
    assert caplog.text.count("the restart cannot be made: Resource temporarily unavailable") == min(failures, 20)
    assert pauses[1:4] == [1.0, 2.0, 4.0][:failures]


def test_a_first_start_that_cannot_be_made_is_an_error() -> None:
    starter = Failing(1)
    starter.starts = 1
    with contextlib.closing(Supervisor(starter, 100, Notes())) as supervisor, pytest.raises(BlockingIOError):
        supervisor.run()
