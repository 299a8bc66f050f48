"""The trainer's side of the engine: :func:`attach`, and the :class:`Session` that it returns, one for each rank.

Read `session` first (its three phases, `commit`), then `protection` (delivers records, and what errors of that do),
`generation_switch` (when a base begins) and `staging` (what is written of a record). The agent: `link` (what is asked
of it) over `connection`. The training: `ranks`, `mode` (of redo), `gradient_tap`, `compressed_averages`, `rank_state`,
`loop`. `resume/`: what an attempt goes on from. Frameworks' adapters call it, through `memckpt`; `tuning` advises,
`peers` is for the peers tier.
"""

from memckpt.session.entry import attach
from memckpt.session.resume.report import HeldState, RestoreReport
from memckpt.session.session import Session

__all__ = ["HeldState", "RestoreReport", "Session", "attach"]
