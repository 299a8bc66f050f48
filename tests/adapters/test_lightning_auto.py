"""MEMCKPT_AUTO=1: scripts without a line of memckpt; and nothing at all without that variable."""

from __future__ import annotations

import logging
import random
import re
import sys
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.registry import _load_external_callbacks

from lightning_memckpt import MemCheckpoint, automatic
from lightning_memckpt.automatic import AutomaticMemCheckpoint
from memckpt.capture.step_hooks import StepHooks
from memckpt.errors import ConfigurationError, UnsupportedError
from tests.support.trainings import bare_lightning
from tests.support.trainings.bare_lightning import Net, loader, trainer
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.hand_loops import in_child
from tests.support.trainings.script_runs import ROOT, Scripts, last_words

GROUPS = re.findall(
    r'^\[project\.entry-points\."([\w.]+callbacks_factory)"\]\n(.+)$',
    (ROOT / "pyproject.toml").read_text(),
    re.MULTILINE,
)


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the entry points of pyproject.toml as an installation has them."""
    installed = tmp_path / "site" / "lightning_memckpt-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-memckpt\nVersion: 0\n")
    lines = (f"[{group}]\n{line}\n".replace('"', "") for group, line in GROUPS)
    (installed / "entry_points.txt").write_text("".join(lines))
    monkeypatch.syspath_prepend(str(installed.parent))
    monkeypatch.delenv("MEMCKPT_AUTO", raising=False)
    monkeypatch.delenv("MEMCKPT_RUN_DIR", raising=False)
    monkeypatch.setattr(automatic, "_first", None)


def test_every_door_of_lightning_is_used() -> None:
    assert sorted(group for group, _ in GROUPS) == [
        "lightning.fabric.callbacks_factory",
        "lightning.pytorch.callbacks_factory",
        "lightning_fabric.callbacks_factory",
        "pytorch_lightning.callbacks_factory",
    ]


# Nothing without the variable


@pytest.mark.parametrize("value", [None, "0"])
def test_nothing_happens_without_the_variable(lab: Lab, value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process in which memckpt cannot even be imported."""
    if value is not None:
        monkeypatch.setenv("MEMCKPT_AUTO", value)
    monkeypatch.setenv("MEMCKPT_RUN_DIR", str(lab.run_dir))

    def body() -> None:
        for name in [*sys.modules]:
            if name.partition(".")[0] in ("memckpt", "lightning_memckpt"):
                del sys.modules[name]
        before = set(sys.modules)
        if value is None:
            sys.modules["memckpt"] = None  # type: ignore[assignment]
        numbers, threads = (torch.get_rng_state().tolist(), random.getstate()), threading.active_count()
        for group, _ in GROUPS:
            assert _load_external_callbacks(group) == []
        if value is None:
            ours = {name for name in set(sys.modules) - before if "memckpt" in name}
            assert ours == {"memckpt", "lightning_memckpt", "lightning_memckpt.entry_points"}
        assert (torch.get_rng_state().tolist(), random.getstate()) == numbers
        assert threading.active_count() == threads
        bare_lightning.main()

    log = in_child(lab, body)
    assert "memckpt:" not in log
    assert not lab.run_dir.exists()


# With it


