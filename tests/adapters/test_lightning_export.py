"""`memckpt export --format lightning` against files of Lightning's own, saved at the same batches of the same run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import memckpt
from lightning_memckpt import MemCheckpoint
from lightning_memckpt.export import checkpoint_of, write
from memckpt import ExportedState
from memckpt.errors import ForeignStateError
from memckpt.state import codec
from tests.support.faults.frozen import freeze
from tests.support.trainings import fake_session

BATCHES = 8
DATA = TensorDataset(torch.randn(BATCHES * 2, 4, generator=torch.Generator().manual_seed(0)))


class Net(pl.LightningModule):
    def __init__(self, width: int = 6, plateau: str = "", manual: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
        self.plateau = plateau
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.layers(batch[0]).square().mean()
        self.log("loss", loss)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layers(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        if self.plateau:
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": self.plateau, "monitor": "loss"},
            }
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = self.global_step


class Data(pl.LightningDataModule):
    def __init__(self, factor: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen = 0

    def train_dataloader(self) -> DataLoader[Any]:
        self.seen += self.hparams.factor  # type: ignore[attr-defined]
        return DataLoader(DATA, 2)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Endless(IterableDataset[Any]):
    """Has no length, so that Lightning looks ahead for the last batch."""

    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


class Positioned:
    """A loader with a position of its own."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        rows = list(DataLoader(DATA, 2))
        self.at %= len(rows)
        while self.at < len(rows):
            self.at += 1
            yield rows[self.at - 1]

    def __len__(self) -> int:
        return BATCHES

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@dataclass(frozen=True)
class Case:
    name: str
    trainer: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    data: Callable[[], Any] = lambda: DataLoader(DATA, 2)
    validation: bool = False
    callbacks: Callable[[Path], list[pl.Callback]] = lambda directory: []

    def __str__(self) -> str:
        return self.name

    def fit(self, directory: Path, *callbacks: pl.Callback, file: Path | None = None, **arguments: Any) -> pl.Trainer:
        pl.seed_everything(1, verbose=False)
        trainer = pl.Trainer(
            **{"max_epochs": 2, "limit_val_batches": 2 if self.validation else 0, **self.trainer, **arguments},
            accelerator="cpu",
            logger=False,
            enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in self.callbacks(directory)),
            callbacks=[*callbacks, *self.callbacks(directory)],
            default_root_dir=directory,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = self.data()
        named = {"datamodule": data} if isinstance(data, Data) else {"train_dataloaders": data}
        if self.validation:
            named["val_dataloaders"] = DataLoader(DATA, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(Net(**self.model), **named, ckpt_path=file)
        return trainer


CASES = [
    Case("accumulation", trainer={"accumulate_grad_batches": 3}),
    Case("validation within epochs", validation=True, trainer={"val_check_interval": 3}, model={"plateau": "step"}),
]
MORE_CASES = [
    Case("plain"),
    Case("stops in mid-epoch", trainer={"max_epochs": -1, "max_steps": 11}),
    Case("validation", validation=True, model={"plateau": "epoch"}),
    Case("manual", model={"manual": True}),
    Case("datamodule", data=Data, model={"width": 5}),
    Case("no length", data=lambda: DataLoader(Endless(), 2), trainer={"limit_train_batches": None}),
    Case("own position", data=Positioned),
    Case(
        "callbacks",
        validation=True,
        callbacks=lambda directory: [
            EarlyStopping("val_loss", patience=9),
            ModelCheckpoint(directory / "best", monitor="val_loss"),
        ],
    ),
]


class Exporting(fake_session.FakeSession):
    """Exports what is committed, and nothing else: `exported-STEP.ckpt`."""

    directory: Path

    def commit(self, *, step: int, gradients_pending: bool | None) -> bool:
        committed = super().commit(step=step, gradients_pending=gradients_pending)
        if committed:
            provided = codec.decode(codec.encode({name: capture() for name, capture in self._captures.items()}))
            optimizers = [each.state_dict() for each in self._optimizers]
            state = ExportedState(step, dict(self._model.state_dict()), optimizers, provided)
            write(state, self.directory / f"exported-{step}.ckpt")
        return committed


class Saving(pl.Callback):
    """Has Lightning save `stock-STEP.ckpt` in the same batches; and what stands behind the training."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.fit_loop.epoch_loop._should_accumulate():
            trainer.save_checkpoint(self.directory / f"stock-{trainer.global_step}.ckpt")

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.directory / "stock-end.ckpt")


class Record(pl.Callback):
    """What happens, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.events.append((trainer.current_epoch, batch_idx, batch[0].sum().item()))

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        self.events.append(("validation", trainer.sanity_checking, trainer.global_step))

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.events.append(("epoch ends", trainer.current_epoch))


def trained(case: Case, directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Train the case with both kinds of files; the steps that there are."""
    monkeypatch.setattr(Exporting, "directory", directory, raising=False)
    monkeypatch.setattr(memckpt, "attach", Exporting)
    case.fit(directory, MemCheckpoint(directory / "run"), Saving(directory))
    return sorted(int(path.stem.partition("-")[2]) for path in directory.glob("exported-*.ckpt"))


def load(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(file, weights_only=False)
    return found


def further(case: Case, directory: Path, file: Path) -> dict[str, Any]:
    """What a stock Trainer that knows nothing of memckpt does with a file, for an epoch more than the run had."""
    record = Record()
    longer = {"max_steps": 14} if "max_steps" in case.trainer else {"max_epochs": 3}
    trainer: Any = case.fit(directory / "further", record, file=file, **longer)
    return {
        "events": record.events,
        "tensors": freeze(dict(trainer.model.state_dict())),
        "optimizer": freeze(trainer.optimizers[0].state_dict()),
        "scheduler": freeze(trainer.lr_scheduler_configs[0].scheduler.state_dict()),
        "loops": trainer.fit_loop.state_dict(),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
    }


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE_CASES)], ids=str
)
def test_a_file_is_the_one_that_lightning_saves_in_that_batch(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = trained(case, tmp_path, monkeypatch)
    per_epoch = 3 if case.name == "accumulation" else BATCHES
    assert steps == list(range(1, 1 + case.trainer.get("max_steps", 2 * per_epoch)))
    for step in steps:
        stock, ours = (load(tmp_path / f"{kind}-{step}.ckpt") for kind in ("stock", "exported"))
        assert stock.keys() == ours.keys()
        assert [name for name in stock if freeze(stock[name]) != freeze(ours[name])] == [], step
    for step in (1, per_epoch, steps[-1]):
        stock, ours = (further(case, tmp_path, tmp_path / f"{kind}-{step}.ckpt") for kind in ("stock", "exported"))
        assert stock == ours, step


def test_a_finished_run_goes_on_as_from_the_file_of_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("plain")
    last = trained(case, tmp_path, monkeypatch)[-1]
    stock = further(case, tmp_path, tmp_path / "stock-end.ckpt")
    ours = further(case, tmp_path, tmp_path / f"exported-{last}.ckpt")
    assert len([event for event in ours["events"] if event[0] == 2]) == BATCHES
    for name in ("events", "tensors", "optimizer", "scheduler", "step", "epoch"):
        assert ours[name] == stock[name], name
    # Trained no further, and validated from: loops of other kinds have a place in the file as well.
    assert case.fit(tmp_path / "same", file=tmp_path / f"exported-{last}.ckpt").global_step == last
    model = Net.load_from_checkpoint(tmp_path / f"exported-{last}.ckpt")
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    trainer.validate(model, DataLoader(DATA, 4), ckpt_path=tmp_path / f"exported-{last}.ckpt", verbose=False)


def test_the_state_of_a_scaler_has_the_name_that_lightning_looks_for() -> None:
    loops = pl.Trainer(accelerator="cpu", logger=False).fit_loop.state_dict()
    provided = {
        "lightning": {
            "lightning": "2",
            "loops": loops,
            "unedited_loops": {},
            "validation_owed": False,
            "loaders": {"train": []},
            "user": {},
            "trainer": {"precision": {"scale": 4.0}, "schedulers": []},
            "file": {"precision": "MixedPrecision", "datamodule": "NoneType", "hyperparameters": {}},
        }
    }
    assert checkpoint_of(ExportedState(1, {}, [], provided))["MixedPrecision"] == {"scale": 4.0}


def test_a_run_of_another_kind_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(ForeignStateError, match=r"MemCheckpoint has protected, found one that provides \['mine'\]"):
        write(ExportedState(1, {}, [], {"mine": {}}), tmp_path / "out")
    assert not (tmp_path / "out").exists()
