"""The copies of the working directory in which a drill runs a script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memckpt.errors import DrillError
from memckpt_tools.drill import workplace as workplace_module
from memckpt_tools.drill.command import _start
from memckpt_tools.drill.workplace import Workplace


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A working directory with results, and data beside it."""
    source = tmp_path / "home" / "project"
    (source / "out" / "csv").mkdir(parents=True)
    (source / "out" / "csv" / "metrics.csv").write_text("a\n1\n2\n")
    (source / "train.py").write_text("print()")
    (tmp_path / "home" / "data").mkdir()
    (tmp_path / "home" / "data" / "x").write_text("x")
    return source


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where a drill keeps its first run."""
    (tmp_path / "place" / "first").mkdir(parents=True)
    return tmp_path / "place"


def copied(source: Path, place: Path) -> Path:
    return Workplace(source, place).of(place / "first")


def test_what_a_run_writes_stays_in_its_copy(source: Path, place: Path) -> None:
    copy = copied(source, place)
    (copy / "out" / "csv" / "metrics.csv").write_text("overwritten")
    (copy / "out" / "last.ckpt").write_text("new")
    (copy / "train.py").unlink()
    assert (source / "out" / "csv" / "metrics.csv").read_text() == "a\n1\n2\n"
    assert sorted(path.name for path in source.rglob("*")) == ["csv", "metrics.csv", "out", "train.py"]


def test_each_run_begins_with_the_same_files(source: Path, place: Path) -> None:
    (place / "second").mkdir()
    copies = Workplace(source, place)
    first = copies.of(place / "first")
    (first / "new").touch()
    assert copies.of(place / "first") == first
    assert not (copies.of(place / "second") / "new").exists()


def test_paths_that_lead_out_of_the_directory_are_found(source: Path, place: Path) -> None:
    (source / "up").symlink_to("../data/x")
    (source / "inside").symlink_to("out/csv")
    (source / "absolute").symlink_to(source / "train.py")
    copy = copied(source, place)
    assert (copy / ".." / "data" / "x").read_text() == "x"
    assert (copy / "up").read_text() == "x"
    assert (copy / "inside").resolve() == copy / "out" / "csv"
    assert (copy / "absolute").resolve() == copy / "train.py"


def test_large_files_and_environments_are_linked_and_what_writes_to_them_is_named(
    source: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workplace_module, "_LINKED_BYTES", 100)
    (source / "weights").write_bytes(bytes(101))
    (source / "environment").mkdir()
    (source / "environment" / "pyvenv.cfg").touch()
    copies = Workplace(source, place)
    copy = copies.of(place / "first")
    assert (copy / "environment").readlink() == source / "environment"
    assert copies.changed() == []
    with (copy / "weights").open("ab") as file:
        file.write(b"more")
    assert copies.changed() == [source / "weights"]


def test_a_directory_inside_the_working_directory_is_not_copied_into_itself(source: Path) -> None:
    (source / "drill" / "first").mkdir(parents=True)
    copy = copied(source, source / "drill")
    assert not (copy / "drill").exists()
    assert (copy / "train.py").exists()


def test_earlier_drills_in_the_working_directory_are_not_copied(source: Path) -> None:
    for name in ("one", "two"):
        (source / "drills" / name / "first").mkdir(parents=True)
    Workplace(source, source / "drills" / "one").of(source / "drills" / "one" / "first")
    copy = Workplace(source, source / "drills" / "two").of(source / "drills" / "two" / "first")
    assert list((copy / "drills").iterdir()) == []


def test_a_file_that_is_written_by_its_absolute_path_is_named(source: Path, place: Path) -> None:
    copies = Workplace(source, place)
    copies.of(place / "first")
    (source / "train.py").write_text("changed")
    assert copies.changed() == [source / "train.py"]


@pytest.mark.parametrize("limit", ["_MOST_FILES", "_MOST_BYTES"])
def test_a_directory_with_too_much_is_refused_with_the_remedy(
    source: Path, place: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(workplace_module, limit, 1)
    with pytest.raises(DrillError, match="--in-place"):
        copied(source, place)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_command_runs_in_its_copy(source: Path, place: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool) -> None:
    monkeypatch.chdir(source)
    (source / "train.py").write_text("import os; open('written', 'w').write(os.getcwd() + ' ' + os.environ['PWD'])")
    monkeypatch.setenv("PWD", "as it was")
    start = _start([sys.executable, "train.py"], None if in_place else Workplace(source, place))
    command = start({}, place / "first" / "output.txt")
    assert isinstance(command, subprocess.Popen)
    assert command.wait(60) == 0
    written = source / "written"
    assert written.exists() == in_place
    where = source if in_place else place / "first" / "work" / source.relative_to("/")
    assert (where / "written").read_text() == f"{where} {'as it was' if in_place else where}"
