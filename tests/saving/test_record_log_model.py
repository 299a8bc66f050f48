"""The log in any order of events: records, deaths, attempts that go back, processes and storage that fail.

A model keeps what each timeline has really trained. Whatever the store offers must be that, and what the log says it
has written must be there.
"""

from __future__ import annotations

import itertools
import secrets
import struct
from collections.abc import Iterator
from typing import cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from memckpt.agent.saving import record_log
from memckpt.agent.saving.record_log import RecordLog
from memckpt.agent.saving.writer import record_writer as records
from memckpt.errors import StorageError
from memckpt.memory.generation import branch_off
from memckpt.processes.helper_process import HelperProcess
from memckpt.state.records import Branch, Timeline, decode_meta, timeline_of
from memckpt.storage.batch import RecordReader, gradient_name, meta_name, rank_state_name
from memckpt.storage.catalog import read_catalog, remove, remove_batch
from memckpt.storage.chain import StoredPoint, stored_points, unneeded_batches
from memckpt.storage.format import encode_commit
from memckpt.storage.retention import superseded
from memckpt.storage.store import Store
from memckpt.storage.urls import open_store
from tests.support.cluster.storage_node import Clock, Filled, RecordsProcess, spec_of
from tests.support.storage.stored_parts import part_of

TIMEOUT_SECONDS = 1800.0