def test_a_script_without_a_line_of_memckpt_survives(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts, script = Scripts(lab), "tests/support/trainings/bare_lightning.py"
    expected = last_words(scripts.run(script, directory=lab.directory / "unprotected"))
    settings = {"AUTO": "1", "RUN_DIR": "run", "STORAGE": "none", "REDO": "lazy", "AGENT_LINGER_SECONDS": "60"}
    for name, value in settings.items():
        monkeypatch.setenv(f"MEMCKPT_{name}", value)
    logs = [scripts.killed("step 3", script), scripts.killed("step 8", script), scripts.run(script)]
    assert last_words(logs[-1]) == expected
    for log in logs:
        assert log.count("memckpt: on by MEMCKPT_AUTO=1, run directory 'run'") == 1, log
        assert "names no setting" not in log
    assert all("resumed at step" in log for log in logs[1:])


class Noted(list[pl.Trainer]):
    """Trainers whose fits were to be protected."""


@pytest.fixture
def protected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Noted:
    noted = Noted()
    monkeypatch.setenv("MEMCKPT_AUTO", "1")
    monkeypatch.setenv("MEMCKPT_RUN_DIR", str(tmp_path / "run"))

    def setup(callback: MemCheckpoint, trainer: pl.Trainer, module: Any, stage: str) -> None:
        assert stage == "fit"
        noted.append(trainer)

    monkeypatch.setattr(MemCheckpoint, "setup", setup)
    return noted


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of our own loggers."""
    return [each.message for each in caplog.records if "memckpt" in each.name]


def fit(some: pl.Trainer, model: pl.LightningModule | None = None) -> None:
    some.fit(model or Net(), loader())


def test_only_the_first_trainer_that_fits(protected: Noted, caplog: pytest.LogCaptureFixture) -> None:
    one, two, three = (trainer(max_epochs=1) for _ in range(3))
    with caplog.at_level(logging.INFO, "lightning_memckpt"):
        one.validate(Net(), loader(), verbose=False)
        fit(trainer(fast_dev_run=True))
        assert (protected, said(caplog)) == ([], [])
        fit(two)
        (line,) = said(caplog)
        assert "on by MEMCKPT_AUTO=1" in line
        fit(two)
        caplog.clear()
        fit(three)
    assert protected == [two, two]
    (line,) = said(caplog)
    assert "not active in this fit: MEMCKPT_AUTO=1" in line
    assert "MemCheckpoint(run_dir)" in line


@pytest.mark.parametrize("by", ["trainer", "module"])
def test_it_steps_aside_for_a_callback_of_the_script(by: str, protected: Noted, tmp_path: Path) -> None:
    class Passing(Net):
        def configure_callbacks(self) -> list[pl.Callback]:
            return [MemCheckpoint(tmp_path / "own")]

    own = [MemCheckpoint(tmp_path / "own")] if by == "trainer" else []
    some = trainer(*own, max_epochs=1)
    fit(some, Passing() if by == "module" else None)
    assert protected == [some], "by the script's own callback, and by no other"


def test_a_list_of_callbacks_that_two_trainers_are_given(protected: Noted) -> None:
    callbacks: list[pl.Callback] = []
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    first = pl.Trainer(callbacks=callbacks, max_epochs=1, accelerator="cpu", **quiet)
    callbacks = first.callbacks  # type: ignore[attr-defined]
    second = pl.Trainer(callbacks=callbacks, max_epochs=1, accelerator="cpu", **quiet)
    assert sum(isinstance(each, AutomaticMemCheckpoint) for each in second.callbacks) == 2  # type: ignore[attr-defined]
    fit(second)
    assert protected == [second]


def test_a_fit_without_a_run_directory_is_refused(protected: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMCKPT_RUN_DIR")
    some = trainer(max_epochs=1)
    some.validate(Net(), loader(), verbose=False)
    with pytest.raises(ConfigurationError, match="MEMCKPT_AUTO=1: expected MEMCKPT_RUN_DIR beside it"):
        fit(some)
    assert protected == []


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMCKPT_AUTO", "yes")
    with pytest.raises(ConfigurationError, match="MEMCKPT_AUTO: expected 1 or 0, found 'yes'"):
        trainer()


# Elsewhere


@pytest.mark.slow  # imports another Lightning
def test_a_trainer_of_the_other_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import pytorch_lightning

    monkeypatch.setenv("MEMCKPT_AUTO", "1")
    other = pytorch_lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    (ours,) = [each for each in other.callbacks if "MemCheckpoint" in type(each).__name__]
    ours.setup(other, None, "validate")
    with pytest.raises(UnsupportedError, match="found one of pytorch_lightning"):
        ours.setup(other, None, "fit")


@pytest.mark.parametrize("followed", [False, True])
def test_a_fabric_loop_is_told_that_it_is_not_protected(
    followed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEMCKPT_AUTO", "1")
    fabric = Fabric(accelerator="cpu", devices=1)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if followed:
        recorder: Any = type("Recorder", (), {"__getattr__": lambda self, name: _Anything()})()
        StepHooks([optimizer], recorder).install()
    model, optimizer = fabric.setup(model, optimizer)
    with caplog.at_level(logging.INFO, "lightning_memckpt"):
        for _ in range(2):
            optimizer.step()
    assert ["does not protect a Fabric loop" in each for each in said(caplog)] == [True] * (not followed)


class _Anything:
    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    __getattr__ = __call__

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...
