"""Trainings of cases in processes that are killed, compared with an undisturbed training.

Every process is forked from the pytest process, which has imported torch and never trained: a child begins as a new
interpreter would, without the seconds of an import. Processes that a test starts become children of the pytest process
when their own parent dies, so that the end of a test can check for leaks.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memckpt.agent.server import serve
from memckpt.config import MemckptConfig
from memckpt.processes.address import NODE_VARIABLE, AgentAddress
from memckpt.processes.control import ask_status, stop_agent
from memckpt.session import session as session_module
from tests.support.cluster import processes
from tests.support.faults.frozen import differences
from tests.support.trainings.engine_child import REFERENCE_SEED, Attempt, kill_self, train
from tests.support.trainings.engine_training import Case
from tests.support.trainings.forked_helpers import fork_helpers
from tests.support.trainings.resume_history import journal_of, why_unproved


@dataclass(frozen=True)
class Ended:
    """A training child that has ended."""

    code: int
    events: list[dict[str, Any]]
    log: str
    outcome: dict[str, Any] | None

    def of(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.events if each["event"] == event]

    @property
    def restored_step(self) -> int | None:
        """The step it resumed from; None if it started over."""
        restored = self.of("restored")
        return restored[0]["step"] if restored else None

    @property
    def verdict(self) -> tuple[str, str]:
        """The resume check's verdict, and its log line; ``"pending"`` if it was not over."""
        checked = self.of("checked")
        return (checked[0]["verdict"], checked[0]["line"]) if checked else ("pending", "")

    @property
    def losses(self) -> dict[int, str]:
        return {each["step"]: each["value"] for each in self.of("loss")}

    @property
    def mode(self) -> str:
        return str(self.of("attached")[0]["mode"])

    @property
    def end(self) -> dict[str, Any]:
        return self.of("end")[0]


