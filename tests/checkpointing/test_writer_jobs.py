"""Checkpoints on their way to the writer process: what becomes of them when the memory they are read from changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from memckpt.checkpointing.writer_jobs import Job, WriterJobs
from memckpt.memory.region import Region
from memckpt.processes.helper_process import HelperProcess
from memckpt.protocol.trainer import (
    Saved,
    SaveFailed,
)
from memckpt.protocol.writer import (
    Save,
)
from memckpt.state.records import Timeline
from memckpt.storage.format import Part
from tests.support.cluster.storage_node import Process, spec_of

T1 = Timeline(1, "a")


def part_of(record: int) -> Part:
    return Part(2, T1, record, record, 1, (0,), "n", True, 0.0)


def save_of(record: int, url: str) -> Save:
    return Save(url, part_of(record), spec_of(), "ring", 1, {}, 2, None)


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


@pytest.mark.parametrize("position", ["being-written", "waiting"])
def test_whoever_waits_for_what_is_held_is_told_when_it_is_about_to_change(
    jobs: WriterJobs, processes: list[Process], position: str
) -> None:
    answers: list[Any] = []
    own: list[Any] = []
    run_s_own = save_of(1, "run"), own.append, False
    waited_for = save_of(2, "beside"), answers.append, True
    for save, done, waited in [waited_for, run_s_own] if position == "being-written" else [run_s_own, waited_for]:
        jobs.submit(Job(save, []), lambda: 60.0, done, waited)
    jobs.give_up_held()
    assert [(type(answer), answer.step) for answer in answers] == [(SaveFailed, 2)]
    assert "training has resumed" in answers[0].reason
    assert own == [], "memory has it; a failure would only worry people"
    assert not jobs.busy
    assert processes[0].closed


def test_what_has_memory_of_its_own_is_written_all_the_same(jobs: WriterJobs, processes: list[Process]) -> None:
    answers: list[Any] = []
    region = Region.create("snapshot", 4096)
    jobs.submit(Job(save_of(1, "run"), []), lambda: 60.0, answers.append)
    jobs.submit(Job(save_of(2, "run"), [region], region), lambda: 60.0, answers.append)
    jobs.give_up_held()
    assert [message.part.record for message in processes[-1].sent] == [2]
    assert processes[-1].sent[0].abandoned == (part_of(1),), "what was half written is deleted first"
    jobs.finished(Saved(2, 2, 1, 1.0, 1.0))
    assert [type(answer) for answer in answers] == [Saved]
    assert region.fd < 0
