"""Optimizer classes that only the script's own process finds; what is held of their steps gets to storage, too."""

from __future__ import annotations

import os
import runpy
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memckpt.capture.live_state import LiveState
from memckpt.config import MemckptConfig
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import stop_agent
from memckpt.session.mode import choose_redo
from memckpt.storage.catalog import read_catalog
from memckpt.storage.export import export
from memckpt.storage.local_store import LocalStore
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.engine_optimizers import Momentum

STEPS = 12
LIMIT_SECONDS = 60.0

OPTIMIZER = """
import torch

class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                held = self.state[param]
                held["mean"] = held.get("mean", torch.zeros_like(param)).lerp(param.grad, 0.1)
                param.add_(held["mean"].sign(), alpha=-group["lr"])
"""

TRAINING = f"""
import os, signal, sys, torch, memckpt

run_dir, dies = sys.argv[1], int(sys.argv[2])
torch.manual_seed(3)
net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
optimizer = Signs(net.parameters())
config = memckpt.MemckptConfig(redo="lazy", agent=memckpt.AgentConfig(linger_seconds=60))
session = memckpt.attach(net, optimizer, run_dir=run_dir, config=config)
session.restore()
for step in range(session.held.step + 1 if session.held else 1, {STEPS} + 1):
    net(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    session.commit()
    torch.save(net.state_dict(), f"{{run_dir}}-{{step}}.pt")
    if step == dies:
        os.kill(os.getpid(), signal.SIGKILL)
session.close()
"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    own = Lab(tmp_path)
    yield own
    stop_agent(AgentAddress.of(own.run_dir))
    own.close()


def run_script(lab: Lab, *, dies: int = 0) -> tuple[int, str]:
    """Its exit code, and what it has printed."""
    script = lab.directory / "scripts" / "train.py"

    def body() -> None:
        os.chdir("/")
        sys.argv = [str(script), str(lab.run_dir), str(dies)]
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")

    child = lab.fork(body, "train")
    return child.wait(LIMIT_SECONDS), child.log.read_text()


def write_scripts(lab: Lab, *, own_module: bool, optimizer: str = OPTIMIZER) -> None:
    scripts = lab.directory / "scripts"
    scripts.mkdir()
    if own_module:
        (scripts / "signs_of_a_script.py").write_text(optimizer)
        (scripts / "train.py").write_text(f"from signs_of_a_script import Signs\n{TRAINING}")
    else:
        (scripts / "train.py").write_text(optimizer + TRAINING)


def stored(lab: Lab, step: int) -> dict[str, torch.Tensor]:
    """The model of a checkpoint that the agent brings to storage by itself."""
    store = LocalStore(lab.run_dir / "storage")
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (complete := read_catalog(store).complete) or complete[0].step < step:
        log = AgentAddress.of(lab.run_dir).log_path.read_text()
        assert "is not in storage" not in log, log[-3000:]
        assert time.monotonic() < deadline, log[-3000:]
        select.select([], [], [], 0.05)
    assert complete[0].step == step
    export(store, complete[0], lab.directory / "exported.pt", "torch")
    found: dict[str, torch.Tensor] = torch.load(lab.directory / "exported.pt", weights_only=True)["model"]
    return found


def assert_same(found: dict[str, torch.Tensor], lab: Lab, step: int) -> None:
    expected = torch.load(f"{lab.run_dir}-{step}.pt", weights_only=True)
    assert dict.fromkeys(expected, True) == {name: torch.equal(found[name], expected[name]) for name in expected}


#: Its step calls a function that no other process can be given.
_CALLING = OPTIMIZER.replace(
    '{"lr": lr})', '{"lr": lr})\n        self.mean = lambda old, new: old.lerp(new, 0.1)'
).replace(
    'held.get("mean", torch.zeros_like(param)).lerp(param.grad, 0.1)',
    'self.mean(held.get("mean", torch.zeros_like(param)), param.grad)',
)


@pytest.mark.parametrize(("own_module", "optimizer"), [(False, OPTIMIZER), (True, _CALLING)], ids=["class", "function"])
def test_the_end_of_a_training_whose_steps_no_other_process_can_redo(
    lab: Lab, own_module: bool, optimizer: str
) -> None:
    write_scripts(lab, own_module=own_module, optimizer=optimizer)
    code, said = run_script(lab)
    assert code == 0, said
    assert "Signs: no other process can import this optimizer class" in said
    assert_same(stored(lab, STEPS), lab, STEPS)


def test_a_training_that_was_killed_behind_its_last_step(lab: Lab) -> None:
    """What is started again has nothing left to do, and is the only one that can redo the step."""
    write_scripts(lab, own_module=False)
    code, said = run_script(lab, dies=STEPS)
    assert code == -signal.SIGKILL, said
    code, said = run_script(lab)
    assert code == 0, said
    assert f"at step {STEPS}" in said
    assert_same(stored(lab, STEPS), lab, STEPS)


def test_a_killed_training_with_a_class_of_a_module_beside_the_script(lab: Lab) -> None:
    """Nobody but the script's process has the script's directory on its path."""
    write_scripts(lab, own_module=True)
    code, said = run_script(lab, dies=8)
    assert code == -signal.SIGKILL, said
    assert "no other process" not in said
    assert_same(stored(lab, 8), lab, 8)


#: What torch offers on devices only; here the script's process has it on the host, and no other process has.
_CAPTURABLE = """
import sys
import torch

sys.modules["torch.optim.adam"]._get_capturable_supported_devices = lambda *given, **more: ["cpu"]

def Signs(params):
    return torch.optim.AdamW(params, lr=torch.tensor(1e-2), capturable=True, foreach=True)
"""


def test_capturable_steps_of_a_killed_training_get_to_storage(lab: Lab) -> None:
    """They are redone on the host, and equal but for rounding."""
    write_scripts(lab, own_module=False, optimizer=_CAPTURABLE)
    code, said = run_script(lab, dies=8)
    assert code == -signal.SIGKILL, said
    torch.testing.assert_close(stored(lab, 8), torch.load(f"{lab.run_dir}-8.pt", weights_only=True))


class OfDevices(Momentum):
    """Its kernels are for devices only."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if any(param.device.type == "cpu" for group in self.param_groups for param in group["params"]):
            raise NotImplementedError("no kernel for the host")


def test_a_class_with_kernels_for_devices_only_is_redone_in_the_training_alone() -> None:
    model = torch.nn.Linear(2, 3, device="meta")
    only_here = [LiveState(model, [make(model.parameters())], {}).redone_only_here for make in (OfDevices, Momentum)]
    assert only_here == [["OfDevices"], []]
    live = LiveState(model, [OfDevices(model.parameters())], {})
    mode, reason = choose_redo(MemckptConfig(redo="eager"), live, torch.device("meta"), 1)
    assert mode == "lazy"
    assert "steps of OfDevices need a device" in reason
