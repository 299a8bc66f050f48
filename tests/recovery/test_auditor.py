"""What the auditor takes for a difference: bits on a CPU, more than rounding where another device has computed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memckpt.agent.auditing import Auditing, _Watched
from memckpt.processes.helper_process import AuditorProcess
from memckpt.protocol.audit import Audited, ForgetAudits
from memckpt.protocol.trainer import Cleared
from memckpt.recovery.auditor import _distance
from memckpt.state.layout import Piece

STEPS = 8
VALUES = torch.randn(4096, generator=torch.Generator().manual_seed(3))


def rounded(values: torch.Tensor) -> torch.Tensor:
    """As another device may have made them in some steps: the last places differ."""
    return values * (1 + torch.finfo(values.dtype).eps * torch.linspace(-4, 4, len(values)))


@pytest.mark.parametrize(("steps", "expected"), [(0, True), (STEPS, False)])
def test_rounding_is_a_difference_on_the_same_device_only(steps: int, expected: bool) -> None:
    assert (_distance(rounded(VALUES), VALUES, steps) > 0) == expected


@pytest.mark.parametrize("factor", [1 - 1e-2 * 1e-2 * STEPS, 1.001])
def test_a_weight_decay_that_was_left_out_is_more_than_rounding(factor: float) -> None:
    assert _distance(VALUES * factor, VALUES, STEPS) > 0


def test_one_element_that_was_changed_is_more_than_rounding() -> None:
    changed = VALUES.clone()
    changed[1234] *= 1.25
    assert _distance(changed, VALUES, STEPS) > 0


def test_nans_and_numbers_that_are_flushed_to_zero_are_no_difference() -> None:
    odd = torch.tensor([math.nan, 1e-42, 0.0, 1.0])
    assert _distance(odd, torch.tensor([-math.nan, 0.0, -0.0, 1.0]), 0) == 0
    assert _distance(odd, torch.tensor([1.0, 0.0, 0.0, 1.0]), STEPS) > 0


@pytest.mark.parametrize(("found", "held"), [(None, VALUES), (VALUES, VALUES[:7]), (3, 4), (3, 3.0), (None, 0)])
def test_what_cannot_be_compared_is_as_far_as_can_be(found: object, held: object) -> None:
    assert _distance(found, held, STEPS) == math.inf


class Ended(AuditorProcess):
    """Stands for the process: what the agent sends is kept, and nothing is started."""

    def __init__(self, *_: Any) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any, fds: Any) -> None:
        self.sent.append(message)

    def close(self) -> None:
        pass


def auditing_of(watched: _Watched, monkeypatch: pytest.MonkeyPatch) -> tuple[Auditing, Ended, list[Any]]:
    found: list[Any] = []
    loop: Any = SimpleNamespace(clock=lambda: 0.0)
    auditing = Auditing(loop, lambda ranks, drift: found.append(drift))
    process = Ended()
    monkeypatch.setattr(auditing, "_process", process)
    monkeypatch.setattr(auditing, "_ready", True)
    monkeypatch.setattr(auditing, "_share", 1.0)
    auditing._watched[(0,)] = watched
    return auditing, process, found


def watched_piece(metas: dict[int, bytes]) -> tuple[_Watched, Piece]:
    piece = Piece(0, 0, 4, 0, 16)
    layout = SimpleNamespace(state_bytes=64, due=lambda record: [piece])
    generation: Any = SimpleNamespace(
        number=3, base=0, spec=SimpleNamespace(period=4), layout=layout, ledger=SimpleNamespace(metas=metas)
    )
    pieces = frozenset({(0, 0)})
    return _Watched(7, generation, False, pieces, hurried=True, left=set(pieces), whole=True, known=True), piece


def test_audits_that_it_is_too_late_for_are_ended_and_due_again(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, piece = watched_piece({})
    auditing, process, found = auditing_of(watched, monkeypatch)
    watched.began, watched.sent, watched.running = 1, 12, {12: [piece]}
    auditing._go_on(watched, 20)
    assert not watched.running
    assert not auditing._busy
    assert watched.due == {(0, 0)}
    assert process.sent == [ForgetAudits(7)]
    # The answer to an audit that has ended is one to nothing.
    auditing._received(Audited(7, 12, 0.0, tensor="weight", ulp=3.0))
    assert not found


def test_a_redo_that_raises_is_a_finding_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, piece = watched_piece(dict.fromkeys(range(20), b"meta"))
    auditing, _, found = auditing_of(watched, monkeypatch)
    watched.running = {12: [piece]}
    auditing._received(Audited(7, 12, 0.0, tensor="weight", ulp=math.inf, problem="KeyError: 'exp_avg'"))
    assert len(found) == 1
    assert "of weight cannot be redone: KeyError: 'exp_avg'" in str(found[0])
    watched.running = {13: [piece]}
    auditing._received(Audited(7, 13, 0.0, problem="ImportError: no module"))
    assert found[1:] == [Cleared(3, whole=False)], "what cannot be redone here is said not to be whole"
