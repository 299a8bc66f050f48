"""Settings from environment variables: every field has one, and a wrong value is an error that names it."""

from __future__ import annotations

import logging

import pytest
from accelerate import Accelerator

from accelerate_plugin import MemCheckpointPlugin
from lightning_memckpt import MemCheckpoint
from memckpt.config import AgentConfig, ErasureConfig, MemckptConfig, StorageConfig, parse_resume
from memckpt.config.arguments import (
    config_from_environment,
    resume_from_environment,
    run_dir_from_environment,
    with_environment,
)
from memckpt.config.settings import describe_settings
from memckpt.errors import ConfigurationError
from transformers_memckpt import MemCheckpointTrainerCallback


def test_nothing_set_is_the_default() -> None:
    assert config_from_environment({}) == MemckptConfig()
    assert run_dir_from_environment({}) is None
    assert resume_from_environment({}) is None


def test_every_part_can_be_set() -> None:
    found = config_from_environment(
        {
            "MEMCKPT_REDO": "lazy",
            "MEMCKPT_ANCHOR_PERIOD_STEPS": "16",
            "MEMCKPT_SLOTS": "4",
            "MEMCKPT_AGENT_LINGER_SECONDS": "3600.5",
            "MEMCKPT_AGENT_MEMORY_BUDGET_BYTES": "none",
            "MEMCKPT_STORAGE_URL": "s3://bucket/run",
            "MEMCKPT_STORAGE_EVERY_STEPS": "100",
            "MEMCKPT_STORAGE_OVERHEAD": "0.05",
            "MEMCKPT_PEERS": "erasure",
            "MEMCKPT_PEERS_DATA": "4",
            "MEMCKPT_PEERS_RATE_BYTES_PER_SECOND": "1e8",
            "HOME": "/somewhere",
        }
    )
    assert found == MemckptConfig(
        redo="lazy",
        anchor_period_steps=16,
        slots=4,
        agent=AgentConfig(linger_seconds=3600.5),
        storage=StorageConfig(url="s3://bucket/run", every_steps=100, overhead=0.05),
        peers=ErasureConfig(data=4, rate_bytes_per_second=1e8),
    )


def test_storage_can_be_left_out() -> None:
    assert config_from_environment({"MEMCKPT_STORAGE": "none"}).storage is None
    assert config_from_environment({"MEMCKPT_ANCHOR_PERIOD_STEPS": "None"}).anchor_period_steps is None


@pytest.mark.parametrize(
    ("variables", "peers"),
    [
        ({"": "erasure"}, ErasureConfig()),
        (
            {"": "erasure", "DATA": "3", "ACK": "proceed", "HOST": "eth0"},
            ErasureConfig(data=3, ack="proceed", host="eth0"),
        ),
        ({"": "none"}, None),
        ({"": "off", "DATA": "4"}, None),
        ({}, None),
    ],
)
def test_peers_are_those_that_are_named(variables: dict[str, str], peers: object) -> None:
    given = {f"MEMCKPT_PEERS_{name}".rstrip("_"): value for name, value in variables.items()}
    assert config_from_environment(given).peers == peers


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PEERS": "raid"}, "MEMCKPT_PEERS: expected erasure or none, found 'raid'"),
        ({"PEERS_ACK": "wait"}, "MEMCKPT_PEERS_ACK: expected MEMCKPT_PEERS=erasure beside it, found nothing"),
        ({"PEERS": "erasure", "PEERS_DATA": "0"}, "MEMCKPT_PEERS_DATA: expected a whole number, 1 to 32, found '0'"),
    ],
)
def test_a_setting_of_peers_that_cannot_be_is_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{message}$"):
        config_from_environment({f"MEMCKPT_{name}": value for name, value in variables.items()})


