"""Exact resume of the data position: every run here is a child process, and "dies" means SIGKILL.

A chain is one training in several processes: each one consumes some batches, stores its position and is
killed; the next one resumes. What the chain saw, batch by batch, with the state of every generator after
each step, must be what one uninterrupted run saw whose loader was never grafted.
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from memckpt.capture.data import graft as data
from memckpt.capture.data import iteration
from memckpt.errors import DataPositionError
from memckpt.state import codec, rng
from tests.support.cluster.processes import be_subreaper
from tests.support.trainings.data_jobs import (
    EPOCHS,
    NONE,
    PERSISTENT,
    TWO,
    Job,
    Tamper,
    Trainer,
    each_kind_of_workers,
    in_child,
)
from tests.support.trainings.loader_cases import (
    BATCH,
    BATCHES,
    MAKERS,
    SAMPLES,
    Augmented,
    Doubling,
    LazyGlobal,
    Reshuffled,
    Workers,
    loaded,
    make,
)


@pytest.fixture(autouse=True, scope="module")
def _orphans_come_to_us() -> Iterator[None]:
    """Workers of a killed child become our children, so that their end can be waited for."""
    be_subreaper(True)
    yield
    be_subreaper(False)


# Of 6 batches per epoch: the first one, mid-epoch, the epoch's end, the next one's first, and on.
KILLS = {NONE: [1, 4, 6, 7, 8, 11], TWO: [3, 6, 7], PERSISTENT: [1, 6, 7]}
NAMES = [name for name in MAKERS if name != "iterable"]
CHAINS = [
    *((name, NONE) for name in NAMES),
    *(
        (name, TWO)
        for name in (
            "shuffle",
            "own-generator",
            "random-object",
            "distributed",
            "unbatched",
            "stateful",
            "init-fn",
            "lazy-generators",
            "pipeline",
            "reshuffled",
            "chunks",
        )
    ),
    *(pytest.param(name, PERSISTENT, marks=() if name == "shuffle" else pytest.mark.slow) for name in NAMES),
]


@pytest.mark.promise("a chain of killed runs sees the data of one run")
@pytest.mark.promise(
    "data position, workers' generators, and those of everything below dataset, samplers and collate function: "
    "transforms, lists, what functions name (made at once, or with the first sample)"
)
@pytest.mark.thinned(3)
@pytest.mark.parametrize(("name", "workers"), CHAINS, ids=str)
def test_a_chain_of_killed_runs_sees_what_one_ungrafted_run_sees(name: str, workers: Workers, tmp_path: Path) -> None:
    job = Job(lambda: make(name, workers), tmp_path, epochs=2 if workers == TWO else EPOCHS)
    expected = job.uninterrupted()
    assert len(expected.steps) >= job.epochs * BATCHES
    assert job.uninterrupted(grafted=True) == expected
    assert job.chain(KILLS[workers]) == expected


@each_kind_of_workers
def test_the_order_of_iterating_and_restoring_the_generators_is_free(workers: Workers, tmp_path: Path) -> None:
    job = Job(lambda: make("own-generator", workers), tmp_path, epochs=2, iterate_first=True)
    assert job.chain([4, 6]) == job.uninterrupted()


@pytest.mark.parametrize("workers", [TWO, PERSISTENT], ids=str)
def test_a_validation_loader_between_its_passes(workers: Workers, tmp_path: Path) -> None:
    def make_validation() -> DataLoader[Any]:
        return DataLoader(Augmented(9), BATCH, **workers.arguments())

    job = Job(lambda: make("shuffle", NONE), tmp_path, make_validation=make_validation)
    expected = job.uninterrupted()
    assert job.uninterrupted(grafted=True) == expected
    assert job.chain([2, 9]) == expected


@pytest.mark.slow  # a spawned worker imports torch
def test_spawned_workers(tmp_path: Path) -> None:
    job = Job(lambda: make("init-fn", Workers(1, start="spawn")), tmp_path)
    forked = Job(lambda: make("init-fn", Workers(1)), tmp_path)
    assert job.chain([8]) == forked.uninterrupted()


class GoesOn(IterableDataset[Any]):
    """Each pass goes on in a reader that is open; `shuffles` instead in an order that each pass shuffles in place."""

    def __init__(self, shuffles: bool = False) -> None:
        self.reader, self.order, self._shuffles = iter(range(1000)), [*range(6)], shuffles

    def __iter__(self) -> Iterator[int]:
        if self._shuffles:
            random.Random(0).shuffle(self.order)
        yield from self.order if self._shuffles else (next(self.reader) for _ in range(6))


class Refills(IterableDataset[Any]):
    """Each pass is told by the number that it counts, and fills its buffer anew."""

    def __init__(self) -> None:
        self.passes, self.buffer = 0, [torch.tensor(-1)]

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        self.buffer = [torch.tensor(10 * self.passes + number) for number in range(6)]
        return iter([int(each) for each in self.buffer])


class Same(IterableDataset[Any]):
    """Every pass gives the same. Counts what has been read in this process, where no capture looks."""

    def __init__(self) -> None:
        self.read = Counter[str]()

    def __iter__(self) -> Iterator[int]:
        for number in range(6):
            self.read["samples"] += 1
            yield number


class Loads(Same):
    def load_state_dict(self, state: Any) -> None: ...


def _goes_on_behind(dataset: Callable[[], Any], passes: int, workers: Workers, between: bool) -> tuple[bool, str, Any]:
    """Whether the pass behind `passes` of them is what it was, what is said of the resume, and the resumed dataset."""
    live, resumed = (DataLoader(dataset(), 2, **workers.arguments()) for _ in range(2))
    for loader in (live, resumed):
        data.graft(loader)
    for _ in range(passes):
        for _ in live:
            data.position(live)
    position = codec.decode(codec.encode(data.position(live, exhausted=True)))
    if between:
        data.recreate_persistent_iterator(resumed, position)
    else:
        data.resume(resumed, position)
        assert not [*resumed]
    same = [each.tolist() for each in live] == [each.tolist() for each in resumed]
    return same, data.unreplayable(resumed) or "", resumed.dataset


@pytest.mark.promise("a stream that gives other samples when it is read again")
@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("workers", [NONE, Workers(1), Workers(1, persistent=True)], ids=str)
@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("dataset", [GoesOn, partial(GoesOn, shuffles=True), Refills])
def test_a_stream_whose_pass_is_over_goes_on_or_that_is_said(
    dataset: Callable[[], Any], passes: int, workers: Workers, between: bool
) -> None:
    """One new process repeats one pass, and a stream's numbers; workers that do not persist begin anew with each."""
    exact = dataset is Refills or passes == 1 or (workers.count > 0 and not workers.persistent)
    same, said, _ = _goes_on_behind(dataset, passes, workers, between)
    assert same is exact
    assert ("gave other samples when its last pass, of 3 batches, was read again" in said) is not exact


