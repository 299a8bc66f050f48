"""``memckpt pin``, ``rm``, ``gc``; checkpoints whose data are not there; where a run directory says that storage is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memckpt.cli import tidying as commands
from memckpt.errors import AgentGoneError, DamagedStateError, ForeignStateError, NothingHeldError, UsageError
from memckpt.protocol.status import Status
from memckpt.state.records import Timeline
from memckpt.storage import catalog as catalog_module
from memckpt.storage.catalog import PINNED, read_catalog, read_keys
from memckpt.storage.format import Batch, encode_commit
from memckpt.storage.local_store import LocalStore
from memckpt.storage.owner import CLAIM, keep_run, kept_url
from memckpt.storage.store import Store
from tests.support.monitoring.statuses import an_agent
from tests.support.storage.stored_parts import batch_of, part_of, save_part, start, write
from tests.support.trainings.cli_harness import exit_status, invoke, invoke_json

STEPS = (1, 2, 3)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that no agent serves, with the checkpoints of some steps."""
    for record in STEPS:
        write(LocalStore(tmp_path / "run" / "storage"), part_of(record))
    return tmp_path / "run"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let an agent answer; it is saving as often as it is told."""

    def serve(saving: int = 0) -> None:
        answers = iter([True] * saving)

        def ask(address: object) -> Status:
            told = an_agent()
            assert told.storage is not None
            return an_agent(storage=type(told.storage)("/x", 1, None, 1, None, next(answers, False), ""))

        monkeypatch.setattr(commands, "ask_status", ask)

    return serve


def store_of(run: Path) -> LocalStore:
    return LocalStore(run / "storage")


def steps_in(run: Path) -> list[int]:
    return [one.step for one in read_catalog(store_of(run)).complete]


def log(store: Store, first: int, last: int) -> Batch:
    """Write a batch of records that can be redone on the checkpoint before them."""
    batch = batch_of(first, last, node="node")
    batch = msgspec.structs.replace(batch, files=(store.write(batch.log_path, b"records"),))
    store.write(batch.commit_path, encode_commit(batch))
    return batch


# pin


def test_what_is_pinned_is_kept_beside_the_last_ones_until_it_is_let_off(run: Path) -> None:
    assert invoke_json("pin", run, 1) == (0, {"step": 1, "pinned": True, "steps": [1]})
    assert [one["pinned"] for one in invoke_json("ls", run)[1]["checkpoints"]] == [False, False, True]
    assert "all, pinned" in invoke("ls", run)[1]
    save_part(store_of(run).url, part_of(4))
    assert steps_in(run) == [4, 1]
    assert invoke_json("pin", run, 1, "--off")[1] == {"step": 1, "pinned": False, "steps": []}
    assert not (run / "storage" / PINNED).exists()
    save_part(store_of(run).url, part_of(5))
    assert steps_in(run) == [5]


def test_what_is_not_there_is_not_pinned(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log(store_of(run), 4, 6)
    with pytest.raises(NothingHeldError, match=r"step 5, found those of the steps \[1, 2, 3\]; step 5 is in the log"):
        invoke("pin", run, 5)
    write(store_of(run), part_of(9, node="first", world_size=2))
    with pytest.raises(NothingHeldError, match="step 9 is incomplete: it has only the parts of first"):
        invoke("pin", run, 9)
    assert exit_status(monkeypatch, "pin", run, 7) == 4
    assert not (run / "storage" / PINNED).exists()


def test_a_pin_waits_for_the_writer_that_may_not_have_seen_it(
    run: Path, served: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    served(saving=3)
    asked: list[frozenset[Any]] = []
    wait = commands.select.select

    def look(*arguments: Any) -> Any:
        asked.append(read_keys(store_of(run), PINNED))
        if len(asked) == 2:  # it had looked before, and lets go of it now
            for path in store_of(run).find("commit/000001-a/000000000001"):
                store_of(run).delete(path)
        return wait([], [], [], 0)

    monkeypatch.setattr(commands.select, "select", look)
    with pytest.raises(NothingHeldError, match="step 1 has just been deleted by retention"):
        invoke("pin", run, 1)
    assert len(asked) == 3
    assert {key[2] for pins in asked for key in pins} == {1}
    assert read_keys(store_of(run), PINNED) == frozenset()


def test_retention_deletes_nothing_where_pins_are_damaged(run: Path) -> None:
    (run / "storage" / PINNED).write_text("{")
    save_part(store_of(run).url, part_of(4))
    assert steps_in(run) == [4, 3, 2, 1]
    with pytest.raises(DamagedStateError, match=r"pinned.json in .*: expected the keys of pinned checkpoints.*removed"):
        invoke("pin", run, 1)


# rm


def test_a_checkpoint_is_deleted_with_all_that_belongs_to_it(run: Path) -> None:
    nbytes = part_of(2)
    assert invoke_json("rm", run, 2)[1]["step"] == 2
    assert steps_in(run) == [3, 1]
    left = [path for top in ("base", "state", "commit") for path in store_of(run).find(top)]
    assert not [path for path in left if nbytes.place in path]


def test_what_is_needed_is_deleted_only_by_force(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invoke("pin", run, 1)
    with pytest.raises(UsageError, match=r"step 1 is not deleted: it is pinned .*--off.*with --force"):
        invoke("rm", run, 1)
    log(store_of(run), 4, 6)
    with pytest.raises(UsageError, match="the logged steps 4 to 6 can be redone only on it"):
        invoke("rm", run, 3)
    assert exit_status(monkeypatch, "rm", run, 3) == 1
    invoke("rm", run, 2)
    assert invoke_json("rm", run, 1, "--force")[1]["forced"] == ["it is pinned (`memckpt pin RUN 1 --off`)"]
    assert read_keys(store_of(run), PINNED) == frozenset()
    with pytest.raises(UsageError, match="it is the only complete checkpoint; the logged steps 4 to 6"):
        invoke("rm", run, 3)
    assert steps_in(run) == [3]
    assert invoke("rm", run, 3, "--force")[0] == 0
    assert steps_in(run) == []


def test_steps_that_another_checkpoint_leads_to_are_not_lost(run: Path) -> None:
    log(store_of(run), 2, 6)
    invoke("rm", run, 3)
    assert invoke_json("ls", run)[1]["step"] == 6


def test_the_newest_is_left_to_the_agent_that_counts_on_it(
    run: Path, served: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    served()
    with pytest.raises(UsageError, match="it is the newest one, and an agent of the run is alive"):
        invoke("rm", run, 3)

    def silent(address: object) -> None:
        raise AgentGoneError("no answer")

    monkeypatch.setattr(commands, "ask_status", silent)
    with pytest.raises(UsageError, match="it is the newest one"):
        invoke("rm", run, 3)
    invoke("rm", run, 2)
    assert steps_in(run) == [3, 1]


# gc


def half_written(run: Path, record: int, **rest: Any) -> str:
    path: str = part_of(record, **rest).state_path
    store_of(run).write(path, b"half of it")
    return path


def test_what_nothing_refers_to_goes_after_it_was_listed(run: Path) -> None:
    store = store_of(run)
    old = half_written(run, 0)
    batch = log(store, 0, 0)
    write(store, part_of(0, node="first", world_size=2, timeline=Timeline(0, "z")))
    kept = log(store, 4, 6)
    code, found = invoke_json("gc", run, "--node", "node", "--dry-run")
    assert code == 0
    expected = {"unfinished": [old], "incomplete": ["step 0, attempt 0"], "batches": [batch.log_path]}
    assert found == expected | {"deleted": False}
    listed = invoke("gc", run, "--node", "node", "--dry-run")[1]
    assert old in listed
    assert "3 items would be deleted" in listed
    assert store.find("log") == [batch.log_path, kept.log_path]
    assert invoke_json("gc", run, "--node", "node")[1] == expected | {"deleted": True}
    assert store.find("log") == [kept.log_path]
    assert steps_in(run) == [3, 2, 1]
    assert "nothing" in invoke("gc", run, "--node", "node")[1]
    assert invoke_json("ls", run)[1]["step"] == 6


def test_what_somebody_may_be_writing_stays(run: Path, served: Callable[..., None]) -> None:
    newer = half_written(run, 7)
    assert invoke_json("gc", run)[1]["unfinished"] == []
    for path in (run / "storage").rglob("*"):
        os.utime(path, (0, 0))
    served()
    assert invoke_json("gc", run)[1]["unfinished"] == []
    older = half_written(run, 0)
    assert invoke_json("gc", run)[1]["unfinished"] == []
    earlier = half_written(run, 9, timeline=Timeline(0, "z"))
    assert invoke_json("gc", run)[1]["unfinished"] == [earlier]
    assert store_of(run).read(newer) == store_of(run).read(older) == b"half of it"


def test_what_has_been_left_for_long_and_nobody_serves_goes(run: Path) -> None:
    newer = half_written(run, 7)
    os.utime(run / "storage" / newer, (0, 0))
    assert invoke_json("gc", run)[1]["unfinished"] == [newer]
    assert not (run / "storage" / newer).exists()


def test_nothing_goes_where_something_cannot_be_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = half_written(run, 0)
    commit = run / "storage" / part_of(3).commit_path
    commit.unlink()
    commit.mkdir()
    (commit / "x").touch()
    monkeypatch.setattr(LocalStore, "_find", _with(LocalStore._find, part_of(3).commit_path))
    assert exit_status(monkeypatch, "gc", run) == 10
    assert (run / "storage" / old).exists()


def _with(find: Any, path: str) -> Any:
    def found(self: LocalStore, *where: Any) -> Any:
        yield from find(self, *where)
        if path.startswith(where[0]):
            yield path

    return found


# Whose store it is


@pytest.mark.parametrize("command", [("pin", "1"), ("rm", "1"), ("gc",)], ids=lambda command: command[0])
def test_the_store_of_another_run_is_left_alone(command: tuple[str, ...], tmp_path: Path) -> None:
    place = tmp_path / "shared"
    run = start(place, tmp_path / "A").run
    for record in STEPS:
        write(LocalStore(place), part_of(record, run=run))
    name, *rest = command
    for other in ("new", "B"):
        if other == "B":
            keep_run(tmp_path / "B", "B-1")
        with pytest.raises(ForeignStateError, match=f"belongs to the run '{run}'"):
            invoke(name, tmp_path / other, *rest, "--url", place)
    assert (place / CLAIM).exists()
    assert len(read_catalog(LocalStore(place)).complete) == 3
    assert invoke(name, tmp_path / "A", *rest)[0] == 0  # the run directory says where its store is


# Where the store is


def test_a_run_directory_says_where_its_store_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, run_dir = tmp_path / "elsewhere", tmp_path / "A"
    run = start(place, run_dir).run
    assert kept_url(run_dir) == str(place)
    write(LocalStore(place), part_of(1, run=run))
    assert invoke_json("ls", run_dir)[1]["url"] == str(place)
    assert invoke_json("status", run_dir)[1]["stored"]["step"] == 1
    start(tmp_path / "third", run_dir).begin_store()
    assert kept_url(run_dir) == str(tmp_path / "third")
    start(run_dir / "storage", run_dir).begin_store()
    assert kept_url(run_dir) == ""  # it moves with the directory
    monkeypatch.setenv("MEMCKPT_STORAGE_URL", str(place))
    assert invoke_json("ls", run_dir)[1]["url"] == str(place)


# Data that are not there


@pytest.mark.parametrize("how", ["gone", "short", "gone from a bucket"])
def test_a_checkpoint_without_its_data_is_named_and_does_not_count(
    run: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = part_of(3)
    path = run / "storage" / part.base_directory / "__0_0.distcp"
    if how == "short":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    if how == "gone from a bucket":
        monkeypatch.setattr(catalog_module, "LocalStore", type("Other", (), {}))
    code, found = invoke_json("ls", run)
    assert code == 0
    assert found["step"] == 2
    assert list(found["missing"]) == [part.commit_path]
    assert [one["lacks_data"] for one in found["checkpoints"]] == [True, False, False]
    assert "data are missing" in invoke("ls", run)[1]
    status = invoke_json("status", run)[1]["stored"]
    assert (status["step"], status["checkpoints"], status["missing"]) == (2, 2, 1)
    assert "data of 1 commit file" in invoke("status", run)[1]


def test_what_retention_deletes_meanwhile_is_not_missing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, part = store_of(run), part_of(1)
    found = read_catalog(store)
    store.delete(part.commit_path)
    store.delete_directory(part.base_directory)
    assert catalog_module.missing_data(store, found) == {}
