"""Wheel and source archive of the last commit, in ``dist/``, checked as a user would meet them: ``make release``.

Runs with a Python that has `build` and `twine`. The wheel is installed in an empty environment, with the versions of
``constraints.txt``, and the README's plain loop runs there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
#: Most packages that an install without extras may bring by our own choice.
_CHOSEN = 12
#: Before the README's plain loop: what it takes for granted.
PLAIN = """
import torch
steps = 4
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
def train_one_step(step):
    model(torch.rand(2, 3)).sum().backward()
    optimizer.step(); scheduler.step(); optimizer.zero_grad()
"""
#: Prints what is installed, with what each requires without extras, as JSON.
_INSTALLED = """
import json, re
from importlib.metadata import distributions
def name(text): return re.match(r"[\\w.-]+", text)[0].lower().replace("_", "-")
print(json.dumps({name(one.name): [name(each) for each in one.requires or () if "extra ==" not in each]
                  for one in distributions()}))
"""


def readme_block(heading: str) -> str:
    """The Python of a section of the README."""
    section = (ROOT / "README.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    block = re.search(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    assert block is not None, heading
    return block[1]


def build(room: Path) -> tuple[Path, Path]:
    """Build the last commit's wheel and source archive into ``dist/``; returns both."""
    if changed := output("git", "status", "--porcelain", "--untracked-files=no"):
        sys.exit(f"release: expected a work tree without changes, found:\n{changed}commit or stash them first")
    output("git", "archive", "--output", str(room / "tree.tar"), "HEAD")
    with tarfile.open(room / "tree.tar") as archive:
        archive.extractall(room / "tree", filter="data")
    shutil.rmtree(DIST, ignore_errors=True)
    output(sys.executable, "-m", "build", "--outdir", str(DIST), str(room / "tree"))
    output(sys.executable, "-m", "twine", "check", "--strict", *map(str, DIST.iterdir()))
    (wheel,), (source,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    return wheel, source


def stray(wheel: Path, source: Path) -> set[str]:
    """Files that an archive has and should not have, or the reverse: the wheel has all files of the packages."""
    tracked = set(output("git", "ls-files").splitlines())
    packages = {name.partition("/")[0] for name in tracked if name.endswith("/py.typed")} | {"hydra_plugins"}
    code = {name for name in tracked if name.partition("/")[0] in packages}
    with zipfile.ZipFile(wheel) as files:
        found = {name for name in files.namelist() if ".dist-info/" not in name}
    with tarfile.open(source) as archive:
        members = {one.name.partition("/")[2] for one in archive if one.isfile()}
    made = {name for name in members if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    return (found ^ code) | (members - made - tracked) | (code - members)


def version(wheel: Path) -> str:
    """The wheel's version, which the package, the citation and the changelog have to name, too."""
    found = wheel.name.split("-")[1]
    for name, line in {
        "memckpt/__init__.py": f'__version__ = "{found}"\n',
        "CITATION.cff": f"\nversion: {found}\n",
        "CHANGELOG.md": f"\n## {found} ",
    }.items():
        if line not in (ROOT / name).read_text():
            sys.exit(f"release: expected {line.strip()!r}, as in pyproject.toml, found none in {name}")
    return found


def brought(python: str) -> tuple[set[str], set[str]]:
    """What an environment has beside torch and what torch requires: our own choice, and what that requires."""
    installed: dict[str, list[str]] = json.loads(output(python, "-c", _INSTALLED))

    def closure(name: str, seen: set[str]) -> set[str]:
        if name in installed and name not in seen:
            seen.add(name)
            for each in installed[name]:
                closure(each, seen)
        return seen

    of_torch = closure("torch", set())
    return set(installed["lightning-memckpt"]) - of_torch, closure("lightning-memckpt", set()) - of_torch


def output(*command: str, cwd: Path = ROOT) -> str:
    """Output of a command that succeeds; otherwise this process ends with it."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # pip would find memckpt there
    done = subprocess.run(
        command, cwd=cwd, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"release: {' '.join(command)[:200]} failed:\n{done.stdout[-4000:]}")
    return done.stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        room = Path(directory)
        wheel, source = build(room)
        if wrong := stray(wheel, source):
            sys.exit(f"release: expected the files of the packages, found otherwise: {', '.join(sorted(wrong))}")
        print(f"{version(wheel)}: {wheel.name}, {source.name}; metadata and files are right", flush=True)
        output(sys.executable, "-m", "venv", str(room / "new"))
        python = str(room / "new/bin/python")
        output(python, "-m", "pip", "install", "-c", str(ROOT / "constraints.txt"), str(wheel))
        chosen, all_of_them = brought(python)
        print(f"installed: {len(chosen)} packages of our choice beside torch's ({', '.join(sorted(chosen))})")
        others = sorted(all_of_them - chosen - {"lightning-memckpt"})
        print(f"           and {len(others)} that these require ({', '.join(others)})", flush=True)
        if len(chosen) >= _CHOSEN:
            sys.exit(f"release: expected fewer than {_CHOSEN} packages of our choice")
        (room / "train.py").write_text(PLAIN + readme_block("A plain loop"))
        for attempt in ("begun", "gone on with"):
            output(python, "train.py", cwd=room)
            listed = json.loads(output(str(room / "new/bin/memckpt"), "ls", "runs/plain", "--json", cwd=room))
            steps = [each["step"] for each in listed["checkpoints"]]
            if 4 not in steps:
                sys.exit(f"release: expected a checkpoint of step 4 of the README's plain loop, found {steps}")
            print(f"the README's plain loop, {attempt}: checkpoints of steps {steps}", flush=True)
    if "\n[project.urls]" not in (ROOT / "pyproject.toml").read_text():
        print("not ready to be published: pyproject.toml has no [project.urls], and the README's links are relative")


if __name__ == "__main__":
    main()
