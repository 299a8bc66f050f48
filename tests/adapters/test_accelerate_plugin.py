"""The Accelerate plugin's face: wrong calls, refusals, settings, metrics, and what it leaves alone."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import DataLoaderConfiguration, DistributedType
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memckpt
from accelerate_plugin import MemCheckpointPlugin
from accelerate_plugin.loaders import GeneratorsElsewhere, begun_loaders, restore_begun
from accelerate_plugin.loop import LoopWatch
from memckpt.config import MemckptConfig
from memckpt.config.arguments import DISABLE
from memckpt.errors import (
    ConfigurationError,
    ForeignStateError,
    NothingHeldError,
    UnsupportedError,
    UnsupportedStateError,
    UsageError,
)
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.hand_loops import in_child

ROOT = Path(__file__).resolve().parents[2]


def in_a_child(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a child process of the lab."""

    @functools.wraps(test)
    def run(lab: Lab, **arguments: Any) -> None:
        in_child(lab, lambda: test(lab, **arguments))

    return run


def objects() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], Any]:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(12, 4), torch.randn(12, 1))
    return model, optimizer, DataLoader(data, 4), torch.optim.lr_scheduler.StepLR(optimizer, 1)


def plugin(lab: Lab, settings: dict[str, Any] | None = None, **arguments: Any) -> MemCheckpointPlugin:
    accelerator = Accelerator(cpu=True, **arguments.pop("accelerator", {}))
    configured = config(resume_check="witness", **(settings or {}))
    return MemCheckpointPlugin(accelerator, lab.run_dir, config=configured, **arguments)


def step(ckpt: MemCheckpointPlugin, model: Any, optimizer: Any, batch: Any) -> None:
    ckpt.accelerator.backward(nn.functional.mse_loss(model(batch[0]), batch[1]))
    optimizer.step()
    optimizer.zero_grad()


def train(ckpt: MemCheckpointPlugin, epochs: int, model: Any, optimizer: Any, loader: Any, *_: Any) -> None:
    for _epoch in ckpt.epochs(epochs):
        for batch in loader:
            step(ckpt, model, optimizer, batch)
            ckpt.commit()


def train_and_leave(lab: Lab) -> None:
    """Train an epoch of three steps, and leave it as it is."""
    ckpt = plugin(lab)
    train(ckpt, 1, *ckpt.prepare(*objects()))
    ckpt.close(finished=False)


# Wrong calls


@in_a_child
def test_a_plugin_that_prepares_nothing_ends(lab: Lab) -> None:
    with plugin(lab) as ckpt:
        assert ckpt.step == 0


@in_a_child
def test_calls_before_prepare(lab: Lab) -> None:
    ckpt = plugin(lab)
    for call in (ckpt.commit, ckpt.metrics, lambda: next(ckpt.epochs(1))):
        with pytest.raises(UsageError, match=r"prepare\(\) has not been called.*= ckpt.prepare\(model, optimizer"):
            call()
    model, optimizer, loader, _ = objects()
    for nothing in ((), (loader,), (model, loader), (optimizer,)):
        with pytest.raises(UsageError, match=r"expected a model and its optimizer.*call model, optimizer"):
            ckpt.prepare(*nothing)
    ckpt.prepare(model, optimizer)
    with pytest.raises(UsageError, match=r"prepare\(\) was called twice"):
        ckpt.prepare(*objects())
    ckpt.close()
    ckpt.close()
    with pytest.raises(UsageError, match="the plugin is closed"):
        ckpt.commit()


