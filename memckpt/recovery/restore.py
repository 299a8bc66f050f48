"""Restore of a held state into live tensors: copied from mapped memory, never a view of it.

:class:`Restorer` restores from a node's memory. Below it is what restores from storage use, too: what is filled, live
tensors or host memory, and the threads that redo it.
"""

from __future__ import annotations

import mmap
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from torch.optim import Optimizer

from memckpt.errors import DamagedStateError
from memckpt.memory.region import GenerationRegions
from memckpt.memory.slots import SlotRing
from memckpt.state import codec
from memckpt.state.layout import Layout, Piece
from memckpt.state.optimizers import (
    Missing,
    beside_tensors,
    dtype_of,
    rebuild_from_spec,
    rebuild_like,
    without_global_hooks,
)
from memckpt.state.records import RecordMeta, decode_meta
from memckpt.state.redo import OptimizerFactory, RedoGroup, RedoTarget, StagedGradients, tensor_at
from memckpt.state.spec import OwnerSpec, ParamSpec, StateSpec, StateTensorSpec, TensorSpec, is_ours
from memckpt.state.tensors import fill, is_like, local
from memckpt.storage.format import NodeState
from memckpt.storage.node_files import StoredNames

#: Bytes from which on a copy takes long enough for a progress bar.
_PROGRESS_BYTES = 1 << 30


