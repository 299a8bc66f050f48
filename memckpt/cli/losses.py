"""What would be lost if something died now: derived from a run's status. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from memckpt.cli.common import count
from memckpt.cli.run_view import View
from memckpt.protocol.status import Status


@dataclass(frozen=True)
class Loss:
    """Loss if something died now.

    Attributes:
        what: ``"trainer"``, ``"agent"``, ``"node"`` (this one, with both) or ``"cluster"`` (all nodes).
        steps: steps that would be lost, at most; None: all of them, or not known.
        words: the same, and what it depends on.
    """

    what: str
    steps: int | None
    words: str


def losses_of(view: View) -> Iterator[Loss]:
    """Cost of each possible death, in steps."""
    agent = view.agent
    all_nodes = _without_memory(view)
    node = all_nodes if agent is None else _without_node(agent, all_nodes)
    holds = agent is not None and agent.step is not None
    trainer, own = node, node
    if agent is not None and holds:
        trainer = _without_trainer(agent)
        if agent.trainers:
            own = Loss("", 0, "0 steps: training goes on, and gives its state to a new agent")
    for what, loss in {"trainer": trainer, "agent": own, "node": node, "cluster": all_nodes}.items():
        yield replace(loss, what=what)


def _without_trainer(agent: Status) -> Loss:
    if agent.unprotected:
        return Loss("", None, f"all steps since step {agent.step}: training is not protected now")
    if agent.every > 1:
        return Loss("", agent.every - 1, f"at most {count(agent.every - 1, 'step')}: each {agent.every}th is held")
    return Loss("", 0, "0 steps: only the one that is being taken")


def _without_node(agent: Status, all_nodes: Loss) -> Loss:
    """What is lost with this node if the others live on."""
    peers = agent.peers
    if peers is None:
        return all_nodes
    newest = max((record for _, record in agent.committed), default=None)
    if not peers.protected or peers.watermark is None or newest is None or agent.unprotected:
        return replace(all_nodes, words=f"{all_nodes.words}; other nodes do not protect this one now")
    if peers.every > 1:
        most = 2 * peers.every
        return Loss("", most, f"about {count(most, 'step')} at most: other nodes get each {peers.every}th state")
    behind = max(0, newest - peers.watermark)
    return Loss("", behind, f"{count(behind, 'step')}: other nodes have record {peers.watermark}")


def _without_memory(view: View) -> Loss:
    """What is lost if only storage is left."""
    agent, stored = view.agent, view.stored
    tier = agent.storage if agent is not None else None
    held = agent.step if agent is not None else None
    if stored is not None and stored.problem:
        return Loss("", None, "not known: storage cannot be read")
    step = stored.step if stored is not None else (tier.step if tier is not None else None)
    if step is None:
        return Loss("", None, "everything: there is no checkpoint in storage")
    if held is None or (agent is not None and agent.unprotected):
        return Loss("", None, f"all steps since step {step}, which is in storage")
    behind = max(0, held - step)
    return Loss("", behind, f"{count(behind, 'step')}: step {step} is in storage")