@pytest.mark.parametrize(("dataset", "passes", "read"), [(Same, 1, 12), (Same, 2, 6), (Loads, 1, 6)])
def test_a_pass_that_is_over_is_not_read_again_in_vain(dataset: Any, passes: int, read: int) -> None:
    """Two equal passes show that nothing goes on; a stream that can be set to a state is at its place."""
    same, said, resumed = _goes_on_behind(dataset, passes, NONE, between=False)
    assert same
    assert not said
    assert resumed.read["samples"] == read


@each_kind_of_workers
def test_a_resumed_loader_may_be_iterated_twice_before_it_is_used(workers: Workers, tmp_path: Path) -> None:
    def start() -> tuple[dict[str, Any], list[Any]]:
        torch.manual_seed(1)
        loader = make("shuffle", workers)
        data.graft(loader)
        iterator = iter(loader)
        next(iterator)
        return data.position(loader), [batch[0].tolist() for batch in iterator]

    def again(position: dict[str, Any]) -> tuple[bool, list[Any], list[Any]]:
        loader = make("shuffle", workers)
        data.graft(loader)
        data.resume(loader, position)
        before = rng.capture()
        iter(loader)
        untouched = data.position(loader)["pass"] == position["pass"] and rng.capture() == before
        rest = [batch[0].tolist() for batch in loader]
        return untouched, rest, [batch[0].tolist() for batch in loader]

    position, rest = in_child(tmp_path / "result", start)
    untouched, repeated, next_pass = in_child(tmp_path / "result", lambda: again(position))
    assert untouched
    assert repeated == rest
    assert len(next_pass) == BATCHES


@each_kind_of_workers
def test_skipped_samples_are_not_loaded(workers: Workers, tmp_path: Path) -> None:
    def positioned() -> dict[str, Any]:
        loader = DataLoader(Augmented(), BATCH, **workers.arguments())
        data.graft(loader)
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        return data.position(loader)

    def rest(position: dict[str, Any]) -> list[int]:
        loader = DataLoader(Augmented(log=tmp_path / "log"), BATCH, **workers.arguments())
        data.graft(loader)
        data.resume(loader, position)
        return [int(index) for batch in loader for index in batch[0]]

    position = in_child(tmp_path / "result", positioned)
    expected = list(range(3 * BATCH, SAMPLES))
    assert in_child(tmp_path / "result", lambda: rest(position)) == expected
    assert sorted(loaded(tmp_path / "log")) == expected


