"""Ranks of a job: what they send each other, and what their launch has been told."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from memckpt.config import ResumeChoice
from memckpt.config.arguments import LAUNCHER, RESTART_COUNT
from memckpt.errors import MemckptError
from memckpt.session.ranks import Launch, Ranks
from tests.support.trainings.engine_harness import Lab


def test_replicas_agree_on_host_tensors_where_the_job_reduces_on_devices_alone(lab: Lab) -> None:
    """As with NCCL: Adam's step counts are in host memory."""

    def body(rank: int) -> None:
        store = f"file://{lab.directory}/store"
        dist.init_process_group("cuda:gloo", init_method=store, rank=rank, world_size=2)
        ranks = Ranks()
        tensor = torch.full((2,), float(rank))
        ranks.broadcast_tensor(tensor, 0, ranks.open_groups(ranks.groups))
        assert tensor.tolist() == [0.0, 0.0]
        dist.destroy_process_group()

    children = [lab.fork(partial(body, rank), f"rank-{rank}") for rank in range(2)]
    for child in children:
        assert child.wait() == 0, child.log.read_text()


def test_an_error_of_the_system_on_one_rank_is_one_on_all(lab: Lab) -> None:
    def body(rank: int) -> None:
        store = f"file://{lab.directory}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)

        def work() -> None:
            if rank == 1:
                raise OSError("no space left")

        expected = (MemckptError, "rank 1: OSError: no space") if rank == 0 else (OSError, "no space")
        with pytest.raises(expected[0], match=expected[1]):
            Ranks().together(work)
        dist.destroy_process_group()

    children = [lab.fork(partial(body, rank), f"rank-{rank}") for rank in range(2)]
    for child in children:
        assert child.wait() == 0, child.log.read_text()


@pytest.mark.parametrize("resume", ["never", 4])
def test_a_launch_obeys_a_start_over_until_an_attempt_has_committed_twice(
    resume: ResumeChoice | int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(restarts: int, commits: int) -> ResumeChoice | int:
        monkeypatch.setenv(RESTART_COUNT, str(restarts))
        monkeypatch.setattr(Launch, "_asked", set())  # another process
        launch = Launch(tmp_path, Ranks())
        resolved = launch.resolve(resume)
        assert launch.resolve(resume) == resume, "the process decides anew"
        for _ in range(commits):
            launch.note_obeyed(attempt=7)
        return resolved

    assert [start(restarts, 1) for restarts in range(3)] == [resume] * 3
    assert start(3, 5) == resume
    monkeypatch.setattr(Launch, "_asked", set())
    assert Launch(tmp_path, Ranks()).resolve("exact") == "exact"
    assert [start(restarts, 0) for restarts in (4, 5)] == ["auto"] * 2
    monkeypatch.setattr(Launch, "_asked", set())
    launch = Launch(tmp_path, Ranks())
    assert launch.resolve(resume) == "auto"
    assert launch.settle("auto", newest=8) == launch.settle("auto", newest=7) == "auto"
    assert launch.settle("auto", newest=6) == resume, "nothing is left of the attempt that has obeyed"
    assert start(0, 0) == resume, "a launch by hand of the same parent"
    monkeypatch.setenv(LAUNCHER, "1")
    assert start(6, 2) == resume, "another launch"
    assert start(7, 0) == "auto"