def test_every_setting_has_a_variable() -> None:
    samples = {"'auto'": "auto", "none": "none", "a whole number": "3", "a number": "0.5", "a text": "text"}
    samples |= {"'wait'": "proceed", "'curve'": "plain", "'witness'": "replay", "true or false": "true"}
    samples |= {"'keep'": "keep", "'bf16'": "fp16", "'replica'": "log"}
    for setting in describe_settings():
        value = next(sample for words, sample in samples.items() if words in setting.expected)
        beside = {f"MEMCKPT_{setting.part.upper()}": setting.variants[-1]} if setting.variants else {}
        assert isinstance(config_from_environment({setting.variable: value, **beside}), MemckptConfig), setting


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MEMCKPT_REDO", "fast", "MEMCKPT_REDO: expected 'auto', 'eager', 'lazy' or 'snapshot', found 'fast'"),
        (
            "MEMCKPT_SNAPSHOT_EVERY_STEPS",
            "three",
            "MEMCKPT_SNAPSHOT_EVERY_STEPS: expected a whole number, 1 to 1000000, found 'three'",
        ),
        ("MEMCKPT_SLOTS", "1", "MEMCKPT_SLOTS: expected a whole number, 2 to 64, or 'none', found '1'"),
        (
            "MEMCKPT_SNAPSHOT_EVERY_STEPS",
            "none",
            "MEMCKPT_SNAPSHOT_EVERY_STEPS: expected a whole number, 1 to 1000000, found 'none'",
        ),
        (
            "MEMCKPT_SNAPSHOT_EVERY_STEPS",
            "",
            "MEMCKPT_SNAPSHOT_EVERY_STEPS: expected a whole number, 1 to 1000000, found ''",
        ),
        ("MEMCKPT_ANCHOR_PERIOD_STEPS", "x", "expected a whole number, 1 to 4096, or 'none', found 'x'"),
        ("MEMCKPT_AGENT_THREADS", "0", "MEMCKPT_AGENT_THREADS: expected a whole number, 1 or more, found '0'"),
        ("MEMCKPT_STORAGE_URL", "", "MEMCKPT_STORAGE_URL: expected a text, not empty, or 'none', found ''"),
        (
            "MEMCKPT_STORAGE_OVERHEAD",
            "2",
            "MEMCKPT_STORAGE_OVERHEAD: expected a number, more than 0, at most 1, found '2'",
        ),
        (
            "MEMCKPT_STORAGE",
            "s3://b",
            "MEMCKPT_STORAGE: expected on, off or none, found 's3://b'; the location is set by MEMCKPT_STORAGE_URL",
        ),
    ],
)
def test_a_wrong_value_is_named(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        config_from_environment({name: value})
    assert message in str(raised.value)
    assert name in str(raised.value)


def test_what_is_passed_in_python_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="run_dir: expected a directory as argument or in MEMCKPT_RUN_DIR"):
        with_environment(None, None, None)
    for name, value in {"MEMCKPT_RUN_DIR": "there", "MEMCKPT_RESUME": "7", "MEMCKPT_SLOTS": "5"}.items():
        monkeypatch.setenv(name, value)
    assert with_environment(None, None, None) == ("there", 7, MemckptConfig(slots=5))
    assert with_environment("here", "auto", MemckptConfig()) == ("here", "auto", MemckptConfig())


def test_every_adapter_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MEMCKPT_RUN_DIR": "there", "MEMCKPT_RESUME": "7", "MEMCKPT_SLOTS": "5"}.items():
        monkeypatch.setenv(name, value)
    for made in (MemCheckpoint(), MemCheckpointTrainerCallback(), MemCheckpointPlugin(Accelerator(cpu=True))):
        assert (made.run_dir, made.resume, made.config) == ("there", 7, MemckptConfig(slots=5))


def test_a_variable_that_names_no_setting_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "memckpt"):
        config_from_environment({"MEMCKPT_REDOO": "lazy", "MEMCKPT_NODE": "a", "MEMCKPT_RACK": "c"})
    assert [record.getMessage() for record in caplog.records] == [
        "memckpt: the environment variable MEMCKPT_REDOO names no setting and is ignored"
    ]


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("require", "require"), ("never", "never"), ("12", 12)])
def test_resume_as_text(text: str, value: object) -> None:
    assert parse_resume(text) == value
    assert resume_from_environment({"MEMCKPT_RESUME": text}) == value


@pytest.mark.parametrize("text", ["", "always", "-1", "1.5", "１２"])
def test_a_wrong_resume_is_named(text: str) -> None:
    with pytest.raises(
        ConfigurationError, match="MEMCKPT_RESUME: expected 'auto', 'require', 'exact', 'never' or a step"
    ):
        resume_from_environment({"MEMCKPT_RESUME": text})


def test_an_empty_run_directory_is_named() -> None:
    with pytest.raises(ConfigurationError, match="MEMCKPT_RUN_DIR: expected a directory, found ''"):
        run_dir_from_environment({"MEMCKPT_RUN_DIR": ""})


def test_an_empty_run_directory_is_not_the_current_one() -> None:
    with pytest.raises(ConfigurationError, match="run_dir: expected a directory, found ''"):
        with_environment("", None, None)