# -- errors


@pytest.mark.promise("other data, or a sampler that does not repeat itself, is detected")
@pytest.mark.promise(
    "an own `__iter__`, `in_order=False`, `SystemRandom`, a sampler that keeps too much state or draws too "
    "often, a number that a dataset counts, tensors of a dataset that training writes to"
)
def test_a_sampler_that_draws_too_often_between_the_steps_is_said(tmp_path: Path) -> None:
    job = Job(lambda: DataLoader(Augmented(), 1, sampler=LazyGlobal()), tmp_path, epochs=1)
    assert len(job.chain([12]).steps) == SAMPLES
    loader = DataLoader(Augmented(), 1, sampler=LazyGlobal())
    data.graft(loader)
    iterator = iter(loader)
    for drawn in range(SAMPLES):
        next(iterator)
        data.position(loader)
        assert ("LazyGlobal draws from a global generator" in (data.unreplayable(loader) or "")) is (drawn > 9)


@pytest.mark.promise("other data, or a sampler that does not repeat itself, is detected")
@pytest.mark.promise("a sampler that does not repeat its indices")
@each_kind_of_workers
@pytest.mark.parametrize(("samples", "message"), [(SAMPLES + 1, "does not repeat"), (BATCH, "ended after 1 batches")])
def test_other_data_is_found_out(samples: int, message: str, workers: Workers, tmp_path: Path) -> None:
    sizes = [SAMPLES]
    job = Job(lambda: DataLoader(Augmented(sizes[0]), BATCH, shuffle=True, **workers.arguments()), tmp_path)
    assert job.process(lambda: Trainer(job, grafted=True).run(3)) is None
    sizes[0] = samples
    error = job.process(lambda: Trainer(job, grafted=True).run(None))
    assert isinstance(error, DataPositionError)
    assert message in str(error)
    assert f"The dataset has {samples} samples, and had {SAMPLES}" in str(error)


def test_a_failed_resume_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    loader = make("shuffle", NONE)
    data.graft(loader)
    iterator = iter(loader)
    next(iterator)
    position = data.position(loader)
    assert data.position(loader, ahead=1)["pass"]["batches"] == 0
    with pytest.raises(DataPositionError, match="at most 1 batches, found a caller that is 2 ahead"):
        data.position(loader, ahead=2)
    other = DataLoader(Augmented(SAMPLES - 1), BATCH, shuffle=True)
    data.graft(other)
    data.resume(other, position)
    iterator = iter(other)
    for again in (iterator, iterator, iter(other)):
        with pytest.raises(DataPositionError, match="does not repeat"):
            next(again)


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize(("before", "now"), [(NONE, TWO), (TWO, NONE), (PERSISTENT, NONE), (Workers(1), PERSISTENT)])
def test_another_number_of_workers_goes_on_with_the_same_indices(before: Workers, now: Workers, between: bool) -> None:
    """What is drawn later may differ, and that is said."""
    numbers: Any = range(9)
    first, second, alone = (
        DataLoader(numbers, 2, shuffle=True, generator=torch.Generator().manual_seed(3), **workers.arguments())
        for workers in (before, now, NONE)
    )
    data.graft(first)
    batches = iter(first)
    taken = [next(batches).tolist() for _ in range(5 if between else 2)]
    position = data.position(first, exhausted=between)
    data.release(first)
    data.graft(second)
    data.resume(second, position)
    assert f"num_workers={before.count}, and has {now.count} now" in (data.unreplayable(second) or "")
    taken += [batch.tolist() for batch in second]
    assert taken == [batch.tolist() for batch in alone]
    assert sorted(number for batch in second for number in batch.tolist()) == list(range(9))
    data.release(second)


def test_a_position_of_another_loader_is_refused() -> None:
    loader = make("shuffle", NONE)
    with pytest.raises(DataPositionError, match=r"call graft\(\) first"):
        data.position(loader)
    data.graft(loader)
    with pytest.raises(DataPositionError, match="of format 3, found None"):
        data.resume(loader, {})
    with pytest.raises(TypeError, match="expected a torch DataLoader, found list"):
        data.graft([])  # type: ignore[arg-type]


def test_a_missing_generator_is_refused() -> None:
    loader, bare = make("own-generator", NONE), make("shuffle", NONE)
    data.graft(loader)
    data.graft(bare)
    with pytest.raises(DataPositionError, match=r"a random generator at loader\.generator"):
        data.resume(bare, data.position(loader))


