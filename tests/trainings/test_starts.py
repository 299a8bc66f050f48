"""How a training starts: what it says, with Python's default logging, and what it refuses."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import memckpt
from memckpt.capture.live_state import LiveState
from memckpt.errors import (
    ConfigurationError,
    DamagedStateError,
    MemckptError,
    UnsupportedError,
    UsageError,
    frames_of_others,
    without_our_frames,
)
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import stop_agent
from memckpt.session.mode import choose_redo
from memckpt.user_messages import show_by_default
from tests.support.cluster.processes import be_subreaper
from tests.support.trainings.engine_harness import Lab

CONFIG = memckpt.MemckptConfig(redo="lazy", storage=None, agent=memckpt.AgentConfig(linger_seconds=60))


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    own = Lab(tmp_path)
    yield own
    stop_agent(AgentAddress.of(own.run_dir))
    own.close()


def train(run_dir: Path, resume: str = "auto", first: int | None = None) -> None:
    """Three steps, and the end; `first`: number that the user gives the first of them, and none to the others."""
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    session = memckpt.attach(net, optimizer, run_dir=run_dir, config=CONFIG, resume=resume)  # type: ignore[arg-type]
    session.restore()
    for index in range(3):
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.commit(first if index == 0 else None)
    os.kill(os.getpid(), signal.SIGKILL)


def said(lab: Lab, resume: str = "auto", first: int | None = None) -> list[str]:
    """The lines about its start of a training in a process that has not configured logging."""

    def body() -> None:
        logging.root.handlers.clear()
        logging.root.setLevel(logging.WARNING)
        os.chdir(lab.run_dir.parent)
        train(Path(lab.run_dir.name), resume, first)  # a relative one is named as it is resolved

    child = lab.fork(body, "train")
    assert child.wait() == -signal.SIGKILL, child.log.read_text()
    return [
        line
        for line in child.log.read_text().splitlines()
        if any(said in line for said in ("starting", "resuming", "to resume"))
    ]


def test_each_start_says_where_it_begins_and_why(lab: Lab) -> None:
    assert said(lab) == [f"memckpt: nothing to resume: this is the run's first start, in {lab.run_dir}"]
    assert said(lab) == ["memckpt: resuming from local memory at step 3, which is repeated first, as a proof"]
    assert said(lab) == ["memckpt: resuming from local memory at step 5"]
    assert said(lab, resume="never", first=20) == ["memckpt: starting over: resume='never'"]
    assert said(lab) == ["memckpt: resuming from local memory at step 22"]
    assert said(lab) == ["memckpt: resuming from local memory at step 25"]


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("killed", [False, True])
def test_a_run_that_had_ended_says_so_and_that_it_keeps_its_settings(lab: Lab, killed: bool, in_parts: bool) -> None:
    """The first start ends with its last step, or is killed behind it: then the next one repeats that.

    Frameworks restore their own state between the tensors and the generators.
    """

    def train_to_the_end(lr: float, killed: bool) -> str:
        def body() -> None:
            logging.root.handlers.clear()
            net = torch.nn.Linear(3, 1)
            optimizer = torch.optim.SGD(net.parameters(), lr)
            config = replace(CONFIG, storage=memckpt.StorageConfig())
            session = memckpt.attach(net, optimizer, run_dir=lab.run_dir, config=config)
            report = session.restore_tensors() if in_parts else session.restore()
            if in_parts:
                session.restore_rng()
            for _ in range(0 if report is None else report.step, 3):
                net(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                session.commit()
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            session.close()

        child = lab.fork(body, "train")
        assert child.wait() == (-signal.SIGKILL if killed else 0), child.log.read_text()
        return child.log.read_text()

    first, second = train_to_the_end(0.1, killed), train_to_the_end(0.2, False)
    for line in ("nothing was left to train behind step 3;", "run's own go on: lr=0.2 of SGD (the run: 0.1)."):
        assert (line in first, line in second) == (False, True), first + second


@pytest.mark.parametrize("adopts", [False, True])
def test_an_agent_that_would_die_with_its_trainer_is_named(lab: Lab, adopts: bool) -> None:
    """Ray's workers, say, which have all of their descendants ended with them."""

    def body() -> None:
        be_subreaper(adopts)
        train(lab.run_dir)

    child = lab.fork(body, "train")
    assert child.wait() == -signal.SIGKILL, child.log.read_text()
    assert ("has become a child of this process, which adopts orphans" in child.log.read_text()) == adopts


def test_a_level_that_somebody_has_chosen_stays() -> None:
    above, below = logging.getLogger("tests.of.a"), logging.getLogger("tests.of.a.start")
    above.setLevel(logging.ERROR)
    show_by_default(below)
    assert not below.isEnabledFor(logging.WARNING)
    above.setLevel(logging.NOTSET)
    show_by_default(below)
    assert below.isEnabledFor(logging.INFO)


def attach(run_dir: Path) -> None:
    net = torch.nn.Linear(3, 1)
    memckpt.attach(net, torch.optim.SGD(net.parameters(), 0.1), run_dir=run_dir, config=CONFIG)


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_a_run_directory_that_cannot_be_made(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"run_dir: expected a directory.*found .*file.*move away"):
        attach(tmp_path / name)


