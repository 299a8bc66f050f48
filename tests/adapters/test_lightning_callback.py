"""What MemCheckpoint refuses, says, leaves alone and leaves behind; each test in a small run of its own."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
import random
import re
import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint, StochasticWeightAveraging, Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memckpt
from lightning_memckpt import MemCheckpoint, trainer_state
from lightning_memckpt.internals import TrainerInternals
from lightning_memckpt.shadowing import Shadows
from memckpt.config.arguments import DISABLE
from memckpt.errors import ConfigurationError, UnsupportedStateError
from tests.support.trainings import fake_session

STEPS = 8


class Small(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.fail_at: int | None = None
        self.failure: BaseException = RuntimeError("as told")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.fail_at:
            raise self.failure
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Sessions:
    """Attaches stand-in sessions and remembers them."""

    def __init__(self) -> None:
        self.made: list[fake_session.FakeSession] = []

    def attach(self, *arguments: Any, **named: Any) -> fake_session.FakeSession:
        self.made.append(fake_session.FakeSession(*arguments, **named))
        return self.made[-1]


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> Sessions:
    stand_in = Sessions()
    monkeypatch.setattr(memckpt, "attach", stand_in.attach)
    return stand_in


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What has been logged so far."""
    monkeypatch.setattr(logging.getLogger("lightning_memckpt"), "propagate", True)
    caplog.set_level(logging.INFO, "lightning_memckpt")
    return lambda: caplog.messages


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(STEPS * 2, 4)), 2)


def trainer(tmp_path: Path, *callbacks: pl.Callback, **arguments: Any) -> pl.Trainer:
    arguments = {"logger": False, "enable_checkpointing": False, "max_epochs": 1, **arguments}
    return pl.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )


def fail_at(step: int, tmp_path: Path, *callbacks: pl.Callback, **arguments: Any) -> None:
    model = Small()
    model.fail_at = step
    with pytest.raises(RuntimeError, match="as told"):
        trainer(tmp_path, MemCheckpoint(tmp_path / "run"), *callbacks, **arguments).fit(model, loader())


@pytest.mark.parametrize("resume", ["newest", -1, True, 1.5])
def test_resume_must_be_one_of_the_choices(resume: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected 'auto', 'require', 'exact', 'never' or a step.*found"):
        MemCheckpoint(tmp_path, resume=resume)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda directory: MemCheckpoint(directory / "b"), "expected one MemCheckpoint callback on a Trainer, found 2"),
        (lambda directory: LearningRateFinder(), r"LearningRateFinder.*Tuner"),
    ],
)
def test_callbacks_beside_which_nothing_is_protected_are_refused(
    other: Callable[[Path], pl.Callback], said: str, tmp_path: Path, sessions: Sessions
) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        trainer(tmp_path, MemCheckpoint(tmp_path / "run"), other(tmp_path)).fit(Small(), loader())


def test_nothing_is_refused_where_protection_is_disabled(
    tmp_path: Path, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DISABLE, "1")
    alone = trainer(tmp_path, *(MemCheckpoint(tmp_path / name) for name in "ab"))
    alone.fit(Small(), loader())
    assert alone.global_step > 0
    assert not sessions.made


class Tunable(Small):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1
        self.batch_size = 1

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(STEPS * 2, 4)), self.batch_size, shuffle=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


def test_a_tuner_before_training_is_left_alone(tmp_path: Path, sessions: Sessions) -> None:
    def fit(*callbacks: pl.Callback, fails_at: int | None = None) -> Tunable:
        pl.seed_everything(5, verbose=False)
        model, tuned = Tunable(), trainer(tmp_path, *callbacks)
        tuner = Tuner(tuned)
        assert tuner.lr_find(model, num_training=3, early_stop_threshold=None) is not None
        assert tuner.scale_batch_size(model, max_trials=1, steps_per_trial=1) == 2
        assert len(sessions.made) == before
        model.fail_at = fails_at
        tuned.fit(model)
        return model

    before = 0
    expected = fit()
    first, second = (MemCheckpoint(tmp_path / "run") for _ in range(2))
    with pytest.raises(RuntimeError, match="as told"):
        fit(first, fails_at=3)
    assert first.report is None
    before = 1
    found = fit(second)
    assert second.report is not None
    assert (second.report.step, second.report.exact) == (3, True)
    assert torch.equal(found.layer.weight, expected.layer.weight)
    assert [session.commits for session in sessions.made] == [3, STEPS - 3]


