"""Interface of the engine to a training process: :func:`attach` and the :class:`Session` it returns."""

from memckpt.session.entry import attach
from memckpt.session.resume.report import HeldState, RestoreReport
from memckpt.session.session import Session

__all__ = ["HeldState", "RestoreReport", "Session", "attach"]
