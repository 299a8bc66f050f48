"""A few exactness tests on the oldest and newest versions that the requirements allow: ``make test-versions``.

Each combination gets an environment of its own under ``build/``, one after the other; rows of the table in
``docs/versions.md`` are replaced as they are found. Needs uv beside the Python that runs it, and a package index.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "versions.md"
ROOM = ROOT / "build" / "versions"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
RESOLUTIONS = {"oldest": "lowest-direct", "newest": "highest"}
SHOWN = ("torch", "lightning", "accelerate", "transformers", "numpy")
EXTRAS = ("lightning", "accelerate", "transformers")
#: What the tests import.
NEEDS = ("pytest", "pytest-timeout", "hypothesis", "setuptools", "torchdata", "scikit-learn")
#: Kills and resumes of a plain loop and of each adapter, compared bit for bit with an undisturbed run.
TESTS = (
    *(f"tests/project/test_examples.py::test_an_example_survives[{name}.py]" for name in (
        "plain_loop", "lightning_gpt", "transformers_trainer"
    )),
    "tests/adapters/test_accelerate_launch.py::test_the_example_is_killed_and_goes_on",
    "tests/trainings/test_hand_loops.py::test_state_dicts_are_saved_as_the_same_bytes[lazy]",
)  # fmt: skip
_VERSIONS = "import json, sys; from importlib.metadata import version as v; print(json.dumps([*map(v, sys.argv[1:])]))"


def interpreter(version: str) -> str | None:
    """A Python of that version: on the path, or one of pyenv's; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True))]
    for path in filter(None, found):
        asked = subprocess.run([path, "-c", "import sys; print(*sys.version_info[:2], sep='.')"], capture_output=True)
        if asked.stdout.decode().strip() == version:  # a shim of pyenv only says that it is none
            return path
    return None


def uv(*arguments: str) -> None:
    """Run uv, with its cache beside the environments. Raises CalledProcessError."""
    program = str(Path(sys.executable).with_name("uv"))
    subprocess.run([program, *arguments], env={**os.environ, "UV_CACHE_DIR": str(ROOM / "cache")}, check=True)


def install(environment: Path, python: str, resolution: str) -> Path:
    """Make an environment with the dependencies that a resolution chooses; returns its Python."""
    uv("venv", "--quiet", "--clear", "--python", python, str(environment))
    into = ("pip", "install", "--quiet", "--python", str(environment / "bin" / "python"))
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    uv(*into, "--resolution", resolution, "--only-binary", ":all:", "-r", str(ROOT / "pyproject.toml"), *extras)
    uv(*into, *NEEDS)
    uv(*into, "--no-deps", "--editable", str(ROOT))
    return environment / "bin" / "python"


def tested(python: Path, log: Path) -> str:
    """What the tests say there, in words."""
    with log.open("w") as output:
        pytest = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
        done = subprocess.run(pytest, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False)
    failed = re.findall(r"^(?:FAILED|ERROR) (?:\S+::)?(\S+)", log.read_text(), re.MULTILINE)
    if done.returncode and not failed:
        failed = [f"pytest ({done.returncode})"]
    passed = re.search(r"(\d+) passed", log.read_text())
    print(log.read_text()[-3000:] if done.returncode else "", flush=True)
    return "; ".join([f"{passed[1] if passed else 0} passed", *(f"`{name}` failed" for name in dict.fromkeys(failed))])


def keep(version: str, which: str, cells: list[str]) -> None:
    """Write a row into the table, in the place of an earlier one."""
    head, rows, rest = re.split(r"(?<=\|\n)((?:\| 3\..*\n)*)(?=\n)", TABLE.read_text(), maxsplit=1)
    key = f"| {version} | {which} |"
    others = [row for row in rows.splitlines() if not row.startswith(key)]
    starts = [f"| {each} | {kind} |" for each in PYTHONS for kind in RESOLUTIONS]
    row = " ".join([key, " | ".join(cells), "|"])
    lines = sorted([*others, row], key=lambda line: next(n for n, each in enumerate(starts) if line.startswith(each)))
    TABLE.write_text(head + "".join(f"{line}\n" for line in lines) + rest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", nargs="*", default=PYTHONS, help="these versions of Python only")
    parser.add_argument("--which", nargs="*", default=[*RESOLUTIONS], help="oldest, newest")
    given = parser.parse_args()
    bad = 0
    for which in given.which:
        for version in given.python:
            path = interpreter(version)
            if path is None:
                keep(version, which, ["–"] * len(SHOWN) + ["no interpreter on the machine that made this table"])
                continue
            environment = ROOM / f"{version}-{which}"
            try:
                python = install(environment, path, RESOLUTIONS[which])
            except subprocess.CalledProcessError:
                keep(version, which, ["–"] * len(SHOWN) + ["cannot be installed from wheels"])
                bad += 1
                continue
            found = subprocess.run([str(python), "-c", _VERSIONS, *SHOWN], capture_output=True, check=True)
            result = tested(python, ROOM / f"{version}-{which}.log")
            bad += "failed" in result
            keep(version, which, [*json.loads(found.stdout), result])
            print(version, which, result, flush=True)
            shutil.rmtree(environment)
            uv("cache", "clean", "--quiet", "torch", "triton")  # gigabytes for each Python
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
