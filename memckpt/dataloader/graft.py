"""The public functions: a live DataLoader is given a subclass of its own class, and later its class back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from memckpt.dataloader import own_state
from memckpt.dataloader.iteration import (
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


def graft(loader: DataLoader[Any], *, lookahead: int = 0) -> None:
    """Adopt `loader` in place, so that its position can be read and resumed.

    Call it before the first iter() of the training it is to be part of, from the thread that iterates.
    The object stays the same one, with its attributes, and an instance of its class; it gains no
    state_dict. A run with the graft draws the same numbers and sees the same data as one without.
    Grafting twice is the same as once.

    Args:
        lookahead: how many batches a wrapper takes from the loader before its own consumer has asked for them. Where
            loading draws from this process's generators, those are then noted before each batch is loaded, so that one
            which was read ahead can be loaded again as it was.

    Raises:
        TypeError: `loader` is not a DataLoader, or its class forbids its instances to change class.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"expected a torch DataLoader, found {type(loader).__name__}")
    if record_of(loader) is not None:
        return
    # A loader that was built by calling the class of a grafted one has that class, but no record.
    base = getattr(type(loader), "_memckpt_base", type(loader))
    loader.__class__ = subclass(base, GraftedLoader)
    loader.__dict__[RECORD] = LoaderRecord(loader, lookahead)


def is_grafted(loader: object) -> bool:
    """Whether `graft` was called on this very object, and `release` was not."""
    return record_of(loader) is not None


def release(loader: DataLoader[Any]) -> None:
    """Undo `graft`; nothing of this package stays in the loader. Does nothing to a plain loader.

    Persistent workers carry taps, so their iterator is dropped and they end; the next iter() starts new
    ones. An iteration that is under way in the caller's hands can be finished.
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
    """The position of a grafted loader, after a batch has been consumed and before the next is asked for.

    Cheap enough for every training step. Only plain values (None, bool, int, float, str, bytes, list,
    tuple, dict with str or int keys); generator states in it are shared with later positions, so store it
    or drop it, but do not change it.

    Args:
        exhausted: the caller will not take another batch from this pass, whatever the loader still has
            (a limit on batches, the end of the epoch).
        ahead: how many of the batches it was handed the caller has not consumed (a prefetching wrapper);
            they are handed out again. Without workers they are then loaded under the generators of that
            moment, so a dataset that draws from the global ones makes something else of them, unless the
            loader was grafted with this `lookahead`: then it is under those of the first time.
        iterator: the iterator that the caller takes its batches from. None: the newest one. Other code may iterate
            the loader meanwhile (to compute statistics, say), and its iterator is not the one to go on with.

    Raises:
        DataPositionError: the loader is not grafted, or `ahead` is more than the last few batches.
    """
    return _require(loader).position(loader, exhausted, ahead, iterator)


def resume(loader: DataLoader[Any], position: dict[str, Any], *, on_live: Callable[[], None] | None = None) -> None:
    """Let the next iter() of a grafted loader go on behind `position`.

    Call it before that iter(), in a process that built the loader in the same way. Skipped samples are
    not loaded; global generators are left as they are found. The loader's own generators are set here
    already. An iterator that was made before is dropped. Until the first batch has been handed out, a
    further iter() goes on at the same position. If the position was exhausted, the next iteration is
    empty, and the one after it is the next pass.

    Args:
        on_live: for a loader that was grafted with a `lookahead`: called once, between the last fetch that repeats
            one of the killed process and the first that does not. It is the moment to restore global generators;
            the loader's own are set again right before it.

    Raises:
        DataPositionError: the loader is not grafted, `position` is not one, or the loader hands out its
            batches differently (workers, order). A sampler that does not repeat itself is found out
            later, with the same error: at iter(), or without workers at the first batch.
    """
    record = _require(loader)
    _validate(loader, position)
    record.resume(loader, position)
    record.live_at, record.on_live = position, on_live


def go_live(loader: DataLoader[Any]) -> None:
    """The resumed pass is under way, or its empty iteration over, though nothing new was fetched.

    For a caller that knows it before the loader does: see `on_live` of `resume`. Does nothing where it has happened.
    """
    _require(loader).go_live()


def global_generators() -> RngState:
    """The state of the global generators of this process: under which a loader is made, say."""
    return rng.capture()


@contextmanager
def under_generators(state: RngState) -> Iterator[None]:
    """Do what draws from the global generators as when they had this state; afterwards they are as they were."""
    with rng.preserved():
        rng.restore(state)
        yield


def handed_out(loader: DataLoader[Any]) -> int:
    """How many batches of the current pass the caller has been given, those of earlier processes included."""
    return _require(loader).current.batches


def comparable(position: dict[str, Any], *, between_passes: bool = False) -> dict[str, Any]:
    """What of a position decides which batches follow; for the check of a resume.

    Left out is what this process happens to know, which one that has resumed need not.

    Args:
        between_passes: the next batch begins a new pass, so that the place in this one is of no account.
    """
    left_out = {"progress", "pass", "exhausted"} if between_passes else {"progress"}
    return {name: value for name, value in position.items() if name not in left_out}


def derived(position: dict[str, Any], batches: int) -> dict[str, Any]:
    """A position `batches` behind the start of the same pass, for a loader that cuts its data in another way.

    For a run that goes on with another number of ranks. Nothing can be compared there, so no checksum is.
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
        "fetches": [],
    }
    return {**position, "pass": moved}


