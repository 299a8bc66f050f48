"""The scripts that show a drill's failures again: they fail while the fault is there, and pass once it is mended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memckpt_tools.drill.comparison import Difference, Verdict
from memckpt_tools.drill.repro import same_drill, scripts
from memckpt_tools.drill.stock import Blow, Plan, Result

LIMIT_SECONDS = 300
PLAN = Plan(1, 16, 7, ("step", "save", "term"), 60.0, 5.0)


def result(*blows: Blow, differences: tuple[Difference, ...] = (), repeats: bool = True) -> Result:
    verdict = Verdict("different", 16, 16, [], list(differences), [], (), {}, None)
    if not repeats:
        verdict = Verdict("within", 16, 16, [], [], [], (), {}, object())  # type: ignore[arg-type]
    return Result(verdict, list(blows), 0.01)


def difference(kind: str, step: int, restored: bool = False) -> Difference:
    return Difference(0, step, step, kind, "", None, "another one", 1, restored)


def train(tmp_path: Path, forget: str, atomic: bool = True) -> list[str]:
    """The command of a script that saves every fifth step, which is written anew."""
    (tmp_path / "train.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"from stock_scripts import plain\nplain({forget!r}, {atomic}, False, 16)\n"
    )
    return [sys.executable, "train.py"]


def run(script: str, directory: Path) -> tuple[int, list[str]]:
    """Exit status of a script, and the lines that it prints."""
    path = directory.parent / "repro.py"
    path.write_text(script)
    ended = subprocess.run(
        [sys.executable, path], cwd=directory, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert not ended.stderr, ended.stderr
    return ended.returncode, ended.stdout.splitlines()


#: It names its newest checkpoint before that is there, if it is not mended.
NAMES = """
import os, torch
def name(): open("newest", "w").write(f"{step}.pt")
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
if os.path.exists("newest"):
    model.load_state_dict(torch.load(open("newest").read()))
for step in range(1, 13):
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    mended or name()
    with open(f"{step}.pt", "wb") as file:
        torch.save(model.state_dict(), file)
    mended and name()
"""


FAILURES = {
    "torn": ("", False, Blow("save", 10, 7, 67584, "saved.pt"), "no step is trained, status 1: "),
    "optimizer": ("optimizer", True, Blow("step", 7, 7, resumed=5, difference=difference("state", 5, True)), "state: "),
    "generator": ("generator", True, Blow("term", 7, 7, resumed=5, difference=difference("loss", 6)), "loss of step 6"),
    "schedule": (
        "schedule", True, Blow("step", 7, 7, resumed=5, difference=difference("hyperparameters", 7)),
        "hyperparameters of step 7",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "torn" else pytest.mark.slow) for case in FAILURES]
)
def test_a_script_shows_a_failure_until_it_is_mended(case: str, tmp_path: Path) -> None:
    forget, atomic, blow, said = FAILURES[case]
    directory = tmp_path / "project"
    directory.mkdir()
    command = train(directory, forget, atomic)
    ((name, script),) = scripts(result(blow), (command, command), PLAN).items()
    assert name == "repro-kill-1.py"
    status, (killed, found) = run(script, directory)
    assert status == 1
    assert killed.startswith(f"Killed ({blow.kind}) behind step {10 if blow.file else 7} of process 1")
    assert found.startswith(f"The fault is there: {said}")
    train(directory, "")
    assert run(script, directory)[0] == 0
    assert [path.name for path in directory.iterdir()] == ["train.py"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["project", "repro.py"]


@pytest.mark.slow
def test_a_kill_between_two_files_is_made_again(tmp_path: Path) -> None:
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / "train.py").write_text(f"mended = False{NAMES}")
    command = [sys.executable, "train.py"]
    blow = Blow("file", 6, 6, 2, "open 6.pt", why_none="it ended")
    (script,) = scripts(result(blow), (command, command), PLAN).values()
    status, (_, found) = run(script, directory)
    assert status == 1
    assert found.endswith("No such file or directory: '6.pt'")
    (directory / "train.py").write_text(f"mended = True{NAMES}")
    assert run(script, directory)[0] == 0


def test_a_command_that_ends_before_its_kill_says_nothing_of_the_fault(tmp_path: Path) -> None:
    directory = tmp_path / "project"
    directory.mkdir()
    command = [sys.executable, "train.py"]
    (script,) = scripts(result(Blow("step", 7, 7)), (command, command), PLAN).values()
    status, (said,) = run(script, directory)
    assert status == 2
    assert "process 1 has ended before its kill, status 2: " in said


def test_each_failure_of_its_own_has_a_script_as_long_as_steps_are_known() -> None:
    command = ["python", "train.py"]
    exact, loss = Blow("step", 4, 4, resumed=4), Blow("term", 8, 4, resumed=5, difference=difference("loss", 7))
    loaded = Blow("save", 12, 5, 40000, "saved.pt", resumed=10, difference=difference("parameter", 10, True))
    inherited = Blow("step", 14, 4, resumed=12, difference=difference("loss", 13), inherited=True)
    dead = Blow("step", 15, 1, why_none='it "ended"\n\\ \x1b[31mKeyError: """')
    found = scripts(result(exact, loss, inherited, dead), (command, command), PLAN)
    assert list(found) == ["repro-kill-2.py", "repro-kill-4.py"]
    assert "KILLS = [('step', 4, 0.0), ('term', 4, 0.0)]\nSTEPS = 2 " in found["repro-kill-2.py"]
    assert 'KeyError: """' in found["repro-kill-4.py"]
    assert list(scripts(result(exact, loaded, dead), (command, command), PLAN)) == ["repro-kill-2.py"]
    assert list(scripts(result(loss, dead, repeats=False), (command, command), PLAN)) == ["repro-kill-2.py"]
    short = scripts(result(exact, differences=(difference("steps", 12),)), (command, command), PLAN)
    assert list(short) == ["repro-steps.py"]
    cut = result(dead, differences=(difference("steps", 12),))
    assert list(scripts(cut, (command, command), PLAN)) == ["repro-kill-1.py"], "a run that is over has no more steps"
    for kind in ("loss", "parameter", "state", "hyperparameters", "buffer", "frozen"):
        for restored in (False, True):
            blow = Blow("step", 4, 4, resumed=2, difference=difference(kind, 3, restored))
            found |= scripts(result(blow), (command, command), PLAN)
            for name, script in (found | short).items():
                compile(script, name, "exec")


def test_a_protected_training_is_drilled_again(tmp_path: Path) -> None:
    script = same_drill(["--seed", "7", "--kills", "0"], ["python", "train.py"], "Different: it is")
    path = tmp_path / "repro.py"
    path.write_text(script)
    ended = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert ended.returncode == 2
    assert "--kills" in ended.stderr