@in_a_child
def test_registering(lab: Lab) -> None:
    ckpt = plugin(lab)
    prepared = ckpt.prepare(*objects())
    ckpt.register("one", prepared[3])
    with pytest.raises(UsageError, match="expected a new name"):
        ckpt.register("one", prepared[3])
    with pytest.raises(UsageError, match=r"expected an object with state_dict\(\) and load_state_dict\(\), found int"):
        ckpt.register("two", 2)
    plain = SimpleNamespace(level=3, kept=[1, 2], handle=object())
    with pytest.raises(ConfigurationError, match=r"expected 'plain\.nothing' to exist when training starts"):
        ckpt.register("plain", plain, ["nothing"])
    with pytest.raises(UnsupportedStateError, match=r"attribute plain.handle is of type builtins.object"):
        ckpt.register("plain", plain, ["handle"])
    ckpt.register("plain", plain, ["level", "kept"])
    state = ckpt._objects._registered["plain"].state_dict()
    plain.level, plain.kept = 4, []
    ckpt._objects._registered["plain"].load_state_dict(state)
    assert (plain.level, plain.kept) == (3, [1, 2])
    next(ckpt.epochs(1))
    with pytest.raises(UsageError, match="before the loop, which has begun"):
        ckpt.register("three", prepared[3])
    ckpt.close()


@pytest.mark.promise("Accelerate: a loop that would not be protected, or cannot be followed, is an error with a remedy")
@in_a_child
def test_loops_that_would_be_unprotected(lab: Lab) -> None:
    ckpt = plugin(lab)
    model, optimizer, loader, _ = ckpt.prepare(*objects())
    for batch in loader:
        step(ckpt, model, optimizer, batch)
        with pytest.raises(UsageError, match=r"`for epoch in ckpt.epochs\(n\)`.*ckpt.step"):
            ckpt.commit()
        break
    epochs = ckpt.epochs(9)
    next(epochs)
    for batch in loader:
        step(ckpt, model, optimizer, batch)
    with pytest.raises(UsageError, match="expected it inside the loop over a prepared loader"):
        ckpt.commit()
    with pytest.raises(UsageError, match=r"no step was committed: call ckpt.commit\(\)"):
        next(epochs)
    epochs = ckpt.epochs(9)
    next(epochs)
    for batch in loader:
        ckpt.accelerator.backward(nn.functional.mse_loss(model(batch[0]), batch[1]))
        assert not ckpt.commit()
    with pytest.raises(UsageError, match=r"no optimizer has stepped: call step\(\) of the optimizer"):
        next(epochs)
    epochs = ckpt.epochs(9)
    next(epochs)
    for batch in loader:
        step(ckpt, model, optimizer, batch)
        assert ckpt.commit()
        with pytest.raises(UsageError, match="called twice for one batch"):
            ckpt.commit()
    next(epochs)
    batches = iter(loader)
    step(ckpt, model, optimizer, next(batches))
    ckpt.commit(epoch_over=True)
    with pytest.raises(UsageError, match=r"another batch after commit\(epoch_over=True\)"):
        next(batches)
    ckpt.close()


@in_a_child
def test_nothing_is_refused_where_protection_is_disabled(lab: Lab) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DISABLE, "1")
        patch.setattr("accelerate_plugin.prepared._SUPPORTED", ())
        with plugin(lab) as ckpt:
            ckpt.register("any", object())
            model, optimizer, loader, _ = ckpt.prepare(*objects())
            for batch in loader:
                step(ckpt, model, optimizer, batch)
                assert [ckpt.commit(), ckpt.commit()] == [True, False]
            assert (ckpt.step, ckpt.batch, ckpt.metrics()) == (3, 3, {})
        with plugin(lab) as ckpt:
            model, optimizer, loader, _ = ckpt.prepare(*objects())
            for _epoch in ckpt.epochs(2):
                for batch in loader:
                    step(ckpt, model, optimizer, batch)
    assert not lab.run_dir.exists()


@in_a_child
def test_a_training_without_any_commit_ends_with_an_error(lab: Lab) -> None:
    ckpt = plugin(lab)
    model, optimizer, loader, _ = ckpt.prepare(*objects())
    for batch in loader:
        step(ckpt, model, optimizer, batch)
    with pytest.raises(UsageError, match="no step was committed"):
        ckpt.close()


