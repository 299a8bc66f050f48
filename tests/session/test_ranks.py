"""Ranks of a job: what they send each other."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from memckpt.errors import MemckptError
from memckpt.session.ranks import Ranks
from tests.support.trainings.engine_harness import Lab


def test_replicas_agree_on_host_tensors_where_the_job_reduces_on_devices_alone(lab: Lab) -> None:
    """As with NCCL: Adam's step counts are in host memory."""

    def body(rank: int) -> None:
        store = f"file://{lab.directory}/store"
        dist.init_process_group("cuda:gloo", init_method=store, rank=rank, world_size=2)
        ranks = Ranks()
        tensor = torch.full((2,), float(rank))
        ranks.broadcast_tensor(tensor, ranks.open_replica_group())
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
