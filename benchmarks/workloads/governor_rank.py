"""One rank of a sharded training over two nodes, for the governor's benchmark: reports the time of each step.

Writes one line of JSON to standard output at its end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import memckpt
from benchmarks.workloads.gpt import make_model
from benchmarks.workloads.rank_gpt import ShardedTraining
from examples.gpt import GPT, SIZES, Block
from memckpt import ErasureConfig, MemckptConfig, Session
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import ask_status

#: Protection: none; capture and redo on the own node; peers without a governor; peers with it.
ARMS = ("nothing", "local", "without", "with")


class _Elsewhere(torch.autograd.Function):
    """The identity, with a delay that stands for compute on an accelerator: the rank waits and its core is free."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.backward_seconds = backward_seconds
        time.sleep(forward_seconds)  # compute that uses no core
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)  # compute of the backward pass, which uses no core
        return gradient, None, None


def compute_elsewhere(model: GPT, seconds: float) -> None:
    """Let the blocks together wait so many seconds per step, a third of it in forward."""
    share = seconds / 3 / len(model.blocks)

    def wait(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return _Elsewhere.apply(args[0], share, 2 * share), *args[1:]  # type: ignore[no-untyped-call]  # torch's apply is not typed

    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention.register_forward_pre_hook(wait)


def attach(training: ShardedTraining, arm: str, run_dir: Path) -> Session:
    peers = None if arm == "local" else ErasureConfig(data=1, tolerate=1)
    config = MemckptConfig(redo="lazy", peers=peers, storage=None)
    session = memckpt.attach(training.model, training.optimizer, run_dir=run_dir, config=config)
    session.restore()
    if arm == "without":
        # Without marks the replicator knows no steps and sends at once. Uses a private interface.
        session._peers.stop_marking(session._recorder)
    return session


def train(training: ShardedTraining, session: Session | None, steps: int) -> list[float]:
    """Seconds of each step, from commit to commit."""
    seconds = []
    dist.barrier()
    before = time.perf_counter()
    for _ in range(steps):
        training.step()
        if session is not None:
            session.commit()
        now = time.perf_counter()
        seconds.append(now - before)
        before = now
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--batch", type=int, required=True, help="of each rank")
    parser.add_argument("--elsewhere", type=float, default=0.0, help="seconds a step that are computed without a core")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = make_model(args.size)
    found: dict[str, Any] = {"numel": model.numel, "peers": None}
    if args.elsewhere:
        compute_elsewhere(model, args.elsewhere)
    training = ShardedTraining(model, args.batch)
    with contextlib.ExitStack() as stack:
        session = None
        if args.arm != "nothing":
            session = stack.enter_context(attach(training, args.arm, args.run_dir))
        found["seconds"] = train(training, session, args.steps)
        if session is not None:
            found["stall"] = session.stall.total / args.steps
            status = ask_status(AgentAddress.of(args.run_dir))
            if status is not None and status.peers is not None:
                peers = status.peers
                found["peers"] = {
                    "bytes_per_record": peers.bytes_per_record,
                    "watermark": peers.watermark,
                    "limit": peers.rate_limit_bytes_per_second,
                    "pace": peers.pace,
                }
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