def restore_generators(loader: DataLoader[Any], position: dict[str, Any]) -> None:
    """Set the generators and sampler counters that the loader owns to `position`, and nothing else.

    Call it as late as possible before training goes on: whoever draws from them in between spoils them.

    Raises:
        DataPositionError: the loader is not grafted, or a recorded generator is missing.
    """
    record = _require(loader)
    _validate(loader, position)
    record.restore_own(position)


def recreate_persistent_iterator(loader: DataLoader[Any], position: dict[str, Any]) -> None:
    """Give a loader with persistent workers the iterator that the killed process had at `position`.

    For loaders between two passes (validation). Their workers are seeded once in a process's life, so the
    next iter() must find them there instead of drawing a seed. Does nothing without persistent workers or
    if the killed process had no iterator. Leaves the global generators as they are.

    Raises:
        DataPositionError: as for `resume`.
    """
    record = _require(loader)
    _validate(loader, position)
    record.restore_own(position)
    if loader.persistent_workers and position["has_iterator"] and position["pass"] is not None:
        record.resume(loader, {**position, "exhausted": True})
        loader._iterator = loader._get_iterator()
        record.restore_own(position)


def unreplayable(loader: DataLoader[Any]) -> str | None:
    """One line on why this loader cannot be promised to resume exactly; None if nothing is known against it.

    May be asked of any loader at any time. Some reasons show only when the loader has been iterated, so
    ask again after the first batches. What cannot be known beforehand is found at `resume` by checksums.
    """
    name = type(loader.dataset).__name__
    kind = getattr(type(loader), "_memckpt_base", type(loader))
    if loader.num_workers > 1 and not getattr(loader, "in_order", True):
        return "in_order=False: which batches have been handed out is not decided by their number"
    if isinstance(loader.dataset, IterableDataset):
        return f"{name} is an IterableDataset: on resume its earlier samples are read again and discarded"
    if not kind.__iter__.__module__.startswith(("torch.", "torchdata.")):
        return f"{kind.__name__} overrides __iter__: only what its base class hands out is counted"
    roots = {"batch_sampler": loader.batch_sampler, "sampler": loader.sampler, "dataset": loader.dataset}
    stateless = own_state.unrepeatable_generator(roots)
    if stateless is not None:
        return f"loader.{stateless} is a SystemRandom: the operating system's numbers cannot be repeated"
    record = record_of(loader)
    if record is not None and record.lazy_sampler is not None:
        return f"the sampler {record.lazy_sampler} draws from a global generator while training draws from it too"
    if record is not None and record.iterated_before:
        return "the loader was iterated before it was grafted: its running iterator is not followed"
    return None


def _validate(loader: DataLoader[Any], position: dict[str, Any]) -> None:
    found = position.get("format") if isinstance(position, dict) else type(position).__name__
    if found != FORMAT:
        raise DataPositionError(f"expected a loader position of format {FORMAT}, found {found!r}")
    if loader.num_workers != position["num_workers"]:
        raise DataPositionError(
            f"expected {position['num_workers']} workers, as in the run that is continued, found "
            f"{loader.num_workers}; random transforms in workers differ then, so keep num_workers"
        )
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
