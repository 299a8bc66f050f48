"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import memckpt
from memckpt import errors
from memckpt.config import AgentConfig, ErasureConfig, MemckptConfig, check_resume
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


@pytest.mark.parametrize(
    ("kind", "settings", "name"),
    [
        (MemckptConfig, {"redo": "sometimes"}, "redo"),
        (MemckptConfig, {"tap": "hook"}, "tap"),
        (MemckptConfig, {"slots": 1}, "slots"),
        (MemckptConfig, {"anchor_period_steps": 0}, "anchor_period_steps"),
        (MemckptConfig, {"snapshot_every_steps": 0}, "snapshot_every_steps"),
        (MemckptConfig, {"agent": None}, "agent"),
        (AgentConfig, {"threads": 0}, "agent.threads"),
        (AgentConfig, {"linger_seconds": -1.0}, "agent.linger_seconds"),
        (AgentConfig, {"memory_budget_bytes": 0}, "agent.memory_budget_bytes"),
        (AgentConfig, {"start_seconds": 0.0}, "agent.start_seconds"),
        (AgentConfig, {"liveness_seconds": 0.0}, "agent.liveness_seconds"),
        (AgentConfig, {"fence_seconds": 0.0}, "agent.fence_seconds"),
        (AgentConfig, {"niceness": 20}, "agent.niceness"),
        (MemckptConfig, {"peers": AgentConfig()}, "peers"),
        (ErasureConfig, {"data": 0}, "peers.data"),
        (ErasureConfig, {"tolerate": 33}, "peers.tolerate"),
        (ErasureConfig, {"ack": "sometimes"}, "peers.ack"),
        (ErasureConfig, {"security": "none"}, "peers.security"),
        (ErasureConfig, {"port": 65536}, "peers.port"),
        (ErasureConfig, {"rate_bytes_per_second": 0.0}, "peers.rate_bytes_per_second"),
        (ErasureConfig, {"overhead": 0.0}, "peers.overhead"),
        (ErasureConfig, {"domain_level": "row"}, "peers.domain_level"),
        (ErasureConfig, {"ack_timeout_seconds": 0.0}, "peers.ack_timeout_seconds"),
        (ErasureConfig, {"recovery_patience_seconds": -1.0}, "peers.recovery_patience_seconds"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused_by_name(kind: type, settings: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{name}: expected .*, found "):
        kind(**settings)


@pytest.mark.parametrize("resume", ["latest", -1, True, 1.5, None])
def test_a_resume_that_cannot_be_is_refused(resume: object) -> None:
    with pytest.raises(ConfigurationError, match="resume: expected"):
        check_resume(resume)
