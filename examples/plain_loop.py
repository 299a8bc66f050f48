"""A plain PyTorch loop whose every step survives a SIGKILL.

    python examples/plain_loop.py runs/plain        # kill it, at any moment, with any signal
    python examples/plain_loop.py runs/plain        # it continues after the last step

Only the lines marked with (*) are memckpt's.
"""

import argparse
import logging
import os
import sys
from pathlib import Path

import torch

import memckpt  # (*)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a script: finds examples/gpt.py
from examples.digest import digest
from examples.gpt import GPT, SIZES, Corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", help="identifies the run; the same directory continues it")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--size", choices=SIZES, default="demo")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    torch.manual_seed(0)
    model = GPT(SIZES[args.size])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    corpus = Corpus(model.config.context)

    session = memckpt.attach(model, optimizer, run_dir=args.run_dir)  # (*)
    session.register("scheduler", scheduler)  # (*)
    report = session.restore()  # (*)
    start = report.step if report else 0  # (*)
    print(session.describe())
    print(f"pid {os.getpid()}: {report or 'starting at step 0'}", flush=True)

    for step in range(start + 1, args.steps + 1):
        # Batches and dropout are drawn with torch's generator, which is restored, too.
        tokens, targets = corpus.sample(8)
        loss = model.loss(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        session.commit()  # (*)
        print(f"step {step}: loss {loss:.6f}", flush=True)
    session.close()  # (*)
    print(f"done at step {args.steps}: weights {digest(model)}")


if __name__ == "__main__":
    main()
