"""A small GPT, trained with Lightning Fabric, whose every step survives a SIGKILL.

    python examples/fabric_gpt.py runs/fabric                # kill it, at any moment, with any signal
    python examples/fabric_gpt.py runs/fabric                # it continues after the last step

    python examples/fabric_gpt.py runs/fabric-ddp --devices 2    # DistributedDataParallel

It trains on the source text of Python's standard library. Only the lines marked with (*) are memckpt's.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, Subset

import memckpt  # (*)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a script: finds examples/gpt.py
from examples.digest import digest
from examples.gpt import GPT, SIZES, Corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", nargs="?", help="identifies the run (default: MEMCKPT_RUN_DIR)")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--windows", type=int, default=512, help="windows of text in an epoch")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--devices", type=int, default=1, help="ranks on this node")
    args = parser.parse_args()

    fabric = Fabric(devices=args.devices)
    fabric.launch()
    fabric.seed_everything(0)
    model = GPT(SIZES[args.size])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    train = Subset(Corpus(model.config.context), range(args.windows))
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(train, args.batch, shuffle=True))

    session = memckpt.attach(model, optimizer, run_dir=args.run_dir)  # (*)
    session.register("scheduler", scheduler)  # (*)
    loader = session.loader(loader)  # (*)
    report = session.restore()  # (*)
    step = report.step if report else 0  # (*)
    fabric.print(f"pid {os.getpid()}: {report or 'starting at step 0'}", flush=True)

    for _ in session.epochs(args.epochs):  # (*)
        for number, (tokens, targets) in enumerate(loader, start=session.batch):  # (*)
            accumulating = (number + 1) % args.accumulate != 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                fabric.backward(loss / args.accumulate)
            if accumulating:
                continue
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            session.commit()  # (*)
            step += 1
            fabric.print(f"step {step}: loss {loss.item():.6f}", flush=True)
    session.close()  # (*)
    fabric.print(f"done at step {step}: weights {digest(model.module)}")


if __name__ == "__main__":
    main()
