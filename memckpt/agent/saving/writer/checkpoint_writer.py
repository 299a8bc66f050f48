"""The writer of checkpoints: from an agent's regions into a store, one job after the other.

The main thread writes urgent jobs with the agent's priority, and imports torch's parts ahead. A thread of the lowest
priority does the rest: a process could not get its priority back.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch

from memckpt.agent.saving.writer.record_writer import Complaints
from memckpt.errors import (
    MALFORMED,
    AgentError,
    DamagedStateError,
    ForeignStateError,
    MemckptError,
    StorageAwayError,
    StorageError,
    StorageFullError,
)
from memckpt.memory.region import GenerationRegions, Region
from memckpt.memory.slots import SlotRing
from memckpt.processes.helper import AgentEnd, step_back
from memckpt.processes.launch import extend_search_path
from memckpt.protocol.channel import WriterChannel
from memckpt.protocol.descriptors import readable
from memckpt.protocol.storing import Announce, Announced, LookForAnnounced, LookForRoom, Room, Save, Saved, SaveFailed
from memckpt.recovery.restore import HostState, Restorer
from memckpt.state.layout import Layout
from memckpt.state.records import Timeline
from memckpt.storage.catalog import PASSED, PINNED, Catalog, Checkpoint, read_catalog, read_keys, remove, remove_batch
from memckpt.storage.chain import unneeded_batches
from memckpt.storage.dcp import write_merged
from memckpt.storage.format import Batch, NodeState, Part, decode_commit, encode_node_state
from memckpt.storage.node_files import by_value_tensors, state_tensors, write_commit, write_files
from memckpt.storage.owner import CLAIM, read_claim, refuse_other
from memckpt.storage.retention import delete_blindly, keep_room, leftovers, make_room, no_room, superseded
from memckpt.storage.store import Store, is_missing, read_back, store_is_away
from memckpt.storage.urls import open_store

_log = logging.getLogger("memckpt.writer")
#: The file that names the record after which the first rank's node will take a checkpoint.
_ANNOUNCED = "announced.json"
#: Bytes of a checkpoint beside its tensors, about: for each of them, and for all.
_TENSOR_BYTES, _FILES_BYTES = 512, 16 << 10
_complaints = Complaints(_log)
#: Commit files that have been read, by the store's URL.
_known: dict[str, dict[str, Part | Batch]] = {}


def serve(channel: WriterChannel) -> None:
    """Do the agent's jobs; before the first one, import torch's parts."""
    if not readable(channel, 0):
        warm_up()
    with ThreadPoolExecutor(1, "memckpt-writer", step_back) as background:
        while True:
            job, fds = channel.receive(None)
            match job:
                case Announce():
                    announce(job)
                case LookForAnnounced():
                    channel.send(Announced(job.timeline, announced(job)))
                case LookForRoom():
                    channel.send(Room(job.url, free(job)))
                case Save():
                    channel.send(_save(job, fds, background))
                case _:
                    raise AgentError(f"expected a job for the writer from the agent, found {type(job).__name__}")


def _save(job: Save, fds: list[int], background: ThreadPoolExecutor) -> Saved | SaveFailed:
    regions = [Region.open(fd) for fd in fds]
    try:
        if job.urgent:
            return try_to_save(job, regions)
        return background.submit(try_to_save, job, regions).result()
    finally:
        for region in regions:
            region.close()


def warm_up() -> None:
    """Import what torch imports with the first optimizer, before the first job is waited for."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def try_to_save(job: Save, regions: list[Region]) -> Saved | SaveFailed:
    """The result of :func:`save`, or why it failed; the caller closes the regions."""
    try:
        saved = save(job, regions)
    except (MemckptError, OSError, RuntimeError, MemoryError) as error:
        _complaints.log_failure(f"saving step {job.part.step} failed", error)
        missing = error.missing if isinstance(error, StorageFullError) else None
        if isinstance(error, StorageAwayError):
            missing = 0  # it is back as soon as it says at all how much is free
        return SaveFailed(job.part.step, f"{type(error).__name__}: {error}", missing)
    _complaints.reset()
    return saved


