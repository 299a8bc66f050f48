"""Two trainings in one script, pretraining and finetuning, of which each survives a SIGKILL.

    python examples/two_phases.py runs/two        # kill it, in either phase
    python examples/two_phases.py runs/two        # it continues there; a phase that is done is loaded from storage

A directory for each phase is all that it takes. Only the lines marked with (*) are memckpt's.
"""

import argparse
import logging
import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import memckpt  # (*)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a script: finds examples/digest.py
from examples.digest import digest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", help="has a directory for each phase; the same one continues them")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
    inputs = torch.randn(64, 16)
    targets = {"pretrain": inputs.sum(1, keepdim=True), "finetune": inputs[:, :1]}
    step = 0
    for phase, rate, epochs in (("pretrain", 1e-2, 2), ("finetune", 1e-3, 1)):
        loader = DataLoader(TensorDataset(inputs, targets[phase]), batch_size=8, shuffle=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        session = memckpt.attach(model, optimizer, run_dir=f"{args.run_dir}/{phase}")  # (*)
        loader = session.loader(loader)  # (*)
        report = session.restore()  # (*)
        step = report.step if report else 0
        print(f"pid {os.getpid()}, {phase}: {report or 'starting at step 0'}", flush=True)
        for _ in session.epochs(epochs):  # (*)
            for batch, wanted in loader:
                loss = torch.nn.functional.mse_loss(model(batch), wanted)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                session.commit()  # (*)
                step += 1
                print(f"{phase} step {step}: loss {loss:.6f}", flush=True)
        session.close()  # (*)
    print(f"done at step {step}: weights {digest(model)}")


if __name__ == "__main__":
    main()