class Restorer:
    """Restores one rank from one node's memory. Only reads the regions; a kill at any point is harmless.

    `build` makes an optimizer like the live one of an index; None copies the live one. `record_redo_seconds` is the
    time to redo a record of all parameters at the last restore; None where nothing was redone.
    """

    def __init__(
        self,
        layout: Layout,
        regions: GenerationRegions,
        ring: SlotRing,
        tensors: dict[str, torch.Tensor],
        optimizers: Sequence[Optimizer],
        build: OptimizerFactory | None = None,
    ) -> None:
        self._layout = layout
        self._factory = build
        self._slots: mmap.mmap = regions.slots.map
        self._static = regions.static
        self._replica = regions.replica
        self._ring = ring
        self._target = RestoreTarget(layout, tensors, optimizers)
        self._tensors = tensors
        self._optimizers = optimizers
        self._params = self._target.params
        self.record_redo_seconds: float | None = None

    @torch.no_grad()
    def restore(
        self,
        record: int,
        rank: int | None,
        metas: Sequence[bytes],
        missing: Missing,
        plain: bytes,
    ) -> None:
        """Copy the state after `record` into the live tensors, with by-value tensors of `rank` (None: none).

        `metas` are of the window of records up to and including it (lazy), or of records behind the replica's (eager).
        `missing`, `plain`: state that does not exist in the replica, and state that is not a tensor (eager).
        """
        self._target.forget_optimizer_state()
        if self._replica is None:
            self._restore_by_redo(record, [decode_meta(meta) for meta in metas])
        else:
            self._restore_from_replica(missing, plain)
            for meta in metas:
                self._redo_behind_replica(decode_meta(meta))
        self._target.order_state_keys()
        self._restore_static()
        if rank is not None:
            self._restore_by_value(record, rank)

    # Eager: copy the replica

    def _restore_from_replica(self, missing: Missing, plain: bytes) -> None:
        assert self._replica is not None
        described = zip(self._layout.replica_offsets, self._layout.spec.params, strict=True)
        places = (place for place, param in described if not param.tensor.elsewhere)
        with progress("restoring", self._layout.replica_bytes) as advance:
            for spec, owner, state, tensor in self._target.make_room(missing, plain):
                if owner is None or state is None:
                    offset, states = next(places)
                    held = tensor_at(self._replica.map, offset, spec.tensor.shape, spec.tensor.dtype)
                else:
                    offset = states[owner.optimizer, state.key]
                    held = tensor_at(self._replica.map, offset, state.shape, state.dtype)
                local(tensor).copy_(held)
                advance(held.nbytes)

    def _redo_behind_replica(self, meta: RecordMeta) -> None:
        """Take the anchors of a record over, then redo it in the live tensors, as the replica will."""
        self._ring.check(meta.record, self._layout.spec.local_ranks)
        for piece in self._layout.due(meta.record):
            self._target.bring_home(self._anchored(piece, meta))
        redo_targets = self._target.redo_targets()
        gradients = StagedGradients(self._slots, self._layout, common_device(self._params))
        RedoGroup(self._layout, redo_targets, self._build).apply(meta, gradients)
        for redo_target in redo_targets:
            self._target.bring_home(redo_target)

    # Lazy: anchors, then the records since

    def _restore_by_redo(self, record: int, metas: Sequence[RecordMeta]) -> None:
        by_number = {meta.record: meta for meta in metas}
        period = self._layout.spec.period
        expected = range(record - period + 1, record + 1)
        if sorted(by_number) != list(expected):
            raise DamagedStateError(
                f"expected the records {expected.start} to {record}, found {sorted(by_number)}: the window has a hole"
            )
        ranks = self._layout.spec.local_ranks
        for number in expected:
            self._ring.check(number, ranks)
        gradients = StagedGradients(self._slots, self._layout, common_device(self._params))
        clock = _RedoClock()
        with progress("restoring", self._layout.numel * 12) as advance, RedoThreads(self._layout) as threads:
            for anchoring in sorted(by_number.values(), key=lambda meta: meta.record):
                due = self._layout.due(anchoring.record)
                group = self.at_anchors(due, anchoring)
                since = [by_number[number] for number in range(anchoring.anchors_of + 1, record + 1)]
                redo = clock.timed(partial(group.apply_all, since, gradients))
                threads.run(group.redo_targets, redo, partial(self._bring_home, group.redo_targets, advance))
            threads.wait()
            # A parameter is redone from its anchor, of any of the records, on: (T + 1) / 2 records on average.
            self.record_redo_seconds = clock.busy / threads.width * 2 / (period + 1)

    def at_anchors(self, pieces: Sequence[Piece], anchoring: RecordMeta) -> RedoGroup:
        """Pieces in the live tensors' memory, set to the anchors that a record carries, to be redone from there."""
        return RedoGroup(self._layout, [self._anchored(piece, anchoring) for piece in pieces], self._build)

    def _bring_home(self, redo_targets: Sequence[RedoTarget], advance: Callable[[int], None]) -> None:
        for redo_target in redo_targets:
            self._target.bring_home(redo_target)
            advance((redo_target.stop - redo_target.start) * 12)

    def _build(self, index: int, groups: list[dict[str, Any]]) -> Optimizer:
        return self._factory(index, groups) if self._factory else rebuild_like(self._optimizers[index], groups)

    def _anchored(self, piece: Piece, meta: RecordMeta) -> RedoTarget:
        """A redo target in the live parameter's memory, set to its anchor."""
        spec = self._layout.spec.params[piece.param]
        param = self._params[piece.param]
        whole = piece.stop - piece.start == spec.tensor.numel
        target = local(param) if whole else local(param).view(-1)[piece.start : piece.stop]
        absent = set(meta.missing)
        plain = codec.decode(meta.plain) if meta.plain else {}
        base = self._layout.slot_offset(meta.record)
        states: dict[int, dict[str, Any]] = {
            owner.optimizer: dict(plain.get(piece.param, {}).get(owner.optimizer, {})) for owner in spec.owners
        }
        for owner, state, offset in self._layout.piece_parts(piece):
            if owner is None or state is None:
                anchor = tensor_at(self._slots, base + offset, tuple(target.shape), spec.tensor.dtype)
                target.copy_(anchor)
                continue
            if (piece.param, owner.optimizer, state.key) in absent:
                continue
            shape = tuple(target.shape) if state.elementwise else state.shape
            anchor = tensor_at(self._slots, base + offset, shape, state.dtype)
            room = self._room_for(piece, owner, state, whole)
            room.copy_(anchor)
            states[owner.optimizer][state.key] = room
        return RedoTarget(piece.param, piece.start, piece.stop, as_parameter(target), states)

    def _room_for(self, piece: Piece, owner: OwnerSpec, state: StateTensorSpec, whole: bool) -> torch.Tensor:
        """The live tensor's memory for element-wise state; else a tensor private to the redo target."""
        param = self._params[piece.param]
        if not state.elementwise:
            return local(self._target.state_tensor(param, state))
        live = self._optimizers[owner.optimizer].state[param]
        if state.key not in live:
            live[state.key] = self._target.state_tensor(param, state)
        tensor = local(live[state.key])
        return tensor if whole else tensor.view(-1)[piece.start : piece.stop]

    # Static and by-value tensors

    def _restore_static(self) -> None:
        for spec, offset in zip(self._layout.spec.static, self._layout.static_offsets, strict=True):
            if spec.elsewhere:
                continue
            assert self._static is not None
            held = tensor_at(self._static.map, offset, spec.shape, spec.dtype)
            fill(self._tensors[spec.name], held)

    def _restore_by_value(self, record: int, rank: int) -> None:
        self._ring.check(record, [rank])
        self._ring.check_by_value(record, [rank])
        base = self._layout.by_value_base(record)
        for spec, offset in zip(self._layout.spec.by_value, self._layout.by_value_offsets(rank), strict=True):
            if not is_restored(spec, self._tensors):
                continue
            held = tensor_at(self._slots, base + offset, spec.shape, spec.dtype)
            fill(self._tensors[spec.name], held)