class LogMachine(RuleBasedStateMachine):
    """One node whose run goes on through attempts; storage at one of two places."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.clock = Clock()
        self.patch.setattr(record_log, "time", self.clock)
        self.patch.setattr(records, "time", self.clock)
        self.patch.setattr(records, "open_store", self._open_store)
        self.urls = [f"memory://{secrets.token_hex(6)}" for _ in range(2)]
        self.url = self.urls[0]
        self.down = False
        self.processes: list[RecordsProcess] = []
        self.log = RecordLog("n", self._start, lambda: None)
        self.values: Iterator[int] = itertools.count(1)
        #: Of each timeline the value of every record on the way to its newest one.
        self.trained: dict[Timeline, dict[int, float]] = {}
        #: Place of each timeline's records.
        self.places: dict[Timeline, str] = {}
        self.history: tuple[Branch, ...] = ()
        self.number = 0
        #: The oldest record that a checkpoint of this attempt can be of.
        self.began_at = 0
        self.filled: Filled | None = None
        self._begin_attempt(0, {}, self.url)

    def _open_store(self, url: str, witness: str = "") -> Store:
        if self.down:
            raise StorageError("no room")
        return open_store(url, witness)

    def _start(self) -> HelperProcess:
        process = RecordsProcess(self.log.appended)
        self.processes.append(process)
        return cast("HelperProcess", process)

    @property
    def timeline(self) -> Timeline:
        return self.history[-1].timeline

    @property
    def process(self) -> RecordsProcess | None:
        return next((process for process in self.processes if not process.closed), None)

    def _new_timeline(self) -> Timeline:
        return Timeline(len(self.trained) + 1, f"t{len(self.trained) + 1}")

    def _begin_attempt(self, base: int, before: dict[int, float], url: str) -> None:
        """As after a restore from storage, or with nothing: the generation begins after a record of its own."""
        timeline = self._new_timeline()
        self._configure(url, timeline)
        self.trained[timeline] = {**before}
        self.history = (Branch(timeline, None),)
        self._begin_generation(base + 1)
        self.began_at = base + 1

    def _configure(self, url: str, timeline: Timeline) -> None:
        self.url = self.places[timeline] = url
        self.log.configure(url, 3, TIMEOUT_SECONDS, timeline)

    def _begin_generation(self, base: int) -> None:
        if self.filled is not None:
            self.log.drop_generation(self.filled.held)
            self.filled.close()
        self.number += 1
        self.filled = Filled(self.number, spec_of(), base)
        self.trained[self.timeline][base] = float(next(self.values))

    # What happens

    @rule(count=st.integers(1, 4), waits=st.booleans())
    def train(self, count: int, waits: bool) -> None:
        """Records are committed; with `waits` the process keeps up with them."""
        assert self.filled is not None
        for _ in range(count):
            value = float(next(self.values))
            record = self.filled.commit(value=value)
            self.trained[self.timeline][record] = value
            self.log.collect(self.filled.held)
            if waits:
                self.work(9)

    @rule(count=st.integers(1, 3))
    def work(self, count: int) -> None:
        process = self.process
        while process is not None and count and process.work():
            count -= 1

    @rule()
    def flush(self) -> None:
        self.log.flush()
        self.work(9)

    @rule(age=st.integers(0, 2))
    def checkpoint(self, age: int) -> None:
        """One of the newest records is in storage as a whole; retention lets go of what it does not keep."""
        record = self.filled.newest - age
        if self.down or record < self.began_at:
            return
        store, spec = open_store(self.url), self.filled.held.spec
        part = part_of(record, timeline=self.timeline, node="n", content=spec.content())
        store.write(part.commit_path, encode_commit(part))
        catalog = read_catalog(store)
        for one in superseded(catalog.checkpoints, 2, None):
            remove(store, one)
        for batch in unneeded_batches(catalog, catalog.complete[:2]):
            remove_batch(store, batch)
        self.log.checkpoint_saved(record)

    @rule(back=st.integers(0, 2), torn=st.booleans(), elsewhere=st.sampled_from([False, False, True]))
    def resume_from_memory(self, back: int, torn: bool, elsewhere: bool) -> None:
        if torn:  # the trainer died while it filled a slot
            self.filled.open(self.filled.newest + 1, -1.0)
        producible = self.filled.held.producible()
        record = producible[max(0, len(producible) - 1 - back)]
        follows = timeline_of(self.history, record)
        assert follows is not None
        timeline = self._new_timeline()
        self._configure(self.urls[self.url == self.urls[0]] if elsewhere else self.url, timeline)
        self.filled.settle(record)
        self.began_at = record
        self.log.branch(record, follows)
        kept = {number: value for number, value in self.trained[self.timeline].items() if number <= record}
        self.trained[timeline] = kept
        self.history = branch_off(self.history, record, timeline)

    @rule(count=st.integers(2, 4), backs=st.lists(st.integers(0, 2), min_size=1, max_size=2), elsewhere=st.booleans())
    def attempts_end_while_the_process_is_busy(self, count: int, backs: list[int], elsewhere: bool) -> None:
        """It has a record, and others wait; slots of some of them are filled anew before it goes on."""
        self.work(9)
        self.checkpoint(0)
        for number, back in enumerate(backs):
            self.train(count, waits=False)
            self.resume_from_memory(back, torn=False, elsewhere=elsewhere and number > 0)
        self.train(count, waits=False)
        self.work(9)

    @rule(what=st.sampled_from(["generation", "storage", "process", "full", "room", "time", "time"]))
    def something_else_happens(self, what: str) -> None:
        match what:
            case "generation":
                self._begin_generation(self.filled.newest + 1)
            case "storage":
                self._resume_from_storage()
            case "process":
                if self.process is not None:
                    self.log.writer_ended("killed")
            case "full" | "room":
                self.down = what == "full"
            case "time":
                self.clock.passes(record_log._BATCH_SECONDS)

    def _resume_from_storage(self) -> None:
        found = stored_points(read_catalog(open_store(self.url)))
        before = {}
        if found:
            trained = self.trained[found[0].timeline].items()
            before = {number: value for number, value in trained if number <= found[0].record}
        self._begin_attempt(max(before, default=0), before, self.url)

    # What must hold

    @rule(back=st.none() | st.integers(0, 1))
    def nothing_fails_for_a_while(self, back: int | None) -> None:
        """A checkpoint and the records behind it are soon in storage, and those of an attempt that goes on there."""
        self.down = False
        self.clock.passes(record_log._RETRY_SECONDS)
        self.flush()
        self.train(1, waits=True)
        self.checkpoint(0)
        self._train_and_find_all_of_it()
        if back is not None:
            self.resume_from_memory(back, torn=False, elsewhere=False)
            self._train_and_find_all_of_it()

    def _train_and_find_all_of_it(self) -> None:
        self.train(2, waits=True)
        self.flush()
        assert not self.log.busy
        assert not self.log.alarm
        assert self.log.covers(self.filled.newest)
        newest = stored_points(read_catalog(open_store(self.url)))[0]
        assert (newest.timeline, newest.record) == (self.timeline, self.filled.newest)

    @rule()
    def look(self) -> None:
        for url in self.urls:
            store = open_store(url)
            reader = RecordReader(store)
            catalog = read_catalog(store)
            assert {self.places[batch.timeline] for batch in catalog.batches} <= {url}
            points = stored_points(catalog)
            for point in points:
                self._check(point, reader)
            if url == self.url and self.log.based and self.log.written is not None:
                stored = [point.record for point in points if point.timeline == self.timeline]
                assert max(stored, default=-1) >= self.log.written[0], f"{self.log.written} is not in storage"

    def _check(self, point: StoredPoint, reader: RecordReader) -> None:
        trained, start = self.trained[point.timeline], point.checkpoint
        assert self.trained[start.timeline][start.record] == trained[start.record]
        redone = list(point.gradient_batches(start.part_serving(0)))
        assert [record for record, _ in redone] == list(range(start.record + 1, point.record + 1))
        for record, batch in redone:
            where = f"record {record} of {point.timeline}, from {batch.log_path}"
            meta = decode_meta(reader.data(batch, meta_name(record)))
            gradient = struct.unpack("4f", reader.data(batch, gradient_name(record, meta.sub_steps[0], "w")))
            assert gradient == (trained[record],) * 4, where
            assert meta.plain == repr(trained[record]).encode(), where
        last = point.last_batch_of(0)
        if last is not None:
            state = reader.data(last, rank_state_name(point.record, 0))
            assert state == f"0 {trained[point.record]!r}".encode()

    def teardown(self) -> None:
        try:
            self.look()
        finally:
            self.log.close()
            if self.filled is not None:
                self.filled.close()
            for url in self.urls:
                store = open_store(url)
                for path in store.find("", unfinished=True):
                    store.delete(path)
            self.patch.undo()


def settings_for(examples: int) -> settings:
    checks = list(HealthCheck)  # an example is a whole life of a run
    return settings(max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=checks)


def test_storage_has_what_was_trained_and_what_the_log_says_it_has() -> None:
    run_state_machine_as_test(LogMachine, settings=settings_for(40))


@pytest.mark.slow
def test_the_same_for_many_more_lives() -> None:
    run_state_machine_as_test(LogMachine, settings=settings_for(1000))
