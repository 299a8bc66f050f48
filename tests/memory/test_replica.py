"""The replica in an agent's memory: it goes forward record by record, and never waits for one that cannot come."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
import torch

from memckpt.errors import AgentError
from memckpt.memory.generation import make_generation
from memckpt.memory.region import Allowance
from memckpt.protocol.channel import Message
from memckpt.protocol.trainer import Commit, GenerationCommit
from memckpt.state import codec
from memckpt.state.optimizers import attributes, hyperparameters
from memckpt.state.records import RecordMeta, SubStep, encode_meta
from memckpt.state.spec import OptimizerSpec, OwnerSpec, ParamSpec, StateSpec, TensorSpec

PERIOD = 8


class Job:
    """One parameter that SGD lowers by one at each record; of two ranks, one is here."""

    def __init__(self) -> None:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))], lr=1.0)
        self._groups = codec.encode(hyperparameters(optimizer))
        spec = StateSpec(
            params=(ParamSpec(TensorSpec("w", (4,), "float32"), (OwnerSpec(0, 0, ()),), False, 0),),
            optimizers=(OptimizerSpec("torch.optim", "SGD", codec.encode(attributes(optimizer)[0]), (1,), 1),),
            static=(),
            by_value=(),
            mode="eager",
            period=PERIOD,
            slots=3,
            local_ranks=(0,),
            world_size=2,
        )
        self.told: list[Message] = []
        self.held = make_generation(1, spec, Allowance(), threads=1, notify=self.told.append)
        self.held.start(0, GenerationCommit(1, 0, 0, b"state"))
        assert self.held.replica is not None
        self.replica = self.held.replica

    def commit(self, record: int) -> None:
        layout = self.held.layout
        start = layout.slot_offset(record) + layout.gradient_offset(0, 0, 0)
        self.held.regions.slots.map[start : start + 16] = struct.pack("4f", *[1.0] * 4)
        self.held.ring.seal(record, 0)
        meta = encode_meta(RecordMeta(record, record - 1, False, (SubStep(0, 0, self._groups),)))
        self.held.commit(0, Commit(1, record, record, b"state", meta))

    @property
    def value(self) -> float:
        region = self.held.regions.replica
        return float(struct.unpack_from("f", region.map, 0)[0])


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.held.close()


def test_what_stands_still_is_saved_record_by_record(job: Job) -> None:
    """With shards on other nodes, whose newest record may be one before, two are written, one after the other."""
    for record in (1, 2, 3):
        job.commit(record)
    assert job.replica.freeze() <= 2  # the last one may be there on this node alone
    assert job.held.producible()[-2:] == [2, 3]
    for record in (2, 3):
        job.replica.advance_to(record)
        assert job.value == -record


def test_a_record_that_is_not_there_is_an_error(job: Job) -> None:
    job.commit(1)
    with pytest.raises(AgentError, match="cannot get to record 3: record 2 is not there"):
        job.replica.advance_to(3)


def test_what_lies_beyond_a_record_that_is_gone_back_to_is_forgotten(job: Job) -> None:
    for record in (1, 2, 3):
        job.commit(record)
    job.replica.freeze()
    job.held.settle(2)
    assert job.value == -2
    with pytest.raises(AgentError, match="record 3 is not there"):
        job.replica.advance_to(3)
