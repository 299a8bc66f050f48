"""Trainings that save their own checkpoints, without memckpt: ``stock_scripts.py plain|lightning|trainer``.

Each resumes from its newest checkpoint, if there is one, in the working directory.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS = 48


def plain(forget: str, atomic: bool, protected: bool, steps: int) -> None:
    """A loop that saves every fifth step, over its last checkpoint; `atomic`: under another name first.

    `protected`: memckpt is in it, too.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    parts: dict[str, Any] = {"optimizer": optimizer, "schedule": schedule}
    begin = 0
    if os.path.exists("saved.pt"):
        saved = torch.load("saved.pt")
        begin = saved["step"]
        model.load_state_dict(saved["model"])
        for name in parts.keys() - {forget}:
            parts[name].load_state_dict(saved[name])
        if forget != "generator":
            torch.set_rng_state(saved["generator"])
    session = None
    if protected:
        import memckpt

        session = memckpt.attach(model, optimizer, run_dir="run")
        session.register("schedule", schedule)
        report = session.restore()
        begin = begin if report is None else report.step
    for step in range(begin + 1, steps + 1):
        batch = torch.randn(256, 64)
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 5 == 0:
            saved = {name: part.state_dict() for name, part in parts.items()}
            saved |= {"step": step, "model": model.state_dict(), "generator": torch.get_rng_state()}
            torch.save(saved, "saved.tmp" if atomic else "saved.pt")
            if atomic:
                os.replace("saved.tmp", "saved.pt")
        if session is not None:
            session.commit()
    if session is not None:
        session.close()


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """160 rows that are all different."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64,), index / 160)


def lightning() -> None:
    """Lightning's checkpoint every fifth step, of ten in an epoch: the data it goes on with are another epoch's."""
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return (self.body(batch) - batch.sum(1, keepdim=True)).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 0.01)

    L.seed_everything(0)
    saves = ModelCheckpoint("saved", every_n_train_steps=5, save_last=True)
    trainer = L.Trainer(max_steps=STEPS, accelerator="cpu", callbacks=[saves], logger=False, enable_progress_bar=False)
    loader = torch.utils.data.DataLoader(Rows(), 16, shuffle=True)
    trainer.fit(Module(), loader, ckpt_path="last" if Path("saved").exists() else None)


def trainer() -> None:
    """transformers' Trainer, which saves every fifth step, and resumes from the last checkpoint that is there."""
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 1))

        def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.body(rows) - rows.sum(1, keepdim=True)).square().mean()}

    torch.manual_seed(0)
    arguments = TrainingArguments(
        "saved", max_steps=STEPS, per_device_train_batch_size=16, save_steps=5, report_to=[], use_cpu=True,
        remove_unused_columns=False, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    last = get_last_checkpoint("saved") if os.path.isdir("saved") else None
    collate = lambda rows: {"rows": torch.stack(rows)}  # noqa: E731
    Trainer(Model(), arguments, data_collator=collate, train_dataset=Rows()).train(resume_from_checkpoint=last)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("script", choices=["plain", "lightning", "trainer"])
    parser.add_argument("--forget", default="")
    parser.add_argument("--atomic", action="store_true")
    parser.add_argument("--protected", action="store_true")
    parser.add_argument("--steps", type=int, default=STEPS)
    asked = parser.parse_args()
    if asked.script == "plain":
        plain(asked.forget, asked.atomic, asked.protected, asked.steps)
    else:
        {"lightning": lightning, "trainer": trainer}[asked.script]()
