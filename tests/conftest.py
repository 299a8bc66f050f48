"""Fixtures shared by the tests."""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import shares

if TYPE_CHECKING:
    from memckpt.storage.store import Store
    from tests.support.faults.s3_server import S3Server
    from tests.support.trainings.engine_harness import Lab

#: Limit on a slow test, in seconds: many cases in one, on machines that do something else, too.
_SLOW_SECONDS = 1500
_OMP_PAUSE_HARD = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="late", help="where trainings of tests/gpu run: late (of threads), cpu, cuda")
    parser.addoption("--share", default="1/1", metavar="K/N", help="one of N shares of the tests")
    parser.addoption("--cases", default="all", metavar="N", help="at most N cases of each slow test")
    parser.addoption("--draw", type=int, default=date.today().toordinal(), help="which cases; default: others each day")


def pytest_configure(config: pytest.Config) -> None:
    """Fork children as new processes; let a work tree that another one's environment runs have its own entry points."""
    os.register_at_fork(before=partial(_end_openmp_threads, os.getpid()))
    if not hasattr(config, "workerinput") and not entry_points(group="memckpt.commands"):
        egg_info = [sys.executable, "-c", "import setuptools; setuptools.setup()", "--quiet", "egg_info"]
        subprocess.run(egg_info, cwd=Path(__file__).parents[1], check=True)


def _end_openmp_threads(of_process: int) -> None:
    """End the OpenMP threads of the pytest process; a child would wait for them, which it does not have, or crash."""
    if os.getpid() != of_process or "torch" not in sys.modules:
        return
    libraries = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    for library in libraries:
        if ctypes.CDLL(library).omp_pause_resource_all(_OMP_PAUSE_HARD):
            raise RuntimeError(f"{library} did not end its threads")


def pytest_report_header(config: pytest.Config) -> str | None:
    cases = config.getoption("--cases")
    return None if cases == "all" else f"slow tests: {cases} cases of each (--draw {config.getoption('--draw')})"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    late = [item for item in items if Path(__file__).parent / "gpu" in item.path.parents]
    if config.getoption("--device") == "late" and len(late) < len(items):
        # Torch's autograd counts devices once, and children inherit that: no backward may run before in this process.
        alone = pytest.mark.skip(reason="tests of accelerators run by themselves: pytest tests/gpu")
        for item in late:
            item.add_marker(alone)
    every = [(item.nodeid, getattr(item.get_closest_marker("thinned"), "args", (1,))[0]) for item in items]
    for item, rare in zip(items, shares.thinned(every), strict=True):
        if rare:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_SLOW_SECONDS))
    try:
        share, of = shares.parse(config.getoption("--share"))
    except ValueError as error:
        raise pytest.UsageError(f"--share: {error}") from None
    cases = config.getoption("--cases")
    if cases != "all" and not re.fullmatch(r"[1-9]\d*", cases):
        raise pytest.UsageError(f"--cases: expected a number from 1, or all, found {cases!r}")
    taken = shares.taken([item.nodeid for item in items], share, of)
    left = {item for item, mine in zip(items, taken, strict=True) if not mine}
    if cases != "all":
        slow = [item for item in items if item.get_closest_marker("slow")]
        drawn = shares.drawn([item.nodeid for item in slow], int(cases), config.getoption("--draw"))
        left |= {item for item, mine in zip(slow, drawn, strict=True) if not mine}
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the faults that were injected and survived, by kind."""
    counted: dict[str, list[int]] = {}
    for report in (each for reports in terminalreporter.stats.values() for each in reports):
        for name, faults in getattr(report, "user_properties", ()):
            if name == "faults" and report.when == "call":
                for kind, numbers in faults.items():
                    counted[kind] = [sum(pair) for pair in zip(counted.get(kind, [0, 0]), numbers, strict=True)]
    if counted:
        injected, survived = (sum(column) for column in zip(*counted.values(), strict=True))
        terminalreporter.section(f"{injected} faults injected, {survived} survived")
        for kind, numbers in sorted(counted.items()):
            terminalreporter.write_line(f"{kind:34} {numbers[0]:6} {numbers[1]:6}")


@pytest.fixture(scope="session")
def _engine_imported() -> None:
    from tests.support.trainings.engine_harness import import_ahead

    import_ahead()


@pytest.fixture
def lab(_engine_imported: None, tmp_path: Path) -> Iterator[Lab]:
    """Starts trainers and agents; afterwards no process, mapping, socket or lock of theirs may be left."""
    from tests.support.trainings.engine_harness import Lab

    with closing(Lab(tmp_path)) as lab:
        try:
            yield lab
            left = lab.left_behind()
        except BaseException:
            lab.left_behind(limit=0.0)
            raise
    assert not left, "left behind:\n" + "\n".join(left)


# Stores


@dataclass(frozen=True)
class Bucket:
    """An empty bucket of an S3 server, which the environment names; boto3's client looks with other eyes than ours."""

    server: S3Server
    name: str
    client: Any

    @property
    def url(self) -> str:
        return f"s3://{self.name}/some/run"

    def objects(self) -> list[str]:
        found = self.client.list_objects_v2(Bucket=self.name).get("Contents", [])
        return [each["Key"].removeprefix("some/run/") for each in found]

    def uploads(self) -> list[str]:
        """Of what an upload has begun and not ended."""
        return [each["Key"] for each in self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])]


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[S3Server]:
    from tests.support.faults.s3_server import S3Server

    with closing(S3Server()) as server:
        yield server


@pytest.fixture
def bucket(_s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    import boto3

    for name, value in _s3_server.environment().items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    name = f"test-{secrets.token_hex(4)}"
    client.create_bucket(Bucket=name)
    try:
        yield Bucket(_s3_server, name, client)
    finally:
        _s3_server.answer_again()
        client.close()


#: A place of each kind that a store can be at; what holds for one holds for all.
PLACES: dict[str, Callable[[pytest.FixtureRequest], str]] = {
    "local": lambda request: str(request.getfixturevalue("tmp_path") / "store"),
    "memory": lambda request: f"memory://test-{secrets.token_hex(4)}",
    "s3": lambda request: request.getfixturevalue("bucket").url,
}


@pytest.fixture(params=PLACES)
def store(request: pytest.FixtureRequest) -> Store:
    """An empty store, of every kind."""
    from memckpt.storage.urls import open_store

    return open_store(PLACES[request.param](request))
