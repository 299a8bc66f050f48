"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import memckpt
from memckpt import errors
from memckpt.config import check_resume
from memckpt.errors import ConfigurationError, MemckptError

ROOT = Path(__file__).resolve().parents[2]


def test_the_public_names() -> None:
    assert sorted(memckpt.__all__) == [
        "AgentConfig",
        "ComparedKind",
        "ErasureConfig",
        "ExportedState",
        "HeldState",
        "MemckptConfig",
        "MemckptError",
        "ProtectionArguments",
        "RestoreReport",
        "Session",
        "StorageConfig",
        "add_arguments",
        "attach",
        "from_args",
        "load",
        "unencodable_paths",
    ]
    for name in memckpt.__all__:
        assert getattr(memckpt, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        memckpt.nothing  # noqa: B018


LIGHT = [
    "memckpt",
    "memckpt.config",
    "memckpt.config.settings",
    "memckpt.config.arguments",
    "memckpt.agent.server",
    "memckpt.agent.__main__",
    "memckpt.replication.transport.transport",
    "hydra_plugins.memckpt_searchpath",  # every Hydra application imports it
]


@pytest.mark.parametrize("module", LIGHT)
def test_importing_the_agent_does_not_import_torch(module: str) -> None:
    code = f"import {module}, sys; print([name for name in ('torch', 'numpy', 'lightning') if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip() == "[]"


def test_every_error_has_a_place_in_the_tree_and_kinds_an_exit_code_of_their_own() -> None:
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, MemckptError)]
    assert len(kinds) > 10
    direct = [each for each in kinds if each.__bases__[0] is MemckptError]
    codes = [each.exit_code for each in direct if "exit_code" in vars(each)]
    assert len(set(codes)) == len(codes)
    assert 0 not in codes


@pytest.mark.parametrize("resume", ["latest", -1, True, 1.5, None])
def test_a_resume_that_cannot_be_is_refused(resume: object) -> None:
    with pytest.raises(ConfigurationError, match="resume: expected"):
        check_resume(resume)
