"""Handwritten digits with a small convolutional network, with PyTorch Lightning: BatchNorm, dropout, augmentation.

    python examples/digits_cnn.py --run-dir runs/digits     # kill it, at any moment
    python examples/digits_cnn.py --run-dir runs/digits     # it continues after the last step

The 1797 images of scikit-learn are in the package; nothing is downloaded. Only the lines marked with (*) are memckpt's.
"""

import argparse
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import memckpt  # (*)
from lightning_memckpt import MemCheckpoint  # (*)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a script: finds examples/
from examples.common import PrintSteps


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images of shape (1, 8, 8), float32 from 0 to 1, and their digits; shifted by up to a pixel if `shifted`."""

    def __init__(self, images: Tensor, digits: Tensor, shifted: bool) -> None:
        self.images = images
        self.digits = digits
        self.shifted = shifted

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.shifted:
            down, right = torch.randint(-1, 2, (2,)).tolist()
            image = torch.roll(image, (down, right), (1, 2))
        return image, self.digits[index]


class Digits(pl.LightningDataModule):
    """scikit-learn's digits: 1500 for training, 297 for validation.

    Args:
        batch_size: images in a batch.
        workers: number of loading processes.
    """

    def __init__(self, batch_size: int = 50, workers: int = 0) -> None:
        super().__init__()
        from sklearn.datasets import load_digits

        found = load_digits()
        images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
        digits = torch.tensor(found.target)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        self.training = Images(images[order[:1500]], digits[order[:1500]], shifted=True)
        self.held_out = Images(images[order[1500:]], digits[order[1500:]], shifted=False)
        self.batch_size = batch_size
        self.workers = workers

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.training, self.batch_size, shuffle=True, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.held_out, self.batch_size, num_workers=self.workers)


class DigitsCNN(pl.LightningModule):
    """Two convolutions, each with BatchNorm, and a linear layer after dropout.

    Args:
        width: channels of the first convolution.
        lr: learning rate of SGD with momentum; divided by ten after three quarters of the epochs.
    """

    def __init__(self, width: int = 16, lr: float = 0.05) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(8 * width, 10)),
        )
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=10)
        self.lr = lr

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.accuracy.update(self.net(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            print(f"epoch {self.current_epoch}: accuracy {float(self.accuracy.compute()):.4f}", flush=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, nesterov=True)
        epochs = self.trainer.max_epochs or 1
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [max(1, epochs * 3 // 4)]),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int, default=0)
    memckpt.add_arguments(parser, run_dir="runs/digits_cnn")  # (*)
    args = parser.parse_args()
    run_dir, resume, config = memckpt.from_args(args)  # (*)

    pl.seed_everything(0, workers=True)
    trainer = pl.Trainer(
        max_epochs=args.epochs,
        callbacks=[PrintSteps(), MemCheckpoint(run_dir, resume=resume, config=config)],  # (*)
        default_root_dir=run_dir,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(DigitsCNN(), Digits(workers=args.workers))


if __name__ == "__main__":
    main()