class Validated(Tunable):
    """Fails in the validation of an epoch, and notes in which ones it was whole."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[int] = []
        self.fails_in: int | None = None

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(2, 4)))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch == self.fails_in:
            raise self.failure

    def on_validation_epoch_end(self) -> None:
        self.validated.append(self.current_epoch)


def test_a_validation_is_run_behind_a_tuner_that_has_run_one(tmp_path: Path, sessions: Sessions) -> None:
    def fit(fails_in: int | None, *callbacks: pl.Callback) -> list[int]:
        model, tuned = Validated(), trainer(tmp_path, *callbacks, max_epochs=3, num_sanity_val_steps=0)
        Tuner(tuned).lr_find(model, num_training=2 * STEPS + 2, early_stop_threshold=None, update_attr=False)
        model.validated.clear()
        model.fails_in = fails_in
        with contextlib.nullcontext() if fails_in is None else pytest.raises(RuntimeError, match="as told"):
            tuned.fit(model)
        return model.validated

    assert fit(None) == [0, 1, 2]
    assert fit(1, MemCheckpoint(tmp_path / "run")) == [0]
    assert fit(2, MemCheckpoint(tmp_path / "run")) == [1]
    assert fit(None, MemCheckpoint(tmp_path / "run")) == [2]


def test_unsupported_strategies_are_named(tmp_path: Path, sessions: Sessions) -> None:
    callback = MemCheckpoint(tmp_path / "run")
    other = trainer(tmp_path)
    other.strategy.__class__ = type("TheirStrategy", (pl.strategies.Strategy,), dict(vars(type(other.strategy))))
    with pytest.raises(MisconfigurationException, match=r"supports SingleDeviceStrategy, DDP.*, found TheirStrategy"):
        callback.setup(other, Small(), "fit")


def test_what_is_said_to_be_replicated_reaches_the_engine(tmp_path: Path, sessions: Sessions) -> None:
    trainer(tmp_path, MemCheckpoint(tmp_path / "run", replicated=["*.norm.*"])).fit(Small(), loader())
    assert [session.replicated for session in sessions.made] == [("*.norm.*",)]


def test_an_old_lightning_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.__version__", "2.4.0")
    with pytest.raises(MisconfigurationException, match=r"needs lightning>=2\.5, found 2\.4\.0"):
        trainer(tmp_path, MemCheckpoint(tmp_path / "run")).fit(Small(), loader())


def test_a_missing_private_name_is_named(tmp_path: Path) -> None:
    changed = trainer(tmp_path)
    del changed.fit_loop.epoch_loop._results
    with pytest.raises(MisconfigurationException, match=r"relies on trainer\.fit_loop\.epoch_loop\._results"):
        TrainerInternals(changed).verify()


@pytest.mark.parametrize("averages", [False, True])
def test_schedulers_that_a_callback_puts_in_place_later_keep_no_start_back(averages: bool) -> None:
    """Stochastic weight averaging makes one in mid-training: a new process has none, or the former one."""
    callbacks: list[pl.Callback] = [StochasticWeightAveraging(0.05)] if averages else []
    trainer = pl.Trainer(callbacks=callbacks, logger=False, accelerator="cpu", enable_checkpointing=False)
    of_callback = {"anneal_epochs": 10, "last_epoch": 3}
    with nullcontext() if averages else pytest.raises(ValueError, match="has 1 LR schedulers"):
        trainer_state._restore_schedulers(trainer, [of_callback])
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1), 3)
    trainer.strategy.lr_scheduler_configs = [LRSchedulerConfig(scheduler)]
    before = copy.deepcopy(scheduler.state_dict())
    if averages:
        trainer_state._restore_schedulers(trainer, [of_callback])
        assert scheduler.state_dict() == before
    trainer_state._restore_schedulers(trainer, [{**before, "last_epoch": 7}])
    assert scheduler.last_epoch == 7


def test_a_clean_end_and_a_failure_are_told_apart(tmp_path: Path, sessions: Sessions) -> None:
    fail_at(3, tmp_path)
    trainer(tmp_path, MemCheckpoint(tmp_path / "run")).fit(Small(), loader())
    assert [session.closed for session in sessions.made] == [False, True]
    assert [session.commits for session in sessions.made] == [3, STEPS - 3]


def test_keyboard_interrupt_keeps_the_state(tmp_path: Path, sessions: Sessions) -> None:
    model = Small()
    model.fail_at, model.failure = 2, KeyboardInterrupt()
    with pytest.raises(SystemExit):
        trainer(tmp_path, MemCheckpoint(tmp_path / "run")).fit(model, loader())
    assert sessions.made[0].closed is False


def test_nothing_stays_after_a_failure(tmp_path: Path, sessions: Sessions) -> None:
    model, data = Small(), loader()
    model.fail_at = 3
    failing = trainer(tmp_path, MemCheckpoint(tmp_path / "run"))
    with pytest.raises(RuntimeError, match="as told"):
        failing.fit(model, data)
    assert type(data) is DataLoader
    assert not any("memckpt" in type(value).__module__ for value in vars(model).values())
    assert not any("memckpt" in type(value).__module__ for value in vars(failing.strategy).values())


def test_the_resume_line_comes_with_the_facts(
    tmp_path: Path, sessions: Sessions, said: Callable[[], list[str]]
) -> None:
    fail_at(3, tmp_path)
    trainer(tmp_path, MemCheckpoint(tmp_path / "run")).fit(Small(), loader())
    lines = [line for line in said() if line.startswith("memckpt: ")]
    # Once when the first fit begins, once when the second one does; and then the resume.
    assert lines[:2] == ["memckpt: stand-in engine"] * 2
    assert len(lines) == 3
    assert re.fullmatch(r"memckpt: resumed at step 3 from files in \d+\.\d\d s, 0 steps lost; exact .*", lines[2])


def test_fast_dev_run_touches_nothing(tmp_path: Path, sessions: Sessions) -> None:
    trainer(tmp_path, MemCheckpoint(tmp_path / "run"), fast_dev_run=True).fit(Small(), loader())
    assert sessions.made == []


def test_a_stop_condition_met_before_the_first_step_keeps_the_state(tmp_path: Path, sessions: Sessions) -> None:
    fail_at(3, tmp_path)
    trainer(tmp_path, MemCheckpoint(tmp_path / "run"), max_epochs=0).fit(Small(), loader())
    assert sessions.made[-1].closed is False


def checkpoint_at_step_4(tmp_path: Path) -> str:
    files = ModelCheckpoint(tmp_path / "four", every_n_train_steps=4, save_top_k=-1)
    trainer(tmp_path, files, enable_checkpointing=True).fit(Small(), loader())
    return next(str(path) for path in (tmp_path / "four").iterdir() if "step=4" in path.name)


@pytest.mark.parametrize(("failed_at", "starts_at"), [(6, 6), (2, 4)])
def test_the_newer_of_held_state_and_checkpoint_wins(
    failed_at: int, starts_at: int, tmp_path: Path, sessions: Sessions
) -> None:
    file = checkpoint_at_step_4(tmp_path)
    fail_at(failed_at, tmp_path)
    again = trainer(tmp_path, MemCheckpoint(tmp_path / "run"))
    again.fit(Small(), loader(), ckpt_path=file)
    assert again.global_step == STEPS
    assert sessions.made[-1].commits == STEPS - starts_at


def test_resume_never_leaves_the_checkpoint_in_force(tmp_path: Path, sessions: Sessions) -> None:
    file = checkpoint_at_step_4(tmp_path)
    fail_at(6, tmp_path)
    trainer(tmp_path, MemCheckpoint(tmp_path / "run", resume="never")).fit(Small(), loader(), ckpt_path=file)
    assert sessions.made[-1].commits == STEPS - 4


class Unstorable(pl.Callback):
    """Its state cannot be stored, from the beginning or only later."""

    def __init__(self, *, later: bool) -> None:
        self.later = later
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        return {"handle": None if self.later and self.calls < 3 else object()}


class Level(pl.Callback):
    """A plain attribute, which `later` turns into something else in the middle of training."""

    def __init__(self, level: Any, later: Any = None) -> None:
        self.level = level
        self.later = later

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.later is not None and trainer.global_step == 3:
            self.level = self.later


@pytest.mark.parametrize("names", ["module.level", ["level"], ["module."], ["module.level", "module.level"], [3]])
def test_attributes_are_dotted_names(names: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"attributes: expected .*found"):
        MemCheckpoint(tmp_path, attributes=names)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "attribute callbacks.Level.level is of type builtins.object"),
        (
            {"best": [1, defaultdict(object)]},
            r"attribute callbacks.Level.level.best.1 is of type collections.defaultdict",
        ),
        (random.SystemRandom(), "attribute callbacks.Level.level is of type random.SystemRandom"),
    ],
)
def test_an_attribute_that_would_not_come_back_as_it_is(
    value: Any, said: str, tmp_path: Path, sessions: Sessions
) -> None:
    protected = MemCheckpoint(tmp_path / "run", attributes=["callbacks.Level.level"])
    with pytest.raises(UnsupportedStateError, match=said):
        trainer(tmp_path, protected, Level(value)).fit(Small(), loader())


@pytest.mark.parametrize("name", ["module.nothing", "datamodule.level", "callbacks.Other.level", "module.layer.no.way"])
def test_an_attribute_that_is_not_there(name: str, tmp_path: Path, sessions: Sessions) -> None:
    protected = MemCheckpoint(tmp_path / "run", attributes=[name])
    with pytest.raises(ConfigurationError, match=f"expected '{name}' to exist when training starts"):
        trainer(tmp_path, protected, Level(1)).fit(Small(), loader())


@pytest.mark.parametrize("name", ["module.held", "model.held"])
def test_an_attribute_of_the_module_has_the_name_that_findings_give_it_too(
    name: str, tmp_path: Path, sessions: Sessions
) -> None:
    model = Small()
    model.held = {"weight": torch.ones(2)}
    trainer(tmp_path, MemCheckpoint(tmp_path / "run", attributes=[name]), Level(1)).fit(model, loader())


class HoldsAScheduler(torch.optim.lr_scheduler.LRScheduler):
    """As warm-up wrappers do, whose state_dict() then has the object in it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return self.inner.get_lr()


