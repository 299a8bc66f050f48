"""Sharded training (FSDP2) that loses a whole node and continues from the memory of the others.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1   # see docs/operations.md
    launch="torchrun --standalone --nproc-per-node=4 --max-restarts=2"
    $launch examples/lost_node.py runs/undisturbed
    $launch examples/lost_node.py runs/lossy --lose 2:20 --lose 1:35       # rank:step, one in each attempt

Both print the same digest of the weights. Here each rank plays a node of its own on one machine, with its own agent:
MEMCKPT_NODE names it. To lose a node is to kill its rank and its agent at once; nothing of its memory is left. On a
cluster leave that out.

Only the lines marked with (*) are memckpt's.
"""

import argparse
import os
import signal
import sys
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", help="identifies the run; the same directory continues it")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument(
        "--lose", action="append", default=[], metavar="RANK:STEP", help="lose the node of a rank at a step"
    )
    args = parser.parse_args()

    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    os.environ["MEMCKPT_NODE"] = f"node{rank}"
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    model = GPT(SIZES[args.size])
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    corpus = Corpus(model.config.context)

    peers = memckpt.ErasureConfig(data=3, tolerate=1)  # (*) any one of each four nodes may be lost
    config = memckpt.MemckptConfig(peers=peers, storage=None)  # (*)
    session = memckpt.attach(model, optimizer, run_dir=args.run_dir, config=config)  # (*)
    report = session.restore()  # (*)
    start = report.step if report else 0  # (*)
    if rank == 0:
        print(session.describe())
        print(report or "starting at step 0", flush=True)

    for step in range(start + 1, args.steps + 1):
        if attempt < len(args.lose) and args.lose[attempt] == f"{rank}:{step}":
            print(f"node {rank} is lost in step {step}", flush=True)
            os.kill(session.agent_pid or 0, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        tokens, targets = corpus.sample(2)
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.commit()  # (*)
        if rank == 0:
            print(f"step {step}: loss {loss:.6f}", flush=True)
    session.close()  # (*)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        print(f"done at step {args.steps}: weights {digest_of(weights)}", flush=True)
    dist.barrier()  # else Gloo may still hold tensors of the last all-gather when Python ends, and abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