def test_a_loop_without_loaders(lab: Lab) -> None:
    """The place in the data is the user's then, and `step` says how far it is."""

    def body(expected: int) -> None:
        ckpt = plugin(lab)
        model, optimizer = ckpt.prepare(*objects()[:2])
        assert ckpt.step == expected
        list(ckpt.epochs(0))  # puts the state back
        for _ in range(2):
            step(ckpt, model, optimizer, (torch.ones(4, 4), torch.ones(4, 1)))
            assert ckpt.commit()
        assert ckpt.step == expected + 2
        ckpt.close(finished=expected > 0)

    in_child(lab, lambda: body(0))
    in_child(lab, lambda: body(2))


# Refusals


@pytest.mark.promise("Accelerate: a loop that would not be protected, or cannot be followed, is an error with a remedy")
@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (DistributedType.DEEPSPEED, "found DEEPSPEED: .*DeepSpeed's engine owns"),
        (DistributedType.MEGATRON_LM, "found MEGATRON_LM: .*Megatron-LM steps an optimizer of its own"),
        (DistributedType.XLA, "found XLA: .*XLA executes"),
        (DistributedType.MULTI_NPU, "found MULTI_NPU: .*it has not been tried"),
        (SimpleNamespace(tp_enabled=True, cp_enabled=False), "tensor or context parallelism"),
    ],
)
@in_a_child
def test_what_cannot_be_followed_is_refused_by_name(lab: Lab, found: Any, reason: str) -> None:
    ckpt = plugin(lab)
    name = "distributed_type" if isinstance(found, DistributedType) else "parallelism_config"
    setattr(ckpt.accelerator.state, name, found)
    with pytest.raises(UnsupportedError, match=reason):
        ckpt.prepare(*objects())


def test_other_objects_than_before_are_refused(lab: Lab) -> None:
    def without(index: int, named: str) -> None:
        ckpt = plugin(lab)
        ckpt.prepare(*(each for place, each in enumerate(objects()) if place != index))
        with pytest.raises(ForeignStateError, match=rf"expected 1 {named}\(s\) and not 0"):
            next(ckpt.epochs(1))
        ckpt.close(finished=False)

    def by_hand() -> None:
        model, optimizer, *_ = objects()
        session = memckpt.attach(model, optimizer, run_dir=lab.run_dir, resume="never", config=config())
        model(torch.ones(1, 4)).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        session.commit()
        session.close(finished=False)

    def not_ours() -> None:
        ckpt = plugin(lab)
        with pytest.raises(ForeignStateError, match="expected state written by MemCheckpointPlugin"):
            ckpt.prepare(*objects())

    for body in (
        lambda: train_and_leave(lab),
        lambda: without(3, "scheduler"),
        lambda: without(2, "prepared loader"),
        by_hand,
        not_ours,
    ):
        in_child(lab, body)
    lab.stop()


# Settings


def test_settings_come_from_the_environment(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        accelerator = Accelerator(cpu=True)
        with pytest.raises(ConfigurationError, match="argument or in MEMCKPT_RUN_DIR, found neither"):
            MemCheckpointPlugin(accelerator)
        with pytest.raises(ConfigurationError, match="log_every: expected None or 1 or more, found 0"):
            MemCheckpointPlugin(accelerator, "run", log_every=0)
        os.environ.update(MEMCKPT_RUN_DIR=str(lab.run_dir), MEMCKPT_RESUME="require", MEMCKPT_REDO="lazy")
        found = MemCheckpointPlugin(accelerator)
        assert (found.run_dir, found.resume, found.config) == (str(lab.run_dir), "require", MemckptConfig(redo="lazy"))
        given = MemCheckpointPlugin(accelerator, "elsewhere", resume=7, config=MemckptConfig(slots=5))
        assert (given.run_dir, given.resume, given.config) == ("elsewhere", 7, MemckptConfig(slots=5))
        with pytest.raises(NothingHeldError):
            MemCheckpointPlugin(accelerator, config=config()).prepare(*objects())
        os.environ["MEMCKPT_RESUME"] = "perhaps"
        with pytest.raises(ConfigurationError, match=r"MEMCKPT_RESUME: expected .*, found 'perhaps'"):
            MemCheckpointPlugin(accelerator)

    in_child(lab, body)
    lab.stop()


# Metrics


class Rows(GeneralTracker):
    """Keeps what it is given."""

    name = "rows"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, Any]]] = []
        super().__init__()

    @property
    def tracker(self) -> Any:
        return self.rows

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.rows.append((step, values))