class WithForeignScheduler(Small):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [HoldsAScheduler(optimizer)]


@pytest.mark.parametrize(
    ("callback", "model", "line"),
    [
        (Unstorable(later=False), Small, "callbacks/Unstorable: handle (builtins.object)"),
        (Unstorable(later=True), Small, "callbacks/Unstorable: handle (builtins.object)"),
        (Level(1, later=object()), Small, "attribute callbacks.Level.level (builtins.object)"),
        (pl.Callback(), WithForeignScheduler, "LR scheduler 0: "),
    ],
    ids=["from the beginning", "later", "attribute", "scheduler"],
)
def test_state_that_cannot_be_stored_is_left_out_and_named(
    callback: pl.Callback,
    model: type[Small],
    line: str,
    tmp_path: Path,
    sessions: Sessions,
    said: Callable[[], list[str]],
) -> None:
    attributes = ["callbacks.Level.level"] if isinstance(callback, Level) else []
    trainer(tmp_path, MemCheckpoint(tmp_path / "run", attributes=attributes), callback).fit(model(), loader())
    assert sessions.made[0].commits == STEPS
    (found,) = [each for each in said() if "left out" in each or "not carried over" in each]
    assert f"not carried over a restart: {line}" in found


def test_wall_clock_callbacks_are_announced(tmp_path: Path, sessions: Sessions, said: Callable[[], list[str]]) -> None:
    trainer(tmp_path, MemCheckpoint(tmp_path / "run"), Timer("00:01:00:00")).fit(Small(), loader())
    assert any("Timer counts wall-clock time" in line for line in said())


