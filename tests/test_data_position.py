"""Exact resume of the data position: every run here is a child process, and "dies" means SIGKILL.

A chain is one training in several processes: each one consumes some batches, stores its position and is
killed; the next one resumes. What the chain saw, batch by batch, with the state of every generator after
each step, must be what one uninterrupted run saw whose loader was never grafted.
"""

from __future__ import annotations

import copy
import ctypes
import multiprocessing
import os
import pickle
import random
import signal
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

from memckpt.capture import dataloader as data
from memckpt.capture.dataloader.sampler_tap import index_digest
from memckpt.state import codec, rng
from tests.loader_cases import (
    BATCH,
    BATCHES,
    MAKERS,
    SAMPLES,
    Augmented,
    Doubling,
    LazyGlobal,
    Workers,
    kill_myself,
    loaded,
    make,
)

torch.set_num_threads(1)  # the children are forked from here

NONE, TWO, PERSISTENT = Workers(), Workers(2), Workers(2, persistent=True)
EPOCHS = 3
PR_SET_CHILD_SUBREAPER = 36

Tamper = Callable[[dict[str, Any]], None]


@pytest.fixture(autouse=True, scope="module")
def _orphans_come_to_us() -> Iterator[None]:
    """Workers of a killed child become our children, so that their end can be waited for."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0


def in_child(path: Path, function: Callable[[], Any]) -> Any:
    """Run `function` in a forked child of its own process group; return what it returned.

    Returns the exception it raised, or None if it killed itself. Nothing of the group is alive afterwards.
    """
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            try:
                result = function()
            except Exception as error:
                traceback.print_exc()
                result = error
            path.write_bytes(pickle.dumps(result))
        finally:
            os._exit(0)
    try:
        _, status = os.waitpid(pid, 0)
    finally:
        _end_group(pid)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return None
    assert os.WEXITSTATUS(status) == 0
    return pickle.loads(path.read_bytes())


def _end_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
        while True:
            os.waitpid(-group, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


@dataclass
class Seen:
    """What one process saw: per step the batch and a checksum of all generators."""

    steps: list[tuple[str, int]] = field(default_factory=list)
    end: int = 0


@dataclass
class Job:
    """A training that can be run in one process or in several."""

    make: Callable[[], DataLoader[Any]]
    folder: Path
    epochs: int = EPOCHS
    limit: int | None = None
    make_validation: Callable[[], DataLoader[Any]] | None = None
    tamper: Tamper | None = None
    iterate_first: bool = False

    def uninterrupted(self, *, grafted: bool = False) -> Seen:
        return self._process(lambda: _Trainer(self, grafted=grafted).run(kill_at=None))

    def chain(self, kills: list[int]) -> Seen:
        """One process per kill, and one that finishes. Counts the deaths."""
        (self.folder / "position").unlink(missing_ok=True)
        total = Seen()
        for kill_at in kills:
            killed = self._process(lambda kill_at=kill_at: _Trainer(self, grafted=True).run(kill_at))
            assert killed is None, f"the run was to be killed at step {kill_at}, got {killed}"
            total.steps += self._stored()["seen"].steps
        finished = self._process(lambda: _Trainer(self, grafted=True).run(kill_at=None))
        if isinstance(finished, Exception):
            raise finished
        return Seen(total.steps + finished.steps, finished.end)

    def _process(self, function: Callable[[], Any]) -> Any:
        return in_child(self.folder / "result", function)

    def store(self, state: dict[str, Any]) -> None:
        for name in ("position", "validation"):  # only what the safe codec takes is allowed in there
            state[name] = codec.encode(state[name])
        (self.folder / "position").write_bytes(pickle.dumps(state))

    def _stored(self) -> Any:
        return pickle.loads((self.folder / "position").read_bytes())

    def load(self) -> Any:
        if not (self.folder / "position").exists():
            return None
        state = self._stored()
        for name in ("position", "validation"):
            state[name] = codec.decode(state[name])
        if self.tamper is not None:
            self.tamper(state)
        return state


class _Trainer:
    """A plain training loop: dropout is a draw from the global generators between two batches."""

    def __init__(self, job: Job, *, grafted: bool) -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        self.job = job
        self.loader = job.make()
        self.validation = None if job.make_validation is None else job.make_validation()
        self.grafted = grafted
        if grafted:
            data.graft(self.loader)
            if self.validation is not None:
                data.graft(self.validation)
        self.seen = Seen()

    def run(self, kill_at: int | None) -> Seen:
        step, first_epoch, done = 0, 0, 0
        state = self.job.load() if self.grafted else None
        begun: Iterator[Any] | None = None
        if state is None:
            self._validate()
        else:
            step, first_epoch, done = state["step"], state["epoch"], state["done"]
            data.resume(self.loader, state["position"])
            if self.validation is not None:
                data.recreate_persistent_iterator(self.validation, state["validation"])
            if self.job.iterate_first:
                begun = iter(self.loader)
            torch.rand(5)
            data.restore_generators(self.loader, state["position"])
            if state["rng"] is not None:
                rng.restore(state["rng"])
        for epoch in range(first_epoch, self.job.epochs):
            if hasattr(self.loader.sampler, "set_epoch"):
                self.loader.sampler.set_epoch(epoch)
            for batch in begun or self.loader:
                torch.rand(3), random.random(), np.random.rand()
                step += 1
                done += 1
                last = done == self.job.limit
                self.seen.steps.append((repr(batch), _generators(self.loader)))
                if step == kill_at:
                    self._die(step, epoch, done, last)
                if last:
                    break
            begun = None
            done = 0
            self._validate()
        self.seen.end = _generators(self.loader)
        data.release(self.loader)
        if self.validation is not None:
            data.release(self.validation)
        batch = None
        del self.loader, self.validation
        if self.grafted:
            assert not multiprocessing.active_children()
        return self.seen

    def _validate(self) -> None:
        if self.validation is not None:
            self.seen.steps += [(repr(batch), 0) for batch in self.validation]

    def _die(self, step: int, epoch: int, done: int, last: bool) -> None:
        self.job.store(
            {
                "position": data.position(self.loader, exhausted=last),
                "validation": None if self.validation is None else data.position(self.validation),
                "rng": rng.capture(),
                "step": step,
                "epoch": epoch,
                "done": done,
                "seen": self.seen,
            }
        )
        kill_myself()


def _generators(loader: DataLoader[Any]) -> int:
    held = [loader.generator, getattr(loader.sampler, "generator", None)]
    own = [g.get_state().numpy().tobytes() for g in held if g is not None]
    return zlib.crc32(pickle.dumps((rng.capture(), own), protocol=4))


# Of 6 batches per epoch: the first one, mid-epoch, the epoch's end, the next one's first, and on.
KILLS = {NONE: [1, 4, 6, 7, 8, 11], TWO: [3, 6, 7], PERSISTENT: [1, 6, 7]}
NAMES = [name for name in MAKERS if name != "iterable"]
CHAINS = [(name, workers) for name in NAMES for workers in (NONE, PERSISTENT)] + [
    (name, TWO)
    for name in ("shuffle", "own-generator", "random-object", "distributed", "unbatched", "stateful", "init-fn")
]

each_kind_of_workers = pytest.mark.parametrize("workers", [NONE, TWO, PERSISTENT], ids=str)


@pytest.mark.parametrize(("name", "workers"), CHAINS, ids=str)
def test_a_chain_of_killed_runs_sees_what_one_ungrafted_run_sees(name: str, workers: Workers, tmp_path: Path) -> None:
    job = Job(lambda: make(name, workers), tmp_path, epochs=2 if workers == TWO else EPOCHS)
    expected = job.uninterrupted()
    assert len(expected.steps) >= job.epochs * BATCHES
    assert job.uninterrupted(grafted=True) == expected
    assert job.chain(KILLS[workers]) == expected


@each_kind_of_workers
@pytest.mark.parametrize("name", ["own-generator", "stateful"])
def test_an_epoch_that_ends_before_its_data_does(name: str, workers: Workers, tmp_path: Path) -> None:
    job = Job(lambda: make(name, workers), tmp_path, limit=3)
    expected = job.uninterrupted()
    assert len(expected.steps) == EPOCHS * 3
    assert job.uninterrupted(grafted=True) == expected
    assert job.chain([2, 3, 5]) == expected


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


@each_kind_of_workers
def test_a_stream_is_read_again_up_to_the_position(workers: Workers, tmp_path: Path) -> None:
    job = Job(lambda: make("iterable", workers), tmp_path, epochs=2)
    expected = job.uninterrupted()
    assert job.uninterrupted(grafted=True) == expected
    assert job.chain([2, 7]) == expected


def test_what_was_consumed_counts_not_what_was_fetched_ahead(tmp_path: Path) -> None:
    def count() -> tuple[int, int]:
        loader = make("shuffle", TWO)
        data.graft(loader)
        iterator = iter(loader)
        next(iterator)
        current = data.position(loader)["pass"]
        return current["batches"], current["dispatched"]

    assert in_child(tmp_path / "result", count) == (1, 5)


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
    with pytest.raises(data.DataPositionError, match="RandomSampler does not repeat"):
        job.chain([3])


# -- errors


def test_a_sampler_that_draws_between_the_steps_is_found_out(tmp_path: Path) -> None:
    job = Job(lambda: DataLoader(Augmented(), BATCH, sampler=LazyGlobal()), tmp_path)
    with pytest.raises(data.DataPositionError, match=r"LazyGlobal does not repeat .* torch\.Generator of its own"):
        job.chain([3])


@each_kind_of_workers
@pytest.mark.parametrize(("samples", "message"), [(SAMPLES + 1, "does not repeat"), (BATCH, "ended after 1 batches")])
def test_other_data_is_found_out(samples: int, message: str, workers: Workers, tmp_path: Path) -> None:
    sizes = [SAMPLES]
    job = Job(lambda: DataLoader(Augmented(sizes[0]), BATCH, shuffle=True, **workers.arguments()), tmp_path)
    assert job._process(lambda: _Trainer(job, grafted=True).run(3)) is None
    sizes[0] = samples
    error = job._process(lambda: _Trainer(job, grafted=True).run(None))
    assert isinstance(error, data.DataPositionError)
    assert message in str(error)


def test_a_failed_resume_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    loader = make("shuffle", NONE)
    data.graft(loader)
    iterator = iter(loader)
    next(iterator)
    position = data.position(loader)
    assert data.position(loader, ahead=1)["pass"]["batches"] == 0
    with pytest.raises(data.DataPositionError, match="at most 1 batches, found a caller that is 2 ahead"):
        data.position(loader, ahead=2)
    other = DataLoader(Augmented(SAMPLES - 1), BATCH, shuffle=True)
    data.graft(other)
    data.resume(other, position)
    iterator = iter(other)
    for again in (iterator, iterator, iter(other)):
        with pytest.raises(data.DataPositionError, match="does not repeat"):
            next(again)


def test_a_position_of_another_loader_is_refused() -> None:
    loader = make("shuffle", NONE)
    with pytest.raises(data.DataPositionError, match=r"call graft\(\) first"):
        data.position(loader)
    data.graft(loader)
    position = data.position(loader)
    other = make("shuffle", TWO)
    data.graft(other)
    with pytest.raises(data.DataPositionError, match=r"expected 0 workers, .* found 2"):
        data.resume(other, position)
    with pytest.raises(data.DataPositionError, match="of format 1, found None"):
        data.resume(loader, {})
    with pytest.raises(TypeError, match="expected a torch DataLoader, found list"):
        data.graft([])  # type: ignore[arg-type]


def test_a_missing_generator_is_refused() -> None:
    loader, bare = make("own-generator", NONE), make("shuffle", NONE)
    data.graft(loader)
    data.graft(bare)
    with pytest.raises(data.DataPositionError, match=r"a random generator at loader\.generator"):
        data.resume(bare, data.position(loader))


def test_reasons_against_a_loader() -> None:
    assert data.unreplayable(make("shuffle", TWO)) is None
    assert "IterableDataset" in (data.unreplayable(make("iterable", NONE)) or "")
    assert "overrides __iter__" in (data.unreplayable(Doubling(Augmented())) or "")
    unordered = DataLoader(Augmented(), num_workers=2, in_order=False)
    assert "in_order=False" in (data.unreplayable(unordered) or "")
    data.graft(unordered)
    with pytest.raises(data.DataPositionError, match="in_order=False"):
        data.resume(unordered, data.position(unordered))
    secret = SequentialSampler(range(3))
    secret.random = random.SystemRandom()  # type: ignore[attr-defined]
    assert "loader.sampler.random is a SystemRandom" in (
        data.unreplayable(DataLoader(Augmented(), sampler=secret)) or ""
    )


def test_a_lazy_sampler_is_noticed_while_it_runs() -> None:
    loader = DataLoader(Augmented(), BATCH, sampler=LazyGlobal())
    data.graft(loader)
    assert data.unreplayable(loader) is None
    list(loader)
    assert "BatchSampler" in (data.unreplayable(loader) or "")


# -- the graft


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("name", ["shuffle", "stateful"])
def test_the_loader_stays_the_users_own(name: str) -> None:
    loader = make(name, NONE)
    before, kind = dict(vars(loader)), type(loader)
    stateful = hasattr(loader, "state_dict")
    data.graft(loader)
    graft = type(loader)
    data.graft(loader)
    assert type(loader) is graft
    assert data.is_grafted(loader)
    assert isinstance(loader, kind)
    assert hasattr(loader, "state_dict") == stateful
    list(loader)
    added = vars(loader).keys() - before.keys()
    assert all(name.startswith("_") for name in added)
    assert loader.sampler is before["sampler"]
    assert loader.collate_fn is before["collate_fn"]
    data.release(loader)
    assert type(loader) is kind
    assert not data.is_grafted(loader)
    assert {**vars(loader), "_iterator": None} == before
    assert type(loader._iterator).__module__.startswith(("torch", "builtins"))
    data.release(loader)
    assert len(list(loader)) == BATCHES


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [NONE, TWO], ids=str)
def test_a_users_own_checkpoint_of_a_stateful_loader(workers: Workers, tmp_path: Path) -> None:
    def states(*, grafted: bool) -> list[Any]:
        torch.manual_seed(1)
        loader = make("stateful", workers)
        if grafted:
            data.graft(loader)
        return [_plain(loader.state_dict()) for _ in loader]  # type: ignore[attr-defined]

    plain = in_child(tmp_path / "result", lambda: states(grafted=False))
    assert len(plain) == BATCHES
    assert in_child(tmp_path / "result", lambda: states(grafted=True)) == plain


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@each_kind_of_workers
def test_a_resumed_stateful_loader_continues_in_its_users_checkpoint(workers: Workers, tmp_path: Path) -> None:
    """The state_dict() of a resumed loader leads, without us, to the batch that comes next."""

    def resumed_state(position: dict[str, Any]) -> Any:
        torch.manual_seed(1)
        loader = make("stateful", workers)
        data.graft(loader)
        data.resume(loader, position)
        next(iter(loader))
        return loader.state_dict()  # type: ignore[attr-defined]

    def rest(state: Any, skip: int) -> list[list[int]]:
        torch.manual_seed(1)
        loader = make("stateful", workers)
        if state is not None:
            loader.load_state_dict(state)  # type: ignore[attr-defined]
        return [batch[0].tolist() for batch in loader][skip:]

    def positioned() -> dict[str, Any]:
        torch.manual_seed(1)
        loader = make("stateful", workers)
        data.graft(loader)
        iterator = iter(loader)
        next(iterator), next(iterator)
        return data.position(loader)

    path = tmp_path / "result"
    state = in_child(path, lambda: resumed_state(in_child(tmp_path / "inner", positioned)))
    expected = in_child(path, lambda: rest(None, 3))
    assert len(expected) == BATCHES - 3
    assert in_child(path, lambda: rest(state, 0)) == expected


def test_copies_and_pickles_are_of_a_loader_that_was_never_grafted() -> None:
    loader = make("shuffle", NONE)
    data.graft(loader)
    for twin in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert type(twin) is DataLoader
        assert vars(twin).keys() == vars(make("shuffle", NONE)).keys()
        assert len(list(twin)) == BATCHES
        data.graft(twin)
        assert data.is_grafted(twin)
    assert data.is_grafted(loader)
    assert data.position(loader)["pass"] is None


def _plain(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.tolist()
    return {key: _plain(value) for key, value in state.items()} if isinstance(state, dict) else state


def test_checksums_of_indices() -> None:
    seen = [
        index_digest(index, 0)
        for index in ([1, 2], [2, 1], [[1], [2]], 1, "1", None, [True, "a"], ["a", True], {"a": 1}, (1.5, 2))
    ]
    assert len(set(seen)) == len(seen)
    assert index_digest([1, 2], 0) == index_digest([np.int64(1), torch.tensor(2)], 0)
    assert index_digest([object()], 0) == index_digest([object()], 0)


# -- generators


def test_generators_repeat_after_restore() -> None:
    def draw() -> list[float]:
        return [torch.rand(()).item(), random.random(), random.gauss(0, 1), float(np.random.randn())]

    for _ in range(4):
        state = codec.decode(codec.encode(rng.capture()))
        first = draw()
        rng.restore(state)
        assert rng.capture() == state
        with rng.preserved():
            assert draw() == first
        assert draw() == first


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("torch", b"1", "torch RNG state of 5056 bytes, found 1"),
        ("torch", 1, "as bytes, found int"),
        ("python", {}, "version, words and gauss"),
        ("python", {"version": 3, "words": b"", "gauss": None}, "2500 bytes, found 0 bytes"),
        ("numpy", {"name": "PCG64"}, "of an MT19937, found 'PCG64'"),
        ("cuda", {99: b""}, "found one of device 99"),
    ],
)
def test_a_damaged_state_changes_nothing(key: str, value: Any, message: str) -> None:
    state = rng.capture()
    with pytest.raises(ValueError, match=message):
        rng.restore({**state, key: value})
    assert rng.capture() == state


@pytest.mark.parametrize(
    "generator",
    [
        torch.Generator(),
        random.Random(1),
        np.random.default_rng(1),
        np.random.RandomState(1),
        np.random.Generator(np.random.Philox(1)),
    ],
    ids=lambda generator: type(generator).__name__,
)
def test_a_users_generator_repeats_after_restore(generator: Any) -> None:
    def draw() -> float:
        if isinstance(generator, torch.Generator):
            return torch.rand((), generator=generator).item()
        return float(generator.random() if hasattr(generator, "random") else generator.rand())

    state = codec.decode(codec.encode(rng.capture_generator(generator)))
    first = draw()
    rng.restore_generator(generator, state)
    assert draw() == first
    with pytest.raises(ValueError, match="expected the state of a"):
        rng.restore_generator(generator, {"kind": "other", "data": None})


# Loaders that a wrapper reads ahead


def _read_ahead(
    loader: DataLoader[Any], position: dict[str, Any] | None, take: int
) -> tuple[list[Any], dict[str, Any]]:
    """Take batches as a wrapper does that is one ahead; a position after the last one, with the global generators."""
    data.graft(loader, lookahead=1)
    if position is not None:
        random.random()
        torch.rand(3)
        data.resume(loader, position["loader"], on_live=lambda: rng.restore(position["rng"]))
    batches = iter(loader)
    seen = []
    following = next(batches)
    for _ in range(take):
        current, following = following, next(batches, None)
        seen.append((current, torch.rand(()).item()))  # training draws, too
    found = {"loader": data.position(loader, ahead=1), "rng": rng.capture()}
    return seen, codec.decode(codec.encode(found))


@pytest.mark.parametrize("name", ["sequential", "shuffle", "own-generator", "random-object", "dataset-generators"])
@pytest.mark.parametrize("taken", [1, 3])
def test_what_was_read_ahead_is_loaded_again_as_it_was(name: str, taken: int) -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected, _ = _read_ahead(make(name, NONE), None, 5)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    first, position = _read_ahead(make(name, NONE), None, taken)
    rest, _ = _read_ahead(make(name, NONE), position, 5 - taken)
    assert str(first + rest) == str(expected)


def test_without_lookahead_what_was_read_ahead_is_something_else() -> None:
    """So the comparison above notices."""
    torch.manual_seed(1)
    expected, _ = _read_ahead(make("shuffle", NONE), None, 5)
    torch.manual_seed(1)
    first, position = _read_ahead(make("shuffle", NONE), None, 3)
    position["loader"]["pass"]["fetches"] = []
    rest, _ = _read_ahead(make("shuffle", NONE), position, 2)
    assert str(first + rest) != str(expected)