class _RedoClock:
    """Seconds that redo has kept threads busy, copies and waits left out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.busy = 0.0

    def timed(self, redo: Callable[[], None]) -> Callable[[], None]:
        """The same redo, timed in whichever thread it runs."""

        def run() -> None:
            began = time.perf_counter()
            redo()
            took = time.perf_counter() - began
            with self._lock:
                self.busy += took

        return run


def replica_digest(params: Sequence[torch.Tensor], optimizers: Sequence[Optimizer]) -> int:
    """A sum over the bits of parameters and their state, an int below 2^61: equal on ranks with equal replicas."""
    total = 0
    for param in params:
        tensors = [local(param)]
        for optimizer in optimizers:
            if param in optimizer.state:
                state = optimizer.state[param]
                tensors += [local(state[key]) for key in sorted(state) if isinstance(state[key], torch.Tensor)]
        for position, tensor in enumerate(tensors):
            bits = tensor.contiguous().view(-1).view(torch.uint8)
            words = bits[: bits.numel() // 8 * 8].view(torch.int64) if bits.data_ptr() % 8 == 0 else bits
            total = (total * 31 + int(words.sum()) + int(bits[bits.numel() // 8 * 8 :].sum()) + position) % (1 << 61)
    return total


def is_restored(spec: TensorSpec, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether a held by-value tensor is restored: not what compression had left out, where nothing like it is live."""
    return not is_ours(spec.name) or is_like(tensors.get(spec.name), spec)


def common_device(params: Iterable[torch.Tensor]) -> torch.device | None:
    """The device of all parameters; None if they are on several."""
    devices = {param.device for param in params}
    return devices.pop() if len(devices) == 1 else None


def as_parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    """A parameter in a tensor's memory."""
    return torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point() or tensor.is_complex())


