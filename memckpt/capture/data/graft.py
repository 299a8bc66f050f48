"""Public functions: a live DataLoader gets a subclass of its own class, and later its class back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from memckpt.capture.data.iteration import (
    FORMAT,
    RECORD,
    GraftedLoader,
    LoaderRecord,
    drop_iterator,
    record_of,
    subclass,
)
from memckpt.errors import DataPositionError
from memckpt.state import rng
from memckpt.state.rng import RngState

_DISPATCHED = frozenset({"dispatched", "dispatched_digest", "sampler_ended"})
_OTHER_WORKERS = (
    "a loader had num_workers={}, and has {} now: what is drawn in loading, and the order of later passes or of a "
    "stream, may differ"
)


def graft(loader: DataLoader[Any], *, lookahead: int = 0) -> None:
    """Adopt `loader` in place, so that its position can be read and resumed.

    Call it before the first iter() of the training, from the thread that iterates. The object keeps its identity and
    its attributes, and stays an instance of its class; it gains no state_dict. A run with the graft draws the same
    numbers and sees the same data as one without. Idempotent.

    Args:
        lookahead: number of batches that a wrapper takes before its own consumer has asked for them. If loading draws
            from this process's generators, their states are then noted before each batch is loaded, so that a batch
            that was read ahead can be loaded again identically.

    Raises:
        TypeError: `loader` is not a DataLoader, or its class forbids its instances to change class.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"expected a torch DataLoader, found {type(loader).__name__}")
    if record_of(loader) is not None:
        return
    # A loader built by calling a grafted loader's class has that class, but no record.
    base = getattr(type(loader), "_memckpt_base", type(loader))
    loader.__class__ = subclass(base, GraftedLoader)
    loader.__dict__[RECORD] = LoaderRecord(loader, lookahead)


def look_ahead(loader: DataLoader[Any], batches: int) -> None:
    """Change the `lookahead` of a grafted loader, from the current pass on."""
    record = _require(loader)
    record.lookahead = batches
    record.current.look_ahead(batches)


def is_grafted(loader: object) -> bool:
    """Whether `graft` was called on this object, and `release` was not."""
    return record_of(loader) is not None


def release(loader: DataLoader[Any]) -> None:
    """Undo `graft`; nothing of this package stays in the loader. Does nothing to a plain loader.

    Persistent workers carry taps, so their iterator is dropped and they end; the next iter() starts new ones. An
    iteration in progress can be finished by the caller.
    """
    if record_of(loader) is None:
        return
    iterator = getattr(loader, "_iterator", None)
    if loader.num_workers:
        drop_iterator(loader)
    elif isinstance(iterator, _BaseDataLoaderIter) and hasattr(iterator, "_memckpt_base"):
        iterator._index_sampler = iterator._index_sampler.tapped
        iterator.__class__ = iterator._memckpt_base
    del loader.__dict__[RECORD]
    grafted: Any = type(loader)
    loader.__class__ = grafted._memckpt_base


def position(
    loader: DataLoader[Any], *, exhausted: bool = False, ahead: int = 0, iterator: object = None
) -> dict[str, Any]:
    """The position of a grafted loader, after a batch was consumed and before the next is asked for.

    Cheap enough for every training step. Contains plain values only (None, bool, int, float, str, bytes, list, tuple,
    dict with str or int keys). Generator states in it are shared with later positions: do not change them.

    Args:
        exhausted: the caller takes no further batch from this pass, even if the loader has more (a limit on batches,
            the end of the epoch).
        ahead: number of batches that the caller has taken but not consumed (a prefetching wrapper); they are handed out
            again. Without workers they are loaded under the generators of that moment, so a dataset that draws from the
            global ones yields other data; unless the loader was grafted with this `lookahead`: then under those of the
            first time.
        iterator: the iterator that the caller takes its batches from. None: the newest one. Other code may iterate the
            loader meanwhile, for example to compute statistics.

    Raises:
        DataPositionError: the loader is not grafted, or `ahead` is more than the last few batches.
    """
    return _require(loader).position(loader, exhausted, ahead, iterator)


def resume(loader: DataLoader[Any], position: dict[str, Any], *, on_live: Callable[[], None] | None = None) -> None:
    """Make the next iter() of a grafted loader continue after `position`.

    Call it before that iter(), in a process that built the loader in the same way. Skipped samples are not loaded;
    global generators stay as they are. The loader's own generators are set here. An existing iterator is dropped. Until
    the first batch has been handed out, a further iter() continues at the same position. If the position was exhausted,
    the next iteration is empty, and the one after it is the next pass.

    Args:
        on_live: for a loader grafted with a `lookahead`: called once, between the last fetch that repeats one of the
            killed process and the first new one. It is the moment to restore global generators; the loader's own are
            set again right before it.

    Raises:
        DataPositionError: the loader is not grafted, `position` is invalid, or the loader hands out its batches
            out of order. A sampler that does not repeat itself raises it later: at iter(), or without workers at the
            first batch.
    """
    record = _require(loader)
    _validate(loader, position)
    record.resume(loader, position)
    record.live_at, record.on_live = position, on_live


def go_live(loader: DataLoader[Any]) -> None:
    """Declare that the resumed pass is in progress, or its empty iteration over, though nothing new was fetched.

    For a caller that knows before the loader does: see `on_live` of `resume`. Idempotent.
    """
    _require(loader).go_live()


def global_generators() -> RngState:
    """The state of this process's global generators, for example when a loader is made."""
    return rng.capture()


