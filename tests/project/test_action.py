"""The action for GitHub: its steps are run as they stand, but for the installation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "tools" / "drill" / "stock_scripts.py"


@pytest.mark.slow
@pytest.mark.parametrize(("script", "found", "status"), [("plain --atomic", "equal", 0), ("plain", "different", 1)])
def test_its_steps_leave_findings_tests_a_page_and_a_badge(
    script: str, found: str, status: int, tmp_path: Path
) -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    install, drill = action["runs"]["steps"]
    assert "$GITHUB_ACTION_PATH" in install["run"]
    inputs = {name: given.get("default", "") for name, given in action["inputs"].items()}
    inputs |= {"command": f"python {SCRIPT} {script}", "options": "--stock --kinds save --kills 1 --steps 20 --seed 4"}
    values = {name: value.replace("${{ inputs.", "").replace(" }}", "") for name, value in drill["env"].items()}
    own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", drill["run"]],
        cwd=tmp_path, env={**os.environ, **own, **{name: inputs[value] for name, value in values.items()}},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == status, ended.stdout + ended.stderr
    results = tmp_path / "drill-results"
    badge = json.loads((results / "badge.json").read_bytes())
    assert (badge["schemaVersion"], badge["message"]) == (1, found)
    kill, whole = ElementTree.parse(results / "junit.xml").iter("testcase")
    assert kill.get("name", "").startswith("kill 1: save behind step ")
    assert [case.find("failure") is not None for case in (kill, whole)] == [bool(status)] * 2
    assert "Two undisturbed runs: equal" in (results / "page.html").read_text()
    assert json.loads((results / "findings.json").read_bytes())["outcome"] in ("exact", "cannot start")
