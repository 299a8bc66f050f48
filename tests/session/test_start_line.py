"""What a start says of a log in storage that would be the better choice, and of torchrun's shared store."""

from __future__ import annotations

import logging

import msgspec
import pytest

from memckpt.config import StorageConfig
from memckpt.session import entry
from memckpt.session.resume.report import describe_protection
from memckpt.session.tuning import tell_when_log_pays
from memckpt.state.layout import Layout
from memckpt.state.spec import StateSpec, TensorSpec
from memckpt.user_messages import nbytes_text
from tests.support.cluster.storage_node import spec_of

PLAIN = spec_of()
#: Most of the state is never trained.
FROZEN = msgspec.structs.replace(PLAIN, static=(TensorSpec("backbone", (1 << 16,), "float32"),))


def said(caplog: pytest.LogCaptureFixture, storage: StorageConfig | None, spec: StateSpec) -> str:
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="memckpt.start"):
        tell_when_log_pays(storage, spec)
    return caplog.text


def test_small_records_are_said_with_the_duration_of_steps_from_which_a_log_pays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layout = Layout(FROZEN)
    seconds = 60 * layout.logged_bytes / layout.checkpoint_bytes
    text = said(caplog, StorageConfig(), FROZEN)
    assert 'storage.mode="log" would have each step in storage' in text
    assert f"where steps take {seconds:.2g} s or longer" in text
    assert "no more than checkpoints do: a record is" in said(caplog, StorageConfig(every_steps=2), FROZEN)


@pytest.mark.parametrize(
    ("storage", "spec"),
    [
        (None, FROZEN),
        (StorageConfig(mode="log"), FROZEN),
        (StorageConfig(min_seconds=36_000), PLAIN),
        (StorageConfig(every_steps=100_000), FROZEN),
        (StorageConfig(), spec_of(dtype="complex128")),
    ],
)
def test_nothing_is_said_where_a_log_would_write_more_or_cannot_be(
    caplog: pytest.LogCaptureFixture, storage: StorageConfig | None, spec: StateSpec
) -> None:
    assert said(caplog, storage, spec) == ""


def test_the_memory_of_a_small_model_is_not_said_to_be_none() -> None:
    nbytes = Layout(PLAIN).total_bytes
    assert 0 < nbytes < 1 << 19
    line = describe_protection(PLAIN, "as configured", "streaming", "on node a", [])
    assert line.endswith(f", {nbytes_text(nbytes)} on node a")
    assert " 0 MiB" not in line


@pytest.mark.parametrize(
    ("changed", "remedy"),
    [
        ({}, "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
        ({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, "--rdzv-backend=c10d in place of --master-port"),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, None),
        ({"TORCHELASTIC_MAX_RESTARTS": "0"}, None),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, None),
        ({"LOCAL_RANK": "1"}, None),
        ({"MEMCKPT_TEST_BACKEND": "nccl"}, None),
    ],
)
def test_a_store_that_torchrun_s_restarts_share_is_said_once(
    changed: dict[str, str], remedy: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    found = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "LOCAL_RANK": "0",
        "MEMCKPT_TEST_BACKEND": "cpu:gloo,cuda:nccl",
    } | changed
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(entry.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(entry.dist, "get_backend", lambda: found["MEMCKPT_TEST_BACKEND"])
    entry._warn_of_a_shared_store()
    assert [remedy is not None and remedy in record.message for record in caplog.records] == [True] * bool(remedy)
