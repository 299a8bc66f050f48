"""DDP trainings that are killed, resumed, and compared with an undisturbed one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from memckpt.config import CompressionConfig
from tests.support.trainings.ddp_cases import AnyJob, Job, check_verdicts, run
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.rank_group import Death, check_same, fresh_directory, results

_references: dict[Any, list[Any]] = {}


def reference(lab: Lab, job: Job) -> list[Any]:
    """The same training undisturbed, without memckpt."""
    key = (
        job.world_size,
        job.hook,
        job.users_hook,
        tuple(job.halved),
        tuple(sorted(job.ddp)),
        job.accumulate,
        job.by_hand,
        job.own_tables,
    )
    key += (job.averages, job.flip, job.last_step, job.dtype, job.config.compression)
    if key not in _references:
        undisturbed = replace(job, directory=fresh_directory(lab), run_dir=None, deaths=(), hang=None)
        assert run(lab, undisturbed) == [0] * job.world_size
        _references[key] = results(undisturbed)
    return _references[key]


def job_of(lab: Lab, redo: str = "lazy", compression: CompressionConfig | None = None, **settings: Any) -> Job:
    return Job(fresh_directory(lab), lab.run_dir, config(redo, compression=compression), **settings)


def die_in_turn(
    lab: Lab,
    job: AnyJob,
    deaths: Sequence[Death],
    run: Callable[[Lab, AnyJob], list[int]],
    unchecked: Sequence[str] = (),
) -> AnyJob:
    """Run an attempt for each death, and a last one to its end; the verdicts of all resumes are checked.

    Args:
        run: runs one attempt; returns the exit codes of its ranks.
        unchecked: reasons for which the last resume may be unproved.

    Returns:
        The last attempt.
    """
    attempts: list[AnyJob] = []
    for number, death in enumerate(deaths):
        attempts.append(replace(job, directory=fresh_directory(lab), number=number, deaths=[death]))
        codes = run(lab, attempts[-1])
        killed = range(job.world_size) if death.who == "all" else [death.who]
        assert all(codes[int(rank)] == -9 for rank in killed), codes
        check_verdicts(attempts, died=True)
    last = replace(job, directory=fresh_directory(lab), number=len(deaths))
    assert run(lab, last) == [0] * job.world_size
    check_verdicts([*attempts, last], died=False, reasons=unchecked)
    return last


def check_results(found: Sequence[Any], expected: Sequence[Any], resumed: int) -> None:
    """Check that all ranks have resumed at this step, and have the losses and the state of the undisturbed ones."""
    assert [each["resumed"] for each in found] == [resumed] * len(found), "the last attempt went on at another step"
    check_same(found, expected)


def survives(lab: Lab, job: Job, deaths: list[Death], resumed: list[int], unchecked: Sequence[str] = ()) -> Job:
    """Each attempt ends as planned, each next one goes on at the expected step, the last result is the reference's."""
    expected = reference(lab, job)
    if job.config.redo == "eager" and not job.nodes:
        lab.start_agent()
    last = die_in_turn(lab, job, deaths, run, unchecked)
    check_results(results(last), expected, resumed[-1])
    return last
