"""A store that is not where it was: a disk that is not mounted, a directory that was moved, a run that was copied."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from memckpt.agent.saving.writer import checkpoint_writer as writer
from memckpt.config import StorageConfig
from memckpt.errors import ForeignStateError, NothingHeldError, StorageAwayError
from memckpt.memory.region import Region
from memckpt.protocol.storing import Announce, LookForRoom, Save, SaveFailed
from memckpt.recovery.plan import Plan, RestoreRecord, StartOver
from memckpt.session.resume.storage_tier import StorageTier, plan_with_storage
from memckpt.state.layout import Layout
from memckpt.state.records import Timeline
from memckpt.storage.catalog import read_catalog
from memckpt.storage.local_store import LocalStore
from memckpt.storage.owner import CLAIM, kept_run, read_kept
from tests.support.cluster.storage_node import spec_of
from tests.support.cluster.thread_ranks import on_ranks
from tests.support.storage.stored_parts import part_of, write
from tests.support.trainings.cli_harness import invoke

SPEC = spec_of()
OVER = StartOver(Timeline(2, "b"), "nothing is held", False)
HELD = RestoreRecord(Timeline(2, "b"), 4, 4, "local memory", 0)


def start(
    place: Path, run_dir: Path, plan: Plan | Exception = OVER, resume: Any = "auto", count: int = 1, **settings: Any
) -> StorageTier:
    """What ranks of an attempt see of their storage, where memory has what `plan` says."""
    config = StorageConfig(url=str(place), **settings)

    def make() -> Plan:
        if isinstance(plan, Exception):
            raise plan
        return plan

    def rank(ranks: Any) -> StorageTier:
        tier = StorageTier(config, run_dir, ranks, None)
        plan_with_storage(tier, resume, make)
        return tier

    return on_ranks(count, rank)[0]  # type: ignore[no-any-return]


@pytest.fixture
def away(tmp_path: Path) -> Path:
    """Where the store of the run A was, which is elsewhere now."""
    place = tmp_path / "disk" / "store"
    run = start(place, tmp_path / "A").run
    write(LocalStore(place), part_of(1, run=run))
    place.rename(tmp_path / "elsewhere")
    return place


# At the start


@pytest.mark.promise(
    "a missing store is never recreated, neither at the start nor by a writer; a start without it and without "
    "memory fails; a copy of a run directory does not continue in the original's store"
)
@pytest.mark.promise("a run directory with `run.json`, and no store, or an empty one")
@pytest.mark.parametrize("mounted", [False, True], ids=["no directory", "an empty mount point"])
@pytest.mark.parametrize(
    ("plan", "resume"), [(OVER, "auto"), (NothingHeldError("nothing is held"), "require")], ids=["auto", "require"]
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_run_whose_store_is_away_does_not_start_over(
    tmp_path: Path, away: Path, plan: Any, resume: str, mounted: bool, count: int
) -> None:
    if mounted:
        away.mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        StorageAwayError, match=r"nothing is held.*is its disk mounted.*resume='never' starts over"
    ) as e:
        start(away, tmp_path / "A", plan, resume, count)
    assert e.value.exit_code == 10
    assert str(away) in str(e.value)
    assert sorted(tmp_path.rglob("*")) == before, "nothing is made in its place"
    (tmp_path / "elsewhere").rename(away) if not mounted else shutil.copytree(
        tmp_path / "elsewhere", away, dirs_exist_ok=True
    )
    assert [point.step for point in start(away, tmp_path / "A").points] == [1]


def test_another_place_than_before_is_named_with_the_one_before(tmp_path: Path, away: Path) -> None:
    with pytest.raises(StorageAwayError, match=f"new has nothing of the run A-.*, which has stored in {away}: "):
        start(tmp_path / "new", tmp_path / "A")
    assert not (tmp_path / "new").exists()


def test_who_says_so_starts_over(tmp_path: Path, away: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = start(away, tmp_path / "A", resume="never")
    assert tier.claimed
    assert "A new one is begun there" in caplog.text
    assert read_catalog(LocalStore(away)).owner == kept_run(tmp_path / "A") == tier.run
    assert start(away, tmp_path / "A").claimed


def test_what_memory_has_goes_on_and_nothing_is_made_in_the_place_of_the_store(
    tmp_path: Path, away: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = start(away, tmp_path / "A", HELD)
    assert tier.claimed
    assert not away.exists()
    assert "Until it is back, checkpoints fail" in caplog.text
    moved = start(tmp_path / "new", tmp_path / "A", HELD)
    assert moved.claimed
    assert read_catalog(LocalStore(tmp_path / "new")).owner == tier.run


def test_a_run_that_has_claimed_nothing_yet_has_nothing_to_miss(tmp_path: Path) -> None:
    """Its storage could not be written when it began."""
    (tmp_path / "A").mkdir()
    (tmp_path / "A" / "run.json").write_text('{"run": "A-1"}')
    tier = start(tmp_path / "store", tmp_path / "A")
    assert (tier.run, tier.claimed, tier.absent) == ("A-1", True, "")
    assert read_kept(tmp_path / "A").store == str(tmp_path / "store")


# While training runs


def save(place: Path, record: int, url: str | None = None, witness: str = CLAIM) -> Any:
    region = Region.create("test", Layout(SPEC).copy_bytes)
    try:
        part = part_of(record, content=SPEC.content(), run=kept_run(place.parents[1] / "A"))
        job = Save(url or str(place), part, SPEC, "copy", 1, {0: b""}, 2, None, witness=witness)
        return writer.try_to_save(job, [region, region])
    finally:
        region.close()


@pytest.mark.parametrize("mounted", [False, True], ids=["no directory", "an empty mount point"])
def test_a_store_that_goes_away_is_not_made_anew(tmp_path: Path, away: Path, mounted: bool) -> None:
    if mounted:
        away.mkdir()
    before = sorted(tmp_path.rglob("*"))
    failed = save(away, 2)
    assert isinstance(failed, SaveFailed)
    assert "StorageAwayError" in failed.reason
    assert "it has no owner.json" in failed.reason
    assert failed.missing == 0, "as soon as it is there it is tried again"
    assert writer.free(LookForRoom(str(away), CLAIM)) is None
    writer.announce(Announce(str(away), Timeline(1, "a"), 3, CLAIM))
    with pytest.raises(StorageAwayError):
        LocalStore(away, CLAIM).write("log/x", b"")
    assert sorted(tmp_path.rglob("*")) == before
    shutil.copytree(tmp_path / "elsewhere", away, dirs_exist_ok=True)
    assert writer.free(LookForRoom(str(away), CLAIM)) is not None
    save(away, 2)
    assert [one.step for one in read_catalog(LocalStore(away)).complete] == [2, 1]


def test_a_store_that_goes_away_in_the_middle_is_not_made_anew(
    tmp_path: Path, away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").rename(away)
    read_back = writer.read_back

    def moved(*arguments: Any) -> None:
        read_back(*arguments)
        away.rename(tmp_path / "elsewhere")

    monkeypatch.setattr(writer, "read_back", moved)
    assert isinstance(save(away, 2), SaveFailed)
    assert not away.exists()


def test_a_copy_beside_has_no_owner_yet(tmp_path: Path, away: Path) -> None:
    """Somebody asks for the state in a place of their own."""
    assert not isinstance(save(away, 2, url=str(tmp_path / "beside"), witness=""), SaveFailed)


# Copies of run directories


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A store beside the directory of the run A."""
    run = start(tmp_path / "store", tmp_path / "A").run
    write(LocalStore(tmp_path / "store"), part_of(1, run=run))
    return tmp_path / "store"