def test_a_mistake_is_shown_without_frames_of_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are logged at DEBUG, for who reports a bug."""
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for call, where in (
        (lambda: memckpt.attach(net, optimizer, run_dir=tmp_path, config={"slots": "3"}), "settings.py"),
        (lambda: memckpt.load(tmp_path), "run_view.py"),
    ):
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "memckpt"), pytest.raises(MemckptError) as caught:
            call()
        assert [each.path.name for each in caught.traceback if isinstance(each.path, Path)][2:] == ["errors.py"]
        assert where in caplog.text


def test_an_error_keeps_its_cause_which_is_printed_without_frames_of_ours(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(DamagedStateError) as caught:
        memckpt.load(tmp_path)
    assert isinstance(caught.value.__cause__, msgspec.DecodeError)
    printed = "".join(traceback.format_exception(caught.value))
    assert printed.startswith("msgspec.DecodeError: ")
    assert [Path(name).name for name in re.findall(r'File "(.*)"', printed)] == [Path(__file__).name, "errors.py"]


def test_causes_in_a_circle_come_to_an_end() -> None:
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first

    @without_our_frames
    def fails() -> None:
        raise UsageError("of ours") from first

    with pytest.raises(UsageError, match="of ours") as caught:
        fails()
    assert caught.value.__cause__ is first


def test_frames_of_others_are_those_of_the_user() -> None:
    ours: dict[str, Any] = {"__name__": "memckpt.made_up"}
    exec("def calls(function): function()", ours)

    def fails() -> None:
        raise ValueError("of the user's")

    with pytest.raises(ValueError, match="of the user's") as caught:
        ours["calls"](fails)
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(frames_of_others(caught.value.__traceback__))]
    assert frames == ["test_frames_of_others_are_those_of_the_user", "fails"]


def test_a_run_directory_that_cannot_be_written_to(lab: Lab) -> None:
    directory = Path(tempfile.mkdtemp(prefix="mk-"))
    directory.chmod(0o555)

    def body() -> None:
        if os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)
        with pytest.raises(ConfigurationError, match=r"run_dir: expected a directory.*may not write.*change its owner"):
            attach(directory)

    try:
        child = lab.fork(body, "attach")
        assert child.wait() == 0, child.log.read_text()
    finally:
        shutil.rmtree(directory)


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    with pytest.raises(UnsupportedError, match=r"expected an optimizer of the parameters of the Linear.*found SGD"):
        LiveState(model, [torch.optim.SGD(other.parameters(), 0.1)], {})
    LiveState(model, [torch.optim.SGD(other.parameters(), 0.1)], {"beside": other})


@pytest.mark.parametrize(
    ("odd", "remedy"),
    [
        (torch.nn.LazyLinear(3), "run one forward on a batch"),
        (torch.eye(3).to_sparse(), "register its indices and values"),
    ],
)
def test_tensors_without_a_shape_or_elements_are_refused(odd: torch.nn.Module | torch.Tensor, remedy: str) -> None:
    model = torch.nn.Linear(2, 2)
    if isinstance(odd, torch.nn.Module):
        model.odd = odd
    else:
        model.register_buffer("odd", odd)
    with pytest.raises(UnsupportedError, match=remedy):
        LiveState(model, [torch.optim.SGD([model.weight], 0.1)], {})


def test_a_replica_has_no_tensor_with_gaps() -> None:
    model = torch.nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
    config = memckpt.MemckptConfig(redo="eager")
    for mode in ("eager", "lazy"):
        live = LiveState(model, [torch.optim.Adafactor(model.parameters())], {})
        assert choose_redo(config, live, torch.device("cpu"), 1)[0] == mode
        model.weight = torch.nn.Parameter(torch.zeros(4, 2, 3, 6)[..., ::2])


def test_an_optimizer_of_parameters_beside_the_model_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model, temperature = torch.nn.Linear(3, 1), torch.nn.Parameter(torch.zeros(()))
    optimizers = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam([temperature])]
    LiveState(model, optimizers, {})
    assert [record.getMessage() for record in caplog.records if "optimizer 1 (Adam) steps none" in record.getMessage()]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_module_beside_the_model_whose_name_is_used_already_is_refused(wrapped: bool) -> None:
    model = nn.ModuleDict({"encoder": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = torch.compile(model) if wrapped else model
    assert isinstance(given, nn.Module)
    with pytest.raises(UsageError, match=r"found 'encoder': there is another encoder\.weight"):
        LiveState(given, [optimizer], {"encoder": nn.Linear(2, 2)})
    with pytest.raises(UsageError, match=r"found 'a\.b': there is another a\.b\.weight"):
        LiveState(given, [optimizer], {"a": nn.ModuleDict({"b": nn.Linear(2, 2)}), "a.b": nn.Linear(2, 2)})
    LiveState(given, [optimizer], {"encoder": model["encoder"], "other": nn.Linear(2, 2)})
