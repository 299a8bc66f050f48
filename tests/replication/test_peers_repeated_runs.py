"""Nodes are lost, and the resume from what others hold proves itself: the last step is repeated from the state before.

The state before comes from where the state itself does: from replicas on other nodes, from another node that holds the
same shards with what is private decoded, or from the nodes where the ranks were before.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from memckpt.config import MemckptConfig
from tests.support.cluster.peers_lab import (
    Act,
    PeersJob,
    PeersRank,
    fail,
    finishes,
    goes_on,
    peers_config,
    peers_job,
    told,
)
from tests.support.cluster.sharded_cases import Setup
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import Death, noted, reference

FSDP, DDP, HSDP = Setup(world_size=4), Setup("ddp", 4), Setup("hsdp", 4)
slow = pytest.mark.slow


def draw_once_more(rank: PeersRank) -> None:
    """The fault: this rank's generator goes on by a number that nobody else draws."""
    torch.rand(1)


def verdict_of(attempt: PeersJob) -> tuple[str, str]:
    """What all ranks say of the repeated step."""
    (found,) = {(each["verdict"], each["line"]) for rank in noted(attempt, "checked") for each in rank}
    return found


def dies(lab: Lab, job: PeersJob, who: str, step: int) -> PeersJob:
    """An attempt of which a node is lost in a step, when all of the step before is protected."""
    return fail(lab, replace(job, protected_at=(step - 1,)), Death(who, step, "backward"))


@pytest.mark.promise(
    "after the loss of nodes the step is repeated from copies, from fragments of private state together with "
    "another node, or from the ranks' old nodes; also if the same node is lost again in that step, or the step "
    "differs"
)
@pytest.mark.parametrize(
    ("setup", "config"),
    [
        (Setup(), peers_config(1, 1, "lazy")),
        pytest.param(FSDP, peers_config(1, 1, "lazy"), marks=slow),
        pytest.param(DDP, peers_config(2, 2, "eager"), marks=slow),
        pytest.param(FSDP, peers_config(1, 1, "eager"), marks=slow),
        pytest.param(FSDP, peers_config(1, 2, "lazy"), marks=slow),
        pytest.param(DDP, peers_config(1, 1, "lazy"), marks=slow),
        pytest.param(DDP, peers_config(3, 1, "lazy"), marks=slow),
        pytest.param(HSDP, peers_config(2, 2, "lazy"), marks=slow),
        pytest.param(HSDP, peers_config(1, 1, "eager"), marks=slow),
        pytest.param(FSDP, peers_config(2, 2, "eager"), marks=slow),
    ],
    ids=["two nodes", "copies", "private fragments, eager", "copies, eager", "three copies",
         "copies, ddp", "private fragments", "hsdp", "copies, hsdp, eager", "fragments, eager"],
)  # fmt: skip
def test_a_step_is_repeated_and_whatever_becomes_of_it_nothing_is_lost(
    lab: Lab, setup: Setup, config: MemckptConfig
) -> None:
    """It ends with the loss of the same node again; then it differs, and training goes on from what was held."""
    job = peers_job(lab, setup, config)
    expected = reference(lab, job)
    first = dies(lab, job, "node1", 5)

    # The repeated step is the one before that at which training goes on.
    again = fail(lab, first.again(lab), Death("node1", 4, "stepped"))
    goes_on(again, 5, 5)
    assert not any(noted(again, "checked"))

    fault = [Act(1, 4, "forward", draw_once_more)]
    differing = dies(lab, again.again(lab, acts=fault), "node1", 8)
    assert {rank[0]["step"] for rank in noted(differing, "restored")} == {5}
    verdict, line = verdict_of(differing)
    assert verdict == "different", line
    assert "DIFFERENT: generators torch on rank 1" in line
    for rank, steps in enumerate(noted(differing, "committed")):
        losses = expected[rank]["losses"]
        assert all(each["loss"] == losses[each["step"]] for each in steps if each["step"] >= 5)

    last = differing.again(lab)
    finishes(lab, last, expected)
    goes_on(last, 8, 8)
    assert verdict_of(last)[0] == "equal", told(lab)
