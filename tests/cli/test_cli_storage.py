"""The commands that look at what a run has in storage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from memckpt.cli import export as export_command
from memckpt.cli import run_view, stored
from memckpt.errors import (
    ConfigurationError,
    DamagedStateError,
    ForeignStateError,
    NothingHeldError,
    StorageError,
    StorageFullError,
    UsageError,
)
from memckpt.storage.catalog import Checkpoint, read_catalog, remove
from memckpt.storage.local_store import LocalStore
from memckpt.storage.store import Examined, Store, StoredFile
from memckpt.storage.urls import open_store
from tests.conftest import Bucket
from tests.support.cluster.processes import HIDING
from tests.support.storage.stored_parts import part_of, write
from tests.support.trainings.cli_harness import exit_status, invoke, invoke_json


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the checkpoints of steps 1 and 2."""
    store = LocalStore(tmp_path / "run" / "storage")
    for record in (1, 2):
        write(store, part_of(record))
    return tmp_path / "run"


def damage(run: Path, record: int) -> None:
    part = part_of(record)
    path = run / "storage" / part.base_directory / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def steps_in(run: Path) -> list[int]:
    return [one["step"] for one in invoke_json("ls", run)[1]["checkpoints"]]


# ls


def test_the_environment_says_where_storage_is(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMCKPT_STORAGE_URL", str(run / "storage"))
    assert steps_in(tmp_path / "elsewhere") == [2, 1]
    with pytest.raises(NothingHeldError, match=r"no checkpoints in .*/empty"):
        invoke("ls", tmp_path / "elsewhere", "--url", tmp_path / "empty")  # what is asked for wins


def test_ls_names_what_is_not_whole(run: Path) -> None:
    write(LocalStore(run / "storage"), part_of(3, node="first", world_size=2))
    commit = run / "storage" / part_of(1).commit_path
    commit.write_bytes(b"cut short")
    found = invoke_json("ls", run)[1]
    assert [one["complete"] for one in found["checkpoints"]] == [False, True]
    assert list(found["damaged"]) == [part_of(1).commit_path]
    assert "only of first" in invoke("ls", run)[1]


def test_nothing_there_is_an_error(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("ls", "verify"):
        with pytest.raises(NothingHeldError, match=r"no checkpoints in .*; there are some of .*/run$"):
            invoke(command, tmp_path)
        assert exit_status(monkeypatch, command, tmp_path / "nothing") == 4


def test_a_directory_of_something_else_is_foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version_0").mkdir()
    with pytest.raises(ForeignStateError, match=r"holds other files \(version_0\)"):
        invoke("ls", tmp_path, "--url", tmp_path)
    assert exit_status(monkeypatch, "ls", tmp_path, "--url", tmp_path) == 5


# verify


def test_verify_finds_damage_and_repairs(run: Path) -> None:
    assert invoke("verify", run)[0] == 0
    damage(run, 2)
    code, found = invoke_json("verify", run)
    assert code == DamagedStateError.exit_code
    assert found["good"] == 1
    assert found["steps"] == [1]
    assert "step 2, attempt 1" in found["damaged"]
    assert invoke("verify", run)[0] == DamagedStateError.exit_code
    assert invoke("verify", run, "--repair")[0] == 0
    assert invoke("verify", run)[0] == 0
    assert steps_in(run) == [1]


def test_what_other_nodes_may_still_be_writing_is_not_damage(run: Path) -> None:
    """Repairing it would take a checkpoint from under a running training."""
    write(LocalStore(run / "storage"), part_of(3, node="first", world_size=2))
    code, found = invoke_json("verify", run, "--repair")
    assert code == 0
    assert found["unfinished"] == [3]
    assert steps_in(run) == [3, 2, 1]
    assert "parts of other nodes are missing (so far)" in invoke("verify", run)[1]


def test_an_old_checkpoint_without_all_parts_is_damage(run: Path) -> None:
    write(LocalStore(run / "storage"), part_of(0, node="first", world_size=2))
    code, found = invoke_json("verify", run)
    assert code == DamagedStateError.exit_code
    assert found["damaged"] == {"step 0, attempt 1": ["parts are missing"]}


def test_what_retention_deletes_meanwhile_is_not_damage(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examine = stored.examine

    def examine_late(store: Store, files: list[StoredFile], progress: Callable[[int], None] | None) -> Examined:
        if any("000000000001" in file.path for file in files):
            remove(store, read_catalog(store).checkpoints[1])
        return examine(store, files, progress)

    monkeypatch.setattr(stored, "examine", examine_late)
    code, found = invoke_json("verify", run)
    assert code == 0
    assert found["steps"] == [2]


def test_verify_shows_how_far_it_is_on_a_terminal(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(force_terminal=True, width=120, record=True)
    monkeypatch.setattr(run_view, "err", console)
    assert invoke("verify", run)[0] == 0
    assert "step 1" in console.export_text()


# export


def test_a_damaged_checkpoint_is_not_exported(run: Path, tmp_path: Path) -> None:
    damage(run, 2)
    with pytest.raises(DamagedStateError, match="step 2 is damaged"):
        invoke("export", run, "--to", tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()
    code, found = invoke_json("export", run, "--step", 1, "--format", "dcp", "--to", tmp_path / "out")
    assert code == 0
    assert found["step"] == 1
    assert found["bytes"] > 0
    state = {"model.weight": torch.zeros(2, 3)}
    torch.distributed.checkpoint.load(state, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert torch.equal(state["model.weight"], torch.arange(6.0).view(2, 3) + 1)


def test_an_export_opens_no_device(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that were on one are decoded, and steps redone, where a training may need all of its memory."""
    found: list[str | None] = []
    original = export_command._write

    def write(*arguments: Any) -> None:
        found.extend(os.environ.get(name) for name in HIDING)
        original(*arguments)

    monkeypatch.setattr(export_command, "_write", write)
    invoke("export", run, "--format", "dcp", "--to", tmp_path / "out")
    assert found == ["-1"] * len(HIDING)


def test_a_step_that_is_not_there_is_not_exported(run: Path, tmp_path: Path) -> None:
    with pytest.raises(NothingHeldError, match="expected one of the steps that the storage has, 1, 2, found step 7"):
        invoke("export", run, "--step", 7, "--to", tmp_path / "out")


@pytest.mark.parametrize("when", ["verify_files", "_write"])
def test_a_run_that_trains_may_delete_what_is_being_exported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Its newest step is wanted, whichever that is by then."""
    store = LocalStore(run / "storage")
    original = getattr(export_command, when)

    def while_training(*args: Any) -> Any:
        if not (run / "storage" / part_of(3).commit_path).exists():
            write(store, part_of(3))
            for one in read_catalog(store).checkpoints[1:]:
                remove(store, one)
        return original(*args)

    monkeypatch.setattr(export_command, when, while_training)
    code, found = invoke_json("export", run, "--format", "dcp", "--to", tmp_path / "out")
    assert code == 0
    assert found["step"] == 3
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    with pytest.raises((StorageError, DamagedStateError, NothingHeldError)):
        invoke("export", run, "--step", 2, "--format", "dcp", "--to", tmp_path / "two")


def test_an_unknown_format_is_refused_before_anything_is_read(run: Path, tmp_path: Path) -> None:
    damage(run, 2)
    with pytest.raises(ConfigurationError, match=r"expected one of .*dcp, .*torch.*, found 'onnx'"):
        invoke("export", run, "--format", "onnx", "--to", tmp_path / "out")


def test_nothing_is_written_over(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        invoke("export", run, "--to", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_without_room_nothing_is_begun(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(export_command.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageFullError, match="found 10 B"):
        invoke("export", run, "--to", tmp_path / "new" / "out")
    assert exit_status(monkeypatch, "export", run, "--to", tmp_path / "new" / "out") == StorageFullError.exit_code
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_what_is_exported_is_as_readable_as_other_files(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    from memckpt.storage import export

    def private(store: Store, found: Checkpoint, to: Path) -> None:
        to.mkdir(mode=0o700)
        (to / "inner").mkdir(mode=0o700)
        (to / "inner" / "file").touch(mode=0o600)

    monkeypatch.setattr(export, "formats", lambda: {"torch": private})
    synced: list[str] = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), sync(fd))[1])
    before = os.umask(umask)
    try:
        invoke("export", run, "--to", tmp_path / "out")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in [tmp_path / "out", *(tmp_path / "out").rglob("*")]}
    assert modes == {"out": 0o777 & ~umask, "inner": 0o777 & ~umask, "file": 0o666 & ~umask}
    names = [Path(path).name for path in synced]
    assert names[0] == "file"
    assert names[1] == "inner"
    assert names[2].startswith(".out.partial-")
    assert synced[3:] == [str(tmp_path)]


def test_an_export_that_fails_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memckpt.storage import export

    def fail(store: Store, checkpoint: Checkpoint, target: Path, form: Any) -> None:
        target.write_text("half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "export", fail)
    with pytest.raises(StorageError, match=r"could not write .*/out: .*No space left"):
        invoke("export", run, "--to", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_object_store_is_named_by_its_url(bucket: Bucket, tmp_path: Path) -> None:
    store = open_store(bucket.url)
    for record in (1, 2):
        write(store, part_of(record))
    place = (tmp_path, "--url", bucket.url)
    code, found = invoke_json("ls", *place)
    assert code == 0
    assert [one["step"] for one in found["checkpoints"]] == [2, 1]
    path = part_of(2).base_directory + "/__0_0.distcp"
    store.write(path, store.read(path)[:-1])
    assert invoke("verify", *place)[0] == DamagedStateError.exit_code
    assert invoke("verify", *place, "--repair")[0] == 0
    left = [key for key in bucket.objects() if "000000000002" in key]
    assert left
    assert all(key.startswith("damaged/") for key in left)
    assert invoke("export", *place, "--format", "dcp", "--to", tmp_path / "out")[0] == 0
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == [".metadata", "node"]
