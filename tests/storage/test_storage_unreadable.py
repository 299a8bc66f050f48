"""Good, damaged and unreadable are three things: what cannot be read for a moment is waited for, and never given up."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from memckpt.config import StorageConfig
from memckpt.errors import DamagedStateError, StorageError
from memckpt.recovery.plan import Plan, RestoreRecord, RestoreStored, StartOver
from memckpt.session.resume import storage_tier
from memckpt.session.resume.storage_tier import StorageTier, plan_with_storage
from memckpt.state.records import Timeline
from memckpt.storage.catalog import PASSED, read_catalog
from memckpt.storage.local_store import LocalStore
from memckpt.storage.retention import leftovers, superseded
from memckpt.storage.store import Store, matches, verify_files
from tests.support.cluster.sharded_job import plain, rows, train
from tests.support.cluster.thread_ranks import on_ranks
from tests.support.storage.stored_parts import part_of, save_part, write
from tests.support.trainings.cli_harness import exit_status, invoke_json


class Hiccup:
    """Files of a directory that cannot be read: by the ends of their paths, and how often, or for good (None)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times: dict[str, int | None] = {}
        opened = LocalStore._open
        hiccup = self

        def open_(store: LocalStore, path: str) -> IO[bytes]:
            hiccup.check(path)
            return opened(store, path)

        monkeypatch.setattr(LocalStore, "_open", open_)

    def check(self, path: str) -> None:
        for end, left in self.times.items():
            if path.endswith(end) and left != 0:
                self.times[end] = left if left is None else left - 1
                raise OSError(errno.ESTALE, "Stale file handle", path)


@pytest.fixture
def hiccup(monkeypatch: pytest.MonkeyPatch) -> Hiccup:
    return Hiccup(monkeypatch)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each start has waited; time passes by that alone."""
    waited: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 5.0 + sum(waited), sleep=waited.append)
    monkeypatch.setattr(storage_tier, "time", clock)
    return waited


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A store with the steps 2 and 3, of one rank."""
    for record in (2, 3):
        train(LocalStore(tmp_path), rows(1), 1, base_at=record, last=record)
    return tmp_path


def start(place: Path, ranks: Any, step: int | None = None) -> StorageTier:
    return StorageTier(StorageConfig(url=str(place)), place, ranks, step)


def resume(place: Path, step: int | None = None) -> int:
    """The step that one rank resumes from."""

    def body(ranks: Any) -> int:
        tier = start(place, ranks, step)
        if tier.unread:  # as a session does where memory does not serve
            tier.list_again()
        points = [point for point in tier.points if step is None or point.step == step]
        return tier.open_newest(points, plain().spec(0, 1), by_hand=step is not None).point.step

    found: int = on_ranks(1, body)[0]
    return found


DATA, COMMIT = "000000000003/n0/__0_0.distcp", "000000000003/n0.json"


# Files


@pytest.mark.promise(
    "unreadable files are waited for, never taken for damaged, never skipped silently, and kept; `--repair` deletes"
    " nothing"
)
def test_what_cannot_be_read_is_not_damaged(tmp_path: Path, hiccup: Hiccup) -> None:
    store = LocalStore(tmp_path)
    file = store.write("a", b"content")
    assert matches(store, file) is None
    hiccup.times["a"] = 1
    with pytest.raises(StorageError, match=r"could not read a in .* Stale file handle"):
        matches(store, file)
    hiccup.times["a"] = 1
    with pytest.raises(StorageError, match="Stale"):
        verify_files(store, [file])
    assert matches(store, file) is None
    store.delete("a")
    assert matches(store, file) == "a: the file is missing"


def test_a_file_is_moved_as_a_whole(store: Store) -> None:
    store.write("a/b/c", b"content")
    store.move("a/b/c", "d/e/a/b/c")
    assert store.find("") == ["d/e/a/b/c"]
    assert store.read("d/e/a/b/c") == b"content"
    store.move("not/there", "d/not/there")
    assert store.find("") == ["d/e/a/b/c"]


