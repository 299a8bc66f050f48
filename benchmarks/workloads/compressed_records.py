"""Compressors and records of compressed gradients in one process: local parts, encodings and batches of a log."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.workloads.gpt import BATCH, Trainee, Training, make_model
from examples.gpt import GPT, Corpus, GPTConfig
from memckpt import compression
from memckpt.capture.live_state import LiveState
from memckpt.capture.spec_request import SpecRequest
from memckpt.compression.reduction import Bucket, Encoded, Reducer
from memckpt.config import CompressionConfig, LossyConfig, TopK
from memckpt.recovery.from_storage import StoredState
from memckpt.state import codec, encodings
from memckpt.state.encoding_spec import GradientEncoding, encoded_bytes
from memckpt.state.layout import Layout
from memckpt.state.optimizers import hyperparameters
from memckpt.state.records import RecordMeta, SubStep, Timeline, encode_meta
from memckpt.storage.batch import FileTensor, RecordCopy, write_batch
from memckpt.storage.catalog import read_catalog
from memckpt.storage.chain import stored_points
from memckpt.storage.format import FORMAT_VERSION, Batch, decode_node_state
from memckpt.storage.local_store import LocalStore
from memckpt.storage.store import Store

#: Shapes of GPT-2 (Radford et al., 2019), for sizes that are computed.
GPT2 = {
    "GPT2-S": GPTConfig(layers=12, width=768, heads=12, context=1024, vocabulary=50_257),
    "GPT2-M": GPTConfig(layers=24, width=1024, heads=16, context=1024, vocabulary=50_257),
    "GPT2-L": GPTConfig(layers=36, width=1280, heads=20, context=1024, vocabulary=50_257),
}
#: Bytes of a rank's state in a record: generators and groups, about.
_RANK_STATE = bytes(8 << 10)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A process group of one rank, in which compressors do all but send."""
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def bucket_of(params: Sequence[Tensor], gradients: Sequence[Tensor]) -> Bucket:
    """One bucket, as DDP makes it: gradients one behind the other."""
    buffer = torch.cat([gradient.reshape(-1) for gradient in gradients])
    return Bucket(params, buffer.split([gradient.numel() for gradient in gradients]), buffer)


def averaged(reducer: Reducer, bucket: Bucket) -> Encoded:
    """Average a bucket; returns its encodings."""
    found: Encoded = reducer.average(bucket, True).wait()
    return found


def positions(numel: int, parts: Sequence[Tensor]) -> Tensor:
    """Positions of a sparse gradient's entries."""
    count, by_block, within, _ = parts
    marks = [count, by_block, within, torch.ones(within.numel())]
    encoding = GradientEncoding("sparse", within.numel())
    return encodings.decode(encoding, marks, numel, torch.float32).nonzero().view(-1)


def union_sizes(size: str, ratio: float, steps: int, counted: int) -> dict[int, list[float]]:
    """Entries of the union of the top-k of 1, 2, 4, 8 and 16 ranks, over those of one, in the last `counted` steps.

    One process trains in place of 16 ranks, with data and left-out parts of each. Needs a process group of one rank.
    """
    model = make_model(size)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
    corpus = Corpus(model.config.context)
    reducers = [compression.reducer_for(TopK(ratio=ratio), params) for _ in range(16)]
    found: dict[int, list[float]] = {ranks: [] for ranks in (1, 2, 4, 8, 16)}
    for step in range(steps):
        chosen: dict[int, Tensor] = {}
        total, one = torch.zeros(model.numel), 0
        for rank, reducer in enumerate(reducers, 1):
            bucket = bucket_of(params, torch.autograd.grad(model.loss(*corpus.sample(BATCH)), params))
            for at, parts in enumerate(averaged(reducer, bucket)):
                if parts is not None:
                    numel = params[at].numel()
                    chosen.setdefault(at, torch.zeros(numel, dtype=torch.bool))[positions(numel, parts)] = True
            total += bucket.buffer
            union = sum(int(mark.sum()) for mark in chosen.values())
            one = one or union
            if rank in found and step >= steps - counted:
                found[rank].append(union / one)
        for param, mean in zip(params, (total / len(reducers)).split([each.numel() for each in params]), strict=True):
            param.grad = mean.view_as(param)
        optimizer.step()
    return found


# Sizes that are computed


@dataclass(frozen=True)
class Computed:
    """Bytes per step, from the encoding alone.

    Attributes:
        numel: number of parameters.
        gradients: a record's gradients, at most (of top-k: if no two ranks choose the same element).
        carried: what a rank carries from step to step: left-out parts, and factors.
    """

    numel: int
    gradients: int
    carried: int


def shapes_of(config: GPTConfig) -> GPT:
    """A model without memory."""
    with torch.device("meta"):
        return GPT(config)