def save(job: Save, regions: list[Region]) -> Saved:
    """Write and verify a part of a checkpoint; delete what retention no longer keeps."""
    started, cpu = time.perf_counter(), time.process_time()
    store = open_store(job.url, job.witness)
    layout = Layout(job.spec)
    state = NodeState(job.spec, job.missing, job.plain, job.rank_states)
    if job.source == "ring":
        static = regions[1] if len(regions) > 1 else None
        tensors, state = _redo(job, layout, GenerationRegions(layout, regions[0], static, None))
    else:
        static = regions[2] if len(regions) > 2 else None
        tensors = {}
        if job.part.full:
            tensors = state_tensors(layout, regions[0].map, static.map if static else None, job.missing)
        tensors |= by_value_tensors(layout, regions[1].map, job.by_value_base)
    _clear(store, job.part, job.abandoned, job.witness)  # before anything is written: the room may be needed
    part = _write(store, job, state, tensors)
    tensors.clear()
    untidy, whole = Untidy(), False
    with untidy:  # the part is committed; errors of the rest are counted
        if whole := _is_last(store, part):
            _tidy_up(store, part, job, untidy)
        if job.reserve:
            keep_room(store, _catalog_for(store, part), job.reserve, job.keep_every_steps, part)
    nbytes = sum(file.nbytes for file in part.files)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    return Saved(part.step, part.record, nbytes, seconds, cpu_seconds, part.timeline, str(untidy), whole)


def _write(store: Store, job: Save, state: NodeState, tensors: dict[str, torch.Tensor]) -> Part:
    """Make room for a part, and write it. Raises StorageFullError, or ForeignStateError: its name is taken."""
    _refuse_other_ranks(store, job.part)
    what = f"step {job.part.step}"
    nbytes = sum(one.numel() * one.element_size() for one in tensors.values()) + len(encode_node_state(state))
    needed = nbytes + _TENSOR_BYTES * len(tensors) + _FILES_BYTES
    free = store.free()
    if free is not None and free < needed:
        make_room(store, _catalog_for(store, job.part), what, needed, job.keep_every_steps)
    try:
        return _write_once(store, job, state, tensors)
    except StorageFullError as error:
        # Others were faster, or less may be written than is free: a quota.
        if not delete_blindly(store, _catalog_for(store, job.part), job.keep_every_steps):
            raise no_room(what, store.url, needed, store.free(), refused=str(error)) from error
    try:
        return _write_once(store, job, state, tensors)
    except StorageFullError as error:
        raise no_room(what, store.url, needed, store.free(), refused=str(error)) from error


def _write_once(store: Store, job: Save, state: NodeState, tensors: dict[str, torch.Tensor]) -> Part:
    try:
        part = write_files(store, job.part, state, tensors)
        read_back(store, part.files)
        write_commit(store, part)
        _known.setdefault(store.url, {})[part.commit_path] = part
    except Exception:  # raised again; first what was written gives its room back
        with _only_logged("what was written of step %d is left where it is", job.part.step):
            _clear(store, job.part, [job.part])
        raise
    return part


def announce(job: Announce) -> None:
    """Note in the store after which record a checkpoint will be taken; other nodes look."""
    with _only_logged("the checkpoint after record %d is not announced to other nodes", job.record):
        open_store(job.url, job.witness).write(_ANNOUNCED, msgspec.json.encode((job.timeline, job.record)))


def announced(job: LookForAnnounced) -> int | None:
    """The record that the first rank's node has announced for this timeline, if any."""
    try:
        timeline, record = msgspec.json.decode(open_store(job.url).read(_ANNOUNCED), type=tuple[Timeline, int])
    except StorageError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            _log.warning("whether a checkpoint is announced is not known: %s", error)
        return None
    except MALFORMED as error:
        _log.warning("expected an announced checkpoint in %s, found something else: %s", _ANNOUNCED, error)
        return None
    return record if timeline == job.timeline else None


def free(job: LookForRoom) -> int | None:
    """Bytes that are free in a store; None where the store does not say."""
    try:
        return open_store(job.url, job.witness).free()
    except StorageError as error:
        _log.info("whether there is room is not known: %s", error)
        return None


def _redo(job: Save, layout: Layout, regions: GenerationRegions) -> tuple[dict[str, torch.Tensor], NodeState]:
    """Produce the state from a ring that stands still."""
    spec, part = job.spec, job.part
    torch.set_num_threads(job.threads)
    extend_search_path(job.search_path)
    ring = SlotRing(regions.slots, layout, job.generation)
    ring.check_by_value(part.record, spec.local_ranks)
    by_value = by_value_tensors(layout, regions.slots.map, layout.by_value_base(part.record))
    if not part.full:
        return by_value, NodeState(spec, (), b"", job.rank_states)
    host = HostState(spec, by_value=False)
    restorer = Restorer(layout, regions, ring, host.tensors, host.optimizers, build=host.build)
    restorer.restore(part.record, None, job.metas, (), b"")
    tensors, state = host.described(job.rank_states)
    return {**tensors, **by_value}, state


@contextlib.contextmanager
def _only_logged(message: str, step: int) -> Iterator[None]:
    """Log errors of what follows a failure, so that they do not take its place."""
    try:
        yield
    except StorageError:
        _log.exception(message, step)


