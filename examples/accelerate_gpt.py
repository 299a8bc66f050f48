"""A small GPT, trained with Hugging Face Accelerate, whose every step survives a SIGKILL.

    python examples/accelerate_gpt.py runs/gpt                     # kill it, at any moment, with any signal
    python examples/accelerate_gpt.py runs/gpt                     # it continues after the last step
    python examples/accelerate_gpt.py runs/gpt --resume never      # it starts over

    accelerate launch --config_file conf/accelerate/single.yaml examples/accelerate_gpt.py runs/gpt

It trains on the source text of Python's standard library. Only the lines marked with (*) are memckpt's.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Subset

from accelerate_plugin import MemCheckpointPlugin  # (*)
from memckpt.config import parse_resume  # (*)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a script: finds examples/gpt.py
from examples.gpt import GPT, SIZES, Corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", nargs="?", help="identifies the run (default: MEMCKPT_RUN_DIR)")
    parser.add_argument("--resume", type=parse_resume, help="auto, require, exact, never, or a step number")  # (*)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--windows", type=int, default=512, help="windows of text in an epoch")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(cpu=args.cpu, gradient_accumulation_steps=args.accumulate)
    model = GPT(SIZES[args.size])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    corpus = Corpus(model.config.context)
    train, held_out = Subset(corpus, range(args.windows)), Subset(corpus, range(args.windows, args.windows + 32))
    loader = DataLoader(train, args.batch, shuffle=True)
    test_loader = accelerator.prepare(DataLoader(held_out, args.batch))

    with MemCheckpointPlugin(accelerator, args.run_dir, resume=args.resume) as ckpt:  # (*)
        model, optimizer, loader, scheduler = ckpt.prepare(model, optimizer, loader, scheduler)  # (*)
        accelerator.print(f"pid {os.getpid()}: continues after step {ckpt.step}", flush=True)
        for epoch in ckpt.epochs(args.epochs):  # (*)
            model.train()
            for tokens, targets in loader:
                with accelerator.accumulate(model), accelerator.autocast():
                    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if ckpt.commit():  # (*)
                    accelerator.print(f"step {ckpt.step}: loss {loss.item():.9f}", flush=True)
            model.eval()
            with torch.no_grad():
                losses = [
                    torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                    for tokens, targets in test_loader
                ]
            mean = accelerator.gather(torch.stack(losses)).mean()
            accelerator.print(f"epoch {epoch}: held-out loss {mean.item():.9f}", flush=True)


if __name__ == "__main__":
    main()
