"""A training for `memckpt run`: python supervised_job.py RUN_DIR STEPS [DEATH@STEP...]

Each DEATH belongs to one attempt, in order: `kill` is a SIGKILL behind that step's commit, `raise` an error before it.
"""

from __future__ import annotations

import os
import select
import signal
import sys

import torch

import memckpt
from memckpt import AgentConfig, MemckptConfig
from memckpt_run import recording


def main() -> None:
    run_dir, steps, deaths = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    attempt = int(os.environ.get("MEMCKPT_RESTART_COUNT", "0"))
    death, _, when = deaths[attempt].partition("@") if attempt < len(deaths) else ("", "", "0")
    print("forked", recording.forked, flush=True)
    torch.manual_seed(1 if attempt == 0 else 1000 + attempt)  # state that is not restored shows
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = None
    if run_dir != "none":
        config = MemckptConfig(agent=AgentConfig(linger_seconds=60), storage=None, redo="lazy")
        session = memckpt.attach(model, optimizer, run_dir=run_dir, config=config)
        report = session.restore()
        print(f"attempt {attempt}: {report!r}", flush=True)
    for step in range(report.step + 1 if session and report else 1, steps + 1):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == int(when) and death == "raise":
            raise RuntimeError("a bug")
        if session is not None:
            session.commit()
        if step == int(when) and death == "kill":
            while "JOB_WAITS" in os.environ and not os.path.exists(os.environ["JOB_WAITS"]):
                select.select([], [], [], 0.01)
            os.kill(os.getpid(), signal.SIGKILL)
    if session is not None:
        session.close()
    bits = [param.detach().double().sum().item().hex() for param in model.parameters()]
    print("weights", *bits, torch.rand(1).item().hex(), flush=True)


if __name__ == "__main__":
    main()
