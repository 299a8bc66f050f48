"""Runs of scripts in children forked from the pytest process, killed at one of their lines and run again."""

from __future__ import annotations

import logging
import os
import re
import runpy
import signal
import sys
from functools import partial
from pathlib import Path

from tests.support.cluster.waiting import until
from tests.support.trainings.engine_harness import Child, Lab

ROOT = Path(__file__).resolve().parents[3]
LIMIT_SECONDS = 60.0


class Scripts:
    """Runs scripts of the repository for one test, in its own directory."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.directory = lab.directory / "work"
        self.directory.mkdir()

    def start(self, script: str, *arguments: str, directory: Path | None = None) -> Child:
        """Start `python SCRIPT ARGUMENTS` in a directory."""
        directory = directory or self.directory
        directory.mkdir(exist_ok=True)
        return self.lab.fork(partial(_run, script, arguments, directory), Path(script).stem)

    def run(self, script: str, *arguments: str, directory: Path | None = None) -> str:
        """Run a script to its end; returns its output."""
        child = self.start(script, *arguments, directory=directory)
        code = child.wait(LIMIT_SECONDS)
        assert code == 0, f"exit code {code}:\n{child.log.read_text()[-4000:]}"
        return child.log.read_text()

    def killed(self, line: str, script: str, *arguments: str, directory: Path | None = None, sights: int = 1) -> str:
        """Kill a script at the first (or a later) line that begins with `line`; returns its output."""
        child = self.start(script, *arguments, directory=directory)
        seen = re.compile(rf"^{re.escape(line)}\b", re.MULTILINE)

        def there() -> bool:
            text = child.log.read_text() if child.log.exists() else ""  # the child creates it
            assert child.alive(), f"it ended before {line!r}:\n{text[-4000:]}"
            return len(seen.findall(text)) >= sights

        until(there, line, LIMIT_SECONDS, pause=0.002)
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL, f"it ended before its death:\n{child.log.read_text()[-4000:]}"
        return child.log.read_text()

    def survives(self, script: str, *arguments: str, kills: list[str]) -> list[str]:
        """Kill a script at each of these lines in turn, and compare its end with that of an undisturbed run."""
        expected = last_words(self.run(script, *arguments, directory=self.lab.directory / "undisturbed"))
        logs = [self.killed(line, script, *arguments) for line in kills]
        logs.append(self.run(script, *arguments))
        assert last_words(logs[-1]) == expected
        for log in logs[1:]:
            assert "resumed at step" in log, log[-3000:]
        return logs


def last_words(log: str) -> str:
    """The line with the digest of the weights."""
    found = re.findall(r"^done at step \d+: weights [0-9a-f]{16}$", log, re.MULTILINE)
    assert len(found) == 1, log[-3000:]
    return str(found[0])


def _run(script: str, arguments: tuple[str, ...], directory: Path) -> None:
    logging.root.handlers.clear()  # only the script's own logging matters
    os.chdir(directory)
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.argv = [script, *arguments]
    sys.path.insert(0, str((ROOT / script).parent))
    runpy.run_path(str(ROOT / script), run_name="__main__")
