"""Train cases in processes that are killed, and compare what comes out with an undisturbed training.

Every process is forked from the pytest process, which has imported torch and never trained: a child begins as a new
interpreter would, without the seconds that an import takes. Whatever a test starts becomes a child of the pytest
process when its own parent dies, so that at the end of a test it can be seen that nothing is left.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import pickle
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import memckpt
from memckpt.agent.address import NODE_VARIABLE, RUNTIME_VARIABLE, AgentAddress
from memckpt.agent.channel import Channel
from memckpt.agent.messages import StatusRequest, StopRequest
from memckpt.agent.server import serve
from memckpt.config import AgentConfig, MemckptConfig
from memckpt.session import session as session_module
from tests.engine_cases import Case, Training

#: A child that takes longer hangs: it writes down where, and ends.
CHILD_SECONDS = 60
_REFERENCE_SEED = 1
_PR_SET_CHILD_SUBREAPER = 36

Action = Callable[["Control"], None]
Actions = Mapping[tuple[str, int], Action]


def config(redo: str = "lazy", period: int = 4, **settings: Any) -> MemckptConfig:
    """A configuration whose anchors come round within the few steps of a test."""
    agent = settings.pop("agent", AgentConfig(linger_seconds=60))
    settings.setdefault("storage", None)  # what it takes is tested by itself
    return MemckptConfig(redo=redo, anchor_period_steps=period, agent=agent, **settings)  # type: ignore[arg-type]


# In a child


class Journal:
    """What a child reports: lines appended at once, so that they survive its SIGKILL."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, event: str, **fields: Any) -> None:
        os.write(self._fd, json.dumps({"event": event, **fields}).encode() + b"\n")


class Control:
    """What actions inside a training child may use."""

    def __init__(self, journal: Journal, actions: Actions) -> None:
        self.journal = journal
        self.session: memckpt.Session | None = None
        self.training: Training | None = None
        self.step = 0
        self._actions = actions

    def at(self, point: str) -> None:
        """Training has reached a named point: do what is planned for it."""
        action = self._actions.get((point, self.step))
        if action is not None:
            self.journal.note("action", point=point, step=self.step)
            action(self)


def kill_self(control: Control) -> None:
    """The trainer dies here."""
    control.journal.note("killed", who="trainer", step=control.step)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_agent(control: Control) -> None:
    """The agent dies here; returns when it is dead."""
    assert control.session is not None
    pid = control.session.agent_pid
    assert pid is not None
    control.journal.note("killed", who="agent", step=control.step, pid=pid)
    kill_and_wait(pid)


def kill_both(control: Control) -> None:
    """The node dies here: the agent, then the trainer."""
    kill_agent(control)
    kill_self(control)


def kill_and_wait(pid: int, limit: float = 20.0) -> None:
    """SIGKILL, and wait for the end of the process (its zombie may stay)."""
    handle = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        if not select.select([handle], [], [], limit)[0]:
            raise TimeoutError(f"pid {pid} does not die")
    finally:
        os.close(handle)


