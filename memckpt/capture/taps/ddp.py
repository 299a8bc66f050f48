"""Streaming under DistributedDataParallel, by its communication hook."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from memckpt.capture.copier import Copier
from memckpt.capture.recorder import Recorder
from memckpt.capture.taps.ddp_hooks import PlainBucket, half_type, takes_any_bucket
from memckpt.capture.taps.tap import OncePerBackward, Tap, survives
from memckpt.compression.hook import hook as compressed_hook
from memckpt.compression.hook import of_bucket as of_ddp
from memckpt.compression.reduction import Averaged, Bucket, Encoded, Reducer
from memckpt.errors import UnsupportedError

_log = logging.getLogger("memckpt")

CommHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


LOCAL_STEPS = (
    "its ranks step on their own between averages, so no record holds the steps of the others; average the "
    "gradients at every step (DistributedDataParallel, fully_shard)"
)


def refuse_local_sgd(*parts: object) -> None:
    """Refuse a DDP communication hook, or its state, that does not average at every step.

    Raises:
        UnsupportedError: one of `parts` belongs to local SGD.
    """
    if any("localsgd" in getattr(part, "__name__", type(part).__name__).lower() for part in parts):
        raise UnsupportedError(f"local SGD (a communication hook of DDP): {LOCAL_STEPS}")


@dataclass
class _HeldBucket:
    """A bucket whose reduction waits until all buckets of its backward are ready."""

    params: list[torch.Tensor]
    gradients: list[torch.Tensor]
    buffer: torch.Tensor
    future: torch.futures.Future[torch.Tensor]


class BucketTap(Tap):
    """Stages each bucket's synchronized gradients, which the communication hook's future carries.

    DDP takes one communication hook. Ours calls the user's, if it is registered later. Without one it averages as DDP
    itself does, by multiplying with 1/N (torch's stock hook divides, which gives other bits at N = 3).

    With three ranks or more the order of a sum depends on an element's position in a buffer, and DDP rebuilds its
    buckets after the first backward of a process. So the bucket layout is part of the state: the first backward after a
    resume is reduced in the layout that the uninterrupted run would have used (:attr:`layout`).
    """

    name = "streaming (DDP communication hook)"
    in_buckets = True

    def __init__(
        self,
        model: DistributedDataParallel,
        recorder: Recorder,
        copier: Copier,
        before_reduction: Callable[[], None],
        reducer: Reducer | None = None,
        adopted: Callable[[Any, CommHook], None] = lambda state, hook: None,
    ) -> None:
        self._model = model
        self._half: torch.dtype | None = None
        #: Called with a user's hook that is registered, and its state.
        self._adopted = adopted
        self._reducer = reducer
        self._recorder = recorder
        self._copier = copier
        self._before_reduction = before_reduction
        self._users: tuple[Any, CommHook] | None = None
        self._group = model.process_group
        self._world_size = dist.get_world_size(self._group)
        self._factor = 1.0 / self._world_size
        self._removed = False
        self._at_end = OncePerBackward(self._backward_ended, last=True)
        self._positions = {id(param): index for index, param in enumerate(model.module.parameters())}
        self._observed: list[list[int]] = []
        self._held: list[_HeldBucket] = []
        self._resumed_layout: list[list[int]] | None = None
        self._backwards = 0
        self._handles: list[Any] = []

    @staticmethod
    def available(model: DistributedDataParallel) -> bool:
        """Whether the hook is free: torch takes only one, and the user may have registered theirs."""
        return not getattr(model, "_comm_hooks", [])

    def install(self) -> None:
        def memckpt_tap(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            return self._reduce(bucket)

        # Torch compares the annotations with its own classes, and does not resolve strings.
        memckpt_tap.__annotations__.clear()
        self._model.register_comm_hook(None, memckpt_tap)
        # A user's registration now reaches us and not torch, which would refuse a second hook.
        vars(self._model)["register_comm_hook"] = self._adopt
        # Under no_sync() no bucket is reduced, yet gradients are pending.
        self._handles = [
            param.register_post_accumulate_grad_hook(self._accumulated)
            for param in self._model.module.parameters()
            if param.requires_grad
        ]

    def _adopt(self, state: Any, hook: CommHook) -> None:
        if self._users is not None:
            raise RuntimeError("register_comm_hook can only be called once per DDP module")
        if self._reducer is not None:
            raise UnsupportedError(
                "a communication hook of DDP and memckpt's compression both average gradients: leave out one of them"
            )
        refuse_local_sgd(state, hook)
        self._users, self._half = (state, hook), half_type(hook)
        self._adopted(state, hook)

    def remove(self) -> None:
        """Stop tapping. Torch cannot unregister a communication hook: ours stays, and only averages from now on."""
        self._removed = True
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._model.__dict__.pop("register_comm_hook", None)

    def resume_layout(self, layout: list[list[int]]) -> None:
        """Reduce the next backward in this layout. Call before the first backward of the process."""
        self._resumed_layout = self.layout = layout

    def _is_held_back(self) -> bool:
        """Whether this backward is reduced in the layout of the dead attempt, not in DDP's provisional one."""
        if self._resumed_layout is None:
            return False
        if self._users is None:
            return self._world_size > 2
        state, hook = self._users
        return takes_any_bucket(hook) and (self._world_size > 2 or isinstance(state, PowerSGDState))

    def _accumulated(self, param: torch.Tensor) -> None:
        started = time.perf_counter()
        try:
            if not self._copier.recording_graph():
                self._recorder.gradient_seen(param)
        except Exception as error:
            self._recorder.broke("handling a gradient", error)
        self._recorder.clock.hooks += time.perf_counter() - started

    def _reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._removed or not self._recorder.backward_runs():
            return self._average(bucket)
        self.reductions += 1
        self._observe_bucket(bucket)
        if self._resumed_layout is not None and self._is_held_back():
            return self._hold_bucket(bucket, self._resumed_layout)
        if bucket.is_last():
            self._resumed_layout = None
        if self._reducer is not None:
            return self._compress(self._reducer, of_ddp(bucket), bucket.is_last())
        params, gradients, buffer = bucket.parameters(), bucket.gradients(), bucket.buffer()

        def staged(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            flat = _first(done)  # raises if the reduction failed: the user must see that
            self._stage(flat, params, gradients, buffer)
            return flat

        return self._average(bucket).then(staged)

    @survives("handling a bucket")
    def _observe_bucket(self, bucket: GradBucket) -> None:
        with self._recorder.clock.in_hook():
            if self._at_end.ask():
                self._observed, self._held = [], []  # left by a backward that raised
            self._observe(bucket)
            self._before_reduction()

    @survives("staging a bucket")
    def _stage(
        self,
        flat: torch.Tensor,
        params: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        buffer: torch.Tensor,
    ) -> None:
        with self._recorder.clock.in_hook():
            reduced = gradients if flat.data_ptr() == buffer.data_ptr() else _placed_alike(gradients, buffer, flat)
            for param, gradient in zip(params, reduced, strict=True):
                self._stage_one(param, gradient)

    def _stage_one(self, param: torch.Tensor, gradient: torch.Tensor) -> None:
        """Stage a gradient as it came from the user's hook, or from an all-reduce."""
        if self._half is None or gradient.dtype == self._half:
            self._recorder.stage(param, gradient)
        else:  # averaged in 16 bits, so that nothing is rounded here
            self._recorder.stage(param, gradient, [gradient.reshape(-1).to(self._half)])

    def _compress(self, reducer: Reducer, bucket: Bucket, last: bool) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket in compressed form, and stage the compressed average."""
        done = reducer.average(bucket, last)

        def staged(done: torch.futures.Future[Averaged]) -> torch.Tensor:
            self._stage_encoded(bucket, done.value().encoded)  # raises if the reduction failed: the user must see that
            return bucket.buffer

        return done.then(staged)

    @survives("staging a compressed bucket")
    def _stage_encoded(self, bucket: Bucket, encoded: Encoded) -> None:
        with self._recorder.clock.in_hook():
            for param, gradient, parts in zip(bucket.params, bucket.gradients, encoded, strict=True):
                self._recorder.stage(param, gradient.view(param.shape), parts)

    def _average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._reducer is not None:
            return compressed_hook(self._reducer, bucket)
        if self._users is not None:
            state, hook = self._users
            return hook(state, bucket)
        work = dist.all_reduce(bucket.buffer().mul_(self._factor), group=self._group, async_op=True)
        assert work is not None
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(_first)
        return future

    def _observe(self, bucket: GradBucket) -> None:
        """Learn the layout. A process's first backward has DDP's provisional one, which is used only once."""
        self._observed.append([self._positions[id(param)] for param in bucket.parameters()])
        if bucket.is_last():
            self._backwards += 1
            if self._backwards > 1 or self._model.find_unused_parameters:
                self.layout = self._observed
            self._observed = []

    def _hold_bucket(self, bucket: GradBucket, layout: list[list[int]]) -> torch.futures.Future[torch.Tensor]:
        devices: list[int | str | torch.device] | None = (
            [bucket.buffer().device] if bucket.buffer().device.type != "cpu" else None
        )
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        self._held.append(_HeldBucket(bucket.parameters(), bucket.gradients(), bucket.buffer(), future))
        if bucket.is_last():
            held, self._held, self._resumed_layout = self._held, [], None
            self._reduce_in(layout, held)
        return future

    def _reduce_in(self, layout: list[list[int]], held: list[_HeldBucket]) -> None:
        gradients = {
            self._positions[id(param)]: (param, gradient)
            for one in held
            for param, gradient in zip(one.params, one.gradients, strict=True)
        }
        if sorted(position for positions in layout for position in positions) != sorted(gradients):
            _log.warning("memckpt: DDP reduces other parameters than before; this step may differ in the last bits")
            layout = [[self._positions[id(param)] for param in one.params] for one in held]
        begun = []
        for index, positions in enumerate(layout):
            found = [gradients[position] for position in positions]
            flat = torch.cat([gradient.reshape(-1) for _, gradient in found])
            each = flat.split([gradient.numel() for _, gradient in found])
            bucket = Bucket([param for param, _ in found], each, flat)
            done = self._average_bucket(bucket, index, positions is layout[-1])
            begun.append((bucket, [gradient for _, gradient in found], done))
        for bucket, targets, averaged in begun:
            parts_of = averaged.wait().encoded
            for param, target, source, parts in zip(bucket.params, targets, bucket.gradients, parts_of, strict=True):
                target.copy_(source.view(target.shape))
                with self._recorder.clock.in_hook():
                    if parts is None:
                        self._stage_one(param, target)
                    else:
                        self._recorder.stage(param, target, parts)
        for one in held:
            one.future.set_result(one.buffer)

    def _average_bucket(self, bucket: Bucket, index: int, last: bool) -> torch.futures.Future[Averaged]:
        """Average a bucket in place, without blocking."""
        if self._reducer is not None:
            return self._reducer.average(bucket, last)
        done: torch.futures.Future[Any]
        if self._users is not None:
            state, hook = self._users
            plain: Any = PlainBucket(index, bucket.params, bucket.gradients, bucket.buffer, last)  # no GradBucket
            done = hook(state, plain)
        else:
            work = dist.all_reduce(bucket.buffer.mul_(self._factor), group=self._group, async_op=True)
            assert work is not None
            done = work.get_future()

        def averaged(done: torch.futures.Future[Any]) -> Averaged:
            flat = _first(done)  # raises if the reduction failed
            if flat.data_ptr() != bucket.buffer.data_ptr():
                bucket.buffer.copy_(flat.view(-1))
            return Averaged([None] * len(bucket.params), bucket.buffer)

        return done.then(averaged)

    @survives("ending a backward")
    def _backward_ended(self) -> None:
        with self._recorder.clock.in_hook():
            self._copier.wait_before_changes()
            self._recorder.note_versions()


def _placed_alike(gradients: Sequence[torch.Tensor], buffer: torch.Tensor, flat: torch.Tensor) -> list[torch.Tensor]:
    """Views of `flat` at the positions that `gradients` have in `buffer`."""
    first, flat = buffer.storage_offset(), flat.view(-1)
    begins = [int(gradient.storage_offset() - first) for gradient in gradients]
    return [flat[begin : begin + one.numel()].view(one.shape) for begin, one in zip(begins, gradients, strict=True)]


def _first(done: torch.futures.Future[Any]) -> torch.Tensor:
    value = done.value()
    tensor = value[0] if isinstance(value, list) else value
    assert isinstance(tensor, torch.Tensor)
    return tensor