def test_metrics_go_to_the_loggers_only(tmp_path: Path, sessions: Sessions) -> None:
    callback = MemCheckpoint(tmp_path / "run", config=memckpt.MemckptConfig(log_metrics="all"))
    fitted = trainer(tmp_path, callback, logger=CSVLogger(tmp_path / "csv"), log_every_n_steps=2)
    fitted.fit(Small(), loader())
    table = next((tmp_path / "csv").rglob("metrics.csv")).read_text().splitlines()
    column = table[0].split(",").index("memckpt/step")
    assert [row.split(",")[column] for row in table[1:] if row.split(",")[column]] == ["2.0", "4.0", "6.0", "8.0"]
    assert not any("memckpt" in name for name in (*fitted.callback_metrics, *fitted.logged_metrics))


@pytest.mark.parametrize("has_logger", [False, True])
def test_losses_that_are_logged_are_noted(tmp_path: Path, sessions: Sessions, has_logger: bool) -> None:
    logger = CSVLogger(tmp_path / "csv") if has_logger else False
    fitted = trainer(tmp_path, MemCheckpoint(tmp_path / "run"), logger=logger, log_every_n_steps=4)
    fitted.fit(Small(), loader())
    noted = [values["loss"] for values in sessions.made[0].logged if "loss" in values]
    assert len(noted) == 2
    assert all(isinstance(each, float if has_logger else torch.Tensor) for each in noted)
    if logger:
        assert "log_metrics" not in vars(logger)