@pytest.mark.promise(
    "an own `__iter__`, `in_order=False`, `SystemRandom`, a sampler that keeps too much state or draws too "
    "often, a number that a dataset counts, tensors of a dataset that training writes to"
)
def test_reasons_against_a_loader() -> None:
    assert data.unreplayable(make("shuffle", TWO)) is None
    assert data.unreplayable(make("iterable", NONE)) is None
    assert "IterableDataset" in (data.remark(make("iterable", NONE)) or "")
    assert "overrides __iter__" in (data.unreplayable(Doubling(Augmented())) or "")
    unordered = DataLoader(Augmented(), num_workers=2, in_order=False)
    assert "in_order=False" in (data.unreplayable(unordered) or "")
    data.graft(unordered)
    with pytest.raises(DataPositionError, match="in_order=False"):
        data.resume(unordered, data.position(unordered))
    secret = SequentialSampler(range(3))
    secret.random = random.SystemRandom()  # type: ignore[attr-defined]
    assert "loader.sampler.random is a SystemRandom" in (
        data.unreplayable(DataLoader(Augmented(), sampler=secret)) or ""
    )


def test_a_large_order_that_is_shuffled_in_place_is_said() -> None:
    loader = DataLoader(Augmented(), BATCH, sampler=Reshuffled(5000))
    data.graft(loader)
    for reason in ("", "loader.sampler.order changes, and is not carried"):
        iterator = iter(loader)
        next(iterator)
        data.position(loader)
        assert reason in (data.unreplayable(loader) or "")
    assert "order" in (data.unreplayable(loader) or "")


class Scores:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.of: dict[int, float] = {}


def begun(**kept: Any) -> tuple[DataLoader[Any], Any]:
    """A loader behind its first batch, and its sampler, which keeps these."""
    sampler: Any = SequentialSampler(range(8))
    vars(sampler).update(kept)
    loader = DataLoader(Augmented(), BATCH, sampler=sampler)
    data.graft(loader)
    next(iter(loader))
    return loader, sampler


def resumed_of(loader: DataLoader[Any], other: DataLoader[Any]) -> None:
    """Resume the other loader where the first one is."""
    data.resume(other, codec.decode(codec.encode(data.position(loader))))


KEPT: list[Callable[[], Any]] = [
    dict,
    lambda: defaultdict(float),
    OrderedDict,
    Counter,
    lambda: {"seen": [1], "last": deque([1], 3)},
]


@pytest.mark.parametrize("make", KEPT)
def test_what_a_sampler_keeps_is_carried_whatever_holds_it(make: Callable[[], Any]) -> None:
    """In place, as others may refer to it, and with what else the container knows."""
    (loader, ours), (other, theirs) = begun(kept=make()), begun(kept=make())
    ours.kept.update({5: 1.5, 2: 0.5} if not ours.kept else {"seen": [1, 7], "last": deque([1, 2, 3, 4], 3)})
    held = theirs.kept
    resumed_of(loader, other)
    assert theirs.kept is held
    assert (theirs.kept, list(theirs.kept)) == (ours.kept, list(ours.kept))
    assert getattr(held, "default_factory", None) is getattr(ours.kept, "default_factory", None)
    assert not data.unreplayable(loader)


def test_the_order_of_what_a_sampler_keeps_is_carried() -> None:
    (loader, ours), (other, theirs) = (begun(kept={"inner": {1: 0, 2: 0}, "other": 1}) for _ in range(2))
    for each in (loader, other):
        data.position(each)
    for reordered in (ours.kept, ours.kept["inner"]):
        first = next(iter(reordered))
        reordered[first] = reordered.pop(first)
    resumed_of(loader, other)
    assert repr(theirs.kept) == repr(ours.kept) == "{'other': 1, 'inner': {2: 0, 1: 0}}"


@pytest.mark.parametrize("kept", [Counter({3: 2}), OrderedDict({3: 2}), deque([3], 2), defaultdict(int, {3: 2})])
def test_what_a_sampler_makes_in_its_first_pass_comes_back_as_it_was_or_is_said(kept: Any) -> None:
    (loader, ours), (other, theirs) = begun(kept=None), begun(kept=None)
    ours.kept = kept
    resumed_of(loader, other)
    if isinstance(kept, defaultdict):
        assert theirs.kept is None
        assert "kept was a defaultdict in the run that is continued" in (data.unreplayable(other) or "")
    else:
        assert type(theirs.kept) is type(kept)
        assert theirs.kept == kept
        assert getattr(theirs.kept, "maxlen", None) == getattr(kept, "maxlen", None)
        assert not data.unreplayable(other)