@pytest.mark.parametrize(("every", "logs"), [(2, "all"), (2, "main"), (None, "all"), (2, "none")])
@in_a_child
def test_trackers_get_the_metrics(lab: Lab, every: int | None, logs: str) -> None:
    rows = Rows()
    ckpt = plugin(lab, {"log_metrics": logs}, log_every=every, accelerator={"log_with": [rows]})
    ckpt.accelerator.init_trackers("project")
    train(ckpt, 2, *ckpt.prepare(*objects()))
    assert [number for number, _ in rows.rows] == ([2, 4, 6] if every and logs != "none" else [])
    for number, values in rows.rows:
        page = (ROOT / "docs/observability.md").read_text().partition("## In your loggers")[2]
        described = r"^\| (?:\*\*)?`(memckpt/\w+)`" if logs == "all" else r"^\| \*\*`(memckpt/\w+)`"
        assert set(values) == set(re.findall(described, page, re.MULTILINE)), "each is described"
        assert (values["memckpt/attempt"], values["memckpt/alarms"]) == (1.0, 0.0)
        if logs == "all":
            assert values["memckpt/step"] == number
            assert values["memckpt/held_bytes"] > 0
    ckpt.close()


@in_a_child
def test_losses_that_are_logged_are_noted(lab: Lab) -> None:
    rows = Rows()
    ckpt = plugin(lab, log_every=None, accelerator={"log_with": [rows]})
    ckpt.accelerator.init_trackers("project")
    ckpt.prepare(*objects())
    noted: list[Any] = []
    assert ckpt._session is not None
    ckpt._session.log = noted.append  # type: ignore[method-assign]
    ckpt.accelerator.log({"loss": 0.5}, step=3)
    ckpt.close()
    ckpt.accelerator.log({"loss": 0.25}, step=4)
    assert noted == [{"loss": 0.5}]
    assert rows.rows == [(3, {"loss": 0.5}), (4, {"loss": 0.25})]
    assert "log" not in vars(ckpt.accelerator)


# What is left


def test_a_context_manager_holds_on_after_an_error_and_lets_go_after_none(lab: Lab) -> None:
    def body(fails: bool, expected: int) -> None:
        with plugin(lab) as ckpt:
            model, optimizer, loader, _ = ckpt.prepare(*objects())
            assert ckpt.step == expected
            for _ in ckpt.epochs(1):
                for batch in loader:
                    step(ckpt, model, optimizer, batch)
                    ckpt.commit()
                    if fails:
                        raise KeyError("on purpose")

    def failing() -> None:
        with pytest.raises(KeyError, match="on purpose"):
            body(True, 0)

    in_child(lab, failing)
    assert lab.agent_answers()
    in_child(lab, lambda: body(False, 1))
    assert not lab.left_behind()
    assert not lab.agent_answers()


def test_a_loop_that_is_never_entered_leaves_what_is_held(lab: Lab) -> None:
    def look() -> None:
        with plugin(lab) as ckpt:
            ckpt.prepare(*objects())
            assert (ckpt.step, ckpt.epoch, ckpt.batch) == (3, 0, 3)
            assert ckpt.report is None

    def go_on() -> None:
        with plugin(lab) as ckpt:
            train(ckpt, 2, *ckpt.prepare(*objects()))
        assert ckpt.report is not None
        assert (ckpt.report.step, ckpt.report.exact) == (3, True)

    in_child(lab, lambda: train_and_leave(lab))
    in_child(lab, look)
    assert lab.agent_answers()
    in_child(lab, go_on)
    lab.stop()