def computed(model: nn.Module, config: CompressionConfig | None, ranks: int) -> Computed:
    """Sizes of a model's compressed gradients, averaged over so many ranks."""
    params = list(model.parameters())
    numel = sum(param.numel() for param in params)
    if config is None:
        return Computed(numel, sum(param.nbytes for param in params), 0)
    with mock.patch.object(dist, "get_world_size", return_value=ranks):
        reducer = compression.reducer_for(config, params)
    gradients = 0
    for param in params:
        encoding = reducer.encoding(param)
        gradients += param.nbytes if encoding is None else encoded_bytes(encoding, param.numel(), "float32")
    carried = reducer.carried(params).values() if isinstance(config, LossyConfig) else ()
    return Computed(numel, gradients, sum(tensor.nbytes for tensor in carried))


# Batches


class Records:
    """Records of a training's gradients in the slots of a layout, as a writer process sees them.

    Args:
        training: a training with gradients and optimizer state.
        config: how gradients are compressed; None: uncompressed. Needs a process group.
    """

    def __init__(self, training: Training, config: CompressionConfig | None) -> None:
        params = [param for param in training.model.parameters() if param.grad is not None]
        gradients = [param.grad.clone() for param in params if param.grad is not None]
        live = LiveState(training.model, [training.optimizer], {})
        parts: Encoded = [None] * len(params)
        if config is not None:
            reducer = compression.reducer_for(config, params)
            live.encoding_of = reducer.encoding
            parts = averaged(reducer, bucket_of(params, gradients))
        # Two slots are enough: a record is copied out of its slot before it is written.
        self.layout = Layout(live.spec(SpecRequest("eager", 64, 2, local_ranks=(0,), world_size=1)))
        self._slots = mmap.mmap(-1, self.layout.slots_bytes)
        names = {name: at for at, (name, _) in enumerate(training.model.named_parameters())}
        for record in (0, 1):
            for index, spec in enumerate(self.layout.spec.params):
                at = names[spec.tensor.name]
                offset = self.layout.slot_offset(record) + self.layout.gradient_offset(0, 0, index)
                self._fill(offset, index, gradients[at], parts[at])
        groups = codec.encode(hyperparameters(training.optimizer))
        self._sub_steps = (SubStep(0, 0, groups),)

    def _fill(self, offset: int, index: int, gradient: Tensor, parts: list[Tensor] | None) -> None:
        encoding = self.layout.spec.encoding(index)
        if encoding is None or parts is None:
            torch.frombuffer(self._slots, dtype=torch.float32, count=gradient.numel(), offset=offset).copy_(
                gradient.reshape(-1)
            )
            return
        views = encodings.views(self._slots, offset, encoding, gradient.numel(), "float32")
        for view, part in zip(views, parts, strict=True):
            view.copy_(part)

    def write(self, store: Store, first: int, count: int) -> Batch:
        """Write the records from `first` on as one batch, as the writer does."""
        tensors: list[FileTensor] = []
        for record in range(first, first + count):
            meta = encode_meta(RecordMeta(record, record - 1, False, self._sub_steps))
            copy = RecordCopy(self.layout, self._slots, record, True)
            tensors += copy.tensors(meta, self._sub_steps, {0: _RANK_STATE})
        batch = Batch(
            format=FORMAT_VERSION,
            timeline=Timeline(1, "benchmark"),
            first=first,
            last=first + count - 1,
            steps=tuple(range(first, first + count)),
            follows=None,
            world_size=1,
            ranks=(0,),
            node="node",
            full=True,
            created=time.time(),
            content=self.layout.spec.content(),
        )
        return write_batch(store, batch, tensors)

    def close(self) -> None:
        self._slots.close()


# Recovery


class Restoring:
    """Restores states from a training's log into a training of this process.

    Args:
        directory: the storage of a training of this size.
        size: a name in `examples.gpt.SIZES`.
    """

    def __init__(self, directory: Path, size: str) -> None:
        self._store = LocalStore(directory)
        self._newest = stored_points(read_catalog(self._store))[0]
        part = self._newest.checkpoint.part_serving(0)
        self._spec = decode_node_state(self._store.read(part.state_path)).spec
        self._trainee = Trainee(size)
        self._trainee.step()
        self._saved = directory / "torch"
        torch.save(self._trainee.state_dict(), self._saved)

    def restore(self, threads: int, count: int, _: int = 0) -> None:
        """Load the checkpoint, and redo `count` records with so many threads."""
        torch.set_num_threads(threads)
        point = self._newest.earlier(self._newest.checkpoint.record + count)
        if point is None:
            raise RuntimeError(f"expected {count} records in the log, found {self._newest}")
        model = self._trainee.model
        live = dict(model.named_parameters()) | dict(model.named_buffers())
        StoredState(self._store, point, 0, self._spec).restore(live, [self._trainee.optimizer])

    def torch_load(self, _: int = 0) -> None:
        state = torch.load(self._saved, weights_only=True)
        self._trainee.model.load_state_dict(state["model"])
        self._trainee.optimizer.load_state_dict(state["optimizer"])
