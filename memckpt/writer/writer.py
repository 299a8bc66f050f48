"""Writes checkpoints: from the regions of an agent into a store."""

from __future__ import annotations

import collections
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch.optim import Optimizer

from memckpt.agent.channel import Channel
from memckpt.agent.messages import Save, Saved, SaveFailed
from memckpt.errors import AgentError, MemckptError, StorageError
from memckpt.memory.region import Region
from memckpt.memory.slots import SlotRing
from memckpt.recovery.restore import Restorer
from memckpt.state import codec
from memckpt.state.layout import Layout
from memckpt.state.optimizers import dtype_of, rebuild_from_spec
from memckpt.storage.base import by_value_tensors, model_name, state_name, state_tensors, write_base
from memckpt.storage.catalog import Checkpoint, leftovers, read_catalog, remove, superseded, verify
from memckpt.storage.format import NodeState, Part
from memckpt.storage.store import Store, open_store

_log = logging.getLogger("memckpt.writer")


def serve(channel: Channel) -> None:
    """Do one job after the other, until the agent is gone."""
    while True:
        job, fds = channel.receive(None)
        if not isinstance(job, Save):
            raise AgentError(f"expected a Save from the agent, found {type(job).__name__}")
        regions = [Region.open(fd) for fd in fds]
        try:
            answer: Saved | SaveFailed = save(job, regions)
        except (MemckptError, OSError, RuntimeError, MemoryError) as error:
            _log.exception("saving step %d failed", job.part.step)
            answer = SaveFailed(job.part.step, f"{type(error).__name__}: {error}")
        finally:
            for region in regions:
                region.close()
        channel.send(answer)


def save(job: Save, regions: list[Region]) -> Saved:
    """Write, verify, and let go of what retention no longer keeps."""
    started, cpu = time.perf_counter(), time.process_time()
    store = open_store(job.url)
    layout = Layout(job.spec)
    state = NodeState(job.spec, job.missing, job.plain, job.rank_states)
    if job.source == "ring":
        static = regions[1] if len(regions) > 1 else None
        tensors, state = _redo(job, layout, regions[0], static)
    else:
        static = regions[2] if len(regions) > 2 else None
        tensors = {}
        if job.part.full:
            tensors = state_tensors(layout, regions[0].map, static.map if static else None, job.missing)
        tensors |= by_value_tensors(layout, regions[1].map, job.by_value_base, job.part.full)
    _clear(store, job.part.node, job.abandoned)  # before anything is written: the room may be needed
    try:
        part = write_base(store, job.part, state, tensors)
    except Exception:
        with _only_logged("what was written of step %d is left where it is", job.part.step):
            _clear(store, job.part.node, [job.part])
        raise
    tensors.clear()
    _let_go(store, part, job)
    _clear(store, job.part.node, ())
    nbytes = sum(file.nbytes for file in part.files)
    return Saved(part.step, part.record, nbytes, time.perf_counter() - started, time.process_time() - cpu)


class _Shell:
    """What a restore needs of an optimizer when there is no training: a place for its state."""

    def __init__(self) -> None:
        self.state: dict[Any, Any] = collections.defaultdict(dict)
        self.param_groups: list[dict[str, Any]] = []


def _redo(job: Save, layout: Layout, slots: Region, static: Region | None) -> tuple[dict[str, torch.Tensor], NodeState]:
    """Produce the state from a ring that stands still."""
    spec, part = job.spec, job.part
    torch.set_num_threads(job.threads)
    ring = SlotRing(slots, layout, job.generation)
    base = layout.slot_offset(part.record) + layout.by_value_base(spec.local_ranks[0])
    tensors = by_value_tensors(layout, slots.map, base, part.full)
    if not part.full:
        return tensors, NodeState(spec, (), b"", job.rank_states)
    named = [param.tensor for param in spec.params] + list(spec.static)
    live = {
        one.name: torch.nn.Parameter(torch.empty(one.shape, dtype=dtype_of(one.dtype)), requires_grad=False)
        for one in named
    }
    shells = [_Shell() for _ in spec.optimizers]
    restorer = Restorer(
        layout,
        slots,
        static,
        None,
        ring,
        cast("dict[str, torch.Tensor]", live),
        cast("list[Optimizer]", shells),
        build=lambda index, groups: rebuild_from_spec(spec.optimizers[index], groups),
    )
    restorer.restore(part.record, None, job.metas, (), b"")
    for one in named:
        tensors[model_name(one.name)] = live[one.name].data
    missing: list[tuple[int, int, str]] = []
    plain: dict[int, dict[int, dict[str, Any]]] = {}
    for index, param in enumerate(spec.params):
        for owner in param.owners:
            kept = shells[owner.optimizer].state.get(live[param.tensor.name], {})
            for one_state in owner.state:
                value = kept.get(one_state.key)
                if isinstance(value, torch.Tensor):
                    tensors[state_name(owner.optimizer, param.tensor.name, one_state.key)] = value
                else:
                    missing.append((index, owner.optimizer, one_state.key))
            values = {key: value for key, value in kept.items() if not isinstance(value, torch.Tensor)}
            if values:
                plain.setdefault(index, {})[owner.optimizer] = values
    return tensors, NodeState(spec, tuple(missing), codec.encode(plain) if plain else b"", job.rank_states)


@contextlib.contextmanager
def _only_logged(message: str, step: int) -> Iterator[None]:
    """For what is done after a failure, which must not take its place."""
    try:
        yield
    except StorageError:
        _log.exception(message, step)


def _clear(store: Store, node: str, abandoned: Sequence[Part]) -> None:
    """Delete what killed writers have left."""
    left = leftovers(read_catalog(store), node, abandoned)
    for path in left:
        store.delete(path)
    if left:
        _log.info("deleted %d files of checkpoints that were never finished", len(left))


def _let_go(store: Store, part: Part, job: Save) -> None:
    """Delete what is superseded, once what replaces it has been read back and found good."""
    catalog = read_catalog(store)
    newest = next((one for one in catalog.complete if one.parts.get(part.node) == part), None)
    own = newest or Checkpoint(part.timeline, part.record, {part.node: part})
    problems = [problem for problem in verify(store, own) if newest is not None or problem != "parts are missing"]
    if problems:
        raise StorageError(f"what was written cannot be read back: {'; '.join(problems)}")
    if newest is None or 0 not in part.ranks:
        return  # other nodes' parts are on their way; the first rank's node tidies up
    for one in superseded(catalog.checkpoints, job.keep_last, job.keep_every_steps):
        _log.info("letting go of step %d", one.step)
        remove(store, one)