@pytest.mark.parametrize("loading", [{}, {"dispatch_batches": True}, {"use_stateful_dataloader": True}], ids=str)
@in_a_child
def test_nothing_stays_on_loaders_and_optimizers(lab: Lab, loading: dict[str, Any]) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**loading))
    ckpt = MemCheckpointPlugin(accelerator, lab.run_dir, config=config())
    model, optimizer, loader, _ = ckpt.prepare(*objects())
    assert accelerator._dataloaders == [loader], "it is the object that Accelerate knows"
    assert isinstance(loader, DataLoader)
    train(ckpt, 1, model, optimizer, loader)
    ckpt.close()
    assert type(loader).__module__ == "accelerate.data_loader"
    assert type(loader.base_dataloader).__module__.startswith("torch")
    assert not [name for name in (*vars(loader), *vars(loader.base_dataloader)) if "memckpt" in name]
    assert not optimizer.optimizer._optimizer_step_post_hooks
    assert len(list(loader)) == 3


def test_what_cannot_be_exact_is_said(lab: Lab) -> None:
    def body() -> None:
        ckpt = plugin(lab)
        model, optimizer, _, _ = objects()
        stream = DataLoader(_Numbers(), 4)
        ckpt.prepare(model, optimizer, stream)
        ckpt.close()

    log = in_child(lab, body)
    assert "loader 0: _Numbers is an IterableDataset: a resume reads it again from its beginning" in log


class _Numbers(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.ones(8, 4))


@pytest.mark.parametrize(
    "checks",
    [
        {
            "memckpt": ["torch", "accelerate", "lightning", "accelerate_plugin", "lightning_memckpt"],
            "accelerate_plugin": ["lightning", "lightning_memckpt"],
        },
        pytest.param({"lightning_memckpt": ["accelerate", "accelerate_plugin"]}, marks=pytest.mark.slow),
    ],
    ids=["accelerate", "lightning"],
)
def test_importing_one_adapter_imports_no_other(checks: dict[str, list[str]]) -> None:
    code = (
        "import sys, {0}; found = [name for name in {1} if name in sys.modules]; sys.exit(str(found) if found else 0)"
    )
    running = {
        name: subprocess.Popen(
            [sys.executable, "-c", code.format(name, others)], stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        for name, others in checks.items()
    }
    problems = {name: process.communicate(timeout=120)[1] for name, process in running.items()}
    assert {name: problems[name] for name, process in running.items() if process.returncode} == {}


def test_a_loader_that_is_prepared_later_and_was_left_early_is_said() -> None:
    loader = SimpleNamespace(end_of_dataloader=False, remainder=-1)
    state = SimpleNamespace(dataloader_references=[None, loader, loader])
    accelerator = SimpleNamespace(_dataloaders=[loader], gradient_state=state)
    assert begun_loaders(accelerator) == [(0, False, -1)], "it has begun twice, and ends once"
    assert restore_begun(accelerator, [(0, True, 3)]) is None
    assert (state.dataloader_references, loader.end_of_dataloader, loader.remainder) == ([None, loader], True, 3)
    line = restore_begun(accelerator, [(1, False, -1)])
    assert line is not None
    assert "prepared later was left early" in line


def test_an_epoch_without_a_step_is_a_mistake_only_where_none_was_ever_taken() -> None:
    watch = LoopWatch()
    watch.nothing_to_commit()
    watch.check_epoch(has_stepped=True)
    watch.nothing_to_commit()
    with pytest.raises(UsageError, match="no optimizer has stepped"):
        watch.check_epoch(has_stepped=False)


def test_generators_of_other_loaders_than_before_are_named_and_left_alone() -> None:
    elsewhere, generator = GeneratorsElsewhere(), torch.Generator().manual_seed(3)
    data = TensorDataset(torch.zeros(4))
    drawn, plain = DataLoader(data, shuffle=True, generator=generator), DataLoader(data)
    states = elsewhere.capture([drawn])
    torch.rand(1, generator=generator)
    moved = generator.get_state()
    said = "a loader of TensorDataset has other generators than in the run that is continued"
    assert elsewhere.restore([plain], states) == said
    assert torch.equal(generator.get_state(), moved)
    assert elsewhere.restore([drawn], states) is None
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(3).get_state())