def _catalog_for(store: Store, part: Part, witness: str = "") -> Catalog:
    """The catalog of the part's run; ForeignStateError: the store is another run's. StorageAwayError: it is away."""
    catalog = read_catalog(store, _known.setdefault(store.url, {}))
    refuse_other(store.url, catalog.owner, part.run)
    if witness and not catalog.claimed and CLAIM not in catalog.damaged:
        raise store_is_away(store.url, witness)
    return catalog


def _clear(store: Store, part: Part, abandoned: Sequence[Part], witness: str = "") -> None:
    """Delete what killed writers have left: rank 0's node looks each time, others where one of theirs was killed."""
    owner = "" if 0 in part.ranks or abandoned else _claimed_by(store)
    if owner:
        refuse_other(store.url, owner, part.run)
    else:
        _delete(store, leftovers(_catalog_for(store, part, witness), part.node, abandoned), Untidy())


def _claimed_by(store: Store) -> str:
    """The run that claims a store; empty: none that can be read does."""
    try:
        return read_claim(store)
    except DamagedStateError:
        return ""  # commit files may know


def _refuse_other_ranks(store: Store, part: Part) -> None:
    """See that no committed part of other ranks is replaced; else raise ForeignStateError."""
    path = part.commit_path
    if path not in store.find(path.rpartition("/")[0]):
        return
    try:
        found = decode_commit(store.read(path), path)
    except DamagedStateError:
        return  # it is good for nothing
    except StorageError as error:
        if is_missing(error):
            return  # it has just been deleted
        raise
    if isinstance(found, Part) and found.ranks != part.ranks:
        raise ForeignStateError(
            f"expected {path} in {store.url} to be the part of ranks {list(part.ranks)}, found that of ranks "
            f"{list(found.ranks)}, which is kept: two nodes may have the same name; set MEMCKPT_NODE to a name of each "
            "node's own"
        )


def _is_last(store: Store, part: Part) -> bool:
    """Whether a part that has just been committed completes its checkpoint: then its writer tidies up for all."""
    found, known = Checkpoint(part.timeline, part.record, {}), _known.setdefault(store.url, {})
    for path in store.find(part.commit_path.rpartition("/")[0]):
        try:
            content = known[path] if path in known else decode_commit(store.read(path), path)
        except (DamagedStateError, StorageError) as error:
            _log.info("a part of step %d is not counted: %s", part.step, error)
            continue
        known[path] = content
        if isinstance(content, Part) and content.run == part.run:
            found.parts[content.node] = content
    return found.complete


class Untidy:
    """Refusals while tidying up: one inside ``with`` is counted, and the rest goes on. Its text is the first."""

    def __init__(self) -> None:
        self._first = ""
        self._count = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, (StorageError, DamagedStateError)):
            return False
        self._first = self._first or str(error)
        self._count += 1
        return True

    def __str__(self) -> str:
        return self._first + (f" (and {self._count - 1} more)" if self._count > 1 else "")


def _delete(store: Store, left: Sequence[str], untidy: Untidy) -> None:
    deleted = 0
    for path in left:
        with untidy:
            store.delete(path)
            deleted += 1
    if deleted:
        _log.info("deleted %d files of checkpoints that were never finished", deleted)


def _tidy_up(store: Store, part: Part, job: Save, untidy: Untidy) -> None:
    """Once all parts are there, make one checkpoint of them for stock tools, and delete what is superseded."""
    catalog = _catalog_for(store, part)
    _delete(store, leftovers(catalog, part.node, ()), untidy)
    mine = [one for one in catalog.complete if one.parts.get(part.node) == part]
    if not mine:
        return  # other parts are on their way
    if PASSED in catalog.unreadable or PASSED in catalog.damaged:
        raise StorageError(f"nothing is let go of: {catalog.unreadable.get(PASSED) or catalog.damaged[PASSED]}")
    kept = catalog.unsure | read_keys(store, PINNED)
    gone = superseded(catalog.checkpoints, job.keep_last, job.keep_every_steps, part, kept)
    for one in catalog.complete:  # not only this one: a writer may have been killed before it came to it
        if one.merged_path not in catalog.files and one not in gone:
            with untidy:
                write_merged(store, one.directory, one.tensor_nodes)
    for one in gone:
        with untidy:
            remove(store, one)
            _log.info("let go of step %d", one.step)
    unsure = [one for one in catalog.complete if one.key in catalog.unsure]
    for batch in unneeded_batches(catalog, [*catalog.complete[: job.keep_last], *mine, *unsure]):
        with untidy:
            remove_batch(store, batch)


def main(end: AgentEnd) -> None:
    serve(end.channel)
