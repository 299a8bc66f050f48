"""Training process of the demo: an ordinary Lightning training, protected by one callback or not at all.

Everything but ``MemCheckpoint`` in :func:`train` serves the supervisor.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import re
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from examples.demo.black_box import BlackBox
from examples.gpt import GPT, SIZES, Corpus
from lightning_memckpt import MemCheckpoint
from memckpt import AgentConfig, MemckptConfig
from memckpt_run import recording

TRAINING_SEED = 20
BATCH = 4


class ByteModel(pl.LightningModule):
    """The GPT with dropout, AdamW and a cosine schedule."""

    def __init__(self, size: str, steps: int) -> None:
        super().__init__()
        self.gpt = GPT(SIZES[size])
        self._steps = steps

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.gpt.loss(*batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self._steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(args: argparse.Namespace) -> pl.Trainer:
    """Run the whole training. Restarted after a kill it does the same, and continues where it was."""
    pl.seed_everything(TRAINING_SEED, verbose=False)
    model = ByteModel(args.size, args.steps)
    loader = DataLoader(Corpus(model.gpt.config.context), batch_size=BATCH, shuffle=True, drop_last=True)
    events = Events(args.events)
    callbacks: list[pl.Callback] = [Reporter(events, BlackBox(args.black_box))]
    if args.run_dir is not None:
        agent = AgentConfig(linger_seconds=120)  # the demo's agent must not outlive a demo that was interrupted
        # Without storage: every resume of the demo comes from memory. Each repeats a step as a proof.
        config = MemckptConfig(agent=agent, storage=None, resume_check="replay")
        callbacks.append(MemCheckpoint(args.run_dir, config=config))
        logging.getLogger("memckpt.check").addHandler(CheckListener(events))
    trainer = pl.Trainer(
        max_steps=args.steps,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    return trainer


class Events:
    """Lines of JSON for the supervisor; one system call writes each line, so a kill leaves complete ones."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(self, event: str, **values: Any) -> None:
        os.write(self._fd, (json.dumps({"event": event, "at": time.monotonic(), **values}) + "\n").encode())


class Reporter(pl.Callback):
    """Updates the black box, and reports the loss of each step. Does not affect training."""

    def __init__(self, events: Events, box: BlackBox) -> None:
        self._events = events
        self._box = box
        self._said_hello = False

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if not self._said_hello:
            self._said_hello = True
            who = {"pid": os.getpid(), "forked": recording.forked}
            self._events.say("training", step=step, **who, **_last_resume.values())
        self._mark(trainer, "forward", step)

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self._mark(trainer, "backward", trainer.global_step)

    def on_after_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self._mark(trainer, "optimizer", trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, _: Any, outputs: Any, *__: Any) -> None:
        step = trainer.global_step
        self._box.write(step=step, phase="commit", finished=step, closed=step - 1)
        self._events.say("step", step=step, loss=outputs["loss"].item().hex())

    def _mark(self, trainer: pl.Trainer, phase: str, finished: int) -> None:
        self._box.write(step=finished + 1, phase=phase, finished=finished, closed=finished)


class ResumeListener(logging.Handler):
    """Parses memckpt's log line about a resume: only that names the tier."""

    _SAID = re.compile(r"resumed at step (\d+) from (.+) in ([\d.]+) s")

    def __init__(self) -> None:
        super().__init__()
        self._found: re.Match[str] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self._found = self._SAID.search(record.getMessage()) or self._found

    def values(self) -> dict[str, Any]:
        if self._found is None:
            return {}
        return {"resumed": int(self._found[1]), "tier": self._found[2]}


class CheckListener(logging.Handler):
    """Forwards the result of the resume check."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        known = {"are equal, bit for bit": "equal", "DIFFERENT": "different", "rounding": "rounding"}
        self._events.say("checked", verdict=next((known[text] for text in known if text in line), "none"), line=line)


_last_resume = ResumeListener()


def final_state(trainer: pl.Trainer) -> dict[str, Any]:
    """All state that must be equal in both runs, as plain tensors and values."""
    module = trainer.lightning_module
    optimizer = trainer.optimizers[0]
    names = {id(param): name for name, param in module.named_parameters()}
    moments = {
        f"{names[id(param)]}.{key}": torch.as_tensor(value)
        for param, state in optimizer.state.items()
        for key, value in state.items()
    }
    version, words, spare = random.getstate()
    generator = np.random.get_state(legacy=False)
    assert isinstance(generator, dict)
    return {
        "parameters": {name: param.detach().clone() for name, param in module.named_parameters()},
        "optimizer state": moments,
        "learning rate": {"lr": torch.tensor([group["lr"] for group in optimizer.param_groups], dtype=torch.float64)},
        "random generators": {
            "torch": torch.get_rng_state(),
            "python": torch.tensor([version, *words, -1 if spare is None else 0]),
            "numpy": torch.tensor([*generator["state"]["key"].tolist(), generator["state"]["pos"]]),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--black-box", type=Path, required=True)
    parser.add_argument("--final", type=Path, required=True, help="file for the last state")
    parser.add_argument("--run-dir", help="run directory; without it the training is not protected")
    parser.add_argument("--sabotage", action="store_true", help="changes one weight at the end; for tests")
    args = parser.parse_args()
    torch.set_num_threads(1)  # leaves a core to the agent; and the bits depend on the number of threads
    warnings.filterwarnings("ignore", message=".*num_workers.*")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("lightning_memckpt").addHandler(_last_resume)
    trainer = train(args)
    state = final_state(trainer)
    if args.sabotage:
        next(iter(state["parameters"].values())).view(-1)[0] += 1e-3
    torch.save(state, args.final)


if __name__ == "__main__":
    main()
