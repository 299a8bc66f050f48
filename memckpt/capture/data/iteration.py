"""Iteration of a grafted loader: its record, and the classes of grafted loaders and iterators."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from memckpt.capture.data import own_state
from memckpt.capture.data.own_state import OwnObjects
from memckpt.capture.data.passes import Pass, Phase
from memckpt.capture.data.sampler_tap import content_digest, tap
from memckpt.capture.data.worker_rng import ReceivedStates, RestoringInit, ShippingCollate, WorkerBatch
from memckpt.errors import DataPositionError
from memckpt.state import rng
from memckpt.state.rng import RngState

FORMAT = 3
RECORD = "_memckpt_record"
_END = object()
_DRAWS_LOST = (
    "the sampler {} draws from a global generator again and again in a pass, and not all of its draws are carried; let "
    "it draw from a torch.Generator of its own"
)
_OTHER_STREAM = (
    "the stream {} gave other samples when its first {} batches were read again. Some samples are trained twice, and "
    "others never. Give what shuffles it a seed that is the same at each start"
)
_OTHER_PASS = (
    "the stream {} gave other samples when its last pass, of {} batches, was read again. Those of later passes may be "
    "others, too. Let each pass follow from numbers that it counts in attributes, or from a seed"
)
_SHARED_STREAM = (
    "the stream {} draws from the global generator of {} while training draws from it too, so that it may be another "
    "one when it is read again; give it a generator of its own, or a worker"
)
_CHOSEN = (
    "loader.{} had been changed before this pass in the run that is continued, and has another value. Samples may "
    "differ. Carry it: register('data', DATASET, attributes=['{}'])"
)
_COPIED = (
    "loader.{} was another one in the copy of the dataset that the workers had, and theirs is now made anew. Samples "
    "may differ. Set it once, before the loader is iterated, or persistent_workers=False"
)
_KEPT = (
    "loader.{} changes, and is not carried: it is no list, dict, deque or array, or has over 4096 elements; derive the "
    "order from a torch.Generator, or from the number of the epoch"
)
#: A look at what samplers keep that takes no longer is taken at each commit.
_QUICK_SECONDS = 2e-4

#: Called with the reason when a resumed iteration goes on with other data: the reports of this process's sessions.
departures: list[Callable[[str], None]] = []
_records: weakref.WeakSet[LoaderRecord] = weakref.WeakSet()
#: The iterators of grafted loaders that are alive.
made_iterators: weakref.WeakSet[Any] = weakref.WeakSet()


def followed() -> Iterator[object]:
    """Samplers and streams of all grafted loaders: their place is carried with that of the loader."""
    for record in _records:
        yield from record.own.with_places()


def parts_of(loader: DataLoader[Any]) -> dict[str, object]:
    """Objects below which the :class:`OwnObjects` of a loader are found, by name."""
    names = ("generator", "batch_sampler", "sampler", "dataset")
    collate_fn = loader.collate_fn
    if isinstance(collate_fn, ShippingCollate):
        collate_fn = collate_fn.collate_fn
    return {**{name: getattr(loader, name, None) for name in names}, "collate_fn": collate_fn}


class LoaderRecord:
    """A graft's knowledge of its loader.

    Refers to the loader weakly, and to its iterator not at all: when these are freed, the workers have to end.
    """

    def __init__(self, loader: DataLoader[Any], lookahead: int) -> None:
        self._loader = weakref.ref(loader)
        self.lookahead = lookahead
        self.current = Pass(construction={"global": {}, "own": {}}, lookahead=lookahead)
        self.begun = False
        self.tapping = False
        self.holding = False
        self.rereading = self.refetching = False
        self._noting = False
        self.resuming: dict[str, Any] | None = None
        """A position to continue after, for every iter() until a batch has been handed out."""
        self.live_at: dict[str, Any] | None = None
        """The same, until the resumed pass goes beyond the batches that the killed process had fetched."""
        self.on_live: Callable[[], None] | None = None
        self.around: Callable[[Callable[[], Any]], Any] | None = None
        """Makes the result of an iter(); its argument makes what the loader itself would return."""
        self.watch_sampler = False
        self._kept_by_samplers: dict[str, int] = {}
        self._positions = 0
        self._looks_quickly = False
        self._after_fetch: RngState | None = None
        self._ended_with: tuple[int, int] | None = None
        self.inexact: dict[str, None] = {}
        """Why resumes of this loader are not exact, as far as that has shown; one reason each."""
        self.iterated_before = getattr(loader, "_iterator", None) is not None
        _records.add(self)
        self.own = OwnObjects(self._roots)
        self._baseline = self.own.capture()
        self._progress: own_state.Progress = {}
        self._born_choices = self.own.choices()

    def _roots(self) -> dict[str, object]:
        loader = self._loader()
        return {} if loader is None else parts_of(loader)  # its iterator may outlive it

    def phase(self) -> Phase:
        return {"global": rng.capture(), "own": self.own.capture()}

    def enter(self, phase: Phase) -> None:
        rng.restore(phase["global"])
        self.own.restore(phase["own"], self._progress)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        own = self.own.capture()
        with rng.preserved():
            try:
                yield
            finally:
                self.own.restore(own)

    def position(self, loader: DataLoader[Any], exhausted: bool, ahead: int, iterator: object) -> dict[str, Any]:
        current = self._pass_of(iterator)
        # Of several iterators, another one may be at its place already.
        if self.resuming is not None and getattr(iterator, "_memckpt_resumes", self.resuming) is self.resuming:
            return {**self.resuming, "exhausted": exhausted or self.resuming["exhausted"]}
        if current.draws_lost:
            self.inexact[_DRAWS_LOST.format(", ".join(self.own.unknown_samplers()))] = None
        current.exhausted = current.exhausted or exhausted
        self._positions += 1
        if self._looks_quickly or not self._positions & (self._positions - 1):  # else the 1st, 2nd, 4th, 8th ...
            began = time.thread_time()
            self._look_at_kept()
            self._looks_quickly = time.thread_time() - began < _QUICK_SECONDS
        own = self.own.capture()
        self.inexact.update(dict.fromkeys(map(_KEPT.format, self.own.outgrown)))
        for path, names in own_state.changed(self._baseline, own).items():
            known = self._progress.setdefault(path, [])
            known.extend(name for name in names if name not in known)
        return {
            "format": FORMAT,
            "num_workers": loader.num_workers,
            "iterable": isinstance(loader.dataset, IterableDataset),
            "pass": current.record(ahead) if self.begun else None,
            "own": own,
            "progress": {path: list(names) for path, names in self._progress.items()},
            "has_iterator": getattr(loader, "_iterator", None) is not None,
            "exhausted": current.exhausted,
            "inexact": list(self.inexact),
        }

    def _pass_of(self, iterator: object) -> Pass:
        """The pass of an iterator of this loader; the newest pass if the iterator is not one of ours."""
        if isinstance(iterator, _BaseDataLoaderIter) and getattr(iterator, RECORD, None) is self:
            followed: Pass = vars(iterator)["_memckpt_pass"]
            return followed
        return self.current

    def restore_own(self, position: dict[str, Any]) -> None:
        self.own.restore(position["own"], position["progress"])
        if self.own.lost:
            self.inexact[self.own.lost] = None

    def go_live(self) -> None:
        """Begin new data: set the generators to the position's, and make a further iter() the next pass."""
        self.resuming = None
        position, self.live_at = self.live_at, None
        if position is not None:
            self.restore_own(position)
        on_live, self.on_live = self.on_live, None
        if on_live is not None:
            on_live()

    @contextmanager
    def fetching(self, current: Pass) -> Iterator[None]:
        """Wrap one fetch of a loader that is read ahead, as far as loading happens in this process."""
        if self.rereading:
            yield
        elif current.refetch:
            current.fetching = current.refetch.popleft()
            self.refetching = True
            try:
                with self.preserved():
                    yield
            finally:
                self.refetching = False
        else:
            self.go_live()
            self._noting = True
            try:
                yield
            finally:
                self._noting = False

    def drawn(self, current: Pass) -> None:
        """Note that a batch's indices are drawn; the draws of its loading follow, if that happens in this process."""
        if self._noting:
            current.fetching = self.phase()
        elif current.fetching is not None:
            self.enter(current.fetching)

    def resume(self, loader: DataLoader[Any], position: dict[str, Any]) -> None:
        for path, names in position["progress"].items():
            known = self._progress.setdefault(path, [])
            known.extend(name for name in names if name not in known)
        self.restore_own(position)
        self.inexact.update(dict.fromkeys(position["inexact"]))
        if position["pass"] is not None:
            self.resuming = position
            drop_iterator(loader)

    # -- iterators

    def make_iterator(self, loader: DataLoader[Any], base: type[DataLoader[Any]]) -> Any:
        if self.resuming is not None:
            return self._resumed_iterator(loader, base, self.resuming)
        self._look_at_samplers()
        self.current = Pass(self.phase(), self._samples(), self._changed_choices(), lookahead=self.lookahead)
        self.begun = True
        if loader.num_workers:
            self.current.forked = self.own.copied()
        return self._construct(loader, base, self.current)

    def _samples(self) -> int | None:
        dataset: Any = getattr(self._loader(), "dataset", None)
        try:
            return len(dataset)
        except Exception:  # a stream, or one whose sampler asks for no length
            return None

    def remedy(self, record: dict[str, Any]) -> str:
        """What to do where a sampler gives other indices than in the recorded pass."""
        now = self._samples()
        if record["samples"] in (None, now):
            return "Build the loader over the same data, or let the sampler draw from a torch.Generator of its own"
        return (
            f"The dataset has {now} samples, and had {record['samples']}. Make it as long before restore(), or carry "
            "its length: register('data', DATASET, attributes=[NAME])"
        )

    def _changed_choices(self) -> dict[str, int]:
        born = self._born_choices
        return {path: digest for path, digest in self.own.choices().items() if digest != born.get(path)}

    @contextmanager
    def _copying(self, current: Pass) -> Iterator[None]:
        """Let workers that are made in the block have the copy of the datasets that the recorded ones had.

        What neither run has changed since it made its loader is configuration, and stays as it is.
        """
        recorded, now, born = current.forked, self.own.copied(), self._born_choices
        moved = {
            path
            for path, digest in recorded.get("choices", {}).items()
            if now["choices"].get(path) != digest
            and (now["choices"].get(path) != born.get(path) or path in current.choices)
        }
        numbers = {path: recorded["numbers"][path] for path in moved if path in recorded["numbers"]}
        for path in sorted(moved - numbers.keys()):
            self.depart(_COPIED.format(path))
        with self.own.with_numbers(numbers):
            current.forked = self.own.copied()
            yield

    def _resumed_iterator(self, loader: DataLoader[Any], base: type[DataLoader[Any]], position: dict[str, Any]) -> Any:
        record, exhausted = position["pass"], position["exhausted"]
        persistent = bool(loader.persistent_workers and loader.num_workers)
        iterable = isinstance(loader.dataset, IterableDataset)
        self._look_at_samplers()
        self.current = current = Pass.resumed(record, self.lookahead)
        self.begun = True
        chosen = self.own.choices()
        for path, digest in current.choices.items():
            if chosen.get(path) != digest and not exhausted:
                self.depart(_CHOSEN.format(path, path.rpartition(".")[2]))
        current.exhausted = exhausted
        again = exhausted and self.goes_on(loader, record)
        only_read = exhausted and not persistent and not position["has_iterator"]
        if only_read and not again:
            self.resuming = None
            return iter(())
        # Batches that a persistent worker loaded ahead, before it was told to start over, have moved its generators.
        # So they are loaded again, and discarded by the next pass in the same way.
        current.drained = exhausted and not again and not (persistent and not iterable)
        if current.drained:
            current.replay = None
        elif iterable:
            current.rewind()
        with self.preserved():
            self.enter(record["construction"])
            self.holding = loader.num_workers > 0 and not iterable
            try:
                with self._copying(current) if loader.num_workers else nullcontext():
                    iterator = self._construct(loader, base, current)
            finally:
                self.holding = False
            if iterable and not current.drained:
                self._read_and_discard(iterator, record, exhausted)
            else:
                _advance_counters(iterator, current.batches)
                if loader.num_workers:
                    self._prime(loader, iterator, record)
        # An empty iteration hands out nothing; the next one is the next pass.
        self.resuming = None if exhausted else position
        if only_read:
            return iter(())
        iterator._memckpt_over = exhausted and not current.drained
        iterator._memckpt_resumes = self.resuming
        return iterator

    def _construct(self, loader: DataLoader[Any], base: type[DataLoader[Any]], current: Pass) -> Any:
        """Build the loader's own kind of iterator with our taps; the loader itself keeps none."""
        received: ReceivedStates | None = None
        kept = {name: getattr(loader, name) for name in ("collate_fn", "worker_init_fn")}
        self.tapping = True
        try:
            if loader.num_workers:
                states = current.worker_states
                received = ReceivedStates(loader.prefetch_factor or 1, states)
                loader.collate_fn = ShippingCollate(kept["collate_fn"], received.key)
                loader.worker_init_fn = RestoringInit(kept["worker_init_fn"], states, loader.collate_fn)
            iterator: Any = base._get_iterator(loader)
        finally:
            self.tapping = False
            for name, value in kept.items():
                setattr(loader, name, value)
        iterator._memckpt_record = self
        iterator._memckpt_pass = current
        iterator._memckpt_received = received
        iterator._memckpt_sent = [0] * loader.num_workers
        iterator._memckpt_over = False
        iterator._memckpt_resumes = None
        iterator.__class__ = subclass(type(iterator), GraftedIterator)
        made_iterators.add(iterator)
        return iterator

    def _prime(self, loader: DataLoader[Any], iterator: Any, record: dict[str, Any]) -> None:
        """Dispatch the batches that were held back, beginning with the worker whose turn it was.

        This is how torchdata's iterators restore their state; torch has no public way.
        """
        for _ in range(record["batches"] % loader.num_workers):
            next(iterator._worker_queue_idx_cycle)
        for _ in range(loader.num_workers * (loader.prefetch_factor or 1)):
            iterator._try_put_index()

    def goes_on(self, loader: DataLoader[Any], record: dict[str, Any]) -> bool:
        """Whether a pass that is over is read again: its stream may go on in the next one, as from an open file.

        What it keeps shows nowhere else. Two passes that were equal show that it keeps nothing.
        """
        return (
            isinstance(loader.dataset, IterableDataset)
            and (loader.num_workers == 0 or loader.persistent_workers)  # others begin with a new copy
            and not record.get("repeats", False)
            and record["digest"] is not None
            and not self.own.has_loading_streams()
        )

    def pass_ended(self, current: Pass) -> None:
        """Note that a pass has no further batch."""
        if not current.ended:
            current.ended = True
            found = current.batches, current.digest
            current.repeats, self._ended_with = found == self._ended_with, found

    def _read_and_discard(self, iterator: Any, record: dict[str, Any], over: bool) -> None:
        if record["sampler_start"] is not None and iterator._num_workers == 0:
            self.enter(record["sampler_start"][1])  # a dataset written as a generator function draws here
        self.rereading = True
        try:
            for batch in range(record["batches"]):
                if next(iterator, _END) is _END:
                    if over:
                        break
                    raise DataPositionError(
                        f"the dataset {type(iterator._dataset).__name__} ended after {batch} batches, expected at "
                        f"least {record['batches']} as in the run that is continued; it must yield the same samples "
                        "in both runs"
                    )
            found = iterator._memckpt_pass.digest
            # A stream may act at its end (count its passes).
            is_longer = over and record.get("ended", False) and next(iterator, _END) is not _END
        finally:
            self.rereading = False
        if (record["digest"] not in (None, found) or is_longer) and not self.inexact:
            said = _OTHER_PASS if over else _OTHER_STREAM
            self.depart(said.format(type(iterator._dataset).__name__, record["batches"]))
        # What was read to be discarded may have drawn otherwise; what follows counts.
        iterator._memckpt_pass.digest = record["digest"] or found

    def stream_drew(self, name: str, before: RngState, after: RngState) -> None:
        """Note what a fetch from a stream in this process has done to the global generators."""
        left = before if self._after_fetch is None else self._after_fetch
        for key, state in before.items():
            if left[key] != state and after[key] != state:
                self.inexact[_SHARED_STREAM.format(name, key)] = None
        self._after_fetch = after

    def begin_next_pass(self, iterator: Any) -> None:
        """Prepare for a persistent iterator's next pass."""
        ended: Pass = iterator._memckpt_pass
        sent = iterator._memckpt_sent
        workers = len(sent)
        for worker_id in range(workers):
            sent[worker_id] += len(range(ended.dispatched)[worker_id::workers])
            sent[worker_id] -= len(range(ended.skipped)[worker_id::workers])
        self.current = Pass(ended.construction, self._samples(), self._changed_choices(), lookahead=self.lookahead)
        self.current.forked = ended.forked
        iterator._memckpt_pass = self.current
        iterator._memckpt_over = False
        self._look_at_samplers()

    def _look_at_samplers(self) -> None:
        """Look, before a pass, at everything below the loader, and at what its samplers have kept from the last one."""
        self.own.walk_objects()
        # The samplers of the libraries draw when they begin, if at all.
        self.watch_sampler = bool(self.own.unknown_samplers())
        self._look_at_kept()

    def _look_at_kept(self) -> None:
        kept = self.own.uncarried()
        for path, checksum in kept.items():
            if self._kept_by_samplers.get(path, checksum) != checksum:
                self.inexact[_KEPT.format(path)] = None
        self._kept_by_samplers = kept

    def differs(self, problem: str) -> None:
        """Act on a sampler that is not at its place.

        Raises:
            DataPositionError: with the problem, where the samplers are a library's, so that the data must be others.
        """
        if not self.own.unknown_samplers():
            raise DataPositionError(problem)
        self.depart(problem)

    def depart(self, reason: str) -> None:
        """Note that this iteration may go on with other data than it was left at."""
        self.inexact[reason] = None
        for call in departures:
            call(reason)


