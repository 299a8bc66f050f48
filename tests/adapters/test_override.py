"""``override`` through each adapter: its schedules go on from the script's rate."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import memckpt
from accelerate_plugin import MemCheckpointPlugin
from lightning_memckpt import MemCheckpoint
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import stop_agent
from tests.support.trainings.engine_harness import Lab
from transformers_memckpt import protect

STEPS = 12


def share(step: int) -> float:
    """The rate that a schedule gives behind so many steps."""
    return min(1.0, (step + 1) / 8)


def reach(step: int, optimizer: Any, kill: int) -> None:
    """Show the rate of the step that follows so many, or die before it."""
    if step == kill:
        os.kill(os.getpid(), signal.SIGKILL)
    print(f"rate {step + 1} {optimizer.param_groups[0]['lr']!r}", flush=True)


def settings(check: Any, override: tuple[str, ...]) -> memckpt.MemckptConfig:
    agent = memckpt.AgentConfig(linger_seconds=60)
    return memckpt.MemckptConfig(redo="lazy", storage=None, agent=agent, override=override, resume_check=check)


class Small(pl.LightningModule):
    def __init__(self, lr: float, kill: int) -> None:
        super().__init__()
        self.layer, self.lr, self.kill = nn.Linear(4, 1), lr, kill

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        reach(self.global_step, self.trainer.optimizers[0], self.kill)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def samples() -> TensorDataset:
    return TensorDataset(torch.ones(STEPS * 2, 4))


def with_lightning(run_dir: Path, config: memckpt.MemckptConfig, lr: float, kill: int) -> None:
    callback = MemCheckpoint(run_dir, config=config)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[callback], enable_model_summary=False, **quiet)
    trainer.fit(Small(lr, kill), DataLoader(samples(), 2))


def with_accelerate(run_dir: Path, config: memckpt.MemckptConfig, lr: float, kill: int) -> None:
    accelerator, net = Accelerator(cpu=True), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    ckpt = MemCheckpointPlugin(accelerator, run_dir, config=config)
    model, optimizer, loader, schedule = ckpt.prepare(net, optimizer, DataLoader(samples(), 2), schedule)
    for _ in ckpt.epochs(1):
        for (batch,) in loader:
            reach(ckpt.step, optimizer, kill)
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            ckpt.commit()


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return STEPS * 2

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": torch.ones(4)}


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(inputs).square().mean()}


def with_transformers(run_dir: Path, config: memckpt.MemckptConfig, lr: float, kill: int) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Shows(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **found: Any) -> None:
            reach(state.global_step, found["optimizer"], kill)

    arguments = TrainingArguments(
        str(run_dir / "files"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=lr,
        optim="sgd",
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=8,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(Loss(), arguments, train_dataset=Rows(), callbacks=[Shows()])
    protect(trainer, run_dir, config=config)
    trainer.train()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    own = Lab(tmp_path)
    yield own
    stop_agent(AgentAddress.of(own.run_dir))
    own.close()


@pytest.mark.parametrize(
    ("adapter", "check"),
    [
        (with_lightning, "replay"),
        (with_lightning, "witness"),
        (with_accelerate, "replay"),
        (with_accelerate, "witness"),
        (with_transformers, "replay"),
    ],
)
def test_schedules_go_on_from_the_scripts_rate(lab: Lab, adapter: Callable[..., None], check: str) -> None:
    def run(lr: float, kill: int, *override: str) -> tuple[dict[int, float], str]:
        child = lab.fork(lambda: adapter(lab.run_dir, settings(check, override), lr, kill), "train")
        child.wait()
        log = child.log.read_text()
        return {int(step): float(rate) for step, rate in re.findall(r"^rate (\d+) (\S+)$", log, re.MULTILINE)}, log

    before = 0 if adapter is with_transformers else 1  # the first step of its schedule has a rate of 0
    first, _ = run(0.1, 5)
    assert first == pytest.approx({step: 0.1 * (step - 1 + before) / 8 for step in range(1, 6)})
    second, log = run(0.2, 7, "lr")
    if check == "replay":
        repeated = min(second)
        assert second.pop(repeated) == pytest.approx(first[repeated])
        assert "equal, bit for bit" in log
    assert len(second) in (2, 3)
    assert second == pytest.approx({step: 0.2 * (step - 1 + before) / 8 for step in second})
    assert "training does not go on exactly: override takes the script's lr=0.2 of SGD" in log
    assert "DIFFERENT" not in log
    assert "goes on with its own" not in log
    third, log = run(0.2, -1, "lr")
    assert third == pytest.approx({step: 0.2 * min(1.0, (step - 1 + before) / 8) for step in range(min(third), 13)})
    assert max(third) == STEPS
    assert "not go on exactly" not in log