class Child:
    """A forked process. Owned by the lab that started it."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log
        self._handle = os.pidfd_open(pid)
        self._code: int | None = None

    def wait(self, limit: float = processes.CHILD_SECONDS + 10) -> int:
        """Its exit code, negative for a signal; raises TimeoutError if it is still alive."""
        if self._code is None:
            if not select.select([self._handle], [], [], limit)[0]:
                raise TimeoutError(f"pid {self.pid} lives on; its log: {self.log.read_text()[-2000:]}")
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._handle)
        return self._code

    def alive(self) -> bool:
        return self._code is None and not select.select([self._handle], [], [], 0)[0]


Kills, Steps = list[tuple[str, int]], list[int | None]
_references: dict[tuple[str, str], Ended] = {}


class Lab:
    """Starts processes for one test, finds what they leave behind, and cleans up."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run_dir = directory / "run"
        #: Device for all tensors of trainings.
        self.device = "cpu"
        self._node = os.environ.get(NODE_VARIABLE)
        os.environ[NODE_VARIABLE] = "node"
        self._strangers = processes.children()
        self._children: list[Child] = []
        #: Report directories of the attempts of each run, in order.
        self._attempts: dict[Path, list[Path]] = {}
        self._reports = 0
        processes.be_subreaper(True)

    # Processes

    def fork(self, body: Callable[[], None], name: str) -> Child:
        """Run `body` in a child; its output goes to a log, its exit code is 0 unless it raises."""
        self._reports += 1
        log = self.directory / f"{self._reports}-{name}.log"
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            processes.run_child(body, log)
        child = Child(pid, log)
        self._children.append(child)
        return child

    def start_agent(self, run_dir: Path | None = None, linger_seconds: float = 60.0, inherits: bool = True) -> Child:
        """An agent that has torch already, in a session of its own; returns when it answers.

        `inherits`: it keeps the descriptors of this process, which those that trainers start do not have.
        """
        address = AgentAddress.of(run_dir or self.run_dir)
        address.run_dir.mkdir(parents=True, exist_ok=True)
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)

        def body() -> None:
            os.setsid()
            faulthandler.cancel_dump_traceback_later()
            if not inherits:
                os.closerange(3, write_fd)
                os.closerange(write_fd + 1, os.sysconf("SC_OPEN_MAX"))
            fork_helpers()
            serve(address, linger_seconds, lambda: os.close(write_fd) if os.write(write_fd, b"1") else None)

        child = self.fork(body, "agent")
        os.close(write_fd)
        try:
            if not select.select([read_fd], [], [], 20)[0] or os.read(read_fd, 1) != b"1":
                raise RuntimeError(f"the agent did not start: {child.log.read_text()}")
        finally:
            os.close(read_fd)
        return child

    # Trainings

    def begin(
        self, case: Case, settings: MemckptConfig | None, *, run_dir: Path | None = None, **arguments: Any
    ) -> tuple[Child, Path]:
        """Start a training child; also the agent if it would have to import torch first."""
        self._reports += 1
        report = self.directory / f"report-{self._reports}"
        report.mkdir()
        attempt = Attempt(case, run_dir or self.run_dir, report, settings, device=self.device, **arguments)
        if settings is not None:
            self._attempts.setdefault(attempt.run_dir, []).append(report)
        if settings is not None and settings.redo == "eager" and not self.agent_answers(attempt.run_dir):
            self.start_agent(attempt.run_dir)
        return self.fork(lambda: train(attempt), case.name), report

    def train(
        self, case: Case, settings: MemckptConfig | None, *, unchecked: Sequence[str] | None = (), **arguments: Any
    ) -> Ended:
        """Train in a child, to its end or to its planned death; a resume must prove itself.

        `unchecked`: parts of reasons for which the check of a resume may say *none*; None: the test checks the verdict.
        """
        child, report = self.begin(case, settings, **arguments)
        ended = collect(child, report)
        deadly = any(each["who"] == "trainer" for each in ended.of("killed"))
        expected = -signal.SIGKILL if deadly else 0
        assert ended.code == expected, f"exit code {ended.code}, expected {expected}:\n{ended.log[-6000:]}"
        if settings is not None and settings.replays and unchecked is not None:
            attempts = self._attempts[arguments.get("run_dir") or self.run_dir]
            earlier = [[journal_of(each / "journal")] for each in attempts if each != report]
            asked = arguments.get("resume")
            reasons = [*unchecked, f"resume={asked}"] if isinstance(asked, int) else unchecked
            problem = why_unproved([ended.events], earlier, settings, died=bool(ended.of("killed")), reasons=reasons)
            assert not problem, f"{problem}\n{ended.log[-3000:]}"
        return ended

    def reference(self, case: Case) -> Ended:
        """The same training, undisturbed and without memckpt."""
        key = (self.device, case.name)
        if key not in _references:
            _references[key] = self.train(case, None)
        return _references[key]

    def check_same(self, case: Case, *attempts: Ended) -> None:
        """Check that the last outcome and every attempt's losses equal the undisturbed training's, bit for bit."""
        reference = self.reference(case)
        for attempt in attempts:
            wrong = {step: value for step, value in attempt.losses.items() if reference.losses[step] != value}
            assert not wrong, f"losses differ at steps {sorted(wrong)}:\n{attempt.log[-3000:]}"
        assert attempts[-1].outcome is not None
        different = differences(reference.outcome, attempts[-1].outcome)
        assert not different, "\n".join(different[:10])

    def goes_on(
        self, case: Case, settings: MemckptConfig, step: int | None, *earlier: Ended, seed: int = 2, **arguments: Any
    ) -> Ended:
        """Train to the end, which must resume at this step (None: start over), and compare it and earlier attempts."""
        ended = self.train(case, settings, seed=REFERENCE_SEED if step is None else seed, **arguments)
        assert ended.restored_step == step, ended.log[-3000:]
        self.check_same(case, *earlier, ended)
        return ended

    def survives(
        self, case: Case, settings: MemckptConfig, kills: Kills, *, expected: Steps | None = None, **arguments: Any
    ) -> list[Ended]:
        """Kill a training at each of `kills` (point, step) in turn, resume it each time, and compare.

        `expected`: step that the attempt after each kill resumes from; None: the last committed one.
        """
        if expected is None:
            expected = [step if point == "after commit" else step - 1 for point, step in kills]
        attempts = []
        comes_from: int | None = None
        for number, kill in enumerate([*kills, None]):
            actions = {kill: kill_self} if kill is not None else {}
            # Another seed than the reference's: state that is not restored shows.
            seed = REFERENCE_SEED if not comes_from else 1000 + number
            ended = self.train(case, settings, seed=seed, actions=actions, **arguments)
            assert ended.restored_step == (comes_from or None), f"attempt {number}:\n{ended.log[-3000:]}"
            assert len(ended.of("killed")) == (kill is not None)
            attempts.append(ended)
            comes_from = expected[number] if kill is not None else None
        self.check_same(case, *attempts)
        return attempts

    # Agents, seen from outside

    def agent_answers(self, run_dir: Path | None = None) -> bool:
        sock = AgentAddress.of(run_dir or self.run_dir).connect()
        if sock is not None:
            sock.close()
        return sock is not None

    def status(self, run_dir: Path | None = None) -> Any:
        """The agent's status."""
        status = ask_status(AgentAddress.of(run_dir or self.run_dir), timeout=20.0)
        assert status is not None, "no agent answers"
        return status

    def stop(self, run_dir: Path | None = None) -> None:
        """Make the agent drop everything and leave; returns when it is gone.

        An agent that was started for a refused start leaves by itself.
        """
        address = AgentAddress.of(run_dir or self.run_dir)
        serving = address.serving()
        if stop_agent(address, timeout=20.0) is None:
            assert serving is None or serving.ends(20.0), "an agent is there, and does not answer"

    # The end

    def left_behind(self, limit: float = 10.0) -> list[str]:
        """Our processes, mappings, sockets and locks that still exist; ends processes that are alive."""
        left = []
        deadline = time.monotonic() + limit
        for child in self._children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                left.append(f"process {child.pid} of {child.log.name}:\n{child.log.read_text()[-1500:]}")
                processes.kill_and_wait(child.pid)
                child.wait()
        for pid in processes.children() - self._strangers:
            name = processes.command(pid)
            if not processes.reap(pid, max(0.0, deadline - time.monotonic())):
                left.append(f"process {pid}: {name}")
                processes.kill_and_wait(pid)
                processes.reap(pid, 5.0)
        left += [f"mapping {line}" for line in processes.memory_of_ours("self")]
        left += [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if "memckpt" in name]
        left += [str(path) for path in self.directory.rglob("agent-*.json.*")]
        return left

    def close(self) -> None:
        processes.be_subreaper(False)
        os.environ.pop(NODE_VARIABLE)
        if self._node is not None:
            os.environ[NODE_VARIABLE] = self._node


def collect(child: Child, report: Path) -> Ended:
    """The results of a training child that has ended."""
    code = child.wait()
    result = report / "outcome"
    frozen = pickle.loads(result.read_bytes()) if result.exists() else None
    return Ended(code, journal_of(report / "journal"), child.log.read_text(), frozen)


def import_ahead() -> None:
    """Import the modules that a first optimizer imports (seconds), so that children need not. Trains nothing."""
    from memckpt.memory import replica

    assert replica is not None
    assert session_module is not None
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
