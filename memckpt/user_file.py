"""Choice between two states to continue from: the held one, and a checkpoint file passed to the framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from memckpt.config import ResumeChoice
from memckpt.user_messages import Messages


class _Held(Protocol):
    @property
    def newest_step(self) -> int: ...


class _Session(Protocol):
    @property
    def held(self) -> _Held | None: ...
    def close(self, finished: bool) -> None: ...


Session = TypeVar("Session", bound=_Session)


@dataclass(frozen=True)
class UserFile:
    """A checkpoint file of the framework, of a step, that the user has passed as this argument."""

    path: str
    step: int
    argument: str


def connect(
    attach: Callable[[ResumeChoice | int], Session],
    resume: ResumeChoice | int,
    file: UserFile | None,
    run_dir: str,
    messages: Messages,
) -> Session:
    """Attach, and choose between held state and `file`; the session has held state only if training continues from it.

    With ``resume="auto"`` the newer of the two is taken; an explicit choice is always taken.
    """
    session = attach(resume)
    # Not without need: once `held` is read no other state is restored.
    if file is None or session.held is None:
        return session
    held = session.held.newest_step
    if resume == "auto" and file.step > held:
        messages.warn(
            f"training starts from {file.path} at step {file.step}: the state held in {run_dir!r} is older "
            f"(step {held})"
        )
        # The engine has to drop its held state, too: training continues from another one.
        session.close(finished=False)
        return attach("never")
    messages.warn(
        f"training continues from held step {held}, and not from {file.path} at step {file.step}, which "
        f'was passed as {file.argument}; resume="never" starts from the file'
    )
    return session
