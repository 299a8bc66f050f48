"""What a node can produce of one set of shards, as the recovery plan is told of it."""

from __future__ import annotations

from collections.abc import Mapping

from memckpt.state.records import Branch, HeldRecords, RankGroup
from memckpt.state.spec import StateSpec


def describe(
    spec: StateSpec,
    node: str,
    ranks: RankGroup,
    history: tuple[Branch, ...],
    steps: Mapping[int, int],
    newest: int,
    standby: bool = False,
) -> HeldRecords:
    """Describe records that can be produced while nothing comes.

    Args:
        spec: of the state, as its owner has it.
        node: that holds them.
        ranks: whose state they are.
        history: of their timelines.
        steps: of each record that can be produced, oldest first.
        newest: the newest record that all of the ranks have committed, where any can be produced.
        standby: whether a standby replica holds them for ranks of another node.
    """
    return HeldRecords(
        node=node,
        records=tuple(steps),
        steps=tuple(steps.values()),
        ranks=ranks,
        history=history,
        world_size=spec.world_size,
        digest=spec.digest(),
        sharding=spec.sharding(),
        newest=newest if steps else 0,
        replicas=spec.replicas,
        standby=standby,
    )
