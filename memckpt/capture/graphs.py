"""CUDA graphs: recorded work runs later, without the hooks that observe training.

A forward in a graph (``torch.compile(mode="reduce-overhead")``, ``make_graphed_callables``) is harmless: gradients are
accumulated outside of it. A whole backward runs its hooks only while it is recorded; the gradients of its replays are
taken after the step. Replays of a step leave nothing that could be recorded.
"""

from __future__ import annotations

from memckpt.errors import UnsupportedError, UsageError

STEP = (
    "an optimizer's step is being recorded into a CUDA graph, and its replays run no hooks: no record would hold them; "
    "step outside of the graph, or have the state copied (redo='snapshot')"
)


class GraphNotes:
    """Graph recordings seen in this session.

    Attributes:
        backward, step: whether a backward or a step has been recorded.
        stepped: whether an optimizer has stepped, outside of graphs, since the last commit.
    """

    def __init__(self) -> None:
        self.backward = False
        self.step = False
        self.stepped = False

    def refuse_unseen(self, world_size: int, told: bool) -> None:
        """Refuse a commit if replays hide whether it is a restore point.

        Args:
            world_size: number of ranks.
            told: whether the caller has declared if gradients are pending.

        Raises:
            UnsupportedError: several ranks, whose reductions are hidden.
            UsageError: gradients may be waiting for a step.
        """
        stepped, self.stepped = self.stepped, False
        if not self.backward:
            return
        if world_size > 1:
            raise UnsupportedError(
                f"a backward was recorded into a CUDA graph, with {world_size} ranks: its replays run no hooks, so "
                "it is unknown when all ranks have reduced; record the forward alone, or use one rank"
            )
        if not (told or stepped or self.step):
            raise UsageError(
                "commit(): a backward was recorded into a CUDA graph, whose replays cannot be seen, and no optimizer "
                "has stepped: expected commit(gradients_pending=True) inside an accumulation, False otherwise"
            )
