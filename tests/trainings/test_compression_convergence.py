"""Compressed gradients train as uncompressed ones do, as long as what is left out is not lost."""

from __future__ import annotations

import faulthandler
import statistics
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from examples.gpt import GPT, SIZES, Corpus
from memckpt import compression
from memckpt.compression import CompressionConfig, TopK
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import PROCESS_GROUP_SECONDS, fresh_directory, join, run_ranks

RANKS, BATCH = 2, 4
#: An element waits for about 1 / ratio steps until it is sent: fewer steps than several times that compare nothing. A
#: larger learning rate is past the best one of the uncompressed training, and would favor whatever makes steps smaller.
STEPS, LEARNING_RATE = 600, 0.1
#: Limit on one training, in seconds.
CHILD_SECONDS = 400
#: Steps at the end, over which losses are averaged.
LAST = 100


def train(config: CompressionConfig | None, directory: Path, rank: int) -> None:
    """Train the tiny GPT of the examples with SGD; the loss at the end goes to a file."""
    faulthandler.dump_traceback_later(CHILD_SECONDS, exit=True)  # later than other children's
    join(rank, RANKS, directory / "store", 6 * PROCESS_GROUP_SECONDS)
    torch.manual_seed(0)
    net = GPT(SIZES["tiny"]).eval()  # without dropout
    model = DistributedDataParallel(net)
    if config is not None:
        model.register_comm_hook(compression.state(config, net.parameters()), compression.hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20) * (1 - step / STEPS))
    corpus = Corpus(net.config.context)
    torch.manual_seed(100 + rank)
    losses = []
    for step in range(STEPS):
        tokens, targets = corpus.sample(BATCH)
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
        if step % 100 == 99:
            print(f"step {step + 1}: loss {statistics.mean(losses[-100:]):.4f}")
    end = torch.tensor([statistics.mean(losses[-LAST:])])
    dist.all_reduce(end)
    if rank == 0:
        (directory / "loss").write_text(repr(float(end) / RANKS))
    dist.barrier()
    dist.destroy_process_group()


def loss_with(lab: Lab, config: CompressionConfig | None, name: str) -> float:
    """The loss at the end of a training on two ranks."""
    directory = fresh_directory(lab)
    ranks = run_ranks(lab, RANKS, partial(train, config, directory), directory, limit=CHILD_SECONDS + 10, name=name)
    codes = [child.wait() for child in ranks]
    assert codes == [0] * RANKS, "".join(child.log.read_text()[-2000:] for child in ranks)
    return float((directory / "loss").read_text())


@pytest.mark.slow
def test_top_k_converges_with_error_feedback_only(lab: Lab) -> None:
    """A hundredth of the elements is within 3% of the uncompressed run at equal steps; without feedback it is not."""
    dense = loss_with(lab, None, "dense")
    feedback = loss_with(lab, TopK(ratio=0.01), "feedback")
    without = loss_with(lab, TopK(ratio=0.01, error_feedback=False), "without")
    print(f"loss: uncompressed {dense:.4f}, with error feedback {feedback:.4f}, without {without:.4f}")
    assert dense < 2.9, "the uncompressed run has not learned"
    assert feedback < 1.03 * dense
    assert without > 1.03 * dense