def test_a_copy_of_a_run_directory_is_refused_where_the_original_is(tmp_path: Path, shared: Path) -> None:
    shutil.copytree(tmp_path / "A", tmp_path / "copy")
    with pytest.raises(ForeignStateError) as refused:
        start(shared, tmp_path / "copy")
    assert str(tmp_path / "copy") in str(refused.value)
    assert str(tmp_path / "A") in str(refused.value)
    start(shared, tmp_path / "A")
    invoke("ls", tmp_path / "copy", "--url", shared, "--adopt")
    assert start(shared, tmp_path / "copy").run == start(shared, tmp_path / "A").run


def test_a_run_directory_that_was_moved_goes_on(tmp_path: Path, shared: Path) -> None:
    run = kept_run(tmp_path / "A")
    (tmp_path / "A").rename(tmp_path / "moved")
    assert start(shared, tmp_path / "moved").run == run
    assert read_kept(tmp_path / "moved").directory == str(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "other disk")  # moved there: it has another inode
    shutil.rmtree(tmp_path / "moved")
    assert start(shared, tmp_path / "other disk").run == run


def test_what_took_the_place_of_a_moved_directory_is_not_its_original(tmp_path: Path, shared: Path) -> None:
    shutil.copytree(tmp_path / "A", tmp_path / "moved")
    shutil.rmtree(tmp_path / "A")
    (tmp_path / "A").mkdir()
    start(tmp_path / "another store", tmp_path / "A")
    assert start(shared, tmp_path / "moved").claimed


def test_a_copy_with_its_own_store_is_no_matter(tmp_path: Path) -> None:
    start(tmp_path / "A" / "storage", tmp_path / "A")
    shutil.copytree(tmp_path / "A", tmp_path / "copy")
    assert start(tmp_path / "copy" / "storage", tmp_path / "copy").claimed
