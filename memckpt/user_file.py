"""Two states to continue from: what is held, and a checkpoint file that the user has passed to the framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from memckpt.config import ResumeChoice
from memckpt.user_messages import Messages


class _Held(Protocol):
    @property
    def step(self) -> int: ...


class _Session(Protocol):
    @property
    def held(self) -> _Held | None: ...
    def close(self, finished: bool) -> None: ...


Session = TypeVar("Session", bound=_Session)


@dataclass(frozen=True)
class UserFile:
    """A checkpoint of the framework's own.

    Attributes:
        path: as the user has given it.
        step: of its state.
        argument: the name of the framework's argument that it was passed as.
    """

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
    """Attach, and decide between held state and `file`; the session has held state exactly if training goes on from it.

    With ``resume="auto"`` the newer of the two is taken; what was asked for explicitly is taken in any case.

    Args:
        attach: opens a session with the given choice.
        resume: the user's.
        file: None: the user has passed none.
        run_dir: for the messages.
    """
    session = attach(resume)
    if session.held is None or file is None:
        return session
    if resume == "auto" and file.step > session.held.step:
        messages.warn(
            f"training starts from {file.path} at step {file.step}: the state held in {run_dir!r} is older "
            f"(step {session.held.step})"
        )
        # The engine has to give up what it holds, too: training goes on from another state.
        session.close(finished=False)
        return attach("never")
    messages.warn(
        f"training continues from held step {session.held.step}, and not from {file.path} at step {file.step}, which "
        f'was passed as {file.argument}; resume="never" starts from the file'
    )
    return session