class _Probe:
    """Registered with the session: its state_dict() is called in the middle of a commit."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def state_dict(self) -> dict[str, int]:
        self._control.at("in commit")
        return {"step": self._control.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._control.journal.note("loaded", step=state["step"])


@dataclass(frozen=True)
class Attempt:
    """What one training child is told.

    Attributes:
        run_dir: names the run.
        report: where journal and outcome go.
        config: None trains without memckpt.
        actions: what happens at which (point, step).
        prepare: called before anything else, to patch what a test needs.
        last_step: where this attempt ends; None trains to the case's end and finishes the run.
    """

    case: Case
    run_dir: Path
    report: Path
    config: MemckptConfig | None
    seed: int = _REFERENCE_SEED
    resume: Any = "auto"
    actions: Actions = field(default_factory=dict)
    prepare: Callable[[Control], None] | None = None
    last_step: int | None = None


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def train(attempt: Attempt) -> None:
    """The body of a training child."""
    case = attempt.case
    control = Control(Journal(attempt.report / "journal"), attempt.actions)
    if attempt.prepare is not None:
        attempt.prepare(control)
    seed_everything(attempt.seed)
    training = control.training = case.build()
    training.at = control.at
    session, first = None, 0
    if attempt.config is not None:
        session = control.session = memckpt.attach(
            training.model,
            training.optimizers,
            run_dir=attempt.run_dir,
            resume=attempt.resume,
            config=attempt.config,
            extra_modules=training.extra_modules,
        )
        first = _begin(session, control, training)
    training.begin(first)
    last = attempt.last_step or case.steps
    for control.step in range(first + 1, last + 1):
        control.at("before batch")
        loss = training.batch(control.step)
        control.journal.note("loss", step=control.step, value=loss.hex())
        if session is not None:
            committed = session.commit(control.step, **training.commit_arguments(control.step))
            control.journal.note("commit", step=control.step, done=committed)
        control.at("after commit")
    if session is not None:
        control.journal.note(
            "end", tap=session._tap.name, tap_reason=session.tap_reason, mode=session.mode, drift=session.drift_ulp
        )
        session.close(finished=attempt.last_step is None)
    (attempt.report / "outcome").write_bytes(pickle.dumps(outcome(training)))


def _begin(session: memckpt.Session, control: Control, training: Training) -> int:
    for name, each in training.registered.items():
        session.register(name, each)
    session.register("probe", _Probe(control))
    control.journal.note("attached", text=session.describe(), mode=session.mode, agent=session.agent_pid)
    report = session.restore()
    writer = session._staging.writer
    pieces = 0 if writer is None else sum(len(group) for group in writer.layout.anchor_groups)
    cut = writer is not None and pieces > len(writer.params)
    if report is None:
        control.journal.note("fresh")
        return 0
    control.journal.note("restored", step=report.step, record=report.record, lost=report.steps_lost, cut=cut)
    return report.step


# What is compared


def outcome(training: Training) -> dict[str, Any]:
    """Everything that an interruption might have changed, as plain values."""
    modules = {"model": training.model, **training.extra_modules}
    return {
        "parameters": {f"{m}.{n}": freeze(p) for m, each in modules.items() for n, p in each.named_parameters()},
        "buffers": {f"{m}.{n}": freeze(b) for m, each in modules.items() for n, b in each.named_buffers()},
        "optimizers": [freeze(optimizer.state_dict()) for optimizer in training.optimizers],
        "registered": {name: freeze(each.state_dict()) for name, each in training.registered.items()},
        "torch rng": freeze(torch.get_rng_state()),
        "numpy rng": freeze(np.random.get_state()),
        "python rng": freeze(random.getstate()),
    }


def freeze(value: Any) -> Any:
    """A plain value that is equal to another one exactly if all bits, types, strides and orders of keys are."""
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().reshape(-1)
        raw = data.view(torch.uint8).numpy().tobytes() if data.numel() else b""
        return ("tensor", str(value.dtype), tuple(value.shape), value.stride(), value.requires_grad, raw)
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, Mapping):
        return {freeze(key): freeze(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [freeze(item) for item in value])
    if isinstance(value, float):
        return ("float", value.hex())
    if value is None or isinstance(value, (bool, int, str, bytes)):
        return (type(value).__name__, value)
    return (type(value).__name__, repr(value))


def differences(expected: Any, found: Any, path: str = "") -> list[str]:
    """Where two frozen values differ."""
    if type(expected) is not type(found):
        return [f"{path}: {str(expected)[:80]} became {str(found)[:80]}"]
    if isinstance(expected, dict):
        keys = [] if list(expected) == list(found) else [f"{path}: keys {_keys(expected)} became {_keys(found)}"]
        both = [key for key in expected if key in found]
        return keys + [line for key in both for line in differences(expected[key], found[key], f"{path}/{key}")]
    if isinstance(expected, (list, tuple)) and not (expected and expected[0] == "tensor"):
        if len(expected) != len(found):
            return [f"{path}: {len(expected)} items became {len(found)}: {str(expected)[:200]} / {str(found)[:200]}"]
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for index, (a, b) in pairs for line in differences(a, b, f"{path}/{index}")]
    return [] if expected == found else [f"{path}: {str(expected)[:120]} became {str(found)[:120]}"]


def _keys(mapping: dict[Any, Any]) -> list[Any]:
    return [key[1] if isinstance(key, tuple) else key for key in mapping]


# In the pytest process


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

    def wait(self, limit: float = CHILD_SECONDS + 10) -> int:
        """Its exit code, negative for a signal.

        Raises:
            TimeoutError: it lives on.
        """
        if self._code is None:
            if not select.select([self._handle], [], [], limit)[0]:
                raise TimeoutError(f"pid {self.pid} lives on; its log: {self.log.read_text()[-2000:]}")
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._handle)
        return self._code

    def alive(self) -> bool:
        return self._code is None and not select.select([self._handle], [], [], 0)[0]


_references: dict[str, Ended] = {}


class Lab:
    """Starts processes for one test, knows what they leave behind, and cleans up."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run_dir = directory / "run"
        # Short: the path of a Unix socket is at most 107 bytes long.
        self.runtime = Path(tempfile.mkdtemp(prefix="mk-"))
        self._saved = {name: os.environ.get(name) for name in (NODE_VARIABLE, RUNTIME_VARIABLE)}
        os.environ[RUNTIME_VARIABLE] = str(self.runtime)
        os.environ[NODE_VARIABLE] = "node"
        self._strangers = children()
        self._children: list[Child] = []
        self._reports = 0
        _be_subreaper(True)

    # Processes

    def fork(self, body: Callable[[], None], name: str) -> Child:
        """Run `body` in a child; its output goes to a log, its exit code is 0 unless it raises."""
        self._reports += 1
        log = self.directory / f"{self._reports}-{name}.log"
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _run_child(body, log)
        child = Child(pid, log)
        self._children.append(child)
        return child

    def start_agent(self, run_dir: Path | None = None, linger_seconds: float = 60.0) -> Child:
        """An agent that has torch already, in a session of its own; returns when it answers."""
        address = AgentAddress.of(run_dir or self.run_dir)
        address.run_dir.mkdir(parents=True, exist_ok=True)
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)

        def body() -> None:
            os.setsid()
            faulthandler.cancel_dump_traceback_later()
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
        """Start a training child; also the agent where it would have to import torch first."""
        self._reports += 1
        report = self.directory / f"report-{self._reports}"
        report.mkdir()
        attempt = Attempt(case, run_dir or self.run_dir, report, settings, **arguments)
        if settings is not None and settings.redo == "eager" and not self.agent_answers(attempt.run_dir):
            self.start_agent(attempt.run_dir)
        return self.fork(lambda: train(attempt), case.name), report

    def train(self, case: Case, settings: MemckptConfig | None, **arguments: Any) -> Ended:
        """Train in a child, to its end or to its planned death.

        Raises:
            AssertionError: the child ended in another way than planned.
        """
        child, report = self.begin(case, settings, **arguments)
        ended = collect(child, report)
        deadly = any(each["who"] == "trainer" for each in ended.of("killed"))
        expected = -signal.SIGKILL if deadly else 0
        assert ended.code == expected, f"exit code {ended.code}, expected {expected}:\n{ended.log[-6000:]}"
        return ended

    def reference(self, case: Case) -> Ended:
        """The same training undisturbed, without memckpt."""
        if case.name not in _references:
            _references[case.name] = self.train(case, None)
        return _references[case.name]

    def check_same(self, case: Case, *attempts: Ended) -> None:
        """The last attempt's outcome and every attempt's losses are the undisturbed training's, bit for bit."""
        reference = self.reference(case)
        for attempt in attempts:
            wrong = {step: value for step, value in attempt.losses.items() if reference.losses[step] != value}
            assert not wrong, f"losses differ at steps {sorted(wrong)}:\n{attempt.log[-3000:]}"
        assert attempts[-1].outcome is not None
        different = differences(reference.outcome, attempts[-1].outcome)
        assert not different, "\n".join(different[:10])

    def survives(
        self,
        case: Case,
        settings: MemckptConfig,
        kills: list[tuple[str, int]],
        *,
        expected: list[int | None] | None = None,
        **arguments: Any,
    ) -> list[Ended]:
        """Kill a training at each of `kills` in turn, resume it each time, and compare.

        Args:
            kills: (point, step) of each kill; each happens in an attempt of its own.
            expected: the step that the attempt after each kill resumes from; None takes the last one committed.
        """
        if expected is None:
            expected = [step if point == "after commit" else step - 1 for point, step in kills]
        attempts = []
        comes_from: int | None = None
        for number, kill in enumerate([*kills, None]):
            actions = {kill: kill_self} if kill is not None else {}
            # Another seed than the reference's: what is not restored shows.
            seed = _REFERENCE_SEED if not comes_from else 1000 + number
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
        """The agent's own account of what it holds."""
        return self._ask(run_dir, StatusRequest())

    def stop(self, run_dir: Path | None = None) -> None:
        """Have the agent let go of everything and leave; returns when it is gone."""
        pid = self.status(run_dir).pid
        handle = os.pidfd_open(pid)
        try:
            self._ask(run_dir, StopRequest())
            assert select.select([handle], [], [], 20)[0], f"agent {pid} does not leave"
        finally:
            os.close(handle)

    def _ask(self, run_dir: Path | None, message: Any) -> Any:
        sock = AgentAddress.of(run_dir or self.run_dir).connect()
        assert sock is not None, "no agent answers"
        channel = Channel(sock)
        try:
            channel.send(message)
            return channel.receive(20)[0]
        finally:
            channel.close()

    # The end

    def left_behind(self, limit: float = 10.0) -> list[str]:
        """Processes, mappings, sockets and locks of ours that are still there; ends what is alive."""
        left = []
        deadline = time.monotonic() + limit
        for child in self._children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                left.append(f"process {child.pid} of {child.log.name}:\n{child.log.read_text()[-1500:]}")
        for pid in children() - self._strangers:
            name = _command(pid)
            if not _reap(pid, max(0.0, deadline - time.monotonic())):
                left.append(f"process {pid}: {name}")
                kill_and_wait(pid)
                _reap(pid, 5.0)
        left += [f"mapping {line}" for line in memory_of_ours("self")]
        left += [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if "memckpt" in name]
        if self.runtime.exists():
            left += [f"{self.runtime.name}/{name}" for name in os.listdir(self.runtime)]
        return left

    def close(self) -> None:
        _be_subreaper(False)
        for name, value in self._saved.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
        shutil.rmtree(self.runtime, ignore_errors=True)


