"""What a training process talks to: :func:`attach` and the :class:`Session` it returns."""

from memckpt.session.session import HeldState, RestoreReport, Session, attach

__all__ = ["HeldState", "RestoreReport", "Session", "attach"]
