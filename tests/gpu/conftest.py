"""Tests for an accelerator: on the late device, which is made of threads, unless ``--device`` says cuda or cpu.

The pytest process never touches the device: it forks the trainings, and a fork of a process that has would be broken.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.late.device import RACE, UnavailableError, library
from tests.support.trainings.engine_harness import Lab


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """Where trainings run."""
    chosen: str = pytestconfig.getoption("--device")
    if chosen == "late":
        try:
            library()
        except UnavailableError as error:
            pytest.skip(str(error))
    elif chosen != "cpu":
        probe = "import torch; torch.zeros(1, device='cuda'); print(torch.cuda.get_device_name(), torch.__version__)"
        found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
        if found.returncode:
            pytest.exit(f"--device {chosen}: it cannot be used: {found.stderr.strip()[-400:]}", returncode=4)
        print(f"device: {found.stdout.strip()}", file=sys.__stderr__)
        # Read when a library is first used, in the children.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return chosen


@pytest.fixture
def only_late(device: str) -> None:
    """Skip where a test is about the late device, or needs what it alone shows."""
    if device != "late":
        pytest.skip("needs the late device: --device late")


@pytest.fixture
def gpu_lab(lab: Lab, device: str, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A lab whose trainings make everything on the device, with deterministic algorithms, and do not race."""
    lab.device = device
    yield lab
    races = [line for log in lab.directory.glob("*.log") for line in log.read_text().splitlines() if RACE in line]
    if "interrupted" in request.node.name:  # gradients of a backward that raised are copied, and not used
        races = [race for race in races if "aten::zero_" not in race]
    assert not races, "\n".join(races[:20])
