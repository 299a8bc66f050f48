"""Content of a training child: the training itself, its journal, and its planned actions."""

from __future__ import annotations

import json
import os
import pickle
import random
import select
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import memckpt
from memckpt.capture.copier import AcceleratorCopier
from memckpt.config import AgentConfig, MemckptConfig
from tests.support.cluster.processes import kill_and_wait
from tests.support.faults.frozen import outcome
from tests.support.late import device as late
from tests.support.trainings.engine_training import Case, Training
from tests.support.trainings.resume_history import commit, note_resume

REFERENCE_SEED = 1
#: Longest wait for a message of the agent, in seconds: on a busy machine a writer's imports take long.
MESSAGE_SECONDS = 55

Action = Callable[["Control"], None]
Actions = Mapping[tuple[str, int], Action]


def config(redo: str = "lazy", period: int = 4, **settings: Any) -> MemckptConfig:
    """A configuration whose anchor period fits into the few steps of a test."""
    agent = settings.pop("agent", AgentConfig(linger_seconds=60))
    settings.setdefault("storage", None)  # its effects have tests of their own
    settings.setdefault("resume_check", "replay")  # each resume proves itself, and `survives` checks the verdict
    settings.setdefault("snapshot_every_steps", 1)  # captured state loses no step either
    values: dict[str, Any] = {"redo": redo, "anchor_period_steps": period, "agent": agent, **settings}
    return MemckptConfig(**values)


class Journal:
    """A child's report: lines appended at once, so that they survive its SIGKILL."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, event: str, **fields: Any) -> None:
        os.write(self._fd, json.dumps({"event": event, **fields}).encode() + b"\n")


class Control:
    """Interface for actions inside a training child."""

    def __init__(self, journal: Journal, actions: Actions) -> None:
        self.journal = journal
        self.session: memckpt.Session | None = None
        self.training: Training | None = None
        self.step = 0
        self._actions = actions

    def at(self, point: str) -> None:
        """Note that training has reached a named point: run its action."""
        action = self._actions.get((point, self.step))
        if action is not None:
            self.journal.note("action", point=point, step=self.step)
            action(self)


def kill_self(control: Control) -> None:
    """Kill the trainer here."""
    control.journal.note("killed", who="trainer", step=control.step)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_agent(control: Control) -> None:
    """Kill the agent here; returns when it is dead."""
    assert control.session is not None
    pid = control.session.agent_pid
    assert pid is not None
    control.journal.note("killed", who="agent", step=control.step, pid=pid)
    kill_and_wait(pid)


def kill_both(control: Control) -> None:
    """Kill the node here: the agent, then the trainer."""
    kill_agent(control)
    kill_self(control)


class Probe:
    """A registered object whose state_dict() is called in the middle of a commit: there a process comes by a place."""

    def __init__(self, at: Callable[[str], None], place: str = "in commit") -> None:
        self._at, self._place = at, place

    def state_dict(self) -> dict[str, int]:
        self._at(self._place)
        return {"nothing": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"nothing": 0}


def listen_until(session: memckpt.Session, condition: Callable[[], bool], otherwise: str = "no message") -> None:
    """Handle the agent's messages until something is true."""
    while not condition():
        assert select.select([session._link.connection.channel], [], [], MESSAGE_SECONDS)[0], otherwise
        session._protection.listen()


@dataclass(frozen=True)
class Attempt:
    """Parameters of one training child."""

    case: Case
    run_dir: Path  # identifies the run
    report: Path  # directory for journal and outcome
    config: MemckptConfig | None  # configuration; None trains without memckpt
    seed: int = REFERENCE_SEED
    resume: Any = "auto"
    actions: Actions = field(default_factory=dict)  # actions by (point, step)
    prepare: Callable[[Control], None] | None = None  # called before anything else, to patch code for a test
    last_step: int | None = None  # last step of this attempt; None trains to the case's end and finishes the run
    device: str = "cpu"  # device for all tensors


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def use_device(device: str) -> None:
    """Make all tensors there from now on, with kernels whose results do not depend on the order of threads."""
    if device == "cpu":
        return
    if device.startswith("late"):
        late.load()
        late.be_slow(others=300)
        # As if tensors were large: copies begin at once, and in parts.
        AcceleratorCopier.BUCKET_BYTES, AcceleratorCopier.PART_BYTES = 1 << 10, 1 << 14
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read at the first use of the device
    torch.use_deterministic_algorithms(True)
    torch.set_default_device(device)


def train(attempt: Attempt) -> None:
    """The body of a training child."""
    case = attempt.case
    control = Control(Journal(attempt.report / "journal"), attempt.actions)
    if attempt.prepare is not None:
        attempt.prepare(control)
    use_device(attempt.device)
    seed_everything(attempt.seed)
    training = control.training = case.build()
    training.at = control.at
    session, first = None, 0
    if attempt.config is not None:
        where: dict[str, Any] = {"run_dir": attempt.run_dir, "resume": attempt.resume, "config": attempt.config}
        session = control.session = memckpt.attach(
            training.model, training.optimizers, extra_modules=training.extra_modules, **where
        )
        first = _begin(session, control, training)
    training.begin(first)
    last = attempt.last_step or case.steps
    for control.step in range(first + 1, last + 1):
        training.number = control.step
        control.at("before batch")
        loss = training.batch(control.step)
        control.journal.note("loss", step=control.step, value=loss.hex())
        if session is not None:
            arguments = training.commit_arguments(control.step)
            commit(control.journal, session, control.step, step=control.step, **arguments)
        control.at("after commit")
    if session is not None:
        control.journal.note(
            "end",
            tap=session._tap.current.name,
            tap_reason=session.tap_reason,
            mode=session.mode,
            drift=session.drift_ulp,
        )
        session.close(finished=attempt.last_step is None)
    (attempt.report / "outcome").write_bytes(pickle.dumps(outcome(training)))


def _begin(session: memckpt.Session, control: Control, training: Training) -> int:
    for name, each in training.registered.items():
        session.register(name, each, parts=getattr(each, "parts", None))
    session.register("probe", Probe(control.at))
    if training.accumulates is not None:
        session.announce_accumulation(training.accumulates)
    control.journal.note("attached", text=session.describe(), mode=session.mode, agent=session.agent_pid)
    report = session.restore()
    repetition = session._first_steps.repetition
    held = None if repetition is None else repetition.held.generation
    writer = session._staging.writer if repetition is None else held and held.writer
    pieces = 0 if writer is None else sum(len(group) for group in writer.layout.anchor_groups)
    cut = writer is not None and pieces > len(writer.params)
    note_resume(control.journal, report, cut=cut)
    return 0 if report is None else report.step