# -- classes


class GraftedLoader:
    """Methods of every grafted loader's class."""

    #: The loader's original class, a DataLoader.
    _memckpt_base: Any

    def __iter__(self) -> Any:
        record = record_of(self)
        if record is None or record.around is None:
            return self._memckpt_iter()
        return record.around(self._memckpt_iter)

    def _memckpt_iter(self) -> Any:
        record = record_of(self)
        if record is not None and record.resuming is not None:
            drop_iterator(self)  # made for a resume, and nothing was taken from it
        return self._memckpt_base.__iter__(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle as a loader that was never grafted."""
        # From protocol 2 on, pickle insists on the class of the object itself.
        reduced: Any = self._memckpt_base.__reduce_ex__(self, min(protocol, 1))
        rebuild, arguments, state, *rest = reduced
        arguments = tuple(self._memckpt_base if item is type(self) else item for item in arguments)
        state = {name: value for name, value in state.items() if name != RECORD}
        return (rebuild, arguments, state, *rest)

    @property
    def _index_sampler(self) -> Any:
        sampler = self._memckpt_base._index_sampler.fget(self)
        record = record_of(self)
        return tap(sampler, record) if record is not None and record.tapping else sampler

    def _get_iterator(self) -> Any:
        loader: Any = self
        record = record_of(loader)
        if record is None:
            return self._memckpt_base._get_iterator(loader)
        return record.make_iterator(loader, self._memckpt_base)


class GraftedIterator:
    """Methods of every iterator that a grafted loader makes."""

    _memckpt_base: type[Any]
    _memckpt_record: LoaderRecord
    _memckpt_pass: Pass
    _memckpt_received: ReceivedStates | None
    _memckpt_sent: list[int]
    _memckpt_over: bool
    _memckpt_resumes: dict[str, Any] | None
    _num_workers: int
    _dataset: Any

    def _next_data(self) -> Any:
        if self._memckpt_over:
            raise StopIteration
        record = self._memckpt_record
        if not record.lookahead:
            return self._fetch()
        if self._num_workers and not record.rereading:
            record.go_live()  # workers have their own generators, so repeated fetches disturb nothing
            return self._fetch()
        with record.fetching(self._memckpt_pass):
            return self._fetch()

    def _fetch(self) -> Any:
        current, record = self._memckpt_pass, self._memckpt_record
        stream = isinstance(self._dataset, IterableDataset)
        # A batch that is fetched once more has the generators that its first fetch had: they are set within it.
        again = record.rereading or record.refetching
        watched = stream and not self._num_workers and not again and not record.inexact
        before = rng.capture() if watched else None
        try:
            data = self._memckpt_base._next_data(self)
        except StopIteration:
            self._settle()
            if stream:
                record.pass_ended(current)
            raise
        except Exception:  # counted here, and raised again for the caller
            if current.batches < current.dispatched:
                current.hand_out()  # a batch that cannot be loaded is consumed as well
                self._settle()
            raise
        self._settle()
        if before is not None:
            record.stream_drew(type(self._dataset).__name__, before, rng.capture())
        shipped = data if isinstance(data, WorkerBatch) else None
        batch = data if shipped is None else shipped.batch
        digest = content_digest(batch, current.digest) if stream else None
        if shipped is None:
            current.hand_out(digest=digest)
        else:
            current.hand_out(shipped.worker_id, shipped.state, digest)
        return batch

    def _settle(self) -> None:
        """Note that the resumed pass is in progress: a further iter() is the next pass."""
        record = self._memckpt_record
        # Several iterators may have been made for one resume: the first to hand out a batch ends it for all.
        if record.resuming is not None and record.resuming is self._memckpt_resumes and not record.rereading:
            record.resuming = None

    def _reset(self, loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        self._memckpt_record.begin_next_pass(self)
        self._memckpt_base._reset(self, loader, *args, **kwargs)  # reads all batches in flight from the workers
        if self._memckpt_received is not None:
            sent = None if isinstance(loader.dataset, IterableDataset) else self._memckpt_sent
            states = self._memckpt_received.after(sent)
            self._memckpt_pass.worker_start = states
            self._memckpt_pass.worker_states = dict(states)


def subclass(base: type[Any], methods: type) -> type[Any]:
    """The subclass of `base` with these methods; always the same one."""
    known = _subclasses.get(base)
    if known is None:
        # One base and no slots: Python lets an object change its class only then.
        members: dict[str, Any] = {"_memckpt_base": base, "__slots__": ()}
        members |= {name: item for name, item in vars(methods).items() if isinstance(item, (FunctionType, property))}
        known = _subclasses[base] = type(f"Grafted{base.__name__}", (base,), members)
    return known


_subclasses: dict[type[Any], type[Any]] = {}


def record_of(loader: object) -> LoaderRecord | None:
    record = getattr(loader, "__dict__", {}).get(RECORD)
    return record if isinstance(record, LoaderRecord) else None


def drop_iterator(loader: Any) -> None:
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator = None
    if hasattr(loader, "_initial_iter_for_state_dict"):  # torchdata: else the next iter() would use it
        loader._initial_iter_for_state_dict = False
        loader.next_iter_state = None


def _advance_counters(iterator: Any, batches: int) -> None:
    """Advance torchdata's counters for the loader's own state_dict(), which the user's checkpoints may contain."""
    if hasattr(iterator, "_sampler_iter_yielded"):
        iterator._num_yielded += batches
        iterator._sampler_iter_yielded += batches
