"""Tests for an accelerator, which run on a CPU as well: `make test` runs a small part there, so that no line is new.

The pytest process never touches the device: it forks the trainings, and a fork of a process that has would be broken.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.trainings.engine_harness import Lab


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """Where trainings run."""
    chosen: str = pytestconfig.getoption("--device")
    if chosen != "cpu":
        probe = "import torch; torch.zeros(1, device='cuda'); print(torch.cuda.get_device_name(), torch.__version__)"
        found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
        if found.returncode:
            pytest.exit(f"--device {chosen}: it cannot be used: {found.stderr.strip()[-400:]}", returncode=4)
        print(f"device: {found.stdout.strip()}", file=sys.__stderr__)
        # Read when a library is first used, in the children.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return chosen


@pytest.fixture
def gpu_lab(lab: Lab, device: str) -> Lab:
    """A lab whose trainings make everything on the device, with deterministic algorithms."""
    lab.device = device
    return lab
