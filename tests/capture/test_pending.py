"""Gradients that wait between two batches: which of them keep a batch's end from being a restore point."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.trainings.engine_child import config, kill_self
from tests.support.trainings.engine_harness import Ended, Lab
from tests.support.trainings.engine_steps import (
    SPARSE_ZEROED_IN_PLACE,
    TWO_PACES,
    ZEROED_IN_PLACE,
    recycled,
    unsynchronized,
)
from tests.support.trainings.engine_training import Case


def committed(attempts: Sequence[Ended]) -> dict[int, bool]:
    """Whether each step was a restore point."""
    return {each["step"]: each["done"] for attempt in attempts for each in attempt.of("commit")}


def check_every(period: int, attempts: Sequence[Ended]) -> None:
    """Every so many steps there was a restore point, and nowhere else."""
    assert all(done == (step % period == 0) for step, done in committed(attempts).items())


@pytest.mark.promise(
    "exact with optimizers that accumulate at different intervals, deferred reductions, zero gradients, discarded "
    "gradients"
)
@pytest.mark.parametrize("redo", ["lazy", "eager", "snapshot"])
def test_gradients_wait_for_the_optimizer_that_owns_them(lab: Lab, redo: str) -> None:
    """Another one's step is none of theirs."""
    kills = [("after commit", 6), ("backward", 12), ("after commit", 15)]
    attempts = lab.survives(TWO_PACES, config(redo), kills, expected=[4, 8, 12])
    check_every(4, attempts)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_gradients_wait_whose_reduction_is_put_off(lab: Lab, kind: str) -> None:
    attempts = lab.survives(
        unsynchronized(kind), config("lazy"), [("after commit", 5), ("after commit", 10)], expected=[3, 9]
    )
    check_every(3, attempts)


@pytest.mark.promise(
    "which parameters have a gradient between two steps, and its values where up to 64 KiB of gradients are "
    "there, or where they are neither dropped nor zeroed before the next backward"
)
@pytest.mark.parametrize("redo", ["lazy", "snapshot"])
@pytest.mark.parametrize("case", [ZEROED_IN_PLACE, SPARSE_ZEROED_IN_PLACE], ids=lambda case: case.name)
def test_gradients_of_zeros_are_zeros_after_a_resume(lab: Lab, case: Case, redo: str) -> None:
    # Before the layer was used for the first time, and behind its use.
    lab.survives(case, config(redo), [("after commit", 2), ("after commit", 5), ("forward", 11)])


@pytest.mark.parametrize("how", ["none", "zero", "by hand"])
def test_gradients_that_are_thrown_away_do_not_wait(lab: Lab, how: str) -> None:
    """Once that was seen, which is when the second batch begins; and after a resume it is known."""
    case = recycled(how)
    attempts = lab.survives(case, config("lazy"), [("after commit", 2), ("after commit", 7), ("backward", 12)])
    assert not committed(attempts[:1])[1]
    assert all(done for step, done in committed(attempts).items() if step > 1)
    assert "left over" not in "".join(each.log for each in attempts)


def test_gradients_that_are_used_after_all_are_told(lab: Lab) -> None:
    case = recycled("none", used_at=9)
    ended = lab.train(case, config("lazy"), last_step=14)
    assert "RMSprop that were left over at the end of a batch, and usually discarded, were used" in ended.log
    # From there on they wait, and here no step uses them before the batch's end.
    assert {step for step, done in committed([ended]).items() if not done} == {1, *range(9, 15)}
    lab.stop()


def test_gradients_that_are_used_after_a_resume_are_told(lab: Lab) -> None:
    """The resumed process has zeros in their place, and sees that nobody throws them away."""
    case = recycled("none", used_at=9)
    lab.train(case, config("lazy"), actions={("after commit", 8): kill_self})
    ended = lab.train(case, config("lazy"), last_step=10)
    assert ended.restored_step == 8
    assert "were used: a resume from that batch would not be exact" in ended.log
    lab.stop()
