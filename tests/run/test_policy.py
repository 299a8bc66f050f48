"""What follows an end: finished, restarted after a pause, or given up."""

from __future__ import annotations

import signal

import pytest

from memckpt_run.supervisor import End, NoRestart, Policy, Restart, Verdict
from tests.support.cluster.made_up_time import MadeUp


def judged(ends: list[End], restarts: int = 100, lifetime: float = 1.0) -> list[Verdict]:
    clock = MadeUp()
    policy = Policy(restarts, clock)
    verdicts = []
    for end in ends:
        policy.started()
        clock.now += lifetime
        verdicts.append(policy.ended(end, stopped=False))
    return verdicts


@pytest.mark.promise("exit status 0")
def test_status_0_is_the_end_and_so_is_a_signal_that_asks_for_it() -> None:
    assert Policy(3).ended(End(0, 5), stopped=True) == NoRestart()
    assert Policy(3).ended(End(1, 5), stopped=True) == NoRestart()
    assert Policy(3).ended(End(-signal.SIGTERM, 5), stopped=False) == Restart(0.0)


def test_a_restart_that_cannot_be_made_is_tried_ever_more_seldom() -> None:
    clock = MadeUp()
    policy = Policy(3, clock)
    policy.started()
    policy.ended(End(-signal.SIGKILL, 5), stopped=False)
    pauses = []
    for _ in range(8):
        pauses.append(policy.not_started())
        clock.now += pauses[-1]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    policy.started()
    assert policy.not_started() == 1


@pytest.mark.promise("an error: another status, or a signal such as SIGSEGV or SIGABRT")
@pytest.mark.parametrize("code", [1, 77, -signal.SIGSEGV, -signal.SIGABRT])
def test_an_error_that_repeats_at_the_same_step_is_not_tried_again(code: int) -> None:
    for step in (None, 0, 41):
        first, second = judged([End(code, step), End(code, step)])
        assert first == Restart(0.0)
        assert isinstance(second, NoRestart)
        assert second.reason is not None
        assert ("before its first step" if step is None else f"at step {step} twice") in second.reason


@pytest.mark.promise("a kill from outside (SIGKILL, the OOM killer)")
@pytest.mark.parametrize(
    "ends",
    [
        [End(1, 41), End(1, 42)],
        [End(1, 41), End(2, 41)],
        [End(1, 41), End(-signal.SIGKILL, 41), End(1, 41)],
        [End(-signal.SIGKILL, 41), End(-signal.SIGKILL, 41)],
        [End(-signal.SIGTERM, 41), End(-signal.SIGTERM, 41)],
        [End(1, None, known=False)] * 2,
        [End(-signal.SIGKILL, None, known=False)] * 40,
    ],
)
def test_other_ends_are_followed_by_a_restart(ends: list[End]) -> None:
    assert all(isinstance(each, Restart) for each in judged(ends))


@pytest.mark.promise("any failure, after `--restarts N` restarts (default 100)")
def test_restarts_have_a_limit() -> None:
    ends = [End(1, step) for step in range(4)]
    *restarted, last = judged(ends, restarts=3)
    assert all(isinstance(each, Restart) for each in restarted)
    assert isinstance(last, NoRestart)
    assert "3 times" in str(last.reason)
    assert isinstance(judged(ends[:1], restarts=0)[0], NoRestart)


def test_a_kill_that_repeats_at_the_same_step_is_given_up_in_the_end() -> None:
    killed = End(-signal.SIGKILL, None)
    *restarted, last = judged([killed] * 20)
    assert all(isinstance(each, Restart) for each in restarted)
    assert isinstance(last, NoRestart)
    assert "SIGKILL before its first step 20 times in a row" in str(last.reason)
    assert all(isinstance(each, Restart) for each in judged([killed] * 40, lifetime=61.0)), "it may have got further"
    assert isinstance(judged([*[killed] * 19, End(-signal.SIGKILL, 1), killed])[-1], Restart)


def test_pauses_grow_while_it_gets_nowhere_and_progress_or_a_long_life_ends_them() -> None:
    def pauses(verdicts: list[Verdict]) -> list[float]:
        assert all(isinstance(each, Restart) for each in verdicts)
        return [each.pause for each in verdicts if isinstance(each, Restart)]

    nowhere = End(-signal.SIGKILL, 7)
    assert pauses(judged([nowhere] * 6)) == [0, 0, 1, 2, 4, 8]
    assert max(pauses(judged([nowhere] * 19))) == 60
    assert pauses(judged([End(-signal.SIGKILL, step) for step in range(6)])) == [0] * 6
    assert pauses(judged([nowhere] * 6, lifetime=61)) == [0] * 6
