"""What is done with many small tensors at once does to each of them what it would do to one."""

from __future__ import annotations

import mmap
import sys
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import memckpt
from memckpt.capture.by_value import AnchorCopies, Place
from memckpt.capture.copier import HostCopier
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import stop_agent
from memckpt.state.layout import Piece, aligned
from memckpt.state.optimizers import dtype_name
from memckpt.state.redo import tensor_at
from memckpt.state.spec import ITEM_BYTES, OwnerSpec, ParamSpec, StateTensorSpec, TensorSpec


def _placed(shapes: list[tuple[tuple[int, ...], str]], first: int = 0) -> tuple[list[Place], int]:
    places: list[Place] = []
    offset = first
    for shape, dtype in shapes:
        places.append((offset, shape, dtype))
        offset += aligned(prod(shape) * ITEM_BYTES[dtype])
    return places, offset


class _Lab:
    """A large and two small parameters and their optimizer's state, as they would be anchored together."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.params = [nn.Parameter(torch.randn(*shape)) for shape in ((4, 8), (5,), (90, 60))]
        self.optimizer = torch.optim.AdamW(self.params)
        self.step()
        self.specs, self.pieces, self.places = [], [], []
        offset = 0
        for index, param in enumerate(self.params):
            held = self.held(index)
            state = tuple(
                StateTensorSpec(key, tuple(value.shape), "float32", value.shape == param.shape, True)
                for key, value in self.optimizer.state[param].items()
            )
            keys = tuple(self.optimizer.state[param])
            tensor = TensorSpec(f"p{index}", tuple(param.shape), "float32")
            self.specs.append(ParamSpec(tensor, (OwnerSpec(0, 0, state, keys),), False, 0))
            flat = [((prod(one.shape),) if one.dim() else (), dtype_name(one.dtype)) for one in held]
            parts, end = _placed(flat, offset)
            self.pieces.append((Piece(index, 0, param.numel(), offset, end - offset), parts))
            self.places += parts
            offset = end
        self.buffer = mmap.mmap(-1, offset)

    def step(self) -> None:
        for param in self.params:
            param.grad = torch.randn_like(param)
        self.optimizer.step()

    def held(self, index: int) -> list[torch.Tensor]:
        param = self.params[index]
        return [param.detach(), *self.optimizer.state[param].values()]

    def copies(self, mine: tuple[bool, ...] = (True, True, True)) -> AnchorCopies:
        return AnchorCopies(self.pieces, self.params, self.specs, mine, [self.optimizer], HostCopier())

    def copy(self, copies: AnchorCopies) -> bool:
        with torch.no_grad():
            return copies.copy(self.buffer, 0)

    def copied(self) -> list[bool]:
        """Of each parameter, whether all of it is in its place."""
        return [
            all(
                torch.equal(tensor_at(self.buffer, offset, shape, dtype).view(-1), tensor.reshape(-1))
                for (offset, shape, dtype), tensor in zip(parts, self.held(index), strict=True)
            )
            for index, (_, parts) in enumerate(self.pieces)
        ]


def test_anchors_are_those_of_tensors_that_were_replaced_too() -> None:
    lab = _Lab()
    copies = lab.copies()
    assert copies.rest == []
    assert lab.copy(copies)
    assert lab.copied() == [True] * 3
    lab.step()
    lab.params[0].data = torch.randn(8, 4).t()  # other memory, and not contiguous
    lab.params[2].data = torch.randn(60, 90).t()
    lab.optimizer.state[lab.params[0]]["exp_avg"] = torch.randn(4, 8)
    lab.optimizer.load_state_dict(lab.optimizer.state_dict())
    assert lab.copy(copies)
    assert lab.copied() == [True] * 3


@pytest.mark.parametrize(
    "change",
    [
        lambda state, param: state.pop("exp_avg"),
        lambda state, param: state.update(more=torch.zeros(())),
        lambda state, param: state.update(step=3),
        lambda state, param: state.update(exp_avg=state["exp_avg"].double()),
        lambda state, param: state.update(exp_avg=state["exp_avg"][:1]),
        lambda state, param: setattr(param, "data", param.data.to(torch.bfloat16)),
        lambda state, param: setattr(param, "data", param.data[:1]),
    ],
    ids=["gone", "new", "plain", "dtype", "shape", "parameter's dtype", "parameter's shape"],
)
def test_anchors_of_something_else_are_left_to_the_caller(change: Any) -> None:
    lab = _Lab()
    copies = lab.copies()
    change(lab.optimizer.state[lab.params[0]], lab.params[0])
    assert not lab.copy(copies)
    assert not any(lab.buffer[:])
    assert lab.copies().rest == [0]


@pytest.mark.parametrize("mine", [(False, True, True), (True, False, True), (True, True, False), (False, False, False)])
def test_anchors_of_others_are_not_copied(mine: tuple[bool, ...]) -> None:
    """They are another rank's, which writes them into the same slot at the same time: nothing of them may change."""
    lab = _Lab()
    lab.buffer[:] = b"x" * len(lab.buffer)
    assert lab.copy(lab.copies(mine))
    assert lab.copied() == list(mine)
    for (piece, _), copied in zip(lab.pieces, mine, strict=True):
        assert copied or lab.buffer[piece.offset : piece.offset + piece.nbytes] == b"x" * piece.nbytes


def _calls_of_a_commit(layers: int, run_dir: Path) -> int:
    """The number of Python functions that a commit calls in the middle of a training."""
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
    optimizer = torch.optim.AdamW(net.parameters())
    config = memckpt.MemckptConfig(redo="lazy", storage=None)
    calls: list[int] = []

    def count(frame: FrameType, event: str, argument: object) -> None:
        calls[-1] += event == "call"

    try:
        with memckpt.attach(net, optimizer, run_dir=run_dir, config=config) as session:
            session.restore()
            for _ in range(40):
                net(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                calls.append(0)
                sys.setprofile(count)
                session.commit()
                sys.setprofile(None)
    finally:
        stop_agent(AgentAddress.of(run_dir))
    return min(calls[24:])  # some commits do more: they look for what may have come


def test_a_commit_calls_no_python_function_for_each_tensor(tmp_path: Path) -> None:
    few, many = (_calls_of_a_commit(layers, tmp_path / str(layers)) for layers in (8, 72))
    assert many - few < 128 / 2  # tensors more; each eighth is anchored


@pytest.mark.parametrize("width", [16, 3], ids=["side by side", "apart"])
def test_a_gradient_that_is_changed_unseen_is_found_among_many(width: int, tmp_path: Path) -> None:
    """Apart: gradients of 36 and 12 bytes leave gaps in their slot."""
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)), nn.Linear(width, 300))
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    try:
        with memckpt.attach(net, optimizer, run_dir=tmp_path, config=memckpt.MemckptConfig(storage=None)) as session:
            session.restore()
            for step in range(8):
                net(torch.ones(1, width)).square().sum().backward()
                if step == 6:  # later than the records that are compared in full
                    assert session.tap_reason == "gradients are taken as backward produces them"
                    assert net[4].bias.grad is not None
                    net[4].bias.grad.data[width - 1] += 1
                optimizer.step()
                optimizer.zero_grad()
                session.commit()
            assert "the gradient of 4.bias was changed" in session.tap_reason
    finally:
        stop_agent(AgentAddress.of(tmp_path))