class RestoreTarget:
    """Live tensors and optimizers, in the layout of the state that is restored into them."""

    def __init__(self, layout: Layout, tensors: dict[str, torch.Tensor], optimizers: Sequence[Optimizer]) -> None:
        self.layout = layout
        self.tensors = tensors
        self.optimizers = optimizers
        self.params = [tensors[param.tensor.name] for param in layout.spec.params]

    def numbered(self, wanted: Collection[int] | None = None) -> Iterator[tuple[int, ParamSpec, torch.Tensor]]:
        """Indices, specs and live tensors of these parameters; None: of all that are not elsewhere."""
        for index, (spec, param) in enumerate(zip(self.layout.spec.params, self.params, strict=True)):
            if (wanted is None or index in wanted) and not spec.tensor.elsewhere:
                yield index, spec, param

    def redo_targets(self, wanted: Collection[int] | None = None) -> list[RedoTarget]:
        """Whole parameters, with their state, to be redone in the live tensors' memory."""
        found = []
        for index, spec, param in self.numbered(wanted):
            states = {one.optimizer: self.optimizers[one.optimizer].state.get(param, {}) for one in spec.owners}
            own = {
                optimizer: {key: local(one) if isinstance(one, torch.Tensor) else one for key, one in state.items()}
                for optimizer, state in states.items()
            }
            found.append(RedoTarget(index, 0, local(param).numel(), as_parameter(local(param)), own))
        return found

    def make_room(
        self, missing: Missing, plain: bytes, wanted: Collection[int] | None = None
    ) -> Iterator[tuple[ParamSpec, OwnerSpec | None, StateTensorSpec | None, torch.Tensor]]:
        """Tensors to be filled: each of these parameters, then its optimizer state, for which it makes room.

        `missing` state gets none; `plain` is what of the state is no tensor, encoded.
        """
        absent = set(missing)
        others: dict[int, Any] = codec.decode(plain) if plain else {}
        for index, spec, param in self.numbered(wanted):
            yield spec, None, None, param
            for owner in spec.owners:
                values = dict(others.get(index, {}).get(owner.optimizer, {}))
                for state in owner.state:
                    if (index, owner.optimizer, state.key) not in absent:
                        room = values[state.key] = self.state_tensor(param, state)
                        yield spec, owner, state, room
                if values:
                    self.optimizers[owner.optimizer].state[param] = values

    def forget_optimizer_state(self) -> None:
        """Drop the optimizers' state for the parameters that are about to be restored."""
        for spec, param in zip(self.layout.spec.params, self.params, strict=True):
            for owner in spec.owners:
                self.optimizers[owner.optimizer].state.pop(param, None)

    def order_state_keys(self) -> None:
        """Order the keys of the optimizers' state as the optimizers create them: state_dict() shows the order."""
        orders: dict[tuple[int, int], list[str]] = {
            (id(param), owner.optimizer): list(owner.keys)
            for spec, param in zip(self.layout.spec.params, self.params, strict=True)
            for owner in spec.owners
        }
        for index, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                for param in group["params"]:
                    found = optimizer.state.pop(param, None)
                    if found is not None:
                        order = orders.get((id(param), index), [])
                        ordered = {sys.intern(key): found[key] for key in order if key in found}
                        optimizer.state[param] = {**ordered, **found}

    def state_tensor(self, param: torch.Tensor, spec: StateTensorSpec) -> torch.Tensor:
        """Uninitialised room for state, about to be overwritten. A DTensor if it is element-wise and `param` is one."""
        dtype = getattr(torch, spec.dtype)
        if spec.elementwise:
            return torch.empty_like(param, dtype=dtype, device="cpu" if spec.on_cpu else None, requires_grad=False)
        return torch.empty(spec.shape, dtype=dtype, device="cpu" if spec.on_cpu else param.device)

    def bring_home(self, redo_target: RedoTarget) -> None:
        """Move the results of redo that are in its own tensors into the live optimizer's state."""
        param = self.params[redo_target.param]
        whole = redo_target.stop - redo_target.start == local(param).numel()
        specs = {(o.optimizer, s.key): s for o in self.layout.spec.params[redo_target.param].owners for s in o.state}
        for optimizer, values in redo_target.states.items():
            for key, value in values.items():
                live = self.optimizers[optimizer].state[param]
                spec = specs.get((optimizer, key))
                if not isinstance(value, torch.Tensor) or spec is None or not spec.elementwise:
                    live[key] = value
                    continue
                if key not in live:
                    live[key] = self.state_tensor(param, spec)
                home = local(live[key]) if whole else local(live[key]).view(-1)[redo_target.start : redo_target.stop]
                if home.data_ptr() != value.data_ptr():
                    home.copy_(value)


