"""Collectives of the late device: on a stream of their own, as NCCL's. A thread has gloo exchange copies."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, _create_work_from_future

BACKEND = "cpu:gloo,late:late"


def register() -> None:
    """Make the backend known to torch.distributed; the late device must be loaded."""
    if not hasattr(dist.Backend, "LATE"):
        dist.Backend.register_backend("late", LateProcessGroup, devices=["late"])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _tensors(one)


def _room_for(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)


def _replaced(value: Any, host: dict[int, Tensor]) -> Any:
    if isinstance(value, list):
        return [_replaced(one, host) for one in value]
    return host.get(id(value), value)


def _collective(name: str, in_place: bool = False) -> Callable[..., Any]:
    """A method that writes its first argument, and reads the others (in_place: the first one, too)."""

    def call(self: LateProcessGroup, *arguments: Any) -> Any:
        return self._enqueue(name, in_place, arguments)

    return call


class LateProcessGroup(dist.ProcessGroup):
    """A process group for tensors of the late device, and for those of the host, which gloo takes as they are."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._name = ""
        self._gloo = ProcessGroupGloo(store, rank, size, timeout)
        self._stream = torch.Stream("late")
        self._thread = ThreadPoolExecutor(1, "late collectives")

    def _enqueue(self, name: str, in_place: bool, arguments: tuple[Any, ...]) -> Any:
        written, read = list(_tensors(arguments[0])), list(_tensors(list(arguments[1:])))
        if not any(one.device.type == "late" for one in written):
            return getattr(self._gloo, name)(*arguments)
        options = arguments[-1]
        mean = getattr(options, "reduceOp", None) == dist.ReduceOp.AVG
        if mean:  # gloo has none
            options.reduceOp = dist.ReduceOp.SUM
        host = {id(one): _room_for(one) for one in written + read}
        self._stream.wait_stream(torch.accelerator.current_stream())
        with torch.get_device_module("late").stream(self._stream), torch.no_grad():
            for one in written + read:
                one.record_stream(self._stream)
            for one in (written if in_place else []) + read:
                host[id(one)].copy_(one, non_blocking=True)
            arrived = self._stream.record_event()
            exchanged = torch.ops.late.hold(self._stream.stream_id)
            self._thread.submit(self._exchange, name, _replaced(list(arguments), host), arrived, exchanged, mean)
            for one in written:
                one.copy_(host[id(one)], non_blocking=True)
            future: Any = torch.futures.Future(devices=[self._stream.device])
            future.set_result(arguments[0])
        return _create_work_from_future(future)

    def _exchange(self, name: str, arguments: list[Any], arrived: torch.Event, exchanged: int, mean: bool) -> None:
        try:
            arrived.synchronize()
            getattr(self._gloo, name)(*arguments).wait()
            for one in _tensors(arguments[0]) if mean else ():
                one.div_(self.size())
            torch.ops.late.go_on(exchanged)
        except BaseException:  # NCCL's watchdog ends the process, too
            traceback.print_exc()
            os._exit(1)

    allreduce = _collective("allreduce", in_place=True)
    allreduce_coalesced = _collective("allreduce_coalesced", in_place=True)
    broadcast = _collective("broadcast", in_place=True)
    allgather = _collective("allgather")
    all_gather_single = _allgather_base = _collective("_allgather_base")
    reduce_scatter = _collective("reduce_scatter")
    reduce_scatter_single = _reduce_scatter_base = _collective("_reduce_scatter_base")

    def barrier(self, opts: dist.BarrierOptions) -> Any:
        return self._gloo.barrier(opts)

    def getBackendName(self) -> str:
        return "late"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name
