"""`memckpt export --format accelerate`: what comes out is loaded by Accelerate itself, and compared."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from accelerate_plugin import MemCheckpointPlugin
from accelerate_plugin.export import PLACE_NAME, write
from memckpt.config import StorageConfig
from memckpt.errors import ForeignStateError
from memckpt.storage import export as export_module
from memckpt.storage.catalog import read_catalog
from memckpt.storage.export import ExportedState, export
from memckpt.storage.local_store import LocalStore
from tests.support.faults.frozen import differences, freeze
from tests.support.trainings.accelerate_training import PLAIN, AccelerateRun, Case, Training, train
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.hand_loops import in_child
from tests.support.trainings.killed_programs import Kill, finish

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def _installed_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry points as pyproject.toml declares them, whatever is installed."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["memckpt.formats"]
    found = [EntryPoint(name, value, "memckpt.formats") for name, value in declared.items()]
    monkeypatch.setattr(export_module, "entry_points", lambda group: found)


@pytest.mark.slow
@pytest.mark.usefixtures("_installed_formats")
@pytest.mark.parametrize("case", [PLAIN, Case("scaler", scaler=True)], ids=str)
def test_an_exported_checkpoint_is_what_load_state_takes(case: Case, lab: Lab) -> None:
    def keep(name: str, training: Training) -> None:
        (lab.directory / name).write_bytes(pickle.dumps(training.report()))

    def kept(name: str) -> Any:
        return pickle.loads((lab.directory / name).read_bytes())

    def save(training: Training) -> None:
        keep("last", training)
        training.accelerator.save_state(str(lab.directory / "stock"))

    hooks: dict[Kill, Callable[[Training], None]] = {("committed", 33): save}
    run = AccelerateRun(case, lab.directory / "job", config=config(storage=StorageConfig()), hooks=hooks)
    ended = finish(lab, train, run)
    assert not lab.left_behind(limit=60.0)  # the agent goes when the last step is in storage
    catalog = read_catalog(LocalStore(run.directory / "run" / "storage"))
    steps = [entry["step"] for entry in ended.events("committed")]
    assert catalog.complete[0].step == steps[-1]
    export(LocalStore(run.directory / "run" / "storage"), catalog.complete[0], lab.directory / "out", "accelerate")

    def load(directory: str) -> None:
        training = Training(AccelerateRun(case, run.directory, protected=False))
        training.average.value = -1.0
        prepared = training.accelerator.prepare(
            training.model, training.optimizer, training._loader(), training.scheduler
        )
        training.model, training.optimizer, training.loader, training.scheduler = prepared
        training.accelerator.load_state(str(lab.directory / directory))
        training.loader.iteration = 2  # the place in the data is not Accelerate's to restore
        keep(f"loaded {directory}", training)
        for number, batch in enumerate(training.loader):
            training._batch(3, number, batch)
        keep(f"further {directory}", training)

    for directory in ("out", "stock"):
        in_child(lab, lambda directory=directory: load(directory))  # type: ignore[misc]
        assert not differences(kept("last"), kept(f"loaded {directory}"))
    assert not differences(kept("further stock"), kept("further out"))
    files = {name: {path.name for path in (lab.directory / name).iterdir()} for name in ("out", "stock")}
    assert files["out"] - {PLACE_NAME} == files["stock"]
    assert (lab.directory / "out" / PLACE_NAME).read_text() == f'{{"step": {steps[-1]}, "epoch": 2, "batch": 11}}\n'


@pytest.mark.slow
@pytest.mark.usefixtures("_installed_formats")
def test_tied_weights_and_several_models_are_exported(lab: Lab) -> None:
    def models() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
        tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        tied[1].weight = tied[0].weight
        other = nn.Linear(4, 1)
        return tied, other, torch.optim.Adam([*tied.parameters(), *other.parameters()])

    settings = config(storage=StorageConfig())

    def train_both() -> None:
        ckpt = MemCheckpointPlugin(Accelerator(cpu=True), lab.run_dir, config=settings)
        torch.manual_seed(3)
        tied, other, optimizer = ckpt.prepare(*models())
        list(ckpt.epochs(0))
        for _ in range(3):
            ckpt.accelerator.backward(other(tied(torch.ones(2, 4))).sum())
            optimizer.step()
            optimizer.zero_grad()
            ckpt.commit()
        torch.save([freeze(each.state_dict()) for each in (tied, other)], lab.directory / "trained")
        ckpt.close()

    def load() -> None:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(4)
        tied, other, _ = accelerator.prepare(*models())
        accelerator.load_state(str(lab.directory / "out"))
        expected = torch.load(lab.directory / "trained", weights_only=False)
        assert not differences(expected, [freeze(each.state_dict()) for each in (tied, other)])

    in_child(lab, train_both)
    assert not lab.left_behind(limit=60.0)
    store = LocalStore(lab.run_dir / "storage")
    export(store, read_catalog(store).complete[0], lab.directory / "out", "accelerate")
    in_child(lab, load)


def test_a_run_of_another_kind_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(ForeignStateError, match=r"found one that provides \['scheduler'\]; choose another format"):
        write(ExportedState(1, {}, [], {"scheduler": {}}), tmp_path / "out")
    assert not (tmp_path / "out").exists()