@contextmanager
def progress(what: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal if there is much to copy; yields a function that takes the bytes done."""
    if nbytes < _PROGRESS_BYTES or not sys.stderr.isatty():
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"memckpt: {what}", total=nbytes)
        yield lambda amount: bar.advance(task, amount)


class RedoThreads:
    """Threads that redo groups of parameters, a core each; in the calling thread where that is not safe.

    A step of a small tensor keeps one core busy, and a group's records find its state in that core's cache. A group is
    safe if its parameters may be cut into pieces: their bits do not depend on the number of threads. An accelerator is
    parallel by itself.
    """

    def __init__(self, layout: Layout, threads: int | None = None) -> None:
        self._layout = layout
        self._threads = torch.get_num_threads() if threads is None else threads
        self._pool: ThreadPoolExecutor | None = None
        self._running: deque[tuple[Future[None], Callable[[], None]]] = deque()
        self._hooks = without_global_hooks()

    @property
    def width(self) -> int:
        """Number of groups that are redone at the same time."""
        return self._threads if self._pool is not None else 1

    def __enter__(self) -> RedoThreads:
        self._hooks.__enter__()
        if self._threads > 1:
            # A thread for each core, and no threads of torch's own beside them.
            self._torch_threads = torch.get_num_threads()
            self._pool = ThreadPoolExecutor(
                self._threads, "memckpt-redo", initializer=torch.set_num_threads, initargs=(1,)
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=error is not None)
                torch.set_num_threads(self._torch_threads)  # also for threads that torch begins later
        finally:
            self._running.clear()
            self._hooks.__exit__(kind, error, traceback)

    def run(self, redo_targets: Sequence[RedoTarget], redo: Callable[[], None], after: Callable[[], None]) -> None:
        """Redo a group, possibly later and in another thread; raises what its redo, or an earlier one, has raised.

        `after` is called behind that in the calling thread, at the latest by :meth:`wait`; groups in their order.
        """
        if self._pool is None or not all(self._is_safe(one) for one in redo_targets):
            self.wait()
            redo()
            after()
            return
        without_gradients = torch.no_grad()(redo)  # a thread's own setting
        self._running.append((self._pool.submit(without_gradients), after))
        if len(self._running) > 2 * self._threads:
            self._take_first()

    def wait(self) -> None:
        """Wait until all groups are redone."""
        while self._running:
            self._take_first()

    def _take_first(self) -> None:
        redone, after = self._running.popleft()
        redone.result()
        after()

    def _is_safe(self, redo_target: RedoTarget) -> bool:
        param = self._layout.spec.params[redo_target.param]
        return redo_target.parameter.device.type == "cpu" and not param.whole


class HostState:
    """Host memory for a state, to be filled by a restore.

    `wanted` are the names of the tensors to allocate (None: all). `optimizers` are stand-ins that hold state.
    """

    def __init__(self, spec: StateSpec, by_value: bool, wanted: Collection[str] | None = None) -> None:
        self._spec = spec

        def room(one: TensorSpec) -> torch.Tensor:
            device = "cpu" if wanted is None or one.name in wanted else "meta"
            return torch.empty(one.shape, dtype=dtype_of(one.dtype), device=device)

        named = [param.tensor for param in spec.params] + list(spec.static)
        self.tensors: dict[str, torch.Tensor] = {
            one.name: torch.nn.Parameter(room(one), requires_grad=False) for one in named
        }
        if by_value:
            self.tensors |= {one.name: room(one) for one in spec.by_value}
        shells: list[Any] = [SimpleNamespace(state=defaultdict(dict), param_groups=[]) for _ in spec.optimizers]
        self.optimizers: list[Optimizer] = shells

    def build(self, index: int, groups: list[dict[str, Any]]) -> Optimizer:
        """An optimizer like the one of that index that made the state."""
        return rebuild_from_spec(self._spec.optimizers[index], groups)

    def described(self, rank_states: dict[int, bytes]) -> tuple[dict[str, torch.Tensor], NodeState]:
        """All tensors except by-value ones, by their names in a store, and their metadata."""
        spec, names = self._spec, StoredNames(self._spec)
        tensors = {names.tensor(one): self.tensors[one.name].data for one in spec.static if not one.elsewhere}
        for index, param in enumerate(spec.params):
            if param.tensor.elsewhere:
                continue
            tensors[names.tensor(param.tensor)] = self.tensors[param.tensor.name].data
            for owner in param.owners:
                kept = self._state_of(index, owner.optimizer)
                for one in owner.state:
                    if isinstance(value := kept.get(one.key), torch.Tensor):
                        tensors[names.state(param, owner.optimizer, one)] = value
        return tensors, NodeState(spec, *beside_tensors(spec, self._state_of), rank_states)

    def _state_of(self, index: int, optimizer: int) -> Mapping[str, Any]:
        param = self.tensors[self._spec.params[index].tensor.name]
        found: Mapping[str, Any] = self.optimizers[optimizer].state.get(param, {})
        return found
