"""Trainings whose steps redo gets wrong, and a wait for the audit that finds it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from memckpt.capture.beside import watch
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import ask_status
from memckpt.protocol.status import AuditStatus
from tests.support.cluster.waiting import until
from tests.support.trainings.engine_child import Control
from tests.support.trainings.engine_optimizers import Own
from tests.support.trainings.engine_training import Training


def as_if_large(control: Control) -> None:
    """Compare samples of parameters, as those of a larger model."""
    watch.WHOLE_BYTES = 0


class Clock:
    """Steps of the training process: what no gradient, group or state of an optimizer shows."""

    def __init__(self) -> None:
        self.steps = 0
        self.phase: Callable[[int], bool] = lambda steps: False

    def tick(self, *_: object) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


CLOCK = Clock()


class Phased(Own):
    """Steps half as far while the clock says so."""

    def step_one(self, param: Any, group: dict[str, Any]) -> None:
        param.sub_(param.grad, alpha=group["lr"] * (0.5 if CLOCK.phase(CLOCK.steps) else 1.0))


class PhasedTraining(Training):
    make = Phased

    def __init__(self, phase: Callable[[int], bool]) -> None:
        CLOCK.phase = phase
        super().__init__(behind=CLOCK.tick)
        self.registered["clock"] = CLOCK


class HiddenWrite(Training):
    """A hook changes one element of a large weight, from some step on, past all that could count it."""

    def __init__(self, since: int) -> None:
        self.steps, self.since = 0, since
        super().__init__()
        self.registered["clock"] = CLOCK

    def make_optimizers(self) -> list[Optimizer]:
        (optimizer,) = super().make_optimizers()
        optimizer.register_step_post_hook(self.scale)
        return [optimizer]

    def scale(self, *_: object) -> None:
        CLOCK.steps += 1
        if CLOCK.steps > self.since:
            next(self.model.parameters()).detach().numpy().reshape(-1)[1234] *= 1.25


def phased_in_trainers(run_dir: Path | None) -> Callable[[Any], Optimizer]:
    """Makes an optimizer that always steps half as far, and in the auditor does not; it waits for the audit."""

    def make(params: Any) -> Optimizer:
        CLOCK.phase = lambda steps: True
        optimizer = Phased(params)

        def near() -> bool:
            status = ask_status(AgentAddress.of(run_dir)) if run_dir is not None and CLOCK.steps > 4 else None
            return status is None or status.mode == "snapshot" or _has_caught_up(status.audit)

        optimizer.register_step_post_hook(CLOCK.tick)
        optimizer.register_step_post_hook(lambda *_: until(near))
        return optimizer

    return make


def audit_of(control: Control) -> AuditStatus | None:
    """What the agent's status says of the audit."""
    assert control.session is not None
    status = ask_status(control.session._link._address, timeout=20.0)
    assert status is not None
    return status.audit


def wait_for_audit(control: Control) -> None:
    """Let the audit catch up, while steps are redone: nothing is left that it could do without a further record."""

    def near() -> bool:
        assert control.session is not None
        writer, last = control.session._staging.writer, control.session._last
        since = (0 if last is None else last.record) - control.session._switch.began
        return writer is None or writer.snapshots or since < 2 or _has_caught_up(audit_of(control))

    until(near, "the audit")
    audit = audit_of(control)
    if audit is not None:
        control.journal.note(
            "audit", step=control.step, pieces=audit.pieces, findings=audit.findings, problem=audit.problem
        )


def _has_caught_up(audit: AuditStatus | None) -> bool:
    """Whether the auditor runs, whatever it leaves out, and nothing waits for it."""
    return audit is not None and audit.cpu_seconds > 0 and not audit.backlog