@pytest.mark.parametrize("change", [lambda one: one.scores.of.update({3: 0.5}), lambda one: one.seen.add(3)])
def test_another_object_that_a_sampler_keeps_is_said_once_it_changes(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a set: in what order it is iterated depends on its history."""
    monkeypatch.setattr(iteration, "_QUICK_SECONDS", math.inf)
    loader, sampler = begun(scores=Scores(), fixed=Scores(), seen={1, 2})
    data.position(loader)
    data.position(loader)
    assert not data.unreplayable(loader)
    change(sampler)
    data.position(loader)
    said = data.unreplayable(loader) or ""
    assert "changes, and is not carried" in said
    assert "fixed" not in said


@pytest.mark.parametrize("array", [np.ones(2), torch.ones(2)])
def test_arrays_may_come_into_what_a_sampler_keeps(array: Any) -> None:
    """No comparison with them is true or false."""
    loader, sampler = begun(kept=[0.0, 0.0])
    data.position(loader)
    sampler.kept[1] = array
    data.position(loader)
    assert "loader.sampler.kept changes, and is not carried" in (data.unreplayable(loader) or "")


@each_kind_of_workers
@pytest.mark.parametrize("name", ["shuffle", "iterable"])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_a_wrapper_holds_are_handed_out_again(ahead: int, name: str, workers: Workers, tmp_path: Path) -> None:
    """Without workers the augmentation of those is not the same: they are loaded at another time."""

    def indices(batch: Any) -> Any:
        return batch[0].tolist() if workers == NONE else repr(batch)

    def start() -> tuple[dict[str, Any], list[Any]]:
        torch.manual_seed(1)
        loader = make(name, workers)
        data.graft(loader)
        iterator = iter(loader)
        for _ in range(4):
            next(iterator)
        return data.position(loader, ahead=ahead), [indices(batch) for batch in iterator]

    def again(position: dict[str, Any]) -> list[Any]:
        loader = make(name, workers)
        data.graft(loader)
        data.resume(loader, position)
        return [indices(batch) for batch in loader]

    position, rest = in_child(tmp_path / "result", start)
    repeated = in_child(tmp_path / "result", lambda: again(position))
    assert len(repeated) == ahead + len(rest)
    assert repeated[ahead:] == rest


# -- each of these takes one thing out of the resume; the oracle above has to notice


def _other_phase() -> dict[str, Any]:
    with rng.preserved():
        torch.rand(7), random.random(), np.random.rand()
        return {"global": rng.capture(), "own": {"generators": {}, "attributes": {}}}


def _without_global_generators(state: dict[str, Any]) -> None:
    state["rng"] = None


def _without_construction(state: dict[str, Any]) -> None:
    state["position"]["pass"]["construction"] = _other_phase()


def _without_worker_states(state: dict[str, Any]) -> None:
    state["position"]["pass"]["worker_states"] = {}


def _without_own_state(state: dict[str, Any]) -> None:
    state["position"]["own"] = {"generators": {}, "attributes": {}}


def _without_dispatched_ahead(state: dict[str, Any]) -> None:
    current = state["position"]["pass"]
    current.update(dispatched=current["batches"], dispatched_digest=current["digest"], sampler_ended=False)


@pytest.mark.parametrize(
    ("name", "workers", "limit", "kill_at", "tamper"),
    [
        ("shuffle", NONE, None, 3, _without_global_generators),
        ("shuffle", TWO, None, 3, _without_worker_states),
        ("shuffle", TWO, None, 3, _without_global_generators),
        ("shuffle", TWO, None, 1, _without_construction),
        ("shuffle", PERSISTENT, 3, 1, _without_construction),
        ("random-object", TWO, None, 3, _without_dispatched_ahead),
        ("own-generator", NONE, None, 3, _without_own_state),
        ("random-object", NONE, None, 3, _without_own_state),
        ("epoch-counter", NONE, 3, 3, _without_own_state),
    ],
)
def test_negative_control(
    name: str, workers: Workers, limit: int | None, kill_at: int, tamper: Tamper, tmp_path: Path
) -> None:
    job = Job(lambda: make(name, workers), tmp_path, epochs=2, limit=limit, tamper=tamper)
    assert job.chain([kill_at]) != job.uninterrupted()


def test_negative_control_of_the_sampler_start(tmp_path: Path) -> None:
    def _without_sampler_start(state: dict[str, Any]) -> None:
        state["position"]["pass"]["sampler_start"] = [_other_phase()] * 2

    job = Job(lambda: make("shuffle", NONE), tmp_path, tamper=_without_sampler_start)
    with pytest.raises(DataPositionError, match="RandomSampler does not repeat"):
        job.chain([3])
