"""CUDA graphs: what is recorded into one runs later, and then without the hooks by which training is seen.

A forward in a graph (``torch.compile(mode="reduce-overhead")``, ``make_graphed_callables``) is no matter: gradients are
accumulated outside of it. A whole backward is seen only while it is recorded; its replays leave gradients that are
taken after the step. A step's replays leave nothing that could be recorded.
"""

from __future__ import annotations

from memckpt.errors import UnsupportedError, UsageError

STEP = (
    "an optimizer's step is being recorded into a CUDA graph, and its replays run no hooks: no record would hold them; "
    "step outside of the graph, or have the state captured (redo='capture')"
)


class GraphNotes:
    """What has been seen to be recorded into graphs.

    Attributes:
        backward, step: whether one has been.
        stepped: whether an optimizer has stepped, outside of graphs, since the last commit.
    """

    def __init__(self) -> None:
        self.backward = False
        self.step = False
        self.stepped = False

    def refuse_unseen(self, world_size: int, told: bool) -> None:
        """Refuse a commit where replays hide whether it is a restore point.

        Args:
            world_size: the number of ranks.
            told: whether the caller has said if gradients are pending.

        Raises:
            UnsupportedError: several ranks, whose reductions are not seen.
            UsageError: gradients may be waiting for a step.
        """
        stepped, self.stepped = self.stepped, False
        if not self.backward:
            return
        if world_size > 1:
            raise UnsupportedError(
                f"a backward was recorded into a CUDA graph, with {world_size} ranks: its replays run no hooks, so "
                "that it cannot be seen when all ranks have reduced; record the forward alone, or use one rank"
            )
        if not (told or stepped or self.step):
            raise UsageError(
                "commit(): a backward was recorded into a CUDA graph, whose replays cannot be seen, and no optimizer "
                "has stepped: expected commit(gradients_pending=True) in the middle of an accumulation, False else"
            )