def test_a_logger_that_begins_another_version_is_named(
    tmp_path: Path, sessions: Sessions, said: Callable[[], list[str]]
) -> None:
    for version in (None, 0):
        fail_at(3, tmp_path, logger=CSVLogger(tmp_path / "csv", version=version))
        assert not any("logs to version" in line for line in said())
    trainer(tmp_path, MemCheckpoint(tmp_path / "run"), logger=CSVLogger(tmp_path / "csv")).fit(Small(), loader())
    line = "CSVLogger logs to version 1, and before this resume to 0: to go on in one place fix it, as in "
    assert any(f"{line}CSVLogger(..., version=0)" in each for each in said())


def test_metrics_that_nobody_wants_are_not_logged(tmp_path: Path, sessions: Sessions) -> None:
    callback = MemCheckpoint(tmp_path / "run", config=memckpt.MemckptConfig(log_metrics="none"))
    trainer(tmp_path, callback, logger=CSVLogger(tmp_path / "csv"), log_every_n_steps=2).fit(Small(), loader())
    table = next((tmp_path / "csv").rglob("metrics.csv")).read_text()
    assert "loss" in table
    assert "memckpt" not in table


def test_checkpoint_files_hold_nothing_of_ours(tmp_path: Path, sessions: Sessions) -> None:
    files = ModelCheckpoint(tmp_path / "files", every_n_train_steps=4)
    trainer(tmp_path, MemCheckpoint(tmp_path / "run"), files, enable_checkpointing=True).fit(Small(), loader())
    saved = torch.load(files.best_model_path, weights_only=False)
    assert not any("memckpt" in str(key).lower() for key in (*saved, *saved["callbacks"], *saved["loops"]["fit_loop"]))
    assert "combined_loader" not in saved["loops"]["fit_loop"]["state_dict"]


class CopiesTheModule(pl.Callback):
    def __init__(self) -> None:
        self.copies: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if not self.copies:
            kept, pl_module._trainer = pl_module._trainer, None
            self.copies = [copy.deepcopy(pl_module), pickle.loads(pickle.dumps(pl_module))]
            pl_module._trainer = kept


def test_copies_of_the_module_in_training_are_their_own(tmp_path: Path, sessions: Sessions) -> None:
    copies = CopiesTheModule()
    trainer(tmp_path, MemCheckpoint(tmp_path / "run"), copies).fit(Small(), loader())
    assert sessions.made[0].commits == STEPS
    for each in copies.copies:
        each.on_train_batch_end(None, None, 0)
        assert each.on_train_batch_end.__self__ is each


def test_a_shadow_under_a_later_one_becomes_the_original() -> None:
    class Thing:
        def name(self) -> str:
            return "class"

    thing = Thing()
    shadows = Shadows()
    shadows.put(thing, "name", lambda original: original() + " ours")
    ours = thing.name
    thing.name = lambda: ours() + " theirs"  # type: ignore[method-assign]
    shadows.remove_all()
    assert thing.name() == "class theirs"
