"""Checkpoints on their way to the writer process: what becomes of them when the memory they are read from changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from memckpt.agent.saving.jobs import Job, WriterJobs
from memckpt.agent.saving.state_copies import Export, Run, carry_on
from memckpt.errors import AgentError
from memckpt.memory.region import Region
from memckpt.processes.helper_process import HelperProcess
from memckpt.protocol.storing import Save, Saved, SaveFailed
from memckpt.state.records import Timeline
from tests.support.cluster.storage_node import Process, spec_of
from tests.support.storage.stored_parts import part_of

T1 = Timeline(1, "a")


def save_of(record: int, url: str) -> Save:
    return Save(url, part_of(record, timeline=T1, node="n"), spec_of(), "ring", 1, {}, 2, None)


@pytest.fixture
def processes() -> list[Process]:
    return []


@pytest.fixture
def jobs(processes: list[Process]) -> Iterator[WriterJobs]:
    def start() -> HelperProcess:
        processes.append(Process())
        return cast("HelperProcess", processes[-1])

    jobs = WriterJobs(start)
    yield jobs
    jobs.close()


def write(jobs: WriterJobs, job: Job, asker: Run | Export) -> list[Any]:
    """Have a job written; the list gets the outcome."""
    outcomes: list[Any] = []

    async def flow() -> None:
        outcomes.append(await jobs.write(job, asker, lambda: 60.0))

    carry_on(flow())
    return outcomes


@pytest.mark.parametrize("position", ["being-written", "waiting"])
def test_what_reads_held_memory_is_given_up_when_that_is_about_to_change(
    jobs: WriterJobs, processes: list[Process], position: str
) -> None:
    run, export = Run("run"), Export("beside", lambda message: None)
    outcomes = {
        asker.url: write(jobs, Job(save_of(1, asker.url), []), asker)
        for asker in ([export, run] if position == "being-written" else [run, export])
    }
    assert jobs.held_record is not None
    jobs.give_up_held()
    assert outcomes == {"run": [None], "beside": [None]}
    assert not jobs.busy
    assert jobs.held_record is None
    assert processes[0].closed


def test_what_has_memory_of_its_own_is_written_all_the_same(jobs: WriterJobs, processes: list[Process]) -> None:
    region = Region.create("copy", 4096)
    held = write(jobs, Job(save_of(1, "run"), []), Run("run"))
    copied = write(jobs, Job(save_of(2, "run"), [region], region), Run("run"))
    jobs.give_up_held()
    assert (held, copied) == ([None], [])
    assert [message.part.record for message in processes[-1].sent] == [2]
    half_written, own = (part_of(record, timeline=T1, node="n") for record in (1, 2))
    assert processes[-1].sent[0].abandoned == (half_written, own), "what was half written is deleted first"
    jobs.finished(Saved(2, 2, 1, 1.0, 1.0))
    assert [type(outcome) for outcome in copied] == [Saved]
    assert region.fd < 0


def test_a_part_that_a_dead_agent_may_have_begun_is_cleared_until_one_is_whole(
    jobs: WriterJobs, processes: list[Process]
) -> None:
    """The last checkpoint of a training is written again under its name, and none comes behind it."""
    for record in (1, 2):
        write(jobs, Job(save_of(record, "run"), []), Run("run"))
        jobs.finished(Saved(record, record, 1, 1.0, 1.0))
    first, second = processes[0].sent
    assert first.abandoned == (first.part,)
    assert second.abandoned == ()


def test_a_job_fails_at_once_where_no_writer_can_be_started() -> None:
    def start() -> HelperProcess:
        raise AgentError("no process")

    region = Region.create("copy", 4096)
    jobs = WriterJobs(start)
    (outcome,) = write(jobs, Job(save_of(1, "run"), [region], region), Run("run"))
    assert isinstance(outcome, SaveFailed)
    assert "cannot be used: no process" in outcome.reason
    assert region.fd < 0
    assert not jobs.busy