def collect(child: Child, report: Path) -> Ended:
    """What a training child has left when it ended."""
    code = child.wait()
    journal, result = report / "journal", report / "outcome"
    lines = journal.read_text().splitlines() if journal.exists() else []
    frozen = pickle.loads(result.read_bytes()) if result.exists() else None
    return Ended(code, [json.loads(line) for line in lines], child.log.read_text(), frozen)


def memory_of_ours(pid: int | str) -> list[str]:
    """Mappings and descriptors of a process that belong to memckpt's shared memory or sockets."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    found = [line for line in maps if "memfd:memckpt" in line]
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except FileNotFoundError:
            continue  # the descriptor of this very listing
        if "memfd:memckpt" in target:
            found.append(f"fd {fd.name} -> {target}")
    return found


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute for a while."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _run_child(body: Callable[[], None], log: Path) -> None:
    """Never returns."""
    code = 3
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        faulthandler.enable(sys.stderr)
        faulthandler.dump_traceback_later(CHILD_SECONDS, exit=True, file=sys.stderr)
        for handler in list(logging.root.handlers):
            logging.root.removeHandler(handler)
        logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        body()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def children() -> set[int]:
    """Process ids of this process's children, zombies too."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "?"


def _reap(pid: int, limit: float) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if not select.select([handle], [], [], limit)[0]:
            return False
    finally:
        os.close(handle)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)
    return True


def _be_subreaper(on: bool) -> None:
    """Orphans of our children become our children, so that they can be found."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def import_ahead() -> None:
    """Import what a first optimizer imports (seconds), so that children need not. Trains nothing."""
    from memckpt.agent import replica

    assert replica is not None
    assert session_module is not None
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