def test_patience_ends_with_its_time(
    trained: Path, hiccup: Hiccup, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    hiccup.times[COMMIT] = None
    with caplog.at_level(logging.WARNING), pytest.raises(StorageError):
        resume(trained)
    assert pauses == [1, 2, 4, 8, 16, 29]
    assert f"{COMMIT} in" in caplog.text
    assert "tried again in 16 s, for 45 s at most" in caplog.text


# Resuming


@pytest.mark.parametrize("what", [DATA, COMMIT, "n0.msgpack"])
def test_what_can_be_read_again_is_resumed_from(
    trained: Path, hiccup: Hiccup, pauses: list[float], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    hiccup.times[what] = 3
    assert resume(trained) == 3
    assert pauses == [1, 2, 4][: 2 if what == COMMIT else 3], "the first look at all of it waits for nothing"
    assert "Stale file handle" in caplog.text
    assert "tried again in" in caplog.text
    assert not re.search("passed over|left out", caplog.text), "one thing is said of it"


@pytest.mark.parametrize("what", [DATA, COMMIT])
def test_what_stays_unreadable_ends_the_resume_and_says_how_to_go_on(
    trained: Path, hiccup: Hiccup, pauses: list[float], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    hiccup.times[what] = None
    with pytest.raises(StorageError, match=r"may be whole: .* resume=STEP, of \[2\]") as ended:
        resume(trained)
    assert not re.search("passed over|left out", caplog.text)
    assert ended.value.exit_code == 10
    assert sum(pauses) == 60
    assert resume(trained, 2) == 2
    hiccup.times.clear()
    assert resume(trained) == 3


def test_all_ranks_end_alike(tmp_path: Path, hiccup: Hiccup, pauses: list[float]) -> None:
    """One of them cannot read its share; the others learn of it."""
    for record in (2, 3):
        train(LocalStore(tmp_path), rows(3), 3, base_at=record, last=record)
    hiccup.times["000000000003/n1/__0_0.distcp"] = None

    def body(ranks: Any) -> str:
        tier = start(tmp_path, ranks)
        with pytest.raises(StorageError) as ended:
            tier.open_newest(tier.points, plain().spec(0, 1))
        return str(ended.value)

    said = on_ranks(3, body)
    assert len(set(said)) == 1
    assert "n1/__0_0.distcp" in said[0]


def test_damage_is_passed_over_and_what_cannot_be_read_is_not(
    trained: Path, hiccup: Hiccup, pauses: list[float]
) -> None:
    (data,) = trained.glob(f"base/*/{DATA}")
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    hiccup.times["000000000002/n0/__0_0.distcp"] = None
    with pytest.raises(StorageError, match="resume='never', which starts over"):
        resume(trained)
    hiccup.times.clear()
    assert resume(trained) == 2


def test_many_files_that_cannot_be_read_are_not_all_tried(tmp_path: Path, hiccup: Hiccup) -> None:
    """Each may take a minute until it is given up."""
    for record in range(1, 9):
        write(LocalStore(tmp_path), part_of(record))
    hiccup.times["node.json"] = 3
    catalog = read_catalog(LocalStore(tmp_path))
    assert len(catalog.unreadable) == 8
    assert sum(": not tried" in why for why in catalog.unreadable.values()) == 5


class _Tier:
    """As a plan sees it: something in storage cannot be read until it is looked into again."""

    name = "storage"

    def __init__(self, readable: bool) -> None:
        self.unread = "could not read x"
        self.absent = ""
        self.name = "storage"
        self._readable = readable
        self.looked = self.said = 0

    def log_unread(self) -> None:
        self.said += 1

    def begin_store(self) -> None:
        pass

    def list_again(self) -> None:
        self.looked += 1
        self.unread = "" if self._readable else self.unread


T2 = Timeline(2, "b")
MEMORY = RestoreRecord(T2, 4, 4, "local memory", 0)
NOTHING: Callable[[_Tier], Plan] = lambda tier: StartOver(T2, "nothing is held", False)  # noqa: E731


def test_memory_does_not_wait_for_storage() -> None:
    tier = _Tier(readable=False)
    assert plan_with_storage(tier, "auto", lambda: MEMORY) == MEMORY  # type: ignore[arg-type]
    assert (tier.looked, tier.said) == (0, 1), "it is left out, and not tried again"


@pytest.mark.parametrize("resume", ["auto", "require", 3])
def test_training_starts_over_only_when_all_could_be_read(resume: Any) -> None:
    stored = RestoreStored(T2, (), "nothing is held")
    tier = _Tier(readable=True)

    def make() -> Plan:
        return NOTHING(tier) if tier.unread else stored

    assert plan_with_storage(tier, resume, make) == stored  # type: ignore[arg-type]
    assert tier.said == 0
    tier = _Tier(readable=False)
    with pytest.raises(StorageError, match=r"nothing is held.*could not read x"):
        plan_with_storage(tier, resume, lambda: NOTHING(tier))  # type: ignore[arg-type]
    assert tier.looked == 1
    assert plan_with_storage(tier, "never", lambda: NOTHING(tier)) == NOTHING(tier)  # type: ignore[arg-type]


# Retention


def test_retention_keeps_what_was_passed_over_until_it_is_proved_bad(
    trained: Path, hiccup: Hiccup, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(trained)
    (data,) = trained.glob(f"base/*/{DATA}")
    hiccup.times[DATA] = None
    with pytest.raises(StorageError):
        resume(trained)
    run = read_catalog(store).owner
    hiccup.times.clear()

    def train_on(*records: int) -> list[int]:
        for record in records:
            save_part(trained, part_of(record, timeline=Timeline(7, "z"), run=run))
        return [one.record for one in read_catalog(store).complete]

    assert train_on(3, 4, 5) == [5, 3], "what was passed over, and the newest"
    data.write_bytes(b"damaged")
    assert exit_status(monkeypatch, "verify", trained, "--url", trained, "--repair") == 0
    assert read_catalog(store).passed == frozenset()
    assert PASSED not in store.find("")
    assert train_on(6) == [6]


def test_what_is_resumed_from_is_passed_over_no_more(trained: Path, hiccup: Hiccup, pauses: list[float]) -> None:
    hiccup.times[DATA] = None
    with pytest.raises(StorageError):
        resume(trained)
    assert [key[2] for key in read_catalog(LocalStore(trained)).passed] == [3]
    hiccup.times.clear()
    assert resume(trained) == 3
    assert read_catalog(LocalStore(trained)).passed == frozenset()


def test_a_checkpoint_with_a_part_that_cannot_be_read_is_kept(tmp_path: Path, hiccup: Hiccup) -> None:
    store = LocalStore(tmp_path)
    for node, rank in (("m", 0), ("n", 1)):
        for record in (1, 2):
            write(store, part_of(record, node=node, ranks=(rank,), world_size=2))
    hiccup.times["000000000001/n.json"] = 1
    catalog = read_catalog(store)
    assert [one.complete for one in catalog.checkpoints] == [True, False]
    assert superseded(catalog.checkpoints, 1, None, None, catalog.unsure) == []


# The command line


@pytest.mark.parametrize("what", [DATA, COMMIT])
def test_repair_touches_nothing_that_it_could_not_read(
    trained: Path, hiccup: Hiccup, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    hiccup.times[what] = None
    command = ["verify", trained, "--url", trained]
    for options in ([], ["--repair"]):
        code, found = invoke_json(*command, *options)
        assert code == StorageError.exit_code
        assert found["damaged"] == {}
        assert found["steps"] == [2]
        assert "Stale file handle" in str(found["unreadable"])
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before
    hiccup.times.clear()
    assert exit_status(monkeypatch, *command) == 0


def test_repair_moves_what_is_damaged_aside_and_deletes_nothing(trained: Path) -> None:
    (data,) = trained.glob(f"base/*/{DATA}")
    data.write_bytes(b"damaged")
    (commit,) = trained.glob("commit/*/000000000002/n0.json")
    commit.write_bytes(b"damaged, too")
    before = sorted(path.read_bytes() for path in trained.rglob("*") if path.is_file())
    code, found = invoke_json("verify", trained, "--url", trained)
    assert code == DamagedStateError.exit_code
    assert (len(found["damaged"]), found["aside"]) == (2, None)
    code, found = invoke_json("verify", trained, "--url", trained, "--repair")
    assert code == 0
    aside = trained / found["aside"]
    assert aside.parent == trained / "damaged"
    assert len(list(aside.glob("commit/*/*/*.json"))) == 2
    assert (aside / data.relative_to(trained)).read_bytes() == b"damaged"
    assert sorted(path.read_bytes() for path in trained.rglob("*") if path.is_file()) == before
    assert LocalStore(trained).find("base") == []


def test_a_damaged_checkpoint_of_which_a_part_cannot_be_read_stays(tmp_path: Path, hiccup: Hiccup) -> None:
    """Else what is left of it would be a leftover, which a writer deletes."""
    store = LocalStore(tmp_path)
    part = write(store, part_of(1))
    (tmp_path / part.state_path).write_bytes(b"damaged")
    before = store.find("")
    hiccup.times["__0_0.distcp"] = None
    assert invoke_json("verify", tmp_path, "--url", tmp_path, "--repair")[0] == StorageError.exit_code
    assert store.find("") == before


def test_an_export_does_not_take_an_older_step_for_the_newest(
    trained: Path, hiccup: Hiccup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hiccup.times[COMMIT] = None
    command = ["export", trained, "--url", trained, "--format", "dcp", "--to"]
    assert exit_status(monkeypatch, *command, tmp_path / "out") == StorageError.exit_code
    assert exit_status(monkeypatch, *command, tmp_path / "out", "--step", 2) == 0


# Directories that cannot be listed


@pytest.fixture(params=[errno.EACCES, errno.EIO])
def hide(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a directory of a store one that cannot be listed; root may list all that a permission says."""
    hidden: list[str] = []
    listed = os.scandir

    def scandir(path: str) -> Any:
        if any(os.fspath(path).endswith(f"/{one}") for one in hidden):
            raise OSError(request.param, os.strerror(request.param), os.fspath(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    return hidden.append


def test_one_directory_that_cannot_be_listed_hides_nothing_else(
    trained: Path, hide: Callable[[str], None], pauses: list[float]
) -> None:
    store = LocalStore(trained)
    newest, older = read_catalog(store).complete
    directory = newest.full_parts[0].commit_path.rpartition("/")[0]
    hide(directory)
    catalog = read_catalog(store)
    assert [one.step for one in catalog.complete] == [older.step]
    assert list(catalog.unreadable) == [directory]
    assert leftovers(catalog, "n0", [newest.full_parts[0]]) == [], "what belongs to it is kept"
    config = StorageConfig(url=str(trained))

    def resume(step: int | None) -> int:
        tier: StorageTier = on_ranks(1, lambda ranks: StorageTier(config, trained, ranks, step))[0]
        points = [one for one in tier.points if step in (None, one.step)]
        plan_with_storage(tier, "auto" if step is None else step, lambda: RestoreStored(T2, tuple(points), "x"))
        return tier.open_newest(points, plain().spec(0, 1), by_hand=step is not None).point.step

    assert resume(older.step) == older.step
    assert pauses == [], "a step that was asked for waits for nothing"
    with pytest.raises(StorageError, match=f"could not list {directory}.*resume=STEP, of ") as ended:
        resume(None)
    assert ended.value.exit_code == 10
    assert sum(pauses) > 30, "it was tried again"


def test_an_older_directory_that_cannot_be_listed_is_left_out(trained: Path, hide: Callable[[str], None]) -> None:
    newest, older = read_catalog(LocalStore(trained)).complete
    hide(older.full_parts[0].commit_path.rpartition("/")[0])
    catalog = read_catalog(LocalStore(trained))
    assert [one.step for one in catalog.complete] == [newest.step]
    assert catalog.unsure <= {older.key}


def test_a_directory_of_data_that_cannot_be_listed_takes_nothing_away(
    trained: Path, hide: Callable[[str], None]
) -> None:
    newest, older = read_catalog(LocalStore(trained)).complete
    hide(newest.full_parts[0].base_directory)
    catalog = read_catalog(LocalStore(trained))
    assert [one.step for one in catalog.complete] == [newest.step, older.step]
    assert catalog.unreadable == {}
    assert verify_files(LocalStore(trained), newest.part_files) == []


def test_a_store_that_cannot_be_listed_at_all_is_an_error(trained: Path, hide: Callable[[str], None]) -> None:
    hide("commit")
    with pytest.raises(StorageError, match="could not list commit"):
        read_catalog(LocalStore(trained))
