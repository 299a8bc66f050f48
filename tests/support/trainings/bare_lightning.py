"""A Lightning script that has never heard of memckpt."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from examples.common import PrintSteps


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("loss", self.training_step(batch, index))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def loader(**arguments: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 4, generator=generator), torch.randn(24, 1, generator=generator)
    return DataLoader(TensorDataset(x, y), 4, **arguments)


def trainer(*callbacks: pl.Callback, **arguments: Any) -> pl.Trainer:
    return pl.Trainer(
        callbacks=list(callbacks),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )


def main() -> None:
    pl.seed_everything(3)
    model = Net()
    trainer().validate(model, loader(), verbose=False)
    trainer(PrintSteps(), max_epochs=2).fit(model, loader(shuffle=True), loader())


if __name__ == "__main__":
    main()
