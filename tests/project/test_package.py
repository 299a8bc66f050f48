"""Wheel and source archive: both are built, have the same files, and the README's lines run where only they are.

Nothing is downloaded: the new environment sees the packages of this one, without memckpt's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.project.release import PLAIN, readme_block

ROOT = Path(__file__).parents[2]
_SECONDS = 240
_BUILD = "import sys; to = sys.argv[1]; from setuptools import build_meta as b; b.build_wheel(to); b.build_sdist(to)"
#: Before the README's block for Lightning: what it takes for granted.
_LIGHTNING = """
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader
model, train_loader = BoringModel(), DataLoader(RandomDataset(32, 16), batch_size=4)
"""
#: Printed as JSON by the new environment: where things are from.
_ORIGINS = """
import importlib, importlib.metadata, json
names = ["memckpt", "memckpt_run", "memckpt_tools", "lightning_memckpt", "accelerate_plugin",
         "transformers_memckpt", "memckpt_hydra",
         "hydra_plugins.memckpt_searchpath"]
of = importlib.metadata.distribution("lightning-memckpt")
points = [point for point in of.entry_points]
print(json.dumps({
    "files": [importlib.import_module(name).__file__ for name in names],
    "points": {f"{point.group}:{point.name}": callable(point.load()) for point in points},
}))
"""


@dataclass(frozen=True)
class Built:
    """The archives, and an environment with the wheel."""

    wheel: Path
    source: Path
    environment: Path

    def run(self, program: str, *arguments: str, cwd: Path) -> str:
        """Output of a program of the environment, run in a directory that is not the repository."""
        done = subprocess.run(
            [str(self.environment / "bin" / program), *arguments],
            cwd=cwd,
            env={"PATH": f"{self.environment}/bin:/usr/bin:/bin", "HOME": str(cwd), "OMP_WAIT_POLICY": "passive"},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def _archives(tree: Path, to: Path) -> tuple[Path, Path]:
    to.mkdir()
    subprocess.run([sys.executable, "-c", _BUILD, str(to)], cwd=tree, check=True, capture_output=True, timeout=_SECONDS)
    (wheel,), (source,) = to.glob("*.whl"), to.glob("*.tar.gz")
    return wheel, source


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Archives of the files that git tracks, or would: no build of an earlier day lies beside them."""
    room = tmp_path_factory.mktemp("package")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=_SECONDS,
    ).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            to = room / "tree" / name
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes((ROOT / name).read_bytes())
    wheel, source = _archives(room / "tree", room / "dist")
    environment = room / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=_SECONDS)
    python = environment / "bin/python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*install, str(wheel)], check=True, timeout=_SECONDS)
    (packages,) = environment.glob("lib/python*/site-packages")
    # A path from a .pth file, unlike a site directory, has its own .pth files ignored: no editable install comes along.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return Built(wheel, source, environment)


def _files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.mark.slow
def test_the_wheel_has_every_file_of_its_packages(built: Built) -> None:
    packages = (
        "memckpt", "memckpt_run", "memckpt_tools", "lightning_memckpt", "accelerate_plugin", "transformers_memckpt",
        "memckpt_hydra",
    )  # fmt: skip
    tree = built.wheel.parents[1] / "tree"
    expected = {
        str(path.relative_to(tree))
        for package in (*packages, "hydra_plugins")
        for path in (tree / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {f"{package}/py.typed" for package in packages} <= expected
    assert {"memckpt_tools/report/page.html.jinja", "memckpt_hydra/conf/memckpt/default.yaml"} <= expected
    found = {name for name in _files(built.wheel) if ".dist-info/" not in name}
    assert found == expected


@pytest.mark.slow
def test_the_source_archive_makes_the_same_wheel(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.source) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    again, _ = _archives(tree, tmp_path / "dist")
    assert _files(again) == _files(built.wheel)


@pytest.mark.slow
def test_installed_packages_and_entry_points_are_the_wheels(built: Built, tmp_path: Path) -> None:
    origins = json.loads(built.run("python", "-c", _ORIGINS, cwd=tmp_path))
    assert all(Path(file).is_relative_to(built.environment) for file in origins["files"]), origins["files"]
    groups = {point.partition(":")[0] for point in origins["points"]}
    assert {"console_scripts", "memckpt.commands", "memckpt.formats", "lightning.pytorch.callbacks_factory"} <= groups
    assert all(origins["points"].values())
    assert built.run("memckpt", "--version", cwd=tmp_path).startswith("memckpt ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heading", "before", "run_dir", "step"),
    [("Lightning", _LIGHTNING, "runs/my-run", 40), ("A plain loop", PLAIN, "runs/plain", 4)],
)
def test_the_lines_of_the_readme_run_there(
    built: Built, tmp_path: Path, heading: str, before: str, run_dir: str, step: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(before + readme_block(heading))
    built.run("python", str(script), cwd=tmp_path)
    listed = json.loads(built.run("memckpt", "ls", run_dir, "--json", cwd=tmp_path))
    assert step in [each["step"] for each in listed["checkpoints"]], listed
