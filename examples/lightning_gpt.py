"""A small GPT on the standard library's source text, with PyTorch Lightning.

    python examples/lightning_gpt.py --run-dir runs/gpt                       # kill it, at any moment
    python examples/lightning_gpt.py --run-dir runs/gpt                       # it continues after the last step
    python examples/lightning_gpt.py --run-dir runs/gpt --resume never        # it starts over
    python examples/lightning_gpt.py --run-dir runs/gpt --memckpt-redo lazy --memckpt-storage-every-steps 100

Only the lines marked with (*) are memckpt's.
"""

import argparse
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, Subset, random_split

import memckpt  # (*)
from lightning_memckpt import MemCheckpoint  # (*)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a script: finds examples/
from examples.common import PrintSteps
from examples.gpt import GPT, SIZES, Corpus


class LightningGPT(pl.LightningModule):
    """Next-byte prediction with AdamW and a one-cycle learning rate.

    Args:
        size: a name in `examples.gpt.SIZES`.
        lr: highest learning rate.
        steps: length of the learning rate's cycle, in optimizer steps.
    """

    def __init__(self, size: str = "tiny", lr: float = 1e-3, steps: int = 200) -> None:
        super().__init__()
        self.gpt = GPT(SIZES[size])
        self.lr = lr
        self.steps = steps

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.gpt.loss(*batch)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        self.log("val_loss", self.gpt.loss(*batch))

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class SourceText(pl.LightningDataModule):
    """Windows of source text, shuffled; one in a hundred is kept for validation.

    Args:
        size: size of the model, which determines the windows' length.
        batch_size: windows in a batch.
        windows: number of windows in use.
    """

    def __init__(self, size: str = "tiny", batch_size: int = 16, windows: int = 2000) -> None:
        super().__init__()
        corpus = Corpus(SIZES[size].context)
        part: Dataset[tuple[torch.Tensor, torch.Tensor]] = Subset(corpus, range(min(windows, len(corpus))))
        self.training, self.held_out = random_split(part, [0.99, 0.01], torch.Generator().manual_seed(0))
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
        return DataLoader(self.training, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
        return DataLoader(self.held_out, self.batch_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=200)
    memckpt.add_arguments(parser, run_dir="runs/lightning_gpt")  # (*)
    args = parser.parse_args()
    run_dir, resume, config = memckpt.from_args(args)  # (*)

    pl.seed_everything(0)
    trainer = pl.Trainer(
        max_steps=args.steps,
        val_check_interval=50,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        callbacks=[PrintSteps(), MemCheckpoint(run_dir, resume=resume, config=config)],  # (*)
        default_root_dir=run_dir,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LightningGPT(args.size, steps=args.steps), SourceText(args.size))


if __name__ == "__main__":
    main()
