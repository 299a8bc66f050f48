"""Sharded training (FSDP2) over several nodes, started by any launcher; docs/recipes has a page for each launcher.

    torchrun --nnodes=2 ... examples/many_nodes.py --run-dir runs/my-run --memckpt-peers erasure ...

It prints a line for each step, the step that it resumes at, and at the end a digest of the weights. Losing a node is
left to the user. Only the lines marked with (*) are memckpt's.
"""

import argparse
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import memckpt  # (*)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a script: finds examples/gpt.py
from examples.digest import digest_of
from examples.gpt import GPT, SIZES, Corpus


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="pause between steps, to watch it")
    memckpt.add_arguments(parser)  # (*)
    return parser.parse_args(arguments)


def train(args: argparse.Namespace) -> None:
    """Train one rank, in an existing process group."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT(SIZES[args.size])
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    corpus = Corpus(model.config.context)

    run_dir, resume, config = memckpt.from_args(args)  # (*)
    session = memckpt.attach(model, optimizer, run_dir=run_dir, resume=resume, config=config)  # (*)
    report = session.restore()  # (*)
    start = report.step if report else 0  # (*)
    rank = dist.get_rank()
    if rank == 0:
        print(session.describe())
        print(report or "starting at step 0", flush=True)
    if report is None:
        torch.manual_seed(1 + rank)  # each rank draws its own batches, now and after a resume

    for step in range(start + 1, args.steps + 1):
        tokens, targets = corpus.sample(2)
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.commit()  # (*)
        if rank == 0:
            print(f"step {step}: loss {loss:.6f}", flush=True)
        time.sleep(args.pause)  # 0 s by default; a longer pause lets a person follow the steps
    session.close()  # (*)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        print(f"done at step {args.steps}: weights {digest_of(weights)}", flush=True)


def main() -> None:
    args = parse()
    dist.init_process_group(timeout=timedelta(seconds=120))
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