@contextmanager
def under_generators(state: RngState, *, keep: bool = False) -> Iterator[None]:
    """Run the block with the global generators in this state.

    Args:
        keep: leave them where the block has moved them; else their previous state is restored after it.
    """
    with nullcontext() if keep else rng.preserved():
        rng.restore(state)
        yield


def handed_out(loader: DataLoader[Any]) -> int:
    """Number of batches of the current pass handed to the caller, including those of earlier processes."""
    return _require(loader).current.batches


def comparable(position: dict[str, Any], *, between_passes: bool = False) -> dict[str, Any]:
    """The part of a position that decides which batches follow, for the check of a resume.

    Leaves out knowledge that a resumed process need not have.

    Args:
        between_passes: the next batch begins a new pass, so the place in this one does not matter.
    """
    left_out = {"progress", "iterable", "inexact", *(("pass", "exhausted", "has_iterator") if between_passes else ())}
    part = {name: value for name, value in position.items() if name not in left_out}
    if part.get("pass") is not None:
        # Which worker's end of data arrives first is chance, and each arrival dispatches another batch.
        skipped = {"choices", "forked", *(_DISPATCHED if position.get("iterable") else ())}
        part["pass"] = {name: value for name, value in part["pass"].items() if name not in skipped}
    return part


def derived(position: dict[str, Any], batches: int) -> dict[str, Any]:
    """A position `batches` after the start of the same pass, for a loader that partitions its data differently.

    For a run that continues with another number of ranks. Index checksums cannot be compared there, and are left out.
    """
    current = position["pass"]
    if current is None:
        return position
    moved = {
        **current,
        "batches": batches,
        "dispatched": batches,
        "digest": None,
        "dispatched_digest": None,
        "worker_states": {},
        "sampler_ended": False,
        "draws": {},
        "draws_lost": False,
        "fetches": [],
    }
    return {**position, "pass": moved}


def restore_generators(loader: DataLoader[Any], position: dict[str, Any]) -> None:
    """Set only the generators and sampler counters that the loader owns to `position`.

    Call it as late as possible before training continues: draws from them in between would be lost.

    Raises:
        DataPositionError: the loader is not grafted, or a recorded generator is missing.
    """
    record = _require(loader)
    _validate(loader, position)
    record.restore_own(position)


def recreate_persistent_iterator(loader: DataLoader[Any], position: dict[str, Any]) -> None:
    """Give a loader with persistent workers the iterator that the killed process had at `position`.

    For loaders between two passes (validation). Their workers are seeded once in a process's life, so the next iter()
    must find them instead of drawing a seed. A stream is read again, as it may go on from pass to pass. Does nothing
    for other loaders, or if the killed process had no iterator. Leaves the global generators as they are.

    Raises:
        DataPositionError: as for `resume`.
    """
    record = _require(loader)
    _validate(loader, position)
    record.restore_own(position)
    if position["pass"] is None:
        return
    persistent = loader.persistent_workers and position["has_iterator"]
    if persistent or record.goes_on(loader, position["pass"]):
        record.resume(loader, {**position, "exhausted": True})
        iterator = loader._get_iterator()
        if persistent:
            loader._iterator = iterator
        record.restore_own(position)


def unreplayable(loader: DataLoader[Any]) -> str | None:
    """One line on why an exact resume of this loader cannot be promised; None if no reason is known.

    May be called for any loader at any time. Some reasons show only during iteration, so call it again after the first
    batches. Others are found by checksums at `resume`.
    """
    kind = getattr(type(loader), "_memckpt_base", type(loader))
    if loader.num_workers > 1 and not getattr(loader, "in_order", True):
        return "in_order=False: the number of batches does not tell which ones were handed out"
    if not kind.__iter__.__module__.startswith(("torch.", "torchdata.")):
        return f"{kind.__name__} overrides __iter__: only batches from its base class are counted"
    record = record_of(loader)
    own = LoaderRecord(loader, 0).own if record is None else record.own
    if own.stateless:
        return f"loader.{own.stateless} is a SystemRandom: the operating system's numbers cannot be repeated"
    if record is not None and record.inexact:
        return next(iter(record.inexact))
    if record is not None and record.iterated_before:
        return "the loader was iterated before it was grafted: its running iterator is not followed"
    return None


def remark(loader: DataLoader[Any]) -> str | None:
    """One line on what a resume of this loader rests on or costs; None if there is nothing to say."""
    if not isinstance(loader.dataset, IterableDataset):
        return None
    return (
        f"{type(loader.dataset).__name__} is an IterableDataset: a resume reads it again from its beginning, and skips "
        "what was trained by counting; it has to give the same samples in the same order at each start, so seed "
        "whatever shuffles it"
    )


def _validate(loader: DataLoader[Any], position: dict[str, Any]) -> None:
    found = position.get("format") if isinstance(position, dict) else type(position).__name__
    if found != FORMAT:
        raise DataPositionError(f"expected a loader position of format {FORMAT}, found {found!r}")
    if loader.num_workers != position["num_workers"]:
        _require(loader).depart(_OTHER_WORKERS.format(position["num_workers"], loader.num_workers))
    if loader.num_workers > 1 and not getattr(loader, "in_order", True):
        raise DataPositionError(
            "expected a loader that hands out its batches in order, found in_order=False; "
            "without it there is no position to go back to"
        )


def _require(loader: DataLoader[Any]) -> LoaderRecord:
    record = record_of(loader)
    if record is None:
        raise DataPositionError(f"expected a grafted loader, found a plain {type(loader).__name__}; call graft() first")
    return record
