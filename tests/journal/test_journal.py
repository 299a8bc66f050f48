"""The journal of a run: what is written can be read, it is bounded, and nothing waits for it or depends on it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import tracemalloc
import typing
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memckpt.cli.events import line_of, style_of, words_of
from memckpt.errors import DamagedStateError
from memckpt.journal import journal as journal_module
from memckpt.journal.events import (
    AgentLeft,
    AnyEvent,
    Decision,
    Entry,
    Envelope,
    Lost,
    Preempted,
    Unknown,
    decode,
    encode,
    name_of,
)
from memckpt.journal.journal import OLDER_FILES, Follower, Journal, files_of, latest_attempt, read_journal
from tests.support.cluster.full_log import fill
from tests.support.cluster.waiting import until

KINDS: list[type[Any]] = [kind for part in typing.get_args(AnyEvent) for kind in (typing.get_args(part) or (part,))]


def example(kind: type[Any]) -> Any:
    """An event with a value in each field."""
    values: dict[Any, Any] = {int: 3, float: 2.5, str: "a [b]", bool: True}
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        kinds = [each for each in typing.get_args(field.type) if each is not type(None)] or [field.type]
        if typing.get_origin(field.type) is dict:
            fields[field.name] = {"loss": 2.5}
            continue
        first = field.type if typing.get_origin(field.type) is tuple else kinds[0]
        if typing.get_origin(first) is tuple:
            members = ("a [b]", "c") if "tuple[str" in str(first) else (1, 2)
            fields[field.name] = (members,) if "tuple[tuple" in str(first) else members
        else:
            fields[field.name] = values[first]
    return kind(**fields)


def notes_of(run_dir: Path) -> list[int]:
    """Ranks of the events `Preempted`, which count."""
    return [entry.event.rank for entry in read_journal(run_dir) if isinstance(entry.event, Preempted)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_event_can_be_read_as_it_was_written_and_is_told_in_words(kind: type[Any]) -> None:
    entry = Entry(Envelope(time=1.5, node="n", attempt=2), example(kind))
    line = encode(entry.envelope, entry.event)
    assert decode(line) == entry
    assert json.loads(line) | {"time": 1.5, "node": "n", "attempt": 2} == json.loads(line)
    words = words_of(entry.event)
    assert words
    assert "<" not in words, "an object's repr"
    assert style_of(entry.event) in ("", "red", "yellow", "green")
    assert re.search(r"#2  \S", line_of(entry))


def test_names_of_events_are_distinct_and_are_no_fields_of_the_envelope() -> None:
    assert len({name_of(example(kind)) for kind in KINDS}) == len(KINDS)
    taken = {*Envelope.__struct_fields__, "event"}
    assert not [kind for kind in KINDS if taken & set(kind.__struct_fields__)]


def test_an_event_of_a_later_version_is_kept_as_it_is() -> None:
    line = b'{"time":1.0,"node":"n","attempt":1,"event":"flew","height":3}'
    entry = decode(line)
    assert entry.event == Unknown("flew", {"height": 3})
    assert json.loads(encode(entry.envelope, entry.event)) == json.loads(line)
    assert words_of(entry.event) == "flew: height=3"
    more = decode(b'{"time":1.0,"node":"n","attempt":1,"event":"preempted","rank":1,"why":"spot"}')
    assert more.event == Preempted(1)
    with pytest.raises(DamagedStateError):
        decode(b'{"time":1.0,"node":"n","attempt":1}')


def test_events_are_written_in_order_with_time_node_and_attempt(tmp_path: Path) -> None:
    times = iter([10.0, 11.0, 12.0])
    with closing(Journal(tmp_path, "node.1", clock=lambda: next(times))) as journal:
        journal.add(Preempted(0))
        journal.attempt = 3
        journal.add(Decision("redo", "eager", "lazy", "redo takes 1.5 steps"))
        journal.add(AgentLeft("stopped"), at=1.0)
    assert read_journal(tmp_path) == [
        Entry(Envelope(time=1.0, node="node.1", attempt=3), AgentLeft("stopped")),
        Entry(Envelope(time=10.0, node="node.1", attempt=0), Preempted(0)),
        Entry(Envelope(time=11.0, node="node.1", attempt=3), Decision("redo", "eager", "lazy", "redo takes 1.5 steps")),
    ]
    assert read_journal(tmp_path, "node") == []


def test_a_journal_is_bounded_and_loses_its_oldest_events_only(tmp_path: Path) -> None:
    for number in range(0, 400, 10):
        with closing(Journal(tmp_path, "n", file_bytes=2_000)) as journal:
            for each in range(number, number + 10):
                journal.add(Preempted(each))
    files = files_of(tmp_path)["n"]
    assert [path.name for path in files] == [
        "events-n.jsonl.3",
        "events-n.jsonl.2",
        "events-n.jsonl.1",
        "events-n.jsonl",
    ]
    assert len(files) == OLDER_FILES + 1
    assert all(path.stat().st_size <= 2_000 for path in files)
    ranks = notes_of(tmp_path)
    assert ranks == list(range(ranks[0], 400))
    assert len(ranks) > 60


def test_an_attempt_is_known_once_it_has_settled(tmp_path: Path) -> None:
    with closing(Journal(tmp_path, "a")) as journal:
        journal.attempt = 3
        journal.add(Preempted(0))
        assert journal.settle(60.0)
        assert latest_attempt(tmp_path, "a") == 3


def test_an_attempt_is_known_though_an_agent_without_trainers_has_filled_a_file(tmp_path: Path) -> None:
    with closing(Journal(tmp_path, "a", file_bytes=2_000)) as journal:
        journal.attempt = 7
        journal.add(Preempted(0))
    while len(files_of(tmp_path)["a"]) < 2:
        with closing(Journal(tmp_path, "a", file_bytes=2_000)) as journal:
            journal.add(Preempted(0))
    assert latest_attempt(tmp_path, "a") == 7


def test_a_reader_follows_a_journal_through_rotations_and_nodes(tmp_path: Path) -> None:
    seen: list[int] = []
    with closing(Follower(tmp_path)) as follower, closing(Journal(tmp_path, "a", file_bytes=2_000)) as journal:
        assert follower.poll() == []
        for number in range(100):
            journal.add(Preempted(number))

            def there(number: int = number) -> bool:
                seen.extend(entry.event.rank for entry in follower.poll() if isinstance(entry.event, Preempted))
                return number in seen

            until(there)
        with closing(Journal(tmp_path, "b")) as other:
            other.add(Preempted(1000))
        seen.extend(entry.event.rank for entry in follower.poll() if isinstance(entry.event, Preempted))
    assert seen == [*range(100), 1000]
    assert (tmp_path / "events-a.jsonl.1").exists()


def test_a_torn_line_costs_that_line(tmp_path: Path) -> None:
    """As after a crash of the machine, or on a disk that has filled up."""
    with closing(Journal(tmp_path, "n")) as journal:
        journal.add(Preempted(1))
    path = tmp_path / "events-n.jsonl"
    path.write_bytes(path.read_bytes() + b'{"time":1.0,"node"')
    with closing(Journal(tmp_path, "n")) as journal:
        journal.add(Preempted(2))
    assert notes_of(tmp_path) == [1, 2]
    assert len(path.read_bytes().split(b"\n")) == 4


def test_a_file_without_line_ends_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "events-n.jsonl"
    with closing(Journal(tmp_path, "n")) as journal:
        journal.add(Preempted(1))
    size = 1 << 28
    os.truncate(path, size)  # a hole
    tracemalloc.start()
    try:
        with closing(Follower(tmp_path)) as follower:
            assert [entry.event for entry in follower.poll()] == [Preempted(1)]
            with path.open("ab") as file:
                file.write(b"\n" + encode(Envelope(time=1.0, node="n", attempt=1), Preempted(2)) + b"\n")
            assert [entry.event for entry in follower.poll()] == [Preempted(2)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size // 16


def test_a_full_disk_costs_events_only_and_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "events-n.jsonl"
    path.symlink_to("/dev/full")
    with closing(Journal(tmp_path, "n")) as journal:
        for number in range(3):
            journal.add(Preempted(number))
            until(lambda number=number: journal.lost == number + 1)
        assert "No space left" in journal.problem
        path.unlink()
        journal.add(Preempted(3))
        until(lambda: not journal.problem)
    said = [message for message in caplog.messages if "journal" in message]
    assert said[0].startswith(f"the journal {path} cannot be written (No space left on device): events are lost until")
    assert said[1:] == ["the journal is written again; 3 events were lost"]
    assert [entry.event for entry in read_journal(tmp_path)] == [Lost(3), Preempted(3)]


def test_a_directory_that_comes_later_gets_what_follows(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with closing(Journal(run_dir, "n")) as journal:
        journal.add(Preempted(0))
        until(lambda: journal.lost == 1)
        run_dir.mkdir()
        journal.add(Preempted(1))
        until(lambda: bool(notes_of(run_dir)))
        run_dir.rename(tmp_path / "moved")
        journal.add(Preempted(2))
    assert notes_of(tmp_path / "moved") == [1, 2]
    assert not run_dir.exists()


def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """(A full pipe in the place of the file.)"""
    monkeypatch.setattr(journal_module, "_END_SECONDS", 0.1)
    os.mkfifo(tmp_path / "events-n.jsonl")
    reader = os.open(tmp_path / "events-n.jsonl", os.O_RDWR)
    fill(reader)
    journal = Journal(tmp_path, "n")
    journal.add(Preempted(0))
    until(journal._lines.empty)
    for number in range(3_000):
        journal.add(Preempted(number))
    assert journal.lost == 2_000
    journal.close()
    assert journal._thread.is_alive()
    flags = os.O_RDONLY | os.O_NONBLOCK
    drain = os.open(tmp_path / "events-n.jsonl", flags)
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            with contextlib.suppress(BlockingIOError):
                os.read(drain, 1 << 16)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        journal._lines.put(None)
        journal._thread.join(60)
        assert not journal._thread.is_alive()
    finally:
        ended.set()
        thread.join()
        os.close(drain)
        os.close(reader)


def test_a_text_without_end_is_cut(tmp_path: Path) -> None:
    with closing(Journal(tmp_path, "n")) as journal:
        journal.add(AgentLeft("x" * 100_000))
    (entry,) = read_journal(tmp_path)
    assert isinstance(entry.event, AgentLeft)
    assert entry.event.reason == "x" * 1_000 + " ..."


def test_two_agents_write_to_one_journal_while_one_takes_over(tmp_path: Path) -> None:
    with (
        closing(Journal(tmp_path, "n", file_bytes=5_000)) as one,
        closing(Journal(tmp_path, "n", file_bytes=5_000)) as two,
    ):
        for number in range(50):
            one.add(Preempted(number))
            two.add(Preempted(100 + number))
    assert sorted(notes_of(tmp_path)) == [*range(50), *range(100, 150)]
