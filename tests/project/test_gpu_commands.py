"""`make test-gpu` and `make bench-gpu`: what they run with the Python that they are given, and what it lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: A Python that has no packages at all.
BARE = f"{sys.executable} -I -S"
#: In place of a Python: it notes what it would run, says whether it has xdist, and looks for packages as another does.
STAND_IN = """#!/bin/sh
case "$*" in
    "-c import xdist") exit {xdist} ;;
    benchmarks/gpu/needs.py*) exec {python} "$@" ;;
    *) printf '%s\\n' "$@" > {noted} ;;
esac
"""


def made(target: str, room: Path, python: str = sys.executable, xdist: bool = True) -> tuple[str, list[str]]:
    """What `make` says on its error stream, and the arguments that Python got."""
    stand_in, noted = room / "python", room / "arguments"
    stand_in.write_text(STAND_IN.format(python=python, noted=noted, xdist=int(not xdist)))
    stand_in.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", target, f"PYTHON={stand_in}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == noted.exists(), done.stderr
    return done.stderr, noted.read_text().splitlines() if noted.exists() else []


@pytest.mark.parametrize("xdist", [True, False], ids=["xdist", "alone"])
def test_tests_run_six_at_a_time_where_they_can(tmp_path: Path, xdist: bool) -> None:
    _, arguments = made("test-gpu", tmp_path, xdist=xdist)
    assert arguments == ["-m", "pytest", "tests/gpu", "--device", "cuda", *(["-n", "6"] if xdist else [])]


def test_benchmarks_run(tmp_path: Path) -> None:
    assert made("bench-gpu", tmp_path)[1] == ["-m", "benchmarks.gpu"]


@pytest.mark.parametrize("target", ["test-gpu", "bench-gpu"])
def test_a_bare_python_is_told_what_it_lacks(tmp_path: Path, target: str) -> None:
    said, arguments = made(target, tmp_path, python=BARE)
    assert arguments == []
    assert f"{sys.executable} lacks torch, numpy, msgspec, xxhash, pyzmq, " in said
    assert ("pytest, pytest-timeout, hypothesis" in said) == (target == "test-gpu")
    assert ("setuptools" in said) == (target == "test-gpu" and not any(ROOT.glob("*.egg-info")))


@pytest.mark.parametrize("installed", [True, False], ids=["installed", "not-installed"])
def test_setuptools_is_needed_where_memckpt_is_not_installed(tmp_path: Path, installed: bool) -> None:
    if installed:
        points = tmp_path / "lightning_memckpt-1.dist-info" / "entry_points.txt"
        points.parent.mkdir()
        points.write_text("[memckpt.commands]\nrun = memckpt_run:main\n")
    command = [*BARE.split(), str(ROOT / "benchmarks/gpu/needs.py"), "json", "setuptools"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ("lacks setuptools." in done.stderr) != installed
    assert bool(done.returncode) != installed
